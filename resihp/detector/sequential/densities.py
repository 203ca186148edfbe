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

DEGREES = 7.0
"""Of freedom: near to Gaussian, with tails that a single value cannot turn into evidence."""
T_PEAK = math.gamma((DEGREES + 1) / 2) / math.gamma(DEGREES / 2) / math.sqrt(math.pi * DEGREES)
GAUSSIAN = 0.911
"""Scale of the t density that fits Gaussian values best, over their standard deviation."""
OUTLIERS = 0.02
BURST = 0.25
"""Probability of an outlier, and of one behind another."""
DECILES = 2.5631
"""Standard deviations of a Gaussian between its deciles, the first and the ninth."""
LATE = 100
EVERY = 4


class LateRange:
    """Standard deviation of late values by their 10-90 % range: of two or three levels taken by turns, it is as wide as
    they are apart, where a median of deviations sees the commonest level only."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._ordered: list[float] = []
        self._count = 0
        self._deviation = 0.0

    def follow(self, value: float) -> float:
        """Take a value less its level, healthy or not; the deviation so far, 0 of fewer than ten."""
        if len(self._values) == LATE:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)
        self._count += 1
        if len(self._values) >= 10 and (self._count % EVERY == 0 or len(self._values) < 4 * EVERY):
            self._deviation = (quantile(self._ordered, 0.9) - quantile(self._ordered, 0.1)) / DECILES
        return self._deviation


def quantile(ordered: Sequence[float], share: float) -> float:
    """As numpy's, to the last bit, of values in ascending order; that takes twenty times as long for a hundred."""
    place = share * (len(ordered) - 1)
    low = int(place)
    one, two = ordered[low], ordered[min(low + 1, len(ordered) - 1)]
    rest = place - low
    return two - (two - one) * (1 - rest) if rest >= 0.5 else one + (two - one) * rest


def robust(values: Floats, floor: float) -> tuple[float, float]:
    """Location and scale of a Student's t density that fit `values` best, outliers left out; scale at least `floor`."""
    level = float(np.median(values))
    scale = max(1.4826 * float(np.median(np.abs(values - level))), floor)
    for _ in range(8):
        z2 = ((values - level) / scale) ** 2
        weights = np.where(z2 < 36, (DEGREES + 1) / (DEGREES + z2), 0.0)
        level = float(weights @ values / weights.sum())
        kept = (z2 < 36).sum()
        scale = max(math.sqrt(float(weights @ (values - level) ** 2) / max(kept - 1, 1)), floor)
    return level, scale


def settled(values: Floats, floor: float) -> int:
    """How many of the first values lie apart from the later half: a start that had not settled."""
    half = values[len(values) // 2 :]
    middle = float(np.median(half))
    reach = 6 * 1.4826 * float(np.median(np.abs(half - middle))) + 3 * floor
    return next((i for i, value in enumerate(values) if abs(value - middle) <= reach), 0)


def broad(offset: float) -> float:
    """Density of outliers: mostly upward, of any size."""
    return 0.9 * math.exp(-offset / 0.8) / 0.8 if offset >= 0 else 0.1 * math.exp(offset / 0.4) / 0.4


def log_density(errors: Floats, scale: float) -> Floats:
    inlying = (1 - OUTLIERS) * T_PEAK / scale * (1 + (errors / scale) ** 2 / DEGREES) ** -4
    found: Floats = np.log(inlying + OUTLIERS * 0.5)
    return found
