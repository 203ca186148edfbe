"""Each rank's program of an iteration: computation and communication in one order, derived from a plan. Pure.

The order is safe under NCCL's rules, not only under gloo's. There is one linear order of all communication of the plan:
the order in which it becomes possible when the plan is played on a virtual clock (`resihp.pipeline.timeline`). Every
rank begins its own part in that order, and begins everything that comes before X before it waits for X. Then the first
communication in the order that is not done can always be done, even if a rank carries out one at a time, and if sends
wait for their receives. `resihp.pipeline.checker` plays programs under those rules; a refused program is never used.
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
    """Elements [start * n / of, stop * n / of) of a tensor of n elements, sent from one rank to another."""

    sender: int
    receiver: int
    start: int
    stop: int
    of: int


class Parcel(msgspec.Struct, frozen=True):
    """A micro-batch's activations, or their gradients, in transit between two stages.

    `boundary` b lies between virtual stages b and b + 1 of the micro-batch's path; activations cross it forward,
    gradients backward. Between equal tensor-parallel degrees each rank sends the whole tensor to its counterpart;
    between unequal ones, or under sequence parallelism, it goes in N chunks, each sent once (the paper's section 7: N =
    max of both degrees, here their least common multiple, which is the same for powers of two; chunk c goes from sender
    c * U // N to receiver c * D // N, and its gradient back between the same two). `gathered`: the receivers then
    complete the tensor with an all-gather among themselves; otherwise each needs only the elements that it received.
    """

    direction: Literal["forward", "backward"]
    micro_batch: int
    boundary: int
    pieces: tuple[TensorRange, ...]
    gathered: bool


class Bucket(msgspec.Struct, frozen=True):
    """Gradients summed in one all-reduce over `owners`, once the backward passes of `units` are complete."""

    owners: tuple[int, ...]
    slices: tuple[Slice, ...]
    units: tuple[str, ...]


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Carry out a primitive, or only its `layers` (first and last), once its inputs from other stages have arrived.

    Only the pass that completes a chunk's gradients is cut into parts: from the chunk's last layer to its first, one
    part after the other with no other computation between (`resihp.pipeline.parts`).
    """

    primitive: Primitive
    layers: LayerSpan | None = None


class Transmit(msgspec.Struct, frozen=True, tag=True):
    """Begin to send, or to receive, this rank's pieces of a parcel, without waiting."""

    parcel: Parcel


class Reduce(msgspec.Struct, frozen=True, tag=True):
    """Begin to sum a bucket, given by its index, without waiting."""

    bucket: int


Instruction = Compute | Transmit | Reduce
Program = tuple[Instruction, ...]


Use = Literal["bulk", "tensor", "edge"]
"""Use of a communicator: large operations without an immediate waiter (sums, state), the collectives inside a stage's
computation, or transfers between two ranks of different stages."""


class GroupSpec(msgspec.Struct, frozen=True):
    """One communicator: its name within the epoch, its ranks in order (sender, receiver for an edge), and its use."""

    name: str
    ranks: tuple[int, ...]
    use: Use = "bulk"


def programs(plan: Plan, buckets: Sequence[Bucket] = ()) -> dict[int, Program]:
    """Return every active rank's program: its part of one list of all instructions, in the order in which they can
    begin.

    Computations are placed at their start, transfers when the tensor is ready, reductions when the last owner's
    gradients are complete; instructions of the same time have an order, too. The argument of the module's docstring
    applies, since every program is a part of the same list, in which everything comes after its dependencies.

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
    """Return the same programs without gradients, for an evaluation over the same communicators.

    They are parts of one list, too, in which everything comes after its dependencies: forwards depend on nothing else.
    """
    return {rank: tuple(entry for entry in program if _is_forward(entry)) for rank, program in programs.items()}


def _is_forward(entry: Instruction) -> bool:
    if isinstance(entry, Compute):
        return entry.primitive.kind == "F"
    return isinstance(entry, Transmit) and entry.parcel.direction == "forward"


TRANSMIT, REDUCE, COMPUTE = range(3)
"""Order of instructions of the same time: communication first, because other ranks may wait for it."""


def pieces_between(
    senders: Sequence[int], receivers: Sequence[int], *, sequence_parallel: bool
) -> tuple[TensorRange, ...]:
    """Return the pieces in which activations travel between two stages; `mirrored` gives the way back of their
    gradients."""
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
    """Return the sums over several ranks, in buckets of about `bucket_bytes`: one list that is equal on all ranks.

    The model's last parameters come first, since their gradients do. A bucket waits for the same chunks of each of its
    owners throughout, so that no gradient waits for a chunk that it does not come from. Slices stay whole; `element` is
    in bytes.

    Copies of a parameter that tensor parallelism does not cut are summed in several sets. On gloo the results are equal
    to the bit only if the copies stand at the same place in their buckets, because the order of a sum depends on it.
    Buckets of such sets are therefore laid out alike, unless the cuts of the others are uneven (degrees 3 and 2, say):
    then these parameters get buckets of their own.

    NCCL gives all ranks of a set the same bits (its issues 855 and 1497), but may add in another order in another set,
    which lies on other links: with three replicas or more such copies can then differ in the last bit, as they can in
    Megatron. Nothing relies on their being equal: a norm counts one of them, a checkpoint holds one, and a rank that
    needs the parameter takes any. Under sequence parallelism there is one set for all copies.
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

    There are as few as order and speed allow: ranks that do several things together, for example sum several buckets,
    have one communicator for all of them (`tensor_of`, `sums_of`). That is safe because all ranks begin their common
    operations in the one order that all programs have, and `resihp.pipeline.checker` plays exactly these communicators.
    Only an edge (`edge_of`) does not share its ranks' group: back ends treat the two differently.
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
    """Return the name of the communicator of a stage's ranks, whose order gives each rank's part; `active`: all
    ranks."""
    return WORLD_GROUP if tuple(ranks) == tuple(active) else _group(ranks)


def sums_of(owners: Sequence[int], active: Sequence[int]) -> str:
    """Return the name of the communicator over which `owners` sum, in the order of their replicas.

    Only with one order do sets that sum copies of one parameter add in the same order, on gloo at least (`buckets`).
    """
    return WORLD_GROUP if len(owners) == len(active) else _group(owners)


def _group(ranks: Sequence[int]) -> str:
    return f"group/{'-'.join(map(str, ranks))}"


def edge_of(direction: str, sender: int, receiver: int) -> str:
    """Return the name of the communicator over which a rank sends activations ("forward") or gradients to another
    stage.

    The directions have separate communicators: a communicator is first in, first out, and an activation that a rank is
    ready for early would hold up the gradient behind it.
    """
    return f"{direction}/{sender}-{receiver}"


class _Events:
    """All instructions of a plan, each with its place in the linear order and the ranks that take part in it."""

    def __init__(self, plan: Plan, buckets: Sequence[Bucket]) -> None:
        self._layout, self._buckets = plan.layout, buckets
        self._orders = orders_of(plan)
        self._timeline = play(plan, self._orders, layer_units(plan.layout))
        self._paths = plan.paths()
        self._at = virtual_stages(self._paths)
        self._parcels = _Parcels(plan)
        self._parts = cuts(plan.layout, ((bucket.owners, bucket.units) for bucket in buckets))
        self._through: dict[ChunkPlace, tuple[tuple[int, float], ...]] = {}
        """For each part of a chunk: the lowest layer whose gradients are complete, and when. The chunk's first layer is
        last."""
        self.events: list[tuple[tuple[float, int, int, int, int], Instruction, tuple[int, ...]]] = []

    def add_stages(self) -> None:
        """Add the computations of all stages, and the transfers that follow them."""
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
        """Add the sums of all buckets. Called after the computations, which say when gradients are complete."""
        for index, moment in enumerate(_moments(self._layout, self._buckets, self._through)):
            self.events.append(((moment, REDUCE, index, 0, 0), Reduce(index), self._buckets[index].owners))


def _moments(
    layout: Layout, buckets: Sequence[Bucket], through: Mapping[ChunkPlace, tuple[tuple[int, float], ...]]
) -> list[float]:
    """Return when the last owner of each bucket has its gradients; 0 if there is none to compute."""
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
    """Return whether groups that cut other parameters into unequal widths hold this uncut parameter."""
    if spec.axis is not None or spec.partial:
        return False
    degrees = {stage.tp for stage in holders(layout, spec)}
    return math.lcm(*degrees) != max(degrees)


def _bucket(owners: tuple[int, ...], pieces: Sequence[Slice], specs: dict[str, ParameterSpec]) -> Bucket:
    units = dict.fromkeys(unit for piece in pieces for unit in specs[piece.name].units)
    return Bucket(owners, tuple(pieces), tuple(units))
