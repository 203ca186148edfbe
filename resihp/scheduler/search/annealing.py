"""A layout made better step by step, for as long as there is time: simulated annealing over whole layouts. Pure.

The instant planner changes one thing at a time and stops where no single change gains. Here groups change their
places, replicas and sizes, also where nothing is gained at once; layers follow, to what the timeline says is best for
them. Trials are counted, not timed: the same seed and number of trials give the same layout. Kirkpatrick et al.,
1983; cooled and heated again in cycles, of which every other one begins elsewhere: in a layout of all ranks dealt out
anew, over fewer or more replicas, or in the best one shaken. Where memory is tight, no way of single changes leads
there. Two cycles are of one length, the next two twice as long. What it takes to get there is not weighed.

What is tried is machine code (`resihp.scheduler.search.kernels`). Called by `resihp.scheduler.anytime`. One chunk a
stage, whose ranks are on one node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from resihp.parallelism.layout import Replica
from resihp.parallelism.plan import Order
from resihp.scheduler.layouts.shares import contiguous
from resihp.scheduler.search import kernels
from resihp.scheduler.search.kernels import ASKED, BEST, FORMER, NOW, TRIED
from resihp.scheduler.search.pipelines import Pipe, Pipelines, Ranks, pipe_of, replica_of
from resihp.scheduler.situation import Situation

CYCLE = 150
"""Trials of the first cycle."""
FEWER_REPLICAS = 3
"""Than there are now, and one more: so many are all ranks dealt out over, or"""
MANY = (2, 3, 4, 6)
"""times as many, or each group is one."""
MOST_ELSEWHERE = 6
MORE_STAGES = 4
"""Of a replica than the job was started with."""
MOST_FORMER = 12
"""Layouts that were the best before and are remembered, for where there is no way to the best one."""
SEEDS = 2_147_483_398


class Layouted(msgspec.Struct, frozen=True):
    """A layout, what it takes, and who computes what in which order."""

    replicas: tuple[Replica, ...]
    seconds: float
    """Infinite where there is no memory for it; then the rest is empty."""
    shares: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Order, ...] | None, ...]
    """Of each replica: its own, None for those of the schedule."""


class Search:
    """`starts`: layouts to begin with; ranks dealt out anew if there are none. `beside`: only layouts for which ranks
    have room beside what they hold. `seconds`: of the best so far."""

    def __init__(
        self, situation: Situation, starts: Sequence[Sequence[Replica]], seed: int = 0, *, beside: bool = False
    ) -> None:
        self._situation = situation
        slots = MOST_FORMER + MOST_ELSEWHERE
        self._pipelines = Pipelines(situation, starts, situation.pp + MORE_STAGES, slots, beside=beside)
        self._layouts = self._pipelines.layouts
        self._odd = np.zeros(self._pipelines.most_pipes + 1, np.int64)
        self._drawn = np.array([1 + seed % SEEDS, 1 + (seed * 7919 + 12345) % SEEDS])
        elsewhere = FORMER + MOST_FORMER
        self._turn = np.array([0, CYCLE, 0, 0, 0, MOST_FORMER, elsewhere, 0])
        for start in starts:
            self._write(ASKED, [pipe_of(replica) for replica in start])
            scores = self._layouts.score
            if not self._layouts.pipes[BEST] or scores[ASKED].tolist() < scores[BEST].tolist():
                kernels.copy(self._layouts, ASKED, BEST)
        around = situation.tp * situation.pp
        dealt = self._dealt(int(self._layouts.pipes[BEST]) or max(1, len(situation.available) // around))
        for i, pipes in enumerate(dealt):
            self._write(elsewhere + i, pipes)
            self._turn[kernels.LEFT] = i + 1
        if dealt and not starts:
            kernels.copy(self._layouts, elsewhere, BEST)
        kernels.copy(self._layouts, BEST, TRIED)
        kernels.settle(self._layouts, np.ones(self._pipelines.most_pipes, np.int64), self._odd)

    @property
    def seconds(self) -> float:
        """Predicted for an iteration."""
        return float(self._layouts.score[BEST, 0])

    def best(self) -> Layouted:
        """The best so far."""
        return self._told(BEST)

    def former(self) -> Iterator[Layouted]:
        """Those that were the best before, the last one first, as far as they are not forgotten meanwhile."""
        before, kept = int(self._turn[kernels.BEFORE]), int(self._turn[kernels.KEPT])
        for i in range(before - 1, max(0, before - kept) - 1, -1):
            if self._turn[kernels.BEFORE] < before:
                return  # tables were begun anew for a layout that was asked about
            yield self._told(FORMER + i % kept)

    def priced(self, replicas: Sequence[Replica]) -> Layouted:
        """Any layout, at what it would be here."""
        self._write(ASKED, [pipe_of(replica) for replica in replicas])
        return self._told(ASKED)

    def seconds_of(self, replicas: Sequence[Replica]) -> float:
        """About what any layout would take here."""
        self._write(ASKED, [pipe_of(replica) for replica in replicas])
        return float(self._layouts.score[ASKED, 0])

    def run(self, trials: int) -> bool:
        """Try so many changes; whether something better was found."""
        before = self._layouts.score[BEST].tolist()
        while trials:
            trials = kernels.anneal(
                self._pipelines.job,
                self._pipelines.tables,
                self._layouts,
                self._turn,
                self._odd,
                self._drawn,
                trials,
            )
            if trials:
                self._begin_anew()
        return bool(self._layouts.score[BEST].tolist() != before)

    def _write(self, k: int, pipes: Sequence[Pipe]) -> bool:
        if self._pipelines.full:
            self._begin_anew()
        return self._pipelines.write(k, pipes)

    def _begin_anew(self) -> None:
        """With tables that know what is still needed."""
        elsewhere, left = self._turn[[kernels.ELSEWHERE, kernels.LEFT]].tolist()
        self._turn[kernels.BEFORE] = 0
        self._pipelines.begin_anew((NOW, TRIED, BEST, *range(elsewhere, elsewhere + left)))

    def _told(self, k: int) -> Layouted:
        replicas = tuple(map(replica_of, self._pipelines.read(k)))
        if not math.isfinite(self._layouts.score[k, 0]):
            return Layouted(replicas, math.inf, (), ())
        shares = contiguous(self._pipelines.counts(k))
        found = (self._pipelines.orders(k, d, share) for d, share in enumerate(shares))
        orders, ends = zip(*found, strict=True)
        return Layouted(replicas, max(ends) + self._pipelines.after_s(k), shares, orders)

    def _dealt(self, replicas: int) -> list[list[Pipe]]:
        """All ranks over about so many replicas, each of groups as large as they may be, as evenly as can be; those for
        which there is memory, the fastest first."""
        groups, most = self._largest_groups(), self._pipelines.most_stages
        counts = {*range(max(1, replicas - FEWER_REPLICAS), replicas + 2), *(n * replicas for n in MANY), len(groups)}
        found: list[tuple[list[float], int, list[Pipe]]] = []
        for count in sorted(count for count in counts if count <= min(len(groups), self._pipelines.most_pipes)):
            dealt: list[list[tuple[Ranks, int]]] = [[] for _ in range(count)]
            for group in groups:
                short = [pipe for pipe in dealt if len(pipe) < most]
                if short:
                    min(short, key=len).append((group, 0))
            if all(dealt) and self._write(ASKED, dealt) and math.isfinite(self._layouts.score[ASKED, 0]):
                found.append((self._layouts.score[ASKED].tolist(), count, [*dealt]))
        return [pipes for _, _, pipes in sorted(found, key=lambda one: one[:2])][:MOST_ELSEWHERE]

    def _largest_groups(self) -> list[Ranks]:
        """Of all ranks, each node's in groups of their own, the strongest first."""
        situation = self._situation
        at: dict[str, list[int]] = {}
        for rank in sorted(situation.available, key=lambda rank: (-situation.speeds.get(rank, 1.0), rank)):
            at.setdefault(situation.nodes[rank], []).append(rank)
        found: list[Ranks] = []
        for ranks in at.values():
            while ranks:
                size = max(k for k in self._pipelines.degrees if k <= len(ranks))
                found.append(tuple(sorted(ranks[:size])))
                ranks = ranks[size:]
        return sorted(found, key=lambda ranks: (-situation.speed(ranks), ranks))
