"""What a transition moves: the bytes of `resihp.parallelism.transfers`, over the busiest rank; the communicators of a
program."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import LayoutError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.plan import Plan, spread
from resihp.parallelism.transfers import Base, bytes_of, moves
from resihp.pipeline.program import buckets, memberships, programs
from resihp.scheduler import decide
from resihp.scheduler.cost.layout_change import communicators, movement, state_bytes
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 15), max_size=5))
def test_bytes_are_those_of_the_transfers(lost: set[int]) -> None:
    base, nodes = Layout.uniform(tp=2, pp=2, dp=4, layers=6), on_nodes(16, 4)
    case = situation(base, nodes=nodes, tp=2, pp=2, lost=lost)
    layout = decide(case).plan.layout
    specs = outline(MODEL)
    by_name = {spec.name: spec for spec in specs}
    try:
        exact = moves(Base(epoch=1, layout=base, survivors=case.available), layout, specs, nodes)
    except LayoutError:
        with pytest.raises(LayoutError, match="was lost with rank"):
            movement(case, layout)
        return
    found = movement(case, layout, inside_weight=1.0)
    assert found.total_bytes == sum(bytes_of(move, by_name) for move in exact)
    received: dict[int, int] = {}
    for move in exact:
        received[move.target] = received.get(move.target, 0) + bytes_of(move, by_name)
    most = max(received.values(), default=0)
    assert 0.98 * most <= found.busiest_bytes <= max(found.total_bytes, most)  # norms are left out of blocks' cuts


def test_a_large_job_is_asked_about_in_parts() -> None:
    base, nodes = Layout.uniform(tp=2, pp=2, dp=16, layers=6), on_nodes(64, 4)
    case = situation(base, nodes=nodes, tp=2, pp=2, lost={1, 21}, micro_batches=32)
    layout = decide(case).plan.layout
    assert layout.replicas != base.replicas
    found = movement(case, layout, inside_weight=1.0)
    specs = outline(MODEL)
    by_name = {spec.name: spec for spec in specs}
    exact = moves(Base(epoch=1, layout=base, survivors=case.available), layout, specs, nodes)
    received, sent = ({rank: 0 for rank in layout.ranks} for _ in range(2))
    for move in exact:
        received[move.target] += bytes_of(move, by_name)
        sent[move.source] += bytes_of(move, by_name)
    assert found.total_bytes == sum(received.values())
    most = max(*received.values(), *sent.values())
    assert 0.98 * most <= found.busiest_bytes <= 1.3 * most  # fewer senders are asked than there are


def test_bytes_within_a_node_weigh_less_and_those_over_a_slow_link_more() -> None:
    base = Layout.uniform(tp=2, pp=1, dp=2, layers=6)
    nodes = {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n1", 5: "n1"}
    layout = Layout((Replica((Stage((4, 5), ((0, 5),)),)), base.replicas[1]), (0, 1))
    case = situation(base, nodes=nodes, tp=2, pp=1, came=(4, 5))
    inside = movement(case, layout, inside_weight=0.1)
    assert inside.busiest_bytes == pytest.approx(0.1 * inside.total_bytes / 2, rel=0.01)
    far = situation(base, nodes=nodes | {4: "n3", 5: "n3"}, tp=2, pp=1, came=(4, 5), lost=(0, 1))
    layout = Layout((Replica((Stage((4, 5), ((0, 5),)),)), base.replicas[1]))
    healthy = movement(far, layout, inside_weight=0.1)
    slow = movement(msgspec.structs.replace(far, links={("n2", "n3"): 0.25}), layout, inside_weight=0.1)
    assert healthy.busiest_bytes == pytest.approx(healthy.total_bytes / 2, rel=0.01)
    assert slow.busiest_bytes == pytest.approx(4 * healthy.busiest_bytes)
    assert slow.total_bytes == healthy.total_bytes


def test_nothing_moves_where_nothing_changes() -> None:
    base = Layout.uniform(tp=2, pp=2, dp=2, layers=6)
    found = movement(situation(base, nodes=on_nodes(8, 4), tp=2, pp=2), base)
    assert (found.total_bytes, found.busiest_bytes) == (0, 0.0)
    assert found.groups > 0  # a new epoch has new communicators


def test_state_of_a_layout() -> None:
    one = Layout.uniform(tp=1, pp=1, dp=1, layers=6)
    total, most = state_bytes(MODEL, one)
    assert total == most == pytest.approx(MODEL.parameters * 12, rel=0.01)
    grid = Layout.uniform(tp=2, pp=2, dp=2, layers=6)
    assert state_bytes(MODEL, grid)[0] == pytest.approx(2 * total, rel=0.01)


def busiest(layout: Layout) -> int:
    """Communicators of the busiest rank, from the programs themselves."""
    plan = Plan(epoch=1, layout=layout, assignment=spread(8, len(layout.replicas)))
    shared = buckets(layout, outline(MODEL))
    made = memberships(plan, programs(plan, shared), shared)
    return max(sum(rank in group.ranks for group in made) for rank in layout.active)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.uniform(tp=2, pp=3, dp=2, layers=6),
        Layout.uniform(tp=1, pp=2, dp=3, layers=6),
        Layout.uniform(tp=1, pp=1, dp=3, layers=6),
        Layout.uniform(tp=4, pp=1, dp=1, layers=6),
        Layout.uniform(tp=4, pp=2, dp=1, layers=6),
        Layout.uniform(tp=1, pp=3, dp=2, layers=6, chunks=2),
        Layout(
            (
                Replica((Stage((0, 1, 2, 3), ((0, 2),)), Stage((4,), ((3, 3),)), Stage((5, 6), ((4, 5),)))),
                Replica((Stage((8, 9), ((0, 3),)), Stage((10, 11), ((4, 5),)))),
            )
        ),
    ],
)
def test_communicators_are_as_many_as_programs_need(layout: Layout) -> None:
    assert communicators(layout) == busiest(layout)
