"""Measures how far healthy series wander from their beginning; a smaller shift, times a factor for many, is none.

Devices warm up and cool down individually; over hundreds of iterations their levels drift apart by a percent or more,
which the noise from one value to the next does not show. The drift is measured across series at one time, robustly:
half of them may have shifted. Used by `resihp.detector.sequential.peer_cusum`; decides nothing else. No clock.
"""

from __future__ import annotations

import math

import numpy as np

from resihp.detector.sequential.noise import Bools, Floats, Ints

INDEPENDENT_VALUES = 40
"""Values after which the place of a wandering series is independent of the former one: one chance each."""
SPREAD_FADING = 0.98
"""Factor by which the weight of earlier observations fades at each update."""
MIN_GROUP_SERIES = 16
"""Number of series from which on a group's spread is measured separately."""
MIN_CALM_SERIES = 4
"""Number of calm series that an update needs."""
PRIOR_UPDATES = 10.0
"""Weight, in updates, of a variance known from before."""
VARIANCE_ERROR = 2.5
"""Relative error of a variance of n series, times the square root of n."""
NORMAL_HALF_WIDTH = 1.349
"""Width of the interval that holds half of a normal distribution, in standard deviations."""


class Drift:
    """Drift of series in groups; `group` (n,) numbers them from 0.

    `false_alarms_per`: values between false alarms of all series. `prior_variance`: variance of such series from
    before.
    """

    def __init__(self, group: Ints, false_alarms_per: int, prior_variance: float) -> None:
        self._group = group
        groups = int(group.max(initial=-1)) + 1
        self._own = np.flatnonzero(np.bincount(group, minlength=groups) >= MIN_GROUP_SERIES)
        self._squares = np.zeros(groups)
        self.pooled = prior_variance
        """Variance over all series."""
        self._worth = PRIOR_UPDATES if prior_variance > 0.0 else 0.0
        chances = max(group.size, 1) * max(false_alarms_per / INDEPENDENT_VALUES, 1.0)
        self._reach = float(np.sqrt(2.0 * np.log(chances)))
        """Standard deviations that the maximum over so many independent chances hardly exceeds."""

    def follow(self, away: Floats, error: Floats, calm: Bools) -> None:
        """Take the deviations of series from their healthy levels (n,), each with a variance of `error`.

        `calm` (n,): series without any known problem.
        """
        if np.count_nonzero(calm) < MIN_CALM_SERIES:
            return
        self._worth = self._worth * SPREAD_FADING + 1.0
        pooled = variance(away[calm], error[calm])
        self.pooled = self._followed(self.pooled, pooled, int(np.count_nonzero(calm)))
        for group in self._own.tolist():
            own = calm & (self._group == group)
            count = int(np.count_nonzero(own))
            if count >= MIN_GROUP_SERIES:
                square = variance(away[own], error[own])
                self._squares[group] = self._followed(float(self._squares[group]), square, count)

    def _followed(self, before: float, now: float, count: int) -> float:
        """Return the updated mean; a certain excess counts at once, because it may go on."""
        certain = max(1.0 - VARIANCE_ERROR / math.sqrt(count), 0.0)
        return max(before + (now - before) / self._worth, certain * now)

    @property
    def least(self) -> Floats:
        """(n,): smallest shift, in log units, that may not be healthy drift."""
        squares = np.full(self._squares.size, self.pooled)
        squares[self._own] = np.maximum(self._squares[self._own], self.pooled)
        return np.asarray(self._reach * np.sqrt(squares)[self._group])


def variance(away: Floats, error: Floats) -> float:
    """Return the variance of values without their errors, from the shortest interval that holds half of them."""
    ordered = np.sort(away)
    half = (ordered.size + 1) // 2
    widths = ordered[half - 1 :] - ordered[: ordered.size - half + 1]
    # The shortest of many intervals is too short; the correction is measured on normal values.
    spread = float(widths.min()) / (NORMAL_HALF_WIDTH * (1.0 - 1.94 / math.pow(ordered.size, 0.644)))
    return max(spread * spread - float(np.median(error)), 0.0)
