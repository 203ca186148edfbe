"""The order in which a rank makes its communicators when they are split from one another, as NCCL's are. Pure.

NCCL splits a communicator by colours: one call of all its ranks makes a communicator of each colour, and ranks without
a colour take part all the same. So a plan's communicators are made from that of all ranks, in as few rounds as there
can be with no rank in two groups of a round: 6 for a grid, one of stages, two of edges for each direction, one of sums.
A group with ranks outside (they only give state away) is made by itself, after all rounds. Every rank goes through its
part of one list, which is equal on all, so that ranks cannot wait in a circle. Called by
`resihp.executor.communicators`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resihp.pipeline.program import WORLD_GROUP, GroupSpec


class Split(msgspec.Struct, frozen=True):
    """One step of a rank: make `group` as the part of the world that has this colour, or by itself if there is no
    colour.

    Without a group the rank takes part in the split of the others, with a colour that no other rank has.
    """

    group: GroupSpec | None
    colour: int | None = None


def rounds(groups: Sequence[GroupSpec]) -> tuple[tuple[GroupSpec, ...], ...]:
    """Return the groups that each split can make at once: every group is in the first round in which its ranks are
    free."""
    groups_of_round: list[list[GroupSpec]] = []
    ranks_of_round: list[set[int]] = []
    for group in groups:
        r = next((r for r, ranks in enumerate(ranks_of_round) if ranks.isdisjoint(group.ranks)), len(groups_of_round))
        if r == len(groups_of_round):
            groups_of_round.append([])
            ranks_of_round.append(set())
        groups_of_round[r].append(group)
        ranks_of_round[r].update(group.ranks)
    return tuple(map(tuple, groups_of_round))


def steps(groups: Sequence[GroupSpec], rank: int) -> tuple[Split, ...]:
    """Return the steps of `rank`, in order, that make all of `groups` to which it belongs."""
    world = next((group for group in groups if group.name == WORLD_GROUP), None)
    inside = frozenset(() if world is None else world.ranks)
    splits = [Split(world)] if world is not None and rank in inside else []
    if rank in inside:
        for round_ in rounds([group for group in groups if group is not world and inside.issuperset(group.ranks)]):
            own = next(((c, group) for c, group in enumerate(round_) if rank in group.ranks), None)
            splits.append(Split(None, len(round_) + rank) if own is None else Split(own[1], own[0]))
    apart = (group for group in groups if rank in group.ranks and not inside.issuperset(group.ranks))
    return (*splits, *map(Split, apart))
