"""Communicators made by splits: every rank takes part in each, and no rank waits in a circle."""

from __future__ import annotations

import itertools
import random

import pytest

from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.program import GroupSpec, buckets, memberships, programs
from resihp.pipeline.splits import Split, rounds, steps
from tests.resihp.pipeline.plans import random_plan


def made(layout: Layout) -> tuple[GroupSpec, ...]:
    """A plan's communicators; two micro-batches a replica make the same ones as many."""
    model = ModelSpec(layers=8, hidden=64, heads=8, kv_groups=8, ffn_hidden=256, vocab=256, sequence=64)
    plan = Plan(epoch=1, layout=layout, assignment=spread(2 * len(layout.replicas), len(layout.replicas)))
    cut = buckets(layout, outline(model))
    return memberships(plan, programs(plan, cut), cut)


@pytest.mark.parametrize(
    ("degrees", "total", "each", "splits"),
    [((8, 4, 8), 449, {5, 7}, 6), ((2, 2, 2), 17, {5}, 4), ((1, 1, 8), 1, {1}, 0), ((8, 1, 1), 1, {1}, 0)],
)
def test_a_grid_has_few_communicators_and_makes_them_in_few_splits(
    degrees: tuple[int, int, int], total: int, each: set[int], splits: int
) -> None:
    tp, pp, dp = degrees
    layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=8)
    groups = made(layout)
    assert len(groups) == total
    assert {sum(rank in group.ranks for group in groups) for rank in layout.active} == each
    assert len(rounds(groups[1:])) == splits


def carried_out(groups: tuple[GroupSpec, ...], ranks: range) -> int:
    """Plays the steps of all ranks, each in its order, a split being one of all the world; how many groups came out."""
    lists = {rank: list(steps(groups, rank)) for rank in ranks}
    world = groups[0].ranks
    done = 0
    while any(lists.values()):
        heads = {rank: todo[0] for rank, todo in lists.items() if todo}
        splitting = [
            rank for rank in world if rank in heads and (heads[rank].group is None or heads[rank].colour is not None)
        ]
        whole = [
            step.group
            for step in heads.values()
            if step.group is not None
            and step.colour is None
            and all(heads.get(member) == step for member in step.group.ranks)
        ]
        if len(splitting) == len(world):
            by_colour = {heads[rank].colour: heads[rank].group for rank in world if heads[rank].group is not None}
            for colour, group in by_colour.items():
                assert group is not None
                assert {rank for rank in world if heads[rank] == Split(group, colour)} == set(group.ranks)
            done += len(by_colour)
            passed = set(world)
        else:
            assert whole, "a circle"
            done += 1
            passed = set(whole[0].ranks)
        for rank in passed:
            lists[rank].pop(0)
    return done


def test_all_ranks_come_through_and_have_what_they_want() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        plan, specs = random_plan(rng)
        cut = buckets(plan.layout, specs, bucket_bytes=1500)
        groups = memberships(plan, programs(plan, cut), cut)
        if len(plan.layout.active) < 2:
            continue
        ranks = range(max(plan.layout.active) + 3)  # the last ones are parked and only give their state
        pairs = rng.sample(list(itertools.combinations(ranks, 2)), 3)
        wanted = (*groups, *(GroupSpec(f"state/{a}-{b}", (a, b)) for a, b in pairs))
        for rank in ranks:
            mine = {step.group for step in steps(wanted, rank)} - {None}
            assert mine == {group for group in wanted if rank in group.ranks}
        assert carried_out(wanted, ranks) == len(wanted)


def test_no_two_groups_of_a_round_share_a_rank_and_none_is_later_than_it_must() -> None:
    chain = [GroupSpec(f"edge/{n}-{n + 1}", (n, n + 1), "edge") for n in range(7)]
    even, odd = rounds(chain)
    assert (even, odd) == (tuple(chain[::2]), tuple(chain[1::2]))
