"""Bayesian online change points: the number of values since the last change of a series. Pure, no clock.

Implements Adams & MacKay, "Bayesian Online Changepoint Detection" (2007), exactly: a Student's t predictive density
with a conjugate prior over mean and precision, a constant hazard, and run lengths up to MAX_RUN_LENGTH. Other published
detectors use it; resihp's own channels use `changes`, which serves them better. Called by `resihp.detector.rivals` and
by benchmarks.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln

from resihp.detector.sequential.noise import Floats

CHANGE_HAZARD = 1 / 250
"""Prior probability of a change at each value."""
MAX_RUN_LENGTH = 200
"""Longest run length that is distinguished; longer ones count as this one."""
SCALE_VALUES = 10
"""Number of first values that scale the prior; changes among them are not searched."""
MIN_SCALE = 1e-4
"""Lower bound of the scale, relative to the mean, for values that hardly differ."""

_PRIOR = (np.zeros(1), np.full(1, 0.1), np.full(1, 1.0), np.full(1, 1.0))
"""Prior of a run without values: mean, its weight in values, shape and rate of the precision."""


class RunLengths:
    """Probability distribution of the number of values since the last change of a series."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._middle, self._scale = 0.0, 1.0
        self._state = (np.zeros(1), *_PRIOR)
        """Log probability of each run length, and for each the posterior parameters of mean and precision."""
        self._before = self._state

    @property
    def ready(self) -> bool:
        """Whether the scale of the values is learnt."""
        return len(self._first) == SCALE_VALUES

    @property
    def longest(self) -> int:
        """Most probable number of values since the last change."""
        return int(self._state[0].argmax()) if self.ready else len(self._first)

    @property
    def lasting(self) -> bool:
        """Whether the number of values since the last change is at least `MAX_RUN_LENGTH`."""
        return self.longest >= MAX_RUN_LENGTH

    @property
    def confidence(self) -> float:
        """Probability, in (0, 1), that at most `longest` values came since the last change."""
        return min(max(float(np.exp(self._state[0][: self.longest + 1]).sum()), 1e-3), 0.999)

    def update(self, value: float) -> int:
        """Take the next value; return `longest`."""
        if not self.ready:
            self._first.append(value)
            if self.ready:
                self._middle = float(np.mean(self._first))
                self._scale = max(float(np.std(self._first)), MIN_SCALE * abs(self._middle), 1e-12)
                for first_value in self._first:
                    self._take((first_value - self._middle) / self._scale)
        else:
            self._take((value - self._middle) / self._scale)
        return self.longest

    def drop(self) -> None:
        """Undo the last `update`. Not possible for the first `SCALE_VALUES` values."""
        self._state = self._before

    def _take(self, x: float) -> None:
        self._before = self._state
        log_run, mean, kappa, alpha, beta = self._state
        joint = log_run + _log_density(x, mean, kappa, alpha, beta)
        most = joint.max()
        total = most + math.log(float(np.exp(joint - most).sum()))
        grown = (
            np.concatenate([[total + math.log(CHANGE_HAZARD)], joint + math.log(1 - CHANGE_HAZARD)]) - total,
            np.concatenate([_PRIOR[0], (kappa * mean + x) / (kappa + 1)]),
            np.concatenate([_PRIOR[1], kappa + 1]),
            np.concatenate([_PRIOR[2], alpha + 0.5]),
            np.concatenate([_PRIOR[3], beta + kappa * (x - mean) ** 2 / (2 * (kappa + 1))]),
        )
        log_run = grown[0]
        if len(log_run) > MAX_RUN_LENGTH + 1:
            log_run[MAX_RUN_LENGTH] = np.logaddexp(log_run[MAX_RUN_LENGTH], log_run[MAX_RUN_LENGTH + 1])
        log_run, mean, kappa, alpha, beta = (array[: MAX_RUN_LENGTH + 1] for array in grown)
        self._state = log_run, mean, kappa, alpha, beta


def _log_density(x: float, mean: Floats, kappa: Floats, alpha: Floats, beta: Floats) -> Floats:
    """Return the log predictive density of `x`, a Student's t, for given posterior parameters of mean and precision."""
    spread = beta * (kappa + 1) / (alpha * kappa)
    return np.asarray(
        gammaln(alpha + 0.5)
        - gammaln(alpha)
        - 0.5 * np.log(2 * alpha * math.pi * spread)
        - (alpha + 0.5) * np.log1p((x - mean) ** 2 / (2 * alpha * spread))
    )
