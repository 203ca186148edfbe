"""Start and end of each primitive of an iteration: the only model of time (the paper's Eq. 2). Pure, no clock.

A primitive begins once the primitive before it on its stage has ended and its inputs have arrived. F(m, v) needs F(m, v
- 1). B(m, v) needs F(m, v) and, except on the last virtual stage, B(m, v + 1). W needs its B. An input from another
stage takes the time of a transfer. The duration of the iteration is the length of the critical path.

This module computes the time of given orders; it never makes orders (`resihp.pipeline.schedules`) and decides nothing.
Programs, the scheduler's predictions, the detector's expectations and the simulator take their times from here. For
many durations over the same orders they use `resihp.pipeline.compiled`, which gives equal results.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Kind, Order, Plan, Primitive, Stop

Orders = tuple[tuple[Order, ...], ...]
"""Order of primitives of each stage: [replica][stage]."""

Seconds = Callable[[Stop, Primitive], float]
"""Function that returns the seconds of a primitive at a stop."""

Transfers = float | Callable[[Stop, Stop], float]
"""Seconds between the end of a primitive and the moment at which another stage can use its output: one number for all
transfers, or a function of sender and receiver."""

Node = tuple[Kind, int, int]
"""A primitive given by its kind, its micro-batch and the virtual stage in its micro-batch's path. A node does not
depend on the replica that carries it out."""


class Timeline(msgspec.Struct, frozen=True):
    """Start and end of each primitive, in seconds from the iteration's start: [replica][stage][position in order]."""

    starts: tuple[tuple[tuple[float, ...], ...], ...]
    ends: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def makespan(self) -> float:
        """End of the last primitive; 0 for an iteration without primitives."""
        return max((ends[-1] for replica in self.ends for ends in replica if ends), default=0.0)


def layer_units(layout: Layout) -> Seconds:
    """Return costs to use without measurements: F, B and W each take one unit of time for each layer of the chunk."""
    layers = {
        Stop(d, s, c): float(last - first + 1)
        for d, replica in enumerate(layout.replicas)
        for s, stage in enumerate(replica.stages)
        for c, (first, last) in enumerate(stage.chunks)
    }
    return lambda stop, _: layers[stop]


def virtual_stages(paths: dict[int, tuple[Stop, ...]]) -> dict[tuple[int, int, int, int], int]:
    """Return the virtual stage at which a micro-batch passes a stop, by (replica, stage, chunk, micro-batch)."""
    return {(stop.replica, stop.stage, stop.chunk, m): v for m, path in paths.items() for v, stop in enumerate(path)}


def needs(node: Node, last: int) -> tuple[Node, ...]:
    """Return the nodes that must end before `node` begins, on a path that ends with virtual stage `last`."""
    kind, m, v = node
    if kind == "F":
        return (("F", m, v - 1),) if v else ()
    if kind == "W":
        return (("B", m, v),)
    return (("F", m, v),) if v == last else (("F", m, v), ("B", m, v + 1))


def follows(node: Node, last: int, split: bool) -> list[Node]:
    """Return the nodes that need `node`, on a path that ends with virtual stage `last`; with `split`, every B has a
    separate W."""
    kind, m, v = node
    if kind == "F":
        return [("F", m, v + 1), ("B", m, v)] if v < last else [("B", m, v)]
    if kind == "W":
        return []
    before: list[Node] = [("B", m, v - 1)] if v else []
    return [*before, ("W", m, v)] if split else before


def play(plan: Plan, orders: Orders, seconds: Seconds, transfer_s: Transfers = 0.0) -> Timeline:
    """Carry out `orders` on a virtual clock, each primitive as early as possible, and return the times.

    A transfer from one stage to another takes `transfer_s`. The time is linear in the number of primitives. Raises
    PlanError if a primitive is not on the path of its micro-batch or occurs twice, if a dependency is missing, or if
    stages wait for each other in a circle.
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
    """Return the text that describes a primitive in messages."""
    chunk = f" in chunk {primitive.chunk}" if primitive.chunk else ""
    return f"{primitive.kind} of micro-batch {primitive.micro_batch}{chunk}"


_Lane = tuple[tuple[int, int], list[Node], Order]


def _lanes(plan: Plan, orders: Orders, paths: dict[int, tuple[Stop, ...]]) -> list[_Lane]:
    """Return, for each stage, its (replica, stage), its order as nodes, and its order as primitives."""
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
    """Describe why a play has stopped: a primitive is missing, or stages wait for each other in a circle."""
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
    visited: list[int] = []
    while i not in visited:
        visited.append(i)
        i = at[stuck[i][1]][0]
    circle = visited[visited.index(i) :]
    waits = [f"{_say(stuck[j][0], paths)} waits for {_say(stuck[j][1], paths)}" for j in circle]
    return f"its orders can never finish: {', behind which '.join(waits)}, which comes after the first of these"


def _say(node: Node, paths: dict[int, tuple[Stop, ...]]) -> str:
    kind, m, v = node
    stop = paths[m][v]
    return f"{spoken(Primitive(kind, m, stop.chunk))} on replica {stop.replica} stage {stop.stage}"


def _fold(times: list[list[float]], shape: list[int]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    lanes = iter(times)
    return tuple(tuple(tuple(next(lanes)) for _ in range(stages)) for stages in shape)
