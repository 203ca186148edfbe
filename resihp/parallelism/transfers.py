"""What moves when one layout follows another: the difference of two ownership maps, over those who survived. Pure.

Each slice of state that a rank needs and does not hold is sent to it once, by one surviving holder: bytes are minimal
by construction. Sources are chosen nearest first (same node before other nodes), then spread evenly. Nobody frees
anything by what is decided here: that is the commit of a transition (`resihp.controller.transition`).

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

TENSORS = 3
"""Of a parameter's state: its value and Adam's two moments."""


class Move(msgspec.Struct, frozen=True):
    """`source` sends the state of `slices` to `target`; slices are in the order in which they travel."""

    source: int
    target: int
    slices: tuple[Slice, ...]


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """Where the state is: `layout` says who held what when epoch `epoch` took effect, `survivors` who still does."""

    epoch: int
    layout: Layout
    survivors: tuple[int, ...]


def moves(base: Base, layout: Layout, specs: Sequence[ParameterSpec], nodes: Mapping[int, str]) -> tuple[Move, ...]:
    """Transfers that bring every active rank of `layout` what it lacks, in one order that is equal on all ranks.

    `nodes` names each rank's node. Raises LayoutError naming the first slice that no survivor holds.
    """
    survivors = set(base.survivors)
    stages_of, changed = _Stages(base.layout), _Changed(base, layout)
    sent: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for spec in specs:
        if not (changed_stages := changed.of(spec)):
            continue
        stages = stages_of.of(spec)
        owners = list(_owners(stages, spec, survivors))
        before = ends(stages, spec)
        having: dict[Slice, list[int]] = {}
        for stage in changed_stages:
            for t, target in enumerate(stage.ranks):
                wanted = share(spec, t, stage.tp)
                for piece in cuts({*before, wanted.start, wanted.stop}, spec):
                    if piece.start < wanted.start or piece.stop > wanted.stop:
                        continue
                    if (sources := having.get(piece)) is None:
                        sources = having[piece] = [
                            rank for rank, has in owners if has.start <= piece.start and piece.stop <= has.stop
                        ]
                    if target in sources:
                        continue
                    if not sources:
                        raise LayoutError(_lost(base, spec, piece))
                    source = min(sources, key=lambda rank: (nodes[rank] != nodes[target], sent[rank], rank))
                    sent[source] += size_of(spec, piece)
                    found[source, target].append(piece)
    return tuple(Move(source, target, tuple(slices)) for (source, target), slices in sorted(found.items()))


def missing(base: Base, specs: Sequence[ParameterSpec]) -> str | None:
    """Why the state cannot be put together from what survived, or None when it can."""
    for spec, piece, sources in _sources(base, specs):
        if next(sources, None) is None:
            return _lost(base, spec, piece)
    return None


def sole_holders(base: Base, specs: Sequence[ParameterSpec]) -> dict[int, frozenset[str]]:
    """Ranks that hold what no other survivor does, ascending, each with the units of it ("layer.7"): were one of them
    lost, `missing` would tell so."""
    found: dict[int, set[str]] = defaultdict(set)
    for spec, _, sources in _sources(base, specs):
        some = tuple(itertools.islice(sources, 2))
        if len(some) == 1:
            found[some[0]].update(spec.units)
    return {rank: frozenset(found[rank]) for rank in sorted(found)}


def _sources(base: Base, specs: Sequence[ParameterSpec]) -> Iterator[tuple[ParameterSpec, Slice, Iterator[int]]]:
    """Every piece of state, with the survivors that hold all of it."""
    survivors, stages_of = set(base.survivors), _Stages(base.layout)
    for spec in specs:
        stages = stages_of.of(spec)
        for piece in cuts(ends(stages, spec), spec):
            owners = _owners(stages, spec, survivors)
            yield spec, piece, (rank for rank, has in owners if has.start <= piece.start and piece.stop <= has.stop)


def bytes_of(move: Move, specs: Mapping[str, ParameterSpec], element: int = 4) -> int:
    """Bytes of a move, values and moments, for elements of `element` bytes."""
    return sum(TENSORS * element * size_of(specs[piece.name], piece) for piece in move.slices)


class _Stages:
    """Of a layout: who holds each parameter. Found once for all of a unit's."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: dict[tuple[str, ...], tuple[Stage, ...]] = {}

    def of(self, spec: ParameterSpec) -> tuple[Stage, ...]:
        if (stages := self._found.get(spec.units)) is None:
            stages = self._found[spec.units] = holders(self._layout, spec)
        return stages


class _Changed:
    """Stages of a new layout that may lack a parameter: not those that hold it already, all of whose ranks survive."""

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
    gone = sorted(
        rank
        for stage in holders(base.layout, spec)
        for t, rank in enumerate(stage.ranks)
        if rank not in base.survivors
        and share(spec, t, stage.tp).start < piece.stop
        and piece.start < share(spec, t, stage.tp).stop
    )
    part = "" if spec.extent == 1 else f", rows {piece.start} to {piece.stop - 1}"
    return (
        f"the state of {spec.name}{part} was lost with rank{'' if len(gone) == 1 else 's'} {', '.join(map(str, gone))}"
    )
