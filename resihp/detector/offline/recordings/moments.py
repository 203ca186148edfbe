"""Turns rows with the moment at which an iteration ended into rows with the time of an iteration. Pure.

Decides which two rows are compared: of one rank, and far enough apart if the clock has whole seconds. Never decides
which field is a clock. Called by `fields`.
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
    """Turn rows with moments into rows with the time of one iteration since the same rank's previous row.

    A row that repeats the previous iteration, or is late by one or two, comes from another rank and is skipped.
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
    """Keep those rows with moments in whole seconds that are far enough apart, in steps of equal size."""
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
