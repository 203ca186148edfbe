"""Who holds which piece of which parameter, derived from a layout. Pure: no torch, no clock, no communication.

A parameter is named independently of any layout and cut along its tensor-parallel axis wherever some holder's share
ends, so that each piece (`Slice`) has one set of owners. Gradient synchronisation, norms, checkpoints and state
transfers are all read off these functions; none of them is decided here.

Called by `resihp.executor`, and by `resihp.parallelism.transfers`, which answers "what moves?" for it and for the
scheduler.
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

    `unit` tells which stage holds it: "embedding", "layer.7", "final" or "head". `shape` is the global shape. `axis`
    is the axis that tensor parallelism cuts, None when every rank of the group holds all of it. `parts` says how
    many blocks of equal size lie one after the other along `axis`, each cut separately: 2 for a gated MLP's fused
    [gate; up], of which rank t holds [gate_t; up_t]. A fused QKV with rows grouped by query group is one part.

    `tied` is a second unit that uses the same parameter: "head" for an embedding tied to it. Every stage that holds
    either unit has a copy, and their gradients add up. `partial` is true of parameters that each rank of a group
    holds whole but sees only a part pass: of the sequence (norms and some biases under sequence parallelism), or of the
    heads (norms of queries and keys). Then gradients add up over the group, too.
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
        """Of the whole parameter."""
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Length of `axis` within one part; 1 for a parameter that is never cut."""
        return 1 if self.axis is None else self.shape[self.axis] // self.parts


class Slice(msgspec.Struct, frozen=True, order=True):
    """Interval [start, stop) of a parameter along its tensor-parallel axis, inside each of its parts.

    A parameter that is never cut has the single slice [0, 1).
    """

    name: str
    start: int
    stop: int


class OwnerSet(msgspec.Struct, frozen=True):
    """Ranks in replica order that hold copies of the same slices and sum their gradients.

    One of each replica, unless a parameter is tied (one for each stage that holds it) or partial (whole groups).
    """

    owners: tuple[int, ...]
    slices: tuple[Slice, ...]


def share(spec: ParameterSpec, t: int, tp: int) -> Slice:
    """What index `t` of a tensor-parallel group of `tp` ranks holds of a parameter.

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
    """The stage of a replica that holds `unit`. Raises LayoutError when the replica lacks that layer."""
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
    """Every stage that holds a copy of a parameter, in replica order; a tied one may have two in each replica.

    A stage without ranks holds nothing.
    """
    found: list[Stage] = []
    for replica in range(len(layout.replicas)):
        own = [holder(layout, replica, unit) for unit in spec.units]
        found += [stage for stage in (own[:1] if own[0] == own[-1] else own) if stage.ranks]
    return tuple(found)


def cuts(points: Iterable[int], spec: ParameterSpec) -> tuple[Slice, ...]:
    """The pieces of a parameter between these points (and its ends)."""
    bounds = sorted({0, spec.extent, *points})
    return tuple(Slice(spec.name, start, stop) for start, stop in itertools.pairwise(bounds))


def ends(stages: Iterable[Stage], spec: ParameterSpec) -> set[int]:
    """Where the share of a parameter ends that one of its holders has."""
    return {share(spec, t, tp).stop for tp in {stage.tp for stage in stages} for t in range(tp)}


def size_of(spec: ParameterSpec, piece: Slice) -> int:
    """Elements of one tensor of a slice (value or one moment)."""
    return spec.elements * (piece.stop - piece.start) // spec.extent


def owned(layout: Layout, specs: Sequence[ParameterSpec]) -> dict[int, tuple[Slice, ...]]:
    """Each active rank's slices, in the order of `specs`, at the finest cut in use for each parameter."""
    held: dict[int, list[Slice]] = {rank: [] for rank in layout.active}
    for spec in specs:
        stages = holders(layout, spec)
        pieces = cuts(ends(stages, spec), spec)
        for stage in stages:
            for t, rank in enumerate(stage.ranks):
                mine = share(spec, t, stage.tp)
                held[rank] += [cut for cut in pieces if mine.start <= cut.start and cut.stop <= mine.stop]
    return {rank: tuple(slices) for rank, slices in held.items()}


def owner_sets(layout: Layout, specs: Sequence[ParameterSpec]) -> tuple[OwnerSet, ...]:
    """Groups for gradient synchronisation, in one order that is equal on all ranks.

    Each rank's slice is in at least one set, and the sum over any set that holds it is the whole gradient. Ranks of
    a tensor-parallel group have equal gradients of a parameter that is not cut, so each sums its own with its
    counterparts' and every replica counts once. With unequal degrees, the rank of a smaller group is in several sets
    with the same slice; it must offer its *unreduced* gradient to each, and any of the (equal) results may be kept.
    """
    sets: dict[tuple[int, ...], list[Slice]] = {}
    for spec in specs:
        for owners, cut in _owners(layout, spec):
            sets.setdefault(owners, []).append(cut)
    return tuple(OwnerSet(owners, tuple(slices)) for owners, slices in sets.items())


def primary(owners: tuple[int, ...]) -> int:
    """The rank of an owner set that speaks for it in sums over the model and in checkpoints: the first replica's."""
    return owners[0]


def counted(layout: Layout, specs: Sequence[ParameterSpec]) -> dict[int, tuple[Slice, ...]]:
    """What each active rank contributes to sums over the whole model: every slice once, whoever else has a copy."""
    turns: dict[int, list[Slice]] = {rank: [] for rank in layout.active}
    for spec in specs:
        seen: set[Slice] = set()
        for owners, cut in _owners(layout, spec):
            if cut not in seen:
                seen.add(cut)
                turns[primary(owners)].append(cut)
    return {rank: tuple(slices) for rank, slices in turns.items()}


def _owners(layout: Layout, spec: ParameterSpec) -> Iterator[tuple[tuple[int, ...], Slice]]:
    stages = holders(layout, spec)
    if spec.partial:
        yield tuple(rank for stage in stages for rank in stage.ranks), Slice(spec.name, 0, spec.extent)
    elif spec.axis is None:
        # Walk all groups side by side, from 0 to 1: at each point, the indices that stand there are counterparts.
        points = sorted({Fraction(t, stage.tp) for stage in stages for t in range(stage.tp)})
        for point in points:
            yield tuple(stage.ranks[int(point * stage.tp)] for stage in stages), Slice(spec.name, 0, 1)
    else:
        for cut in cuts(ends(stages, spec), spec):
            yield tuple(stage.ranks[cut.start * stage.tp // spec.extent] for stage in stages), cut
