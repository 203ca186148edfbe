"""Predicts the seconds of an iteration, with healthy ranks or with slow ranks of known speeds. Pure, no clock.

The prediction is the paper's Eq. 2 over the chunk times of Eq. 1. It uses the same predictor and arrays as resihp's own
detector (`resihp.detector.online`), so that a comparison of detectors compares only their rules. Tests nothing; the
speeds of slow ranks come from probes. Called by `change_points`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import numpy as np
import numpy.typing as npt

from resihp.detector.observation import Floats, Observation
from resihp.detector.online.frame import Frame
from resihp.detector.online.link_channel import LinkTest
from resihp.detector.online.plan_arrays import MAX_CHUNK_S
from resihp.detector.online.predictor import Predictor
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders

MAX_BESIDE_SAMPLES = 60
"""Number of iterations from which the time outside of chunks is learnt."""


class HealthyTimes:
    """Model of the iterations under one plan. `predictor`: learnt times of chunks, which are kept across plans."""

    def __init__(self, plan: Plan, orders: Orders, nodes: Mapping[int, Hashable] | None, predictor: Predictor) -> None:
        self._predictor = predictor
        self._frame = Frame(plan, orders, nodes)
        self._stacked, self._links = self._frame.stacked, self._frame.links
        self._transfers = LinkTest(self._links, {}, 10_000, 500)
        """Test of links, used only for the levels of healthy transfers, not for its findings."""
        self._workload: tuple[Floats, Floats] | None = None
        """N and S of each micro-batch of the latest iteration, (M,) both; None before the first."""

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks of the plan's stages."""
        return frozenset(self._stacked.row)

    @property
    def settled(self) -> bool:
        """Whether the times of all kinds of chunks are learnt and no longer change."""
        return self._frame.fitted and not self._predictor.learning

    @property
    def beside_s(self) -> float:
        """Seconds of an iteration outside of its chunks."""
        return float(np.median(self._frame.beside)) if self._frame.beside else 0.0

    def transfers(self) -> tuple[float | None, float | None]:
        """Return the median seconds of a transfer between nodes, and within a node; None without such links."""
        seconds, kind = self._transfers.seconds(healthy=True), self._links.kind
        between_s, within_s = (seconds[(kind == kind_code) & (seconds > 0.0)] for kind_code in (0, 1))
        between_and_within = [
            float(np.median(seconds_of_kind)) if seconds_of_kind.size else None
            for seconds_of_kind in (between_s, within_s)
        ]
        return between_and_within[0], between_and_within[1]

    def learn(self, observation: Observation, slow: Mapping[int, float]) -> None:
        """Learn from the measurements of an iteration, except for chunk times of the ranks in `slow`."""
        stacked = self._stacked
        columns = stacked.columns(observation.times)
        self._frame.fitted = self._frame.fitted or all(self._predictor.ready(key, kind) for key, kind in stacked.work)
        if not self.settled:
            stacked.teach(self._predictor, observation.iteration, columns, self._frame.teachers(slow))
        beside = observation.seconds - stacked.busy_s(columns)
        if 0.0 <= beside < MAX_CHUNK_S and len(self._frame.beside) < MAX_BESIDE_SAMPLES:
            self._frame.beside.append(beside)
        self._transfers.update(observation.iteration, *self._links.measured(columns), {})
        self._workload = stacked.workload(columns)

    def seconds(self, slow: Mapping[int, float]) -> float | None:
        """Return the expected seconds of the latest iteration; None if unknown. `slow`: speeds of slow ranks."""
        return None if self._workload is None else self.forecast(*self._workload, slow)

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike, slow: Mapping[int, float]) -> float | None:
        """Return the expected seconds of an iteration from N and S of its micro-batches, (M,) both; None if unknown.

        `slow`: speeds of slow ranks.
        """
        workload = [np.asarray(values, dtype=np.float64) for values in (tokens, squares)]
        if any(len(values) != self._stacked.compiled.micro_batches for values in workload):
            return None
        chunks = self._stacked.seconds(self._predictor, *workload)
        if chunks is None:
            return None
        if slow:
            chunks = chunks * self._stacked.factors({rank: 1 / speed for rank, speed in slow.items()})
        edges = self._links.edge_seconds(self._transfers.seconds(healthy=True))
        seconds = float(self._stacked.compiled.iteration_seconds(chunks, edges, optimizer_s=self.beside_s))
        return seconds if math.isfinite(seconds) and 0.0 < seconds < MAX_CHUNK_S else None
