"""Price of a layout: the predicted time of an iteration. Pure.

Times come from `resihp.pipeline.timeline`. A chunk takes the time of its layers (`Situation.times`) divided by the
speed of its group; a transfer between two nodes takes the time of their slowest link. Gradients are summed during the
last backward pass, and the remaining sums after it. Replicas that exchange no micro-batches wait for each other only at
the end of the iteration, so each replica is played alone, and equal replicas are played once.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, Primitive, Stop
from resihp.pipeline.compiled import CompiledOrders, compile_orders
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders, Seconds, Transfers, play
from resihp.scheduler.cost import memory, steady_state
from resihp.scheduler.cost.gradient_sync import exposed_s, peer_links
from resihp.scheduler.cost.profile import Times
from resihp.scheduler.layouts import shares
from resihp.scheduler.layouts.layers import Chunks
from resihp.scheduler.situation import Situation

Shape = tuple[tuple[Times, ...], ...]
"""Times of each chunk of each stage of a replica: [stage][chunk]."""


MIN_BATCHED_PIPELINES = 4
"""Minimum number of pipelines that are played together; fewer are played one by one."""


class Priced(msgspec.Struct, frozen=True):
    """A replica with the facts that determine its time."""

    replica: Replica
    shape: Shape
    late: tuple[tuple[float, ...], ...] = ()
    """Seconds of a transfer from each stage to each other stage: [sender][receiver]; empty if transfers take no
    time."""

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage for one micro-batch."""
        return max(sum(times.total for times in chunks) for chunks in self.shape)

    @property
    def pace(self) -> shares.Seconds:
        """Rough time of the replica as a function of its number of micro-batches, for a first guess."""
        return shares.estimate(len(self.shape), self.slowest)


class Prices:
    """Prices of the replicas of one situation; each replica is played once."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._shapes: dict[object, tuple[Shape, tuple[tuple[float, ...], ...]]] = {}
        self._clocks: dict[object, _Clock] = {}
        self._played: defaultdict[object, dict[int, float]] = defaultdict(dict)
        self._priced: dict[int, Priced] = {}
        """Priced replicas by the identity of the replica; the entry keeps the replica alive."""
        self._exposed: dict[int, float] = {}

    def priced(self, replica: Replica) -> Priced:
        priced = self._priced.get(id(replica))
        if priced is None:
            priced = self._priced[id(replica)] = self._price(replica)
        return priced

    def _price(self, replica: Replica) -> Priced:
        situation = self._situation
        speeds, nodes = situation.speeds, situation.nodes
        has_speeds = bool(speeds)
        key: list[object] = [stage.chunks for stage in replica.stages]
        key += [situation.speed(stage.ranks) if has_speeds else len(stage.ranks) for stage in replica.stages]
        if situation.times.transfer_s or situation.times.inside_s:
            nodes_of_stage = [tuple(sorted({nodes[rank] for rank in stage.ranks})) for stage in replica.stages]
            names = {home: i for i, home in reversed([*enumerate(nodes_of_stage)])}
            key += [names[home] for home in nodes_of_stage] if not situation.links else nodes_of_stage
        shape_and_delays = self._shapes.get(tuple(key))
        if shape_and_delays is None:
            shape = tuple(_times(stage, situation) for stage in replica.stages)
            shape_and_delays = self._shapes[tuple(key)] = shape, _late(replica, situation)
        return Priced(replica, *shape_and_delays)

    def seconds(self, priced: Priced, micro_batches: int, replicas: int) -> float:
        """Return the played time of a replica for `micro_batches` micro-batches, in a layout of `replicas` replicas."""
        return self._clock(priced, replicas)(micro_batches)

    def shapes_seconds(self, shapes: Sequence[Sequence[Times]], micro_batches: int) -> list[float]:
        """Return the times of several pipelines with equally many stages, one chunk a stage, and no transfer times.

        The pipelines are played together.
        """
        if not shapes:
            return []
        schedule = self._situation.schedule
        if len(shapes) < MIN_BATCHED_PIPELINES:
            return [_plain_seconds(tuple((chunk,) for chunk in shape), (), schedule, micro_batches) for shape in shapes]
        split = schedule == "zero-bubble"
        table = np.array([[(t.f, t.b if split else t.b + t.w, t.w) for t in shape] for shape in shapes])
        forward, backward, weights = np.ascontiguousarray(table.transpose(2, 1, 0))
        late = np.zeros((len(shapes[0]) - 1, 1))
        seconds: list[float] = steady_state.many_seconds(
            forward, backward, weights if split else None, late, micro_batches
        ).tolist()
        return seconds

    def pipelines_seconds(
        self, speeds: Sequence[float], counts: Sequence[tuple[int, ...]], late: Sequence[float], micro_batches: int
    ) -> list[float]:
        """Return the times of several pipelines with one chunk a stage, on stages of the given speeds.

        `counts`: for each pipeline, the number of layers of each stage. `late`: seconds of a transfer from each stage
        to the next, and back.
        """
        compiled, slots, edges = _compiled(
            self._situation.schedule, tuple(((s, s),) for s in range(len(speeds))), micro_batches
        )
        split = self._situation.schedule == "zero-bubble"
        times, rows = self._situation.times, []
        for layer_counts in counts:
            first, row = 0, []
            for n, speed in zip(layer_counts, speeds, strict=True):
                t = times.span(first, first + n - 1)
                row += [t.f / speed, (t.b if split else t.b + t.w) / speed, t.w / speed]
                first += n
            rows.append(row)
        index = [s * 3 + kind for s, _, kind in slots]
        delays = [late[min(edge)] for edge in edges] if any(late) else None
        if len(rows) < MIN_BATCHED_PIPELINES:
            return [compiled.makespan([row[i] for i in index], delays) for row in rows]
        table = np.array(rows).take(index, axis=1)
        seconds: list[float] = compiled.iteration_seconds(table, 0.0 if delays is None else np.array(delays)).tolist()
        return seconds

    def iteration(self, replicas: Sequence[Priced]) -> tuple[tuple[int, ...], float]:
        """Return the number of micro-batches of each replica that is best, and the time of the iteration.

        Raises PlanError if some replica would get no micro-batch.
        """
        played = [self._clock(priced, len(replicas)) for priced in replicas]
        usual = max(1, self._situation.micro_batches // max(1, len(played)))
        guess = shares.split(self._situation.micro_batches, [clock.line(usual) for clock in played])
        counts = shares.improved(guess, played)
        longest = max(seconds(m) for seconds, m in zip(played, counts, strict=True))
        return counts, longest + self._after_backward_s(replicas)

    def _after_backward_s(self, replicas: Sequence[Priced]) -> float:
        """Return the result of `after_backward_s`; without slow links, each replica is computed only once."""
        times = self._situation.times
        if self._situation.links or len(replicas) < 2 or not times.gradient_s:
            return after_backward_s([priced.replica for priced in replicas], self._situation)
        for priced in replicas:
            if id(priced.replica) not in self._exposed:
                speeds = [self._situation.speed(stage.ranks) for stage in priced.replica.stages]
                self._exposed[id(priced.replica)] = exposed_s(priced.replica, speeds, self._situation)
                self._priced.setdefault(id(priced.replica), priced)  # keeps the replica alive, and so its id unique
        return max(self._exposed[id(priced.replica)] for priced in replicas) + times.step_s

    def _clock(self, priced: Priced, replicas: int) -> _Clock:
        stages = priced.replica.stages
        shape_key = (priced.shape, priced.late, tuple((stage.tp, len(stage.layers)) for stage in stages))
        state_bytes = self._situation.state_bytes_of(replicas)
        clock = self._clocks.get((shape_key, state_bytes))
        if clock is None:
            clock = _Clock(priced, self._situation, state_bytes, self._played[shape_key])
            self._clocks[shape_key, state_bytes] = clock
        return clock


class _Clock:
    """Times of the replicas of one shape as a function of their number of micro-batches; each number is played once.

    The time is infinite if the activations of so many micro-batches do not fit beside the state, which takes
    `state_bytes` per parameter. `played` contains the times without this limit, and is shared by all clocks of the
    shape.
    """

    def __init__(self, priced: Priced, situation: Situation, state_bytes: int | None, played: dict[int, float]) -> None:
        self.pace = priced.pace
        self._priced, self._situation, self._schedule = priced, situation, situation.schedule
        self._state_bytes, self._played = state_bytes, played
        self._found: dict[int, float] = {}

    def __call__(self, micro_batches: int) -> float:
        seconds = self._found.get(micro_batches)
        if seconds is None:
            seconds = self._found[micro_batches] = self._look(micro_batches)
        return seconds

    def line(self, usual: int) -> shares.Seconds:
        """Return the straight line through two played times near `usual` micro-batches: accurate enough for a first
        guess."""
        begin, end = self(usual), self(usual + 1)
        slope = end - begin
        if not math.isfinite(slope) or slope <= 0:
            return self.pace
        return lambda m: begin + (m - usual) * slope

    def _look(self, micro_batches: int) -> float:
        if not memory.fits(
            self._priced.replica,
            micro_batches,
            self._situation.model,
            self._situation.room_bytes,
            self._situation.tokens,
            schedule=self._schedule,
            sequence_parallel=self._situation.sequence_parallel,
            state_bytes=self._state_bytes,
        ):
            return math.inf
        if micro_batches not in self._played:
            self._played[micro_batches] = self._play(micro_batches)
        return self._played[micro_batches]

    def _play(self, micro_batches: int) -> float:
        shape, late = self._priced.shape, self._priced.late
        if _plain(self._priced.replica):
            return _plain_seconds(shape, late, self._schedule, micro_batches)
        compiled, slots, edges = _compiled(
            self._schedule, tuple(stage.chunks for stage in self._priced.replica.stages), micro_batches
        )
        split = self._schedule == "zero-bubble"
        by_stop = {
            (s, c): (t.f, t.b if split else t.b + t.w, t.w)
            for s, chunks in enumerate(shape)
            for c, t in enumerate(chunks)
        }
        return compiled.makespan(
            [by_stop[s, c][kind] for s, c, kind in slots], [late[a][b] for a, b in edges] if late else None
        )


def _plain(replica: Replica) -> bool:
    """Return whether each stage has exactly one chunk, and chunks follow the order of the stages."""
    return all(len(stage.chunks) == 1 for stage in replica.stages) and all(
        a.chunks < b.chunks for a, b in itertools.pairwise(replica.stages)
    )


def _plain_seconds(shape: Shape, late: tuple[tuple[float, ...], ...], schedule: str, micro_batches: int) -> float:
    stages = [times for (times,) in shape]
    split = schedule == "zero-bubble"
    return steady_state.seconds(
        [times.f for times in stages],
        [times.b if split else times.b + times.w for times in stages],
        [times.w for times in stages] if split else None,
        [late[s][s + 1] for s in range(len(stages) - 1)] if late else [0.0] * (len(stages) - 1),
        micro_batches,
    )


@lru_cache(maxsize=1024)
def _compiled(
    schedule: str, spans: tuple[Chunks, ...], micro_batches: int
) -> tuple[CompiledOrders, list[tuple[int, int, int]], list[tuple[int, int]]]:
    """Return the compiled orders of one replica, (stage, chunk, kind) of each slot, and (sender, receiver) of each
    transfer."""
    replica = Replica(tuple(Stage((s,), chunks) for s, chunks in enumerate(spans)))
    plan = Plan(epoch=0, layout=Layout((replica,)), assignment=(tuple(range(micro_batches)),), schedule=schedule)
    compiled = compile_orders(plan, orders_of(plan))
    slots = list(zip(compiled.stage.tolist(), compiled.chunk.tolist(), compiled.kind.tolist(), strict=True))
    edges = [(slots[a][0], slots[b][0]) for a, b in compiled.edges.T.tolist()]
    return compiled, slots, edges


def iteration_seconds(plan: Plan, situation: Situation) -> float:
    """Return the predicted time of an iteration of any plan, including migrations, orders, transfers and
    synchronisation.

    Raises PlanError if the plan cannot be carried out. Infinite if a stage with work has speed 0.
    """
    orders = orders_of(plan)
    makespan = play(plan, orders, costs(plan, situation, orders), transfers(plan, situation)).makespan
    return makespan + after_backward_s(plan.layout.replicas, situation)


def costs(plan: Plan, situation: Situation, orders: Orders) -> Seconds:
    """Return the duration of every primitive of a plan, as a function for `resihp.pipeline.timeline.play`."""
    shapes = tuple(tuple(_times(stage, situation) for stage in replica.stages) for replica in plan.layout.replicas)
    return _costs(shapes, orders)


def transfers(plan: Plan, situation: Situation) -> Transfers:
    """Return the seconds of a transfer between two stages, as a function for `resihp.pipeline.timeline.play`, or 0."""
    if not (situation.times.transfer_s or situation.times.inside_s):
        return 0.0
    replicas = plan.layout.replicas
    seconds_of: dict[tuple[int, int, int, int], float] = {}

    def seconds(sender: Stop, receiver: Stop) -> float:
        key = (sender.replica, sender.stage, receiver.replica, receiver.stage)
        if key not in seconds_of:
            a, b = (replicas[stop.replica].stages[stop.stage].ranks for stop in (sender, receiver))
            seconds_of[key] = situation.transfer_s(a, b)
        return seconds_of[key]

    return seconds


def after_backward_s(replicas: Sequence[Replica], situation: Situation) -> float:
    """Return the time after the last backward pass: the rest of the gradient sums, and the optimizer's step.

    A stage sums its gradients with the stages of other replicas that hold the same layers, over the slowest link
    between them. Sums that overlap with the last backward pass do not count (`exposed_s`).
    """
    times = situation.times
    if len(replicas) < 2 or not times.gradient_s:
        return times.step_s
    exposed_of: dict[object, float] = {}
    longest = 0.0
    for replica in replicas:
        links = peer_links(replica, replicas, situation) if situation.links else None
        speeds = tuple(situation.speed(stage.ranks) for stage in replica.stages)
        key = tuple((stage.chunks, stage.tp) for stage in replica.stages), speeds, links
        if key not in exposed_of:
            exposed_of[key] = exposed_s(replica, speeds, situation, links)
        longest = max(longest, exposed_of[key])
    return longest + times.step_s


def _costs(shapes: tuple[Shape, ...], orders: Orders) -> Seconds:
    split = any(p.kind == "W" for replica in orders for order in replica for p in order)

    def seconds(stop: Stop, primitive: Primitive) -> float:
        times = shapes[stop.replica][stop.stage][stop.chunk]
        if primitive.kind == "F":
            return times.f
        if primitive.kind == "W":
            return times.w
        return times.b if split else times.b + times.w

    return seconds


def _times(stage: Stage, situation: Situation) -> tuple[Times, ...]:
    """Return the times of each chunk of a stage, including embedding and head."""
    speed = situation.speed(stage.ranks)
    spans = [situation.times.span(first, last) for first, last in stage.chunks]
    return tuple(times.at(speed) for times in spans)


def _late(replica: Replica, situation: Situation) -> tuple[tuple[float, ...], ...]:
    if not (situation.times.transfer_s or situation.times.inside_s):
        return ()
    groups = [stage.ranks for stage in replica.stages]
    return tuple(tuple(situation.transfer_s(a, b) for b in groups) for a in groups)
