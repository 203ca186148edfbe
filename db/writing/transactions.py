"""Transactions of a job's ledger: a batch of records and telemetry is written as a whole or not at all.

Decides which records of a batch can be written now, and records an event for a record that fits no table; never
retries. Called by `resihp.db.writer`, in its thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from resihp.db import migrate
from resihp.db.projection import applying
from resihp.db.projection.jobs import forget, job_of
from resihp.db.telemetry import report_rows
from resihp.errors import LedgerError
from resihp.record import journal, journal_file


class Transactions:
    """Writes batches into one ledger."""

    def __init__(self, engine: Engine, name: str, warn: Callable[[str], None]) -> None:
        """`name`: the ledger's URL with its password masked. `warn` receives a message without that name."""
        self._engine = engine
        self._name = name
        self._warn = warn
        self._schema: str | None = None
        """Schema version of the ledger at the last write; another process may upgrade the ledger in the meantime."""

    def write(
        self,
        first: journal.Record,
        records: Sequence[journal.Record],
        telemetry: report_rows.Telemetry,
        dropped: int,
        journal_path: Path | None,
    ) -> int:
        """Write one batch of the job with a journal that begins with `first`; return the ledger's `journal_seq`
        afterwards."""
        with Session(self._engine) as session, session.begin():
            self._schema = migrate.check_writable(session.connection(), self._name, self._schema)
            job = job_of(session, first)
            ready: list[journal.Record] = []
            seq = job.journal_seq
            for record in records:
                if not applying.follows(record, seq):
                    break
                if applying.overtakes(record, seq) and journal_path is not None:
                    forget(session, job)
                    journal_records = journal_file.read_packed(journal_path)
                    ready = [earlier for earlier in journal_records if earlier.seq < record.seq]
                ready.append(record)
                seq = max(seq, record.seq)
            applying.apply_all(session, job, ready)
            if any(telemetry):
                session.flush()
                report_rows.insert_all(session.connection(), job.id, telemetry)
            job.telemetry_dropped = max(job.telemetry_dropped, dropped)
            return job.journal_seq

    def write_one_by_one(
        self, first: journal.Record, records: Sequence[journal.Record], applied: int, journal_path: Path | None
    ) -> int:
        """Write each record in its own transaction, and as an event if it fits no table. Return the ledger's
        `journal_seq` afterwards.

        `applied`: the value to return if `records` is empty.
        """
        seq = applied
        for record in records:
            try:
                seq = self.write(first, [record], report_rows.Telemetry(), 0, journal_path)
            except Exception as error:
                if not rejects_rows(error):
                    raise
                self._warn(f"record {record.seq} fits no table: {first_line(error)}")
                with Session(self._engine) as session, session.begin():
                    job = job_of(session, first)
                    applying.apply_as_event(session, job, record, first_line(error))
                    seq = job.journal_seq
        return seq


def rejects_rows(error: Exception) -> bool:
    """Decide whether retrying is useless because the database works but rejects the rows."""
    return isinstance(error, IntegrityError | DataError) or not isinstance(error, DBAPIError | OSError | LedgerError)


def is_bad_statement(error: Exception) -> bool:
    """Decide whether SQLite rejects the statement itself, for example because a view has replaced a table."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def first_line(error: Exception) -> str:
    """Return the first line of the database's own message, without SQLAlchemy's additions."""
    words: object = error.orig if isinstance(error, DBAPIError) else error
    return (str(words).strip().splitlines() or [type(error).__name__])[0]
