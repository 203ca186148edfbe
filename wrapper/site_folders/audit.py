"""The site's audit of decisions: one JSON line for each decision, in one file for each user and month.

A user's jobs write with the user's rights, so the file belongs to the user, and everybody with the right to list the
folder reads it. The jobs only append; the owner of a file can change it all the same, unless the site prevents that
(docs/administrators.md). Decides nothing: `resihp.wrapper.sinks.audit` and `resihp node` say which lines to write.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from resihp.wrapper.site_folders.folder import (
    SiteFolderError,
    check_writable,
    file_mode,
    opened,
    printable,
    user_of,
)

AUDIT_KEY = "audit"
LINE_SCHEMA = 1
MAX_TEXT = 300
"""Largest number of characters of a reason; other texts are shorter."""
MAX_NAME = 128
MAX_LINE_BYTES = 4096
LOCK_PATIENCE_S = 2.0
"""How long to wait for the file's lock, in seconds. On NFS, two machines that append at once would overwrite each
other. Every reader of the file can hold its lock, so the line is written without it afterwards."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision about the cluster. `id`: of the line; a line that was written twice has the same id twice."""

    id: str
    at: float
    cluster: str
    job: str
    decision: str
    outcome: str
    node: str | None = None
    reason: str = ""
    exit_code: int | None = None


def line(decision: Decision) -> bytes:
    """Return the line for a decision: JSON, at most `MAX_LINE_BYTES`, without control characters."""
    uid = os.geteuid()
    fields: dict[str, object] = {
        "schema": LINE_SCHEMA,
        "id": printable(decision.id, MAX_NAME),
        "time": datetime.fromtimestamp(decision.at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "cluster": printable(decision.cluster, MAX_NAME),
        "job": printable(decision.job, MAX_NAME),
        "uid": uid,
        "user": user_of(uid),
        "node": None if decision.node is None else printable(decision.node, MAX_NAME),
        "decision": decision.decision,
        "outcome": decision.outcome,
        "reason": printable(decision.reason, MAX_TEXT),
    }
    if decision.exit_code is not None:
        fields["exit_code"] = decision.exit_code
    return msgspec.json.encode(fields) + b"\n"


def check(folder: Path) -> None:
    """Raise SiteFolderError if this user's lines cannot be appended. Writes nothing."""
    check_writable(folder, AUDIT_KEY)
    name = _file_name()
    with opened(folder, AUDIT_KEY) as at, suppress(FileNotFoundError):
        _check(folder, name, os.stat(name, dir_fd=at, follow_symlinks=False))


def _file_name() -> str:
    return f"{os.geteuid()}-{datetime.now(UTC):%Y-%m}.jsonl"


def append(folder: Path, content: bytes) -> None:
    """Append one line to this user's file of this month. Raises SiteFolderError.

    The file must belong to this user, be no link, and have no other name; it is created readable by all.
    """
    assert len(content) <= MAX_LINE_BYTES
    name = _file_name()
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    with opened(folder, AUDIT_KEY) as at:
        try:
            descriptor = os.open(name, flags, file_mode(at), dir_fd=at)
        except OSError as error:
            raise _failed(folder, name, (error.strerror or "cannot be opened").lower()) from None
        try:
            _check(folder, name, os.fstat(descriptor))
            _lock(descriptor)
            _write(descriptor, content, file_mode(at))
        except OSError as error:
            raise _failed(folder, name, (error.strerror or "cannot be written").lower()) from None
        finally:
            os.close(descriptor)


def _check(folder: Path, name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _failed(folder, name, "is no plain file")
    if status.st_uid != os.geteuid():
        raise _failed(folder, name, f"belongs to {user_of(status.st_uid)}")
    if status.st_nlink != 1 or status.st_mode & 0o022:
        raise _failed(folder, name, "has another name, or others may write it")


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return


def _write(descriptor: int, content: bytes, mode: int) -> None:
    """Write the line as a whole or, on a full disk, not at all. Raises OSError."""
    before = os.fstat(descriptor).st_size
    if before == 0:
        with suppress(OSError):  # the file may be append-only already
            os.fchmod(descriptor, mode)  # whatever the umask: operators read it
    elif os.pread(descriptor, 1, before - 1) != b"\n":
        content = b"\n" + content  # after a line that a full disk cut short
    written = os.write(descriptor, content)
    if written == len(content):
        return
    with suppress(OSError):  # the file may be append-only
        if os.fstat(descriptor).st_size == before + written:
            os.ftruncate(descriptor, before)
    raise OSError(None, "no space left for a whole line")


def _failed(folder: Path, name: str, words: str) -> SiteFolderError:
    return SiteFolderError(f"[site] {AUDIT_KEY} {folder / name}: {words}; tell the administrator")
