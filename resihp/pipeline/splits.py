"""The order in which a rank creates its communicators when they are split from one another, as in NCCL. Pure.

NCCL splits a communicator by colours: in one call of all its ranks, the ranks of each colour form a new communicator,
and ranks without a colour only take part in the call. A plan's communicators are split from the communicator of all
ranks, in as few rounds as possible; no rank is in two groups of a round. A grid needs 6 rounds: one for stages, two for
edges in each direction, one for sums. A group with ranks outside the communicator of all ranks (ranks that only give
state away) is created by itself, after all rounds. All ranks follow one list of groups, so that ranks cannot wait for
each other in a circle. Called by `resihp.executor.communicators`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from resihp.pipeline.program import WORLD_GROUP, GroupSpec


class Split(msgspec.Struct, frozen=True):
    """One step of a rank: create `group` as the part of all ranks that has `colour`, or by itself if `colour` is None.

    If `group` is None, the rank only takes part in the split of the other ranks, with a colour that no other rank has.
    """

    group: GroupSpec | None
    colour: int | None = None


def rounds(groups: Sequence[GroupSpec]) -> tuple[tuple[GroupSpec, ...], ...]:
    """Return the groups that each split creates at once.

    Each group is in the first round in which none of its ranks is in another group.
    """
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
    """Return the steps, in order, in which `rank` creates all groups of `groups` that contain it."""
    world = next((group for group in groups if group.name == WORLD_GROUP), None)
    inside = frozenset(() if world is None else world.ranks)
    splits = [Split(world)] if world is not None and rank in inside else []
    if rank in inside:
        for round_ in rounds([group for group in groups if group is not world and inside.issuperset(group.ranks)]):
            own = next(((c, group) for c, group in enumerate(round_) if rank in group.ranks), None)
            splits.append(Split(None, len(round_) + rank) if own is None else Split(own[1], own[0]))
    apart = (group for group in groups if rank in group.ranks and not inside.issuperset(group.ranks))
    return (*splits, *map(Split, apart))
