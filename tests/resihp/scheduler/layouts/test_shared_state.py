"""Optimizer state that replicas share (ZeRO, stage 1): what a rank holds follows from the replicas of a plan."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.scheduler import Decision, Situation, decide
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.cost import memory
from resihp.scheduler.layouts import paper_planner
from resihp.scheduler.what_if import catalogue, question
from resihp.scheduler.what_if.question import Question


def posed(sequence: int, failed: tuple[int, ...]) -> tuple[Question, Situation]:
    """llama2-30b on 16 GPUs of 80 GB, two replicas that share the optimizer's state."""
    asked = Question(
        model=catalogue.model("llama2-30b", sequence),
        hardware=catalogue.hardware("a100"),
        tp=4,
        pp=2,
        dp=2,
        micro_batches=8,
        gpus_per_node=8,
        sequence_parallel=True,
        zero_1=True,
        failed=failed,
    )
    return asked, question.pose(asked, question.first_plan(asked))


def worst(asked: Question, decision: Decision) -> int:
    return question.worst(asked, decision.plan)[0]


def test_a_plan_that_keeps_both_replicas_has_half_of_the_shared_state_each() -> None:
    """Without it both are given up: each alone has no room for all of it."""
    asked, case = posed(4096, (1, 9))
    decision = decide(case)
    assert len(decision.plan.layout.replicas) == 2
    assert decision.seconds < 8.2
    assert worst(asked, decision) <= asked.hardware.memory_bytes


def test_the_one_replica_that_is_left_is_longer_because_it_holds_all_of_the_state() -> None:
    asked, case = posed(8192, (1,))
    decision = decide(case)
    assert len(decision.plan.layout.replicas) == 1
    assert decision.seconds < 14.1
    assert worst(asked, decision) <= asked.hardware.memory_bytes
    anytime = Anytime(case, decision)
    anytime.run(300)
    found = anytime.decision()
    assert found.seconds <= decision.seconds
    assert worst(asked, found) <= asked.hardware.memory_bytes


def test_the_papers_planner_counts_the_replicas_that_it_keeps() -> None:
    _, case = posed(4096, (1,))
    dropping = paper_planner.progressive(case, ("exclude", "repartition"))
    assert case.memory_bytes is not None
    state_bytes = case.state_bytes_of(memory.sharing(dropping.plan.layout))
    assert not memory.obstacle(
        dropping.plan, case.model, case.memory_bytes, case.tokens, state_bytes=state_bytes, overhead=case.overhead
    )
    _, tight = posed(8192, (1,))
    with pytest.raises(PlanError, match="do not fit the memory"):
        paper_planner.progressive(tight, ("exclude", "repartition"))


def test_a_layer_is_shared_by_the_replicas_that_hold_it() -> None:
    whole = Replica((Stage((0,), ((0, 2),)), Stage((1,), ((3, 5),))))
    vacant = Replica((Stage((2,), ((0, 2),)), Stage((), ((3, 5),))))
    assert memory.sharing(Layout((whole, whole))) == 2
    assert memory.sharing(Layout((whole, vacant))) == 1


def test_what_is_not_shared_does_not_follow_from_the_number_of_replicas() -> None:
    _, case = posed(4096, ())
    alone = msgspec.structs.replace(case, zero_1=False)
    assert [case.state_bytes_of(n) for n in (1, 2, 4)] == [16, 10, 7]
    assert alone.state_bytes_of(1) is alone.state_bytes_of(4) is None
