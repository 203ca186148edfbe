"""When each primitive of an iteration begins and ends: the one model of time (the paper's Eq. 2). Pure, no clock.

A primitive begins once the one before it on its stage has ended and what it needs has come:
F(m, v) needs F(m, v - 1); B(m, v) needs B(m, v + 1) and F(m, v), on the last virtual stage only F(m, v); W needs its B.
What comes from another stage takes a transfer on the way. The iteration lasts as long as the critical path.

This module prices an order; it makes none (`resihp.pipeline.schedules`) and decides nothing. Programs, the scheduler's
predictions, the detector's expectations and the simulator all read their times here, or, for many durations over the
same orders, in `resihp.pipeline.compiled`, which gives the same.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Kind, Order, Plan, Primitive, Stop

Orders = tuple[tuple[Order, ...], ...]
"""What each stage computes, [replica][stage]."""

Seconds = Callable[[Stop, Primitive], float]
"""What a primitive costs where it is carried out."""

Transfers = float | Callable[[Stop, Stop], float]
"""Seconds between the end of a primitive and the moment another stage can use what it made: all alike, or by link."""

Node = tuple[Kind, int, int]
"""A primitive by kind, micro-batch and virtual stage of the micro-batch's path: the same wherever it is carried out."""


class Timeline(msgspec.Struct, frozen=True):
    """Start and end of each primitive, in seconds from the iteration's start: [replica][stage], aligned with orders."""

    starts: tuple[tuple[tuple[float, ...], ...], ...]
    ends: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last primitive; 0 for an iteration without any."""
        return max((ends[-1] for replica in self.ends for ends in replica if ends), default=0.0)


def layer_units(layout: Layout) -> Seconds:
    """A cost where none is measured: F, B and W each take one unit for each layer of the chunk."""
    layers = {
        Stop(d, s, c): float(last - first + 1)
        for d, replica in enumerate(layout.replicas)
        for s, stage in enumerate(replica.stages)
        for c, (first, last) in enumerate(stage.chunks)
    }
    return lambda stop, _: layers[stop]


def virtual_stages(paths: dict[int, tuple[Stop, ...]]) -> dict[tuple[int, int, int, int], int]:
    """The virtual stage that a micro-batch passes at a stop, by (replica, stage, chunk, micro-batch)."""
    return {(stop.replica, stop.stage, stop.chunk, m): v for m, path in paths.items() for v, stop in enumerate(path)}


def needs(node: Node, last: int) -> tuple[Node, ...]:
    """What must be done before `node`, on a path whose last virtual stage is `last`."""
    kind, m, v = node
    if kind == "F":
        return (("F", m, v - 1),) if v else ()
    if kind == "W":
        return (("B", m, v),)
    return (("F", m, v),) if v == last else (("F", m, v), ("B", m, v + 1))


def follows(node: Node, last: int, split: bool) -> list[Node]:
    """What waits for `node`; with `split`, every B has a W."""
    kind, m, v = node
    if kind == "F":
        return [("F", m, v + 1), ("B", m, v)] if v < last else [("B", m, v)]
    if kind == "W":
        return []
    before: list[Node] = [("B", m, v - 1)] if v else []
    return [*before, ("W", m, v)] if split else before


def play(plan: Plan, orders: Orders, seconds: Seconds, transfer_s: Transfers = 0.0) -> Timeline:
    """Carry out `orders` on a virtual clock, each stage as soon as it can. Linear in the number of primitives.

    `transfer_s` passes on the way from one stage to another. Raises PlanError if a primitive stands where its
    micro-batch does not pass or stands twice, if something needed is absent, or if stages wait for each other in a
    circle.
    """
    paths = plan.paths()
    lanes = _lanes(plan, orders, paths)
    starts: list[list[float]] = [[] for _ in lanes]
    ends: list[list[float]] = [[] for _ in lanes]
    done: dict[Node, float] = {}
    waiting: dict[Node, list[int]] = {}
    todo = list(range(len(lanes)))
    while todo:
        i = todo.pop()
        place, nodes, order = lanes[i]
        clock = ends[i][-1] if ends[i] else 0.0
        for position in range(len(ends[i]), len(nodes)):
            node = nodes[position]
            path = paths[node[1]]
            for need in needs(node, len(path) - 1):
                end = done.get(need)
                if end is None:
                    waiting.setdefault(need, []).append(i)
                    break
                source = path[need[2]]
                if (source.replica, source.stage) != place:
                    end += transfer_s(source, path[node[2]]) if callable(transfer_s) else transfer_s
                clock = max(clock, end)
            else:
                starts[i].append(clock)
                clock += seconds(path[node[2]], order[position])
                ends[i].append(clock)
                done[node] = clock
                todo += waiting.pop(node, ())
                continue
            break
    if waiting:
        raise PlanError(f"plan of epoch {plan.epoch}: {_obstacle(lanes, [len(past) for past in ends], paths)}")
    shape = [len(replica) for replica in orders]
    return Timeline(starts=_fold(starts, shape), ends=_fold(ends, shape))


def spoken(primitive: Primitive) -> str:
    """A primitive in messages."""
    chunk = f" in chunk {primitive.chunk}" if primitive.chunk else ""
    return f"{primitive.kind} of micro-batch {primitive.micro_batch}{chunk}"


_Lane = tuple[tuple[int, int], list[Node], Order]


def _lanes(plan: Plan, orders: Orders, paths: dict[int, tuple[Stop, ...]]) -> list[_Lane]:
    """Each stage with its order, as given and as nodes."""
    at = virtual_stages(paths)
    lanes: list[_Lane] = []
    count = 0
    for d, replica in enumerate(orders):
        for s, order in enumerate(replica):
            nodes: list[Node] = []
            for p in order:
                v = at.get((d, s, p.chunk, p.micro_batch))
                if v is None:
                    raise PlanError(
                        f"plan of epoch {plan.epoch}: replica {d} stage {s} has {spoken(p)}, which does not pass there"
                    )
                nodes.append((p.kind, p.micro_batch, v))
            count += len(nodes)
            lanes.append(((d, s), nodes, order))
    if len({node for _, nodes, _ in lanes for node in nodes}) < count:
        for (d, s), nodes, order in lanes:
            for position, node in enumerate(nodes):
                if node in nodes[:position]:
                    raise PlanError(
                        f"plan of epoch {plan.epoch}: replica {d} stage {s} has {spoken(order[position])} twice"
                    )
    return lanes


def _obstacle(lanes: list[_Lane], done: list[int], paths: dict[int, tuple[Stop, ...]]) -> str:
    """Why a play has stopped: something absent, or the stages that wait for each other."""
    at = {node: (i, position) for i, (_, nodes, _) in enumerate(lanes) for position, node in enumerate(nodes)}
    stuck: dict[int, tuple[Node, Node]] = {}
    for i, (_, nodes, _) in enumerate(lanes):
        if done[i] == len(nodes):
            continue
        node = nodes[done[i]]
        for need in needs(node, len(paths[node[1]]) - 1):
            if need not in at:
                where = paths[need[1]][need[2]]
                return f"{_say(node, paths)} waits for {_say(need, paths)}, which stage {where.stage} never carries out"
            holder, position = at[need]
            if position >= done[holder]:
                stuck[i] = (node, need)
                break
    i = next(iter(stuck))
    seen: list[int] = []
    while i not in seen:
        seen.append(i)
        i = at[stuck[i][1]][0]
    circle = seen[seen.index(i) :]
    told = [f"{_say(stuck[j][0], paths)} waits for {_say(stuck[j][1], paths)}" for j in circle]
    return f"its orders can never finish: {', behind which '.join(told)}, which comes after the first of these"


def _say(node: Node, paths: dict[int, tuple[Stop, ...]]) -> str:
    kind, m, v = node
    stop = paths[m][v]
    return f"{spoken(Primitive(kind, m, stop.chunk))} on replica {stop.replica} stage {stop.stage}"


def _fold(times: list[list[float]], shape: list[int]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    lanes = iter(times)
    return tuple(tuple(tuple(next(lanes)) for _ in range(stages)) for stages in shape)
