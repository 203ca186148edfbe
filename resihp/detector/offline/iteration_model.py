"""Predicts an iteration's time from its workload: the paper's Eq. 1 over whole iterations, fitted robustly. Pure.

Used by `resihp.detector.offline.series` for logs that contain tokens or the sum of squared lengths.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec
import numpy as np

from resihp.detector.sequential.changes import WARM_UP
from resihp.detector.sequential.densities import Floats
from resihp.detector.sequential.window import low_median

REFIT_EVERY = 25
HISTORY_ITERATIONS = 300


class Point(msgspec.Struct, frozen=True, gc=False):
    """The seconds of one iteration, and its workload if known: tokens, and sum of squared lengths (`squares`)."""

    iteration: int
    seconds: float
    tokens: float | None = None
    squares: float | None = None


class IterationModel:
    """Predicts the seconds of an iteration as c + alpha*N + beta*S, the paper's Eq. 1 for a whole iteration.

    The fit is robust. While N and S do not vary, the time is assumed to be proportional to N, because the intercept
    cannot be determined. `history`: number of latest iterations that are fitted.
    """

    def __init__(self, history: int = HISTORY_ITERATIONS) -> None:
        self._observed: deque[tuple[float, float, float]] = deque(maxlen=history)
        self._coefficients: Floats | None = None
        self._since = 0
        self._range: tuple[Floats, Floats] | None = None

    def learn(self, point: Point) -> None:
        """Add a healthy iteration, and fit the model again from time to time."""
        self.take(point)
        self._since += 1
        if len(self._observed) >= WARM_UP and (self._coefficients is None or self._since >= REFIT_EVERY):
            self.fit()

    def take(self, point: Point) -> None:
        """Add a healthy iteration without a new fit."""
        self._observed.append((point.tokens or 0.0, point.squares or 0.0, point.seconds))

    def predict(self, point: Point) -> float | None:
        """Return the healthy seconds of an iteration with the workload of `point`; None before the first fit."""
        if self._coefficients is None:
            return None
        return float(self._coefficients @ [1.0, point.tokens or 0.0, point.squares or 0.0])

    def beyond(self, point: Point) -> bool:
        """Return whether the workload is outside of the learnt range by more than a tenth."""
        if self._range is None:
            return False
        low, high = self._range
        work = np.array([point.tokens or 0.0, point.squares or 0.0])
        return bool((work < 0.9 * low).any() or (work > 1.1 * high).any())

    def fit(self) -> None:
        """Fit the coefficients if there are enough iterations."""
        if len(self._observed) < WARM_UP:
            return
        from scipy.optimize import nnls

        observed = np.array(self._observed)
        features = np.column_stack([np.ones(len(observed)), observed[:, :2]])
        seconds = observed[:, 2]
        size = np.maximum(np.abs(features).max(axis=0), 1e-300)
        features = features / size
        # A weak prior: as long as nothing varies, all time is work and none is intercept.
        prior = np.diag([0.3, 0.03, 0.03])
        weights = np.ones(len(observed))
        middle = low_median(seconds, math.inf)
        solution = np.zeros(3)
        for _ in range(6):
            scale = np.sqrt(weights)[:, None] / middle
            solution, _ = nnls(
                np.vstack([features * scale, prior / middle]),
                np.append(np.sqrt(weights) * seconds / middle, np.zeros(3)),
            )
            predicted = np.maximum(features @ solution, 1e-3 * middle)
            errors = np.log(seconds / predicted)
            spread = max(1.4826 * low_median(np.abs(errors - low_median(errors, math.inf)), math.inf), 0.003)
            weights = 1 / (1 + (errors / (2 * spread)) ** 2) ** 2 * (middle / predicted) ** 2
        self._coefficients = solution / size
        self._range = observed[:, :2].min(axis=0), observed[:, :2].max(axis=0)
        self._since = 0
