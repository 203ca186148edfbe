"""A plan that took effect, and what is known of iterations under it. Facts and counts; nothing here judges them.

Made and filled by `resihp.detector.online.monitor`; each plan begins with a new one. Pure, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping

import numpy as np

from resihp.detector.observation import Floats
from resihp.detector.online.link_channel import Links
from resihp.detector.online.plan_arrays import Stacked, Sums
from resihp.parallelism.plan import Plan
from resihp.pipeline.compiled import compile_orders
from resihp.pipeline.timeline import Orders

TEACHERS = 16
"""Ranks of each group of peers that the predictor learns from."""
KEPT = 8
"""Iterations that are judged anew when predictions become better."""


class Frame:
    """A plan that took effect, and the statistics that began with it."""

    def __init__(self, plan: Plan, orders: Orders, nodes: Mapping[int, Hashable] | None) -> None:
        self.epoch = plan.epoch
        self.stacked = Stacked(plan, compile_orders(plan, orders))
        self.links = Links(self.stacked, nodes)
        self.present = {*self.stacked.ranks.tolist(), *plan.layout.standby}
        self.last: int | None = None
        """Iteration seen last."""
        self.revision: int | None = None
        """The predictor's, on which levels rest."""
        self.fitted = False
        """Whether all kinds of chunks have been learnt, not only derived from others."""
        self.measured = False
        """Whether chunks are measured at all."""
        self.first: int | None = None
        """Iteration that measurements were first taken of."""
        self._reported = np.zeros(self.stacked.ranks.size, dtype=np.int64)
        self.kept: deque[tuple[int, float, Sums, float | None]] = deque(maxlen=KEPT)
        """Iterations seen last: what `_judge` was given, and what was expected of them, as things stood."""
        self.present_s: float | None = None
        """What was expected of the iteration seen last, as things stood."""
        self.healthy_s = math.nan
        """What it would have taken where all is well."""
        self.foreign = 0.0
        """Iterations in a row whose workload was beyond what is learnt."""
        self.beside: list[float] = []
        self.beside_s = 0.0
        """Seconds of an iteration beside its chunks: synchronisation and step."""
        self.transfers: Floats = np.zeros(self.stacked.compiled.edges.shape[1])
        """(E,): healthy seconds."""
        self.present_transfers: Floats | None = None
        self.present_factors: Floats | None = None
        """(V,): by how much slots last longer now than where all is well; None for not at all."""

    def report(self, iteration: int, compute: Floats) -> None:
        """Take who told of an iteration: those with own work (R,), in seconds."""
        if self.first is None:
            self.first = iteration
            self._reported[:] = iteration - 1
        self._reported[np.isfinite(compute)] = iteration

    def reported(self, row: int) -> int | None:
        """The iteration in which a row last told something; None for never."""
        last = int(self._reported[row])
        return last if self.first is not None and last >= self.first else None

    def coverage(self) -> dict[int, int]:
        """By rank with work: the iteration in which it last told something, or that before the first of all."""
        if self.first is None:
            return {}
        busy = self.stacked.lengths > 0
        return dict(zip(self.stacked.ranks[busy].tolist(), self._reported[busy].tolist(), strict=True))

    def teachers(self, without: Mapping[int, float]) -> list[int]:
        """Rows that the predictor learns from, spread over each group of peers."""
        group, ranks = self.stacked.group, self.stacked.ranks
        rows: list[int] = []
        for one in range(int(group.max(initial=-1)) + 1):
            members = np.flatnonzero(group == one)
            members = members[:: max(1, -(-members.size // TEACHERS))]
            rows += [row for row in members.tolist() if int(ranks[row]) not in without]
        return rows
