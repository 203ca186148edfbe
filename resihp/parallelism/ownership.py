"""The owners of each slice of each parameter, derived from a layout. Pure: no torch, no clock, no communication.

A parameter's name does not depend on the layout. The parameter is cut along its tensor-parallel axis wherever the share
of any holder ends, so that each piece (a `Slice`) has one set of owners. Gradient synchronisation, norms, checkpoints
and state transfers all use these functions; this module carries out none of them.

Called by `resihp.executor`, and by `resihp.parallelism.transfers`, which computes the slices to move for the executor
and for the scheduler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Stage


class ParameterSpec(msgspec.Struct, frozen=True):
    """One parameter of the whole model.

    `unit` names the part of the model that contains the parameter, and so determines the stage that holds it:
    "embedding", "layer.7", "final" or "head". `shape` is the global shape. `axis` is the axis that tensor parallelism
    cuts; None if every rank of the group holds the whole parameter. `parts` is the number of equally large blocks along
    `axis` that are cut separately: 2 for a gated MLP's fused [gate; up], of which rank t holds [gate_t; up_t]. A fused
    QKV with rows grouped by query group is one part.

    `tied` names a second unit that uses the same parameter: "head" for an embedding tied to the head. Every stage that
    holds either unit has a copy, and the gradients of the copies add up. `partial` marks a parameter that each rank of
    a group holds whole, although only a part of the activations passes it on each rank: a part of the sequence (norms
    and some biases under sequence parallelism) or a part of the heads (norms of queries and keys). Gradients of a
    partial parameter add up over the group, too.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    axis: int | None = None
    parts: int = 1
    tied: str | None = None
    partial: bool = False

    @property
    def units(self) -> tuple[str, ...]:
        return (self.unit,) if self.tied is None else (self.unit, self.tied)

    @property
    def elements(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Length of `axis` within one part; 1 for a parameter that is never cut."""
        return 1 if self.axis is None else self.shape[self.axis] // self.parts


class Slice(msgspec.Struct, frozen=True, order=True):
    """Interval [start, stop) of a parameter along its tensor-parallel axis, in each of the parameter's parts.

    A parameter that tensor parallelism does not cut has the single slice [0, 1).
    """

    name: str
    start: int
    stop: int


class OwnerSet(msgspec.Struct, frozen=True):
    """Ranks, in replica order, that hold copies of the same slices and sum the gradients of these slices.

    `owners` has one rank of each replica. Exceptions: one rank for each stage that holds a tied parameter, and whole
    groups for a partial parameter.
    """

    owners: tuple[int, ...]
    slices: tuple[Slice, ...]


def share(spec: ParameterSpec, t: int, tp: int) -> Slice:
    """Return the slice of a parameter that rank `t` of a tensor-parallel group of `tp` ranks holds.

    Raises LayoutError if the parameter cannot be cut into `tp` equal shares.
    """
    if spec.axis is None:
        return Slice(spec.name, 0, 1)
    if spec.shape[spec.axis] % spec.parts or spec.extent % tp:
        raise LayoutError(
            f"parameter {spec.name}: {spec.parts} x {spec.extent} rows cannot be cut for tensor-parallel degree {tp}"
        )
    width = spec.extent // tp
    return Slice(spec.name, t * width, (t + 1) * width)


def holder(layout: Layout, replica: int, unit: str) -> Stage:
    """Return the stage of a replica that holds `unit`. Raises LayoutError if no stage of the replica has the layer."""
    stages = layout.replicas[replica].stages
    if unit == "embedding":
        return stages[layout.replicas[replica].virtual_stages[0][0]]
    if unit in ("final", "head"):
        return stages[layout.replicas[replica].virtual_stages[-1][0]]
    layer = int(unit.removeprefix("layer."))
    for stage in stages:
        if any(first <= layer <= last for first, last in stage.chunks):
            return stage
    raise LayoutError(f"replica {replica}: no stage holds layer {layer}")


def holders(layout: Layout, spec: ParameterSpec) -> tuple[Stage, ...]:
    """Return every stage that holds a copy of a parameter, in replica order.

    Two stages of a replica may hold a tied parameter. Stages without ranks are left out.
    """
    stages: list[Stage] = []
    for replica in range(len(layout.replicas)):
        own = [holder(layout, replica, unit) for unit in spec.units]
        stages += [stage for stage in (own[:1] if own[0] == own[-1] else own) if stage.ranks]
    return tuple(stages)


def cuts(points: Iterable[int], spec: ParameterSpec) -> tuple[Slice, ...]:
    """Return the slices into which `points` along the tensor-parallel axis cut a parameter."""
    bounds = sorted({0, spec.extent, *points})
    return tuple(Slice(spec.name, start, stop) for start, stop in itertools.pairwise(bounds))


def ends(stages: Iterable[Stage], spec: ParameterSpec) -> set[int]:
    """Return the points along a parameter's tensor-parallel axis at which the share of a rank of `stages` ends."""
    return {share(spec, t, tp).stop for tp in {stage.tp for stage in stages} for t in range(tp)}


def size_of(spec: ParameterSpec, piece: Slice) -> int:
    """Return the number of elements of a slice in one tensor (the value, or one moment)."""
    return spec.elements * (piece.stop - piece.start) // spec.extent


def owned(layout: Layout, specs: Sequence[ParameterSpec]) -> dict[int, tuple[Slice, ...]]:
    """Return the slices that each active rank holds, in the order of `specs`.

    Each parameter is cut at every point at which the share of any rank ends.
    """
    slices_of: dict[int, list[Slice]] = {rank: [] for rank in layout.active}
    for spec in specs:
        stages = holders(layout, spec)
        pieces = cuts(ends(stages, spec), spec)
        for stage in stages:
            for t, rank in enumerate(stage.ranks):
                mine = share(spec, t, stage.tp)
                slices_of[rank] += [cut for cut in pieces if mine.start <= cut.start and cut.stop <= mine.stop]
    return {rank: tuple(slices) for rank, slices in slices_of.items()}


def owner_sets(layout: Layout, specs: Sequence[ParameterSpec]) -> tuple[OwnerSet, ...]:
    """Return the groups for gradient synchronisation, in one order that is equal on all ranks.

    Each slice of a rank is in at least one set, and the sum over any set with that slice is the whole gradient. The
    ranks of a tensor-parallel group have equal gradients of a parameter that is not cut, so each rank sums its gradient
    with its counterparts in other replicas, and every replica counts once. With unequal degrees, a rank of a smaller
    group is in several sets with the same slice: it must contribute its *unreduced* gradient to each set, and may keep
    the result of any set, since the results are equal.
    """
    sets: dict[tuple[int, ...], list[Slice]] = {}
    for spec in specs:
        for owners, cut in _owners(layout, spec):
            sets.setdefault(owners, []).append(cut)
    return tuple(OwnerSet(owners, tuple(slices)) for owners, slices in sets.items())


def primary(owners: tuple[int, ...]) -> int:
    """Return the rank that represents an owner set in sums over the model and in checkpoints: the rank of the first
    replica.
    """
    return owners[0]


def counted(layout: Layout, specs: Sequence[ParameterSpec]) -> dict[int, tuple[Slice, ...]]:
    """Return the slices that each active rank contributes to a sum over the whole model.

    Every slice is contributed by one rank, however many ranks hold a copy.
    """
    turns: dict[int, list[Slice]] = {rank: [] for rank in layout.active}
    for spec in specs:
        counted_slices: set[Slice] = set()
        for owners, cut in _owners(layout, spec):
            if cut not in counted_slices:
                counted_slices.add(cut)
                turns[primary(owners)].append(cut)
    return {rank: tuple(slices) for rank, slices in turns.items()}


def _owners(layout: Layout, spec: ParameterSpec) -> Iterator[tuple[tuple[int, ...], Slice]]:
    stages = holders(layout, spec)
    if spec.partial:
        yield tuple(rank for stage in stages for rank in stage.ranks), Slice(spec.name, 0, spec.extent)
    elif spec.axis is None:
        # Scale each group to the interval from 0 to 1: the ranks of all groups at one point are counterparts.
        points = sorted({Fraction(t, stage.tp) for stage in stages for t in range(stage.tp)})
        for point in points:
            yield tuple(stage.ranks[int(point * stage.tp)] for stage in stages), Slice(spec.name, 0, 1)
    else:
        for cut in cuts(ends(stages, spec), spec):
            yield tuple(stage.ranks[cut.start * stage.tp // spec.extent] for stage in stages), cut
