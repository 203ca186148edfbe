"""The only writer of a job's ledger: takes journal records and telemetry, and writes them in the background.

The supervisor calls `submit` and `telemetry`, which return at once, regardless of the database. A separate thread
writes in batches, one transaction each, and retries with growing pauses while the database is unavailable. Journal
records are never dropped: they wait in memory, or, if too many wait, are read again from the journal. Telemetry is
dropped when its queue is full, and counted. Decides nothing about the job.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, takewhile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.orm import Session

from db import migrate
from db.engine import file_of, file_system, is_on_network, make_engine, masked, prepare_folder, refusal, resolve
from db.projection import applying
from db.projection.jobs import forget, job_of, last_written_seq, own_job
from db.retention import prune_telemetry
from db.telemetry import report_rows
from resihp.errors import LedgerError, ResihpError
from resihp.record import journal, journal_file
from resihp.record.job_uuid import job_uuid
from resihp.record.packing import unpack

if TYPE_CHECKING:
    from db.telemetry.condensed import Condensed

BATCH_S = 0.2
SERVER_BATCH_S = (2.0, 5.0)
"""Seconds between two batches of a job to a server; each batch opens a connection. Drawn at random, since hundreds of
jobs that begin at once would otherwise write at once forever. `flush` and `close` do not wait for it."""
MAX_CONNECTED_SHARE = 0.04
"""Largest share of its time that a job is connected to a server: a server slowed by hundreds of writers is used
less."""
MAX_GATHER_S = 30.0
BATCH_RECORDS = 500
TELEMETRY_ROWS = 50_000
PRUNE_EVERY_S = 86400.0
RANKS_KEPT_WHOLE = 1024
"""Ranks up to which every report of a job is kept; above that, `db.telemetry.condensed` selects."""
RECORDS_IN_MEMORY = 20_000
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
_log = logging.getLogger("resihp.ledger")


class Ledger:
    """An open ledger. `submit`, `telemetry` and `close` may be called from any thread."""

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
        """Use `Ledger.open` instead, which checks and migrates first."""
        self.url = url.render_as_string(hide_password=False)
        """Absolute, with its password; messages use `name`."""
        self.name = masked(url)
        self._url = url
        self._took_s = 0.0
        """Seconds that the last batches took."""
        self._opened: tuple[int, int] | None = None
        self._lacks_tables = False
        self._schema: str | None = None
        """Schema version of the ledger at the last write: somebody may upgrade it while we write."""
        self._say_to = say
        self._engine: Engine = make_engine(url, write=True)
        self._journal_path = journal_path
        self._records: deque[journal.Record] = deque()
        self._first: journal.Record | None = None
        self._reports = report_rows.Waiting(telemetry_rows)
        self._scores: list[report_rows.Score] = []
        self._most_scores = telemetry_rows
        self._keep_s = keep_s
        self._prune_at = time.monotonic() if keep_s else float("inf")
        self._condensed: Condensed | None = None
        """State of telemetry for a job of more than `RANKS_KEPT_WHOLE` ranks; only the writer's thread changes it."""
        self._finding = False
        self._most_records = records_in_memory
        self._reread = False
        self._last_submitted = 0
        self._dropped = 0
        self._dropped_written = 0
        self._applied = 0
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._hurry = threading.Event()
        self._deadline = float("inf")
        self._failing = False
        self._hopeless = False
        """Whether the records themselves cannot be written, so that waiting for them is useless."""
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
        """Open the ledger at `url` (`sqlite` alone: in the job's folder), and start writing. The ledger is created if
        missing; a file is upgraded, a server is not (`db.migrate.make_ready`), and a newer ledger is written if it
        permits that.

        `say` takes one-line warnings, from the writer's thread; without it they are logged. With `journal_path`,
        records that pile up while the database is away are read again from there instead of kept in memory. With
        `keep_s`, older telemetry of the user's jobs is removed once a day (`db.retention.prune_telemetry`). Raises
        LedgerError of one line, the URL's password masked, if the ledger cannot be written.
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
        """Hand over one journal record, in order. Never waits, and never raises an error of the database."""
        with self._lock:
            if record.seq == 1:
                self._first = record
            if self._journal_path is not None and len(self._records) >= self._most_records:
                self._records.clear()
                self._reread = True
            self._records.append(record)
            self._last_submitted = max(self._last_submitted, record.seq)
            self._finding |= _is_finding(record.entry)
        self._wake_writer()

    def telemetry(self, rows: Iterable[Mapping[str, Any]] | Iterable[report_rows.Report]) -> None:
        """Hand over rank reports: mappings, or tuples, of iteration, epoch, rank, seconds, compute_seconds.

        Reports beyond the queue's capacity are dropped and counted. Tuples cost the caller less.
        """
        reports = report_rows.as_reports(rows)
        with self._lock:
            self._dropped += self._reports.put(reports)
        self._wake_writer()

    def scores(self, iteration: int, scores: Iterable[tuple[int, float | None, float]]) -> None:
        """Hand over the detector's scores of ranks after an iteration: rank, level, evidence. Telemetry, too."""
        rows = report_rows.sound_scores((iteration, *score) for score in scores)
        with self._lock:
            room = max(self._most_scores - len(self._scores), 0)
            self._scores += rows[:room]
            self._dropped += max(len(rows) - room, 0)
        self._wake_writer()

    def _wake_writer(self) -> None:
        """Wake the writer's thread; make it write at once if half of the queue's capacity is in use."""
        with self._lock:
            crowded = (
                2 * len(self._records) > self._most_records
                or 2 * max(len(self._reports), len(self._scores)) > self._most_scores
            )
        if crowded and not self._failing:
            self._hurry.set()
        self._wake.set()

    def catch_up(self, journal_path: Path) -> None:
        """Write the journal's records that the ledger lacks, in the background like everything else.

        Call this before `submit` when a job's journal is taken over: its first record identifies the job. Raises
        ProtocolError or OSError if the journal cannot be read.
        """
        packed = journal_file.read_packed(journal_path)
        written = self._last_written_of(packed[0]) if packed else 0
        with self._lock:
            self._journal_path = journal_path
            if packed:
                self._first = packed[0]
            if packed and packed[-1].seq > written:
                self._last_submitted = max(self._last_submitted, packed[-1].seq)
            self._queue_before(packed, written)
        self._wake.set()

    def _queue_before(self, journal_records: list[journal.Record], written: int) -> None:
        """Queue the journal's records after number `written` before the later ones. The caller holds the lock.

        Packed iterations stay packed until their turn: unpacked they are a hundred times as large.
        """
        last = journal_records[-1].seq if journal_records else 0
        later = [record for record in self._records if record.seq > last]
        self._records = deque([*(record for record in journal_records if record.seq > written), *later])

    def _unpack_next(self) -> None:
        """Unpack the next record to write if it is packed. Raises ProtocolError for malformed columns."""
        while self._records and not _is_unpacked(self._records[0]):
            rows = list(unpack([self._records[0]]))
            self._records.popleft()
            self._records.extendleft(reversed(rows))

    def _last_written_of(self, first: journal.Record) -> int:
        """Return the number of the last record that the ledger has of a job; 0 if it cannot be read."""
        try:
            with Session(self._engine) as session:
                return last_written_seq(session, first)
        except (DBAPIError, OSError):
            return 0

    def check_own(self) -> None:
        """Raise LedgerError if the caught-up job belongs to another database user: retrying would be useless."""
        first = self._first
        if first is None or not isinstance(first.entry, journal.JobStarted) or file_of(self._url) is not None:
            return
        try:
            with Session(self._engine) as session:
                own_job(session, job_uuid(first), first.entry.job)
        except DBAPIError as error:
            raise refusal(self._url, error) from error

    @property
    def dropped(self) -> int:
        """Number of telemetry rows dropped."""
        with self._lock:
            return self._dropped

    @property
    def behind(self) -> int:
        """Number of journal records handed over and not written yet; a lower bound while they are read again."""
        with self._lock:
            return len(self._records) + (self._most_records if self._reread else 0)

    @property
    def applied(self) -> int:
        """Number of the last journal record written."""
        with self._lock:
            return self._applied

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything handed over so far is written; return False if it was not in time."""
        self._hurry.set()
        self._wake.set()
        with self._lock:
            seq = self._last_submitted
            self._written.wait_for(lambda: self._hopeless or self._is_written(seq), timeout_s)
            return self._is_written(seq)

    def _is_written(self, seq: int) -> bool:
        return self._applied >= seq and not (self._reports or self._scores or self._condensed)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write the waiting records, for at most `timeout_s`, and stop; return False if some were left (the journal has
        them)."""
        self._deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._hurry.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s + BATCH_S)
        if self._thread.is_alive():
            self._say(f"ledger {self.name}: does not answer; the next resihp status brings in what it lacks")
            return False
        self._engine.dispose()
        with self._lock:
            complete = self._applied >= self._last_submitted
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

    def _write_until_closed(self) -> None:
        pause_s = FIRST_PAUSE_S
        reported: set[str] = set()
        while True:
            self._wake.wait()
            self._pause_up_to(self._gather_s())  # let a batch gather, unless somebody waits for it
            self._wake.clear()
            began = time.monotonic()
            try:
                while self._write_batch():
                    pause_s = FIRST_PAUSE_S
                self._prune()
                self._took_s = time.monotonic() - began
            except Exception as error:  # noqa: BLE001 - after any error training continues and the records are kept
                self._engine.dispose()
                self._lacks_tables = isinstance(error, ProgrammingError) or "no such table" in str(error)
                with self._lock:
                    self._hopeless = _rejects_rows(error) or (not self._lacks_tables and _is_bad_statement(error))
                    self._written.notify_all()
                words = _first_line(error)
                if not self._failing or (isinstance(error, LedgerError) and words not in reported):
                    self._failing = True
                    reported.add(words)
                    words = words.removeprefix(f"ledger {self.name}: ")
                    self._say(f"ledger {self.name}: cannot be written, {words}; retrying, the job continues")
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    return
                if self._closing.is_set():
                    time.sleep(min(random.uniform(0.5, 1.0) * FIRST_PAUSE_S, left_s))
                else:
                    self._pause_up_to(random.uniform(0.5, 1.0) * pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                self._wake.set()
                continue
            self._hopeless = False
            if self._failing:
                self._failing = False
                reported.clear()
                self._say(f"ledger {self.name}: written again, no journal record is missing")
            if self._closing.is_set() and not self._wake.is_set():
                return

    def _gather_s(self) -> float:
        if file_of(self._url) is not None:
            return BATCH_S
        slow_s = random.uniform(0.5, 1.5) * min(self._took_s / MAX_CONNECTED_SHARE, MAX_GATHER_S)
        return max(random.uniform(*SERVER_BATCH_S), slow_s)

    def _pause_up_to(self, pause_s: float) -> None:
        self._hurry.wait(pause_s)
        if not self._closing.is_set():
            self._hurry.clear()

    def _recreate_if_removed(self) -> None:
        """Recreate the ledger if somebody removed or replaced the file, or dropped the tables: SQLite would go on
        writing to a file that nobody can open any more. Raises LedgerError."""
        was_replaced = self._opened is not None and _identity(self._url) != self._opened
        if not (was_replaced or self._lacks_tables):
            return
        self._engine.dispose()
        migrate.make_ready(self.url)
        self._opened = _identity(self._url)
        self._lacks_tables = False
        with self._lock:
            self._applied, self._reread = 0, self._journal_path is not None
        if was_replaced:
            self._say(
                f"ledger {self.name}: its file was removed; recreated, its rows are written again from the journal"
            )

    def _write_batch(self) -> bool:
        """Write one batch; return True if more may wait. Raises the database's errors; nothing is forgotten then."""
        self._condense()
        self._recreate_if_removed()
        with self._lock:
            reread, path, applied = self._reread, self._journal_path, self._applied
            first = self._first
        journal_records: list[journal.Record] | None = None
        if reread and path is not None:
            journal_records = journal_file.read_packed(path)
            first = first or next(iter(journal_records), None)
        with self._lock:
            if journal_records is not None:
                self._queue_before(journal_records, applied)
                self._first = first = self._first or first
                self._reread = False
            first = self._first
            self._unpack_next()
            records = list(takewhile(_is_unpacked, islice(self._records, BATCH_RECORDS)))
            parts = self._reports.batch() if self._condensed is None else []
            scores = self._scores[: report_rows.ROWS_IN_BATCH]
            dropped = self._dropped
        if first is None or not (records or parts or scores or self._condensed or dropped != self._dropped_written):
            return False  # the journal's first record identifies the job
        given = sum(map(len, parts))
        reports = report_rows.sound(list(chain.from_iterable(parts)))
        unsound = given - len(reports)
        quantiles: list[report_rows.Quantiles] = []
        if self._condensed is not None:
            reports, quantiles = self._condensed.batch()
            given = len(reports)
        telemetry = report_rows.Telemetry(reports, scores, quantiles)
        try:
            seq = self._transaction(first, records, telemetry, dropped + unsound)
            written = dropped + unsound
        except Exception as error:
            if not _rejects_rows(error):
                raise
            seq = self._one_by_one(first, records)
            unsound, written = given, self._dropped_written
            if reports:
                self._say(f"ledger {self.name}: {len(reports)} rank reports dropped: {_first_line(error)}")
        return self._account_for(records, parts, scores, seq, unsound, written, journal_records is None)

    def _account_for(
        self,
        records: Sequence[journal.Record],
        parts: list[list[report_rows.Report]],
        scores: Sequence[Any],
        seq: int,
        unsound: int,
        written: int,
        handed_over: bool,
    ) -> bool:
        """Forget the written records, up to record `seq`; return True if more may wait. `handed_over`: the records were
        not read from the journal."""
        with self._lock:
            path = self._journal_path
            written_count = 0
            while self._records and written_count < len(records) and self._records[0].seq <= seq:
                self._records.popleft()
                written_count += 1
            self._reports.remove(parts)
            if self._condensed is not None:
                self._condensed.remove()
            del self._scores[: len(scores)]
            self._dropped += unsound
            went_back, self._applied = seq < self._applied, seq
            stalled = bool(records) and not written_count
            if path is not None and (went_back or (stalled and handed_over)):
                # A gap, or a ledger that lost rows: the missing records are in the journal.
                self._reread, stalled = True, False
            self._dropped_written = written
            more = (
                bool(
                    self._reread
                    or self._records
                    or self._reports
                    or self._condensed
                    or self._scores
                    or written != self._dropped
                )
                and not stalled
            )
            self._written.notify_all()
        return more

    def _prune(self) -> None:
        """Remove some of the outdated telemetry, and more at the next batch: new records do not wait for it."""
        with self._lock:
            first = self._first
        if time.monotonic() < self._prune_at or self._closing.is_set() or first is None or self._keep_s is None:
            return
        before = datetime.now(UTC) - timedelta(seconds=self._keep_s)
        try:
            if not isinstance(first.entry, journal.JobStarted) or not prune_telemetry(
                self._engine, first.entry.user, before
            ):
                self._prune_at = time.monotonic() + PRUNE_EVERY_S
        except (DBAPIError, OSError) as error:
            self._prune_at = time.monotonic() + PRUNE_EVERY_S
            self._say(f"ledger {self.name}: old rank reports were not removed, {_first_line(error)}; retry in a day")

    def _condense(self) -> None:
        """Move the telemetry of a job with many ranks to where it is condensed."""
        with self._lock:
            first = self._first
        if self._condensed is None:
            if first is None or not _has_many_ranks(first.entry):
                return
            from db.telemetry.condensed import Condensed  # with numpy

            self._condensed = Condensed()
        condensed = self._condensed
        with self._lock:
            parts, finding, self._finding = self._reports.take(), self._finding, False
        given = list(chain.from_iterable(parts))
        reports = report_rows.sound(given)
        condensed.put(reports)
        if finding:
            condensed.finding()
        if self._closing.is_set():
            condensed.finish()
        if condensed.spent:
            condensed.spent = False
            self._say(
                f"ledger {self.name}: rank reports around findings have reached today's limit; no more are kept today"
            )
        with self._lock:
            self._dropped += len(given) - len(reports) + condensed.lost
            condensed.lost = 0
            self._written.notify_all()

    def _transaction(
        self,
        first: journal.Record,
        records: list[journal.Record],
        telemetry: report_rows.Telemetry,
        dropped: int,
    ) -> int:
        """Write one batch, as a whole or not at all; return the ledger's `journal_seq` after it."""
        with Session(self._engine) as session, session.begin():
            self._schema = migrate.check_writable(session.connection(), self.name, self._schema)
            job = job_of(session, first)
            ready: list[journal.Record] = []
            seq = job.journal_seq
            for record in records:
                if not applying.follows(record, seq):
                    break
                if applying.overtakes(record, seq) and self._journal_path is not None:
                    forget(session, job)
                    journal_records = journal_file.read_packed(self._journal_path)
                    ready = [earlier for earlier in journal_records if earlier.seq < record.seq]
                ready.append(record)
                seq = max(seq, record.seq)
            applying.apply_all(session, job, ready)
            if any(telemetry):
                session.flush()
                report_rows.insert_all(session.connection(), job.id, telemetry)
            job.telemetry_dropped = max(job.telemetry_dropped, dropped)
            return job.journal_seq

    def _one_by_one(self, first: journal.Record, records: list[journal.Record]) -> int:
        seq = self._applied
        for record in records:
            try:
                seq = self._transaction(first, [record], report_rows.Telemetry(), 0)
            except Exception as error:
                if not _rejects_rows(error):
                    raise
                self._say(f"ledger {self.name}: record {record.seq} fits no table: {_first_line(error)}")
                with Session(self._engine) as session, session.begin():
                    job = job_of(session, first)
                    applying.apply_as_event(session, job, record, _first_line(error))
                    seq = job.journal_seq
        return seq


def _has_many_ranks(entry: journal.Entry) -> bool:
    return isinstance(entry, journal.JobStarted) and entry.nodes * entry.gpus_per_node > RANKS_KEPT_WHOLE


def _is_finding(entry: journal.Entry) -> bool:
    """Decide whether rank reports around this entry are wanted later: a failure, or a suspicion that something is
    slow."""
    if isinstance(entry, journal.Suspected):
        return entry.kind == "slow" and not entry.cleared
    return isinstance(entry, journal.FailureFound)


def _is_unpacked(record: journal.Record) -> bool:
    return not isinstance(record.entry, journal.IterationsPacked)


def _identity(url: URL) -> tuple[int, int] | None:
    """Return device and inode of SQLite's present file; None for a server, or if there is none."""
    file = file_of(url)
    try:
        status = None if file is None else file.stat()
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)


def _rejects_rows(error: Exception) -> bool:
    """Decide whether retrying is useless: the database works, but it rejects our rows."""
    return isinstance(error, IntegrityError | DataError) or not isinstance(error, DBAPIError | OSError | LedgerError)


def _is_bad_statement(error: Exception) -> bool:
    """Decide whether SQLite rejects the statement itself, as when a table was replaced by a view."""
    return getattr(getattr(error, "orig", None), "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _first_line(error: Exception) -> str:
    words: object = error.orig if isinstance(error, DBAPIError) else error
    return (str(words).strip().splitlines() or [type(error).__name__])[0]


def catch_up(url: str, job_folder: Path, journal_path: Path, timeout_s: float = 60.0) -> None:
    """Bring a ledger up to a journal and wait for it, as long as something is written every `timeout_s`.

    Raises LedgerError if it cannot be opened, the job is another database user's, or nothing is written in time,
    ProtocolError if the journal cannot be read.
    """
    warnings: list[str] = []
    ledger = Ledger.open(url, job_folder, say=warnings.append)
    try:
        ledger.catch_up(journal_path)
        ledger.check_own()
    except (ResihpError, OSError):
        ledger.close(0.0)
        raise
    before = -1
    while not (complete := ledger.flush(timeout_s)) and ledger.applied > before:
        before = ledger.applied
    if not ledger.close(timeout_s if complete else 0.0):
        raise LedgerError(
            warnings[0] if warnings else f"ledger {ledger.name}: nothing was written for {timeout_s:.0f} s"
        )
