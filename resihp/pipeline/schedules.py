"""Orders of F, B and W on each stage. Pure; the executor carries them out, the timeline computes their time.

Plain shapes get the orders of the literature: 1F1B, Megatron's interleaved order if stages have several chunks, ZB-H1
if B and W are separate. All other shapes (micro-batches that migrate, stages with unequal numbers of chunks) are
scheduled greedily on a virtual clock, which always yields an order that can be carried out. This module never decides
which schedule or which migration is good: that is the scheduler's task (`resihp.scheduler`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from resihp.errors import PlanError
from resihp.parallelism.layout import Replica
from resihp.parallelism.plan import Order, Plan, Primitive
from resihp.pipeline.timeline import Node, Orders, Seconds, Transfers, follows, layer_units, needs

SCHEDULE_NAMES = ("1f1b", "interleaved", "zero-bubble")
"""Names of schedules that a plan may have. "1f1b" and "interleaved" are the same rule: the stages' number of chunks
decides."""


def orders_of(plan: Plan) -> Orders:
    """Return each stage's order of work in an iteration: the plan's own orders if it has any, else the orders of its
    schedule.

    Raises PlanError for an unknown schedule, or for orders that do not fit the layout's stages.
    """
    replicas = plan.layout.replicas
    if plan.orders:
        if [len(orders) for orders in plan.orders] != [len(replica.stages) for replica in replicas]:
            raise PlanError(f"plan of epoch {plan.epoch}: its orders do not fit its layout, one for each stage")
        return plan.orders
    if plan.schedule not in SCHEDULE_NAMES:
        raise PlanError(
            f"plan of epoch {plan.epoch}: unknown schedule {plan.schedule}; choose {', '.join(SCHEDULE_NAMES)}"
        )
    mixed = _mixed(plan)
    orders = [
        None if d in mixed else _textbook(plan.schedule, replica, share)
        for d, (replica, share) in enumerate(zip(replicas, plan.assignment, strict=True))
    ]
    if None in orders:
        own = greedy(plan, layer_units(plan.layout), split=plan.schedule == "zero-bubble")
        orders = [own[d] if order is None else order for d, order in enumerate(orders)]
    return tuple(order for order in orders if order is not None)


def one_forward_one_backward(stage: int, stages: int, micro_batches: tuple[int, ...]) -> tuple[Primitive, ...]:
    """Return the 1F1B order (PipeDream-flush, Megatron's non-interleaved schedule) for `stage` of `stages`.

    The order begins with min(stages - stage - 1, micro-batches) warm-up forwards; then one forward and one backward
    alternate; the remaining backwards follow.
    """
    warm_up = min(stages - stage - 1, len(micro_batches))
    order = [Primitive("F", m) for m in micro_batches[:warm_up]]
    for done, m in enumerate(micro_batches[warm_up:]):
        order += [Primitive("F", m), Primitive("B", micro_batches[done])]
    order += [Primitive("B", m) for m in micro_batches[len(micro_batches) - warm_up :]]
    return tuple(order)


def interleaved(stage: int, stages: int, chunks: int, micro_batches: tuple[int, ...]) -> Order:
    """Return Megatron's interleaved 1F1B (`forward_backward_pipelining_with_interleaving`) for `stage` of `stages`.

    Micro-batches are divided into groups of `stages`, and each group passes one chunk after the other. The order begins
    with 2 (stages - stage - 1) + (chunks - 1) * stages warm-up forwards; then one forward and one backward alternate. A
    remainder of micro-batches is spread over the groups: a group smaller than `stages` would cost bubbles and might
    even deadlock (Megatron refuses it).
    """
    count = len(micro_batches)
    groups = max(1, count // stages)
    sizes = [count // groups + (g < count % groups) for g in range(groups)]
    forwards = [
        (m, chunk)
        for g in range(groups)
        for chunk in range(chunks)
        for m in micro_batches[sum(sizes[:g]) : sum(sizes[: g + 1])]
    ]
    backwards = [(m, chunks - 1 - chunk) for m, chunk in forwards]
    warm_up = min(2 * (stages - stage - 1) + (chunks - 1) * sizes[0], len(forwards))
    order = [Primitive("F", m, chunk) for m, chunk in forwards[:warm_up]]
    for (m, chunk), (done, its_chunk) in zip(forwards[warm_up:], backwards, strict=False):
        order += [Primitive("F", m, chunk), Primitive("B", done, its_chunk)]
    order += [Primitive("B", m, chunk) for m, chunk in backwards[len(forwards) - warm_up :]]
    return tuple(order)


def zero_bubble(stage: int, stages: int, micro_batches: tuple[int, ...]) -> Order:
    """Return the ZB-H1 order (Qi et al., "Zero Bubble Pipeline Parallelism", 2024) for `stage` of `stages`.

    It is 1F1B with separate Ws, each `stage` micro-batches behind its B. Between F and B, a stage holds no more
    micro-batches than under 1F1B. Between F and W, every stage holds at most `stages` micro-batches, as many as 1F1B's
    first stage. If F, B and W take the same time, the bubble is a third of 1F1B's.
    """
    order: list[Primitive] = []
    done = 0
    for p in one_forward_one_backward(stage, stages, micro_batches):
        order.append(p)
        if p.kind == "B":
            if done >= stage:
                order.append(Primitive("W", micro_batches[done - stage]))
            done += 1
    order += [Primitive("W", m) for m in micro_batches[max(0, done - stage) :]]
    return tuple(order)


def greedy(plan: Plan, seconds: Seconds, transfer_s: Transfers = 0.0, *, split: bool = False) -> Orders:
    """List-schedule on a virtual clock: a free stage begins a ready B, else a ready F, else a ready W.

    The rule works for any layout and any migrations, at the caller's costs (`seconds`, `transfer_s`). With `split`,
    every B has a separate W. Forwards are limited as in 1F1B: a stage begins a forward only while the number of its
    micro-batches between F and B (and, with `split`, between F and W) is below the limit of its position in the
    pipeline. If all stages would wait, the most urgent forward begins nevertheless, so the result is always an order
    that can be carried out.
    """
    return _Greedy(plan, seconds, transfer_s, split).run()


class _Greedy:
    """One run of the virtual clock. The stages of all replicas are numbered as lanes, each with queues of ready
    nodes."""

    def __init__(self, plan: Plan, seconds: Seconds, transfer_s: Transfers, split: bool) -> None:
        self._paths = plan.paths()
        self._seconds, self._transfer_s, self._split = seconds, transfer_s, split
        self._lanes = [(d, s) for d, replica in enumerate(plan.layout.replicas) for s in range(len(replica.stages))]
        self._lane = {place: i for i, place in enumerate(self._lanes)}
        self._rank: dict[int, tuple[int, int, int]] = {}
        for d, share in enumerate(plan.assignment):
            group = len(plan.layout.replicas[d].stages)
            self._rank |= {m: (position // group, position, d) for position, m in enumerate(share)}
        self._limits, self._most = _limits(plan)
        self._orders: list[list[Primitive]] = [[] for _ in self._lanes]
        self._ready: list[dict[str, list[tuple[tuple[int, ...], Node]]]] = [
            {"B": [], "F": [], "W": []} for _ in self._lanes
        ]
        self._free = [True] * len(self._lanes)
        self._to_b = [0] * len(self._lanes)
        self._to_w = [0] * len(self._lanes)
        self._missing: dict[Node, int] = {}
        self._clock = 0.0
        self._events: list[tuple[float, int, int, Node | None]] = []
        """(time, tie, lane, node): the node becomes ready on the lane at that time; None instead of a node: the lane
        becomes free."""
        self._count = 0

    def run(self) -> Orders:
        for m, path in self._paths.items():
            for v in range(len(path)):
                for kind in ("F", "B", "W") if self._split else ("F", "B"):
                    node: Node = (kind, m, v)
                    self._missing[node] = len(needs(node, len(path) - 1))
                    if not self._missing[node]:
                        self._at(0.0, node)
        remaining = len(self._missing)
        while remaining:
            touched = set()
            if self._events:
                self._clock = self._events[0][0]
            while self._events and self._events[0][0] <= self._clock:
                _, _, lane, ready = heapq.heappop(self._events)
                touched.add(lane)
                if ready is None:
                    self._free[lane] = True
                else:
                    heapq.heappush(self._ready[lane][ready[0]], (self._urgency(ready), ready))
            for lane in sorted(touched):
                if self._free[lane]:
                    node_now = self._choice(lane)
                    if node_now is not None:
                        self._begin(lane, node_now)
                        remaining -= 1
            if remaining and not self._events:  # every stage is held back: let the most urgent forward go
                queues = [(entry["F"][0], lane) for lane, entry in enumerate(self._ready) if entry["F"]]
                (_, node_now), lane = min(queues)
                heapq.heappop(self._ready[lane]["F"])
                self._begin(lane, node_now)
                remaining -= 1
        orders: dict[int, list[Order]] = defaultdict(list)
        for (d, _), order in zip(self._lanes, self._orders, strict=True):
            orders[d].append(tuple(order))
        return tuple(tuple(orders[d]) for d in sorted(orders))

    def _choice(self, lane: int) -> Node | None:
        ready = self._ready[lane]
        if ready["B"]:
            return heapq.heappop(ready["B"])[1]
        if ready["F"] and self._to_b[lane] < self._limits[lane] and self._to_w[lane] < self._most[lane]:
            return heapq.heappop(ready["F"])[1]
        return heapq.heappop(ready["W"])[1] if ready["W"] else None

    def _begin(self, lane: int, node: Node) -> None:
        kind, m, v = node
        path = self._paths[m]
        primitive = Primitive(kind, m, path[v].chunk)
        self._orders[lane].append(primitive)
        self._free[lane] = False
        self._to_b[lane] += {"F": 1, "B": -1, "W": 0}[kind]
        self._to_w[lane] += {"F": 1, "B": 0 if self._split else -1, "W": -1}[kind]
        end = self._clock + self._seconds(path[v], primitive)
        heapq.heappush(self._events, (end, self._tie(), lane, None))
        for follower in follows(node, len(path) - 1, self._split):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                follower_stop = path[follower[2]]
                late = 0.0
                if (follower_stop.replica, follower_stop.stage) != (path[v].replica, path[v].stage):
                    late = self._transfer_s(path[v], follower_stop) if callable(self._transfer_s) else self._transfer_s
                self._at(end + late, follower)

    def _at(self, time: float, node: Node) -> None:
        stop = self._paths[node[1]][node[2]]
        heapq.heappush(self._events, (time, self._tie(), self._lane[stop.replica, stop.stage], node))

    def _tie(self) -> int:
        self._count += 1
        return self._count

    def _urgency(self, node: Node) -> tuple[int, ...]:
        """Return a sort key of nodes, the most urgent first: depth first, in groups of as many micro-batches as stages.

        Among the Bs of a group, the Bs of the last virtual stages come first.
        """
        kind, m, v = node
        group, position, home = self._rank[m]
        return (group, v if kind == "F" else -v, position, home)


def _limits(plan: Plan) -> tuple[list[int], list[int]]:
    """Return for each stage the most micro-batches between F and B, and the most between F and W.

    This is 1F1B's limit, stages - stage, generalised to virtual stages. In a pipeline of V virtual stages, with at most
    C chunks a stage, the limit is one micro-batch for every C virtual stages that follow, and one more for each chunk
    of the stage if C is above 1.
    """
    limits: list[int] = []
    most: list[int] = []
    for replica in plan.layout.replicas:
        virtual = replica.virtual_stages
        chunks = max(len(stage.chunks) for stage in replica.stages)
        own = [0] * len(replica.stages)
        for v, (s, _) in enumerate(virtual):
            own[s] += -(-(len(virtual) - v) // chunks) + (chunks > 1)
        limits += own
        most += [max(own)] * len(own)
    return limits, most


def _mixed(plan: Plan) -> set[int]:
    """Return the replicas that send micro-batches to other replicas or receive them, by migration."""
    homes = {m: d for d, share in enumerate(plan.assignment) for m in share}
    mixed: set[int] = set()
    for migration in plan.migrations:
        home = homes.get(migration.micro_batch)
        if home is not None and home != migration.replica:
            mixed |= {home, migration.replica}
    return mixed


def _textbook(schedule: str, replica: Replica, share: tuple[int, ...]) -> tuple[Order, ...] | None:
    """Return the orders of the literature, or None if the literature has none for a replica of this shape."""
    depth = len(replica.stages)
    counts = {len(stage.chunks) for stage in replica.stages}
    if len(counts) > 1:
        return None
    chunks = counts.pop()
    if replica.virtual_stages != tuple((s, c) for c in range(chunks) for s in range(depth)):
        return None
    if schedule == "zero-bubble":
        return None if chunks > 1 else tuple(zero_bubble(s, depth, share) for s in range(depth))
    if chunks > 1:
        return tuple(interleaved(s, depth, chunks, share) for s in range(depth))
    return tuple(one_forward_one_backward(s, depth, share) for s in range(depth))
