"""Locates jumps in a series, finds slow drifts of its level, and computes the evidence that a jump needs. Pure.

Never gathers the evidence for a jump; `resihp.detector.sequential.changes` does, and calls this module.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec
import numpy as np

from resihp.detector.sequential.densities import Floats, log_density, robust
from resihp.detector.sequential.shifts import Alarm

MIN_VALUES = 3
"""Smallest number of values of a level: two outliers in a row are not a level."""
ANCHOR_VALUES = 60
"""Number of values from which the first level, against which drift is measured, is estimated."""
DRIFT_FACTOR = 1.2
"""Smallest drift that is reported, relative to the smallest jump."""


class ChangePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A change of level from `before` to `after` at the value with index `onset`, detected at index `detected`."""

    onset: int
    detected: int
    before: float
    after: float
    confidence: float
    """Posterior probability of the change, under the prior that one value in a thousand begins a change."""
    alarm: Alarm | None = None


class SeriesLevel:
    """A level (`level`) from `count` values, and the noise around it."""

    def __init__(self, level: float, count: float, variance: float, worth: float) -> None:
        self.level = level
        self.count = count
        self.variance = variance
        """Squared scale of the t density of innovations."""
        self.worth = worth
        """Number of values from which the variance is estimated."""


class SlowDrift:
    """Test for slow drift: compares the healthy level with the first reliable one. `least`: smallest reported jump."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._anchor: SeriesLevel | None = None
        self._calm_at = 0
        """Latest index at which the level was near the first level."""

    def forget(self) -> None:
        """Use the next reliable level as the first level."""
        self._anchor = None

    def follow(self, index: int, healthy: SeriesLevel, uncertain: float, evidence: Floats) -> ChangePoint | None:
        """Return a change if the healthy level has drifted away from the first level; else None.

        `uncertain`: squared standard error of the level; `evidence`: evidence for a jump. With much evidence, the level
        is not used as the first level.
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
    """Return the sizes of jumps to test, ascending. `least`: smallest reported jump."""
    sizes = [least * 1.15]
    while sizes[-1] < 3.0:
        sizes.append(sizes[-1] * 1.25)
    return np.array(sizes)


def evidence_needed(false_alarms_per: int, rho: float, worth: float, ratio: float | None) -> float:
    """Return the evidence for an alarm. Its factors were measured (`tests/resihp/detector/synthetic_runs.py`).

    `rho`: lag-one correlation; `worth`: number of values from which the noise is estimated; `ratio`: size of the change
    to be found quickly, in standard deviations; None to find small, persistent changes.
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
    """Return the most likely onset of a jump, the level after it, and the number of values since.

    `recent`: indices and values of the series; `before`: level before the jump; `change`, `onset`: a first guess.
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
