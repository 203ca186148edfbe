"""Divides a series into parts, and judges whether a part is slow compared with the healthy values around it. Pure.

It estimates the level of healthy values around a place, and the noise within parts. Never reports an event: its caller
`resihp.detector.offline.hindsight` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.sequential.densities import DECILE_RANGE_SIGMAS, Floats

State = Literal["healthy", "slow", "excused"]

MIN_STANDARD_ERRORS = 4.2
"""Smallest significance of a reported slow-down as a whole, in standard errors. The largest of several thousand
excursions of noise has about 3.5."""

EXTRA_SHORT_ERRORS = 6.0
"""Additional standard errors for a short slow-down, divided by its number of values: tails matter more in few
values."""

MIN_LATE_ERRORS = 3.0
"""Smallest significance, in standard errors, of a slow-down that began less than LATE_VALUES values before the end of
the file and has not ended."""

LATE_VALUES = 20

NEIGHBOUR_VALUES = 60
"""Number of healthy values before and after a slow-down with which it is compared."""

REFERENCE_VALUES = 240
"""Number of healthy values before a part with which it is compared; large, so that they do not follow a slow ramp."""

MAX_HICCUP_VALUES = 6
"""A slow-down of at most this many values is a hiccup: an evaluation, a checkpoint, the time after a restart."""

SKIPPED_VALUES = 3
"""Number of first values that are never used for comparison."""

MIN_PART_VALUES = 12
"""Smallest number of values of a part that is found without a turn of the sequential test."""

MIN_SHIFT_SHARE = 0.8
"""Smallest measured shift of a reported slow-down, as a share of the smallest reported shift: the true one may be
larger."""

MIN_HEALTHY_VALUES = 8
"""Smallest number of healthy values for a comparison."""

NOISE_FLOOR = 0.003
"""Lower bound of a series' noise, log units."""

CHUNK_VALUES = 100
"""Number of values over which the noise is measured; a slower wandering of the level is not part of the noise."""

MAX_REMAINING_SHARE = 0.25
"""Share of a slow-down that may remain after its end."""

SEARCH_VALUES = 10
"""Number of values around a turn in which its exact place is searched."""


class SeenTimes(msgspec.Struct, frozen=True, eq=False):
    """The values that a sequential test took; all arrays have shape (n,).

    `values`: logs of seconds, minus the part that peers or the workload explain if it is known; `seconds`: the
    times themselves.
    """

    iterations: npt.NDArray[np.int64]
    values: Floats
    seconds: Floats

    def iterations_in(self, first: int, end: int) -> int:
        """Return the number of iterations from value `first` up to, but without, value `end`.

        Not every iteration has a value: each value represents the iterations up to the next value, and the last value
        as many as the one before it.
        """
        gaps = np.diff(self.iterations)
        around = gaps[max(end - 2, 0) : end] if end - first < 2 else gaps[end - 2 : end - 1]
        return int(self.iterations[end - 1] - self.iterations[first] + (around.min() if around.size else 1))

    def place(self, iteration: int) -> int:
        return int(np.searchsorted(self.iterations, iteration))


class Stretch(msgspec.Struct, frozen=True):
    """A part of a series: the values of a `SeenTimes` from index `first` up to, but without, index `end`."""

    first: int
    end: int
    state: State

    @property
    def size(self) -> int:
        return self.end - self.first


class Background:
    """A series in parts: gives the level of its healthy parts around a place, and the noise within parts."""

    def __init__(self, series: SeenTimes, parts: Sequence[Stretch]) -> None:
        self.series = series
        healthy = np.ones(series.values.size, dtype=np.bool_)
        healthy[:SKIPPED_VALUES] = False
        for part in parts:
            if part.state != "healthy":
                healthy[part.first : part.end] = False
        self._places = np.flatnonzero(healthy)
        self.noise, self.correlation = NOISE_FLOOR, 0.0
        """Lag-one correlation of the values; `noise` is the standard deviation of a value within a part, log units."""
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
        """Return the nearest healthy values before `first` and from `end` on."""
        return np.asarray(self.series.values[np.concatenate([self.before(first), self.after(end)])])

    def before(self, place: int) -> npt.NDArray[np.intp]:
        """Return the indices of the last healthy values before index `place`."""
        return self._places[self._places < place][-NEIGHBOUR_VALUES:]

    def after(self, place: int) -> npt.NDArray[np.intp]:
        """Return the indices of the first healthy values from index `place` on."""
        return self._places[self._places >= place][:NEIGHBOUR_VALUES]

    def level(self, values: Floats) -> float:
        """Return a robust mean of values: values far from the median are clipped."""
        middle = float(np.median(values))
        reach = 2.5 * max(self.noise, 1.4826 * float(np.median(np.abs(values - middle))))
        return float(np.clip(values, middle - reach, middle + reach).mean())

    def certainty(self, values: Floats, others: Floats) -> float:
        """Return the difference between the levels of two sets of values, in standard errors."""
        error = self.noise * self.widening * math.sqrt(1 / values.size + 1 / others.size)
        return (self.level(values) - self.level(others)) / error

    @property
    def widening(self) -> float:
        """Factor by which means of the values scatter more, because consecutive values are correlated."""
        return math.sqrt((1 + self.correlation) / (1 - self.correlation))

    # --- parts ------------------------------------------------------------------------------------------------------

    def divided(self, part: Stretch) -> list[Stretch]:
        """Cut a part where its two sides differ most, and again each side, while they differ significantly.

        This is binary segmentation. Returns the part itself if its sides do not differ.
        """
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
        if certainty[best] < MIN_STANDARD_ERRORS * self.noise * self.widening:
            return [part]
        cut = part.first + best + 1
        return [*self.divided(Stretch(part.first, cut, part.state)), *self.divided(Stretch(cut, part.end, part.state))]

    def united(self, parts: Sequence[Stretch]) -> list[Stretch]:
        """Merge neighbouring parts that do not differ significantly, the most similar ones first."""
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
        """Return the significance of the border after part `i` minus the required significance, in standard errors."""
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
        """Return the parts, each marked slow or healthy by comparison with the healthy parts before it.

        The first parts are healthy until there are enough healthy values to compare a part with.
        """
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
                    error = self.noise * self.widening * math.sqrt(1 / values.size + 1 / healthy.size)
                far = max(least, MAX_REMAINING_SHARE * before, 2.5 * error) if before else MIN_SHIFT_SHARE * least
                state = "slow" if shift >= far else "healthy"
                before = shift if state == "slow" else 0.0
            if state == "healthy":
                places = np.append(places, np.arange(max(part.first, SKIPPED_VALUES), part.end))
            classified.append(Stretch(part.first, part.end, state))
        return classified

    def located(self, i: int, parts: Sequence[Stretch]) -> Stretch:
        """Return part `i` with both ends moved to the most probable places of the changes."""
        first = self._turn(parts[i - 1], parts[i]) if i else parts[0].first
        end = self._turn(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i].end
        return Stretch(first, end, parts[i].state)

    def _turn(self, left_part: Stretch, right_part: Stretch) -> int:
        """Return the most probable place of the change between two parts.

        It is searched near their border, and in the first half of a long second part.
        """
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
        """Return whether a slow-down as a whole is large and significant enough to be reported.

        `more`: additional standard errors that are required.
        """
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
