"""Estimates the noise of many series around their levels: scales, correlation, and the frequency of outliers.

The estimates are robust and updated with each iteration. They are shared by all series of a group of peers, so that a
few iterations of many series are as informative as many iterations of one series. Tests nothing; used by
`resihp.detector.sequential.peer_cusum`. No clock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

MIN_NOISE = 0.002
"""Lower bound of a series' noise, log units."""
HALF_TRUST_ITERATIONS = 12.0
"""Number of iterations after which half of the safety margin on a scale is left."""
NEW_WEIGHT = 0.01
"""Weight of a new iteration in estimates from many iterations."""
MIDDLE_WEIGHT = 0.05
"""Weight of a new iteration in the recent position of a series."""
OUTLIER_SIGMAS = 3.0
"""Standard deviations beyond which a value counts as an outlier."""
OUTLIER_WEIGHT = 0.002
"""Weight of a new iteration in the frequency of outliers."""
SPARSE_STRIDE = 4
"""After SPARSE_AFTER iterations, only every SPARSE_STRIDE-th iteration updates scales and correlation."""
SPARSE_AFTER = 64
SMALL_SAMPLE_FACTOR = 1.25
"""Correction factor for the median absolute deviation from the median of five values, which is too small."""


class Noise:
    """Estimates the noise of n series. `group` (n,): number of each series' group, from 0."""

    def __init__(self, group: Ints) -> None:
        self._group = group
        self._members = np.bincount(group, minlength=1)
        self._group_scale = np.full(self._members.size, 0.01)
        self._own_scale = np.full(group.size, 0.01)
        self._products = np.zeros((2, self._members.size))
        """Sums of products of consecutive values, and of squares."""
        self._last = np.zeros(group.size)
        self._middle = np.zeros(group.size)
        """Recent position of each series relative to its level; it is subtracted, because it is not noise."""
        self._tails = np.tile([[0.1], [100.0]], (1, self._members.size))
        """Number of outliers, and number of all values, of each group; both fade."""
        self._rows = 0
        self._worth = 0.0
        """Number of values per series so far."""

    def learn(self, away: Floats, middle: Floats) -> None:
        """Initialise the scales. `away`: absolute deviations of values from their levels, (iterations, n), NaN if
        missing.

        `middle` (n,): position of each series relative to its level, because levels are bounded.
        """
        self._middle = middle.copy()
        groups = range(self._members.size)
        pooled = _scale(away)
        for group in groups:
            of_group = away[:, self._group == group]
            scale, trust = _scale(of_group), of_group.size / (of_group.size + 20.0)
            self._group_scale[group] = max(trust * scale + (1 - trust) * pooled, 0.7 * pooled, MIN_NOISE)
        self._own_scale = self._group_scale[self._group]
        self._worth = float(np.isfinite(away).sum() / max(self._group.size, 1))

    def follow(self, unit: Floats, sigma: Floats, present: Bools) -> None:
        """Update the estimates with an iteration.

        `unit` (n,): deviations from the levels, scaled to equal width; `sigma` (n,): standard deviations used by the
        tests; `present` (n,): series with a value. Suspected series count as well, because without the values that
        stand out, scales would become ever smaller.
        """
        self._rows += 1
        self._worth += float(np.count_nonzero(present)) / max(present.size, 1)
        own = np.where(present, unit - self._middle, 0.0)
        outlying = np.abs(own) > OUTLIER_SIGMAS * sigma
        reach = 3 * self._group_scale[self._group]
        own = np.minimum(np.maximum(own, -reach), reach)
        self._middle += MIDDLE_WEIGHT * own
        before, self._last = self._last, own / reach
        groups = self._members.size
        if self._worth > 2 * HALF_TRUST_ITERATIONS:
            self._tails *= 1 - OUTLIER_WEIGHT
            self._tails[0] += np.bincount(self._group, outlying, groups)
            self._tails[1] += np.bincount(self._group, present, groups)
        if self._rows > SPARSE_AFTER and self._rows % SPARSE_STRIDE:
            return
        size = np.abs(own) * 1.4826
        eta = max(2.0 / (self._worth + 1.0), NEW_WEIGHT)
        measured = present & (unit != 0.0)  # without the series that is itself the common part
        step = np.where(measured, eta, 0.0)
        self._own_scale *= np.exp(np.where(size > self._own_scale, step, -step))
        signs = np.where(size > self._group_scale[self._group], step, -step)
        drift = np.bincount(self._group, signs, groups) / self._members
        self._group_scale = np.maximum(self._group_scale * np.exp(drift), MIN_NOISE)
        self._products *= 1 - NEW_WEIGHT
        self._products[0] += np.bincount(self._group, self._last * before, groups)
        self._products[1] += np.bincount(self._group, self._last * self._last, groups)

    @property
    def scale(self) -> Floats:
        """(n,): standard deviation of a value of each series, without safety margin and correlation."""
        return self._group_scale[self._group]

    @property
    def sigma(self) -> Floats:
        """(n,): standard deviation of each series for the tests: the group's, or the series' own if that is much
        larger.

        It is increased while few values are known, and by the factor by which correlation widens sums of values.
        """
        scale = np.maximum(self._group_scale[self._group], 0.8 * self._own_scale)
        few = (
            1.15 + 1 / max(scale.size, 1) + HALF_TRUST_ITERATIONS / (HALF_TRUST_ITERATIONS + self._worth)
        )  # of few values, the median is one
        rho = np.clip(self._products[0] / (self._products[1] + 2.0), 0.0, 0.9)
        scale = scale * np.sqrt((1 + rho) / (1 - rho))[self._group]
        return np.asarray(np.maximum(few * scale, MIN_NOISE))

    @property
    def surprise(self) -> Floats:
        """(n,): highest log odds that a single value may contribute, from the observed frequency of outliers on one
        side."""
        outliers = 0.5 * self._tails[0] / self._tails[1]
        return np.asarray(-np.log(np.minimum(outliers, 0.5))[self._group])


def _scale(away: Floats) -> float:
    finite = away[np.isfinite(away)]
    return 1.4826 * SMALL_SAMPLE_FACTOR * float(np.median(finite)) if finite.size else MIN_NOISE
