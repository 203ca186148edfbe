"""Telemetry that waits for the ledger's writer: rank reports, which are condensed for many ranks, and scores of ranks.

Decides which rows are dropped, and counts them; never waits, and knows no database. Called by `resihp.db.writer`, which
shares its lock with the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from resihp.db.telemetry import report_rows
from resihp.record import journal

if TYPE_CHECKING:
    from resihp.db.telemetry.condensed import Condensed

RANKS_KEPT_WHOLE = 1024
"""Largest number of ranks in a job of which every report is kept; for more ranks, `resihp.db.telemetry.condensed`
selects reports."""


class TelemetryBatch(NamedTuple):
    """The rows to write next. `dropped`: number of rows that were dropped so far."""

    parts: list[list[report_rows.Report]]
    scores: list[report_rows.Score]
    dropped: int


class TelemetryQueue:
    """Reports and scores that are not written yet. `written`: condition that contains the lock. Methods that require
    the caller to hold the lock say so."""

    def __init__(
        self, most: int, written: threading.Condition, closing: threading.Event, warn: Callable[[str], None]
    ) -> None:
        """`most`: limit on the reports, and on the scores, that may wait."""
        self._most = most
        self._written = written
        self._closing = closing
        self._warn = warn
        self._reports = report_rows.Waiting(most)
        self._scores: list[report_rows.Score] = []
        self._condensed: Condensed | None = None
        """State of the telemetry of a job with more than `RANKS_KEPT_WHOLE` ranks, else None; only the writer's thread
        changes it."""
        self._has_finding = False
        self.dropped = 0
        self.dropped_written = 0

    def put_reports(self, rows: Iterable[Mapping[str, Any]] | Iterable[report_rows.Report]) -> None:
        """Add rank reports, as far as there is room; count the others as dropped."""
        reports = report_rows.as_reports(rows)
        with self._written:
            self.dropped += self._reports.put(reports)

    def put_scores(self, iteration: int, scores: Iterable[tuple[int, float | None, float]]) -> None:
        """Add scores of ranks after an iteration, as far as there is room; count the others as dropped."""
        rows = report_rows.sound_scores((iteration, *score) for score in scores)
        with self._written:
            room = max(self._most - len(self._scores), 0)
            self._scores += rows[:room]
            self.dropped += max(len(rows) - room, 0)

    def note(self, entry: journal.Entry) -> None:
        """Note a journal entry; around a finding, all reports are kept. The caller holds the lock."""
        self._has_finding |= _is_finding(entry)

    @property
    def is_crowded(self) -> bool:
        return 2 * max(len(self._reports), len(self._scores)) > self._most

    @property
    def is_empty(self) -> bool:
        return not (self._reports or self._scores or self._condensed)

    def condense(self, first: journal.Record | None) -> None:
        """Move waiting reports to the condensed telemetry, if the job has many ranks. `first`: first record of the
        job's journal."""
        if self._condensed is None:
            if first is None or not _has_many_ranks(first.entry):
                return
            from resihp.db.telemetry.condensed import Condensed  # with numpy

            self._condensed = Condensed()
        condensed = self._condensed
        with self._written:
            parts = self._reports.take()
            has_finding, self._has_finding = self._has_finding, False
        given = list(chain.from_iterable(parts))
        reports = report_rows.sound(given)
        condensed.put(reports)
        if has_finding:
            condensed.finding()
        if self._closing.is_set():
            condensed.finish()
        if condensed.spent:
            condensed.spent = False
            self._warn("rank reports around findings have reached today's limit; no more are kept today")
        with self._written:
            self.dropped += len(given) - len(reports) + condensed.lost
            condensed.lost = 0
            self._written.notify_all()

    def batch(self) -> TelemetryBatch:
        """Return the next rows to write; they stay in the queue until `remove`. The caller holds the lock."""
        return TelemetryBatch(
            self._reports.batch() if self._condensed is None else [],
            self._scores[: report_rows.ROWS_IN_BATCH],
            self.dropped,
        )

    def has_content(self, batch: TelemetryBatch) -> bool:
        """Decide whether there is anything to write: rows, or a changed number of dropped rows."""
        return bool(batch.parts or batch.scores or self._condensed or batch.dropped != self.dropped_written)

    def rows_of(self, batch: TelemetryBatch) -> tuple[report_rows.Telemetry, int]:
        """Return the rows of a batch that fit the tables, and the number of its reports, fitting or not."""
        given = sum(map(len, batch.parts))
        reports = report_rows.sound(list(chain.from_iterable(batch.parts)))
        quantiles: list[report_rows.Quantiles] = []
        if self._condensed is not None:
            reports, quantiles = self._condensed.batch()
            given = len(reports)
        return report_rows.Telemetry(reports, batch.scores, quantiles), given

    def remove(self, batch: TelemetryBatch, dropped: int, dropped_written: int) -> None:
        """Remove a batch, of which `dropped` reports were not written. `dropped_written`: number of dropped rows that
        is now recorded in the ledger. The caller holds the lock."""
        self._reports.remove(batch.parts)
        if self._condensed is not None:
            self._condensed.remove()
        del self._scores[: len(batch.scores)]
        self.dropped += dropped
        self.dropped_written = dropped_written


def _has_many_ranks(entry: journal.Entry) -> bool:
    return isinstance(entry, journal.JobStarted) and entry.nodes * entry.gpus_per_node > RANKS_KEPT_WHOLE


def _is_finding(entry: journal.Entry) -> bool:
    """Decide whether all rank reports around this entry are to be kept: it is a failure, or a suspicion that something
    is slow."""
    if isinstance(entry, journal.Suspected):
        return entry.kind == "slow" and not entry.cleared
    return isinstance(entry, journal.FailureFound)
