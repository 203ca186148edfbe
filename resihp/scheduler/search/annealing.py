"""Improves a layout step by step, for as long as there is time: simulated annealing over whole layouts. Pure.

The immediate planner changes one thing at a time, and stops when no single change helps. In this search, groups change
their places, replicas and sizes even without an immediate gain; the layers are then partitioned as is best on the
timeline. Trials are counted, not timed: equal seeds and numbers of trials give equal layouts. The temperature falls and
is reset in cycles (Kirkpatrick et al., 1983). Every second cycle starts from another layout: one in which all ranks are
distributed anew, over fewer or more replicas, or the best one after random changes. With tight memory, single changes
alone do not lead to such layouts. Two cycles have one length, the next two twice that length. The cost of the
transition is not considered.

The trials are machine code (`resihp.scheduler.search.kernels`). Called by `resihp.scheduler.anytime`. Each stage has
one chunk, and its ranks are on one node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from resihp.parallelism.layout import Replica
from resihp.parallelism.plan import Order
from resihp.scheduler.layouts.shares import contiguous
from resihp.scheduler.search.kernels.arrays import (
    BEST,
    CANDIDATE,
    CURRENT,
    FORMER,
    FORMER_COUNT,
    FORMER_KEPT,
    NEXT_START,
    QUERIED,
    STARTS_LEFT,
)
from resihp.scheduler.search.kernels.layouts import copy_layout
from resihp.scheduler.search.kernels.trials import accept_candidate, anneal
from resihp.scheduler.search.pipelines import Pipe, Pipelines, Ranks, pipe_of, replica_of
from resihp.scheduler.situation import Situation

FIRST_CYCLE_TRIALS = 150
"""Number of trials of the first cycle."""
FEWER_REPLICAS = 3
"""Starting layouts distribute all ranks over the present number of replicas, up to this many fewer, or one more."""
REPLICA_MULTIPLES = (2, 3, 4, 6)
"""Further starting layouts have these multiples of the present number of replicas, or one replica for each group."""
MAX_OTHER_STARTS = 6
"""Maximum number of starting layouts in which all ranks are distributed anew."""
EXTRA_STAGES = 4
"""Number of stages of a replica beyond the number with which the job was started."""
MAX_FORMER = 12
"""Maximum number of former best layouts that are remembered, in case no transition to the best one is possible."""
SEED_RANGE = 2_147_483_398


class FoundLayout(msgspec.Struct, frozen=True):
    """A layout with its time, and the micro-batches and orders of each replica."""

    replicas: tuple[Replica, ...]
    seconds: float
    """Time of an iteration. Infinite if memory does not suffice; then `shares` and `orders` are empty."""
    shares: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Order, ...] | None, ...]
    """Orders of each replica; None for a replica that uses the schedule's orders."""


class Search:
    """A search over layouts. `seconds` is the time of the best layout so far.

    `starts`: layouts to begin with; if empty, ranks are distributed anew. `beside`: whether to consider only layouts
    that leave ranks room for their present state.
    """

    def __init__(
        self, situation: Situation, starts: Sequence[Sequence[Replica]], seed: int = 0, *, beside: bool = False
    ) -> None:
        self._situation = situation
        slots = MAX_FORMER + MAX_OTHER_STARTS
        self._pipelines = Pipelines(situation, starts, situation.pp + EXTRA_STAGES, slots, beside=beside)
        self._layouts = self._pipelines.layouts
        self._odd = np.zeros(self._pipelines.most_pipes + 1, np.int64)
        self._drawn = np.array([1 + seed % SEED_RANGE, 1 + (seed * 7919 + 12345) % SEED_RANGE])
        elsewhere = FORMER + MAX_FORMER
        self._turn = np.array([0, FIRST_CYCLE_TRIALS, 0, 0, 0, MAX_FORMER, elsewhere, 0])
        for start in starts:
            self._write(QUERIED, [pipe_of(replica) for replica in start])
            scores = self._layouts.score
            if not self._layouts.pipes[BEST] or scores[QUERIED].tolist() < scores[BEST].tolist():
                copy_layout(self._layouts, QUERIED, BEST)
        around = situation.tp * situation.pp
        dealt = self._dealt(int(self._layouts.pipes[BEST]) or max(1, len(situation.available) // around))
        for i, pipes in enumerate(dealt):
            self._write(elsewhere + i, pipes)
            self._turn[STARTS_LEFT] = i + 1
        if dealt and not starts:
            copy_layout(self._layouts, elsewhere, BEST)
        copy_layout(self._layouts, BEST, CANDIDATE)
        accept_candidate(self._layouts, np.ones(self._pipelines.most_pipes, np.int64), self._odd)

    @property
    def seconds(self) -> float:
        """Predicted time of an iteration under the best layout so far."""
        return float(self._layouts.score[BEST, 0])

    def best(self) -> FoundLayout:
        """Return the best layout so far."""
        return self._told(BEST)

    def former(self) -> Iterator[FoundLayout]:
        """Yield the former best layouts that are still remembered, the latest first."""
        before, kept = int(self._turn[FORMER_COUNT]), int(self._turn[FORMER_KEPT])
        for i in range(before - 1, max(0, before - kept) - 1, -1):
            if self._turn[FORMER_COUNT] < before:
                return  # the tables were rebuilt to price a layout of the caller
            yield self._told(FORMER + i % kept)

    def priced(self, replicas: Sequence[Replica]) -> FoundLayout:
        """Return any layout with its time in this search."""
        self._write(QUERIED, [pipe_of(replica) for replica in replicas])
        return self._told(QUERIED)

    def seconds_of(self, replicas: Sequence[Replica]) -> float:
        """Return the approximate time of any layout in this search."""
        self._write(QUERIED, [pipe_of(replica) for replica in replicas])
        return float(self._layouts.score[QUERIED, 0])

    def run(self, trials: int) -> bool:
        """Try `trials` changes. Return whether they led to a better layout."""
        before = self._layouts.score[BEST].tolist()
        while trials:
            trials = anneal(
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
        """Rebuild the full tables with only the layouts that are still needed."""
        next_start, starts_left = self._turn[[NEXT_START, STARTS_LEFT]].tolist()
        self._turn[FORMER_COUNT] = 0
        self._pipelines.begin_anew((CURRENT, CANDIDATE, BEST, *range(next_start, next_start + starts_left)))

    def _told(self, k: int) -> FoundLayout:
        replicas = tuple(map(replica_of, self._pipelines.read(k)))
        if not math.isfinite(self._layouts.score[k, 0]):
            return FoundLayout(replicas, math.inf, (), ())
        shares = contiguous(self._pipelines.counts(k))
        orders_and_ends = (self._pipelines.orders(k, d, share) for d, share in enumerate(shares))
        orders, ends = zip(*orders_and_ends, strict=True)
        return FoundLayout(replicas, max(ends) + self._pipelines.after_s(k), shares, orders)

    def _dealt(self, replicas: int) -> list[list[Pipe]]:
        """Return layouts that distribute all ranks evenly over about `replicas` replicas, in the largest possible
        groups.

        Layouts that do not fit into memory are left out; the fastest layout comes first.
        """
        groups, most = self._largest_groups(), self._pipelines.most_stages
        counts = {
            *range(max(1, replicas - FEWER_REPLICAS), replicas + 2),
            *(n * replicas for n in REPLICA_MULTIPLES),
            len(groups),
        }
        layouts: list[tuple[list[float], int, list[Pipe]]] = []
        for count in sorted(count for count in counts if count <= min(len(groups), self._pipelines.most_pipes)):
            dealt: list[list[tuple[Ranks, int]]] = [[] for _ in range(count)]
            for group in groups:
                extendable = [pipe for pipe in dealt if len(pipe) < most]
                if extendable:
                    min(extendable, key=len).append((group, 0))
            if all(dealt) and self._write(QUERIED, dealt) and math.isfinite(self._layouts.score[QUERIED, 0]):
                layouts.append((self._layouts.score[QUERIED].tolist(), count, [*dealt]))
        return [pipes for _, _, pipes in sorted(layouts, key=lambda entry: entry[:2])][:MAX_OTHER_STARTS]

    def _largest_groups(self) -> list[Ranks]:
        """Return all ranks in the largest possible groups within each node, the strongest group first."""
        situation = self._situation
        ranks_of_node: dict[str, list[int]] = {}
        for rank in sorted(situation.available, key=lambda rank: (-situation.speeds.get(rank, 1.0), rank)):
            ranks_of_node.setdefault(situation.nodes[rank], []).append(rank)
        groups: list[Ranks] = []
        for ranks in ranks_of_node.values():
            while ranks:
                size = max(k for k in self._pipelines.degrees if k <= len(ranks))
                groups.append(tuple(sorted(ranks[:size])))
                ranks = ranks[size:]
        return sorted(groups, key=lambda ranks: (-situation.speed(ranks), ranks))
