"""Orders by list scheduling on a virtual clock, for any plan: at measured costs, within memory, by rules. Pure.

`resihp.pipeline.schedules.greedy` gives an order that always works; callers of this module search for a good one. They
set how many micro-batches a stage may accept before their backwards, how much it may keep alive, how long it waits for
work that is about to arrive before it begins other work, and the urgency of primitives. The time of an order is
computed by `resihp.pipeline.timeline.play`, not here. The clock counts in whole ticks, so that simultaneous events are
exactly simultaneous on every machine.

Called by `resihp.scheduler.orders.warm_up` and `resihp.scheduler.orders.tuner`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan
from resihp.parallelism.plan import Kind, Order, Plan, Primitive, Stop
from resihp.pipeline.timeline import Orders, Seconds, Timeline, Transfers, play
from resihp.scheduler.cost.profile import Times

Shapes = tuple[tuple[tuple[Times, ...], ...], ...]
"""Times of each chunk at the speed of its stage's group, [replica][stage][chunk]."""

TICKS_OF_LONGEST = 2**22
"""Number of ticks of the longest primitive."""

ROUNDING_TOLERANCE = 1e-9
"""Relative excess over a cap that counts as a rounding error."""

F, B, W = range(3)
_KINDS: tuple[Kind, ...] = ("F", "B", "W")

_Queue = list[tuple[float, int]]


class StageRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules by which a stage chooses its next primitive. Stages are counted over all replicas, in order."""

    split: bool = False
    """Whether every B leaves the weight gradients to a separate W."""
    limits: tuple[int, ...] = ()
    """For each stage, the maximum number of micro-batches between F and B: the depth of 1F1B. Empty for no limit."""
    caps: tuple[float, ...] = ()
    """For each stage, the maximum amount that it may keep alive, in the units of `ListScheduler`'s sizes. Empty for no
    limit."""
    patience: float = 0.0
    """Share of a W's duration: a stage does not begin a W if a B, or a forward that may begin, arrives before this
    share would have passed."""
    forward_patience: float = 0.0
    """Share of a forward's duration: a stage does not begin a forward if a B arrives before this share would have
    passed."""
    group: int = 0
    """Number of micro-batches that pass the virtual stages together, depth first, as in Megatron's interleaved order; 0
    for as many as the replica has stages."""


def _reserves(sizes: Sequence[float], chunks: Sequence[LayerSpan]) -> list[float]:
    """Return, for each chunk of a lane, the sum of the sizes of the lane's chunks with later layers."""
    return [sum(size for size, later in zip(sizes, chunks, strict=True) if later[0] > chunk[0]) for chunk in chunks]


class ListScheduler:
    """A plan at given costs, which can be scheduled repeatedly under different rules.

    A *passage* is a micro-batch at a virtual stage of its path. Passages are numbered by home, micro-batch and virtual
    stage; a primitive's number is 3 * passage + kind. A *lane* is a stage, counted over all replicas.
    """

    def __init__(
        self, plan: Plan, shapes: Shapes, transfer_s: Transfers = 0.0, sizes: Sequence[Sequence[float]] | None = None
    ) -> None:
        """Compile a plan. `sizes`: the amount that a micro-batch keeps alive in each chunk of each lane; None for 1
        each.

        Raises PlanError for times that are negative or not finite.
        """
        self.plan, self._shapes, self._transfer_s = plan, shapes, transfer_s
        replicas = plan.layout.replicas
        self.lanes = [(d, s) for d, replica in enumerate(replicas) for s in range(len(replica.stages))]
        spans = [replicas[d].stages[s].chunks for d, s in self.lanes]
        self.sizes = [[1.0] * len(row) for row in spans] if sizes is None else [[*row] for row in sizes]
        self.reserves = [_reserves(row, chunks) for row, chunks in zip(self.sizes, spans, strict=True)]
        """Amount that must stay free for a lane's later chunks when the lane admits a micro-batch to a chunk:
        [lane][chunk]."""
        self.lane: list[int] = []
        self.chunk: list[int] = []
        self.first: list[bool] = []
        """For each passage, whether it is the first of its micro-batch; `last`: whether it is the last."""
        self.last: list[bool] = []
        self._primitives: list[Primitive] = []
        self._at: dict[tuple[int, int, int, int], int] = {}
        self._rank: list[tuple[int, int, int]] = []
        """For each passage: position of the micro-batch in its home's share, virtual stage, home."""
        self._costs: list[tuple[float, float, float]] = []
        self._late: list[tuple[float, float]] = []
        """For each passage: seconds of the transfer to the micro-batch's next passage, and of the transfer back from
        it."""
        self._compile()
        costs = [x for passage_costs in self._costs for x in passage_costs]
        if not all(math.isfinite(x) and x >= 0 for x in costs):
            raise PlanError(f"plan of epoch {plan.epoch}: some time of its stages is negative or not finite")
        tick = max(costs, default=0.0) / TICKS_OF_LONGEST or 1.0
        whole = [x / tick for f, b, w in self._costs for x in (f, b + w, 0.0)]
        self.ticks = ([round(x) for x in whole], [round(x / tick) for x in costs])
        """Duration in ticks by number of primitive, twice: for B with W, and for B separate from W."""
        self.late_ticks = [(round(forth / tick), round(back / tick)) for forth, back in self._late]
        self._keys: dict[int, list[float]] = {}

    @property
    def passages(self) -> int:
        return len(self.lane)

    @property
    def slowest(self) -> float:
        """Time of the slowest lane for one micro-batch in each of its chunks."""
        return max(sum(times.total for times in self._shapes[d][s]) for d, s in self.lanes)

    def _compile(self) -> None:
        paths = self.plan.paths()
        lane_of = {place: i for i, place in enumerate(self.lanes)}
        for home, share in enumerate(self.plan.assignment):
            for position, m in enumerate(share):
                path = paths[m]
                for v, stop in enumerate(path):
                    after = path[min(v + 1, len(path) - 1)]
                    times = self._shapes[stop.replica][stop.stage][stop.chunk]
                    self._at[stop.replica, stop.stage, stop.chunk, m] = len(self.lane)
                    self.lane.append(lane_of[stop.replica, stop.stage])
                    self.chunk.append(stop.chunk)
                    self._primitives += [Primitive(kind, m, stop.chunk) for kind in _KINDS]
                    self.first.append(v == 0)
                    self.last.append(v == len(path) - 1)
                    self._rank.append((position, v, home))
                    self._costs.append((times.f, times.b, times.w))
                    self._late.append((self._seconds_between(stop, after), self._seconds_between(after, stop)))

    def _seconds_between(self, a: Stop, b: Stop) -> float:
        if (a.replica, a.stage) == (b.replica, b.stage):
            return 0.0
        return self._transfer_s(a, b) if callable(self._transfer_s) else self._transfer_s

    def keys(self, group: int) -> list[float]:
        """Return the urgency by number of primitive (lower is more urgent): groups of micro-batches depth first, each W
        in the order of its B."""
        keys = self._keys.get(group)
        if keys is None:
            sizes = [group or len(replica.stages) for replica in self.plan.layout.replicas]
            keys = [0.0] * (3 * self.passages)
            ranks = [(position // sizes[home], v, position, home) for position, v, home in self._rank]
            for place, n in enumerate(sorted(range(self.passages), key=lambda n: ranks[n])):
                keys[3 * n + F] = place
            backward = [(g, -v, position, home) for g, v, position, home in ranks]
            for place, n in enumerate(sorted(range(self.passages), key=lambda n: backward[n])):
                keys[3 * n + B] = keys[3 * n + W] = place
            self._keys[group] = keys
        return keys

    def run(self, rules: StageRules, urgency: Sequence[float] | None = None) -> Orders:
        """Return orders that follow `rules`.

        Without `urgency`, a stage chooses a B before an F before a W, each depth first. With `urgency` (by number of
        primitive), it chooses the ready primitive with the lowest value, including Ws. If the limits would leave all
        stages waiting, the most urgent forward that memory allows begins nevertheless. There is always such a forward:
        a stage admits a micro-batch only while each of its later chunks could still take one more, so among the waiting
        micro-batches, those before the last layers can continue. Raises PlanError if a stage's cap is less than the
        size of one micro-batch.
        """
        for (d, s), cap, row in zip(self.lanes, rules.caps, self.sizes, strict=False):
            if cap * (1 + ROUNDING_TOLERANCE) < sum(row):
                raise PlanError(
                    f"replica {d} stage {s}: may keep {cap:.6g} alive, but one micro-batch takes {sum(row):.6g}"
                )
        return _Run(self, rules, urgency).orders()

    def orders(self, done: Sequence[Sequence[int]]) -> Orders:
        """Return the orders of all stages, given the numbers of the primitives of each lane."""
        orders: list[list[tuple[Primitive, ...]]] = [[] for _ in self.plan.layout.replicas]
        for (d, _), numbers in zip(self.lanes, done, strict=True):
            orders[d].append(tuple(map(self._primitives.__getitem__, numbers)))
        return tuple(tuple(replica) for replica in orders)

    def play(self, orders: Orders) -> Timeline:
        """Return the timeline of `orders`. Raises PlanError if they cannot be carried out."""
        whole = not _split(orders)

        def seconds(stop: Stop, primitive: Primitive) -> float:
            times = self._shapes[stop.replica][stop.stage][stop.chunk]
            if primitive.kind == "F":
                return times.f
            if primitive.kind == "W":
                return times.w
            return times.b + times.w if whole else times.b

        primitive_seconds: Seconds = seconds
        return play(self.plan, orders, primitive_seconds, self._transfer_s)

    def alive(self, orders: Orders) -> tuple[float, ...]:
        """Return the most that each lane keeps alive. F allocates its chunk's size; the W, or the B if it has no W,
        frees it."""
        ends = "W" if _split(orders) else "B"
        most = [0.0] * len(self.lanes)
        for lane, (d, s) in enumerate(self.lanes):
            now = 0.0
            for p in orders[d][s]:
                if p.kind == "F":
                    now += self.sizes[lane][p.chunk]
                    most[lane] = max(most[lane], now)
                elif p.kind == ends:
                    now -= self.sizes[lane][p.chunk]
        return tuple(most)

    def latest_starts(self, orders: Orders) -> list[float]:
        """Return, by number of primitive, the latest start with which `orders` still end at the same time."""
        timeline = self.play(orders)
        costs = [x for f, b, w in self._costs for x in ((f, b, w) if _split(orders) else (f, b + w, 0.0))]
        entries: list[tuple[float, int, int, int]] = []
        for lane, (d, s) in enumerate(self.lanes):
            for position, (p, start) in enumerate(zip(orders[d][s], timeline.starts[d][s], strict=True)):
                number = 3 * self._at[d, s, p.chunk, p.micro_batch] + _KINDS.index(p.kind)
                entries.append((start, position, lane, number))
        latest = [timeline.makespan] * (3 * self.passages)
        due = [timeline.makespan] * len(self.lanes)
        for _, _, lane, number in sorted(entries, reverse=True):
            n, kind = divmod(number, 3)
            if kind == F and not self.last[n]:
                due[lane] = min(due[lane], latest[number + 3] - self._late[n][0])
            elif kind == B and not self.first[n]:
                due[lane] = min(due[lane], latest[number - 3] - self._late[n - 1][1])
            due[lane] -= costs[number]
            latest[number] = due[lane]
        return latest


def most_ahead(order: Order) -> int:
    """Return the depth of an order: the most micro-batches between F and B."""
    ahead = most = 0
    for primitive in order:
        ahead += {"F": 1, "B": -1, "W": 0}[primitive.kind]
        most = max(most, ahead)
    return most


def _split(orders: Orders) -> bool:
    return any(p.kind == "W" for replica in orders for order in replica for p in order)


class _Run:
    """One run of the virtual clock. Queues are heaps of (urgency, number of primitive)."""

    def __init__(self, scheduler: ListScheduler, rules: StageRules, urgency: Sequence[float] | None) -> None:
        self._scheduler, self._rules, self._urgent = scheduler, rules, urgency is not None
        self._waits = rules.patience > 0 or rules.forward_patience > 0
        lanes = len(scheduler.lanes)
        self._b: list[_Queue] = [[] for _ in range(lanes)]
        self._w: list[_Queue] = [[] for _ in range(lanes)]
        self._f: list[list[_Queue]] = [[[] for _ in row] for row in scheduler.sizes]
        self._coming: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
        """For each lane: (time of arrival, primitive) for each input that is in transit to it."""
        self._free = [True] * lanes
        self._ahead = [0] * lanes
        self._alive = [0.0] * lanes
        self._limits = rules.limits or (scheduler.passages + 1,) * lanes
        self._caps = tuple(cap * (1 + ROUNDING_TOLERANCE) for cap in rules.caps) or (math.inf,) * lanes
        self._done: list[list[int]] = [[] for _ in range(lanes)]
        self._events: list[tuple[int, int, int]] = []
        """(time, lane, number): the primitive becomes ready on the lane at that time; -1: the lane becomes free."""
        self._clock = 0
        self._cost = scheduler.ticks[rules.split]
        self._keys: Sequence[float] = scheduler.keys(rules.group) if urgency is None else urgency

    def orders(self) -> Orders:
        scheduler, events = self._scheduler, self._events
        events += [(0, scheduler.lane[n], 3 * n) for n, first in enumerate(scheduler.first) if first]
        heapq.heapify(events)
        remaining = scheduler.passages * (3 if self._rules.split else 2)
        while remaining:
            if not events:
                self._force()
                remaining -= 1
                continue
            self._clock = events[0][0]
            touched = set()
            while events and events[0][0] <= self._clock:
                _, lane, number = heapq.heappop(events)
                touched.add(lane)
                if number < 0:
                    self._free[lane] = True
                else:
                    heapq.heappush(self._queue(lane, number), (self._keys[number], number))
            # Lanes without a ready B or F decide last: by then it is known which primitives began elsewhere.
            for lane in sorted(touched, key=lambda lane: (not self._b[lane], not any(self._f[lane]), lane)):
                if self._free[lane] and (queue := self._choice(lane)):
                    self._begin(lane, heapq.heappop(queue)[1])
                    remaining -= 1
        return scheduler.orders(self._done)

    def _queue(self, lane: int, number: int) -> _Queue:
        n, kind = divmod(number, 3)
        if kind == F:
            return self._f[lane][self._scheduler.chunk[n]]
        return self._b[lane] if kind == B else self._w[lane]

    def _choice(self, lane: int) -> _Queue | None:
        """Return the queue from which a free stage takes its next primitive, or None if the stage waits."""
        backward, weights = self._b[lane], self._w[lane]
        forward = self._forward(lane) if self._ahead[lane] < self._limits[lane] else None
        if self._urgent:
            queue = min((queue for queue in (backward, forward, weights) if queue), key=_first, default=None)
        else:
            queue = backward or forward or weights
        if not queue:
            return None
        number = queue[0][1]
        patience = (self._rules.forward_patience, 0.0, self._rules.patience)[number % 3]
        if patience and self._awaited(lane, self._clock + int(patience * self._cost[number]), number % 3 == W):
            return None
        return queue

    def _forward(self, lane: int) -> _Queue | None:
        """Return the queue with the most urgent forward that memory allows; None if there is none."""
        queues = [queue for chunk, queue in enumerate(self._f[lane]) if queue and self._fits(lane, chunk)]
        return min(queues, key=_first, default=None)

    def _fits(self, lane: int, chunk: int) -> bool:
        scheduler = self._scheduler
        return self._alive[lane] + scheduler.sizes[lane][chunk] + scheduler.reserves[lane][chunk] <= self._caps[lane]

    def _awaited(self, lane: int, until: int, forwards: bool) -> bool:
        """Return whether a B arrives before `until`, or, if `forwards`, a forward that may begin."""
        coming = self._coming[lane]
        while coming and coming[0][0] <= self._clock:
            heapq.heappop(coming)
        if not coming or coming[0][0] >= until:
            return False
        forwards = forwards and self._ahead[lane] < self._limits[lane]
        return any(
            time < until and (number % 3 == B or (forwards and self._fits(lane, self._scheduler.chunk[number // 3])))
            for time, number in coming
        )

    def _force(self) -> None:
        """Begin the most urgent forward that memory allows, when every stage waits."""
        queues = [(queue[0], lane) for lane in range(len(self._free)) if (queue := self._forward(lane))]
        (_, number), lane = min(queues)
        heapq.heappop(self._queue(lane, number))
        self._begin(lane, number)

    def _begin(self, lane: int, number: int) -> None:
        scheduler = self._scheduler
        n, kind = divmod(number, 3)
        self._done[lane].append(number)
        self._free[lane] = False
        end = self._clock + self._cost[number]
        heapq.heappush(self._events, (end, lane, -1))
        size = scheduler.sizes[lane][scheduler.chunk[n]]
        if kind == F:
            self._ahead[lane] += 1
            self._alive[lane] += size
            if scheduler.last[n]:
                heapq.heappush(self._events, (end, lane, number + B))
            else:
                self._send(number + 3, end + scheduler.late_ticks[n][0])
            return
        if kind == B:
            self._ahead[lane] -= 1
            if not scheduler.first[n]:
                self._send(number - 3, end + scheduler.late_ticks[n - 1][1])
            if self._rules.split:
                heapq.heappush(self._events, (end, lane, number + 1))
                return
        self._alive[lane] -= size

    def _send(self, number: int, time: int) -> None:
        lane = self._scheduler.lane[number // 3]
        heapq.heappush(self._events, (time, lane, number))
        if self._waits:
            heapq.heappush(self._coming[lane], (time, number))


def _first(queue: _Queue) -> tuple[float, int]:
    return queue[0]
