"""The last iterations of many series: where a shift began, how large it is, whose it is. No clock.

Used by `resihp.detector.sequential.peer_cusum`, once its tests have raised an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resihp.detector.sequential.noise import Bools, Floats

SIZE = 64
"""Iterations that are remembered."""
ENOUGH = 10
"""Iterations before an alarm from which it is known how much the common part moves anyway."""


class Window:
    """Values of `n` series less what they had in common, and that, iteration by iteration."""

    def __init__(self, n: int) -> None:
        self._values = np.full((SIZE, n), np.nan)
        self._commons = np.full(SIZE, np.nan)
        self._indices = np.full(SIZE, -1, dtype=np.int64)
        self._row = 0

    def add(self, index: int, values: Floats, common: float) -> None:
        self._values[self._row], self._commons[self._row], self._indices[self._row] = values, common, index
        self._row = (self._row + 1) % SIZE

    @property
    def first(self) -> int:
        """The earliest iteration that is remembered."""
        return int(self._indices[self._filled].min(initial=np.iinfo(np.int64).max))

    def back(self, count: int) -> int:
        """The first of the last `count` iterations; the earliest that is remembered, if fewer are."""
        indices = np.sort(self._indices[self._filled])
        return int(indices[-count:].min(initial=np.iinfo(np.int64).max))

    def count(self, onset: int) -> int:
        """Iterations since `onset`, which is not negative."""
        return int(np.count_nonzero(self._filled & (self._indices >= onset)))

    def medians(self, onset: int) -> Floats:
        """(n,): of each series since iteration `onset`; NaN where there is no value."""
        rows = self._values[self._filled & (self._indices >= onset)]
        return medians(rows) if rows.size else np.full(self._values.shape[1], np.nan)

    def moved(self, series: int, onset: int) -> float:
        """From where `series` was in the last iterations before `onset` to where it is since then; NaN where either is
        unknown."""
        known = self._filled & np.isfinite(self._values[:, series])
        order = np.argsort(self._indices, kind="stable")
        earlier, later = (order[known[order] & side[order]] for side in (self._indices < onset, self._indices >= onset))
        before, since = self._values[earlier[-ENOUGH:], series], self._values[later, series]
        return float(np.median(since) - np.median(before)) if before.size and since.size else float("nan")

    def means(self, count: int) -> tuple[Floats, Floats]:
        """(n,): of each series in the last `count` iterations, NaN where there is no value; and of how many values."""
        rows = self._values[(self._row - 1 - np.arange(count)) % SIZE]
        counts = np.isfinite(rows).sum(axis=0)
        with np.errstate(invalid="ignore"):
            return np.nansum(rows, axis=0) / counts, counts.astype(np.float64)

    def locate(self, series: int, level: float, sign: float, hint: int) -> tuple[int, float]:
        """Since when `series` is above `level` (sign 1) or below it (-1), most probably, and where it is since then.

        `hint`: an iteration near the onset. At least the last two values count.
        """
        order = np.argsort(self._indices, kind="stable")
        order = order[self._filled[order] & np.isfinite(self._values[order, series])]
        indices, values = self._indices[order], self._values[order, series]
        first = min(max(int(np.searchsorted(indices, hint)) - 2, 0), len(values) - 1)
        away = sign * (values[first:] - level)
        sums = np.cumsum(away[::-1])[::-1]
        gain = np.maximum(sums, 0.0) ** 2 / np.arange(len(sums), 0, -1)
        start = min(first + int(np.argmax(gain)), max(len(values) - 2, 0))
        return int(indices[start]), float(np.median(values[start:]))

    def others_moved(self, onset: int, changes: Sequence[float]) -> float:
        """By how much most series moved where it is they, not the ones with `changes`, or else 0.

        The common part tells: it moved the other way by as much, and by more than it ever does.
        """
        if min(changes) < 0 < max(changes):
            return 0.0
        change = float(np.median(changes))
        before = self._commons[self._filled & (self._indices < onset)]
        after = self._commons[self._filled & (self._indices >= onset)]
        if before.size < ENOUGH or not after.size:
            return 0.0
        middle = float(np.median(before))
        noise = 1.4826 * float(np.median(np.abs(before - middle)))
        moved = float(np.median(after)) - middle
        return -change if moved * change < 0 and abs(moved) > max(0.7 * abs(change), 4 * noise) else 0.0

    @property
    def _filled(self) -> Bools:
        return np.asarray(np.isfinite(self._commons))


def low_median(values: Floats, apart: float = 0.0) -> float:
    """The median; where the two in the middle are further than `apart`, the lower: things get slower, not faster."""
    middle = (values.size - 1) // 2
    if values.size % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle, middle + 1))[middle : middle + 2].tolist()
    return float(low if high - low > apart else (low + high) / 2)


def medians(rows: Floats) -> Floats:
    """Median of each column without its NaN; NaN for a column without any value. No warning."""
    ordered = np.sort(rows, axis=0)
    counts = np.isfinite(ordered).sum(axis=0)
    columns = np.arange(rows.shape[1])
    low = ordered[np.maximum((counts - 1) // 2, 0), columns]
    high = ordered[np.maximum(counts // 2, 0).clip(max=len(rows) - 1), columns]
    return np.asarray((low + high) / 2)
