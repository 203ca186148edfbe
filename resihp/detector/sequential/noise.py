"""How much many series vary around their levels: scales, correlation, outliers, all robust, all online. No clock.

Kept for each group of series that should be alike, so that a few iterations of many series tell as much as many of one.
Used by `resihp.detector.sequential.peer_cusum`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LEAST_NOISE = 0.002
"""No series is taken for steadier than this, log units."""
FEW = 12.0
"""Iterations that a scale must rest on to be taken for half certain."""
ADAPTING = 0.01
"""Weight of a new iteration in what is long known."""
MIDDLE = 0.05
"""Weight of a new iteration in where a series has been of late."""
OUTLYING = 3.0
"""Standard deviations beyond which values are counted as outliers."""
RARE = 0.002
"""Weight of a new iteration in the frequency of outliers."""
SPARE = 4
"""After SPARSE iterations only one of this many is learnt from."""
SPARSE = 64
SMALL = 1.25
"""Median absolute deviations from the median of five values are too small by this."""


class Noise:
    """Of series in groups; `group` (n,) counts them from 0."""

    def __init__(self, group: Ints) -> None:
        self._group = group
        self._members = np.bincount(group, minlength=1)
        self._group_scale = np.full(self._members.size, 0.01)
        self._own_scale = np.full(group.size, 0.01)
        self._products = np.zeros((2, self._members.size))
        """Sums of products of neighbours in time, and of squares."""
        self._last = np.zeros(group.size)
        self._middle = np.zeros(group.size)
        """Where each series has been of late relative to its level: no part of its noise."""
        self._tails = np.tile([[0.1], [100.0]], (1, self._members.size))
        """Values that stood out, and all."""
        self._rows = 0
        self._worth = 0.0
        """Iterations as if no value had been missing."""

    def learn(self, away: Floats, middle: Floats) -> None:
        """Take first scales from absolute deviations (iterations, n), NaN for missing ones.

        `middle` (n,): where series lie relative to their levels, which may not follow them.
        """
        self._middle = middle.copy()
        groups = range(self._members.size)
        pooled = _scale(away)
        for group in groups:
            of_group = away[:, self._group == group]
            scale, trust = _scale(of_group), of_group.size / (of_group.size + 20.0)
            self._group_scale[group] = max(trust * scale + (1 - trust) * pooled, 0.7 * pooled, LEAST_NOISE)
        self._own_scale = self._group_scale[self._group]
        self._worth = float(np.isfinite(away).sum() / max(self._group.size, 1))

    def follow(self, unit: Floats, sigma: Floats, present: Bools) -> None:
        """Take an iteration's deviations from levels, as if all had one width; `sigma` (n,) was expected of them.

        All count, suspected or not: leaving out what stands out would make scales ever smaller.
        """
        self._rows += 1
        self._worth += float(np.count_nonzero(present)) / max(present.size, 1)
        own = np.where(present, unit - self._middle, 0.0)
        outlying = np.abs(own) > OUTLYING * sigma
        reach = 3 * self._group_scale[self._group]
        own = np.minimum(np.maximum(own, -reach), reach)
        self._middle += MIDDLE * own
        before, self._last = self._last, own / reach
        groups = self._members.size
        if self._worth > 2 * FEW:
            self._tails *= 1 - RARE
            self._tails[0] += np.bincount(self._group, outlying, groups)
            self._tails[1] += np.bincount(self._group, present, groups)
        if self._rows > SPARSE and self._rows % SPARE:
            return
        size = np.abs(own) * 1.4826
        eta = max(2.0 / (self._worth + 1.0), ADAPTING)
        told = present & (unit != 0.0)  # not the one that is the common part itself
        step = np.where(told, eta, 0.0)
        self._own_scale *= np.exp(np.where(size > self._own_scale, step, -step))
        signs = np.where(size > self._group_scale[self._group], step, -step)
        drift = np.bincount(self._group, signs, groups) / self._members
        self._group_scale = np.maximum(self._group_scale * np.exp(drift), LEAST_NOISE)
        self._products *= 1 - ADAPTING
        self._products[0] += np.bincount(self._group, self._last * before, groups)
        self._products[1] += np.bincount(self._group, self._last * self._last, groups)

    @property
    def scale(self) -> Floats:
        """(n,): standard deviations of values, for what they are: no caution, no correlation."""
        return self._group_scale[self._group]

    @property
    def sigma(self) -> Floats:
        """(n,): standard deviations, the group's, or the series' own if larger; more while few values are known, and as
        much more as correlation makes sums of values wider."""
        scale = np.maximum(self._group_scale[self._group], 0.8 * self._own_scale)
        few = 1.15 + 1 / max(scale.size, 1) + FEW / (FEW + self._worth)  # of few values, the median is one
        rho = np.clip(self._products[0] / (self._products[1] + 2.0), 0.0, 0.9)
        scale = scale * np.sqrt((1 + rho) / (1 - rho))[self._group]
        return np.asarray(np.maximum(few * scale, LEAST_NOISE))

    @property
    def surprise(self) -> Floats:
        """(n,): the most, in log odds, that one value can say: outliers of one side are no rarer than they are."""
        outliers = 0.5 * self._tails[0] / self._tails[1]
        return np.asarray(-np.log(np.minimum(outliers, 0.5))[self._group])


def _scale(away: Floats) -> float:
    known = away[np.isfinite(away)]
    return 1.4826 * SMALL * float(np.median(known)) if known.size else LEAST_NOISE
