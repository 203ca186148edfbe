"""What was noticed while times came, judged again once a file is read to its end. Pure; called for each series.

A sequential test that finds a slow-down within a few iterations takes noise for one now and then. A file shows what
came of it: what was a slow-down stands out from the healthy times around it as a whole, by its mean and by its median.
So the series is cut where the test noticed a turn and, for what is milder than noise but lasts, where its halves differ
most; what noise may have set apart is united again; and each part is healthy or slow by its own level.

Decides which slow-downs stand, with their spans, sizes and costs. Never tells them earlier than somebody who watched
the times could have noticed. Used by `resihp.detector.offline.series` and `resihp.detector.offline.workers`.
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

CERTAIN = 4.2
"""Standard errors by which a slow-down has to stand out as a whole; the largest of some thousand excursions of noise
is at about 3.5."""
CERTAIN_SHORT = 6.0
"""More of them where it lasted for few iterations, over their number: of few values, tails weigh more."""
CERTAIN_LATE = 3.0
"""Of one that began less than LATE iterations before the end of the file, and was not over."""
CONFIDENCE = 0.999
"""That the former are worth."""
LATE = 20
AROUND = 60
"""Healthy values on either side that a slow-down is compared with."""
LONG_BEFORE = 240
"""Healthy values before a part that say whether it is slow: so many that a ramp does not take them along."""
SETTLING = 40
"""First values in which a fall is the end of the start."""
SHORT = 6
"""What lasts no longer is a hiccup: an evaluation, a checkpoint, the settling after a restart."""
SKIPPED = 3
"""First values that nothing is compared with."""
LEAST_PART = 12
"""Values that a part has at least that only hindsight tells."""
MILDEST = 0.8
"""Share of the smallest shift told that a slow-down must have been measured to have: it may have been as large."""
FEW = 8
"""Fewer healthy values tell nothing."""
STEADIEST = 0.003
"""No series is taken for steadier than this, log units."""
CHUNK = 100
"""Values over which a level may wander and still be noise."""
BACK = 0.25
"""Share of a slow-down that may stay for good when it is over."""
NEAR = 10
"""Values around a turn in which it is looked for more exactly."""
ROUNDS = 3


class SeenTimes(msgspec.Struct, frozen=True, eq=False):
    """What a sequential test has seen: (n,) iterations; (n,) logs of seconds, or what is left of them where the peers'
    or the workload's part is taken out; (n,) seconds."""

    iterations: npt.NDArray[np.int64]
    values: Floats
    seconds: Floats

    def iterations_in(self, first: int, end: int) -> int:
        """Return how many iterations the times from `first` up to `end` stand for, as not each need have a time: each
        for those up to the next, the last for as many as the one before it."""
        gaps = np.diff(self.iterations)
        around = gaps[max(end - 2, 0) : end] if end - first < 2 else gaps[end - 2 : end - 1]
        return int(self.iterations[end - 1] - self.iterations[first] + (around.min() if around.size else 1))

    def place(self, iteration: int) -> int:
        return int(np.searchsorted(self.iterations, iteration))


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level that a sequential test has noticed."""

    onset: int
    """Iteration; so is the next one."""
    detected_at: int
    state: State
    """What the test took times for from then on. "excused": slow for a reason."""
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
    """Slow-downs of a series and their ends, in order. `least`: smallest shift that is told, log units. `among`: series
    that are looked at, of which this is one; the more, the further must it stand out."""
    if series.values.size < 2 * FEW:
        return []
    turns = sorted(turns, key=lambda turn: turn.detected_at)
    more = math.sqrt(CERTAIN**2 + 2 * math.log(among)) - CERTAIN
    parts = _parts(turns, series)
    for _ in range(ROUNDS):
        background = Background(series, parts)
        parts = background.united([piece for part in parts for piece in background.divided(part)])
    parts = Background(series, parts).classified(parts, least)
    background = Background(series, parts)
    parts = [background.located(i, parts) for i in range(len(parts))]
    spans = [span for span in _spans(parts) if background.stands(span, least, more)]
    stand = {part for span in spans for part in span}
    background = Background(
        series, [p if p.state != "slow" or p in stand else Stretch(p.first, p.end, "healthy") for p in parts]
    )
    found = [event for span in spans for event in background.told(span, turns, least, run, where)]
    ends = [event.iteration for event in found]
    for turn in turns:
        if turn.state == "healthy" and all(abs(turn.onset - end) > NEAR for end in ends):
            found += background.fall(turn, least, run, where)
            ends += [turn.onset]
    return sorted(found, key=lambda event: (event.detected_at, event.iteration))


class Background:
    """A series in parts: the level of the healthy ones around a place, and the noise within parts."""

    def __init__(self, series: SeenTimes, parts: Sequence[Stretch]) -> None:
        self.series = series
        healthy = np.ones(series.values.size, dtype=np.bool_)
        healthy[:SKIPPED] = False
        for part in parts:
            if part.state != "healthy":
                healthy[part.first : part.end] = False
        self._places = np.flatnonzero(healthy)
        self.noise, self.correlation = STEADIEST, 0.0
        """Standard deviation of a value, and how much it resembles the one before."""
        chunks = [
            chunk - np.median(chunk)
            for part in parts
            if part.size > SHORT
            for chunk in np.array_split(series.values[part.first : part.end], max(1, round(part.size / CHUNK)))
        ]
        if chunks:
            self._measure(np.concatenate(chunks))

    def _measure(self, rest: Floats) -> None:
        low, high = np.quantile(rest, (0.1, 0.9))
        self.noise = max(float(high - low) / DECILE_RANGE_SIGMAS, STEADIEST)
        clipped = np.clip(rest, -3 * self.noise, 3 * self.noise)
        rho = float(clipped[1:] @ clipped[:-1]) / max(float(clipped @ clipped), 1e-12)
        self.correlation = min(max(rho + (1 + 4 * rho) / rest.size, 0.0), 0.9)

    def around(self, first: int, end: int) -> Floats:
        """Healthy values before and after values `first` up to `end`."""
        return np.asarray(self.series.values[np.concatenate([self._before(first), self._after(end)])])

    def _before(self, place: int) -> npt.NDArray[np.intp]:
        return self._places[self._places < place][-AROUND:]

    def _after(self, place: int) -> npt.NDArray[np.intp]:
        return self._places[self._places >= place][:AROUND]

    def level(self, values: Floats) -> float:
        """Mean of values, those far from their median drawn in."""
        middle = float(np.median(values))
        reach = 2.5 * max(self.noise, 1.4826 * float(np.median(np.abs(values - middle))))
        return float(np.clip(values, middle - reach, middle + reach).mean())

    def certainty(self, values: Floats, others: Floats) -> float:
        """Standard errors between the levels of two sets of values."""
        error = self.noise * self._widening * math.sqrt(1 / values.size + 1 / others.size)
        return (self.level(values) - self.level(others)) / error

    @property
    def _widening(self) -> float:
        """By how much more than means of independent values theirs scatter."""
        return math.sqrt((1 + self.correlation) / (1 - self.correlation))

    # --- parts ------------------------------------------------------------------------------------------------------

    def divided(self, part: Stretch) -> list[Stretch]:
        """A part cut where its two sides differ most, again and again while they do (binary segmentation)."""
        if part.state == "excused" or part.size < 2 * LEAST_PART:
            return [part]
        values = self.series.values[part.first : part.end]
        middle = float(np.median(values))
        values = np.clip(values - middle, -2.5 * self.noise, 2.5 * self.noise)
        counts = np.arange(1, part.size)
        sums = np.cumsum(values)[:-1]
        apart = np.abs(sums / counts - (values.sum() - sums) / (part.size - counts))
        certainty = apart * np.sqrt(counts * (part.size - counts) / part.size)
        certainty[: LEAST_PART - 1] = certainty[part.size - LEAST_PART :] = 0.0
        best = int(np.argmax(certainty))
        if certainty[best] < CERTAIN * self.noise * self._widening:
            return [part]
        cut = part.first + best + 1
        return [*self.divided(Stretch(part.first, cut, part.state)), *self.divided(Stretch(cut, part.end, part.state))]

    def united(self, parts: Sequence[Stretch]) -> list[Stretch]:
        """Neighbours whose levels noise may have set apart are one, those that are most alike first."""
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
        """How much more certain than it has to be the border behind part `i` is."""
        one, two = parts[i], parts[i + 1]
        if "excused" in (one.state, two.state):
            return 0.0
        values = self.series.values
        late = two.end >= values.size and two.size < LATE
        certain = CERTAIN_LATE if late else CERTAIN + CERTAIN_SHORT / min(one.size, two.size)
        return abs(self.certainty(values[two.first : two.end], values[one.first : one.end])) - certain

    def classified(self, parts: Sequence[Stretch], least: float) -> list[Stretch]:
        """Slow or healthy, each part against the healthy ones before it; nothing is slow before anything is healthy."""
        told: list[Stretch] = []
        places = np.arange(0)
        before = 0.0
        for part in parts:
            state: State = part.state
            if state != "excused":
                shift = 0.0
                if places.size >= FEW:
                    healthy = self.series.values[places[-LONG_BEFORE:]]
                    values = self.series.values[part.first : part.end]
                    shift = self.level(values) - self.level(healthy)
                    error = self.noise * self._widening * math.sqrt(1 / values.size + 1 / healthy.size)
                far = max(least, BACK * before, 2.5 * error) if before else MILDEST * least
                state = "slow" if shift >= far else "healthy"
                before = shift if state == "slow" else 0.0
            if state == "healthy":
                places = np.append(places, np.arange(max(part.first, SKIPPED), part.end))
            told.append(Stretch(part.first, part.end, state))
        return told

    def located(self, i: int, parts: Sequence[Stretch]) -> Stretch:
        """A part with its first and last value where times changed most probably."""
        first = self._turn(parts[i - 1], parts[i]) if i else parts[0].first
        end = self._turn(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i].end
        return Stretch(first, end, parts[i].state)

    def _turn(self, one: Stretch, two: Stretch) -> int:
        """Between two parts, near their border or, where a test had been slow already, wherever it may be."""
        values = self.series.values
        first, end = max(one.first + 1, two.first - NEAR), min(two.first + max(NEAR, two.size // 2), two.end)
        low, high = self.level(values[one.first : one.end]), self.level(values[two.first : two.end])
        if one.state == two.state or "excused" in (one.state, two.state) or end - first < 2:
            return two.first
        reach = max(2 * self.noise, abs(high - low) / 2)
        gains = math.copysign(1.0, high - low) * np.clip(values[first:end] - (low + high) / 2, -reach, reach)
        return first + int(np.argmax(np.cumsum(gains[::-1])[::-1]))

    def stands(self, span: Sequence[Stretch], least: float, more: float) -> bool:
        """Whether a slow-down is one, taken as a whole; `more`: standard errors on top."""
        first, end = span[0].first, span[-1].end
        values, others = self.series.values[first:end], self.around(first, end)
        lasts = end >= self.series.values.size
        if others.size < FEW or not values.size or (values.size <= SHORT and not lasts):
            return False
        if (
            min(self.level(values) - self.level(others), 1.5 * float(np.median(values) - np.median(others)))
            < MILDEST * least
        ):
            return False
        certain = CERTAIN_LATE if lasts and values.size < LATE else CERTAIN + CERTAIN_SHORT / values.size
        return self.certainty(values, others) >= certain + more

    # --- events -----------------------------------------------------------------------------------------------------

    def told(
        self, span: Sequence[Stretch], turns: Sequence[Turn], least: float, run: int, where: Where | None
    ) -> list[SpeedChange]:
        """A slow-down, and its end. Its size is the mean one; where it changed, its sizes are told as well."""
        series, first, end = self.series, span[0].first, span[-1].end
        healthy = self.level(self.around(first, end))
        parts = self._sizes(span, least)
        sizes = [math.expm1(self.level(series.values[part.first : part.end]) - healthy) for part in parts]
        counts = np.array([series.iterations_in(part.first, part.end) for part in parts])
        typical = np.array([np.median(series.seconds[part.first : part.end]) for part in parts])
        changes = np.array(sizes)
        onset = int(series.iterations[first])
        end_iteration = int(series.iterations[end]) if end < series.values.size else None
        known, confidence = self._known(span, turns)
        event = SpeedChange(
            run=run,
            iteration=onset,
            detected_at=known,
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
        """Iteration in which a slow-down was noticed, and the confidence with which.

        Where the test had not noticed anything: when all that had come of it stood out from what was healthy.
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
        certain = np.flatnonzero(np.cumsum(values) / counts >= (CERTAIN + CERTAIN_SHORT / counts) * error)
        at = int(series.iterations[first + int(certain[0])]) if certain.size else last
        if noticed and noticed[0].detected_at <= at:
            return noticed[0].detected_at, noticed[0].confidence
        return max(at, third), CONFIDENCE

    def _sizes(self, span: Sequence[Stretch], least: float) -> list[Stretch]:
        """Parts of a slow-down whose sizes differ beyond doubt."""
        parts = list(span)
        i = 1
        while i < len(parts):
            one, two = parts[i - 1], parts[i]
            first, second = (self.series.values[part.first : part.end] for part in (one, two))
            apart = abs(self.level(second) - self.level(first))
            if min(one.size, two.size) <= SHORT or apart < least or abs(self.certainty(second, first)) < CERTAIN:
                parts[i - 1 : i + 1] = [Stretch(one.first, two.end, "slow")]
                i = max(i - 1, 1)
            else:
                i += 1
        return parts

    def fall(self, turn: Turn, least: float, run: int, where: Where | None) -> list[SpeedChange]:
        """Times became shorter for good where no slow-down ended: they were slow from the start."""
        place = self.series.place(turn.onset)
        before, after = (self.series.values[places] for places in (self._before(place), self._after(place)))
        if place < SETTLING or min(before.size, after.size) < FEW:
            return []
        fall = self.level(after) - self.level(before)
        if fall > -least or self.certainty(after, before) > -CERTAIN:
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
    """What lies between turns, excused where a test said so, and not yet judged else."""
    size = series.values.size
    excused = np.zeros(size, dtype=np.bool_)
    for turn in turns:
        excused[series.place(turn.onset) :] = turn.state == "excused"
    cuts = sorted({0, size, *(series.place(turn.onset) for turn in turns)})
    return [Stretch(first, end, "excused" if excused[first] else "healthy") for first, end in itertools.pairwise(cuts)]


def _spans(parts: Sequence[Stretch]) -> list[list[Stretch]]:
    """Runs of slow parts."""
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
