"""Each rank's program of an iteration: computation and communication in one order, derived from a plan. Pure.

The order is safe under NCCL's rules, not only under gloo's. All communication of the plan has one linear order: the
order in which it becomes possible when the plan is played on a virtual clock (`resihp.pipeline.timeline`). Every rank
begins its communication in that order, and before a rank waits for a communication, it has begun every earlier
communication of its own. Then the first unfinished communication in the order can always finish, even if each rank
carries out one communication at a time, and even if sends wait for their receives. `resihp.pipeline.checker` plays
programs under these rules, and no rank carries out a refused program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from resihp.parallelism.layout import LayerSpan, Layout, Stage
from resihp.parallelism.ownership import ParameterSpec, Slice, holders, owner_sets, size_of
from resihp.parallelism.plan import Plan, Primitive, Stop
from resihp.pipeline.parts import ChunkPlace, cuts, depths
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import layer_units, play, virtual_stages


class TensorRange(msgspec.Struct, frozen=True):
    """A range of elements that one rank sends to another: [start * n / of, stop * n / of) of a tensor of n elements."""

    sender: int
    receiver: int
    start: int
    stop: int
    of: int


class Parcel(msgspec.Struct, frozen=True):
    """The activations of a micro-batch, or their gradients, in transit between two stages.

    `boundary` b lies between virtual stages b and b + 1 of the micro-batch's path; activations cross it forward,
    gradients backward. Between stages of equal tensor-parallel degree, each rank sends the whole tensor to its
    counterpart. Between unequal degrees, or under sequence parallelism, the tensor travels in N chunks, each sent once.
    N is the least common multiple of the degrees U (upstream) and D (downstream); the paper's section 7 has their
    maximum, which is the same for powers of two. Chunk c goes from sender c * U // N to receiver c * D // N, and its
    gradient travels back between the same two ranks. `gathered`: the receivers complete the tensor with an all-gather
    among themselves. Otherwise each receiver needs only the elements that it received.
    """

    direction: Literal["forward", "backward"]
    micro_batch: int
    boundary: int
    pieces: tuple[TensorRange, ...]
    gathered: bool


class Bucket(msgspec.Struct, frozen=True):
    """Gradients that are summed in one all-reduce over `owners`, once the backward passes of `units` are complete."""

    owners: tuple[int, ...]
    slices: tuple[Slice, ...]
    units: tuple[str, ...]


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Carry out a primitive once its inputs from other stages have arrived.

    `layers` (first and last) restricts the computation to a part of the chunk; None means the whole chunk. Only the
    pass that completes a chunk's gradients is cut into parts, which follow one another from the chunk's last layer to
    its first, without other computation between them (`resihp.pipeline.parts`).
    """

    primitive: Primitive
    layers: LayerSpan | None = None


class Transmit(msgspec.Struct, frozen=True, tag=True):
    """Begin to send or to receive this rank's pieces of a parcel, without waiting for completion."""

    parcel: Parcel


class Reduce(msgspec.Struct, frozen=True, tag=True):
    """Begin the all-reduce of the bucket with index `bucket`, without waiting for completion."""

    bucket: int


Instruction = Compute | Transmit | Reduce
Program = tuple[Instruction, ...]


Use = Literal["bulk", "tensor", "edge"]
"""Use of a communicator. "bulk": large operations that no rank waits for immediately (sums, state). "tensor": the
collectives inside a stage's computation. "edge": transfers between two ranks of different stages."""


class GroupSpec(msgspec.Struct, frozen=True):
    """One communicator: name within the epoch, ranks in order (sender, then receiver, for an edge), and use."""

    name: str
    ranks: tuple[int, ...]
    use: Use = "bulk"


def programs(plan: Plan, buckets: Sequence[Bucket] = ()) -> dict[int, Program]:
    """Return every active rank's program: the instructions of one common list that concern the rank, in the list's
    order.

    The list sorts all instructions by the time at which they can begin: a computation at its start, a transfer when the
    tensor is ready, a reduction when the last owner's gradients are complete. Ties have a fixed order. In the list
    every instruction comes after its dependencies, so the argument in the module's docstring applies to the programs.

    Raises PlanError if the plan's orders cannot be carried out.
    """
    events = _Events(plan, buckets)
    events.add_stages()
    events.add_reductions()
    instructions_of: dict[int, list[Instruction]] = {rank: [] for rank in plan.layout.active}
    for _, instruction, ranks in sorted(events.events, key=lambda event: event[0]):
        for rank in ranks:
            instructions_of[rank].append(instruction)
    return {rank: tuple(program) for rank, program in instructions_of.items()}


def forward_only(programs: Mapping[int, Program]) -> dict[int, Program]:
    """Return the programs without gradients, for an evaluation over the same communicators.

    They are safe for the same reason as the complete programs: forward passes depend only on forward passes.
    """
    return {rank: tuple(entry for entry in program if _is_forward(entry)) for rank, program in programs.items()}


def _is_forward(entry: Instruction) -> bool:
    if isinstance(entry, Compute):
        return entry.primitive.kind == "F"
    return isinstance(entry, Transmit) and entry.parcel.direction == "forward"


TRANSMIT, REDUCE, COMPUTE = range(3)
"""Order of instructions that begin at the same time: communication first, because other ranks may wait for it."""


def pieces_between(
    senders: Sequence[int], receivers: Sequence[int], *, sequence_parallel: bool
) -> tuple[TensorRange, ...]:
    """Return the pieces in which activations travel from the ranks of one stage to the ranks of the next.

    `mirrored` returns the pieces of their gradients, which travel in the opposite direction.
    """
    up, down = len(senders), len(receivers)
    if up == down and not sequence_parallel:
        return tuple(TensorRange(a, b, 0, 1, 1) for a, b in zip(senders, receivers, strict=True))
    elements = math.lcm(up, down)
    pieces: list[TensorRange] = []
    for c in range(elements):
        a, b = senders[c * up // elements], receivers[c * down // elements]
        if pieces and (pieces[-1].sender, pieces[-1].receiver) == (a, b):
            pieces[-1] = TensorRange(a, b, pieces[-1].start, c + 1, elements)
        else:
            pieces.append(TensorRange(a, b, c, c + 1, elements))
    return tuple(pieces)


def mirrored(pieces: Sequence[TensorRange]) -> tuple[TensorRange, ...]:
    return tuple(TensorRange(piece.receiver, piece.sender, piece.start, piece.stop, piece.of) for piece in pieces)


def buckets(
    layout: Layout, specs: Sequence[ParameterSpec], bucket_bytes: int = 32 << 20, element: int = 4
) -> tuple[Bucket, ...]:
    """Return the gradient sums over several ranks, in buckets of about `bucket_bytes`: one list that is equal on all
    ranks.

    The model's last parameters come first, because their gradients are complete first. All slices of a bucket wait for
    the same chunks of each owner, so that no gradient waits for an unrelated chunk. Slices stay whole; `element` is the
    size of an element in bytes.

    Copies of a parameter that tensor parallelism does not cut are summed in several sets of owners. On gloo, the
    results are equal to the bit only if the copies are at the same position in their buckets, because the order of
    additions depends on the position. Buckets of such sets are therefore laid out alike. If the tensor-parallel degrees
    cut the other parameters unevenly (degrees 3 and 2, for example), the uncut parameters get buckets of their own.

    NCCL gives all ranks of one set the same bits (its issues 855 and 1497), but another set, over other links, may add
    in another order. With three or more replicas, copies in different sets can therefore differ in the last bit, as in
    Megatron. No code relies on equal bits: a norm counts one copy, a checkpoint contains one copy, and a rank that
    needs the parameter takes any copy. Under sequence parallelism, one set contains all copies.
    """
    by_name = {spec.name: spec for spec in specs}
    position = {spec.name: i for i, spec in enumerate(specs)}
    places = {rank: (place.replica, place.stage) for rank, place in layout.places()}

    @functools.cache
    def waits(place: tuple[int, int], units: tuple[str, ...]) -> tuple[ChunkPlace, ...]:
        return tuple((*place, c) for c in depths(layout, *place, units))

    entries = [
        (position[piece.name], i, piece, entry.owners)
        for i, entry in enumerate(owner_sets(layout, specs))
        if len(entry.owners) > 1
        for piece in entry.slices
    ]
    entries.sort(key=lambda entry: (-entry[0], entry[1], entry[2].start))
    groups: dict[tuple[tuple[int, ...], object, bool], list[Slice]] = {}
    for _, _, piece, owners in entries:
        spec = by_name[piece.name]
        chunks = tuple(waits(places[owner], spec.units) for owner in owners)
        groups.setdefault((owners, chunks, _apart(layout, spec)), []).append(piece)
    buckets: list[Bucket] = []
    for (owners, _, _), pieces in groups.items():
        bucket_pieces: list[Slice] = []
        held_bytes = 0
        for piece in pieces:
            size = size_of(by_name[piece.name], piece) * element
            if bucket_pieces and held_bytes + size > bucket_bytes:
                buckets.append(_bucket(owners, bucket_pieces, by_name))
                bucket_pieces, held_bytes = [], 0
            bucket_pieces.append(piece)
            held_bytes += size
        buckets.append(_bucket(owners, bucket_pieces, by_name))
    return tuple(buckets)


def memberships(plan: Plan, programs: dict[int, Program], buckets: Sequence[Bucket] = ()) -> tuple[GroupSpec, ...]:
    """Return all communicators of a plan, in one order that is equal on all ranks.

    The list is as short as order and speed allow: operations of equal sets of ranks, for example the sums of several
    buckets, share one communicator (`tensor_of`, `sums_of`). Sharing is safe because all ranks begin their common
    operations in the order of the programs, and `resihp.pipeline.checker` plays exactly these communicators. Only an
    edge (`edge_of`) never shares a communicator with a group of the same ranks, because back ends treat the two
    differently.
    """
    active = plan.layout.active
    groups = {WORLD_GROUP: GroupSpec(WORLD_GROUP, active)} if len(active) > 1 else {}
    for replica in plan.layout.replicas:
        for stage in replica.stages:
            if stage.tp > 1:
                name = tensor_of(stage.ranks, active)
                groups[name] = GroupSpec(name, stage.ranks, "tensor")
    edges: set[tuple[str, int, int]] = set()
    for instructions in programs.values():
        for instruction in instructions:
            if isinstance(instruction, Transmit):
                parcel = instruction.parcel
                edges |= {(parcel.direction, piece.sender, piece.receiver) for piece in parcel.pieces}
    for direction in ("forward", "backward"):
        for _, sender, receiver in sorted(edge for edge in edges if edge[0] == direction):
            name = edge_of(direction, sender, receiver)
            groups[name] = GroupSpec(name, (sender, receiver), "edge")
    for owners in sorted({bucket.owners for bucket in buckets if len(bucket.owners) > 1}):
        name = sums_of(owners, active)
        groups.setdefault(name, GroupSpec(name, owners))
    return tuple(groups.values())


WORLD_GROUP = "world"
"""Name of the communicator of all active ranks."""


def tensor_of(ranks: Sequence[int], active: Sequence[int]) -> str:
    """Return the name of the communicator of a stage's ranks.

    `ranks` is in tensor-parallel order, which determines each rank's part; `active` lists all active ranks.
    """
    return WORLD_GROUP if tuple(ranks) == tuple(active) else _group(ranks)


def sums_of(owners: Sequence[int], active: Sequence[int]) -> str:
    """Return the name of the communicator over which `owners`, in replica order, sum gradients.

    The order matters: sets that sum copies of one parameter add in the same order, at least on gloo, only if their
    owners are in the same order (`buckets`).
    """
    return WORLD_GROUP if len(owners) == len(active) else _group(owners)


def _group(ranks: Sequence[int]) -> str:
    return f"group/{'-'.join(map(str, ranks))}"


def edge_of(direction: str, sender: int, receiver: int) -> str:
    """Return the name of the communicator over which a rank sends activations ("forward") or gradients ("backward") to
    a rank of another stage.

    Each direction has its own communicator. A communicator is first in, first out, so an activation that is ready early
    would hold up the gradient behind it.
    """
    return f"{direction}/{sender}-{receiver}"


class _Events:
    """All instructions of a plan, each with its position in the linear order and the ranks that take part."""

    def __init__(self, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self._layout, self._buckets = plan.layout, buckets
        self._orders = orders_of(plan)
        self._timeline = play(plan, self._orders, layer_units(plan.layout))
        self._paths = plan.paths()
        self._at = virtual_stages(self._paths)
        self._parcels = _Parcels(plan)
        self._parts = cuts(plan.layout, ((bucket.owners, bucket.units) for bucket in buckets))
        self._through: dict[ChunkPlace, tuple[tuple[int, float], ...]] = {}
        """For each chunk: (lowest layer with complete gradients, time) of each of its parts. The part with the chunk's
        first layer is last."""
        self.events: list[tuple[tuple[float, int, int, int, int], Instruction, tuple[int, ...]]] = []

    def add_stages(self) -> None:
        """Add the computations of all stages, and the transfers of their results."""
        for d in range(len(self._layout.replicas)):
            for s, order in enumerate(self._orders[d]):
                completing = {p.chunk: position for position, p in enumerate(order) if p.kind != "F"}
                for position, primitive in enumerate(order):
                    self._add_computation(d, s, position, primitive, completing.get(primitive.chunk) == position)
                    if primitive.kind != "W":
                        self._add_transfer(d, s, position, primitive)

    def _add_computation(self, d: int, s: int, position: int, primitive: Primitive, completes: bool) -> None:
        """Add a primitive, in parts if it completes the gradients of its chunk and buckets wait for parts."""
        stage = self._layout.replicas[d].stages[s]
        first, last = stage.chunks[primitive.chunk]
        cut = self._parts.get((d, s, primitive.chunk)) if completes else None
        start = self._timeline.starts[d][s][position]
        for span in cut or ((first, last),):
            begins = start + last - span[1]  # a layer takes one unit
            entry = Compute(primitive, span if cut else None)
            self.events.append(((begins, COMPUTE, d, s, position), entry, stage.ranks))
        if completes:
            end = self._timeline.ends[d][s][position]
            self._through[d, s, primitive.chunk] = tuple((low, end - (low - first)) for low, _ in cut or ((first, 0),))

    def _add_transfer(self, d: int, s: int, position: int, primitive: Primitive) -> None:
        """Add the transfer of a primitive's result, if another stage needs it."""
        m, forward = primitive.micro_batch, primitive.kind == "F"
        path, v = self._paths[m], self._at[d, s, primitive.chunk, m]
        to = v + 1 if forward else v - 1
        if 0 <= to < len(path) and (path[to].replica, path[to].stage) != (d, s):
            boundary = min(v, to)
            key = (self._timeline.ends[d][s][position], TRANSMIT, m, boundary, int(not forward))
            self.events.append((key, *self._parcels.between(path[v], path[to], m, boundary, forward=forward)))

    def add_reductions(self) -> None:
        """Add the sums of all buckets. Call it after `add_stages`, which determines when gradients are complete."""
        for index, moment in enumerate(_moments(self._layout, self._buckets, self._through)):
            self.events.append(((moment, REDUCE, index, 0, 0), Reduce(index), self._buckets[index].owners))


def _moments(
    layout: Layout, buckets: Sequence[Bucket], through: Mapping[ChunkPlace, tuple[tuple[int, float], ...]]
) -> list[float]:
    """Return, for each bucket, the time at which its last owner has its gradients; 0 if no owner computes gradients."""
    places = {rank: (place.replica, place.stage) for rank, place in layout.places()}

    @functools.cache
    def ready(place: tuple[int, int], units: tuple[str, ...]) -> float:
        needed = {(*place, c): depth for c, depth in depths(layout, *place, units).items()}
        times = (next(t for low, t in through[chunk] if low <= needed[chunk]) for chunk in needed if chunk in through)
        return max(times, default=0.0)

    return [max((ready(places[owner], bucket.units) for owner in bucket.owners), default=0.0) for bucket in buckets]


class _Parcels:
    """Parcels and the ranks that take part in them; the pieces between two stages are computed once."""

    def __init__(self, plan: Plan) -> None:
        self._replicas, self._sequence_parallel = plan.layout.replicas, plan.sequence_parallel
        self._routes: dict[tuple[int, int, int, int, bool], tuple[tuple[TensorRange, ...], bool, tuple[int, ...]]] = {}

    def between(
        self, source: Stop, target: Stop, m: int, boundary: int, *, forward: bool
    ) -> tuple[Transmit, tuple[int, ...]]:
        key = (source.replica, source.stage, target.replica, target.stage, forward)
        if key not in self._routes:
            self._routes[key] = self._work_out(self._stage(source), self._stage(target), forward)
        pieces, gathered, ranks = self._routes[key]
        return Transmit(Parcel("forward" if forward else "backward", m, boundary, pieces, gathered)), ranks

    def _work_out(
        self, source: Stage, target: Stage, forward: bool
    ) -> tuple[tuple[TensorRange, ...], bool, tuple[int, ...]]:
        first, second = (source, target) if forward else (target, source)
        pieces = pieces_between(first.ranks, second.ranks, sequence_parallel=self._sequence_parallel)
        gathered = source.tp != target.tp and target.tp > 1 and not self._sequence_parallel
        return pieces if forward else mirrored(pieces), gathered, (*source.ranks, *target.ranks)

    def _stage(self, stop: Stop) -> Stage:
        return self._replicas[stop.replica].stages[stop.stage]


def _apart(layout: Layout, spec: ParameterSpec) -> bool:
    """Return whether a parameter that is not cut is held by groups of degrees that cut other parameters unevenly."""
    if spec.axis is not None or spec.partial:
        return False
    degrees = {stage.tp for stage in holders(layout, spec)}
    return math.lcm(*degrees) != max(degrees)


def _bucket(owners: tuple[int, ...], pieces: Sequence[Slice], specs: dict[str, ParameterSpec]) -> Bucket:
    units = dict.fromkeys(unit for piece in pieces for unit in specs[piece.name].units)
    return Bucket(owners, tuple(pieces), tuple(units))
