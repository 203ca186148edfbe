"""Holds the detector's data of one adopted plan: its arrays, and the measurements and counts of its iterations.

`resihp.detector.online.monitor` makes a new frame for each adopted plan and fills it. Nothing here judges an iteration.
Pure, no clock.
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
"""Number of latest iterations that are judged again when predictions change."""


class Frame:
    """An adopted plan, and the detector's data of the iterations under it. `nodes`: the node of each rank, if known."""

    def __init__(self, plan: Plan, orders: Orders, nodes: Mapping[int, Hashable] | None) -> None:
        self.epoch = plan.epoch
        self.stacked = Stacked(plan, compile_orders(plan, orders))
        self.links = Links(self.stacked, nodes)
        self.present = {*self.stacked.ranks.tolist(), *plan.layout.standby}
        self.last: int | None = None
        """Latest iteration that was judged; None before the first."""
        self.revision: int | None = None
        """Revision of the predictor with which the present levels were learnt; None before predictions are known."""
        self.fitted = False
        """Whether the predictor learnt all kinds of chunks of the plan from measurements, not derived from others."""
        self.measured = False
        """Whether any iteration had measurements of chunks."""
        self.first: int | None = None
        """First iteration with measurements of chunks; None before."""
        self._reported = np.zeros(self.stacked.ranks.size, dtype=np.int64)
        self.kept: deque[tuple[int, float, Sums, float | None]] = deque(maxlen=KEPT_ITERATIONS)
        """The latest iterations: number, seconds and sums of each, and the seconds that were expected at the time."""
        self.present_s: float | None = None
        """Expected seconds of the latest iteration with the present slow ranks and links; None if unknown."""
        self.healthy_s = math.nan
        """Expected seconds of the latest iteration with all ranks and links healthy; NaN if unknown."""
        self.foreign = 0.0
        """Number of iterations with a workload outside of the learnt range; fades with each iteration within it."""
        self.beside: list[float] = []
        """Seconds outside of chunks in each of the first iterations; `beside_s` is their median."""
        self.beside_s = 0.0
        """Seconds of an iteration outside of its chunks: synchronisation and optimizer step."""
        self.transfers: Floats = np.zeros(self.stacked.compiled.edges.shape[1])
        """(E,): healthy seconds of each transfer."""
        self.present_transfers: Floats | None = None
        """(E,): seconds of each transfer with the present slow links; None if no link is slow."""
        self.present_factors: Floats | None = None
        """(V,): factor by which each slot takes longer with the present slow ranks; None if no rank is slow."""

    def report(self, iteration: int, compute: Floats) -> None:
        """Note the ranks that reported measurements of an iteration.

        `compute` (R,): seconds of each rank's own work, NaN without a report.
        """
        if self.first is None:
            self.first = iteration
            self._reported[:] = iteration - 1
        self._reported[np.isfinite(compute)] = iteration

    def reported(self, row: int) -> int | None:
        """Return the latest iteration with measurements of the rank in `row`; None if there is none."""
        last_report = int(self._reported[row])
        return last_report if self.first is not None and last_report >= self.first else None

    def coverage(self) -> dict[int, int]:
        """Return, for each rank with work, the latest iteration with measurements of that rank.

        For a rank without any, return the iteration before `first`. Empty while `first` is None.
        """
        if self.first is None:
            return {}
        busy = self.stacked.lengths > 0
        return dict(zip(self.stacked.ranks[busy].tolist(), self._reported[busy].tolist(), strict=True))

    def teachers(self, without: Mapping[int, float]) -> list[int]:
        """Return the rows of the ranks that the predictor learns from: some of each group of peers, none in
        `without`."""
        group, ranks = self.stacked.group, self.stacked.ranks
        rows: list[int] = []
        for group_index in range(int(group.max(initial=-1)) + 1):
            members = np.flatnonzero(group == group_index)
            members = members[:: max(1, -(-members.size // TEACHERS_PER_GROUP))]
            rows += [row for row in members.tolist() if int(ranks[row]) not in without]
        return rows
