"""The last iterations of many series, to find where a shift began, how large it is, and in which series. No clock.

Used by `resihp.detector.sequential.peer_cusum`, once its tests have raised an alarm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resihp.detector.sequential.noise import Bools, Floats

WINDOW_ITERATIONS = 64
"""Number of iterations that are kept."""
MIN_ITERATIONS = 10
"""Iterations before an alarm that are needed to know the usual variation of the common part."""


class Window:
    """Values of `n` series minus their common part, and the common part, iteration by iteration."""

    def __init__(self, n: int) -> None:
        self._values = np.full((WINDOW_ITERATIONS, n), np.nan)
        self._commons = np.full(WINDOW_ITERATIONS, np.nan)
        self._indices = np.full(WINDOW_ITERATIONS, -1, dtype=np.int64)
        self._row = 0

    def add(self, index: int, values: Floats, common: float) -> None:
        self._values[self._row], self._commons[self._row], self._indices[self._row] = values, common, index
        self._row = (self._row + 1) % WINDOW_ITERATIONS

    @property
    def first(self) -> int:
        """The earliest iteration that is kept."""
        return int(self._indices[self._filled].min(initial=np.iinfo(np.int64).max))

    def back(self, count: int) -> int:
        """Return the first of the last `count` iterations; the earliest that is kept, if there are fewer."""
        indices = np.sort(self._indices[self._filled])
        return int(indices[-count:].min(initial=np.iinfo(np.int64).max))

    def count(self, onset: int) -> int:
        """Return the number of iterations since `onset`, which is not negative."""
        return int(np.count_nonzero(self._filled & (self._indices >= onset)))

    def medians(self, onset: int) -> Floats:
        """Return (n,): the median of each series since iteration `onset`; NaN without values."""
        rows = self._values[self._filled & (self._indices >= onset)]
        return medians(rows) if rows.size else np.full(self._values.shape[1], np.nan)

    def moved(self, series: int, onset: int) -> float:
        """Return the change of `series` from its last iterations before `onset` to those since; NaN if unknown."""
        finite = self._filled & np.isfinite(self._values[:, series])
        order = np.argsort(self._indices, kind="stable")
        earlier, later = (
            order[finite[order] & side[order]] for side in (self._indices < onset, self._indices >= onset)
        )
        before, since = self._values[earlier[-MIN_ITERATIONS:], series], self._values[later, series]
        return float(np.median(since) - np.median(before)) if before.size and since.size else float("nan")

    def means(self, count: int) -> tuple[Floats, Floats]:
        """Return (n,) each: means of the last `count` iterations, NaN without values, and the number of values."""
        rows = self._values[(self._row - 1 - np.arange(count)) % WINDOW_ITERATIONS]
        counts = np.isfinite(rows).sum(axis=0)
        with np.errstate(invalid="ignore"):
            return np.nansum(rows, axis=0) / counts, counts.astype(np.float64)

    def locate(self, series: int, level: float, sign: float, hint: int) -> tuple[int, float]:
        """Return the most probable onset of `series` being above `level` (sign 1) or below it (-1), and its level
        since.

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
        """Return the movement of most series if it was they that moved, not the ones with `changes`; else 0.

        The common part decides: it moved in the opposite direction by as much, and by more than it usually varies.
        """
        if min(changes) < 0 < max(changes):
            return 0.0
        change = float(np.median(changes))
        before = self._commons[self._filled & (self._indices < onset)]
        after = self._commons[self._filled & (self._indices >= onset)]
        if before.size < MIN_ITERATIONS or not after.size:
            return 0.0
        middle = float(np.median(before))
        noise = 1.4826 * float(np.median(np.abs(before - middle)))
        moved = float(np.median(after)) - middle
        return -change if moved * change < 0 and abs(moved) > max(0.7 * abs(change), 4 * noise) else 0.0

    @property
    def _filled(self) -> Bools:
        return np.asarray(np.isfinite(self._commons))


def low_median(values: Floats, apart: float = 0.0) -> float:
    """Return the median; the lower of the two middle values if they differ by more than `apart`, because things get
    slower, not faster."""
    middle = (values.size - 1) // 2
    if values.size % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle, middle + 1))[middle : middle + 2].tolist()
    return float(low if high - low > apart else (low + high) / 2)


def medians(rows: Floats) -> Floats:
    """Return the median of each column without its NaN; NaN for a column without values. Warns of nothing."""
    ordered = np.sort(rows, axis=0)
    counts = np.isfinite(ordered).sum(axis=0)
    columns = np.arange(rows.shape[1])
    low = ordered[np.maximum((counts - 1) // 2, 0), columns]
    high = ordered[np.maximum(counts // 2, 0).clip(max=len(rows) - 1), columns]
    return np.asarray((low + high) / 2)
