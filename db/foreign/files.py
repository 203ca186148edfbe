"""SQLite files that somebody else may have written, and what SQLite itself would do to whoever opens one.

SQLite trusts the files beside a database: it plays back a rollback journal that it finds there, and deletes the file
that this journal names as its super-journal (sqlite.org/atomiccommit.html, section 5); it makes `-wal` and `-shm` files
in the folder; it waits for locks. So a file that is not ours alone is copied through its descriptor into a folder of
ours, together with what its writer's WAL holds, and read there. Called by `db.engine`, and by imports.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from resihp.errors import LedgerError
from resihp.plain_files import is_trusted, open_plain

MAX_COPY_BYTES = 2 << 30
"""Of a foreign file, and of its WAL: a ledger of a thousand jobs has some hundred MB."""
COPY_PATIENCE_S = 2.0
"""How long a moment is waited for in which the file's own writer changes nothing."""
COPY_PAUSE_S = 0.05
WAL_HEADER_BYTES = 32
SQLITE_MAGIC = b"SQLite format 3\x00"
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""How a rollback journal's header begins; one that names a super-journal ends with it, too (sqlite.org/fileformat.html,
section 3)."""


def is_ours(file: Path) -> bool:
    """Tell whether only we, or root, can have written the file and what stands beside it."""
    try:
        return is_trusted(file.stat()) and is_trusted(file.parent.stat())
    except OSError:
        return False


def check_rollback_journal(file: Path, name: str) -> None:
    """Raise LedgerError where SQLite would delete a file for somebody else: a rollback journal beside the ledger names
    a super-journal, which no transaction of ours has, or was not written by us. Whoever unpacked an archive owns what
    is in it, so a ledger of ours is looked at as well."""
    beside = Path(f"{file}-journal")
    try:
        descriptor = open_plain(beside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerError(f"ledger {name}: {beside}: {error.strerror}; remove it") from error
    with os.fdopen(descriptor, "rb") as journal:
        found = os.fstat(descriptor)
        if found.st_size == 0:
            return
        if not is_trusted(found):
            raise LedgerError(f"ledger {name}: {beside} may have been put there by somebody else; remove it")
        journal.seek(max(found.st_size - len(JOURNAL_MAGIC), 0))
        if found.st_size > len(JOURNAL_MAGIC) and journal.read() == JOURNAL_MAGIC:
            raise LedgerError(f"ledger {name}: {beside} names another file to be deleted, as none does; remove it")


def private_copy(file: Path, name: str) -> TemporaryDirectory[str]:
    """Copy a SQLite file of somebody else's into a folder of ours, as `ledger.db`; the folder goes with the object.

    Of one moment, also while its writer writes. Raises LedgerError for what is no SQLite file, is too large, or is
    left half-written by its writer.
    """
    deadline = time.monotonic() + COPY_PATIENCE_S
    while True:
        folder = TemporaryDirectory(prefix="resihp-ledger-")
        try:
            if _is_copied(file, Path(folder.name), name):
                return folder
        except BaseException:
            folder.cleanup()
            raise
        folder.cleanup()
        if time.monotonic() > deadline:
            raise LedgerError(
                f"ledger {name}: its writer is in the middle of a change, or died there; try again, or have its owner "
                "run resihp status"
            )
        time.sleep(COPY_PAUSE_S)


def _is_copied(file: Path, folder: Path, name: str) -> bool:
    """Copy the file and its WAL; False where they were changed meanwhile, so that the copies do not fit each other.

    What is appended to the WAL meanwhile does no harm: its frames are simply not part of the copy.
    """
    with ExitStack() as stack:
        try:
            ledger = open_plain(file)
            stack.callback(os.close, ledger)
            wal = None
            with suppress(FileNotFoundError):
                wal = open_plain(Path(f"{file}-wal"))
                stack.callback(os.close, wal)
            if _has_rollback_journal(file):
                return False
            before = os.fstat(ledger)
            begins = b"" if wal is None else os.pread(wal, WAL_HEADER_BYTES, 0)
            if os.pread(ledger, len(SQLITE_MAGIC), 0) != SQLITE_MAGIC and before.st_size:
                raise LedgerError(f"ledger {name}: file is not a database; name another with --ledger")
            for descriptor, target in ((ledger, "ledger.db"), (wal, "ledger.db-wal")):
                if descriptor is not None:
                    _copy(descriptor, folder / target, name)
            after = os.fstat(ledger)
            ends = b"" if wal is None else os.pread(wal, WAL_HEADER_BYTES, 0)
            is_same_wal = (wal is not None) == Path(f"{file}-wal").exists() and begins == ends
            return (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size) and is_same_wal
        except OSError as error:
            raise LedgerError(f"ledger {name}: {error.strerror or error}; name another with --ledger") from error


def _has_rollback_journal(file: Path) -> bool:
    """Tell whether a transaction is under way, or was never finished: then the file alone is not whole."""
    try:
        return os.lstat(f"{file}-journal").st_size > 0
    except FileNotFoundError:
        return False


def _copy(descriptor: int, target: Path, name: str) -> None:
    """Copy as much as the file has now. Raises LedgerError where that is too much for whoever only looks."""
    size = os.fstat(descriptor).st_size
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > min(MAX_COPY_BYTES, free // 2):
        raise LedgerError(
            f"ledger {name}: belongs to somebody else, so that it is copied before it is read, and has {size} bytes; "
            "ask its owner for resihp db export"
        )
    with target.open("wb") as copied:
        at = 0
        while at < size and (sent := os.sendfile(copied.fileno(), descriptor, at, size - at)):
            at += sent
