"""Keeps the last iterations of many series, to find the onset and the size of a shift, and the series that shifted.

Used by `resihp.detector.sequential.peer_cusum` after its tests have raised an alarm; tests nothing itself. No clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resihp.detector.sequential.noise import Bools, Floats

WINDOW_ITERATIONS = 64
"""Number of iterations that are kept."""
MIN_ITERATIONS = 10
"""Number of iterations before an alarm from which the usual variation of the common part can be estimated."""


class Window:
    """The last iterations of `n` series: their values without the common part, and the common part."""

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
        """The earliest kept iteration."""
        return int(self._indices[self._filled].min(initial=np.iinfo(np.int64).max))

    def back(self, count: int) -> int:
        """Return the first of the last `count` iterations, or the earliest kept iteration if there are fewer."""
        indices = np.sort(self._indices[self._filled])
        return int(indices[-count:].min(initial=np.iinfo(np.int64).max))

    def count(self, onset: int) -> int:
        """Return the number of kept iterations from `onset` on."""
        return int(np.count_nonzero(self._filled & (self._indices >= onset)))

    def medians(self, onset: int) -> Floats:
        """Return (n,): the median of each series from iteration `onset` on; NaN for a series without values."""
        rows = self._values[self._filled & (self._indices >= onset)]
        return medians(rows) if rows.size else np.full(self._values.shape[1], np.nan)

    def moved(self, series: int, onset: int) -> float:
        """Return the change of `series` at iteration `onset`: median after minus median before; NaN if unknown."""
        finite = self._filled & np.isfinite(self._values[:, series])
        order = np.argsort(self._indices, kind="stable")
        earlier, later = (
            order[finite[order] & side[order]] for side in (self._indices < onset, self._indices >= onset)
        )
        before, since = self._values[earlier[-MIN_ITERATIONS:], series], self._values[later, series]
        return float(np.median(since) - np.median(before)) if before.size and since.size else float("nan")

    def means(self, count: int) -> tuple[Floats, Floats]:
        """Return, for each series, the mean of its last `count` iterations, and the number of values in it, (n,) both.

        The mean is NaN without values.
        """
        rows = self._values[(self._row - 1 - np.arange(count)) % WINDOW_ITERATIONS]
        counts = np.isfinite(rows).sum(axis=0)
        with np.errstate(invalid="ignore"):
            return np.nansum(rows, axis=0) / counts, counts.astype(np.float64)

    def locate(self, series: int, level: float, sign: float, hint: int) -> tuple[int, float]:
        """Return the most probable onset of a shift of `series` away from `level`, and the level since then.

        `sign`: 1 for a shift upward, -1 for one downward. `hint`: an iteration near the onset. The shift has at least
        the last two values.
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
        """Return the shift of the other series if they shifted at `onset`, and not the series with `changes`; else 0.

        The other series shifted if the common part moved in the direction opposite to `changes`, by about as much, and
        by more than it usually varies.
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
    """Return the median. Of an even number of values, the lower middle one if both differ by more than `apart`.

    The lower one is preferred because failures make values larger, never smaller.
    """
    middle = (values.size - 1) // 2
    if values.size % 2:
        return float(np.partition(values, middle)[middle])
    low, high = np.partition(values, (middle, middle + 1))[middle : middle + 2].tolist()
    return float(low if high - low > apart else (low + high) / 2)


def medians(rows: Floats) -> Floats:
    """Return the median of each column, without NaN; NaN for a column without values. Unlike numpy, warn of nothing."""
    ordered = np.sort(rows, axis=0)
    counts = np.isfinite(ordered).sum(axis=0)
    columns = np.arange(rows.shape[1])
    low = ordered[np.maximum((counts - 1) // 2, 0), columns]
    high = ordered[np.maximum(counts // 2, 0).clip(max=len(rows) - 1), columns]
    return np.asarray((low + high) / 2)
