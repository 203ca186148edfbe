"""Densities of iteration times around a level, on a log scale: Student's t, mixed with outliers. Pure; decides nothing.

Used by `resihp.detector.sequential.changes`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

T_DEGREES = 7.0
"""Degrees of freedom: nearly Gaussian, but with tails in which a single value cannot become evidence."""
T_PEAK = math.gamma((T_DEGREES + 1) / 2) / math.gamma(T_DEGREES / 2) / math.sqrt(math.pi * T_DEGREES)
GAUSSIAN_SCALE = 0.911
"""Scale of the t density that best fits Gaussian values, relative to their standard deviation."""
OUTLIER_PROBABILITY = 0.02
BURST_PROBABILITY = 0.25
"""Probability of an outlier, and of an outlier right after another."""
DECILE_RANGE_SIGMAS = 2.5631
"""Distance between the first and the ninth decile of a Gaussian, in standard deviations."""
SKEW_VALUES = 15.0
"""Weight, in values, of assumed symmetry."""
LATE_VALUES = 100
UPDATE_EVERY = 4


class LateRange:
    """Standard deviation of the latest values from their 10-90 % range.

    For two or three alternating levels it is as wide as their distance; a median of deviations sees only the most
    frequent level.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self._count = 0
        self._deviation = 0.0

    def follow(self, value: float) -> float:
        """Take a value relative to its level, healthy or not; return the deviation so far, 0 for fewer than ten."""
        if len(self._values) == LATE_VALUES:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)
        self._count += 1
        if len(self._values) >= 10 and (self._count % UPDATE_EVERY == 0 or len(self._values) < 4 * UPDATE_EVERY):
            self._deviation = (quantile(self._ordered, 0.9) - quantile(self._ordered, 0.1)) / DECILE_RANGE_SIGMAS
        return self._deviation


class Skew:
    """How much wider the noise is above the level than below, as the `factor` of the scale above."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._halves = [SKEW_VALUES, SKEW_VALUES]

    def follow(self, square: float, above: bool, fade: float) -> None:
        """Take the square of a value's error, in scales; `fade`: share of the former weight that remains."""
        halves = self._halves
        for side in (0, 1):
            halves[side] = SKEW_VALUES + (halves[side] - SKEW_VALUES) * fade
        halves[above] += square
        # Of a density with scales s*k above and s/k below, second moments of the halves are as k**6; clipped, as k**5.
        self.factor = min(max((halves[1] / halves[0]) ** 0.2, 0.7), 1.6)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return numpy's quantile, to the last bit, of ascending values; numpy takes twenty times as long for a hundred."""
    place = share * (len(ordered) - 1)
    low = int(place)
    lower, upper = ordered[low], ordered[min(low + 1, len(ordered) - 1)]
    rest = place - low
    return upper - (upper - lower) * (1 - rest) if rest >= 0.5 else lower + (upper - lower) * rest


def robust(values: Floats, floor: float) -> tuple[float, float]:
    """Return location and scale of the Student's t density that best fits `values` without outliers; scale >=
    `floor`."""
    level = float(np.median(values))
    scale = max(1.4826 * float(np.median(np.abs(values - level))), floor)
    for _ in range(8):
        z2 = ((values - level) / scale) ** 2
        weights = np.where(z2 < 36, (T_DEGREES + 1) / (T_DEGREES + z2), 0.0)
        level = float(weights @ values / weights.sum())
        kept = (z2 < 36).sum()
        scale = max(math.sqrt(float(weights @ (values - level) ** 2) / max(kept - 1, 1)), floor)
    return level, scale


def settled(values: Floats, floor: float) -> int:
    """Return how many of the first values are away from the level of the later half: a start that had not settled."""
    half = values[len(values) // 2 :]
    middle = float(np.median(half))
    reach = 6 * 1.4826 * float(np.median(np.abs(half - middle))) + 3 * floor
    return next((i for i, value in enumerate(values) if abs(value - middle) <= reach), 0)


def broad(offset: float) -> float:
    """Return the density of outliers: mostly upward, of any size."""
    return 0.9 * math.exp(-offset / 0.8) / 0.8 if offset >= 0 else 0.1 * math.exp(offset / 0.4) / 0.4


def log_density(errors: Floats, scale: float) -> Floats:
    inlying = (1 - OUTLIER_PROBABILITY) * T_PEAK / scale * (1 + (errors / scale) ** 2 / T_DEGREES) ** -4
    log_densities: Floats = np.log(inlying + OUTLIER_PROBABILITY * 0.5)
    return log_densities
