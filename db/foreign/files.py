"""SQLite files that another user may have written, and protection from the side effects of opening them.

SQLite trusts the files beside a database. It applies a rollback journal that it finds there, and deletes the file that
this journal names as its super-journal (sqlite.org/atomiccommit.html, section 5). It creates `-wal` and `-shm` files in
the folder, and it waits for locks. So another user's file is copied through a file descriptor into a private folder,
together with its WAL, and is read there. A file of this user that a group may write is read in place, but read-only, so
that SQLite applies no journal. Called by `resihp.db.engine`, and by imports.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import stat
import struct
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from resihp.errors import LedgerError
from resihp.plain_files import is_trusted, open_plain

MAX_COPY_BYTES = 2 << 30
"""Largest size of another user's file, and of its WAL, that is copied; a ledger of a thousand jobs has some hundred
MB."""
COPY_PATIENCE_S = 2.0
"""Seconds to wait for a moment in which the file does not change."""
COPY_PAUSE_S = 0.05
PENDING_BYTE = 0x40000000
SHARED_FIRST = PENDING_BYTE + 2
SHARED_BYTES = 510
"""Number of bytes that SQLite locks in a database file (sqlite.org/src, os.h). While a reader has locked the shared
bytes, no process writes the file."""
WAL_HEADER_BYTES = 32
WAL_MODE_BYTE = 18
"""Offset of a byte in a database file that is 2 in WAL mode (sqlite.org/fileformat.html, section 1.3)."""
SQLITE_MAGIC = b"SQLite format 3\x00"
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""Start of a rollback journal's header. A journal that names a super-journal also ends with these bytes
(sqlite.org/fileformat.html, section 3)."""


def is_ours(file: Path) -> bool:
    """Decide whether only this user, or root, can have written the file and the files beside it."""
    try:
        return is_trusted(file.stat()) and is_trusted(file.parent.stat())
    except OSError:
        return False


def is_read_in_place(file: Path) -> bool:
    """Decide whether a ledger is read in place: the file is this user's, and only this user and groups of this user may
    write it."""
    return is_ours(file) or is_shared_with_group(file)


def is_shared_with_group(file: Path) -> bool:
    """Decide whether a group, but no other user, may write this user's file or the files beside it.

    A WAL beside the file must be this user's, too. A link does not qualify, because its target may be anywhere.
    """
    try:
        ledger, folder = file.lstat(), file.parent.stat()
        if not stat.S_ISREG(ledger.st_mode) or ledger.st_uid != os.geteuid() or is_ours(file):
            return False
        for suffix in ("-wal", "-shm"):
            with suppress(FileNotFoundError):
                beside = os.lstat(f"{file}{suffix}")
                if not stat.S_ISREG(beside.st_mode) or beside.st_uid not in (os.geteuid(), 0):
                    return False
    except OSError:
        return False
    is_open_to_all = (ledger.st_mode | folder.st_mode) & stat.S_IWOTH
    return folder.st_uid in (os.geteuid(), 0) and not is_open_to_all


def is_quiet_wal(file: Path) -> bool:
    """Decide whether a file is in WAL mode and no process has it open for writing: a writer has a WAL beside the file.

    Opens the file only if there is no WAL, because closing a file releases SQLite's locks for a writer in the same
    process (sqlite.org/howtocorrupt.html, 2.2).
    """
    if os.path.lexists(f"{file}-wal"):
        return False
    with suppress(OSError), file.open("rb") as ledger:
        return ledger.read(WAL_MODE_BYTE + 1)[WAL_MODE_BYTE:] == b"\x02"
    return False


def check_rollback_journal(file: Path, name: str) -> None:
    """Raise LedgerError if SQLite would delete a file or change the ledger because of another user's rollback journal.

    SQLite would do so if a rollback journal beside the ledger names a super-journal, which no transaction of resihp
    has, or if another user may have written the journal. The user who unpacks an archive owns its files, so this user's
    own ledgers are checked as well. A journal of the ledger's own writer is accepted: SQLite needs it to repair the
    ledger.
    """
    beside = Path(f"{file}-journal")
    together = f"restore {file} and its journal together, or move both away together"
    try:
        descriptor = open_plain(beside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise LedgerError(
            f"ledger {name}: {beside}: {error.strerror}; the ledger is not opened, since SQLite would apply it; "
            f"{together}"
        ) from error
    with os.fdopen(descriptor, "rb"):
        status = os.fstat(descriptor)
        if status.st_size == 0:
            return
        if reason := _other_writer(file, status):
            raise LedgerError(
                f"ledger {name}: {beside} {reason}; the ledger is not opened, since SQLite would apply it; {together}"
            )
        if _names_super_journal(descriptor):
            raise LedgerError(
                f"ledger {name}: {beside} names a super-journal, which resihp never uses; the ledger is not opened, "
                f"since SQLite would delete that file; {together}"
            )


def _other_writer(file: Path, journal: os.stat_result) -> str:
    """Return the reason why a user other than the ledger's own writers may have written its journal; empty if there is
    none.

    SQLite gives a journal the permissions of its ledger, so a group that may write both is no reason.
    """
    try:
        ledger = file.stat()
    except FileNotFoundError:
        owners, may_write = {os.geteuid(), 0}, 0
    else:
        owners, may_write = {os.geteuid(), 0, ledger.st_uid}, ledger.st_mode
    if journal.st_uid not in owners:
        return f"belongs to {_user(journal.st_uid)}"
    if journal.st_mode & ~may_write & (stat.S_IWGRP | stat.S_IWOTH):
        return "may be written by others than the ledger"
    return ""


def _user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"user {number}"


def _names_super_journal(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    start = size - len(JOURNAL_MAGIC)
    return start > 0 and os.pread(descriptor, len(JOURNAL_MAGIC), start) == JOURNAL_MAGIC


def private_copy(file: Path, name: str, *, with_journal: bool = False) -> TemporaryDirectory[str]:
    """Copy another user's SQLite file, as `ledger.db`, into a private folder, which is removed together with the
    returned object.

    The copy is a snapshot, even while the file is being written. `with_journal`: also copy the rollback journal that a
    writer of this user left, which SQLite then applies to the copy. Raises LedgerError for a file that is not a SQLite
    database, that is too large, or that its writer left unfinished.
    """
    deadline = time.monotonic() + COPY_PATIENCE_S
    while True:
        folder = TemporaryDirectory(prefix="resihp-ledger-")
        try:
            if _is_copied(file, Path(folder.name), name, with_journal=with_journal):
                return folder
        except BaseException:
            folder.cleanup()
            raise
        folder.cleanup()
        if time.monotonic() > deadline:
            raise LedgerError(
                f"ledger {name}: could not be copied for {COPY_PATIENCE_S:g} s: its job is writing to it, or was "
                "killed while writing; try again, or have its owner run resihp status"
            )
        time.sleep(COPY_PAUSE_S)


def _is_copied(file: Path, folder: Path, name: str, *, with_journal: bool) -> bool:
    """Copy the file and its WAL. Return False if they changed in the meantime, so that the copies may not match.

    Data that is appended to the WAL in the meantime does no harm: it is not part of the copy.
    """
    with ExitStack() as stack:
        try:
            ledger = open_plain(file)
            stack.callback(os.close, ledger)
            copied = [(ledger, "ledger.db")]
            wal = None
            with suppress(FileNotFoundError):
                wal = open_plain(Path(f"{file}-wal"))
                stack.callback(os.close, wal)
                copied.append((wal, "ledger.db-wal"))
            _hold_writer(ledger)
            if with_journal:
                check_rollback_journal(file, name)
                with suppress(FileNotFoundError):
                    journal = open_plain(Path(f"{file}-journal"))
                    stack.callback(os.close, journal)
                    copied.append((journal, "ledger.db-journal"))
            elif _has_rollback_journal(file):
                return False
            before = os.fstat(ledger)
            begins = b"" if wal is None else os.pread(wal, WAL_HEADER_BYTES, 0)
            if os.pread(ledger, len(SQLITE_MAGIC), 0) != SQLITE_MAGIC and before.st_size:
                raise LedgerError(f"ledger {name}: file is not a database; name another with --ledger")
            for descriptor, target in copied:
                _copy(descriptor, folder / target, name)
            if with_journal:
                check_rollback_journal(folder / "ledger.db", name)
            after = os.fstat(ledger)
            ends = b"" if wal is None else os.pread(wal, WAL_HEADER_BYTES, 0)
            is_same_wal = (wal is not None) == Path(f"{file}-wal").exists() and begins == ends
            return (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size) and is_same_wal
        except OSError as error:
            raise LedgerError(f"ledger {name}: {error.strerror or error}; name another with --ledger") from error


def _hold_writer(descriptor: int) -> None:
    """Prevent the file's writer from changing it until the descriptor is closed, as every reader does in SQLite.

    Otherwise a large file could never be copied between two changes. If the lock is not available, for example while a
    writer makes a change, do not wait: changes during the copy are detected afterwards. The lock belongs to the open
    file description: it ends with the descriptor, and releases no other lock of this process.
    """
    with suppress(OSError):
        _lock_shared(descriptor, PENDING_BYTE, 1)
        try:
            _lock_shared(descriptor, SHARED_FIRST, SHARED_BYTES)
        finally:
            _lock_shared(descriptor, PENDING_BYTE, 1, kind=fcntl.F_UNLCK)


def _lock_shared(descriptor: int, start: int, size: int, *, kind: int = fcntl.F_RDLCK) -> None:
    """Acquire or release a shared lock. Raises OSError if another process has locked the bytes for writing."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, start, size, 0))


def _has_rollback_journal(file: Path) -> bool:
    """Decide whether a transaction is in progress or was left unfinished: then the file alone is incomplete."""
    try:
        return os.lstat(f"{file}-journal").st_size > 0
    except FileNotFoundError:
        return False


def _copy(descriptor: int, target: Path, name: str) -> None:
    """Copy as many bytes as the file has at present. Raises LedgerError if the file is too large to be copied for
    reading."""
    size = os.fstat(descriptor).st_size
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > min(MAX_COPY_BYTES, free // 2):
        raise LedgerError(
            f"ledger {name}: is {size / 1e9:.1f} GB; ledgers that other users can write are copied before reading, and "
            f"at most {min(MAX_COPY_BYTES, free // 2) / 1e9:.1f} GB are copied; ask its owner for resihp db export"
        )
    with target.open("wb") as copied:
        at = 0
        while at < size and (sent := os.sendfile(copied.fileno(), descriptor, at, size - at)):
            at += sent
