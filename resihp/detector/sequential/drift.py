"""How far healthy series wander from where they began: less than that, times what chance makes of many, is no shift.

Devices warm up and cool down, each by itself; over hundreds of iterations their levels part by a percent or more, which
no noise from one value to the next tells of. How far is seen across series at one time, robustly: half of them may have
shifted. Used by `resihp.detector.sequential.peer_cusum`; decides nothing else. No clock.
"""

from __future__ import annotations

import math

import numpy as np

from resihp.detector.sequential.noise import Bools, Floats, Ints

APART = 40
"""Values after which a series that wanders may be anywhere: so many make one independent chance."""
FADING = 0.98
"""What remains of a spread that was seen, each time that it is looked at."""
MANY = 16
"""Series of a group whose spread is looked at by itself."""
FEWEST = 4
"""Series that must be calm for anything to be seen."""
KNOWN = 10.0
"""Times looked at that a spread from before is worth."""
UNSURE = 2.5
"""Share by which a variance of so few series may be too large, times the square root of their number."""
NORMAL = 1.349
"""Width of the interval that holds half of a normal distribution, standard deviations."""


class Drift:
    """Of series in groups; `group` (n,) counts them from 0. `false_alarms_per`: values between them, all series.

    `known`: variance that such series were seen to have before.
    """

    def __init__(self, group: Ints, false_alarms_per: int, known: float) -> None:
        self._group = group
        groups = int(group.max(initial=-1)) + 1
        self._own = np.flatnonzero(np.bincount(group, minlength=groups) >= MANY)
        self._squares = np.zeros(groups)
        self.pooled = known
        """Variance over all series."""
        self._worth = KNOWN if known > 0.0 else 0.0
        chances = max(group.size, 1) * max(false_alarms_per / APART, 1.0)
        self._reach = float(np.sqrt(2.0 * np.log(chances)))
        """Standard deviations that the largest of so many hardly exceeds."""

    def follow(self, away: Floats, error: Floats, calm: Bools) -> None:
        """Take where series are relative to their healthy levels (n,), each known to a variance of `error`.

        `calm` (n,): series that nothing else is known to be wrong with.
        """
        if np.count_nonzero(calm) < FEWEST:
            return
        self._worth = self._worth * FADING + 1.0
        pooled = variance(away[calm], error[calm])
        self.pooled = self._followed(self.pooled, pooled, int(np.count_nonzero(calm)))
        for group in self._own.tolist():
            own = calm & (self._group == group)
            count = int(np.count_nonzero(own))
            if count >= MANY:
                square = variance(away[own], error[own])
                self._squares[group] = self._followed(float(self._squares[group]), square, count)

    def _followed(self, before: float, now: float, count: int) -> float:
        """The mean of what was seen; what is apart for certain counts at once, for it may go on."""
        certain = max(1.0 - UNSURE / math.sqrt(count), 0.0)
        return max(before + (now - before) / self._worth, certain * now)

    @property
    def least(self) -> Floats:
        """(n,): log units; shifts that are smaller may be healthy."""
        squares = np.full(self._squares.size, self.pooled)
        squares[self._own] = np.maximum(self._squares[self._own], self.pooled)
        return np.asarray(self._reach * np.sqrt(squares)[self._group])


def variance(away: Floats, error: Floats) -> float:
    """Variance of values apart from errors, from the shortest interval that holds half of them."""
    ordered = np.sort(away)
    half = (ordered.size + 1) // 2
    widths = ordered[half - 1 :] - ordered[: ordered.size - half + 1]
    # The shortest of many intervals is too short; by so much, measured on normal values.
    spread = float(widths.min()) / (NORMAL * (1.0 - 1.94 / math.pow(ordered.size, 0.644)))
    return max(spread * spread - float(np.median(error)), 0.0)
