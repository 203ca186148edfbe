"""What moves when one layout follows another: the difference of two ownership maps, over those who survived. Pure.

Each slice of state that a rank needs and does not hold is sent to it once, by one surviving holder: bytes are minimal
by construction. Sources are chosen nearest first (same node before other nodes), then spread evenly. Nobody frees
anything by what is decided here: that is the commit of a transition (`resihp.controller.transition`).

Called by `resihp.executor.state.rank_state`, and by the scheduler for the price of a transition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout
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
    sent: dict[int, int] = defaultdict(int)
    found: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for spec in specs:
        owners = _owners(base.layout, spec, survivors)
        for stage in holders(layout, spec):
            for t, target in enumerate(stage.ranks):
                wanted = share(spec, t, stage.tp)
                points = {*ends(base.layout, spec), wanted.start, wanted.stop}
                for piece in cuts(points, spec):
                    if piece.start < wanted.start or piece.stop > wanted.stop:
                        continue
                    sources = [rank for rank, has in owners if has.start <= piece.start and piece.stop <= has.stop]
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
    for spec in specs:
        owners = _owners(base.layout, spec, set(base.survivors))
        for piece in cuts(ends(base.layout, spec), spec):
            if not any(has.start <= piece.start and piece.stop <= has.stop for _, has in owners):
                return _lost(base, spec, piece)
    return None


def bytes_of(move: Move, specs: Mapping[str, ParameterSpec], element: int = 4) -> int:
    """Bytes of a move, values and moments, for elements of `element` bytes."""
    return sum(TENSORS * element * size_of(specs[piece.name], piece) for piece in move.slices)


def _owners(layout: Layout, spec: ParameterSpec, survivors: Collection[int]) -> list[tuple[int, Slice]]:
    return [
        (rank, share(spec, t, stage.tp))
        for stage in holders(layout, spec)
        for t, rank in enumerate(stage.ranks)
        if rank in survivors
    ]


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
    return f"the state of {spec.name}{part} was lost with ranks {', '.join(map(str, gone))}"
