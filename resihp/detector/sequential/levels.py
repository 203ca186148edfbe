"""The level of a series, where it jumped, how much evidence a jump needs, and whether the level drifts. Pure.

Locates a jump that `changes` found, and finds a drift that is too slow for a jump. Never gathers the evidence for a
jump. Used by `resihp.detector.sequential.changes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec
import numpy as np

from resihp.detector.sequential.densities import Floats, log_density, robust
from resihp.detector.sequential.shifts import Alarm

MIN_VALUES = 3
"""Number of values that a level needs: two outliers in a row are not a level."""
ANCHOR_VALUES = 60
"""Values after which the level counts as the beginning of the series, against which drift is measured."""
DRIFT_FACTOR = 1.2
"""Smallest drift that is reported, relative to the smallest jump."""


class ChangePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level from `before` to `after` at the value of index `onset`, detected at that of `detected`."""

    onset: int
    detected: int
    before: float
    after: float
    confidence: float
    """Posterior probability of the change, if one value in a thousand begins one."""
    alarm: Alarm | None = None


class SeriesLevel:
    """A level, the noise around it, and the numbers of values behind both."""

    def __init__(self, level: float, count: float, variance: float, worth: float) -> None:
        self.level = level
        self.count = count
        self.variance = variance
        """Squared scale of innovations, for the t density."""
        self.worth = worth
        """Number of values behind the variance."""


class SlowDrift:
    """Compares the healthy level with its first well-known value. `least`: smallest jump that counts."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._anchor: SeriesLevel | None = None
        self._calm_at = 0
        """Index at which the level was last near its first one."""

    def forget(self) -> None:
        """Take the next well-known level for the first one."""
        self._anchor = None

    def follow(self, index: int, healthy: SeriesLevel, uncertain: float, evidence: Floats) -> ChangePoint | None:
        """Return a change if the level has drifted.

        `uncertain`: squared standard error of the level; `evidence`: that for a jump, with much of which no level
        becomes the first.
        """
        anchor = self._anchor
        if anchor is None:
            if healthy.count >= ANCHOR_VALUES and float(evidence.sum()) < 30:
                self._anchor = SeriesLevel(healthy.level, healthy.count, healthy.variance, healthy.worth)
                self._calm_at = index
            return None
        drift = healthy.level - anchor.level
        if abs(drift) < self._least / 3:
            self._calm_at = index
        error = math.sqrt(uncertain * (1 + healthy.count / anchor.count))
        needed = max(DRIFT_FACTOR * self._least, 4.5 * error)
        if abs(drift) < needed:
            return None
        return ChangePoint(
            onset=self._calm_at,
            detected=index,
            before=anchor.level,
            after=healthy.level,
            confidence=math.erf(abs(drift) / error / 2),
            alarm=Alarm(test="shift", statistic=abs(drift), threshold=needed),
        )


def sizes_compared(least: float) -> Floats:
    """Return the sizes of jumps that are compared with no jump, ascending. `least`: smallest jump that counts."""
    sizes = [least * 1.15]
    while sizes[-1] < 3.0:
        sizes.append(sizes[-1] * 1.25)
    return np.array(sizes)


def evidence_needed(false_alarms_per: int, rho: float, worth: float, ratio: float | None) -> float:
    """Return the evidence needed for an alarm. Factors are measured (`tests/resihp/detector/synthetic_runs.py`).

    `rho`: lag-one correlation; `worth`: number of values behind the noise; `ratio`: size of the intended change in
    standard deviations, None for small, persistent ones.
    """
    if ratio is None:
        return 0.3 * false_alarms_per * math.exp(3 * rho) * (1 + 40 / worth)
    # The more the intended change stands out from the noise, the rarer are false alarms at the same evidence; if it
    # stands out by far, a few values bring so much evidence that the threshold can be higher.
    factor = math.exp(min(max(0.5 * (ratio - 4.5), 0.0), 3.2) - min(max(ratio - 2.3, 0.0), 1.2))
    return 0.04 * false_alarms_per * math.exp(2 * rho) * (1 + 20 / worth) * factor


def located(
    recent: Collection[tuple[int, float]], before: SeriesLevel, change: float, onset: int
) -> tuple[int, float, int]:
    """Return the most likely onset, the level after it, and the number of values since.

    `recent`: indices and values; `change`, `onset`: a first guess.
    """
    indices = np.array([i for i, _ in recent])
    values = np.array([v for _, v in recent])
    after = before.level + change
    scale = math.sqrt(before.variance)
    start = int(np.searchsorted(indices, onset))
    for _ in range(2):
        gain = log_density(values - after, scale) - log_density(values - before.level, scale)
        total = np.cumsum(gain[::-1])[::-1]
        total[len(values) - MIN_VALUES + 1 :] = -np.inf
        low = max(0, start - 8)
        start = low + int(np.argmax(total[low:]))
        after, _ = robust(values[start:], scale)
    return int(indices[start]), after, len(values) - start
