"""A plan in effect, and the data collected of iterations under it. Facts and counts; nothing here judges them.

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

TEACHERS_PER_GROUP = 16
"""Number of ranks per group of peers that the predictor learns from."""
KEPT_ITERATIONS = 8
"""Number of iterations that are judged again when predictions improve."""


class Frame:
    """A plan in effect, and the statistics that began with it."""

    def __init__(self, plan: Plan, orders: Orders, nodes: Mapping[int, Hashable] | None) -> None:
        self.epoch = plan.epoch
        self.stacked = Stacked(plan, compile_orders(plan, orders))
        self.links = Links(self.stacked, nodes)
        self.present = {*self.stacked.ranks.tolist(), *plan.layout.standby}
        self.last: int | None = None
        """Iteration seen last."""
        self.revision: int | None = None
        """Revision of the predictor on which levels are based."""
        self.fitted = False
        """Whether all kinds of chunks have been learnt directly, not derived from others."""
        self.measured = False
        """Whether chunks are measured at all."""
        self.first: int | None = None
        """First iteration with measurements."""
        self._reported = np.zeros(self.stacked.ranks.size, dtype=np.int64)
        self.kept: deque[tuple[int, float, Sums, float | None]] = deque(maxlen=KEPT_ITERATIONS)
        """The latest iterations: the arguments of `_judge`, and the seconds that were expected at the time."""
        self.present_s: float | None = None
        """Expected seconds of the latest iteration, with everything slow that is slow."""
        self.healthy_s = math.nan
        """Expected seconds of the latest iteration if everything were healthy."""
        self.foreign = 0.0
        """Count of iterations with a workload outside of the learnt range; fades."""
        self.beside: list[float] = []
        self.beside_s = 0.0
        """Seconds of an iteration outside of its chunks: synchronisation and optimizer step."""
        self.transfers: Floats = np.zeros(self.stacked.compiled.edges.shape[1])
        """(E,): healthy seconds of each transfer."""
        self.present_transfers: Floats | None = None
        self.present_factors: Floats | None = None
        """(V,): factor by which slots take longer at present than when healthy; None if none does."""

    def report(self, iteration: int, compute: Floats) -> None:
        """Note the ranks that reported an iteration: those with a time of their own work in `compute` (R,), seconds."""
        if self.first is None:
            self.first = iteration
            self._reported[:] = iteration - 1
        self._reported[np.isfinite(compute)] = iteration

    def reported(self, row: int) -> int | None:
        """Return the iteration in which a row last reported; None if it never did."""
        last_report = int(self._reported[row])
        return last_report if self.first is not None and last_report >= self.first else None

    def coverage(self) -> dict[int, int]:
        """Return, by rank with work, the iteration of its last report, or the one before the first report of all."""
        if self.first is None:
            return {}
        busy = self.stacked.lengths > 0
        return dict(zip(self.stacked.ranks[busy].tolist(), self._reported[busy].tolist(), strict=True))

    def teachers(self, without: Mapping[int, float]) -> list[int]:
        """Return the rows that the predictor learns from, spread over each group of peers."""
        group, ranks = self.stacked.group, self.stacked.ranks
        rows: list[int] = []
        for group_index in range(int(group.max(initial=-1)) + 1):
            members = np.flatnonzero(group == group_index)
            members = members[:: max(1, -(-members.size // TEACHERS_PER_GROUP))]
            rows += [row for row in members.tolist() if int(ranks[row]) not in without]
        return rows
