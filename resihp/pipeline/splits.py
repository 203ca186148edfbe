"""In which order a rank makes its communicators where one is split from another, as NCCL's are. Pure.

NCCL splits a communicator by colours: one call of all its ranks makes a communicator of each colour, and whoever has
none takes part all the same. So a plan's communicators are made from that of all ranks, in as few rounds as there can
be with no rank in two groups of a round: 6 for a grid, one of stages, two of edges for each direction, one of sums.
What has ranks outside (they only give state away) is made by itself, after all rounds. Every rank goes through its part
of one list, which is equal on all: nobody waits in a circle. Called by `resihp.executor.communicators`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resihp.pipeline.program import WORLD, GroupSpec


class Split(msgspec.Struct, frozen=True):
    """One step of a rank: make `group`, as the part of the world that has this colour, or by itself, without one.

    Without a group: the others split, and the rank takes part in that, with a colour that nobody else has.
    """

    group: GroupSpec | None
    colour: int | None = None


def rounds(groups: Sequence[GroupSpec]) -> tuple[tuple[GroupSpec, ...], ...]:
    """What can be made at once, by one split: every group comes in the first round in which its ranks are free."""
    found: list[list[GroupSpec]] = []
    taken: list[set[int]] = []
    for group in groups:
        r = next((r for r, ranks in enumerate(taken) if ranks.isdisjoint(group.ranks)), len(found))
        if r == len(found):
            found.append([])
            taken.append(set())
        found[r].append(group)
        taken[r].update(group.ranks)
    return tuple(map(tuple, found))


def steps(groups: Sequence[GroupSpec], rank: int) -> tuple[Split, ...]:
    """What `rank` does, one after the other, to have all of `groups` that it belongs to."""
    world = next((group for group in groups if group.name == WORLD), None)
    inside = frozenset(() if world is None else world.ranks)
    found = [Split(world)] if world is not None and rank in inside else []
    if rank in inside:
        for round_ in rounds([group for group in groups if group is not world and inside.issuperset(group.ranks)]):
            own = next(((c, group) for c, group in enumerate(round_) if rank in group.ranks), None)
            found.append(Split(None, len(round_) + rank) if own is None else Split(own[1], own[0]))
    apart = (group for group in groups if rank in group.ranks and not inside.issuperset(group.ranks))
    return (*found, *map(Split, apart))
