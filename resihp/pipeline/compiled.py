"""Eq. 2 for many durations at once: orders are compiled once, then played over arrays. Pure, no clock.

`resihp.pipeline.timeline.play` defines the meaning of an order and decides whether it can be carried out; this module
gives the same starts and ends, to the last bit, wherever the same orders are priced again and again: the detector's
expectation of each iteration, the scheduler's candidates, samples of a simulation.

Primitives are flat *slots*. A slot begins once the slot before it on its stage has ended and, if it depends on another
stage, its transfer has arrived; all its other dependencies were done on its own stage before. A level holds the slots
whose predecessors all lie in earlier levels: as many levels as the critical path has primitives, each a few numpy calls
over all replicas. Slots are numbered level after level, so that a level is a slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.errors import PlanError
from resihp.parallelism.plan import Kind, Plan, Primitive, Stop
from resihp.pipeline.timeline import Node, Orders, needs, play, virtual_stages

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

PRIMITIVE_KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""Kinds of primitives, in the order of the codes in `CompiledOrders.kind`."""

_SLOTS_TOGETHER = 2**18
"""Slots, of all candidates, that are played together. More do not fit the processor's cache (measured)."""

MAX_SCALAR_SLOTS = 1024
"""Most slots for which playing one set of durations slot by slot is faster than level by level."""

_CODES = {kind: code for code, kind in enumerate(PRIMITIVE_KINDS)}


class Level(msgspec.Struct, frozen=True, eq=False):
    """Slots that can begin once those of earlier levels have ended; slots that wait for a transfer come first."""

    slots: slice
    edges: slice
    """Transfers to these slots, within `CompiledOrders.edges`."""
    previous: Ints
    """For each slot the slot before it on its stage, or V for none."""
    sources: Ints
    """For each edge the slot that sends it."""


class CompiledOrders(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Orders as arrays over their V primitives: the primitive of each slot, and its predecessors."""

    replica: Ints
    """(V,), like the five that follow: position of a slot in the pipeline, and its index in the order of its stage."""
    stage: Ints
    position: Ints
    kind: Ints
    """Index into `PRIMITIVE_KINDS`."""
    micro_batch: Ints
    chunk: Ints
    stop: Ints
    """(V,): index into `stops`."""
    stops: tuple[Stop, ...]
    """Every chunk of every stage that has work, by replica, stage and chunk."""
    micro_batches: int
    """One more than the highest index of a micro-batch: the width of tables by micro-batch."""
    in_order: Ints
    """(V,): slots by replica, stage and position. `seconds[in_order] = rows` accepts measurements stage after stage."""
    previous: Ints
    """(V,): the slot before it on its stage, or V for the first slot."""
    edges: Ints
    """(2, E): `source, target = edges`, slots of the two ends of each transfer between stages, by target."""
    levels: tuple[Level, ...]
    lanes: dict[tuple[int, int], slice]
    """Part of `in_order` that belongs to each (replica, stage)."""
    last: Ints
    """(replicas, stages of the longest replica): the last slot of each stage, or V for none."""

    @property
    def size(self) -> int:
        """Number of primitives V."""
        return self.replica.size

    def slots(self, replica: int, stage: int) -> Ints:
        """Return the slots of a stage, by position. Raises KeyError for a stage that the orders do not name."""
        return self.in_order[self.lanes[replica, stage]]

    def index(self, rows: npt.ArrayLike) -> Ints:
        """Return (V,) indices of the slots' seconds in a flattened table of shape (rows, kinds, micro-batches).

        `rows` (stops,): the row of each of `stops`; equal chunks of equal stages may share a row. Call it once, then
        `table.reshape(..., -1).take(index, axis=-1)` prices all slots, at 1-2 ns each.
        """
        row = np.asarray(rows, dtype=np.intp)[self.stop]
        return (row * len(PRIMITIVE_KINDS) + self.kind) * self.micro_batches + self.micro_batch

    def play(self, seconds: npt.ArrayLike, transfer_s: npt.ArrayLike = 0.0) -> tuple[Floats, Floats]:
        """Return starts and ends, both (..., V), from the seconds (..., V) of each slot, which are not negative. NaN
        spreads.

        `transfer_s`: seconds of a transfer, one number, per edge (E,) or (..., E). Leading axes, of candidates or
        samples, are broadcast against each other. Raises ValueError for any other shape.
        """
        cost, transfer, lead = self._rows(seconds, transfer_s)
        batch = max(1, _SLOTS_TOGETHER // max(1, self.size))
        if len(cost) <= batch:
            starts, ends = self._carry_out(cost, transfer)
        else:
            parts = [
                self._carry_out(cost[i : i + batch], transfer[i : i + batch] if transfer.ndim == 2 else transfer)
                for i in range(0, len(cost), batch)
            ]
            starts, ends = (np.concatenate(times) for times in zip(*parts, strict=True))
        return starts.reshape(*lead, self.size), ends.reshape(*lead, self.size)

    def makespan(self, seconds: Sequence[float], transfer_s: Sequence[float] | None = None) -> float:
        """Return the end of the last primitive, from the seconds (V,) of each slot, and of each transfer (E,) if given.

        The same result as `play` for a single set of durations, several times faster.
        """
        late = [0.0] * self.size if transfer_s is None else [0.0, *transfer_s]
        ends = [0.0] * (self.size + 1)
        last = 0.0
        for slot, (cost, (previous, source, edge)) in enumerate(zip(seconds, self._steps, strict=True)):
            begin = ends[previous]
            if source >= 0:
                arrival = ends[source] + late[edge]
                if arrival > begin:
                    begin = arrival
            begin += cost
            ends[slot] = begin
            if begin > last:
                last = begin
        return last

    @cached_property
    def _steps(self) -> list[tuple[int, int, int]]:
        """For each slot: the slot before it on its stage, the slot whose transfer it waits for or -1, and the index of
        that transfer plus 1."""
        source, edge = np.full(self.size, -1), np.zeros(self.size, dtype=np.intp)
        source[self.edges[1]], edge[self.edges[1]] = self.edges[0], 1 + np.arange(self.edges.shape[1])
        return list(zip(self.previous.tolist(), source.tolist(), edge.tolist(), strict=True))

    def ready(self, ends: npt.ArrayLike, transfer_s: npt.ArrayLike = 0.0) -> Floats:
        """Return when each slot could have begun, (..., V), had its predecessors ended at `ends` (..., V), measured or
        not.

        Arguments and errors as in `play`. For the ends that `play` returns, the result equals its starts.
        """
        done, transfer, lead = self._rows(ends, transfer_s)
        begin = np.pad(done, ((0, 0), (0, 1)))[:, self.previous]
        source, target = self.edges
        begin[:, target] = np.maximum(begin[:, target], done[:, source] + transfer)
        return begin.reshape(*lead, self.size)

    def makespans(self, ends: npt.ArrayLike) -> Floats:
        """Return the end of each replica's last primitive, (..., replicas), from the ends (..., V); 0 for an empty
        replica."""
        done = np.asarray(ends, dtype=np.float64)
        if not self.size:
            return np.zeros((*done.shape[:-1], len(self.last)))
        last = np.where(self.last < self.size, done.take(self.last, axis=-1, mode="clip"), 0.0)
        return np.asarray(last.max(axis=-1, initial=0.0))

    def iteration_seconds(
        self,
        seconds: npt.ArrayLike,
        transfer_s: npt.ArrayLike = 0.0,
        *,
        synchronisation_s: npt.ArrayLike = 0.0,
        optimizer_s: npt.ArrayLike = 0.0,
    ) -> Floats:
        """Return the seconds of an iteration, shape (...): slowest replica, gradient synchronisation, optimizer step.

        The last two are one number, or (..., replicas), of which the longest counts: the synchronisation begins when
        the last replica arrives, and every replica waits for the last to step.
        """
        cost, transfer = np.asarray(seconds, dtype=np.float64), np.asarray(transfer_s, dtype=np.float64)
        is_small = self.size <= MAX_SCALAR_SLOTS and (cost.shape, transfer.shape) == (
            (self.size,),
            (self.edges.shape[1],),
        )
        if is_small and math.isfinite(cost.sum() + transfer.sum()):
            slowest = np.float64(self.makespan(cost.tolist(), transfer.tolist()))
        else:
            _, ends = self.play(cost, transfer)
            slowest = self.makespans(ends).max(axis=-1, initial=0.0)
        return np.asarray(slowest + _longest(synchronisation_s) + _longest(optimizer_s))

    def _carry_out(self, seconds: Floats, transfer_s: Floats) -> tuple[Floats, Floats]:
        """Return starts and ends (n, V) from seconds (n, V) and transfers (), (E,) or (n, E); candidates lie side by
        side."""
        cost = np.ascontiguousarray(seconds.T)
        late = np.ascontiguousarray(np.atleast_2d(transfer_s).T) if transfer_s.ndim else float(transfer_s)
        starts = np.empty(cost.shape)
        ends = np.empty((self.size + 1, cost.shape[1]))
        ends[self.size] = 0.0  # predecessor of the first slot of a stage
        arrivals = np.empty((max((level.sources.size for level in self.levels), default=0), cost.shape[1]))
        for level in self.levels:
            begin = starts[level.slots]
            ends.take(level.previous, axis=0, out=begin, mode="clip")
            count = level.sources.size
            if count:
                arrival = ends.take(level.sources, axis=0, out=arrivals[:count], mode="clip")
                arrival += late if isinstance(late, float) else late[level.edges]
                np.maximum(begin[:count], arrival, out=begin[:count])
            np.add(begin, cost[level.slots], out=ends[level.slots])
        return starts.T, ends[:-1].T

    def _rows(self, seconds: npt.ArrayLike, transfer_s: npt.ArrayLike) -> tuple[Floats, Floats, tuple[int, ...]]:
        """Return seconds (n, V); transfers (), (E,) or (n, E); and the leading axes, whose product is n."""
        cost, transfer = np.asarray(seconds, dtype=np.float64), np.asarray(transfer_s, dtype=np.float64)
        edges = self.edges.shape[1]
        if cost.shape[-1:] != (self.size,) or transfer.shape[-1:] not in ((), (edges,)):
            raise ValueError(
                f"seconds of shape {cost.shape}, transfers of shape {transfer.shape}; "
                f"orders of {self.size} primitives and {edges} transfers take (..., {self.size}) and (..., {edges})"
            )
        lead = np.broadcast_shapes(cost.shape[:-1], transfer.shape[:-1])
        count = math.prod(lead)
        if transfer.ndim > 1:
            transfer = np.broadcast_to(transfer, (*lead, edges)).reshape(count, edges)
        return np.broadcast_to(cost, (*lead, self.size)).reshape(count, self.size), transfer, lead


def compile_orders(plan: Plan, orders: Orders) -> CompiledOrders:
    """Compile `orders`. The structure of equal replicas without migrations is computed once.

    Raises the same PlanError as `timeline.play`, in the same cases.
    """
    lanes = [(d, s, order) for d, replica in enumerate(orders) for s, order in enumerate(replica)]
    counts = np.array([len(order) for _, _, order in lanes], dtype=np.intp)
    begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.intp)
    replica, stage = (np.repeat(np.array([lane[i] for lane in lanes], dtype=np.intp), counts) for i in (0, 1))
    primitives = [p for _, _, order in lanes for p in order]
    size = len(primitives)
    position = np.arange(size) - np.repeat(begins[:-1], counts)
    kind = np.fromiter([_CODES[p.kind] for p in primitives], np.intp, size)
    micro_batch = np.fromiter([p.micro_batch for p in primitives], np.intp, size)
    chunk = np.fromiter([p.chunk for p in primitives], np.intp, size)

    level, source = _dependencies(plan, orders, replica, (kind, chunk, micro_batch))

    numbered = np.argsort(2 * level + (source == size), kind="stable")
    slot = np.empty(size + 1, dtype=np.intp)
    slot[numbered], slot[size] = np.arange(size), size
    previous = slot[np.where(position > 0, np.arange(size) - 1, size)[numbered]]
    source = slot[source[numbered]]
    target = np.flatnonzero(source < size)
    edges = np.stack([source[target], target])
    places = (replica * (1 + stage.max(initial=0)) + stage) * (1 + chunk.max(initial=0)) + chunk
    distinct_places, firsts = np.unique(places, return_index=True)
    stops = tuple(Stop(int(replica[i]), int(stage[i]), int(chunk[i])) for i in firsts)
    stop = np.searchsorted(distinct_places, places)
    last = np.full((len(orders), max((len(stages) for stages in orders), default=0)), size)
    for i, (d, s, order) in enumerate(lanes):
        if order:
            last[d, s] = slot[begins[i + 1] - 1]
    return CompiledOrders(
        replica=replica[numbered],
        stage=stage[numbered],
        position=position[numbered],
        kind=kind[numbered],
        micro_batch=micro_batch[numbered],
        chunk=chunk[numbered],
        stop=stop[numbered],
        stops=stops,
        micro_batches=int(micro_batch.max(initial=plan.micro_batches - 1)) + 1,
        in_order=slot[:-1],
        previous=previous,
        edges=edges,
        levels=_levels(level[numbered], previous, edges),
        lanes={(d, s): slice(int(begins[i]), int(begins[i + 1])) for i, (d, s, _) in enumerate(lanes)},
        last=last,
    )


Part = tuple[int, ...]
"""Replicas that exchange micro-batches, or a single replica that exchanges none."""


def _dependencies(plan: Plan, orders: Orders, replica: Ints, fields: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the level of each primitive, and the index of the primitive whose transfer it waits for, or their number.

    `replica`: the replica of each primitive. `fields`: their kinds, chunks and micro-batches. The structure of equal
    parts is worked out once.
    """
    size = len(replica)
    level, source = np.empty(size, dtype=np.intp), np.empty(size, dtype=np.intp)
    spans = list(itertools.pairwise(np.searchsorted(replica, np.arange(len(orders) + 1)).tolist()))
    kind, chunk, micro_batch = fields
    try:
        for equal_parts in _alike(plan, orders, [(kind[a:b], chunk[a:b], micro_batch[a:b]) for a, b in spans]):
            own_level, own_source = _structure(plan, orders, equal_parts[0])
            where = np.array([np.concatenate([np.arange(*spans[d]) for d in part]) for part in equal_parts])
            level[where] = own_level
            source[where] = np.pad(where, ((0, 0), (0, 1)), constant_values=size)[:, own_source]
    except PlanError:
        play(plan, orders, _unit)  # raises the same error, or the error of an earlier replica
        raise
    return level, source


def _alike(plan: Plan, orders: Orders, fields: Sequence[tuple[Ints, Ints, Ints]]) -> list[list[Part]]:
    """Return the parts of the plan that have work, grouped by equal work up to the numbers of their micro-batches.

    `fields`: kinds, chunks and micro-batches of each replica, stage after stage.
    """
    homes = {m: d for d, share in enumerate(plan.assignment) for m in share}
    moves = [(homes[move.micro_batch], move.replica) for move in plan.migrations if move.micro_batch in homes]
    mixed = tuple(sorted({d for move in moves if move[0] != move[1] for d in move if d < len(orders)}))
    parts_of_work: dict[object, list[Part]] = {}
    for d, (replica, (kind, chunk, micro_batch)) in enumerate(zip(orders, fields, strict=True)):
        if d in mixed or not any(replica):
            continue
        names = {m: i for i, m in enumerate(plan.assignment[d])} if d < len(plan.assignment) else {}
        try:
            renamed = np.array([names[m] for m in micro_batch.tolist()])
        except KeyError as error:
            raise PlanError(f"plan of epoch {plan.epoch}: replica {d} has no micro-batch {error}") from None
        chunks = tuple(len(stage.chunks) for stage in plan.layout.replicas[d].stages)
        work = tuple(map(len, replica)), kind.tobytes(), chunk.tobytes(), renamed.tobytes()
        parts_of_work.setdefault((chunks, work), []).append((d,))
    return [*parts_of_work.values(), *([[mixed]] if any(any(orders[d]) for d in mixed) else [])]


def _structure(plan: Plan, orders: Orders, part: Part) -> tuple[Ints, Ints]:
    """Return the level of each primitive of `part`, and the index of the primitive whose transfer it waits for, or
    -1."""
    own = msgspec.structs.replace(
        plan, assignment=tuple(share if d in part else () for d, share in enumerate(plan.assignment)), orders=()
    )
    timeline = play(own, tuple(replica if d in part else () for d, replica in enumerate(orders)), _unit)
    level = [start for replica in timeline.starts for stage in replica for start in stage]
    paths = own.paths()
    at = virtual_stages(paths)
    places: list[tuple[int, int]] = []
    nodes: list[Node] = []
    for d in part:
        for s, order in enumerate(orders[d]):
            places += [(d, s)] * len(order)
            nodes += [(p.kind, p.micro_batch, at[d, s, p.chunk, p.micro_batch]) for p in order]
    index = {node: i for i, node in enumerate(nodes)}
    source = [
        next((index[need] for need in needs(node, len(paths[node[1]]) - 1) if places[index[need]] != place), -1)
        for node, place in zip(nodes, places, strict=True)
    ]
    return np.array(level).astype(np.intp), np.array(source, dtype=np.intp)


def _levels(level: Ints, previous: Ints, edges: Ints) -> tuple[Level, ...]:
    """Return the slices of each level, from each slot's level in ascending order."""
    source, target = edges
    firsts = np.searchsorted(level, np.arange(level.max(initial=-1) + 2))
    edge_firsts = np.searchsorted(target, firsts)
    bounds = zip(firsts.tolist(), edge_firsts.tolist(), strict=True)
    return tuple(
        Level(slice(a, b), slice(e, f), previous[a:b], source[e:f]) for (a, e), (b, f) in itertools.pairwise(bounds)
    )


def _longest(seconds: npt.ArrayLike) -> Floats:
    values = np.asarray(seconds, dtype=np.float64)
    return values if not values.ndim else np.asarray(values.max(axis=-1))


def _unit(_: Stop, __: Primitive) -> float:
    return 1.0
