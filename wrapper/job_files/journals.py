"""Finds the journal file that belongs to a job and has the most complete history.

Decides by the job's id, and by whether the file has the job's end. Writes nothing. Called by `job` and `dead_jobs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from resihp.errors import ProtocolError

if TYPE_CHECKING:
    from resihp.record import journal


def best_of(paths: Iterable[Path], uuid: str) -> tuple[Path | None, list[journal.Record]]:
    """Return the file with the most complete history of the job with this uuid, and its records; (None, []) without
    one.

    The copy is made when the job has ended. It is preferred to an original that is damaged, that lacks the job's end,
    or that belongs to an earlier job of the same name. Raises ProtocolError or OSError if a file cannot be read and
    there is no other.
    """
    from resihp.record import journal_file  # importing it takes as long as listing all jobs

    trouble: ProtocolError | None = None
    best: tuple[Path | None, list[journal.Record]] = (None, [])
    for path in paths:
        try:
            records = journal_file.read_packed(path)
        except FileNotFoundError:
            continue
        except ProtocolError as error:
            trouble = trouble or error
            continue
        if not is_journal_of(uuid, records):
            continue
        if has_ended(records):
            return path, records
        if not best[1]:
            best = (path, records)
    if trouble is not None and not best[1]:
        raise trouble
    return best


def is_journal_of(uuid: str, records: Sequence[journal.Record]) -> bool:
    """Return whether a journal belongs to the job with this uuid, and not to an earlier job in a folder of the same
    name. True if the uuid is unknown or the journal is empty."""
    from resihp.record.job_uuid import job_uuid

    if not uuid or not records:
        return True
    try:
        return job_uuid(records[0]) == uuid
    except ValueError:
        return False


def has_ended(records: Sequence[journal.Record]) -> bool:
    from resihp.record.journal import JobEnded

    return any(isinstance(record.entry, JobEnded) for record in records)
