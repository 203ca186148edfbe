"""Rank reports of a job of thousands of ranks: how all did together in each iteration, and those that stand out.

Called by `db.writer`, in its thread. All rows of 16,384 ranks were 15 GB a day. Decides which are kept:

- of the ranks of an iteration the slowest and the fastest, and those that moved away from their own level by more than
  their peers did. A rank's own work's time counts (`compute_seconds`; where nobody tells it, `seconds`): stages differ
  in it for good, so a rank is compared with itself;
- all of every `EVERY`-th iteration;
- all of the `AROUND` iterations before and after a finding, `WHOLE_ROWS_A_DAY` at most.

The others are in the iteration's quantiles. Knows no database and no lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from db.telemetry.report_rows import ROWS_IN_BATCH, Quantiles, Report

BEHIND = 8
"""Iterations under way at a time, as far as reports come late; the oldest is closed when another begins."""
AROUND = 50
"""Iterations of which everything is kept, before a finding and after it."""
EVERY = 100
SLOWEST, FASTEST = 8, 4
MOST_OUTLYING = 64
FAR, LEAST = 6.0, 0.02
"""How far from its level a rank stands out: so many times the ranks' usual distance (median absolute deviation, as the
standard deviation that it would be of a normal distribution), and at least this share of its level."""
WHOLE_ROWS_A_DAY = 5_000_000
"""Kept around findings, at 123 bytes each on PostgreSQL."""
WAITING_ROWS = 2_000_000
"""While the database is away, at 20 bytes each."""
MOST_RANKS = 1 << 20
SHARES = (0.0, 0.05, 0.5, 0.95, 1.0)

_Figures = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Part:
    """Reports of one iteration; null is NaN."""

    iteration: int
    epoch: int
    ranks: npt.NDArray[np.int32]
    seconds: _Figures
    compute: _Figures

    def where(self, which: _Flags) -> _Part:
        return _Part(self.iteration, self.epoch, self.ranks[which], self.seconds[which], self.compute[which])

    def reports(self) -> list[Report]:
        ranks, seconds, compute = self.ranks.tolist(), _nullable(self.seconds), _nullable(self.compute)
        rows = zip(ranks, seconds, compute, strict=True)
        return [(self.iteration, self.epoch, rank, took, worked) for rank, took, worked in rows]


class Condensed:
    """What became of reports, from when they come until they are written."""

    def __init__(self, today: Callable[[], int] = lambda: int(time.time() // 86400)) -> None:
        """`today`: number of the day, in which `WHOLE_ROWS_A_DAY` count."""
        self._today = today
        self._open: dict[tuple[int, int], list[Report]] = {}
        self._closed = (-1, -1)
        """Epoch and iteration; all that are not later are closed."""
        self._past: deque[tuple[_Part, _Flags]] = deque(maxlen=AROUND)
        """What was closed last, and which of it was kept."""
        self._whole = 0
        """Of so many iterations that are closed next everything is kept."""
        self._levels = _Levels(-1)
        self._day, self._kept_today, self._is_spent = -1, 0, False
        self._parts: deque[_Part] = deque()
        self._quantiles: list[Quantiles] = []
        self._rows = 0
        self._given = (0, 0)
        self.lost = 0
        """Reports that came too late to be counted, or for which there was no room."""
        self.spent = False
        """Something around a finding was not kept, for too much was today: becomes true once a day."""

    def __bool__(self) -> bool:
        """Whether something is to be written."""
        return bool(self._parts or self._quantiles)

    def put(self, reports: Iterable[Report]) -> None:
        """Take in what is sound (`report_rows.sound`), in any order."""
        late: dict[tuple[int, int], list[Report]] = {}
        for report in reports:
            key = (report[1], report[0])
            (late if key <= self._closed else self._open).setdefault(key, []).append(report)
        while len(self._open) > BEHIND:
            self._close(min(self._open))
        whole = {(part.epoch, part.iteration) for part, kept in self._past if kept.all()}
        for key, rows in late.items():
            if key in whole:
                self._keep(_part(rows))
            else:
                self.lost += len(rows)

    def finding(self) -> None:
        """Something was found: all of what is around it is kept."""
        self._whole = AROUND + len(self._open)
        for number, (part, kept) in enumerate(self._past):
            if not kept.all() and self._may_keep(len(part.ranks)):
                self._keep(part.where(~kept))
                self._past[number] = (part, np.ones_like(kept))

    def finish(self) -> None:
        """No more reports come: what is under way is closed."""
        while self._open:
            self._close(min(self._open))

    def batch(self) -> tuple[list[Report], list[Quantiles]]:
        """What is to be written next; it stays until `remove`."""
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
        """The last `batch` is written."""
        parts, quantiles = self._given
        for _ in range(parts):
            self._rows -= len(self._parts.popleft().ranks)
        del self._quantiles[:quantiles]
        self._given = (0, 0)

    def _close(self, key: tuple[int, int]) -> None:
        self._closed = key
        part = _part(self._open.pop(key))
        self._quantiles.append((part.iteration, part.epoch, len(part.ranks), *_spread(part.seconds, part.compute)))
        if self._levels.epoch != part.epoch:
            self._levels = _Levels(part.epoch)
        own = part.compute if np.isfinite(part.compute).any() else part.seconds
        kept = self._levels.outlying(part.ranks, own)
        if part.iteration % EVERY == 0 or (self._whole and self._may_keep(len(part.ranks))):
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
    """What each rank's own work usually takes under one plan."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._seen = 0
        self._levels: _Figures = np.full(0, np.nan)

    def outlying(self, ranks: npt.NDArray[np.int32], own: _Figures) -> _Flags:
        """Which ranks of an iteration stand out. Levels follow; not that of a rank that stands out, once they are
        known: it does so until it is as it was."""
        kept = np.zeros(len(ranks), bool)
        known = np.flatnonzero(np.isfinite(own) & (ranks < MOST_RANKS))
        if not len(known):
            return kept
        order = known[np.argsort(own[known], kind="stable")]
        kept[order[-SLOWEST:]] = kept[order[:FASTEST]] = True
        if (short := int(ranks[known].max()) + 1 - len(self._levels)) > 0:
            self._levels = np.concatenate((self._levels, np.full(short, np.nan)))
        ranks, own = ranks[known], own[known]
        levels = self._levels[ranks]
        levels[~(levels > 0)] = np.nan
        levels = np.where(np.isfinite(levels), levels, np.where(own > 0, own, 1.0))
        ratios = own / levels
        usual = np.median(ratios)
        away = np.abs(ratios - usual)
        far = away > max(FAR * 1.4826 * float(np.median(away)), LEAST * float(usual))
        self._seen += 1
        settled = ~far if self._seen > AROUND else np.ones_like(far)
        self._levels[ranks[settled]] = (levels + (own - levels) / min(self._seen, AROUND))[settled]
        out = np.flatnonzero(far)
        kept[known[out[np.argsort(away[out])[-MOST_OUTLYING:]]]] = True
        return kept


def _part(rows: list[Report]) -> _Part:
    _, _, ranks, seconds, compute = zip(*rows, strict=True)
    figures: list[Any] = [np.array(column, np.float64) for column in (seconds, compute)]  # None becomes NaN
    return _Part(rows[0][0], rows[0][1], np.array(ranks, np.int32), *figures)


def _spread(*columns: _Figures) -> list[float | None]:
    found: list[float | None] = []
    for column in columns:
        finite = column[np.isfinite(column)]
        found += np.quantile(finite, SHARES).tolist() if len(finite) else [None] * len(SHARES)
    return found


def _nullable(figures: _Figures) -> list[float | None]:
    listed = figures.tolist()
    return listed if np.isfinite(figures).all() else [each if each == each else None for each in listed]
