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
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.offline.analysis import SpeedChange, Where
from resihp.detector.sequential.densities import DECILE_RANGE_SIGMAS, Floats

State = Literal["healthy", "slow", "excused"]

MIN_STANDARD_ERRORS = 4.2
"""Standard errors by which a slow-down as a whole has to stand out; the largest of some thousand excursions of noise is
at about 3.5."""
EXTRA_SHORT_ERRORS = 6.0
"""Additional standard errors for a short slow-down, divided by its number of values: tails weigh more in few values."""
MIN_LATE_ERRORS = 3.0
"""Standard errors for a slow-down that began less than LATE_VALUES before the end of the file and was not over."""
LATER_CONFIDENCE = 0.999
"""Confidence of a slow-down that the test itself had not noticed."""
LATE_VALUES = 20
NEIGHBOUR_VALUES = 60
"""Healthy values on either side with which a slow-down is compared."""
REFERENCE_VALUES = 240
"""Healthy values before a part that decide whether it is slow; many, so that they do not follow a ramp."""
SETTLING_VALUES = 40
"""Number of first values in which a fall is the end of the start-up."""
MAX_HICCUP_VALUES = 6
"""A slow-down of at most this many values is a hiccup: an evaluation, a checkpoint, the settling after a restart."""
SKIPPED_VALUES = 3
"""Number of first values that are not used as reference."""
MIN_PART_VALUES = 12
"""Smallest size of a part that only hindsight finds, in values."""
MIN_SHIFT_SHARE = 0.8
"""Share of the smallest reported shift that a slow-down must measure: its true size may be larger."""
MIN_HEALTHY_VALUES = 8
"""Number of healthy values that a comparison needs."""
NOISE_FLOOR = 0.003
"""Lower bound of a series' noise, log units."""
CHUNK_VALUES = 100
"""Values over which a level may wander as part of the noise."""
MAX_REMAINING_SHARE = 0.25
"""Share of a slow-down that may remain after its end."""
SEARCH_VALUES = 10
"""Values around a turn in which its exact place is searched."""
REFINEMENT_ROUNDS = 3


class SeenTimes(msgspec.Struct, frozen=True, eq=False):
    """The values of a sequential test: (n,) iterations; (n,) logs of seconds, without the part of peers or workload
    where that is taken out; (n,) seconds."""

    iterations: npt.NDArray[np.int64]
    values: Floats
    seconds: Floats

    def iterations_in(self, first: int, end: int) -> int:
        """Return the number of iterations that the times from `first` up to `end` stand for, since not every iteration
        need have a time: each stands for those up to the next, the last for as many as the one before it."""
        gaps = np.diff(self.iterations)
        around = gaps[max(end - 2, 0) : end] if end - first < 2 else gaps[end - 2 : end - 1]
        return int(self.iterations[end - 1] - self.iterations[first] + (around.min() if around.size else 1))

    def place(self, iteration: int) -> int:
        return int(np.searchsorted(self.iterations, iteration))


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level that a sequential test noticed."""

    onset: int
    """Iteration of the onset; `detected_at` is an iteration as well."""
    detected_at: int
    state: State
    """State of the series from then on, according to the test. "excused": slow for a known reason."""
    confidence: float = 1.0


class Stretch(msgspec.Struct, frozen=True):
    """Values between two turns: from `first` up to, but without, `end`, as places in a `SeenTimes`."""

    first: int
    end: int
    state: State

    @property
    def size(self) -> int:
        return self.end - self.first


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
    events = [event for span in spans for event in background.slow_down_events(span, turns, least, run, where)]
    ends = [event.iteration for event in events]
    for turn in turns:
        if turn.state == "healthy" and all(abs(turn.onset - end) > SEARCH_VALUES for end in ends):
            events += background.fall(turn, least, run, where)
            ends += [turn.onset]
    return sorted(events, key=lambda event: (event.detected_at, event.iteration))


class Background:
    """A series in parts: the level of the healthy ones around a place, and the noise within parts."""

    def __init__(self, series: SeenTimes, parts: Sequence[Stretch]) -> None:
        self.series = series
        healthy = np.ones(series.values.size, dtype=np.bool_)
        healthy[:SKIPPED_VALUES] = False
        for part in parts:
            if part.state != "healthy":
                healthy[part.first : part.end] = False
        self._places = np.flatnonzero(healthy)
        self.noise, self.correlation = NOISE_FLOOR, 0.0
        """Standard deviation of a value, and its correlation with the one before."""
        chunks = [
            chunk - np.median(chunk)
            for part in parts
            if part.size > MAX_HICCUP_VALUES
            for chunk in np.array_split(series.values[part.first : part.end], max(1, round(part.size / CHUNK_VALUES)))
        ]
        if chunks:
            self._measure(np.concatenate(chunks))

    def _measure(self, rest: Floats) -> None:
        low, high = np.quantile(rest, (0.1, 0.9))
        self.noise = max(float(high - low) / DECILE_RANGE_SIGMAS, NOISE_FLOOR)
        clipped = np.clip(rest, -3 * self.noise, 3 * self.noise)
        rho = float(clipped[1:] @ clipped[:-1]) / max(float(clipped @ clipped), 1e-12)
        self.correlation = min(max(rho + (1 + 4 * rho) / rest.size, 0.0), 0.9)

    def around(self, first: int, end: int) -> Floats:
        """Return the healthy values before and after values `first` up to `end`."""
        return np.asarray(self.series.values[np.concatenate([self._before(first), self._after(end)])])

    def _before(self, place: int) -> npt.NDArray[np.intp]:
        return self._places[self._places < place][-NEIGHBOUR_VALUES:]

    def _after(self, place: int) -> npt.NDArray[np.intp]:
        return self._places[self._places >= place][:NEIGHBOUR_VALUES]

    def level(self, values: Floats) -> float:
        """Return the mean of values, with those far from their median clipped."""
        middle = float(np.median(values))
        reach = 2.5 * max(self.noise, 1.4826 * float(np.median(np.abs(values - middle))))
        return float(np.clip(values, middle - reach, middle + reach).mean())

    def certainty(self, values: Floats, others: Floats) -> float:
        """Return the difference between the levels of two sets of values, in standard errors."""
        error = self.noise * self._widening * math.sqrt(1 / values.size + 1 / others.size)
        return (self.level(values) - self.level(others)) / error

    @property
    def _widening(self) -> float:
        """Factor by which means of these correlated values scatter more than means of independent ones."""
        return math.sqrt((1 + self.correlation) / (1 - self.correlation))

    # --- parts ------------------------------------------------------------------------------------------------------

    def divided(self, part: Stretch) -> list[Stretch]:
        """Cut a part where its two sides differ most, repeatedly while they differ (binary segmentation)."""
        if part.state == "excused" or part.size < 2 * MIN_PART_VALUES:
            return [part]
        values = self.series.values[part.first : part.end]
        middle = float(np.median(values))
        values = np.clip(values - middle, -2.5 * self.noise, 2.5 * self.noise)
        counts = np.arange(1, part.size)
        sums = np.cumsum(values)[:-1]
        apart = np.abs(sums / counts - (values.sum() - sums) / (part.size - counts))
        certainty = apart * np.sqrt(counts * (part.size - counts) / part.size)
        certainty[: MIN_PART_VALUES - 1] = certainty[part.size - MIN_PART_VALUES :] = 0.0
        best = int(np.argmax(certainty))
        if certainty[best] < MIN_STANDARD_ERRORS * self.noise * self._widening:
            return [part]
        cut = part.first + best + 1
        return [*self.divided(Stretch(part.first, cut, part.state)), *self.divided(Stretch(cut, part.end, part.state))]

    def united(self, parts: Sequence[Stretch]) -> list[Stretch]:
        """Merge neighbours whose difference may be noise, the most similar ones first."""
        kept = list(parts)
        borders = [self._border(kept, i) for i in range(len(kept) - 1)]
        while borders and min(borders) < 0:
            i = int(np.argmin(borders))
            kept[i : i + 2] = [Stretch(kept[i].first, kept[i + 1].end, kept[i].state)]
            del borders[i]
            for j in (i - 1, i):
                if 0 <= j < len(borders):
                    borders[j] = self._border(kept, j)
        return kept

    def _border(self, parts: Sequence[Stretch], i: int) -> float:
        """Return by how much the certainty of the border behind part `i` exceeds the required one."""
        left_part, right_part = parts[i], parts[i + 1]
        if "excused" in (left_part.state, right_part.state):
            return 0.0
        values = self.series.values
        late = right_part.end >= values.size and right_part.size < LATE_VALUES
        certain = (
            MIN_LATE_ERRORS if late else MIN_STANDARD_ERRORS + EXTRA_SHORT_ERRORS / min(left_part.size, right_part.size)
        )
        return (
            abs(self.certainty(values[right_part.first : right_part.end], values[left_part.first : left_part.end]))
            - certain
        )

    def classified(self, parts: Sequence[Stretch], least: float) -> list[Stretch]:
        """Mark each part slow or healthy against the healthy ones before it; the first healthy part cannot be slow."""
        classified: list[Stretch] = []
        places = np.arange(0)
        before = 0.0
        for part in parts:
            state: State = part.state
            if state != "excused":
                shift = 0.0
                if places.size >= MIN_HEALTHY_VALUES:
                    healthy = self.series.values[places[-REFERENCE_VALUES:]]
                    values = self.series.values[part.first : part.end]
                    shift = self.level(values) - self.level(healthy)
                    error = self.noise * self._widening * math.sqrt(1 / values.size + 1 / healthy.size)
                far = max(least, MAX_REMAINING_SHARE * before, 2.5 * error) if before else MIN_SHIFT_SHARE * least
                state = "slow" if shift >= far else "healthy"
                before = shift if state == "slow" else 0.0
            if state == "healthy":
                places = np.append(places, np.arange(max(part.first, SKIPPED_VALUES), part.end))
            classified.append(Stretch(part.first, part.end, state))
        return classified

    def located(self, i: int, parts: Sequence[Stretch]) -> Stretch:
        """Return a part with its ends moved to the most probable places of the changes."""
        first = self._turn(parts[i - 1], parts[i]) if i else parts[0].first
        end = self._turn(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i].end
        return Stretch(first, end, parts[i].state)

    def _turn(self, left_part: Stretch, right_part: Stretch) -> int:
        """Return the turn between two parts, near their border, or in the first half of a long second part."""
        values = self.series.values
        first, end = (
            max(left_part.first + 1, right_part.first - SEARCH_VALUES),
            min(right_part.first + max(SEARCH_VALUES, right_part.size // 2), right_part.end),
        )
        low, high = (
            self.level(values[left_part.first : left_part.end]),
            self.level(values[right_part.first : right_part.end]),
        )
        if left_part.state == right_part.state or "excused" in (left_part.state, right_part.state) or end - first < 2:
            return right_part.first
        reach = max(2 * self.noise, abs(high - low) / 2)
        gains = math.copysign(1.0, high - low) * np.clip(values[first:end] - (low + high) / 2, -reach, reach)
        return first + int(np.argmax(np.cumsum(gains[::-1])[::-1]))

    def stands(self, span: Sequence[Stretch], least: float, more: float) -> bool:
        """Whether a slow-down stands as a whole; `more`: additional standard errors."""
        first, end = span[0].first, span[-1].end
        values, others = self.series.values[first:end], self.around(first, end)
        lasts = end >= self.series.values.size
        if others.size < MIN_HEALTHY_VALUES or not values.size or (values.size <= MAX_HICCUP_VALUES and not lasts):
            return False
        if (
            min(self.level(values) - self.level(others), 1.5 * float(np.median(values) - np.median(others)))
            < MIN_SHIFT_SHARE * least
        ):
            return False
        certain = (
            MIN_LATE_ERRORS
            if lasts and values.size < LATE_VALUES
            else MIN_STANDARD_ERRORS + EXTRA_SHORT_ERRORS / values.size
        )
        return self.certainty(values, others) >= certain + more

    # --- events -----------------------------------------------------------------------------------------------------

    def slow_down_events(
        self, span: Sequence[Stretch], turns: Sequence[Turn], least: float, run: int, where: Where | None
    ) -> list[SpeedChange]:
        """Return a slow-down, and its end. Its size is the mean; if the size changed, the sizes are listed as well."""
        series, first, end = self.series, span[0].first, span[-1].end
        healthy = self.level(self.around(first, end))
        parts = self._sizes(span, least)
        sizes = [math.expm1(self.level(series.values[part.first : part.end]) - healthy) for part in parts]
        counts = np.array([series.iterations_in(part.first, part.end) for part in parts])
        typical = np.array([np.median(series.seconds[part.first : part.end]) for part in parts])
        changes = np.array(sizes)
        onset = int(series.iterations[first])
        end_iteration = int(series.iterations[end]) if end < series.values.size else None
        noticed_at, confidence = self._known(span, turns)
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

    def _known(self, span: Sequence[Stretch], turns: Sequence[Turn]) -> tuple[int, float]:
        """Return the iteration in which a slow-down was noticed, and the confidence in it.

        If the test had not noticed it: when its values so far stood out from the healthy ones.
        """
        series, first, end = self.series, span[0].first, span[-1].end
        third, last = (int(series.iterations[min(place, end - 1)]) for place in (first + 2, end - 1))
        before = [turn for turn in turns if turn.detected_at < third]
        if before and before[-1].state == "slow":
            return third, before[-1].confidence
        noticed = [turn for turn in turns if turn.state == "slow" and third <= turn.detected_at <= last]
        healthy = series.values[self._before(first)]
        values = np.clip(series.values[first:end] - self.level(healthy), -3 * self.noise, 3 * self.noise)
        counts = np.arange(1, values.size + 1)
        error = self.noise * self._widening * np.sqrt(1 / counts + 1 / max(healthy.size, 1))
        certain = np.flatnonzero(
            np.cumsum(values) / counts >= (MIN_STANDARD_ERRORS + EXTRA_SHORT_ERRORS / counts) * error
        )
        certain_at = int(series.iterations[first + int(certain[0])]) if certain.size else last
        if noticed and noticed[0].detected_at <= certain_at:
            return noticed[0].detected_at, noticed[0].confidence
        return max(certain_at, third), LATER_CONFIDENCE

    def _sizes(self, span: Sequence[Stretch], least: float) -> list[Stretch]:
        """Return the parts of a slow-down whose sizes differ with certainty."""
        parts = list(span)
        i = 1
        while i < len(parts):
            left_part, right_part = parts[i - 1], parts[i]
            first, second = (self.series.values[part.first : part.end] for part in (left_part, right_part))
            apart = abs(self.level(second) - self.level(first))
            if (
                min(left_part.size, right_part.size) <= MAX_HICCUP_VALUES
                or apart < least
                or abs(self.certainty(second, first)) < MIN_STANDARD_ERRORS
            ):
                parts[i - 1 : i + 1] = [Stretch(left_part.first, right_part.end, "slow")]
                i = max(i - 1, 1)
            else:
                i += 1
        return parts

    def fall(self, turn: Turn, least: float, run: int, where: Where | None) -> list[SpeedChange]:
        """Return a recovery if times became shorter for good without a slow-down before: slow from the start."""
        place = self.series.place(turn.onset)
        before, after = (self.series.values[places] for places in (self._before(place), self._after(place)))
        if place < SETTLING_VALUES or min(before.size, after.size) < MIN_HEALTHY_VALUES:
            return []
        fall = self.level(after) - self.level(before)
        if fall > -least or self.certainty(after, before) > -MIN_STANDARD_ERRORS:
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
