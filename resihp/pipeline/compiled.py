"""Eq. 2 for many durations at once: orders are compiled once, then played over arrays. Pure, no clock.

`resihp.pipeline.timeline.play` defines the meaning of an order and decides whether it can be carried out. This module
gives the same starts and ends, to the last bit. It is used wherever the same orders are played many times: by the
detector's expectation of each iteration, for the scheduler's candidates, for samples of a simulation.

Each primitive is a *slot* in flat arrays. A slot begins once the slot before it on its stage has ended and, if it
depends on another stage, the transfer from that stage has arrived; its other dependencies end earlier on its own stage.
Slots are grouped into *levels*: all predecessors of a slot are in earlier levels. There are as many levels as the
critical path has primitives, and playing a level takes a few numpy calls over all replicas. Slots are numbered level by
level, so that a level is a slice.
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
"""Maximum number of slots, over all candidates, that are played together. More slots do not fit the processor's cache
(measured)."""

MAX_SCALAR_SLOTS = 1024
"""Maximum number of slots for which playing one set of durations slot by slot is faster than level by level."""

_CODES = {kind: code for code, kind in enumerate(PRIMITIVE_KINDS)}


class Level(msgspec.Struct, frozen=True, eq=False):
    """Slots that can begin once the slots of earlier levels have ended; slots that wait for a transfer come first."""

    slots: slice
    edges: slice
    """Transfers that arrive at the level's slots: a slice of `CompiledOrders.edges`."""
    previous: Ints
    """For each slot of the level, the slot before it on its stage, or V (the number of all slots) if it is the first.
    """
    sources: Ints
    """For each transfer, the slot that sends."""


class CompiledOrders(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Orders as arrays over their V primitives: the primitive and the predecessors of each slot."""

    replica: Ints
    """(V,): the replica of each slot. The five arrays that follow have the same shape: `stage`, `position` (index in
    the stage's order), `kind`, `micro_batch` and `chunk`."""
    stage: Ints
    position: Ints
    kind: Ints
    """Index into `PRIMITIVE_KINDS`."""
    micro_batch: Ints
    chunk: Ints
    stop: Ints
    """(V,): index of each slot's place in `stops`."""
    stops: tuple[Stop, ...]
    """Every chunk of every stage that has work, sorted by replica, stage and chunk."""
    micro_batches: int
    """Highest micro-batch index plus 1: the width of tables by micro-batch."""
    in_order: Ints
    """(V,): slots sorted by replica, stage and position. `seconds[in_order] = rows` stores measurements that are listed
    stage after stage."""
    previous: Ints
    """(V,): for each slot, the slot before it on its stage, or V if it is the first."""
    edges: Ints
    """(2, E): source slots and target slots of the E transfers between stages, sorted by target."""
    levels: tuple[Level, ...]
    lanes: dict[tuple[int, int], slice]
    """Slice of `in_order` for each (replica, stage)."""
    last: Ints
    """(replicas, stages of the longest replica): the last slot of each stage, or V if the stage has no primitives."""

    @property
    def size(self) -> int:
        """Number of primitives V."""
        return self.replica.size

    def slots(self, replica: int, stage: int) -> Ints:
        """Return the slots of a stage, sorted by position. Raises KeyError for a stage that is not in the orders."""
        return self.in_order[self.lanes[replica, stage]]

    def index(self, rows: npt.ArrayLike) -> Ints:
        """Return (V,) indices of the slots' seconds in a flattened table of shape (rows, kinds, micro-batches).

        `rows` (stops,): the table row of each of `stops`; equal chunks of equal stages may share a row. Compute the
        index once; then `table.reshape(..., -1).take(index, axis=-1)` returns the seconds of all slots, at 1-2 ns each.
        """
        row = np.asarray(rows, dtype=np.intp)[self.stop]
        return (row * len(PRIMITIVE_KINDS) + self.kind) * self.micro_batches + self.micro_batch

    def play(self, seconds: npt.ArrayLike, transfer_s: npt.ArrayLike = 0.0) -> tuple[Floats, Floats]:
        """Return the starts and the ends of all slots, both (..., V), for durations `seconds` (..., V).

        Durations must not be negative; NaN spreads to the slots that depend on it. `transfer_s`: seconds of a transfer,
        one number, one per transfer (E,), or (..., E). Leading axes, of candidates or samples, are broadcast against
        each other. Raises ValueError for any other shape.
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
        """Return the end of the last primitive, for the seconds of each slot (V,) and, if given, of each transfer (E,).

        The result equals that of `play` for one set of durations, and is several times faster to compute.
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
        """For each slot: the slot before it on its stage, the slot that sends it a transfer (-1 if none), and the
        transfer's index plus 1 (0 if none).
        """
        source, edge = np.full(self.size, -1), np.zeros(self.size, dtype=np.intp)
        source[self.edges[1]], edge[self.edges[1]] = self.edges[0], 1 + np.arange(self.edges.shape[1])
        return list(zip(self.previous.tolist(), source.tolist(), edge.tolist(), strict=True))

    def ready(self, ends: npt.ArrayLike, transfer_s: npt.ArrayLike = 0.0) -> Floats:
        """Return the time at which each slot could have begun, (..., V), if its predecessors ended at `ends` (..., V).

        `ends` may be measured or computed. Other arguments and errors as in `play`. For the ends that `play` returns,
        the result equals the starts that `play` returns.
        """
        done, transfer, lead = self._rows(ends, transfer_s)
        begin = np.pad(done, ((0, 0), (0, 1)))[:, self.previous]
        source, target = self.edges
        begin[:, target] = np.maximum(begin[:, target], done[:, source] + transfer)
        return begin.reshape(*lead, self.size)

    def makespans(self, ends: npt.ArrayLike) -> Floats:
        """Return the end of each replica's last primitive, (..., replicas), from the ends of all slots (..., V).

        The end of a replica without primitives is 0.
        """
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
        """Return the seconds of an iteration, shape (...): slowest replica, plus gradient synchronisation, plus
        optimizer step.

        `synchronisation_s` and `optimizer_s` are each one number, or (..., replicas), of which the longest counts: the
        synchronisation begins when the last replica arrives, and every replica waits for the last one to step.
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
        """Return starts and ends, both (n, V), from seconds (n, V) and transfers (), (E,) or (n, E).

        Internally the n candidates are the last axis, so that each level is a contiguous block.
        """
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
        """Return seconds as (n, V), transfers as (), (E,) or (n, E), and the broadcast leading axes (their product is
        n)."""
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
    """Return `orders` compiled for `plan`. The structure of equal replicas without migrations is computed once.

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
"""Replicas that exchange micro-batches with each other, or a single replica that exchanges none."""


def _dependencies(plan: Plan, orders: Orders, replica: Ints, fields: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the level of each primitive, and the index of the primitive that sends it a transfer.

    The index is the number of primitives if no transfer arrives. `replica`: the replica of each primitive. `fields`:
    their kinds, chunks and micro-batches. The structure of equal parts is computed once.
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
    """Return the parts of the plan that have work, grouped by equal work. Work is equal if only micro-batch numbers
    differ.

    `fields`: kinds, chunks and micro-batches of each replica's primitives, stage after stage.
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
    """Return the level of each primitive of `part`, and the index of the primitive that sends it a transfer, or -1 if
    none does.
    """
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
    """Return all levels, given the level of each slot in ascending order, the slots before them, and the transfers."""
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
