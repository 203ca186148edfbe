"""Who may lead: quorums of the plan in effect and of the one that is decided, as a journal tells."""

from __future__ import annotations

from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.record.journal import (
    AnyEntry,
    JobStarted,
    LeaderChosen,
    NodeJoined,
    NodeLost,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    PlanWithdrawn,
    Record,
    WorkerStarted,
    first_seq,
)
from resihp.record.quorum import Membership, is_quorum

NODES = ("n1", "n2", "n3", "n4", "n5")


def started(leader: str = "n1") -> JobStarted:
    return JobStarted(
        job="j",
        command=(),
        nodes=4,
        gpus_per_node=1,
        tp=1,
        pp=1,
        schedule="1f1b",
        host="h",
        user="u",
        restart_count=0,
        version="0",
        configuration={},
        leader=leader,
    )


def joined(*nodes: str) -> list[AnyEntry]:
    """Each with one worker, of the node's place in `NODES` as its rank."""
    entries: list[AnyEntry] = []
    for node in nodes:
        entries.append(NodeJoined(node=node, host="h", devices=1))
        entries.append(WorkerStarted(rank=NODES.index(node), node=node, device=0, pid=1, epoch=0))
    return entries


def decided(epoch: int, *nodes: str) -> PlanDecided:
    ranks = tuple(NODES.index(node) for node in nodes)
    plan = Plan(epoch=epoch, layout=Layout(replicas=(), standby=ranks), assignment=())
    return PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="")


def chosen(term: int, node: str) -> LeaderChosen:
    return LeaderChosen(term=term, node=node, host="h", how="elected")


def after(*entries: AnyEntry) -> Membership:
    membership = Membership()
    for entry in entries:
        seq = membership.log + 1
        if isinstance(entry, LeaderChosen):
            seq = max(seq, first_seq(entry.term))
        membership.apply(Record(seq, 0.0, entry))
    return membership


FOUR = [started(), *joined(*NODES[:4]), decided(1, *NODES[:4]), PlanInEffect(epoch=1)]


@given(voters=st.frozensets(st.sampled_from(NODES), min_size=1), incumbent=st.sampled_from(["", *NODES]))
def test_two_quorums_always_share_an_agent(voters: frozenset[str], incumbent: str) -> None:
    subsets = [set(some) for size in range(len(NODES) + 1) for some in combinations(NODES, size)]
    quorums = [some for some in subsets if is_quorum(voters, some, incumbent)]
    assert all(one & other & voters for one in quorums for other in quorums)
    assert is_quorum(voters, voters, incumbent)
    assert not is_quorum(voters, set(NODES) - voters, incumbent)


@pytest.mark.parametrize(
    ("agreeing", "enough"),
    [
        ({"n1", "n2"}, True),
        ({"n2", "n3"}, False),
        ({"n2", "n3", "n4"}, True),
        ({"n1", "n5"}, False),
    ],
)
def test_more_than_half_of_the_plan_or_half_with_the_incumbents_agent(agreeing: set[str], enough: bool) -> None:
    assert after(*FOUR).quorum(agreeing) == enough


def test_without_an_incumbent_on_a_node_half_is_not_enough() -> None:
    local = after(started(leader=""), *joined("n1", "n2"), decided(1, "n1", "n2"), PlanInEffect(epoch=1))
    assert not local.quorum({"n1"})
    assert not local.quorum({"n2"})
    assert local.quorum({"n1", "n2"})


def test_nobody_is_chosen_before_a_plan_is_in_effect() -> None:
    membership = after(started(), *joined("n1", "n2"))
    assert (membership.electable, membership.voters) == (False, {"n1", "n2"})
    assert after(*FOUR[:-1]).electable is False
    assert after(*FOUR).electable is True
    assert Membership().quorum(set()), "nobody has joined: the first supervisor writes its first records alone"


def test_a_lost_node_votes_until_a_plan_without_it_is_in_effect() -> None:
    shrunk = [NodeLost(node="n4", reason=""), decided(2, "n1", "n2", "n3")]
    assert after(*FOUR, shrunk[0]).voters == set(NODES[:4])
    assert after(*FOUR, *shrunk).voters == set(NODES[:4])
    assert after(*FOUR, *shrunk, PlanInEffect(epoch=2)).voters == {"n1", "n2", "n3"}


def test_between_decision_and_effect_both_plans_agents_are_needed() -> None:
    growing = [*FOUR, *joined("n5"), decided(2, "n1", "n5")]
    membership = after(*growing)
    assert not membership.quorum({"n1", "n5"} - {"n1"})
    assert not membership.quorum({"n2", "n3", "n4"}), "nobody of the plan to be"
    assert membership.quorum({"n1", "n2"}), "half of each, with n1"
    assert after(*growing, PlanInEffect(epoch=2)).electorates == ((frozenset({"n1", "n5"}), "n1"),)
    assert after(*growing, PlanRefused(epoch=2, rank=None, reason="")).electorates == after(*FOUR).electorates
    assert after(*growing, PlanRefused(epoch=9, rank=None, reason="")).electorates == membership.electorates
    assert after(*growing, decided(3, "n1", "n2")).electorates[1] == (frozenset({"n1", "n2"}), "n1")


def test_voters_of_a_withdrawn_plan_are_not_needed_any_more() -> None:
    growing = [*FOUR, *joined("n5"), decided(2, "n1", "n5")]
    withdrawn = after(*growing, PlanWithdrawn(epoch=2, reason="the job is to stop"))
    assert withdrawn.electorates == after(*FOUR).electorates
    assert withdrawn.quorum({"n2", "n3", "n4"}), "more than half of the plan in effect"
    assert not withdrawn.quorum({"n1", "n5"}), "the plan in effect has been asked throughout"
    of_another = after(*growing, PlanWithdrawn(epoch=1, reason="the job is to stop"))
    assert of_another.electorates == after(*growing).electorates
    first = after(*FOUR[:-1], PlanWithdrawn(epoch=1, reason="the job is to stop"))
    assert first.electorates == ((first.voters, "n1"),), "before the first plan, those that have joined"


def test_a_new_leader_decides_equal_halves_only_from_its_own_plan_on() -> None:
    membership = after(*FOUR, chosen(2, "n2"))
    assert (membership.term, membership.leader, membership.incumbent) == (2, "n2", "n1")
    assert not membership.quorum({"n2", "n3"}), "the leader before it may still have the other half"
    later = after(*FOUR, chosen(2, "n2"), decided(2, "n1", "n2"), PlanInEffect(epoch=2))
    assert later.quorum({"n2"})
    assert not later.quorum({"n1"})


def test_effect_of_a_plan_that_is_not_the_one_decided_changes_nothing() -> None:
    assert after(*FOUR, decided(3, "n1"), PlanInEffect(epoch=2)).voters == set(NODES[:4])


@given(st.lists(st.floats(-1e10, 1e10), min_size=20, max_size=20))
def test_who_leads_does_not_depend_on_what_clocks_showed(stamps: list[float]) -> None:
    """Every leader writes the time of its own node, and that may be set at any moment."""
    entries = [*FOUR, chosen(2, "n2"), NodeLost(node="n4", reason=""), decided(2, "n1", "n2", "n3"), chosen(3, "n3")]
    told, plain = Membership(), after(*entries)
    for place, entry in enumerate(entries):
        term = max([each.term for each in entries[: place + 1] if isinstance(each, LeaderChosen)], default=1)
        told.apply(Record(max(told.log + 1, first_seq(term)), stamps[place], entry))
    assert told.record == plain.record
    assert (told.log, told.term, told.electorates) == (plain.log, plain.term, plain.electorates)
