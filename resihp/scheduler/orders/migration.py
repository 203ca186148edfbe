"""Moves micro-batches at single stages to replicas that are further ahead: the paper's progress-aware migration. Pure.

Eq. 5-6 ask for a distribution of work that minimises the longest work of a replica, in which each stage of each
micro-batch occurs once, in order, within memory. Algorithm 1 answers with a rule that is applied while the schedules
advance. P[d, i] is the number of forwards that stage i of replica d has completed. If (d_min, i) has stopped, or
P[d_max, i] - P[d_min, i] > delta, the next pending micro-batch of (d_min, i) moves to d_max, if memory allows when it
arrives; its F, B and W move together.

Details that the paper leaves open. A stage is examined when a primitive has ended or arrived there in any replica; then
one micro-batch may move. A working stage is compared from its first completed forward on. A micro-batch is pending if
its activations have arrived and its forward has not begun. Among hosts with equal progress, the one with the fewest
waiting forwards is chosen, then the first. Stages advance as under `schedules.greedy` (B, then F, then W, forwards
limited as in 1F1B), and the resulting order becomes part of the plan. The timeline computes its time
(`prices.iteration_seconds`).

Called by `resihp.scheduler.layouts.paper_planner`, and by modules that use only the rule.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import defaultdict

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan
from resihp.parallelism.plan import Migration, Order, Plan, Primitive, Stop
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Node, Orders, follows, needs
from resihp.scheduler.cost.prices import costs, iteration_seconds, transfers
from resihp.scheduler.orders.lanes import Lane, lanes, overfull
from resihp.scheduler.situation import Situation

DEFAULT_DELTA = 1
"""Number of forwards by which a replica may be ahead at a stage without a migration. The paper gives none;
`benchmarks/idle_time.py` compares values."""

MAX_ORDERED_PRIMITIVES = 20_000
"""Maximum number of primitives of a plan that contains its orders: they are sent to every rank and written to the
journal, some 30 bytes each."""

_TIME_TOLERANCE = 1e-9
"""Relative difference below which two times, or two predictions, count as equal."""


class DecidedMigration(msgspec.Struct, frozen=True):
    """A migration, the time of its decision in seconds, and P of its stage in each replica at that time."""

    migration: Migration
    at_s: float
    progress: tuple[int, ...]


def migrate(plan: Plan, situation: Situation, *, delta: int = DEFAULT_DELTA) -> Plan:
    """Return `plan` with migrations and the resulting orders; unchanged if they do not make it faster.

    `plan` must have no migrations. Stages without ranks or with speed 0 give all their work away. Raises PlanError if
    no other replica holds the layers of such a stage, or has memory for its work.
    """
    moves, orders = advance(plan, situation, delta=delta)
    if not moves:
        return plan
    migrations = tuple(move.migration for move in moves)
    migrated = with_orders(msgspec.structs.replace(plan, migrations=migrations), orders)
    obstacle = overfull(migrated, situation)
    before = iteration_seconds(plan, situation)
    if obstacle and math.isinf(before):
        raise PlanError(f"{obstacle}; the work of a stopped stage fits nowhere; lower --micro-batches or --tp")
    if obstacle or iteration_seconds(migrated, situation) >= before * (1 - _TIME_TOLERANCE):
        return plan
    return migrated


def with_orders(plan: Plan, orders: Orders) -> Plan:
    """Return `plan` with these orders, or without any if there are too many to send; ranks then use their schedule's
    orders."""
    too_many = sum(len(order) for replica in orders for order in replica) > MAX_ORDERED_PRIMITIVES
    return msgspec.structs.replace(plan, orders=() if too_many else orders)


def advance(
    plan: Plan, situation: Situation, *, delta: int = DEFAULT_DELTA
) -> tuple[tuple[DecidedMigration, ...], Orders]:
    """Run Algorithm 1: return the migrations, in the order of their decisions, and the resulting order of each stage.

    Replicas that neither give nor receive micro-batches keep the orders of the plan's schedule. Raises PlanError for a
    negative `delta`, and if a stopped stage cannot give its work away.
    """
    if delta < 0:
        raise PlanError(f"delta is {delta}; it is a number of forwards, at least 0")
    given = orders_of(plan)
    lockstep = _Advance(plan, situation, given, delta)
    if lockstep.even:
        return (), given
    advanced_orders = lockstep.run()
    homes = {m: d for d, share in enumerate(plan.assignment) for m in share}
    pairs = [(homes[move.migration.micro_batch], move.migration.replica) for move in lockstep.moves]
    mixed = {d for pair in pairs for d in pair}
    orders = tuple(
        own_orders if d in mixed else given_orders
        for d, (own_orders, given_orders) in enumerate(zip(advanced_orders, given, strict=True))
    )
    return tuple(lockstep.moves), orders


class _Advance:
    """One run of Algorithm 1 on a virtual clock.

    A *class* is a span of layers that several replicas hold in one chunk; P is compared within a class.
    """

    def __init__(self, plan: Plan, situation: Situation, given: Orders, delta: int) -> None:
        self._plan, self._delta = plan, delta
        self._split = any(p.kind == "W" for replica in given for order in replica for p in order)
        self._seconds = costs(plan, situation, given)
        self._transfer_s = transfers(plan, situation)
        self._paths = {m: list(path) for m, path in plan.paths().items()}
        self._home = {m: d for d, share in enumerate(plan.assignment) for m in share}
        self._rank = {
            m: (position // len(plan.layout.replicas[d].stages), position, d)
            for d, share in enumerate(plan.assignment)
            for position, m in enumerate(share)
        }
        self._lanes = lanes(plan, situation)
        self._classes: dict[LayerSpan, dict[int, tuple[Stop, int]]] = defaultdict(dict)
        """For each span of layers: each replica that holds it, with the stop and the virtual stage there."""
        for d, replica in enumerate(plan.layout.replicas):
            for v, (s, c) in enumerate(replica.virtual_stages):
                self._classes[replica.stages[s].chunks[c]][d] = (Stop(d, s, c), v)
        self.even = self._is_even()
        self._progress = {span: [0] * len(plan.layout.replicas) for span in self._classes}
        self._missing: dict[Node, int] = {}
        self._ends: dict[Node, float] = {}
        self._events: list[tuple[float, int, tuple[int, int], Node | None]] = []
        """(time, tie, stage, node): the node becomes ready on the stage at that time; None: the stage becomes free."""
        self._hosts: set[tuple[int, int]] = set()
        """Stages that received a guest at the present moment."""
        self._ties = itertools.count()
        self._clock = 0.0
        self.moves: list[DecidedMigration] = []

    def run(self) -> Orders:
        for m, path in self._paths.items():
            for v in range(len(path)):
                for kind in ("F", "B", "W") if self._split else ("F", "B"):
                    self._missing[kind, m, v] = len(needs((kind, m, v), len(path) - 1))
            self._at(0.0, ("F", m, 0))
        remaining = len(self._missing)
        while remaining:
            touched = self._elapse()
            for span in dict.fromkeys(span for place in touched for span in self._spans(place)):
                self._apply(span)
            for place in sorted({*touched, *self._hosts}):
                lane = self._lanes[place]
                node = None if lane.running or lane.stopped else lane.next()
                if node is not None:
                    self._begin(place, node)
                    remaining -= 1
            self._hosts.clear()
            if remaining and not self._events:
                remaining -= self._force()
        orders_of_replica: dict[int, list[Order]] = {d: [] for d in range(len(self._plan.layout.replicas))}
        for (d, _), lane in self._lanes.items():
            orders_of_replica[d].append(tuple(lane.order))
        return tuple(tuple(orders) for orders in orders_of_replica.values())

    def _is_even(self) -> bool:
        """Return whether no replica can fall behind: shares are equal, and the layers of each class take equally long
        everywhere."""
        if any(lane.stopped for lane in self._lanes.values()):
            return False
        if len({len(share) for share in self._plan.assignment}) > 1:
            return False
        paces = [
            {
                tuple(self._seconds(stop, Primitive(k, 0, stop.chunk)) for k in ("F", "B", "W"))
                for stop, _ in at.values()
            }
            for at in self._classes.values()
        ]
        return all(len(pace) == 1 for pace in paces)

    def _spans(self, place: tuple[int, int]) -> tuple[LayerSpan, ...]:
        return self._plan.layout.replicas[place[0]].stages[place[1]].chunks

    def _elapse(self) -> list[tuple[int, int]]:
        """Advance the clock to the next event. Return the stages where a primitive ended or arrived, sorted."""
        touched: set[tuple[int, int]] = set()
        moment = self._events[0][0] if self._events else self._clock
        while self._events and self._events[0][0] <= moment * (1 + _TIME_TOLERANCE):
            self._clock, _, place, node = heapq.heappop(self._events)
            touched.add(place)
            lane = self._lanes[place]
            if node is not None:
                self._arrive(lane, node)
            elif lane.running is not None:
                kind, m, v = lane.running
                if kind == "F":
                    self._progress[self._span(m, v)][lane.replica] += 1
                lane.running = None
        return sorted(touched)

    def _span(self, m: int, v: int) -> LayerSpan:
        stop = self._paths[m][v]
        return self._plan.layout.replicas[stop.replica].stages[stop.stage].chunks[stop.chunk]

    def _arrive(self, lane: Lane, node: Node) -> None:
        kind, m, v = node
        group, position, home = self._rank[m]
        urgency = (group, v if kind == "F" else -v, position, home)
        if kind == "F":
            bisect.insort(lane.own if home == lane.replica else lane.guests, (urgency, node))
        else:
            heapq.heappush(lane.others[kind], (urgency, node))

    def _apply(self, span: LayerSpan) -> None:
        """Apply the rule to one class.

        Stopped stages give away as many micro-batches as memory elsewhere allows; the slowest working stage gives at
        most one.
        """
        progress = self._progress[span]
        at = self._classes[span]
        stopped = [d for d in at if self._lane(at[d][0]).stopped]
        for d in stopped:
            while (node := self._pending(d, span)) and (host := self._host(d, span)) is not None:
                self._move(node, span, host)
        working = [d for d in at if d not in stopped]
        slowest = min(working, key=lambda d: (progress[d], d), default=None)
        if slowest is None or not progress[slowest]:
            return
        pending = self._pending(slowest, span)
        host = None if pending is None else self._host(slowest, span)
        if pending and host is not None and progress[host] - progress[slowest] > self._delta:
            self._move(pending, span, host)

    def _pending(self, d: int, span: LayerSpan) -> Node | None:
        stop, v = self._classes[span][d]
        return next((node for _, node in self._lane(stop).own if node[2] == v), None)

    def _host(self, d: int, span: LayerSpan, *, full: bool = False) -> int | None:
        """Return d_max: the replica with the most progress among those with memory for a guest, or with `full` among
        all.

        None if there is none.
        """
        at = self._classes[span]
        able = [
            e
            for e in at
            if e != d and (lane := self._lane(at[e][0])) and (lane.welcoming or (full and not lane.stopped))
        ]
        waiting = {e: len(lane.own) + len(lane.guests) for e in able for lane in (self._lane(at[e][0]),)}
        return min(able, key=lambda e: (-self._progress[span][e], waiting[e], e), default=None)

    def _move(self, node: Node, span: LayerSpan, host: int) -> None:
        _, m, v = node
        home = self._lane(self._paths[m][v])
        home.own = [entry for entry in home.own if entry[1] != node]
        self.moves.append(DecidedMigration(Migration(m, v, host), self._clock, tuple(self._progress[span])))
        host_stop = self._classes[span][host][0]
        self._paths[m][v] = host_stop
        self._lane(host_stop).expected += 1
        arrival = self._ends["F", m, v - 1] + self._late(self._paths[m][v - 1], host_stop) if v else 0.0
        if arrival > self._clock:
            self._at(arrival, node)
        else:
            self._arrive(self._lane(host_stop), node)
            self._hosts.add((host_stop.replica, host_stop.stage))

    def _force(self) -> int:
        """Begin or move the most urgent forward, when every stage waits. Return the number of primitives begun."""
        ready = [
            (queue[0], place)
            for place, lane in self._lanes.items()
            if not lane.stopped
            for queue in (lane.own, lane.guests)
            if queue
        ]
        if ready:
            (urgency, node), place = min(ready)
            lane = self._lanes[place]
            (lane.own if (urgency, node) in lane.own else lane.guests).remove((urgency, node))
            self._begin(place, node)
            return 1
        (_, node), place = min((lane.own[0], place) for place, lane in self._lanes.items() if lane.own)
        span = self._span(node[1], node[2])
        host = self._host(place[0], span, full=True)
        if host is None:
            first, last = span
            raise PlanError(
                f"replica {place[0]} stage {place[1]}: it has stopped, and no other replica holds layers {first} to "
                f"{last} in one chunk; give it a live rank, or leave replica {place[0]} out"
            )
        self._move(node, span, host)
        return 0

    def _begin(self, place: tuple[int, int], node: Node) -> None:
        kind, m, v = node
        lane, path = self._lanes[place], self._paths[m]
        primitive = Primitive(kind, m, path[v].chunk)
        lane.order.append(primitive)
        lane.running = node
        own = self._home[m] == lane.replica
        lane.hold(node, own=own, split=self._split)
        if kind == "F" and not own:
            lane.expected -= 1
        end = self._ends[node] = self._clock + self._seconds(path[v], primitive)
        heapq.heappush(self._events, (end, next(self._ties), place, None))
        for follower in follows(node, len(path) - 1, self._split):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._at(end + self._late(path[v], path[follower[2]]), follower)

    def _at(self, time: float, node: Node) -> None:
        stop = self._paths[node[1]][node[2]]
        heapq.heappush(self._events, (time, next(self._ties), (stop.replica, stop.stage), node))

    def _late(self, sender: Stop, receiver: Stop) -> float:
        if (sender.replica, sender.stage) == (receiver.replica, receiver.stage):
            return 0.0
        return self._transfer_s(sender, receiver) if callable(self._transfer_s) else self._transfer_s

    def _lane(self, stop: Stop) -> Lane:
        return self._lanes[stop.replica, stop.stage]
