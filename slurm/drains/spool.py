"""Drain requests for those who may not drain: one small file each, in a folder that the site's hook looks into.

A request says what is wanted; who wants it is the file's owner, which is all that the hook (`slurm/site/hook.py`)
believes. Whether it is granted is the hook's to decide, and seen in Slurm. Used by `slurm.drains.drain`.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from slurm.client import PREFIX, sanitised
from slurm.errors import SlurmError

VERSION = 1
MAX_BYTES = 4096
DEFAULT_FOLDER = Path("/var/spool/resihp")

_ASKED_BY = re.compile(r" \(asked by uid (\d+), job \d+\)\Z")


class SpoolError(SlurmError):
    """The request could not be written; nothing of it is left there."""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as the file has it. `time`: UTC, seconds since 1970. `id`: the file's name without `.json`."""

    version: int = VERSION
    id: str
    kind: Literal["drain", "undrain"]
    node: str
    job: str
    reason: str
    time: float


def folder_of(configured: str) -> Path | None:
    """The site's spool: the configured folder, the usual one where it is there, or none."""
    if configured:
        return Path(configured)
    return DEFAULT_FOLDER if DEFAULT_FOLDER.is_dir() else None


def put(folder: Path, kind: Literal["drain", "undrain"], node: str, *, job_id: str, reason: str, now: float) -> Path:
    """Write a request into the spool, whole or not at all, and return where it is. Raises SpoolError.

    Needs only the right to write there, not to list what is there: sites may keep users from seeing each other's.
    """
    request = DrainRequest(
        id=secrets.token_hex(16),
        kind=kind,
        node=node,
        job=job_id,
        reason=sanitised(reason).removeprefix(PREFIX.strip()).strip(),
        time=now,
    )
    content = msgspec.json.encode(request)
    if len(content) > MAX_BYTES:
        raise SpoolError(f"request for node {node[:64]}: {len(content)} bytes, at most {MAX_BYTES} are taken")
    name, temporary = f"{request.id}.json", f".{request.id}.tmp"
    try:
        at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SpoolError(f"spool {folder}: {error.strerror}; ask the site for its drain hook") from error
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o644, dir_fd=at), "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # whatever our umask is: the hook refuses what others may write
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=at)
            raise SpoolError(f"spool {folder}: request for node {node}: {error.strerror}") from error
    finally:
        os.close(at)
    return folder / name


def asked_by(reason: str) -> int | None:
    """For which user the site's hook has drained a node that has this reason; None if it was not the hook."""
    match = _ASKED_BY.search(reason) if reason.startswith(PREFIX) else None
    return int(match[1]) if match else None
