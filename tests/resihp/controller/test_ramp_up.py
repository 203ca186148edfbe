"""Batch ramp-up: a plan for each number of micro-batches, right at the step, whatever happens around it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import (
    AnyEntry,
    FailureFound,
    IterationCommitted,
    PlanDecided,
    PlanRefused,
    Reconfigured,
    Suspected,
)
from resihp.simulator.harness import Disturbance, Scenario, play
from tests.resihp.controller.direct import DECLARE, Direct
from tests.resihp.controller.test_takeover import TakenOver
from tests.resihp.controller.test_transactions import pausing

RAMP = ((1, 2), (3, 5), (4, 8))
DECLARES = msgspec.structs.replace(DECLARE, ramp=RAMP)


def dealt(job: Direct) -> list[tuple[int, int]]:
    """(first iteration, micro-batches) of each plan that was decided."""
    return [(entry.next_iteration, entry.plan.micro_batches) for entry in job.all(PlanDecided)]


def through(job: Direct, iteration: int) -> None:
    """All stop by themselves after the iteration, are asked to park, and go on under the next plan."""
    job.park(0, stepped=iteration, epoch=job.job.epoch + 1)
    job.park(stepped=iteration)
    job.run()


def test_at_each_step_training_pauses_for_a_plan_of_the_same_layout() -> None:
    job = Direct(declare=DECLARES).run(1)
    layout = job.plan.layout
    assert (dealt(job), job.orders(m.Park)) == ([(1, 2)], [])
    job.step(2, 0, 1, 2, pause=True)
    reason = "iteration 3 has 5 micro-batches, those before it had 2"
    assert job.orders(m.Park) == [((0, 1, 2, 3), m.Park(epoch=2, reason=reason, after_iteration=True))]
    job.step(2, 3, pause=True)
    through(job, 2)
    job.step(3, pause=True)
    through(job, 3)
    for i in (4, 5, 6):
        job.step(i)
    assert dealt(job) == [(1, 2), (3, 5), (4, 8)]
    assert all(entry.plan.layout == layout for entry in job.all(PlanDecided))
    assert [sorted(map(len, entry.plan.assignment)) for entry in job.all(PlanDecided)] == [[1, 1], [2, 3], [4, 4]]
    assert {entry.action for entry in job.all(Reconfigured)} == {"between"}
    assert not job.all(FailureFound)
    assert not job.all(Suspected)
    assert len(job.all(IterationCommitted)) == 6


def test_a_step_gains_nothing_and_moves_nothing() -> None:
    job = Direct(declare=DECLARES).run(1)
    job.step(2, pause=True)
    through(job, 2)
    decided = job.all(PlanDecided)[-1]
    assert decided.present == pytest.approx(decided.predicted, rel=1e-9)
    assert decided.bytes_planned == 0


def test_the_end_of_training_asks_for_no_plan() -> None:
    job = Direct(declare=msgspec.structs.replace(DECLARES, iterations=2)).run(1)
    job.step(2, pause=True)
    assert job.orders(m.Park) == []
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [1, 2]


@pytest.mark.parametrize(("resumed", "number"), [(1, 2), (2, 5), (3, 8), (5, 8)])
def test_a_run_from_a_checkpoint_begins_with_the_number_that_is_due(resumed: int, number: int) -> None:
    job = Direct(declare=msgspec.structs.replace(DECLARES, resume_from=resumed))
    assert dealt(job) == [(resumed + 1, number)]


def test_a_failure_in_the_iteration_before_a_step_is_redone_with_its_own_number() -> None:
    job = Direct(declare=DECLARES).run(1)
    job.crash(3)
    job.park(stepped=1)
    assert dealt(job) == [(1, 2), (2, 2)]


def test_a_failure_once_the_step_was_taken_goes_on_with_the_next_number() -> None:
    job = Direct(declare=DECLARES).run(1)
    job.step(2, 0, pause=True)
    job.crash(3)
    job.park(stepped=2)
    assert dealt(job) == [(1, 2), (3, 5)]
    assert job.all(PlanDecided)[-1].action == "commit"


def test_a_failure_while_the_new_plan_is_made_keeps_the_number() -> None:
    job = Direct(declare=DECLARES).run(1)
    job.step(2, pause=True)
    job.park(0, stepped=2, epoch=2)
    job.park(stepped=2)
    job.confirm()
    job.crash(3)
    job.park(stepped=2)
    job.run()
    assert dealt(job) == [(1, 2), (3, 5), (3, 5)]
    assert 3 not in job.plan.layout.ranks


def test_a_refused_plan_is_followed_by_the_layout_in_effect_for_the_new_number() -> None:
    job = Direct(declare=DECLARES).run(1)
    layout = job.plan.layout
    job.step(2, pause=True)
    job.park(0, stepped=2, epoch=2)
    job.park(stepped=2)
    job.say(0, m.Object(epoch=2, reason="too little memory"))
    job.park(stepped=2)
    assert dealt(job) == [(1, 2), (3, 5), (3, 5)]
    assert job.plan.layout == layout
    assert len(job.all(PlanRefused)) == 1


@pytest.mark.parametrize("told", [True, False], ids=["after the step was reported", "before"])
def test_a_supervisor_that_takes_over_at_a_step_makes_the_plan(told: bool) -> None:
    before = Direct(declare=DECLARES).run(1)
    if told:
        before.step(2, pause=True)
    job = TakenOver(before)
    job.declare = DECLARES
    job.all_back(steps={rank: (2,) for rank in range(4)})
    assert [order.after_iteration for _, order in job.orders(m.Park)] == [True]
    through(job, 2)
    assert dealt(job) == [(3, 5)]


def test_a_supervisor_that_takes_over_before_the_step_leaves_training_alone() -> None:
    job = TakenOver(Direct(declare=DECLARES).run())
    job.declare = DECLARES
    job.all_back(steps={rank: (1,) for rank in range(4)})
    assert job.orders(m.Park) == []
    job.step(2, pause=True)
    assert len(job.orders(m.Park)) == 1


def test_a_change_that_is_due_anyway_takes_the_step_along() -> None:
    """A newcomer's plan from the step on deals the next number, and no other pause follows."""
    declare = msgspec.structs.replace(DECLARE, iterations=20, ramp=((1, 6), (5, 8)))
    job = pausing(declare=declare, iteration_s=500.0)
    for i in (3, 4):
        job.step(i, pause=i == 4)
    through(job, 4)
    assert dealt(job)[-1] == (5, 8)
    assert 6 in job.plan.layout.active
    job.step(5)
    assert job.job.stage == "running"


def test_a_start_that_cannot_feed_all_replicas_is_refused_and_says_what_to_change() -> None:
    job = Direct(declare=DECLARES, tp=1, pp=1)
    assert job.end is not None
    assert job.end.exit_code == 2
    assert job.end.reason == (
        "batch ramp-up: iteration 1 has 2 micro-batches, which cannot feed 4 replicas; begin the ramp-up with 4 or "
        "more (RampUp(start=4, ...)), or raise --tp or --pp, which makes fewer replicas"
    )
    assert job.all(PlanDecided) == []


def test_ranks_with_other_ramps_do_not_train_together() -> None:
    job = Direct(nodes=1, gpus=1, tp=1, pp=1, declare=DECLARES)
    assert job.end is None
    odd = Direct(nodes=1, gpus=2, tp=1, pp=2, declare=DECLARES)
    assert odd.end is None
    late = odd.run(1)
    late.crash(1)
    late.spawn(2)
    late.say(2, DECLARE)
    assert 2 in late.job.record.refused


def test_nobody_is_late_because_there_is_more_to_do() -> None:
    """What is usual grows with the number of micro-batches until iterations tell."""
    ramp = ((1, 2), (3, 64))
    job = Direct(declare=msgspec.structs.replace(DECLARES, micro_batches=64, ramp=ramp), iteration_s=4.0).run(1)
    job.step(2, pause=True)
    assert job.job.usual_s == 4.0
    through(job, 2)
    assert job.job.usual_s == 4.0 * 32
    job.wait(100.0)
    assert not job.all(Suspected)
    entries: list[AnyEntry] = [a.entry for a in job.actions if isinstance(a, api.Log)]
    assert fold(entries) == job.job.record


@pytest.mark.parametrize("trigger", ["sync", "step", "parked", "propose", "go", "ready", "begin", "resumed"])
@pytest.mark.parametrize("kind", ["kill", "supervisor", "silent"])
def test_at_every_moment_of_a_step(trigger: Any, kind: Any) -> None:
    for nth in (2, 3, 5):
        disturbed = Disturbance(kind, trigger, nth, seconds=2.0, rank=1)
        scenario = Scenario(seed=nth, disturbances=(disturbed,), ramp=((1, 2), (2, 4), (4, 8)))
        assert play(scenario).exit_code == 0


def test_who_hangs_before_a_step_is_told_from_those_who_wait_for_the_plan() -> None:
    """Seeds 1743 and 2681: a plan for one iteration, to whose end one rank does not come."""
    job = Direct(declare=msgspec.structs.replace(DECLARES, ramp=((1, 2), (2, 4), (3, 8)))).run()
    job.step(1, pause=True)
    through(job, 1)
    job.step(2, 0, 1, 3, pause=True)
    job.wait(100.0, primitives={}, activity="idle")
    assert {entry.rank for entry in job.all(Suspected)} == {2}
    assert [a.rank for a in job.actions if isinstance(a, api.SignalWorker)] == [2]
    job.crash(2)
    job.park(stepped=2)
    assert dealt(job) == [(1, 2), (2, 4), (3, 8)]


def test_a_checkpoint_that_commits_the_first_iteration_of_a_plan_lets_the_step_begin() -> None:
    """Seed 165: nobody would have asked the ranks, which wait, to park."""
    job = Direct(declare=msgspec.structs.replace(DECLARES, ramp=((1, 2), (2, 4), (3, 8)))).run()
    job.step(1, pause=True)
    through(job, 1)
    job.step(2, 0, 1, 2, pause=True)
    assert job.job.stage == "first-iteration"
    for rank in job.plan.layout.replicas[0].ranks:
        part = {"folder": "iteration-2", "file": f"rank-{rank}", "bytes": 1, "seconds": 0.1}
        job.say(rank, m.CheckpointPart(epoch=2, iteration=2, **part))
    assert job.orders(m.Park)[-1][1].epoch == 3
    through(job, 2)
    assert dealt(job) == [(1, 2), (2, 4), (3, 8)]
    assert len(job.all(Reconfigured)) == 1
