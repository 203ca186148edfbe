"""Ends a job after its supervisor's death: writes the job's end into its journal, and copies the journal to its folder.

Decides whether a job needs an end, and restores a journal from its copy. Never ends a job that has a supervisor. Called
by commands that look at a job of ours, and by the guardian of a supervisor that has died.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from resihp.errors import LedgerError, ProtocolError
from resihp.wrapper.job_files.job import Job, OurJob, is_succeeded, take_lock
from resihp.wrapper.job_files.journals import has_ended, is_journal_of
from resihp.wrapper.job_files.registered import note_end
from resihp.wrapper.strict_modes import is_own, read_plain, write_private

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

    from resihp.record.journal import Record


def finish_dead_job(job: OurJob, reason: str = "the supervisor was found dead", *, locked: bool = False) -> bool:
    """Write the end of a job that no longer has a supervisor; return whether an end was written.

    Does nothing if a supervisor holds the lock, if agents of the job run on this machine (they elect a successor, or
    end within a minute), if the job has ended or has not begun, if its journal is on another machine, if it is another
    user's job, or if its folder is read-only. An end that the job itself recorded is kept: if
    its exit code or the copy of its journal exists, nothing is overwritten, and an original journal without an end is
    restored from the copy. Then the ledger is brought up to date with the journal. `locked`: our guardian already holds
    the lock.
    """
    path = job.journal_file
    if not _may_write_end(job, path, locked=locked):
        return False
    lock = None if locked else take_lock(job)
    if lock is None and not locked:
        return False
    try:
        if not _lacks_end(job, path) or (not locked and agents_of(job)):
            return False
        _write_end(job, path, reason)
    except OSError as error:
        if locked:
            raise
        _warn(f"the end of job {job.name} cannot be written: {error.filename or job.folder}: {error.strerror}")
        return False
    finally:
        if lock is not None:
            os.close(lock)
    return True


def agents_of(job: Job) -> list[psutil.Process]:
    """Return the processes of the job's agents on this machine: live processes that were started with its run file."""
    import psutil

    processes = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "resihp.wrapper.agent.process" in command and str(job.run_file) in command:  # a zombie has no command line
            processes.append(process)
    return processes


def _may_write_end(job: OurJob, path: Path, *, locked: bool) -> bool:
    """Return whether the journal at `path` is on this machine, belongs to this job, and has no other writer."""
    if not job.is_writable or not is_own(path.parent) or not path.exists():
        return False
    if path.parent.name != job.place_name and not job.may_name(path):
        # the folder may come from another user's archive, and the path may lead to another job's journal or to any file
        return False
    if job.read().host != socket.gethostname() and not locked:
        return False  # the journal on this machine belongs to an earlier job of the same name
    return not is_succeeded(path)


def _lacks_end(job: OurJob, path: Path) -> bool:
    """Return whether neither the journal nor its copy has the job's end. If only the copy has it, restore the journal.

    Raises ProtocolError for a journal that cannot be read.
    """
    from resihp.record import journal_file

    try:
        records = journal_file.read_packed(path)
    except ProtocolError as error:
        if _is_restored(job, []):
            return False
        raise ProtocolError(f"job {job.name}: {error}") from error
    if not records or has_ended(records) or not is_journal_of(job.read().uuid, records):
        return False
    return not (_is_restored(job, records) or job.exit_code_file.exists())


def _write_end(job: OurJob, path: Path, reason: str) -> None:
    """Write the job's end into the journal, its copy, the exit code file, the registry and the ledger."""
    from resihp.record import journal, journal_file

    writer = journal_file.Journal(path)
    entry = journal.JobEnded(exit_code=1, state="abnormal", reason=reason)
    writer.append(entry, time.time())
    writer.close()
    copy_journal(job)
    write_private(job.exit_code_file, b"1\n")
    note_end(job)
    url = None
    try:
        url = job.ledger_url
    except LedgerError as error:
        _warn(f"the end of job {job.name} is not in its ledger: {error}")
    if url is not None:
        from resihp.db.writing.catch_up import catch_up

        catch_up(url, job.folder, path)


def _warn(text: str) -> None:
    printable = "".join(letter if letter.isprintable() else "?" for letter in text)
    print(f"resihp: warning: {printable}", file=sys.stderr)


def _is_restored(job: OurJob, records: Sequence[Record]) -> bool:
    """Restore the journal from its copy, if the copy has the job's end and the same first record; return whether that
    was done. `records`: content of the original journal, empty if it cannot be read."""
    from resihp.record import journal_file

    try:
        copied = journal_file.read_packed(job.journal_copy)
    except (OSError, ProtocolError):
        return False
    if not has_ended(copied) or not is_journal_of(job.read().uuid, copied) or (records and copied[0] != records[0]):
        return False
    with suppress(OSError):  # for example if the journal's path is a folder
        write_private(job.journal_file, read_plain(job.journal_copy, journal_file.MAX_FILE_BYTES), sync=True)
        return True
    return False


def copy_journal(job: OurJob) -> None:
    """Copy the journal to the job's folder."""
    source = job.journal_file
    if source.exists():
        write_private(job.journal_copy, source.read_bytes())
