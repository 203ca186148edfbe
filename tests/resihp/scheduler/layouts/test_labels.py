"""Ranks for the places of a layout: the fewest bytes, against every way to name them."""

from __future__ import annotations

import itertools
import random

from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.scheduler import Situation
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.layouts.labels import relabelled
from tests.resihp.scheduler.cases import on_nodes, situation


def drawn(rng: random.Random) -> tuple[Situation, tuple[Replica, ...]]:
    """Six ranks on nodes of two or three, some slow, one of them new; and a layout that they are to have."""
    of = rng.choice((2, 3))
    nodes = on_nodes(7, of)
    base = rng.choice((Layout.uniform(tp=1, pp=3, dp=2, layers=6), Layout.uniform(tp=2, pp=3, dp=1, layers=6)))
    lost = rng.sample(range(6), 1)
    slow = {rank: 0.5 for rank in range(7) if rank not in lost and rng.random() < 0.2}
    case = situation(base, nodes=nodes, tp=2, pp=3, lost=lost, came=[6], speeds=slow)
    ranks = list(case.available)
    rng.shuffle(ranks)
    groups: list[tuple[int, ...]] = []
    while ranks:
        first = ranks.pop()
        other = next((rank for rank in ranks if nodes[rank] == nodes[first]), None)
        if other is not None and rng.random() < 0.5:
            ranks.remove(other)
            groups.append((first, other))
        elif rng.random() < 0.9 or not groups:
            groups.append((first,))
    pipes = [groups[::2], groups[1::2]] if len(groups) > 3 else [groups]
    replicas = []
    for pipe in pipes:
        cuts = [0, *sorted(rng.sample(range(1, 6), len(pipe) - 1)), 6]
        spans = itertools.pairwise(cuts)
        replicas.append(Replica(tuple(Stage(g, ((a, b - 1),)) for g, (a, b) in zip(pipe, spans, strict=True))))
    return case, tuple(replicas)


def speeds(case: Situation, ranks: tuple[int, ...]) -> list[float]:
    return sorted(case.speeds.get(rank, 1.0) for rank in ranks)


def named(case: Situation, replicas: tuple[Replica, ...]) -> list[tuple[Replica, ...]]:
    """Every way: groups on one node each, of ranks as fast as before."""
    stages = [stage for replica in replicas for stage in replica.stages]
    found = []
    for order in itertools.permutations(case.available, sum(stage.tp for stage in stages)):
        left = list(order)
        groups = [tuple(left.pop(0) for _ in stage.ranks) for stage in stages]
        if all(
            len({case.nodes[rank] for rank in group}) == 1 and speeds(case, group) == speeds(case, stage.ranks)
            for group, stage in zip(groups, stages, strict=True)
        ):
            given = iter(groups)
            found.append(tuple(Replica(tuple(Stage(next(given), s.chunks) for s in r.stages)) for r in replicas))
    return found


def test_few_more_bytes_than_the_best_naming_needs() -> None:
    before = after = least = 0
    for seed in range(40):
        case, replicas = drawn(random.Random(seed))
        validate(Layout(replicas), case.model)
        ours, ways = relabelled(replicas, case), named(case, replicas)
        assert ours in ways, f"seed {seed}: the same shapes at the same speeds, on one node each"
        bytes_of = {way: bytes_to_move(case, Layout(way)) for way in ways}
        assert bytes_of[ours] <= bytes_of[replicas], seed
        assert bytes_of[ours] <= 1.2 * min(bytes_of.values()), seed
        before, after, least = before + bytes_of[replicas], after + bytes_of[ours], least + min(bytes_of.values())
    print(f"{after / least:.3f} of the least, before {before / least:.3f}")
    assert after <= 1.02 * least
    assert before > 1.2 * least, "else there was nothing to do"


def test_who_stands_where_they_should_stays() -> None:
    grid = Layout.uniform(tp=2, pp=2, dp=2, layers=6)
    case = situation(grid, nodes=on_nodes(8, 4), tp=2, pp=2)
    assert relabelled(grid.replicas, case) == grid.replicas
    swapped = (grid.replicas[0], Replica(tuple(Stage(s.ranks[::-1], s.chunks) for s in grid.replicas[1].stages)))
    assert bytes_to_move(case, Layout(relabelled(swapped, case))) == 0


def test_ranks_that_stand_by_take_part() -> None:
    """Rank 1 held the second stage and was left idle; the newcomer, which holds nothing, has its place."""
    grid = Layout.uniform(tp=1, pp=2, dp=1, layers=6)
    case = situation(grid, nodes=on_nodes(4, 4), tp=1, pp=2, came=[2])
    asked = (Replica((grid.replicas[0].stages[0], Stage((2,), grid.replicas[0].stages[1].chunks))),)
    assert relabelled(asked, case) == grid.replicas
