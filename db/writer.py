"""The only writer of a job's ledger: takes journal records and telemetry, and writes them in the background.

The supervisor calls `submit` and `telemetry`, which return at once, whatever the state of the database. A separate
thread writes in batches, one transaction each, and retries with growing pauses while the database is unavailable.
Iterations and telemetry wait for some seconds, unless another record takes them along (`resihp.db.writing.pacing`).
Journal records are never dropped: they wait in memory, or, if too many wait, are read from the journal again. Telemetry
is dropped if its queue is full; the number of dropped rows is recorded. Decides nothing about the job.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import URL, Engine
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.orm import Session

from resihp.db import migrate
from resihp.db.engine import file_of, is_on_network, make_engine, masked, prepare_folder, refusal, resolve
from resihp.db.file_systems import file_system
from resihp.db.projection.jobs import last_written_seq, own_job
from resihp.db.telemetry import report_rows
from resihp.db.telemetry.queue import TelemetryQueue
from resihp.db.writing.daily_pruning import DailyPruning
from resihp.db.writing.pacing import BATCH_S, Pacing
from resihp.db.writing.record_queue import RecordQueue
from resihp.db.writing.transactions import Transactions, first_line, is_bad_statement, rejects_rows
from resihp.errors import LedgerError
from resihp.record import journal, journal_file
from resihp.record.job_uuid import job_uuid

TELEMETRY_ROWS = 50_000
RECORDS_IN_MEMORY = 20_000
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
_log = logging.getLogger("resihp.ledger")


class Ledger:
    """The open ledger of one job, with its writer's thread. Any thread may call `submit`, `telemetry`, `close`."""

    def __init__(
        self,
        url: URL,
        *,
        say: Callable[[str], None] | None = None,
        journal_path: Path | None = None,
        telemetry_rows: int = TELEMETRY_ROWS,
        records_in_memory: int = RECORDS_IN_MEMORY,
        keep_s: float | None = None,
    ) -> None:
        """Do not call this directly: `Ledger.open` checks and migrates the ledger first."""
        self.url = url.render_as_string(hide_password=False)
        """Absolute URL, with its password. Messages use `name`, in which the password is masked."""
        self.name = masked(url)
        self._url = url
        self._opened: tuple[int, int] | None = None
        self._lacks_tables = False
        self._say_to = say
        self._engine: Engine = make_engine(url, write=True)
        self._transactions = Transactions(self._engine, self.name, self._warn)
        self._pruning = DailyPruning(self._engine, keep_s, self._warn)
        self._records = RecordQueue(records_in_memory, journal_path)
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._pacing = Pacing(is_server=file_of(url) is None)
        self._telemetry = TelemetryQueue(telemetry_rows, self._written, self._pacing.closing, self._warn)
        self._deadline = float("inf")
        self._failing = False
        self._hopeless = False
        """Whether the database rejects the waiting records themselves, so that waiting for them is useless."""
        # A daemon, since a hung file system must not keep the process from ending; it reports records that it could not
        # write.
        self._thread = threading.Thread(target=self._write_until_closed, name="ledger", daemon=True)

    @classmethod
    def open(
        cls,
        url: str,
        job_folder: Path,
        *,
        say: Callable[[str], None] | None = None,
        journal_path: Path | None = None,
        telemetry_rows: int = TELEMETRY_ROWS,
        records_in_memory: int = RECORDS_IN_MEMORY,
        keep_s: float | None = None,
    ) -> Ledger:
        """Open the ledger at `url` (`sqlite` alone: in the job's folder), and start writing. A missing ledger is
        created. A file of an older schema is upgraded, a server's ledger is not (`resihp.db.migrate.make_ready`). A
        newer ledger is written if it permits this.

        `say` receives one-line warnings, in the writer's thread; without it they are logged. With `journal_path`,
        records that accumulate while the database is unavailable are read from the journal again instead of being kept
        in memory. With `keep_s`, telemetry of the user's jobs that is older than this is removed once a day
        (`resihp.db.retention.prune_telemetry`). Raises LedgerError of one line, with the password masked, if the ledger
        cannot be written.
        """
        parsed = resolve(url, job_folder)
        prepare_folder(parsed)
        migrate.make_ready(parsed.render_as_string(hide_password=False))
        ledger = cls(
            parsed,
            say=say,
            journal_path=journal_path,
            telemetry_rows=telemetry_rows,
            records_in_memory=records_in_memory,
            keep_s=keep_s,
        )
        try:
            if file_of(parsed) is not None:
                with ledger._engine.connect():
                    ledger._opened = _identity(parsed)
        except (DBAPIError, OSError) as error:
            raise refusal(parsed, error) from error
        if is_on_network(parsed):
            kind = file_system(Path(parsed.database or "").parent)
            ledger._say(f"ledger {ledger.name}: on {kind}, opened without WAL; readers may wait for the writer")
        ledger._thread.start()
        return ledger

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, record: journal.Record) -> None:
        """Queue one journal record; records must come in order. Never waits, and never raises a database error."""
        with self._lock:
            self._records.put(record)
            self._telemetry.note(record.entry)
        self._wake_writer(record.entry)

    def telemetry(self, rows: Iterable[Mapping[str, Any]] | Iterable[report_rows.Report]) -> None:
        """Queue rank reports: mappings, or tuples, of iteration, epoch, rank, seconds, compute_seconds.

        Reports beyond the queue's capacity are dropped and counted. Tuples are cheaper for the caller.
        """
        self._telemetry.put_reports(rows)
        self._wake_writer()

    def scores(self, iteration: int, scores: Iterable[tuple[int, float | None, float]]) -> None:
        """Queue the detector's scores of ranks after an iteration, as telemetry: (rank, level, evidence)."""
        self._telemetry.put_scores(iteration, scores)
        self._wake_writer()

    def _wake_writer(self, entry: journal.Entry | None = None) -> None:
        """Wake the writer's thread: a record with `entry` was queued, or telemetry. If half of a queue's capacity is in
        use, make it write at once."""
        with self._lock:
            is_crowded = self._records.is_crowded or self._telemetry.is_crowded
        self._pacing.queued(entry)
        if is_crowded and not self._failing:
            self._pacing.hurry()

    def catch_up(self, journal_path: Path) -> None:
        """Queue the journal's records that the ledger lacks, to be written in the background like all others.

        If a job's journal is taken over, call this before `submit`: the journal's first record identifies the job.
        Raises ProtocolError or OSError if the journal cannot be read.
        """
        packed = journal_file.read_packed(journal_path)
        written = self._last_written_of(packed[0]) if packed else 0
        with self._lock:
            self._records.take_over(journal_path, packed, written)
        self._pacing.soon()

    def _last_written_of(self, first: journal.Record) -> int:
        """Return the number of a job's last record in the ledger; 0 if unreadable. `first`: its first record."""
        try:
            with Session(self._engine) as session:
                return last_written_seq(session, first)
        except (DBAPIError, OSError):
            return 0

    def check_own(self) -> None:
        """Raise LedgerError if the job belongs to another database user, since retrying would be useless. To be called
        after `catch_up`."""
        first = self._records.first
        if first is None or not isinstance(first.entry, journal.JobStarted) or file_of(self._url) is not None:
            return
        try:
            with Session(self._engine) as session:
                own_job(session, job_uuid(first), first.entry.job)
        except DBAPIError as error:
            raise refusal(self._url, error) from error

    @property
    def dropped(self) -> int:
        """Number of telemetry rows, which are rank reports and scores, that were not written and never will be."""
        with self._lock:
            return self._telemetry.dropped

    @property
    def behind(self) -> int:
        """Number of journal records that are queued and not written yet; a lower bound while the journal is being read
        again."""
        with self._lock:
            return self._records.behind

    @property
    def applied(self) -> int:
        """Number of the last journal record that was written."""
        with self._lock:
            return self._records.applied

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all that was queued is written; return False if this takes longer than `timeout_s`."""
        self._pacing.hurry()
        with self._lock:
            seq = self._records.last_submitted
            self._written.wait_for(lambda: self._hopeless or self._is_written(seq), timeout_s)
            return self._is_written(seq)

    def _is_written(self, seq: int) -> bool:
        return self._records.applied >= seq and self._telemetry.is_empty

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write the queued records, for at most `timeout_s`, and stop. Return False if some were not written; they are
        still in the journal."""
        self._deadline = time.monotonic() + timeout_s
        self._pacing.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s + BATCH_S)
        if self._thread.is_alive():
            self._say(f"ledger {self.name}: does not answer; the next resihp status brings in what it lacks")
            return False
        self._engine.dispose()
        with self._lock:
            complete = self._records.applied >= self._records.last_submitted
        if not complete:
            self._say(f"ledger {self.name}: incomplete; the next resihp status brings in what it lacks")
        return complete

    # --- the writer's thread -----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        try:
            if self._say_to is None:
                _log.warning("%s", text)
            else:
                self._say_to(text)
        except Exception:  # noqa: BLE001 - the listener may end before us; the writer continues
            _log.exception("%s", text)

    def _warn(self, text: str) -> None:
        self._say(f"ledger {self.name}: {text}")

    def _write_until_closed(self) -> None:
        pause_s = FIRST_PAUSE_S
        reported: set[str] = set()
        while True:
            self._pacing.wait()
            began = time.monotonic()
            try:
                while self._write_batch():
                    pause_s = FIRST_PAUSE_S
                self._prune()
                self._pacing.took_s = time.monotonic() - began
            except Exception as error:  # noqa: BLE001 - after any error training continues and the records are kept
                self._engine.dispose()
                self._lacks_tables = isinstance(error, ProgrammingError) or "no such table" in str(error)
                with self._lock:
                    self._hopeless = rejects_rows(error) or (not self._lacks_tables and is_bad_statement(error))
                    self._written.notify_all()
                words = first_line(error)
                if not self._failing or (isinstance(error, LedgerError) and words not in reported):
                    self._failing = True
                    reported.add(words)
                    words = words.removeprefix(f"ledger {self.name}: ")
                    self._say(f"ledger {self.name}: cannot be written, {words}; retrying, the job continues")
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    return
                if self._pacing.closing.is_set():
                    time.sleep(min(random.uniform(0.5, 1.0) * FIRST_PAUSE_S, left_s))
                else:
                    self._pacing.pause(random.uniform(0.5, 1.0) * pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                self._pacing.soon()
                continue
            self._hopeless = False
            if self._failing:
                self._failing = False
                reported.clear()
                self._say(f"ledger {self.name}: written again, no journal record is missing")
            if self._pacing.closing.is_set() and not self._pacing.is_awake:
                return

    def _recreate_if_removed(self) -> None:
        """Recreate the ledger if its file was removed or replaced, or if its tables were dropped: SQLite would
        otherwise continue to write to a file that can no longer be opened. Raises LedgerError."""
        was_replaced = self._opened is not None and _identity(self._url) != self._opened
        if not (was_replaced or self._lacks_tables):
            return
        self._engine.dispose()
        migrate.make_ready(self.url)
        self._opened = _identity(self._url)
        self._lacks_tables = False
        with self._lock:
            self._records.start_again()
        if was_replaced:
            self._say(
                f"ledger {self.name}: its file was removed; recreated, its rows are written again from the journal"
            )

    def _write_batch(self) -> bool:
        """Write one batch; return True if more may be queued. After an error of the database, the queues keep all."""
        with self._lock:
            first = self._records.first
        self._telemetry.condense(first)
        self._recreate_if_removed()
        with self._lock:
            is_read_again = self._records.is_read_again
            path, applied = self._records.journal_path, self._records.applied
        journal_records: list[journal.Record] | None = None
        if is_read_again and path is not None:
            journal_records = journal_file.read_packed(path)
        with self._lock:
            if journal_records is not None:
                self._records.refill(journal_records, applied)
            first = self._records.first
            records = self._records.batch()
            batch = self._telemetry.batch()
        if first is None or not (records or self._telemetry.has_content(batch)):
            return False  # the journal's first record identifies the job
        telemetry, given = self._telemetry.rows_of(batch)
        dropped = given - len(telemetry.reports)
        dropped_written = batch.dropped + dropped
        try:
            seq = self._transactions.write(first, records, telemetry, dropped_written, self._records.journal_path)
        except Exception as error:
            if not rejects_rows(error):
                raise
            seq = self._transactions.write_one_by_one(first, records, self._records.applied, self._records.journal_path)
            dropped, dropped_written = given, self._telemetry.dropped_written
            if telemetry.reports:
                self._warn(f"{len(telemetry.reports)} rank reports dropped: {first_line(error)}")
        with self._lock:
            can_go_on = self._records.forget(records, seq, handed_over=journal_records is None)
            self._telemetry.remove(batch, dropped, dropped_written)
            more = can_go_on and self._has_more()
            self._written.notify_all()
        return more

    def _has_more(self) -> bool:
        """Decide whether any records or telemetry are queued. The caller must have acquired the lock."""
        if self._records.is_read_again or len(self._records) > 0:
            return True
        return not self._telemetry.is_empty or self._telemetry.dropped != self._telemetry.dropped_written

    def _prune(self) -> None:
        with self._lock:
            first = self._records.first
        if first is not None and not self._pacing.closing.is_set():
            self._pruning.prune(first.entry)


def _identity(url: URL) -> tuple[int, int] | None:
    """Return device and inode of SQLite's current file; None for a server, or if the file does not exist."""
    file = file_of(url)
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)
