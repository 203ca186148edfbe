"""A device whose process died gets another one: when, what it has to show, and that it never stops the job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.controller.interface import Dependencies
from resihp.controller.planning import next_plan
from resihp.errors import NotEnoughDevicesError
from resihp.protocol import messages as m
from resihp.protocol.inventory import Software
from resihp.record.journal import (
    FailureFound,
    JoinRefused,
    PlanDecided,
    PlanInEffect,
    Reconfigured,
    WorkerEnded,
    WorkerStarted,
)
from resihp.simulator.harness import Disturbance
from resihp.simulator.random_planner import RandomPlanner
from resihp.simulator.scenarios.scenario import Fate
from tests.resihp.controller.direct import DECLARE, Direct, outcome
from tests.resihp.controller.test_controller import adapt, committed

FEW = range(5)


def started(job: Direct) -> list[api.StartWorkers]:
    return [action for action in job.actions if isinstance(action, api.StartWorkers) and action.joins]


def killed(job: Direct) -> list[int]:
    return [action.rank for action in job.actions if isinstance(action, api.SignalWorker)]


def crashed(**options: Any) -> Direct:
    """Three nodes of two; rank 1 died and training goes on without it; rank 6 is being started in its place."""
    job = Direct(nodes=3, iteration_s=5.0, **options).run(1)
    job.crash(1)
    job.park(stepped=1)
    return job.run(1)


# --- when a device gets another process ---------------------------------------------------------------------------


def test_a_crashed_process_is_started_again_at_once_under_a_new_rank() -> None:
    job = Direct().run(1)
    answer = job.crash(1)
    assert [type(a) for a in answer if isinstance(a, api.Order | api.StartWorkers)] == [api.Order, api.StartWorkers]
    assert started(job) == [
        api.StartWorkers(node="n1", workers=((4, 1),), nodes=("n1", "n1", "n2", "n2", "n1"), joins=True)
    ]
    job.spawn(4)
    assert job.all(WorkerStarted)[-1] == WorkerStarted(rank=4, node="n1", device=1, pid=1004, epoch=2)


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("kind", ["crash", "kill", "raise", "stop", "hang"])
def test_only_a_device_that_is_not_to_blame_comes_back(seed: int, kind: str) -> None:
    result = adapt(seed, faults=(f"{kind}:rank=1@iteration=3",), iterations=20)
    again = [e.rank for e in result.all(WorkerStarted) if e.rank > 3]
    assert again == ([] if kind in ("kill", "raise") else [4])
    assert committed(result) == list(range(1, 21))
    if again:
        assert 4 in result.plans[-1].plan.layout.active
        assert result.plans[-1].plan.layout.describe() == "DP2 x PP2 x TP1"
    assert result.exit_code == 0


def test_a_device_is_started_again_so_often_and_no_more() -> None:
    job = Direct(nodes=3, come_backs=2).run(1)
    rank = 1
    for again in range(2):
        job.crash(rank)
        assert len(started(job)) == again + 1
        rank = started(job)[-1].workers[0][0]
        job.join(rank)
    job.crash(rank)
    assert [action.workers for action in started(job)] == [((6, 1),), ((7, 1),)]


def test_nobody_is_started_on_a_lost_node_or_when_training_is_over() -> None:
    job = Direct(nodes=3).run(1)
    job.feed(api.AgentLost(node="n1", reason="gone"))
    job.crash(1)
    assert started(job) == []
    job = Direct().run(6)
    job.crash(1)
    assert started(job) == []


def test_nobody_is_started_for_a_job_whose_checkpoint_is_of_its_last_iteration() -> None:
    job = Direct(nodes=3, declare=msgspec.structs.replace(DECLARE, resume_from=DECLARE.iterations))
    job.crash(1)
    assert started(job) == []


def test_a_standby_rank_that_crashes_comes_back_without_a_transition() -> None:
    job = Direct(nodes=1, gpus=5, pp=2).run(1)
    answer = job.crash(4)
    assert job.orders(m.Park, answer) == []
    assert [action.workers for action in started(job)] == [((5, 4),)]


# --- who joins, and when ------------------------------------------------------------------------------------------


def test_a_newcomer_is_nobody_until_it_has_declared() -> None:
    job = crashed()
    job.spawn(6)
    job.crash(3)
    assert 6 not in job.orders(m.Park)[-1][0]
    job.say(6, DECLARE)
    job.park(stepped=2)
    assert 6 not in job.plan.layout.ranks, "it was not asked to park, and is considered when this is over"
    job.run(1)
    assert job.job.pause is not None
    assert 6 in job.job.pause.asked


def test_the_checkpoint_that_a_newcomer_found_does_not_matter() -> None:
    job = crashed()
    job.spawn(6)
    job.say(6, msgspec.structs.replace(DECLARE, resume_from=4))
    assert job.all(JoinRefused) == []
    assert job.job.pause is not None


def test_two_newcomers_cost_one_interruption() -> None:
    job = crashed()
    job.crash(3)
    job.park(stepped=2)
    job.run(1)
    job.join(6)
    job.join(7)
    assert [(ranks, order.epoch) for ranks, order in job.orders(m.Park)[-2:]] == [((0, 2, 4, 5, 6), 4), ((7,), 4)]
    job.step(4, pause=True)
    job.park(6, 7, stepped=0, epoch=4)
    job.park(0, stepped=4, epoch=4)
    job.park(stepped=4)
    reason = job.all(PlanDecided)[-1].reason
    assert reason.startswith("rank 6 joined: saves ")
    assert ", rank 7 joined; " in reason
    assert set(job.plan.layout.active) > {0, 2, 4, 5}
    assert set(job.plan.layout.ranks) == {0, 2, 4, 5, 6, 7}
    job.run(1)
    assert [entry.action for entry in job.all(Reconfigured)] == ["redo", "redo", "between"]


def test_a_newcomer_that_the_planner_has_no_work_for_stands_by() -> None:
    job = Direct(nodes=1, gpus=7, pp=2, dependencies=Dependencies(planner=RandomPlanner(0, 0.0, "cautious"))).run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    job.join(7)
    assert job.job.pause is None
    job.crash(6)
    assert job.orders(m.Park)[-1][1].epoch == 2
    job.say(3, m.Stuck(epoch=2, error="connection reset"))
    job.wait(2)
    job.park(stepped=2)
    assert job.plan.layout.standby == (0, 7)


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_costs_its_iteration_and_then_everything_is_as_before(seed: int) -> None:
    result = adapt(seed, faults=("crash:rank=1@iteration=3,phase=backward",), iterations=20)
    assert result.exit_code == 0
    first, second = [entry.action for entry in result.all(Reconfigured)]
    assert first in ("redo", "commit"), "commit: of the iteration before, whose reports were still on their way"
    assert second == "between"
    assert len(result.failures) == 1
    assert result.plans[-1].plan.layout.describe() == "DP2 x PP2 x TP1"
    assert all(entry.bytes_moved > 0 for entry in result.all(Reconfigured)[1:])


# --- who does not -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("fate", ["odd", "refuses", "dies", "raises", "hangs", "spawn"])
def test_a_newcomer_that_cannot_join_never_stops_the_job(seed: int, fate: Fate) -> None:
    result = adapt(seed, faults=("crash:rank=1@iteration=3",), iterations=80, start_budget_s=20.0, fates=(fate, "fine"))
    assert result.exit_code == 0
    assert committed(result) == list(range(1, 81))
    (entry,) = result.all(JoinRefused)
    assert (entry.rank, entry.node, entry.device) == (4, "n1", 1)
    assert len(result.failures) == 1
    again = [e.rank for e in result.all(WorkerStarted) if e.rank > 4]
    assert again == ([5] if fate == "dies" else [])
    assert len(result.all(PlanInEffect)) == (3 if fate == "dies" else 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fingerprint": "other"}, "declares another fingerprint than the job"),
        ({"iterations": 9, "micro_batches": 4}, "declares another micro batches and iterations than the job"),
    ],
)
def test_a_newcomer_that_trains_something_else_is_turned_away(changes: dict[str, Any], told: str) -> None:
    job = crashed()
    job.spawn(6)
    job.say(6, msgspec.structs.replace(DECLARE, **changes))
    assert [entry.reason for entry in job.all(JoinRefused)] == [told]
    assert killed(job) == [6]
    job.say(6, DECLARE)
    assert job.job.pause is None, "once turned away, it stays away"
    job.crash(6)
    assert job.all(WorkerEnded)[-1] == WorkerEnded(rank=6, exit=-9, epoch=2)
    assert (len(started(job)), len(job.all(FailureFound)), job.end) == (1, 1, None)


def test_a_newcomer_may_tell_other_versions_for_the_record() -> None:
    """What must be equal of them is in the fingerprint."""
    job = crashed()
    job.spawn(6)
    job.say(6, msgspec.structs.replace(DECLARE, software=Software(script_commit="2" * 40)))
    assert job.all(JoinRefused) == []
    assert job.job.pause is not None


def test_a_newcomer_that_objects_is_turned_away_and_the_plan_is_made_without_it() -> None:
    job = crashed()
    job.join(6)
    job.step(3, pause=True)
    job.park(6, stepped=0, epoch=3)
    job.park(0, stepped=3, epoch=3)
    job.park(stepped=3)
    answer = job.say(6, m.Object(epoch=3, reason="too little memory"))
    assert [entry.reason for entry in job.all(JoinRefused)] == ["too little memory"]
    assert killed(job) == [6]
    assert job.orders(m.Park, answer)[0][0] == (0, 2, 3, 4, 5)
    job.crash(6)
    assert job.job.epoch == 4, "its end disturbs nobody"
    job.park(stepped=3)
    assert 6 not in job.plan.layout.ranks
    job.run(1)
    assert job.all(Reconfigured)[-1].action == "between"


def test_a_newcomer_that_is_ready_cannot_refuse_any_more() -> None:
    job = crashed()
    job.join(6)
    job.say(6, m.Refuse(reason="too late"))
    assert job.all(JoinRefused) == []
    assert killed(job) == []


def test_an_exception_of_newcomers_is_not_the_scripts() -> None:
    """An import that fails twice on a bad device would end the job with 93."""
    job = crashed()
    job.crash(3)
    job.park(stepped=2)
    job.run(1)
    for rank in (6, 7):
        job.spawn(rank)
        job.say(rank, m.Raised(iteration=0, error="ImportError: x", traceback="..."))
        job.crash(rank, status=1)
    assert [entry.reason for entry in job.all(JoinRefused)] == ["raised ImportError: x before it was ready"] * 2
    assert len(started(job)) == 2
    job.crash(5)
    job.park(stepped=3)
    assert job.end is None


@pytest.mark.parametrize("rank", [6, None])
def test_a_fork_that_fails_is_a_newcomer_less(rank: int | None) -> None:
    job = crashed()
    job.feed(api.SpawnRefused(node="n2", reason="not for us"))
    assert job.all(JoinRefused) == []
    job.feed(api.SpawnRefused(node="n1", reason="cannot fork", rank=rank))
    assert [entry.reason for entry in job.all(JoinRefused)] == ["cannot fork"]
    assert job.end is None


def test_a_newcomer_that_never_gets_ready_is_ended_after_the_starts_budget() -> None:
    job = crashed(start_budget_s=30.0)
    job.spawn(6)
    for iteration in range(3, 7):
        job.wait(9)
        job.step(iteration)
    assert ["not ready within 30 s" in entry.reason for entry in job.all(JoinRefused)] == [True]
    assert killed(job) == [6]


def test_a_newcomer_of_a_node_that_is_lost_is_forgotten() -> None:
    job = crashed()
    job.feed(api.AgentLost(node="n1", reason="gone"))
    job.spawn(6)
    assert 6 not in job.job.members


def test_a_newcomer_for_which_no_plan_is_found_interrupts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible(*_: object, **__: object) -> None:
        raise NotEnoughDevicesError("no layout")

    job = crashed()
    monkeypatch.setattr(next_plan, "best_while_running", impossible)
    job.join(6)
    assert job.job.pause is None
    assert job.end is None


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spawned", [True, False])
def test_newcomers_that_are_still_starting_do_not_hold_the_end(spawned: bool) -> None:
    job = crashed()
    if spawned:
        job.spawn(6)
    for iteration in range(3, 7):
        job.step(iteration)
    for rank in (0, 2, 3, 4, 5):
        job.say(rank, m.Finished(iteration=6))
    assert job.orders(m.Halt)[-1][0] == (0, 2, 3, 4, 5)
    if not spawned:
        job.spawn(6)
    assert killed(job) == [6]
    for rank in (0, 2, 3, 4, 5):
        job.crash(rank, status=0)
    assert job.end is not None
    assert (job.end.exit_code, job.end.workers_leave) == (0, False)


def test_a_newcomer_that_is_ready_leaves_with_the_others() -> None:
    job = crashed()
    for iteration in range(3, 6):
        job.step(iteration)
    job.join(6)
    job.step(6)
    for rank in (0, 2, 3, 4, 5):
        job.say(rank, m.Finished(iteration=6))
    assert job.orders(m.Halt)[-1][0] == (0, 2, 3, 4, 5, 6)
    assert killed(job) == []
    for rank in (0, 2, 3, 4, 5, 6):
        job.crash(rank, status=0)
    assert job.end is not None
    assert (job.end.exit_code, job.end.workers_leave) == (0, True)


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("trigger", ["join", "joined", "pause", "begin"])
def test_a_newcomer_that_dies_on_its_way_in_costs_no_iteration(seed: int, trigger: Any) -> None:
    again = Disturbance("kill", trigger, nth=3 if trigger == "begin" else 1, rank=4)
    result = adapt(seed, again, faults=("crash:rank=1@iteration=3",), iterations=20)
    assert result.exit_code == 0
    assert committed(result) == list(range(1, 21))


def test_the_outcome_that_told_everybody_to_pause_is_kept() -> None:
    job = crashed()
    job.join(6)
    job.step(3, pause=True)
    job.park(6, stepped=0, epoch=3)
    job.park(0, stepped=3, epoch=3)
    job.park(stepped=3)
    job.confirm()
    assert job.orders(m.Go)[-1][1].finish == outcome(3, pause=True)
