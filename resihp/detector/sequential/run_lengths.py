"""Bayesian online change points: how long the present regime of one series has lasted. Pure, no clock.

Adams & MacKay, "Bayesian Online Changepoint Detection" (2007), exactly: Student's t predictive with a conjugate prior
over mean and precision, a constant hazard, run lengths up to LONGEST. What `changes` does better for our own channels
is what others build on: called by `resihp.detector.rivals` and by benchmarks that compare.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln

from resihp.detector.sequential.noise import Floats

HAZARD = 1 / 250
"""A change is expected once in so many values."""
LONGEST = 200
"""Run lengths that are told apart: a longer one counts as this one."""
FIRST = 10
"""Values whose mean and scale the prior is for; no change is looked for in them."""
LEAST_SCALE = 1e-4
"""Of the mean: values that hardly differ have no scale of their own."""

_PRIOR = (np.zeros(1), np.full(1, 0.1), np.full(1, 1.0), np.full(1, 1.0))
"""Mean, its weight in values, shape and rate of the precision: of a run that has no value yet."""


class RunLengths:
    """The distribution of the number of values since the last change."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._middle, self._scale = 0.0, 1.0
        self._state = (np.zeros(1), *_PRIOR)
        """Log probability of each run length, and what is known of mean and precision in that case."""
        self._before = self._state

    @property
    def ready(self) -> bool:
        """False while the scale of values is learnt."""
        return len(self._first) == FIRST

    @property
    def longest(self) -> int:
        """The most probable number of values since the last change."""
        return int(self._state[0].argmax()) if self.ready else len(self._first)

    @property
    def lasting(self) -> bool:
        """Whether the present regime is older than run lengths are told apart."""
        return self.longest >= LONGEST

    @property
    def confidence(self) -> float:
        """Probability, in (0, 1), that the last change is no longer ago than the most probable one."""
        return min(max(float(np.exp(self._state[0][: self.longest + 1]).sum()), 1e-3), 0.999)

    def update(self, value: float) -> int:
        """Take the next value; returns `longest`."""
        if not self.ready:
            self._first.append(value)
            if self.ready:
                self._middle = float(np.mean(self._first))
                self._scale = max(float(np.std(self._first)), LEAST_SCALE * abs(self._middle), 1e-12)
                for one in self._first:
                    self._take((one - self._middle) / self._scale)
        else:
            self._take((value - self._middle) / self._scale)
        return self.longest

    def drop(self) -> None:
        """Forget the last value, as if it had never come; not one of the first."""
        self._state = self._before

    def _take(self, x: float) -> None:
        self._before = self._state
        log_run, mean, kappa, alpha, beta = self._state
        joint = log_run + _log_density(x, mean, kappa, alpha, beta)
        most = joint.max()
        total = most + math.log(float(np.exp(joint - most).sum()))
        grown = (
            np.concatenate([[total + math.log(HAZARD)], joint + math.log(1 - HAZARD)]) - total,
            np.concatenate([_PRIOR[0], (kappa * mean + x) / (kappa + 1)]),
            np.concatenate([_PRIOR[1], kappa + 1]),
            np.concatenate([_PRIOR[2], alpha + 0.5]),
            np.concatenate([_PRIOR[3], beta + kappa * (x - mean) ** 2 / (2 * (kappa + 1))]),
        )
        log_run = grown[0]
        if len(log_run) > LONGEST + 1:
            log_run[LONGEST] = np.logaddexp(log_run[LONGEST], log_run[LONGEST + 1])
        log_run, mean, kappa, alpha, beta = (array[: LONGEST + 1] for array in grown)
        self._state = log_run, mean, kappa, alpha, beta


def _log_density(x: float, mean: Floats, kappa: Floats, alpha: Floats, beta: Floats) -> Floats:
    """Of Student's t, what is not known of mean and precision being integrated out."""
    spread = beta * (kappa + 1) / (alpha * kappa)
    return np.asarray(
        gammaln(alpha + 0.5)
        - gammaln(alpha)
        - 0.5 * np.log(2 * alpha * math.pi * spread)
        - (alpha + 0.5) * np.log1p((x - mean) ** 2 / (2 * alpha * spread))
    )
