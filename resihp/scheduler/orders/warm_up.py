"""Orders of a pipeline with slow links: how many forwards each stage begins before its first backward. Pure.

1F1B leaves no slack between neighbours, so each late transfer delays every micro-batch. Adaptra (NSDI'26; its code is
called PipeMorph) adds slack: more warm-up forwards before a slow link, x_last = 1, x_i = x_{i+1} + ceil(delay / t_F) +
2, as far as memory allows, and then B before F before W. It tries several assumed delays and keeps the best replay.
This module does the same and more. It also starts from the slack that one round trip over the links takes, in whole
micro-batches, and from no limit except memory. It lets stages wait a little for work that is about to arrive instead of
beginning a W. It changes the depths of single stages as long as that helps on the timeline. The result is never slower
than the given schedule, and keeps no more micro-batches alive than its speed needs, or than are allowed.

Called by the planner for replicas with transfers that take time. It chooses no layout.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Order, Plan
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders
from resihp.scheduler.cost.prices import Priced
from resihp.scheduler.orders.list_scheduling import ROUNDING_TOLERANCE, ListScheduler, StageRules, most_ahead

ASSUMED_DELAY_PARTS = (1.0, 0.5, 0.25, 0.75, 0.0)
"""Parts of the delay that are tried in place of the full delay (Adaptra: 0, 5, ..., delay ms)."""

PATIENCE_VALUES = (0.0, 0.5, 0.75, 0.25, 1.0)
"""Values of `StageRules.patience` to try."""


class Adapted(msgspec.Struct, frozen=True, kw_only=True):
    """Orders of a replica's stages, and their time."""

    orders: tuple[Order, ...]
    """Order of each stage, for `Plan.orders`."""
    seconds: float
    plain_seconds: float
    """Time of the schedule's own orders."""
    alive: tuple[float, ...]
    """Maximum number of micro-batches that each stage keeps alive; with several chunks, a chunk counts by its share of
    the stage's layers."""


def adapted(
    priced: Priced,
    share: Sequence[int],
    *,
    schedule: str = "1f1b",
    split: bool = False,
    most_alive: Sequence[float] = (),
    evaluations: int = 120,
    seed: int = 0,
) -> Adapted:
    """Return fast orders in which `priced` computes the micro-batches `share` (their indices in the global batch).

    `split`: whether W may be separate from B; in that case either all orders have W or none has. `most_alive`: for each
    stage, the maximum number of micro-batches that it may keep alive; empty for no limit. `evaluations`: maximum number
    of orders that are made and played, besides the schedule's own.

    Raises PlanError if a stage may not keep even one micro-batch alive, or has an infinite time.
    """
    search = _DepthSearch(priced, tuple(share), schedule, split, tuple(map(float, most_alive)), evaluations)
    search.first()
    search.climb(random.Random(seed))
    search.shrink()
    return search.result()


def published_depths(priced: Priced, assumed: float = 1.0) -> tuple[int, ...]:
    """Return the depth of each stage by Adaptra's rule for one chunk a stage: x_last = 1, x_i = x_{i+1} + ceil(delay /
    t_F) + 2.

    `assumed`: the part of each delay that is taken into account.
    """
    depths = [1]
    for s in reversed(range(len(priced.shape) - 1)):
        forward = sum(chunk.f for chunk in priced.shape[s])
        delay = assumed * priced.late[s][s + 1] if priced.late else 0.0
        depths.append(depths[-1] + 2 + (math.ceil(delay / forward - ROUNDING_TOLERANCE) if forward else 0))
    return tuple(reversed(depths))


def _round_trips(priced: Priced, assumed: float) -> list[int]:
    """Return, for each stage, the number of micro-batches that it could compute during a round trip to the last
    stage."""
    micro_batches: list[int] = []
    for s, chunks in enumerate(priced.shape):
        seconds = sum(chunk.total for chunk in chunks)
        pairs = itertools.pairwise(range(s, len(priced.shape))) if priced.late else ()
        round_trip_s = assumed * sum(priced.late[a][b] + priced.late[b][a] for a, b in pairs)
        micro_batches.append(math.ceil(round_trip_s / seconds - ROUNDING_TOLERANCE) if seconds else 0)
    return micro_batches


class _DepthSearch:
    """Search for the best orders: the fastest, and among equally fast ones those that keep the fewest micro-batches
    alive."""

    def __init__(
        self,
        priced: Priced,
        share: tuple[int, ...],
        schedule: str,
        split: bool,
        caps: tuple[float, ...],
        evaluations: int,
    ) -> None:
        stages = priced.replica.stages
        if caps and len(caps) != len(stages):
            raise PlanError(f"{len(caps)} limits of live micro-batches for {len(stages)} stages")
        plan = Plan(epoch=0, layout=Layout((priced.replica,)), assignment=(share,), schedule=schedule)
        late = priced.late
        sizes = [[(last - first + 1) / len(stage.layers) for first, last in stage.chunks] for stage in stages]
        self._lists = ListScheduler(
            plan, (priced.shape,), (lambda a, b: late[a.stage][b.stage]) if late else 0.0, sizes
        )
        self._priced, self._count = priced, len(share)
        self._split, self._caps, self._left = split, caps, evaluations
        plain = orders_of(plan)
        self._plain_seconds = self._lists.play(plain).makespan
        self._depths = [most_ahead(order) for order in plain[0]]
        self._seconds, self._alive = math.inf, (math.inf, math.inf)
        self._orders: Orders = ()
        self._rules = StageRules()
        self._keep(plain, StageRules(limits=tuple(self._depths)))
        if split:
            apart = msgspec.structs.replace(plan, schedule="zero-bubble")
            self._keep(orders_of(apart), StageRules(split=True, limits=tuple(self._depths), caps=caps))

    def first(self) -> None:
        """Try the orders with the depths that follow from the rules."""
        for limits in dict.fromkeys(self._starts()):
            for patience in PATIENCE_VALUES[: 2 if self._split else 1]:
                self._try(StageRules(split=self._split, limits=limits, caps=self._caps, patience=patience))

    def climb(self, rng: random.Random) -> None:
        """Change the depth of single stages, the depths of all stages up to one, or the patience, as long as
        evaluations remain.

        A fifth of the evaluations is reserved for `shrink`.
        """
        reserve = self._left // 5
        stages = len(self._lists.lanes)
        while self._left > reserve and self._count > 1:
            limits = [*(self._rules.limits or (self._count * max(map(len, self._priced.shape)),) * stages)]
            patience = self._rules.patience
            s, step = rng.randrange(stages), rng.choice((-2, -1, 1, 2))
            move = rng.randrange(6 if self._split else 4)
            if move > 3:
                patience = rng.choice(PATIENCE_VALUES)
            for i in range(s + 1) if move == 3 else [s] if move < 3 else []:
                limits[i] = max(1, min(limits[i], most_ahead(self._orders[0][i])) + step)
            self._try(StageRules(split=self._split, limits=tuple(limits), caps=self._caps, patience=patience))

    def shrink(self) -> None:
        """Keep fewer micro-batches alive, as long as that costs no time."""
        while self._left > 0:
            most_alive = max(self._lists.alive(self._orders))
            caps = tuple(min(cap, most_alive - 1) for cap in self._caps or (math.inf,) * len(self._lists.lanes))
            before = self._orders
            for patience in dict.fromkeys((self._rules.patience, *PATIENCE_VALUES[:2])):
                if min(caps) >= 1:
                    self._try(msgspec.structs.replace(self._rules, split=self._split, caps=caps, patience=patience))
            if self._orders is before:
                break

    def result(self) -> Adapted:
        """Return the best orders. Raises PlanError if the schedule's own orders take an infinite time."""
        return Adapted(
            orders=self._orders[0],
            seconds=self._seconds,
            plain_seconds=self._plain_seconds,
            alive=self._lists.alive(self._orders),
        )

    def _starts(self) -> Iterator[tuple[int, ...]]:
        yield ()
        for assumed in ASSUMED_DELAY_PARTS:
            slack = _round_trips(self._priced, assumed)
            yield tuple(depth + more for depth, more in zip(self._depths, slack, strict=True))
            if max(map(len, self._priced.shape)) == 1:
                yield published_depths(self._priced, assumed)

    def _try(self, rules: StageRules) -> None:
        if self._left > 0:
            self._left -= 1
            self._keep(self._lists.run(rules), rules)

    def _keep(self, orders: Orders, rules: StageRules) -> None:
        """Keep `orders` as the best ones if they are allowed and better."""
        alive = self._lists.alive(orders)
        if any(count > cap * (1 + ROUNDING_TOLERANCE) for count, cap in zip(alive, self._caps, strict=False)):
            return
        seconds = self._lists.play(orders).makespan
        faster = seconds < self._seconds * (1 - ROUNDING_TOLERANCE)
        if faster or (seconds <= self._seconds and (max(alive), sum(alive)) < self._alive):
            self._seconds, self._alive = seconds, (max(alive), sum(alive))
            self._orders, self._rules = orders, rules
