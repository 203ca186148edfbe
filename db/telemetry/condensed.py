"""Rank reports of a job with thousands of ranks: quantiles over all ranks in each iteration, and the reports of
outliers.

Called by `queue`, in the writer's thread. All rows of 16,384 ranks took 15 GB a day. Decides which reports are
kept:

- of each iteration, the slowest and the fastest ranks, and those that deviate from their own level by more than the
  other ranks do. The measure is the time of a rank's own work (`compute_seconds`, or `seconds` if no rank reports
  that). It differs permanently between stages, so a rank is compared with itself;
- all reports of every `WHOLE_EVERY`-th iteration;
- all reports of `WHOLE_AROUND_FINDING` iterations before and after a finding, at most `WHOLE_ROWS_A_DAY` rows.

The other reports are only included in the quantiles of the iteration. Knows no database and no lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from resihp.db.telemetry.report_rows import ROWS_IN_BATCH, Quantiles, Report

MAX_OPEN_ITERATIONS = 8
"""Number of iterations that stay open for late reports; the oldest is closed when a further one opens."""
WHOLE_AROUND_FINDING = 50
"""Number of iterations before a finding, and after it, with all reports kept."""
WHOLE_EVERY = 100
SLOWEST, FASTEST = 8, 4
MOST_OUTLYING = 64
OUTLYING_DEVIATIONS, MIN_OUTLYING_SHARE = 6.0, 0.02
"""Distance from its own level at which a rank counts as an outlier: this multiple of the ranks' usual distance (median
absolute deviation, scaled to the standard deviation of a normal distribution), and at least this share of its level."""
WHOLE_ROWS_A_DAY = 5_000_000
"""Limit on the rows kept around findings in one day, at 123 bytes each on PostgreSQL."""
WAITING_ROWS = 2_000_000
"""Limit on the rows that wait while the database is unavailable, at 20 bytes each."""
MOST_RANKS = 1 << 20
QUANTILE_SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)

_Figures = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Part:
    """Reports of one iteration; null figures are NaN."""

    iteration: int
    epoch: int
    ranks: npt.NDArray[np.int32]
    seconds: _Figures
    compute: _Figures

    def where(self, mask: _Flags) -> _Part:
        return _Part(self.iteration, self.epoch, self.ranks[mask], self.seconds[mask], self.compute[mask])

    def reports(self) -> list[Report]:
        ranks, seconds, compute = self.ranks.tolist(), _nullable(self.seconds), _nullable(self.compute)
        rows = zip(ranks, seconds, compute, strict=True)
        return [(self.iteration, self.epoch, rank, took, worked) for rank, took, worked in rows]


class Condensed:
    """Reports of a job with many ranks, on their way from the ranks to the database."""

    def __init__(self, today: Callable[[], int] = lambda: int(time.time() // 86400)) -> None:
        """`today`: returns the number of the current day, to which `WHOLE_ROWS_A_DAY` applies."""
        self._today = today
        self._open: dict[tuple[int, int], list[Report]] = {}
        self._closed = (-1, -1)
        """(epoch, iteration) up to which all iterations are closed."""
        self._past: deque[tuple[_Part, _Flags]] = deque(maxlen=WHOLE_AROUND_FINDING)
        """The latest closed iterations, and which reports of each were kept."""
        self._whole = 0
        """Number of iterations to be closed next of which all reports are kept."""
        self._levels = _Levels(-1)
        self._day, self._kept_today, self._is_spent = -1, 0, False
        self._parts: deque[_Part] = deque()
        self._quantiles: list[Quantiles] = []
        self._rows = 0
        self._given = (0, 0)
        self.lost = 0
        """Number of reports that came too late to be counted, or for which there was no room."""
        self.spent = False
        """Whether reports around a finding were dropped because of the daily limit; set at most once a day."""

    def __bool__(self) -> bool:
        """Whether there are rows to write."""
        return bool(self._parts or self._quantiles)

    def put(self, reports: Iterable[Report]) -> None:
        """Add reports that fit the table (`report_rows.sound`), in any order."""
        late: dict[tuple[int, int], list[Report]] = {}
        for report in reports:
            key = (report[1], report[0])
            (late if key <= self._closed else self._open).setdefault(key, []).append(report)
        while len(self._open) > MAX_OPEN_ITERATIONS:
            self._close(min(self._open))
        whole = {(part.epoch, part.iteration) for part, kept in self._past if kept.all()}
        for key, rows in late.items():
            if key in whole:
                self._keep(_part(rows))
            else:
                self.lost += len(rows)

    def finding(self) -> None:
        """Keep all reports of the iterations around the current one, because of a finding."""
        self._whole = WHOLE_AROUND_FINDING + len(self._open)
        for number, (part, kept) in enumerate(self._past):
            if not kept.all() and self._may_keep(len(part.ranks)):
                self._keep(part.where(~kept))
                self._past[number] = (part, np.ones_like(kept))

    def finish(self) -> None:
        """Close all open iterations, because no more reports will come."""
        while self._open:
            self._close(min(self._open))

    def batch(self) -> tuple[list[Report], list[Quantiles]]:
        """Return the next rows to write: reports and quantiles. They stay in the queue until `remove`."""
        reports: list[Report] = []
        parts = 0
        for part in self._parts:
            if parts and len(reports) + len(part.ranks) > ROWS_IN_BATCH:
                break
            reports += part.reports()
            parts += 1
        quantiles = self._quantiles[:ROWS_IN_BATCH]
        self._given = (parts, len(quantiles))
        return reports, quantiles

    def remove(self) -> None:
        """Remove the rows of the last `batch`, because they are written."""
        parts, quantiles = self._given
        for _ in range(parts):
            self._rows -= len(self._parts.popleft().ranks)
        del self._quantiles[:quantiles]
        self._given = (0, 0)

    def _close(self, key: tuple[int, int]) -> None:
        self._closed = key
        part = _part(self._open.pop(key))
        self._quantiles.append(
            (part.iteration, part.epoch, len(part.ranks), *_quantiles_of(part.seconds, part.compute))
        )
        if self._levels.epoch != part.epoch:
            self._levels = _Levels(part.epoch)
        own = part.compute if np.isfinite(part.compute).any() else part.seconds
        kept = self._levels.outlying(part.ranks, own)
        if part.iteration % WHOLE_EVERY == 0 or (self._whole and self._may_keep(len(part.ranks))):
            kept = np.ones_like(kept)
        self._whole = max(self._whole - 1, 0)
        self._keep(part.where(kept))
        self._past.append((part, kept))

    def _may_keep(self, rows: int) -> bool:
        if (day := self._today()) != self._day:
            self._day, self._kept_today, self._is_spent = day, 0, False
        if self._kept_today + rows > WHOLE_ROWS_A_DAY:
            self.spent |= not self._is_spent
            self._is_spent = True
            return False
        self._kept_today += rows
        return True

    def _keep(self, part: _Part) -> None:
        rows = len(part.ranks)
        if self._rows + rows > WAITING_ROWS:
            self.lost += rows
        elif rows:
            self._parts.append(part)
            self._rows += rows


class _Levels:
    """Level of each rank under one plan: the usual time of its own work."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._seen = 0
        self._levels: _Figures = np.full(0, np.nan)

    def outlying(self, ranks: npt.NDArray[np.int32], own: _Figures) -> _Flags:
        """Return which ranks of an iteration are outliers, and update the levels. Once levels are known, an outlier
        does not change its own level, so that it remains an outlier until its time is as before."""
        kept = np.zeros(len(ranks), bool)
        measured = np.flatnonzero(np.isfinite(own) & (ranks < MOST_RANKS))
        if not len(measured):
            return kept
        order = measured[np.argsort(own[measured], kind="stable")]
        kept[order[-SLOWEST:]] = kept[order[:FASTEST]] = True
        if (short := int(ranks[measured].max()) + 1 - len(self._levels)) > 0:
            self._levels = np.concatenate((self._levels, np.full(short, np.nan)))
        ranks, own = ranks[measured], own[measured]
        levels = self._levels[ranks]
        levels[~(levels > 0)] = np.nan
        levels = np.where(np.isfinite(levels), levels, np.where(own > 0, own, 1.0))
        ratios = own / levels
        usual = np.median(ratios)
        away = np.abs(ratios - usual)
        far = away > max(OUTLYING_DEVIATIONS * 1.4826 * float(np.median(away)), MIN_OUTLYING_SHARE * float(usual))
        self._seen += 1
        settled = ~far if self._seen > WHOLE_AROUND_FINDING else np.ones_like(far)
        self._levels[ranks[settled]] = (levels + (own - levels) / min(self._seen, WHOLE_AROUND_FINDING))[settled]
        out = np.flatnonzero(far)
        kept[measured[out[np.argsort(away[out])[-MOST_OUTLYING:]]]] = True
        return kept


def _part(rows: list[Report]) -> _Part:
    _, _, ranks, seconds, compute = zip(*rows, strict=True)
    figures: list[Any] = [np.array(column, np.float64) for column in (seconds, compute)]  # None becomes NaN
    return _Part(rows[0][0], rows[0][1], np.array(ranks, np.int32), *figures)


def _quantiles_of(*columns: _Figures) -> list[float | None]:
    values: list[float | None] = []
    for column in columns:
        finite = column[np.isfinite(column)]
        values += np.quantile(finite, QUANTILE_SHARES).tolist() if len(finite) else [None] * len(QUANTILE_SHARES)
    return values


def _nullable(figures: _Figures) -> list[float | None]:
    listed = figures.tolist()
    return listed if np.isfinite(figures).all() else [value if value == value else None for value in listed]
