"""Drain requests of users without the right to drain: one small file for each request, in a folder that the site's hook
reads.

A file states the request. The requesting user is the file's owner; the hook (`slurm/site/hook.py`) believes no other
statement about the user. The hook decides whether to grant the request; the result shows in Slurm. Used by
`resihp.slurm.drains.drain`.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from resihp.slurm.client import PREFIX, sanitised
from resihp.slurm.errors import SlurmError

VERSION = 1
MAX_BYTES = 4096
DEFAULT_FOLDER = Path("/var/spool/resihp")

_ASKED_BY = re.compile(r" \(asked by uid (\d+), job \d+\)\Z")


class SpoolError(SlurmError):
    """The request could not be written; no part of it remains in the spool."""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as stored in its file. `time`: UTC, seconds since 1970. `id`: the file's name without `.json`."""

    version: int = VERSION
    id: str
    kind: Literal["drain", "undrain"]
    node: str
    job: str
    reason: str
    time: float


def folder_of(configured: str) -> Path | None:
    """Return the site's spool folder: the configured one, else the default one if it exists, else None."""
    if configured:
        return Path(configured)
    return DEFAULT_FOLDER if DEFAULT_FOLDER.is_dir() else None


def put(folder: Path, kind: Literal["drain", "undrain"], node: str, *, job_id: str, reason: str, now: float) -> Path:
    """Write a request into the spool, as a whole or not at all, and return its path. Raises SpoolError.

    Requires only the right to write into the folder, not to list it: sites may prevent users from seeing each other's
    requests.
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
                os.fchmod(file.fileno(), 0o644)  # whatever the umask: the hook refuses files that others may write
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
    """Return the uid of the user for whom the site's hook set this reason; None if the hook did not set it."""
    match = _ASKED_BY.search(reason) if reason.startswith(PREFIX) else None
    return int(match[1]) if match else None
