"""What may be lost next: each device and node with work, which of them are alike, and what has one holder left."""

from __future__ import annotations

import msgspec
import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.parameter_outline import outline
from resihp.scheduler.losses import MAX_LOSSES, PossibleLoss, held_alone, kinds, possible_losses, sole_holders, to_ask
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation

GRID = Layout.uniform(tp=2, pp=2, dp=4, layers=6)
GIVEN = situation(GRID, nodes=on_nodes(16, 8), tp=2, pp=2)


def ranks(groups: tuple[tuple[PossibleLoss, ...], ...]) -> list[list[tuple[int, ...]]]:
    return [[loss.ranks for loss in group] for group in groups]


def test_each_device_and_each_node_that_has_work_may_be_lost() -> None:
    spared = situation(Layout(GRID.replicas, tuple(range(16, 24))), nodes=on_nodes(24, 8), tp=2, pp=2)
    assert possible_losses(spared) == (
        *(PossibleLoss((rank,)) for rank in range(16)),
        PossibleLoss(tuple(range(8)), "n1"),
        PossibleLoss(tuple(range(8, 16)), "n2"),
    )


def test_the_same_stage_of_replicas_that_are_alike_is_alike() -> None:
    first, second, nodes = ranks(kinds(possible_losses(GIVEN), GIVEN))
    assert first == [(rank,) for rank in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert second == [(rank,) for rank in (2, 3, 6, 7, 10, 11, 14, 15)]
    assert nodes == [tuple(range(8)), tuple(range(8, 16))]


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"speeds": {5: 0.5}}, 4),
        ({"speeds": {0: 0.5}}, 1),
        ({"base": Layout((*GRID.replicas[:3], Replica((Stage((12, 13, 14, 15), ((0, 5),)),))))}, 12),
        ({"links": {("n1", "n3"): 0.5}}, 12),
        ({"available": tuple(range(15))}, 12),
    ],
)
def test_what_the_planner_is_told_makes_a_difference(change: dict[str, object], other: int) -> None:
    given = msgspec.structs.replace(GIVEN, **change)
    [like_first] = [group for group in ranks(kinds(possible_losses(given), given)) if (0,) in group]
    assert (other,) not in like_first


def test_of_large_jobs_one_of_each_kind_is_asked_for() -> None:
    assert to_ask(GIVEN) == possible_losses(GIVEN)
    large = Layout.uniform(tp=1, pp=2, dp=MAX_LOSSES // 2, layers=6)
    asked = to_ask(situation(large, nodes=on_nodes(MAX_LOSSES, 8), tp=1, pp=2))
    assert asked == (PossibleLoss((0,)), PossibleLoss((1,)), PossibleLoss(tuple(range(8)), "n1"))


def test_a_stage_without_ranks_leaves_its_state_to_one_holder() -> None:
    first, second = Layout.uniform(tp=2, pp=2, dp=2, layers=6).replicas
    vacant = Layout((Replica((first.stages[0], Stage((), first.stages[1].chunks))), second))
    found = sole_holders(vacant, outline(MODEL))
    assert [*found] == [6, 7]
    assert held_alone(found) == (
        "layers 3-5 and the head are held by ranks 6-7 alone: if one of these is lost, training goes back to the last "
        "checkpoint"
    )
    assert sole_holders(GRID, outline(MODEL)) == {}


def test_one_layer_of_one_rank_in_words() -> None:
    assert held_alone({4: {"layer.7"}}) == (
        "layer 7 is held by rank 4 alone: if it is lost, training goes back to the last checkpoint"
    )
    assert held_alone({4: {"layer.7"}}, saved=False) == (
        "layer 7 is held by rank 4 alone: if it is lost, so is all training: --checkpoint-every N saves it"
    )
