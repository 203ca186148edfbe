"""What an iteration takes by its workload: the paper's Eq. 1 over whole iterations, fitted robustly. Pure.

Used by `resihp.detector.offline.series`, where logs tell tokens or the sum of squared lengths.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec
import numpy as np

from resihp.detector.sequential.changes import WARM_UP
from resihp.detector.sequential.densities import Floats
from resihp.detector.sequential.window import low_median

REFIT = 25
HISTORY = 300


class Point(msgspec.Struct, frozen=True, gc=False):
    """One iteration: seconds, and its workload where known (tokens, sum of squared lengths)."""

    iteration: int
    seconds: float
    tokens: float | None = None
    squares: float | None = None


class IterationModel:
    """Seconds of an iteration as c + alpha*N + beta*S (the paper's Eq. 1 over a whole iteration), fitted robustly.

    While N and S do not vary, time is taken to be in proportion to N: the intercept cannot be told.
    """

    def __init__(self, history: int = HISTORY) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=history)
        self._coefficients: Floats | None = None
        self._since = 0
        self._range: tuple[Floats, Floats] | None = None

    def learn(self, point: Point) -> None:
        """Take a healthy iteration; refits from time to time."""
        self.take(point)
        self._since += 1
        if len(self._seen) >= WARM_UP and (self._coefficients is None or self._since >= REFIT):
            self.fit()

    def take(self, point: Point) -> None:
        """The same without a fit."""
        self._seen.append((point.tokens or 0.0, point.squares or 0.0, point.seconds))

    def predict(self, point: Point) -> float | None:
        """Healthy seconds, None before the first fit."""
        if self._coefficients is None:
            return None
        return float(self._coefficients @ [1.0, point.tokens or 0.0, point.squares or 0.0])

    def beyond(self, point: Point) -> bool:
        """The workload is outside what was seen by more than a tenth, so that the prediction is extrapolated."""
        if self._range is None:
            return False
        low, high = self._range
        work = np.array([point.tokens or 0.0, point.squares or 0.0])
        return bool((work < 0.9 * low).any() or (work > 1.1 * high).any())

    def fit(self) -> None:
        """Take the coefficients from what was learnt, if that is enough."""
        if len(self._seen) < WARM_UP:
            return
        from scipy.optimize import nnls

        seen = np.array(self._seen)
        features = np.column_stack([np.ones(len(seen)), seen[:, :2]])
        seconds = seen[:, 2]
        size = np.maximum(np.abs(features).max(axis=0), 1e-300)
        features = features / size
        # A little prior: as long as nothing varies, all of it is work and none is intercept.
        prior = np.diag([0.3, 0.03, 0.03])
        weights = np.ones(len(seen))
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
        self._range = seen[:, :2].min(axis=0), seen[:, :2].max(axis=0)
        self._since = 0
