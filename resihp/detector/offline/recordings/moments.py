"""Converts rows with the moment at which an iteration ended to rows with the seconds of one iteration. Pure.

The difference of two rows of the same rank is divided by their distance in iterations; if the clock has whole seconds,
the two rows are far apart. Never decides which field is a clock. Called by `fields`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from resihp.detector.offline.recordings.tables import Measured

LATE_ITERATIONS = 2

LATE_S = 2.0
"""Tolerated lateness of lines from ranks that are not marked; a clock that falls by more has started again."""

COARSE_CLOCK_WINDOW_S = 20.0
"""Moments in whole seconds are compared over windows of this length, so that rounding is at most 5 % of a time."""


def between_moments(measured: Sequence[Measured]) -> list[Measured]:
    """Return rows with the seconds of one iteration, from the differences of consecutive rows of the same rank.

    A row that repeats the previous iteration, or is late by one or two iterations, is of another rank and is skipped.
    """
    differences = []
    last: dict[float, Measured] = {}
    for row in measured:
        before = last.get(row.rank)
        if before is not None and 0 <= before.label - row.label <= LATE_ITERATIONS:
            continue
        last[row.rank] = row
        if before is not None and row.label > before.label:
            differences.append(row._replace(seconds=(row.seconds - before.seconds) / (row.label - before.label)))
    return differences


def far_apart(measured: Sequence[Measured]) -> list[Measured]:
    """Return only rows that are far enough apart for moments in whole seconds, at equal distances in iterations."""
    kept: list[Measured] = []
    for first, end in _rising(measured):
        part = measured[first:end]
        labels, seconds = part[-1].label - part[0].label, part[-1].seconds - part[0].seconds
        if not (labels > 0 and seconds > 0):
            kept += part
            continue
        stride = max(1, math.ceil(COARSE_CLOCK_WINDOW_S * labels / seconds))
        due = -math.inf
        for row in part:
            if row.label >= due:
                kept.append(row)
                due = (row.label // stride + 1) * stride
    return kept


def _rising(measured: Sequence[Measured]) -> Iterable[tuple[int, int]]:
    """Yield parts in which neither iteration nor clock falls by more than the lateness of ranks."""
    first = 0
    for place in range(1, len(measured) + 1):
        if place < len(measured):
            now, before = measured[place], measured[place - 1]
            if now.label >= before.label - LATE_ITERATIONS and now.seconds >= before.seconds - LATE_S:
                continue
        yield first, place
        first = place
