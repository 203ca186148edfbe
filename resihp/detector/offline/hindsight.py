"""Judges the changes of a series again after the file has been read to its end. Pure.

A sequential test that finds a slow-down within a few iterations sometimes takes noise for a slow-down. The rest of the
file shows the difference: a real slow-down as a whole, by its mean and by its median, differs from the healthy times
around it. The series is therefore cut into parts, at the changes that the test noticed, and, to find lasting shifts
smaller than the noise, where both sides differ most. Parts that differ only by noise are merged again. Each part is
then healthy or slow by its own level.

This module decides on the slow-downs that are reported, with their onsets, ends, sizes and costs. It never dates the
detection of a slow-down earlier than an observer of the times could have noticed it. Used by
`resihp.detector.offline.series`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from resihp.detector.offline.analysis import SpeedChange, Where
from resihp.detector.offline.background import (
    EXTRA_SHORT_ERRORS,
    MAX_HICCUP_VALUES,
    MIN_HEALTHY_VALUES,
    MIN_STANDARD_ERRORS,
    SEARCH_VALUES,
    Background,
    SeenTimes,
    State,
    Stretch,
)

LATER_CONFIDENCE = 0.999
"""Confidence of a slow-down that the sequential test did not notice."""
SETTLING_VALUES = 40
"""Number of first values in which a fall is the end of the start-up, not a recovery."""
REFINEMENT_ROUNDS = 3


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level that a sequential test noticed."""

    onset: int
    """Iteration of the onset; `detected_at` is an iteration as well."""
    detected_at: int
    state: State
    """State of the series from `onset` on, according to the test. "excused": slow for a known reason."""
    confidence: float = 1.0


def judged(
    turns: Sequence[Turn], series: SeenTimes, least: float, *, among: int = 1, run: int = 0, where: Where | None = None
) -> list[SpeedChange]:
    """Return the slow-downs of a series, and their recoveries, in order of detection.

    `turns`: changes that the sequential test noticed. `least`: smallest reported shift, log units. `among`: number of
    series that are tested; with more series, a slow-down must be more significant.
    """
    if series.values.size < 2 * MIN_HEALTHY_VALUES:
        return []
    turns = sorted(turns, key=lambda turn: turn.detected_at)
    extra_errors = math.sqrt(MIN_STANDARD_ERRORS**2 + 2 * math.log(among)) - MIN_STANDARD_ERRORS
    parts = _parts(turns, series)
    for _ in range(REFINEMENT_ROUNDS):
        background = Background(series, parts)
        parts = background.united([piece for part in parts for piece in background.divided(part)])
    parts = Background(series, parts).classified(parts, least)
    background = Background(series, parts)
    parts = [background.located(i, parts) for i in range(len(parts))]
    spans = [span for span in _spans(parts) if background.stands(span, least, extra_errors)]
    stand = {part for span in spans for part in span}
    background = Background(
        series, [p if p.state != "slow" or p in stand else Stretch(p.first, p.end, "healthy") for p in parts]
    )
    events = [event for span in spans for event in _slow_down_events(background, span, turns, least, run, where)]
    ends = [event.iteration for event in events]
    for turn in turns:
        if turn.state == "healthy" and all(abs(turn.onset - end) > SEARCH_VALUES for end in ends):
            events += _fall(background, turn, least, run, where)
            ends += [turn.onset]
    return sorted(events, key=lambda event: (event.detected_at, event.iteration))


def _slow_down_events(
    background: Background, span: Sequence[Stretch], turns: Sequence[Turn], least: float, run: int, where: Where | None
) -> list[SpeedChange]:
    """Return the event of a slow-down, and that of its end if it has ended.

    `change` is the mean size; if the size changed, `sizes` lists all sizes.
    """
    series, first, end = background.series, span[0].first, span[-1].end
    healthy = background.level(background.around(first, end))
    parts = _sizes(background, span, least)
    sizes = [math.expm1(background.level(series.values[part.first : part.end]) - healthy) for part in parts]
    counts = np.array([series.iterations_in(part.first, part.end) for part in parts])
    typical = np.array([np.median(series.seconds[part.first : part.end]) for part in parts])
    changes = np.array(sizes)
    onset = int(series.iterations[first])
    end_iteration = int(series.iterations[end]) if end < series.values.size else None
    noticed_at, confidence = _known(background, span, turns)
    event = SpeedChange(
        run=run,
        iteration=onset,
        detected_at=noticed_at,
        end=end_iteration,
        change=float((changes * counts).sum() / counts.sum()),
        verdict="fail-slow",
        where=where,
        confidence=confidence,
        cost_seconds=float((typical * counts * changes / (1 + changes)).sum()),
        sizes=tuple((int(series.iterations[p.first]), s) for p, s in zip(parts, sizes, strict=True))
        if len(parts) > 1
        else (),
    )
    if end_iteration is None:
        return [event]
    over = [turn.detected_at for turn in turns if turn.state == "healthy" and turn.detected_at >= end_iteration]
    surely = int(series.iterations[min(end + 2, series.values.size - 1)])
    return [
        event,
        SpeedChange(
            run=run,
            iteration=end_iteration,
            detected_at=max(min(over, default=surely), surely),
            change=1 / (1 + sizes[-1]) - 1,
            verdict="recovered",
            where=where,
        ),
    ]


def _known(background: Background, span: Sequence[Stretch], turns: Sequence[Turn]) -> tuple[int, float]:
    """Return the iteration in which a slow-down was noticed, and the confidence in the slow-down.

    If the sequential test did not notice it, the iteration is that from which on its values were significantly slower
    than the healthy ones.
    """
    series, first, end = background.series, span[0].first, span[-1].end
    third, last = (int(series.iterations[min(place, end - 1)]) for place in (first + 2, end - 1))
    before = [turn for turn in turns if turn.detected_at < third]
    if before and before[-1].state == "slow":
        return third, before[-1].confidence
    noticed = [turn for turn in turns if turn.state == "slow" and third <= turn.detected_at <= last]
    healthy = series.values[background.before(first)]
    values = np.clip(series.values[first:end] - background.level(healthy), -3 * background.noise, 3 * background.noise)
    counts = np.arange(1, values.size + 1)
    error = background.noise * background.widening * np.sqrt(1 / counts + 1 / max(healthy.size, 1))
    certain = np.flatnonzero(np.cumsum(values) / counts >= (MIN_STANDARD_ERRORS + EXTRA_SHORT_ERRORS / counts) * error)
    certain_at = int(series.iterations[first + int(certain[0])]) if certain.size else last
    if noticed and noticed[0].detected_at <= certain_at:
        return noticed[0].detected_at, noticed[0].confidence
    return max(certain_at, third), LATER_CONFIDENCE


def _sizes(background: Background, span: Sequence[Stretch], least: float) -> list[Stretch]:
    """Return the parts of a slow-down, with neighbours merged unless their sizes differ significantly."""
    parts = list(span)
    i = 1
    while i < len(parts):
        left_part, right_part = parts[i - 1], parts[i]
        first, second = (background.series.values[part.first : part.end] for part in (left_part, right_part))
        apart = abs(background.level(second) - background.level(first))
        if (
            min(left_part.size, right_part.size) <= MAX_HICCUP_VALUES
            or apart < least
            or abs(background.certainty(second, first)) < MIN_STANDARD_ERRORS
        ):
            parts[i - 1 : i + 1] = [Stretch(left_part.first, right_part.end, "slow")]
            i = max(i - 1, 1)
        else:
            i += 1
    return parts


def _fall(background: Background, turn: Turn, least: float, run: int, where: Where | None) -> list[SpeedChange]:
    """Return a recovery if times became shorter for good without a slow-down before: the run was slow from its
    start."""
    place = background.series.place(turn.onset)
    before, after = (background.series.values[places] for places in (background.before(place), background.after(place)))
    if place < SETTLING_VALUES or min(before.size, after.size) < MIN_HEALTHY_VALUES:
        return []
    fall = background.level(after) - background.level(before)
    if fall > -least or background.certainty(after, before) > -MIN_STANDARD_ERRORS:
        return []
    return [
        SpeedChange(
            run=run,
            iteration=turn.onset,
            detected_at=turn.detected_at,
            change=math.expm1(fall),
            verdict="recovered",
            where=where,
            confidence=turn.confidence,
        )
    ]


def _parts(turns: Sequence[Turn], series: SeenTimes) -> list[Stretch]:
    """Cut the series at its turns. A part is "excused" if the test said so; all others are "healthy" for now."""
    size = series.values.size
    excused = np.zeros(size, dtype=np.bool_)
    for turn in turns:
        excused[series.place(turn.onset) :] = turn.state == "excused"
    cuts = sorted({0, size, *(series.place(turn.onset) for turn in turns)})
    return [Stretch(first, end, "excused" if excused[first] else "healthy") for first, end in itertools.pairwise(cuts)]


def _spans(parts: Sequence[Stretch]) -> list[list[Stretch]]:
    """Return all sequences of neighbouring slow parts; each sequence is one slow-down."""
    spans: list[list[Stretch]] = []
    before: State = "healthy"
    for part in parts:
        if part.state == "slow" and part.size:
            if before == "slow":
                spans[-1].append(part)
            else:
                spans.append([part])
        if part.size:
            before = part.state
    return spans
