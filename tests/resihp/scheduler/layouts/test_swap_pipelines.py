"""Slow links are passed by: the same stages in other pipelines, without a byte of state that moves."""

from __future__ import annotations

import msgspec
import pytest

from resihp.parallelism.layout import Layout, Replica
from resihp.parallelism.model import ModelSpec
from resihp.scheduler import planner
from resihp.scheduler.cost.lacking_state import bytes_to_move
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.layouts.swap_pipelines import crossed
from resihp.scheduler.situation import Situation

MODEL = ModelSpec(layers=8, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=256, sequence=64)
LAYER = Times(1.0, 1.0, 1.0)


def situation(layout: Layout, links: dict[tuple[str, str], float], per_node: int = 2, **changes: object) -> Situation:
    """Transfers between nodes take as long as a layer's forward, and hundreds of times that over a slow link."""
    given: dict[str, object] = {
        "epoch": 2,
        "base": layout,
        "available": layout.ranks,
        "nodes": {rank: f"n{rank // per_node}" for rank in layout.ranks},
        "model": MODEL,
        "micro_batches": 16,
        "tp": 2,
        "pp": len(layout.replicas[0].stages),
        "links": links,
        "profile": Profile(layers=(LAYER,) * 8, transfer_s=1.0, inside_s=0.1),
    }
    return Situation(**given | changes)  # type: ignore[arg-type]


def ways(replicas: tuple[Replica, ...]) -> set[tuple[int, int]]:
    """First ranks of stages that follow one another."""
    return {
        (a.ranks[0], b.ranks[0])
        for replica in replicas
        for a, b in zip(replica.stages, replica.stages[1:], strict=False)
    }


def test_two_pipelines_exchange_what_comes_behind_a_slow_link() -> None:
    asked = situation(Layout.uniform(tp=2, pp=2, dp=4, layers=8), {("n0", "n1"): 0.01})
    found = planner.decide(asked)
    assert found.reason.startswith("keep, pipelines crossed: predicted ")
    assert ways(found.plan.layout.replicas) == {(0, 6), (4, 2), (8, 10), (12, 14)}
    assert bytes_to_move(asked, found.plan.layout) == 0
    well = planner.decide(msgspec.structs.replace(asked, links={}))
    assert found.seconds == pytest.approx(well.seconds)


def test_the_boundary_in_the_middle_is_the_one_that_is_crossed() -> None:
    layout = Layout.uniform(tp=2, pp=4, dp=2, layers=8)
    found = crossed(layout.replicas, situation(layout, {("n1", "n2"): 0.01}))
    assert found is not None
    assert ways(found) == {(0, 2), (2, 12), (12, 14), (8, 10), (10, 4), (4, 6)}


def test_of_many_pipelines_only_two_change() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=8, layers=8)
    found = crossed(layout.replicas, situation(layout, {("n4", "n5"): 0.01}))
    assert found is not None
    assert sum(a != b for a, b in zip(found, layout.replicas, strict=True)) == 2


def test_it_does_not_lead_over_another_slow_link() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=3, layers=8)
    links = {("n0", "n1"): 0.01, ("n0", "n3"): 0.02, ("n1", "n2"): 0.02}
    found = crossed(layout.replicas, situation(layout, links))
    assert found is not None
    assert ways(found) == {(0, 10), (8, 2), (4, 6)}


@pytest.mark.parametrize(
    ("layout", "links"),
    [
        (Layout.uniform(tp=2, pp=2, dp=2, layers=8), {("n0", "n2"): 0.01}),
        (Layout.uniform(tp=2, pp=2, dp=1, layers=8), {("n0", "n1"): 0.01}),
        (Layout.uniform(tp=2, pp=2, dp=2, layers=8), {("n0", "n1"): 0.5, ("n0", "n3"): 0.1}),
    ],
    ids=["no pipeline uses it", "there is no other pipeline", "every other way is slower"],
)
def test_pipelines_stay_where_nothing_is_gained(layout: Layout, links: dict[tuple[str, str], float]) -> None:
    assert crossed(layout.replicas, situation(layout, links)) is None


def test_stages_that_hold_other_layers_are_not_exchanged() -> None:
    even = Layout.uniform(tp=2, pp=2, dp=2, layers=8)
    one, other = even.replicas
    a, b = other.stages
    uneven = Replica((msgspec.structs.replace(a, chunks=((0, 4),)), msgspec.structs.replace(b, chunks=((5, 7),))))
    layout = Layout((one, uneven))
    assert crossed(layout.replicas, situation(layout, {("n0", "n1"): 0.01})) is None


def test_with_virtual_stages_the_way_back_counts_as_well() -> None:
    """Crossed, both pipelines go over links that are healthy; the way back over the slow one is gone, too."""
    layout = Layout.uniform(tp=2, pp=2, dp=2, layers=8, chunks=2)
    links = {("n0", "n1"): 0.01}
    found = crossed(layout.replicas, situation(layout, links, chunks=2, schedule="interleaved"))
    assert found is not None
    assert ways(found) == {(0, 6), (4, 2)}


def test_asked_again_it_answers_the_same() -> None:
    asked = situation(Layout.uniform(tp=2, pp=2, dp=4, layers=8), {("n0", "n1"): 0.01})
    first = planner.decide(asked).plan.layout
    assert planner.decide(msgspec.structs.replace(asked, base=first)).plan.layout == first
