"""State transfers from one layout to the next: the difference of two ownership maps, with survivors as sources. Pure.

One surviving holder sends each slice of state to each rank that needs it and does not hold it. No slice is sent twice
to a rank, so the bytes are minimal by construction. Sources on the target's node come first; among equally near
sources, the one that sends the fewest elements so far is chosen. This module never frees state: old state is freed when
the transition is committed (`resihp.controller.transition`).

Called by `resihp.executor.state.rank_state`, and by the scheduler for the price of a transition.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Stage
from resihp.parallelism.ownership import ParameterSpec, Slice, cuts, ends, holders, share, size_of

STATE_TENSORS = 3
"""Tensors of a parameter's state: its value and Adam's two moments."""


class Move(msgspec.Struct, frozen=True):
    """One transfer: `source` sends the state of `slices` to `target`, in the order of `slices`."""

    source: int
    target: int
    slices: tuple[Slice, ...]


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """Location of the state before a transition: `layout` took effect with `epoch`, and `survivors` are its live ranks.

    A rank of `survivors` holds the slices that `layout` assigns to it.
    """

    epoch: int
    layout: Layout
    survivors: tuple[int, ...]


def moves(base: Base, layout: Layout, specs: Sequence[ParameterSpec], nodes: Mapping[int, str]) -> tuple[Move, ...]:
    """Return the transfers that bring every active rank of `layout` the state that it lacks, in one order that is equal
    on all ranks.

    `nodes` maps each rank to its node. Raises LayoutError, naming the first slice that no survivor holds.
    """
    survivors = set(base.survivors)
    stages_of, changed = _Stages(base.layout), _Changed(base, layout)
    sent: dict[int, int] = defaultdict(int)
    slices_of: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for spec in specs:
        if not (changed_stages := changed.of(spec)):
            continue
        stages = stages_of.of(spec)
        owners = list(_owners(stages, spec, survivors))
        points = ends(stages, spec)
        sources_of: dict[Slice, list[int]] = {}
        for stage in changed_stages:
            for t, target in enumerate(stage.ranks):
                wanted = share(spec, t, stage.tp)
                for piece in cuts({*points, wanted.start, wanted.stop}, spec):
                    if piece.start < wanted.start or piece.stop > wanted.stop:
                        continue
                    if (sources := sources_of.get(piece)) is None:
                        sources = sources_of[piece] = [
                            rank for rank, has in owners if has.start <= piece.start and piece.stop <= has.stop
                        ]
                    if target in sources:
                        continue
                    if not sources:
                        raise LayoutError(_lost(base, spec, piece))
                    source = min(sources, key=lambda rank: (nodes[rank] != nodes[target], sent[rank], rank))
                    sent[source] += size_of(spec, piece)
                    slices_of[source, target].append(piece)
    return tuple(Move(source, target, tuple(slices)) for (source, target), slices in sorted(slices_of.items()))


def missing(base: Base, specs: Sequence[ParameterSpec]) -> str | None:
    """Return a message about the first slice that no survivor holds, or None if the survivors hold all state."""
    for spec, piece, sources in _sources(base, specs):
        if next(sources, None) is None:
            return _lost(base, spec, piece)
    return None


def sole_holders(base: Base, specs: Sequence[ParameterSpec]) -> dict[int, frozenset[str]]:
    """Return each survivor that holds the only copy of some state, in ascending order, with the units of that state.

    A unit is for example "layer.7". If one of these ranks were lost, `missing` would report it.
    """
    units_of: dict[int, set[str]] = defaultdict(set)
    for spec, _, sources in _sources(base, specs):
        holders_of_piece = tuple(itertools.islice(sources, 2))
        if len(holders_of_piece) == 1:
            units_of[holders_of_piece[0]].update(spec.units)
    return {rank: frozenset(units_of[rank]) for rank in sorted(units_of)}


def _sources(base: Base, specs: Sequence[ParameterSpec]) -> Iterator[tuple[ParameterSpec, Slice, Iterator[int]]]:
    """Yield every slice of state with its parameter and the survivors that hold all of the slice."""
    survivors, stages_of = set(base.survivors), _Stages(base.layout)
    for spec in specs:
        stages = stages_of.of(spec)
        for piece in cuts(ends(stages, spec), spec):
            owners = _owners(stages, spec, survivors)
            yield spec, piece, (rank for rank, has in owners if has.start <= piece.start and piece.stop <= has.stop)


def bytes_of(move: Move, specs: Mapping[str, ParameterSpec], element: int = 4) -> int:
    """Return the bytes of a move, counting value and moments, with `element` bytes for each element."""
    return sum(STATE_TENSORS * element * size_of(specs[piece.name], piece) for piece in move.slices)


class _Stages:
    """Stages of a layout that hold a parameter, cached by the units of the parameter."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: dict[tuple[str, ...], tuple[Stage, ...]] = {}

    def of(self, spec: ParameterSpec) -> tuple[Stage, ...]:
        if (stages := self._found.get(spec.units)) is None:
            stages = self._found[spec.units] = holders(self._layout, spec)
        return stages


class _Changed:
    """Stages of a new layout that may lack a parameter.

    A stage is left out if it held the parameter before the transition and all of its ranks survive.
    """

    def __init__(self, base: Base, layout: Layout) -> None:
        self._survivors = set(base.survivors)
        self._before, self._after = _Stages(base.layout), _Stages(layout)
        self._found: dict[tuple[str, ...], tuple[Stage, ...]] = {}

    def of(self, spec: ParameterSpec) -> tuple[Stage, ...]:
        if (stages := self._found.get(spec.units)) is None:
            same = {stage for stage in self._before.of(spec) if self._survivors.issuperset(stage.ranks)}
            stages = tuple(stage for stage in self._after.of(spec) if stage not in same)
            self._found[spec.units] = stages
        return stages


def _owners(stages: Sequence[Stage], spec: ParameterSpec, survivors: Collection[int]) -> Iterator[tuple[int, Slice]]:
    for stage in stages:
        for t, rank in enumerate(stage.ranks):
            if rank in survivors:
                yield rank, share(spec, t, stage.tp)


def _lost(base: Base, spec: ParameterSpec, piece: Slice) -> str:
    lost = sorted(
        rank
        for stage in holders(base.layout, spec)
        for t, rank in enumerate(stage.ranks)
        if rank not in base.survivors
        and share(spec, t, stage.tp).start < piece.stop
        and piece.start < share(spec, t, stage.tp).stop
    )
    part = "" if spec.extent == 1 else f", rows {piece.start} to {piece.stop - 1}"
    return (
        f"the state of {spec.name}{part} was lost with rank{'' if len(lost) == 1 else 's'} {', '.join(map(str, lost))}"
    )
