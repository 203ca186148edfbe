"""Telemetry that waits for the ledger's writer: rank reports, condensed in a job of many ranks, and scores of ranks.

Decides which rows are dropped, and counts them; never waits, and knows no database. Called by `db.writer`, with which
it shares a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from db.telemetry import report_rows
from resihp.record import journal

if TYPE_CHECKING:
    from db.telemetry.condensed import Condensed

RANKS_KEPT_WHOLE = 1024
"""Ranks up to which every report of a job is kept; above that, `db.telemetry.condensed` selects."""


class TelemetryBatch(NamedTuple):
    """The rows that are written next. `dropped`: number of rows dropped before."""

    parts: list[list[report_rows.Report]]
    scores: list[report_rows.Score]
    dropped: int


class TelemetryQueue:
    """Reports and scores that are not written yet. `written` is the condition of the lock; methods whose docstring says
    so are called while it is held."""

    def __init__(
        self, most: int, written: threading.Condition, closing: threading.Event, warn: Callable[[str], None]
    ) -> None:
        """`most`: number of reports, and of scores, that may wait."""
        self._most = most
        self._written = written
        self._closing = closing
        self._warn = warn
        self._reports = report_rows.Waiting(most)
        self._scores: list[report_rows.Score] = []
        self._condensed: Condensed | None = None
        """State of telemetry for a job of more than `RANKS_KEPT_WHOLE` ranks; only the writer's thread changes it."""
        self._has_finding = False
        self.dropped = 0
        self.dropped_written = 0

    def put_reports(self, rows: Iterable[Mapping[str, Any]] | Iterable[report_rows.Report]) -> None:
        """Take in rank reports, as far as there is room."""
        reports = report_rows.as_reports(rows)
        with self._written:
            self.dropped += self._reports.put(reports)

    def put_scores(self, iteration: int, scores: Iterable[tuple[int, float | None, float]]) -> None:
        """Take in scores of ranks after an iteration, as far as there is room."""
        rows = report_rows.sound_scores((iteration, *score) for score in scores)
        with self._written:
            room = max(self._most - len(self._scores), 0)
            self._scores += rows[:room]
            self.dropped += max(len(rows) - room, 0)

    def note(self, entry: journal.Entry) -> None:
        """Note an entry around which all reports are wanted. The caller holds the lock."""
        self._has_finding |= _is_finding(entry)

    @property
    def is_crowded(self) -> bool:
        return 2 * max(len(self._reports), len(self._scores)) > self._most

    @property
    def is_empty(self) -> bool:
        return not (self._reports or self._scores or self._condensed)

    def condense(self, first: journal.Record | None) -> None:
        """Move the reports of a job with many ranks to where they are condensed; `first` is its journal's first
        record."""
        if self._condensed is None:
            if first is None or not _has_many_ranks(first.entry):
                return
            from db.telemetry.condensed import Condensed  # with numpy

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
        """Return the next rows; they stay until `remove`. The caller holds the lock."""
        return TelemetryBatch(
            self._reports.batch() if self._condensed is None else [],
            self._scores[: report_rows.ROWS_IN_BATCH],
            self.dropped,
        )

    def has_content(self, batch: TelemetryBatch) -> bool:
        """Decide whether there is something to write: rows, or a number of dropped ones."""
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
        """Forget a batch, of which `dropped` reports were not written. `dropped_written`: the number of dropped rows
        that the ledger has now. The caller holds the lock."""
        self._reports.remove(batch.parts)
        if self._condensed is not None:
            self._condensed.remove()
        del self._scores[: len(batch.scores)]
        self.dropped += dropped
        self.dropped_written = dropped_written


def _has_many_ranks(entry: journal.Entry) -> bool:
    return isinstance(entry, journal.JobStarted) and entry.nodes * entry.gpus_per_node > RANKS_KEPT_WHOLE


def _is_finding(entry: journal.Entry) -> bool:
    """Decide whether rank reports around this entry are wanted later: a failure, or a suspicion that something is
    slow."""
    if isinstance(entry, journal.Suspected):
        return entry.kind == "slow" and not entry.cleared
    return isinstance(entry, journal.FailureFound)
