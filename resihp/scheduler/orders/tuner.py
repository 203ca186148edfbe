"""The pipeline tuner: partition, placement and schedule of one pipeline, together, for layers of different times. Pure.

AdaPtis (OctoPipe, SC'26) tunes in turn whichever of the three seems to cost most, and schedules by a list with a cap on
activations. This module searches all three together. It tries regular placements: one chunk a stage or several, back
and forth or always in one direction, with and without the stage that has the head in every round. Each placement is cut
so that the slowest stage is as fast as possible (`resihp.scheduler.orders.placements`), and scheduled by lists under
several rules (`resihp.scheduler.orders.list_scheduling`). From the best result, a local search changes layers,
placement, rules and urgency, one at a time. Results are compared by `resihp.pipeline.timeline` alone, and only a
strictly faster one replaces the best.

The tuner is used for the first layout of a job and after failures. It considers one replica, and devices only by the
speed of their group; the planner checks memory other than that of activations.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan, Layout, Replica, Stage
from resihp.parallelism.plan import Order, Plan
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.orders.list_scheduling import ROUNDING_TOLERANCE, ListScheduler, StageRules, most_ahead
from resihp.scheduler.orders.placements import Cut, Loads, Route, chunks_of, moved, routes

PATIENCE_PAIRS = ((0.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.0, 0.5), (1.0, 0.0), (0.25, 0.0), (1.0, 1.0))
"""Pairs of `StageRules.patience` and `StageRules.forward_patience` to try. The first two are tried on every
placement."""

PLACEMENTS_KEPT = 4
"""Number of best placements that are tried under more rules."""

MAX_MISSES = 300
"""Number of consecutive changes that cannot be faster, after which the search for changes ends."""

MAX_CACHED_DESIGNS = 32
"""Maximum number of designs with cached compiled costs."""

PROMISING_EXCESS = 0.03
"""Relative excess over the best time up to which other rules are tried on a changed placement."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline to tune: times of its layers, number and speed of its stages, and limits."""

    profile: Profile
    stages: int
    micro_batches: int
    speeds: tuple[float, ...] = ()
    """Speed of each stage's group, in healthy devices (`Situation.speed`); 1 each if empty."""
    late: tuple[tuple[float, ...], ...] = ()
    """Seconds of a transfer from each stage to each other stage: [sender][receiver]; empty if transfers take no
    time."""
    layer_bytes: float | tuple[float, ...] = 1.0
    """Bytes that a layer keeps alive for one micro-batch: one number for all layers, or one number per layer."""
    most_alive: tuple[float, ...] = ()
    """Maximum that each stage may keep alive, in the bytes of `layer_bytes`; empty for no limit."""
    split: bool = True
    """Whether W may be separate from B."""
    most_chunks: int = 4
    """Maximum number of chunks of a stage in regular placements. Megatron's placements may have as many as there are
    layers, unless `bound`."""
    bound: bool = False
    """Whether `most_chunks` limits every stage in every placement."""


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """A tuned pipeline: the placement of its layers, the orders of its stages, and its time."""

    chunks: tuple[tuple[LayerSpan, ...], ...]
    """Spans of layers of each stage."""
    orders: tuple[Order, ...]
    """Order of each stage, for micro-batches numbered from 0."""
    seconds: float
    """Time on the timeline, without gradient synchronisation and optimizer step."""
    alive: tuple[float, ...]
    """Peak that each stage keeps alive, in the bytes of `Task.layer_bytes`."""
    slowest_s: float
    """Time of the slowest stage for one micro-batch. `seconds` is at least this time multiplied by the number of
    micro-batches."""

    def replica(self, groups: Sequence[Sequence[int]]) -> Replica:
        """Return the pipeline as a replica on these groups of ranks, one group for each stage."""
        return Replica(tuple(Stage(tuple(ranks), chunks) for ranks, chunks in zip(groups, self.chunks, strict=True)))

    def plan(self, epoch: int, groups: Sequence[Sequence[int]] = ()) -> Plan:
        """Return a plan of this pipeline alone; on ranks 0, 1, ... if no groups are given."""
        groups = groups or [(s,) for s in range(len(self.chunks))]
        count = 1 + max(primitive.micro_batch for primitive in self.orders[0])
        return Plan(
            epoch=epoch,
            layout=Layout((self.replica(groups),)),
            assignment=(tuple(range(count)),),
            orders=(self.orders,),
        )

    def orders_for(self, share: Sequence[int]) -> tuple[Order, ...]:
        """Return the orders for the micro-batches of `share` (indices in the global batch), which must be equally
        many."""
        return tuple(
            tuple(msgspec.structs.replace(p, micro_batch=share[p.micro_batch]) for p in order) for order in self.orders
        )


def megatron(task: Task, chunks: int = 1) -> Tuned:
    """Return Megatron's interleaved 1F1B (1F1B for one chunk): layers spread evenly whatever they cost, W not separate
    from B.

    Raises LayoutError if there are too few layers. Memory is not checked.
    """
    layout = Layout.uniform(tp=1, pp=task.stages, dp=1, layers=len(task.profile.layers), chunks=chunks)
    spans = tuple(stage.chunks for stage in layout.replicas[0].stages)
    lists = _lists(_checked(task), spans)
    return _tuned(lists, orders_of(lists.plan))


def tune(task: Task, *, evaluations: int = 400, seed: int = 0) -> Tuned:
    """Return the fastest pipeline found; `evaluations` is the number of orders that are made and played.

    It is never slower than Megatron's, with any number of chunks that keeps to `most_alive`. Raises PlanError if there
    are fewer layers than stages, or if no pipeline fits into memory.
    """
    search = _PipelineSearch(_checked(task), evaluations)
    search.baselines()
    search.regular()
    search.climb(random.Random(seed))
    search.shrink()
    return search.result()


class _Design(msgspec.Struct, frozen=True):
    """Placement of the layers: a route, and a cut along it."""

    route: Route
    cut: Cut


class _Entry(msgspec.Struct, frozen=True):
    """A pipeline that was played. If `rules` is None, its orders are Megatron's."""

    seconds: float
    design: _Design
    rules: StageRules | None
    orders: Orders
    lists: ListScheduler


class _PipelineSearch:
    def __init__(self, task: Task, evaluations: int) -> None:
        self._task, self._left = task, evaluations
        self._loads = Loads(task.profile, task.speeds)
        self._best: _Entry | None = None
        self._lists: dict[_Design, ListScheduler] = {}

    def baselines(self) -> None:
        """Play Megatron's pipelines, so that the result is never slower; these few evaluations are not counted."""
        task = self._task
        layers = len(task.profile.layers)
        max_chunks = max(1, layers // task.stages)
        for chunks in range(1, (min(max_chunks, task.most_chunks) if task.bound else max_chunks) + 1):
            layout = Layout.uniform(tp=1, pp=task.stages, dp=1, layers=layers, chunks=chunks)
            replica = layout.replicas[0]
            route = tuple(s for s, _ in replica.virtual_stages)
            cut = tuple(b - a + 1 for s, c in replica.virtual_stages for a, b in [replica.stages[s].chunks[c]])
            lists = _lists(task, tuple(stage.chunks for stage in replica.stages))
            self._keep(_entry(_Design(route, cut), None, orders_of(lists.plan), lists))

    def regular(self) -> None:
        """Play every regular placement under a few rules, then the best placements under more; of equal ones the first
        is kept."""
        task = self._task
        layers = len(task.profile.layers)
        designs: dict[_Design, float] = {}
        for route in routes(task.stages, layers, task.most_chunks):
            for cut in (self._loads.balanced(route), self._loads.quick_to_fill(route)):
                designs.setdefault(_Design(route, cut), self._loads.slowest(route, cut))
        played: list[tuple[float, int, _Design]] = []
        budget = self._left // 2
        for i, (design, slowest) in enumerate(sorted(designs.items(), key=lambda entry: entry[1])):
            if self._best is not None and slowest * task.micro_batches >= self._best.seconds:
                break  # none of its orders can be faster
            seconds = [self._try(design, rules) for rules in self._quick() if self._left > budget]
            played.append((min(seconds, default=math.inf), i, design))
        played.sort(key=lambda entry: entry[:2])
        for _, _, design in played[:PLACEMENTS_KEPT]:
            for patience in PATIENCE_PAIRS:
                for group in (0, -(-task.stages // 2), 2 * task.stages, task.micro_batches):
                    if self._left > budget // 2 and (rules := self._rules(patience, group)) not in self._quick():
                        self._try(design, rules)

    def climb(self, rng: random.Random) -> None:
        """Change the best pipeline, one thing at a time; after that its urgency, which a change of layers would
        invalidate."""
        reserve, end = self._left // 3, self._left // 12
        misses = 0
        while self._left > reserve and self._best is not None and misses < MAX_MISSES:
            before = self._left
            self._change(self._best, rng)
            misses = 0 if self._left < before else misses + 1
        while self._left > end and self._best is not None:
            best = self._best
            scale = rng.choice((0.0, 0.1, 0.3, 1.0)) * self._loads.slowest(best.design.route, best.design.cut)
            urgency = [start + rng.uniform(-scale, scale) for start in best.lists.latest_starts(best.orders)]
            self._try(best.design, self._rules(rng.choice(PATIENCE_PAIRS), 0), urgency)

    def shrink(self) -> None:
        """Reduce the peak of live activations as long as that costs no time."""
        while self._left > 0 and self._best is not None and self._best.rules is not None:
            best, rules = self._best, self._best.rules
            max_alive = max(best.lists.alive(best.orders))
            caps = tuple(min(cap, max_alive * 0.95) for cap in self._task.most_alive or (math.inf,) * self._task.stages)
            self._left -= 1
            try:
                orders = best.lists.run(msgspec.structs.replace(rules, caps=caps))
            except PlanError:
                return
            if best.lists.play(orders).makespan > best.seconds:
                return
            self._best = _entry(best.design, msgspec.structs.replace(rules, caps=caps), orders, best.lists)

    def result(self) -> Tuned:
        if self._best is None:
            raise PlanError(
                f"{self._task.stages} stages may keep at most {max(self._task.most_alive, default=0.0):.6g} alive: too "
                f"little for one micro-batch, however the layers are spread"
            )
        return _tuned(self._best.lists, self._best.orders)

    def _quick(self) -> list[StageRules]:
        """Return the few rules under which every placement is tried."""
        pair_count = 2 if self._task.split else 1
        return [
            self._rules(patience, -(-self._task.stages // part))
            for patience in PATIENCE_PAIRS[:pair_count]
            for part in (1, 2)
        ]

    def _rules(self, patience: tuple[float, float], group: int) -> StageRules:
        waits, forward_waits = patience
        task = self._task
        return StageRules(
            split=task.split, caps=task.most_alive, patience=waits, forward_patience=forward_waits, group=group
        )

    def _try(self, design: _Design, rules: StageRules, urgency: Sequence[float] | None = None) -> float:
        """Return the seconds of a design under some rules, infinite if memory does not suffice. Keep it if it is the
        best."""
        lists = self._lists.get(design)
        if lists is None:
            lists = _lists(self._task, chunks_of(design.route, design.cut, self._task.stages))
            self._lists[design] = lists
            if len(self._lists) > MAX_CACHED_DESIGNS:
                del self._lists[next(iter(self._lists))]
        self._left -= 1
        try:
            orders = lists.run(rules, urgency)
        except PlanError:  # the cap is below one micro-batch
            return math.inf
        entry = _entry(design, rules, orders, lists)
        self._keep(entry)
        return entry.seconds

    def _keep(self, entry: _Entry) -> None:
        alive = entry.lists.alive(entry.orders)
        if any(
            kept_alive > cap * (1 + ROUNDING_TOLERANCE)
            for kept_alive, cap in zip(alive, self._task.most_alive, strict=False)
        ):
            return
        if self._best is None or entry.seconds < self._best.seconds * (1 - ROUNDING_TOLERANCE):
            self._best = entry

    def _change(self, best: _Entry, rng: random.Random) -> None:
        """Try one random change of layers, placement or rules. Designs that cannot be faster are not played."""
        design, rules = best.design, best.rules or self._rules(PATIENCE_PAIRS[0], 0)
        kind = rng.randrange(10)
        if kind < 5:
            design = self._other_cut(design, rng)
        elif kind < 8:
            design = self._other_route(design, rng)
        elif kind == 8:
            rules = self._rules(
                rng.choice(PATIENCE_PAIRS), rng.choice((1, 2, self._task.stages // 2, 0, 2 * self._task.stages))
            )
        elif self._task.stages > 1:
            s = rng.randrange(self._task.stages)
            limits = [*(rules.limits or map(most_ahead, best.orders[0]))]
            limits[s] = max(1, limits[s] + rng.choice((-2, -1, 1, 2)))
            rules = msgspec.structs.replace(rules, limits=tuple(limits))
        slowest = self._loads.slowest(design.route, design.cut)
        if (design, rules) != (best.design, best.rules) and slowest * self._task.micro_batches < best.seconds:
            seconds = self._try(design, rules)
            if design != best.design and seconds < best.seconds * (1 + PROMISING_EXCESS):
                for quick_rules in self._quick():
                    self._try(design, quick_rules)

    def _other_cut(self, design: _Design, rng: random.Random) -> _Design:
        """Return a design with one or two layers moved between virtual stages.

        If the slowest stage becomes slower, the cut is balanced again.
        """
        cut = design.cut
        for _ in range(rng.choice((1, 1, 2))):
            a, b = rng.randrange(len(cut)), rng.randrange(len(cut))
            if a != b and cut[a] > 1:
                cut = moved(cut, a, b)
        if self._loads.slowest(design.route, cut) > self._loads.slowest(design.route, design.cut):
            cut = self._loads.balanced(design.route, cut)
        return _Design(design.route, cut)

    def _other_route(self, design: _Design, rng: random.Random) -> _Design:
        """Return a design in which a virtual stage moves to another stage, or two are exchanged, or one is split, or
        two are joined."""
        route, cut = [*design.route], [*design.cut]
        v, w = rng.randrange(len(route)), rng.randrange(len(route))
        move = rng.randrange(4)
        if move == 0:
            route[v] = rng.randrange(self._task.stages)
        elif move == 1:
            route[v], route[w] = route[w], route[v]
        elif move == 2 and cut[v] > 1:
            part = rng.randrange(1, cut[v])
            route.insert(v + 1, rng.randrange(self._task.stages))
            cut[v : v + 1] = [part, cut[v] - part]
        elif move == 3 and v + 1 < len(route):
            cut[v] += cut.pop(v + 1)
            route.pop(v + rng.randrange(2))
        if set(route) != set(range(self._task.stages)):
            return design
        if self._task.bound and max(map(route.count, route)) > self._task.most_chunks:
            return design
        balanced = self._loads.balanced(tuple(route), tuple(cut))
        return _Design(tuple(route), balanced)


def _checked(task: Task) -> Task:
    """Return the task with speeds filled in. Raises PlanError for an inconsistent task."""
    layers = len(task.profile.layers)
    speeds = task.speeds or (1.0,) * task.stages
    if task.stages < 1 or task.micro_batches < 1:
        raise PlanError(f"{task.stages} stages, {task.micro_batches} micro-batches: at least one of each is needed")
    if layers < task.stages:
        raise PlanError(f"{layers} layers are too few for {task.stages} stages")
    if len(speeds) != task.stages or not all(math.isfinite(speed) and speed > 0 for speed in speeds):
        raise PlanError(f"speeds {list(speeds)} of {task.stages} stages: one for each, above 0 and finite")
    if task.most_alive and len(task.most_alive) != task.stages:
        raise PlanError(f"{len(task.most_alive)} limits of live activations for {task.stages} stages")
    if not isinstance(task.layer_bytes, float | int) and len(task.layer_bytes) != layers:
        raise PlanError(f"activations of {len(task.layer_bytes)} layers, the profile has {layers}")
    return msgspec.structs.replace(task, speeds=speeds)


def _lists(task: Task, chunks: tuple[tuple[LayerSpan, ...], ...]) -> ListScheduler:
    replica = Replica(tuple(Stage((s,), spans) for s, spans in enumerate(chunks)))
    shape = []
    for spans, speed in zip(chunks, task.speeds, strict=True):
        times = [task.profile.span(first, last) for first, last in spans]
        shape.append(
            tuple(Times(layer_times.f / speed, layer_times.b / speed, layer_times.w / speed) for layer_times in times)
        )
    layer_bytes = task.layer_bytes
    per_layer = (layer_bytes,) * len(task.profile.layers) if isinstance(layer_bytes, float | int) else layer_bytes
    late = task.late
    return ListScheduler(
        Plan(epoch=0, layout=Layout((replica,)), assignment=(tuple(range(task.micro_batches)),)),
        (tuple(shape),),
        (lambda a, b: late[a.stage][b.stage]) if late else 0.0,
        [[sum(per_layer[first : last + 1]) for first, last in spans] for spans in chunks],
    )


def _entry(design: _Design, rules: StageRules | None, orders: Orders, lists: ListScheduler) -> _Entry:
    return _Entry(lists.play(orders).makespan, design, rules, orders, lists)


def _tuned(lists: ListScheduler, orders: Orders) -> Tuned:
    return Tuned(
        chunks=tuple(stage.chunks for stage in lists.plan.layout.replicas[0].stages),
        orders=orders[0],
        seconds=lists.play(orders).makespan,
        alive=lists.alive(orders),
        slowest_s=lists.slowest,
    )
