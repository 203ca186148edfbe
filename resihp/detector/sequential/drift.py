"""Measures how far healthy series wander from their first level, so that such drift is not taken for a shift.

Devices warm up and cool down individually. Over hundreds of iterations their levels drift apart by a percent or more,
which the noise from one value to the next does not show. The drift is measured over all series at one time, by a robust
statistic: half of the series may have shifted. The smallest shift that counts is the drift's standard deviation times a
factor that grows with the number of series. Used by `resihp.detector.sequential.peer_cusum`; finds no shift itself. No
clock.
"""

from __future__ import annotations

import math

import numpy as np

from resihp.detector.sequential.noise import Bools, Floats, Ints

INDEPENDENT_VALUES = 40
"""Number of values after which the level of a wandering series is independent of its former level."""
SPREAD_FADING = 0.98
"""Factor by which the weight of earlier observations fades at each update."""
MIN_GROUP_SERIES = 16
"""Smallest number of series of a group for which the variance is measured separately."""
MIN_CALM_SERIES = 4
"""Smallest number of series without a known problem for an update."""
PRIOR_UPDATES = 10.0
"""Weight, in updates, of a prior variance."""
VARIANCE_ERROR = 2.5
"""Relative error of a variance of n series, times the square root of n."""
NORMAL_HALF_WIDTH = 1.349
"""Width of the shortest interval with half of a normal distribution, in standard deviations."""


class Drift:
    """Estimates the drift of n healthy series. `group` (n,): number of each series' group, from 0.

    `false_alarms_per`: number of values between false alarms of all series. `prior_variance`: variance of the drift
    from an earlier estimate; 0 without one.
    """

    def __init__(self, group: Ints, false_alarms_per: int, prior_variance: float) -> None:
        self._group = group
        groups = int(group.max(initial=-1)) + 1
        self._own = np.flatnonzero(np.bincount(group, minlength=groups) >= MIN_GROUP_SERIES)
        self._squares = np.zeros(groups)
        self.pooled = prior_variance
        """Variance of the drift over all series."""
        self._worth = PRIOR_UPDATES if prior_variance > 0.0 else 0.0
        chances = max(group.size, 1) * max(false_alarms_per / INDEPENDENT_VALUES, 1.0)
        self._reach = float(np.sqrt(2.0 * np.log(chances)))
        """Number of standard deviations that the largest drift between two false alarms hardly exceeds."""

    def follow(self, away: Floats, error: Floats, calm: Bools) -> None:
        """Update the estimate. `away` (n,): deviations of the series from their healthy levels.

        `error` (n,): variance of each deviation without drift. `calm` (n,): whether the series has no known problem.
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
        """Return the updated mean of a variance; an increase that is certain counts at once, because it may
        continue."""
        certain = max(1.0 - VARIANCE_ERROR / math.sqrt(count), 0.0)
        return max(before + (now - before) / self._worth, certain * now)

    @property
    def least(self) -> Floats:
        """(n,): smallest shift, in log units, that may not be healthy drift."""
        squares = np.full(self._squares.size, self.pooled)
        squares[self._own] = np.maximum(self._squares[self._own], self.pooled)
        return np.asarray(self._reach * np.sqrt(squares)[self._group])


def variance(away: Floats, error: Floats) -> float:
    """Return the variance of values minus that of their errors, from the shortest interval with half of the values."""
    ordered = np.sort(away)
    half = (ordered.size + 1) // 2
    widths = ordered[half - 1 :] - ordered[: ordered.size - half + 1]
    # The shortest of many intervals is too short; the correction is measured on normal values.
    spread = float(widths.min()) / (NORMAL_HALF_WIDTH * (1.0 - 1.94 / math.pow(ordered.size, 0.644)))
    return max(spread * spread - float(np.median(error)), 0.0)
