"""Judges the changes noticed in a series again, once the file is read to its end. Pure; called for each series.

A sequential test that finds a slow-down within a few iterations sometimes takes noise for one. The rest of the file
shows the difference: a real slow-down stands out from the healthy times around it as a whole, by its mean and by its
median. The series is therefore cut where the test noticed a turn, and, for shifts milder than noise that last, where
its halves differ most; parts that noise may have separated are united again; and each part is healthy or slow by its
own level.

Decides which slow-downs stand, with their spans, sizes and costs. Never reports one earlier than an observer of the
times could have noticed it. Used by `resihp.detector.offline.series` and `resihp.detector.offline.workers`.
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
"""Confidence of a slow-down that the test itself had not noticed."""
SETTLING_VALUES = 40
"""Number of first values in which a fall is the end of the start-up."""
REFINEMENT_ROUNDS = 3


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level that a sequential test noticed."""

    onset: int
    """Iteration of the onset; `detected_at` is an iteration as well."""
    detected_at: int
    state: State
    """State of the series from then on, according to the test. "excused": slow for a known reason."""
    confidence: float = 1.0


def judged(
    turns: Sequence[Turn], series: SeenTimes, least: float, *, among: int = 1, run: int = 0, where: Where | None = None
) -> list[SpeedChange]:
    """Return the slow-downs of a series and their ends, in order. `least`: smallest reported shift, log units. `among`:
    number of series that are examined; the more, the further must each slow-down stand out."""
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
    """Return a slow-down, and its end. Its size is the mean; if the size changed, the sizes are listed as well."""
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
    """Return the iteration in which a slow-down was noticed, and the confidence in it.

    If the test had not noticed it: when its values so far stood out from the healthy ones.
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
    """Return the parts of a slow-down whose sizes differ with certainty."""
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
    """Return a recovery if times became shorter for good without a slow-down before: slow from the start."""
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
    """Cut the series at its turns; parts are excused where a test said so, and not yet judged otherwise."""
    size = series.values.size
    excused = np.zeros(size, dtype=np.bool_)
    for turn in turns:
        excused[series.place(turn.onset) :] = turn.state == "excused"
    cuts = sorted({0, size, *(series.place(turn.onset) for turn in turns)})
    return [Stretch(first, end, "excused" if excused[first] else "healthy") for first, end in itertools.pairwise(cuts)]


def _spans(parts: Sequence[Stretch]) -> list[list[Stretch]]:
    """Return the runs of slow parts."""
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
