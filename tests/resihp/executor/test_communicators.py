"""Which communicators a plan has, and in which order all ranks build them."""

from __future__ import annotations

import pytest

from resihp.errors import LayoutError
from resihp.executor.communicators import Membership, memberships
from resihp.layout import Layout, Replica, Stage
from resihp.plan import Plan, spread


def plan(layout: Layout) -> Plan:
    return Plan(epoch=1, layout=layout, assignment=spread(8, len(layout.replicas)))


def test_one_communicator_for_each_group_edge_and_distinct_set_of_owners() -> None:
    groups = memberships(plan(Layout.uniform(tp=2, pp=2, dp=1, layers=2)), [(0,), (1,), (2,), (3,)])
    assert groups == (
        Membership("world", (0, 1, 2, 3)),
        Membership("tensor/0/0", (0, 1)),
        Membership("forward/0-2", (0, 2)),
        Membership("backward/2-0", (2, 0)),
        Membership("forward/1-3", (1, 3)),
        Membership("backward/3-1", (3, 1)),
        Membership("tensor/0/1", (2, 3)),
    )


def test_equal_sets_share_a_communicator_and_a_set_of_all_is_the_world() -> None:
    layout = Layout.uniform(tp=1, pp=1, dp=3, layers=2)
    assert [group.name for group in memberships(plan(layout), [(2, 0, 1)])] == ["world"]
    assert [group.name for group in memberships(plan(layout), [(0, 1), (1, 0), (1, 2)])] == [
        "world",
        "gradients/0-1",
        "gradients/1-2",
    ]


def test_a_single_rank_needs_none() -> None:
    assert memberships(plan(Layout.uniform(tp=1, pp=1, dp=1, layers=2)), [(0,)]) == ()


def test_neighbouring_stages_of_unequal_degree_are_refused() -> None:
    layout = Layout((Replica((Stage((0, 1), ((0, 0),)), Stage((2,), ((1, 1),)))),))
    with pytest.raises(LayoutError, match="replica 0: stages 0 and 1 have tensor-parallel degrees 2 and 1"):
        memberships(plan(layout), [])
