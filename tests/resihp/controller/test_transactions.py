"""From one plan to the next: nothing takes effect before all have acknowledged it, nothing refused is acted on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.controller.fail_stop.failures import MAX_REBUILDS
from resihp.controller.interface import Dependencies
from resihp.errors import PlanError
from resihp.faults import Fault
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.record.journal import (
    EvaluationDone,
    FailureFound,
    IterationCommitted,
    JobEnded,
    NodeLost,
    PlanDecided,
    PlanInEffect,
    PlanRefused,
    Reconfigured,
    Suspected,
)
from resihp.simulator.harness import Disturbance
from tests.resihp.controller.direct import DECLARE, Direct, outcome
from tests.resihp.controller.test_controller import adapt, committed, run

FEW = range(5)


def refusing(plan: Plan) -> None:
    """A checker that refuses the plan of epoch 2."""
    if plan.epoch == 2:
        raise PlanError("ranks 0 and 2 wait for each other")


# --- in effect or not ---------------------------------------------------------------------------------------------


def test_a_plan_takes_effect_when_the_last_rank_is_ready_and_not_before() -> None:
    job = Direct(gpus=3, pp=2)  # three replicas
    assert job.orders(m.Go) == []
    job.confirm()
    assert [ranks for ranks, _ in job.orders(m.Go)] == [(0, 1, 2, 3, 4, 5)]
    job.ready(0, 1, 2, 3, 4)
    assert job.all(PlanInEffect) == []
    assert job.job.record.plan is None
    assert job.orders(m.Begin) == []
    answer = job.ready(5)
    kinds = [type(action.entry) if isinstance(action, api.Log) else type(action) for action in answer]
    assert kinds[:2] == [PlanInEffect, api.Order]
    assert job.orders(m.Begin) == [((0, 1, 2, 3, 4, 5), m.Begin(epoch=1))]


def test_a_standby_rank_has_to_acknowledge_too() -> None:
    job = Direct(nodes=1, gpus=3, tp=1, pp=2)
    job.confirm()
    job.ready(0, 1)
    assert job.all(PlanInEffect) == []
    job.ready(2)
    assert [entry.epoch for entry in job.all(PlanInEffect)] == [1]


def test_a_rank_that_says_ready_twice_counts_once() -> None:
    job = Direct()
    job.run(1).crash(1)
    job.park(stepped=1)
    job.confirm()
    first = job.plan.layout.ranks[0]
    job.ready(first, bytes_received=100, extra_bytes=7)
    job.ready(first, bytes_received=100, extra_bytes=7)
    job.ready(*job.plan.layout.ranks[1:], bytes_received=10, extra_bytes=9)
    job.step(2)
    (entry,) = job.all(Reconfigured)
    assert (entry.bytes_moved, entry.extra_bytes) == (100 + 10 * (len(job.plan.layout.ranks) - 1), 9)


def test_a_failure_before_the_plan_is_in_effect_starts_again_from_the_old_state() -> None:
    """Rank 0 has acknowledged and holds both; which of them counts is the controller's to say."""
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.confirm()
    job.ready(0)
    job.crash(3)
    job.park(0, stepped=2, holds=(1, 2))
    job.park(stepped=2)
    base = job.orders(m.Propose)[-1][1].base
    assert (base.epoch, base.layout) == (1, Layout.uniform(tp=1, pp=2, dp=3, layers=6))
    assert base.survivors == (0, 2, 4, 5)


@pytest.mark.parametrize(("parked", "lost"), [((0, 2, 3), ["n3"]), ((0, 4, 5), [])])
def test_a_silent_node_is_given_up_in_a_transition_if_it_is_waited_for(
    parked: tuple[int, ...], lost: list[str]
) -> None:
    """Ranks 4 and 5 are on n3."""
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(*parked, stepped=2)
    for _ in range(8):
        for node in ("n1", "n2"):
            job.feed(api.AgentBeat(node=node, beat=m.Beat(workers=())), 0.0)
        job.feed(api.Tick(), 1.0)
    assert [entry.node for entry in job.all(NodeLost)] == lost


def test_who_was_not_asked_to_park_gets_no_work_for_saying_that_it_has() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.join(6)  # in its place, too late to be asked
    job.park(6, stepped=0)
    job.park(stepped=2)
    assert job.plan.epoch == 2
    assert 6 not in job.plan.layout.ranks


def test_a_failure_after_the_plan_is_in_effect_starts_from_the_new_state() -> None:
    """The order to begin has not reached rank 0 yet, which holds both."""
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.confirm()
    job.ready()
    second = job.plan.layout
    victim = second.active[-1]
    job.crash(victim)
    job.park(0, stepped=2, holds=(1, 2))
    job.park(stepped=2)
    base = job.orders(m.Propose)[-1][1].base
    assert (base.epoch, base.layout) == (2, second)
    assert base.survivors == tuple(rank for rank in second.active if rank != victim)


def test_a_rank_that_lost_its_state_is_no_survivor_but_may_work() -> None:
    job = Direct().run(2)
    job.crash(1)
    job.park(0, stepped=2, holds=())
    job.park(stepped=2)
    base = job.orders(m.Propose)[-1][1].base
    assert base.survivors == (2, 3)
    assert 0 in job.plan.layout.ranks


def test_nothing_has_to_move_while_nothing_is_committed() -> None:
    job = Direct().run()
    job.crash(1)
    job.park(stepped=0)
    propose = job.orders(m.Propose)[-1][1]
    assert propose.base is None
    assert propose.next_iteration == 1
    assert propose.nodes == {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n1"}
    assert job.all(PlanDecided)[-1].bytes_planned == 0


def test_what_has_to_travel_is_in_the_journal() -> None:
    """Ranks 0 and 3 form the replica that is left, of stages that have been 0's and 3's: only wider ones move state."""
    job = Direct(nodes=1, gpus=4, tp=2, pp=1).run(2)
    job.crash(1)
    job.park(stepped=2)
    decided = job.all(PlanDecided)[-1]
    assert decided.plan.layout.active == (0, 2, 3)
    assert decided.bytes_planned > 0
    assert decided.reason.startswith("rank 1 killed by signal 9 (SIGKILL); ")


def test_state_that_nobody_holds_any_more_ends_the_job_and_says_what_to_type() -> None:
    job = Direct().run(2)
    job.crash(1)
    job.crash(3)
    job.park(stepped=2)
    assert job.end is not None
    assert job.end.exit_code == 5
    assert "was lost with ranks 1, 3; there is no checkpoint to continue from" in job.end.reason
    assert isinstance(job.actions[-1], api.End)


def test_where_there_is_a_checkpoint_the_end_says_how_to_go_on_from_it() -> None:
    job = Direct().run(2)
    for rank in (0, 1):
        job.say(rank, m.CheckpointPart(epoch=1, iteration=2, folder="f", file=f"r{rank}", bytes=9, seconds=0.5))
    job.crash(1)
    job.crash(3)
    job.park(stepped=2)
    assert job.end is not None
    assert job.end.reason.endswith("; to continue from the checkpoint of iteration 2: --resume local-1")


SLURM = {"slurm": True, "batch_node": "n1", "may_requeue": True}


def lost(checkpointed: bool = False, **settings: Any) -> api.End:
    """How a job under Slurm ends that has lost both holders of a stage after two iterations."""
    job = Direct(**SLURM | settings).run(2)
    for rank in (0, 1) if checkpointed else ():
        job.say(rank, m.CheckpointPart(epoch=1, iteration=2, folder="f", file=f"r{rank}", bytes=9, seconds=0.5))
    job.crash(1)
    job.crash(3)
    job.park(stepped=2)
    assert job.end is not None
    (ended,) = job.all(JobEnded)
    assert (ended.exit_code, ended.state) == (job.end.exit_code, "failed")
    return job.end


def test_lost_state_has_slurm_run_the_job_again_from_its_checkpoint() -> None:
    end = lost(checkpointed=True, restarts_left=0)
    assert (end.exit_code, end.requeue) == (75, True)
    assert end.reason.endswith("was lost with ranks 1, 3; to be run again, from the checkpoint of iteration 2")


def test_without_a_checkpoint_it_begins_again_while_runs_are_left() -> None:
    end = lost(restarts_left=1)
    assert (end.exit_code, end.requeue) == (75, True)
    assert "to be run again, from the beginning: there is no checkpoint, so 2 iterations are trained" in end.reason
    end = lost(restarts_left=0)
    assert (end.exit_code, end.requeue) == (5, False)
    assert "not requeued: this run added no checkpoint, and [slurm] restarts is used up" in end.reason


def test_a_job_that_went_on_from_a_checkpoint_goes_on_from_it_once_more() -> None:
    resumed = msgspec.structs.replace(DECLARE, resume_from=2)
    job = Direct(declare=resumed, restarts_left=1, **SLURM).run(1)
    job.crash(1)
    job.crash(3)
    job.park(stepped=3)
    assert job.end is not None
    assert job.end.reason.endswith("; to be run again, from the checkpoint of iteration 2")


def test_a_job_that_slurm_is_not_to_run_again_ends_for_good() -> None:
    end = lost(checkpointed=True, may_requeue=False, restarts_left=2)
    assert (end.exit_code, end.requeue) == (5, False)
    assert "not run again, because its batch script forbids it; submit it again to continue" in end.reason


def test_moving_state_has_a_budget_from_its_last_sign_of_progress() -> None:
    job = Direct(transition_budget_s=60.0).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.confirm()
    epoch = job.job.epoch
    job.wait(200, primitives={3: 1})
    assert job.job.epoch == epoch
    job.wait(57)
    assert job.job.epoch == epoch
    job.wait(5)
    assert job.job.epoch == epoch + 1
    assert job.end is None


def test_ranks_that_check_a_large_plan_are_not_taken_for_hung_before_the_transitions_budget() -> None:
    """No primitive passes meanwhile, and beats go on."""
    job = Direct(transition_budget_s=60.0).run(2)
    job.crash(1)
    job.park(stepped=2)
    assert job.job.stage == "proposing"

    def fenced() -> list[int]:
        return [action.rank for action in job.actions if isinstance(action, api.SignalWorker)]

    job.wait(55, activity="idle")
    assert fenced() == []
    job.wait(10, activity="idle")
    assert set(fenced()) == set(job.job.live)


def test_who_has_moved_its_state_gives_the_others_their_time_again() -> None:
    job = Direct(transition_budget_s=60.0).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.confirm()
    epoch = job.job.epoch
    job.wait(57, primitives={})
    job.ready(0)
    job.wait(57, primitives={})
    assert job.job.epoch == epoch
    job.wait(5, primitives={})
    assert job.job.epoch == epoch + 1


def test_a_rank_that_hangs_while_state_moves_is_fenced() -> None:
    job = Direct(transition_budget_s=60.0).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.confirm()
    job.ready(0, 2)
    job.wait(64, activity="compute")
    fenced = [action.rank for action in job.actions if isinstance(action, api.SignalWorker)]
    assert fenced == [3]


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.parametrize("kind", ["kill", "crash", "stop"])
@pytest.mark.parametrize("phase", ["park", "groups", "transfer", "resume"])
def test_faults_strike_in_each_phase_of_a_transition(seed: int, kind: str, phase: str) -> None:
    faults = ("crash:rank=1@iteration=3,phase=backward", f"{kind}:rank=4@iteration=3,phase={phase}")
    result = adapt(seed, faults=faults, nodes=3)
    assert result.exit_code == 0
    assert committed(result) == [1, 2, 3, 4, 5, 6]
    assert {rank for failure in result.failures for rank in failure.ranks} == {1, 4}
    effective = [entry.epoch for entry in result.all(PlanInEffect)]
    assert effective == sorted(set(effective))


def test_a_fault_whose_transition_never_came_did_not_fire() -> None:
    result = adapt(0, faults=("kill:rank=2@iteration=3,phase=transfer",))
    assert result.exit_code == 1
    assert "kill:rank=2@iteration=3,phase=transfer did not fire: its transition never came" in result.reason


# --- plans that are refused ---------------------------------------------------------------------------------------


def test_a_plan_that_the_checker_refuses_is_never_proposed() -> None:
    refused: list[int] = []

    def once(plan: Plan) -> None:
        if plan.epoch > 1 and not refused:
            refused.append(plan.epoch)
            raise PlanError("ranks 0 and 2 wait for each other")

    job = Direct(nodes=3, dependencies=Dependencies(check=once)).run(2)
    job.crash(1)
    job.park(stepped=2)
    assert job.all(PlanRefused) == [PlanRefused(epoch=2, rank=None, reason="ranks 0 and 2 wait for each other")]
    assert [replica.ranks for replica in job.plan.layout.replicas] == [(2, 3), (4, 5)]
    assert job.plan.layout.standby == (0,)


def test_when_not_even_the_cautious_plan_can_be_carried_out_the_job_ends_with_1() -> None:
    job = Direct(nodes=3, dependencies=Dependencies(check=refusing)).run(2)
    job.crash(1)
    job.park(stepped=2)
    assert [entry.rank for entry in job.all(PlanRefused)] == [None, None]
    assert job.end is not None
    assert (job.end.exit_code, "wait for each other" in job.end.reason) == (1, True)


def test_a_rank_that_objects_gets_a_cautious_plan() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    answer = job.say(4, m.Object(epoch=2, reason="too little memory"))
    assert job.all(PlanRefused) == [PlanRefused(epoch=2, rank=4, reason="too little memory")]
    assert [order.epoch for _, order in job.orders(m.Park, answer)] == [3]
    assert job.orders(m.Go)[-1][1].epoch == 1
    job.park(stepped=2)
    assert [replica.ranks for replica in job.plan.layout.replicas] == [(2, 3), (4, 5)]
    assert job.orders(m.Propose)[-1][1].base.epoch == 1
    job.run(1)
    (entry,) = job.all(Reconfigured)
    assert (entry.epoch, entry.attempts, entry.action, entry.failures) == (3, 2, "redo", (1,))
    assert job.end is None


def test_another_digest_is_an_objection() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.say(4, m.Confirm(epoch=2, digest="0" * 64))
    assert [(entry.rank, "digest" in entry.reason) for entry in job.all(PlanRefused)] == [(4, True)]
    assert job.job.epoch == 3


def test_who_has_confirmed_a_plan_cannot_object_to_it() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.confirm(0)
    job.say(0, m.Object(epoch=2, reason="another thought"))
    assert job.all(PlanRefused) == []
    job.run(1)
    assert job.job.record.committed == 3


def test_a_second_refusal_ends_with_1() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.say(4, m.Object(epoch=2, reason="too little memory"))
    job.park(stepped=2)
    job.say(4, m.Object(epoch=3, reason="too little memory"))
    assert job.end is not None
    assert job.end.exit_code == 1
    assert "rank 4" in job.end.reason


def test_a_loss_after_a_refusal_lets_the_planner_try_again() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.say(4, m.Object(epoch=2, reason="too little memory"))
    job.crash(3)
    job.park(stepped=2)
    assert job.end is None
    assert set(job.plan.layout.active) == {0, 2, 4, 5}, "all that are left have work again"


def test_a_plan_in_effect_ends_the_caution() -> None:
    """Found by the fuzz (storm 708): communication broke under the cautious plan; the next refusal was the last."""
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.say(4, m.Object(epoch=2, reason="too little memory"))
    job.park(stepped=2)
    job.run()
    job.say(2, m.Stuck(epoch=3, error="connection reset by peer"))
    job.wait(2)
    job.park(stepped=2)
    job.say(4, m.Object(epoch=4, reason="too little memory"))
    assert job.end is None
    job.park(stepped=2)
    job.run(1)
    assert job.job.record.committed == 3


def test_a_refused_newcomers_plan_leaves_everything_as_it_was() -> None:
    """Nobody was lost: the plan in effect is proposed once more, with the newcomer beside it."""
    job = Direct(nodes=3, iteration_s=5.0).run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(1)
    before = job.job.record.plan
    assert before is not None
    job.join(6)
    job.step(3, pause=True)
    job.park(*job.job.pause.asked, stepped=3, epoch=3)  # type: ignore[union-attr]
    job.say(2, m.Object(epoch=3, reason="too little memory"))
    job.park(stepped=3)
    assert (job.plan.layout.replicas, job.plan.assignment) == (before.layout.replicas, before.assignment)
    assert 6 in job.plan.layout.standby
    job.run(1)
    assert job.all(Reconfigured)[-1].action == "between"
    assert job.job.pause is None, "it was considered once"


def test_an_objection_to_the_first_plan_ends_the_job() -> None:
    assert run(0, objects=1).exit_code == 2
    result = run(0, other_digest=1)
    assert (result.exit_code, result.all(PlanRefused)) == (2, [])


# --- parking between two iterations -------------------------------------------------------------------------------


def pausing(iterations: int = 2, **options: Any) -> Direct:
    """Three nodes of two; rank 1 died, training goes on without it, and rank 6 has come in its place."""
    job = Direct(nodes=3, **{"iteration_s": 5.0, **options}).run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(iterations - 1)
    job.join(6)
    assert job.job.pause is not None
    return job


def test_a_pause_asks_for_the_end_of_an_iteration_and_training_goes_on() -> None:
    job = pausing()
    assert job.orders(m.Park)[-1] == (
        (0, 2, 3, 4, 5, 6),
        m.Park(epoch=3, reason=job.job.pause.reason, after_iteration=True),
    )
    assert job.job.pause.reason.startswith("rank 6 joined: saves ")
    assert (job.job.epoch, job.job.training) == (2, True)
    job.step(3)
    job.step(4, pause=True)
    assert job.job.record.committed == 4
    parks = len(job.orders(m.Park))
    job.park(6, stepped=0, epoch=3)
    assert job.job.training, "a rank without work stands still anyway"
    job.park(0, stepped=4, epoch=3)
    assert (job.job.epoch, job.job.changing) == (3, True)
    job.park(stepped=4)
    assert len(job.orders(m.Park)) == parks, "nobody is asked twice"
    decided = job.all(PlanDecided)[-1]
    assert (decided.action, decided.next_iteration, decided.reason.split(":")[0]) == ("between", 5, "rank 6 joined")
    assert 6 in decided.plan.layout.active
    job.run(1)
    (_, entry) = job.all(Reconfigured)
    assert (entry.action, entry.failures, entry.attempts) == ("between", (), 1)


def test_an_iteration_whose_reports_are_on_the_way_counts_between_two_iterations() -> None:
    job = pausing()
    job.step(3, 0, pause=True)
    job.park(0, stepped=3, epoch=3)
    job.park(stepped=3)
    assert job.job.record.committed == 3
    assert job.all(PlanDecided)[-1].action == "between"


def test_a_failure_while_pausing_parks_at_once_for_the_same_epoch() -> None:
    job = pausing()
    job.park(6, stepped=0, epoch=3)
    job.crash(5)
    assert job.orders(m.Park)[-1][0] == (0, 2, 3, 4, 6)
    assert (job.orders(m.Park)[-1][1].epoch, job.orders(m.Park)[-1][1].after_iteration) == (3, False)
    job.park(stepped=2)
    decided = job.all(PlanDecided)[-1]
    assert (decided.action, decided.next_iteration) == ("redo", 3)
    assert 6 in decided.plan.layout.active


def test_a_goal_reached_while_pausing_ends_the_job() -> None:
    job = pausing(iterations=4)
    job.step(5)
    job.step(6, pause=True)
    for rank in job.job.record.plan.layout.active:  # type: ignore[union-attr]
        job.say(rank, m.Finished(iteration=6))
        job.park(rank, stepped=6, epoch=3)
    assert job.job.stage == "halting"
    assert job.orders(m.Halt)[-1][0] == (0, 2, 3, 4, 5, 6)


EVALUATES = msgspec.structs.replace(DECLARE, evaluates=True)


def evaluated(iteration: int, epoch: int = 1) -> m.Evaluated:
    return m.Evaluated(epoch=epoch, iteration=iteration, loss=1.0 / iteration, tokens=4096)


def test_an_evaluation_is_on_record_once_and_after_the_iteration_that_it_is_of() -> None:
    job = Direct(declare=EVALUATES).run(1)
    job.step(2, 0, 1)
    job.say(0, evaluated(2))
    assert job.all(EvaluationDone) == [], "ranks 2 and 3 have not reported the step yet"
    job.step(2, 2, 3)
    for rank in (1, 2, 3):
        job.say(rank, evaluated(2))
    kinds = [type(a.entry) for a in job.actions if isinstance(a, api.Log)][-2:]
    assert kinds == [IterationCommitted, EvaluationDone]
    assert job.all(EvaluationDone) == [EvaluationDone(epoch=1, iteration=2, loss=0.5, tokens=4096)]
    job.crash(1)
    job.park(stepped=2)
    job.run()
    assert job.orders(m.Begin)[-1][1].evaluated == 2, "it is not evaluated again"


def test_a_loss_in_the_evaluation_after_the_last_step_is_a_failure_like_any_other() -> None:
    job = Direct(declare=EVALUATES).run(6)
    job.say(0, evaluated(6))
    job.say(0, m.Finished(iteration=6))
    job.crash(1)
    assert job.orders(m.Park), "or ranks 2 and 3 would wait for it for ever"
    job.park(stepped=6)
    job.run()
    assert job.orders(m.Begin)[-1][1].evaluated == 6, "rank 0 had it: all have come to its end, or could have"
    for rank in job.job.record.active:
        assert not job.orders(m.Halt)
        job.say(rank, m.Finished(iteration=6))
    assert job.orders(m.Halt)[-1][0] == (0, 2, 3)
    assert job.job.record.committed == 6


def test_a_loss_after_the_last_evaluation_disturbs_nobody() -> None:
    job = Direct(declare=EVALUATES).run(6)
    for rank in range(4):
        job.say(rank, evaluated(6))
    for rank in range(3):
        job.say(rank, m.Finished(iteration=6))
    job.crash(3)
    assert not job.orders(m.Park)
    assert job.orders(m.Halt)[-1][0] == (0, 1, 2)


def test_a_signal_while_pausing_ends_the_job() -> None:
    """Found by the fuzz (storm 14455): the request to pause outlived the job."""
    job = pausing()
    job.feed(api.Signalled(signal=2))
    job.feed(api.Signalled(signal=2))
    assert job.end is not None
    assert job.end.exit_code == 130


def test_an_answer_after_the_last_iteration_does_not_start_a_transition() -> None:
    job = pausing(iterations=4)
    job.step(5)
    job.step(6, pause=True)
    job.say(0, m.Finished(iteration=6))
    job.park(0, stepped=6, epoch=3)
    assert job.job.stage == "running"
    assert job.job.transition is None


def test_nobody_is_interrupted_for_the_last_iteration() -> None:
    job = Direct(nodes=3).run(1)
    job.crash(1)
    job.park(stepped=1)
    job.run(4)
    assert job.job.record.committed == 5
    job.join(6)
    assert job.job.pause is None


def test_a_rank_whose_last_synchronisation_broke_is_told_to_park_at_once() -> None:
    """Found by the fuzz (storm 103): its peers had stepped and parked; it waited for an order that was on its way."""
    job = pausing()
    job.step(3, 0, pause=True)
    job.park(0, stepped=3, epoch=3)
    answer = job.say(5, m.Stuck(epoch=2, error="connection reset by peer"))
    assert [(ranks, o.epoch, o.after_iteration) for ranks, o in job.orders(m.Park, answer)] == [
        ((2, 3, 4, 5, 6), 3, False)
    ]
    job.park(5, stepped=2, ready=True)
    job.park(stepped=3)
    decided = job.all(PlanDecided)[-1]
    assert (decided.action, decided.finish) == ("commit", outcome(3, pause=True))
    assert decided.reason.startswith("rank 6 joined: saves ")
    assert "; communication failed: rank 5: connection reset by peer; " in decided.reason


def test_a_transfer_that_broke_just_before_the_first_answer_is_not_forgotten() -> None:
    job = pausing()
    job.say(5, m.Stuck(epoch=2, error="connection reset by peer"))
    answer = job.park(5, stepped=2, epoch=3)
    assert [(o.epoch, o.after_iteration) for _, o in job.orders(m.Park, answer)] == [(3, False)]
    job.park(stepped=2)
    decided = job.all(PlanDecided)[-1]
    assert (decided.action, decided.next_iteration) == ("redo", 3), "an iteration was under way"


def test_the_last_answer_to_a_pause_may_be_the_first_of_a_rank_with_work() -> None:
    job = Direct(nodes=1, pp=1).run(2)
    job.crash(1)
    job.park(stepped=2)
    job.run(1)
    job.join(2)
    job.step(4, pause=True)
    job.park(2, stepped=0, epoch=3)
    job.park(0, stepped=4, epoch=3)
    assert job.plan.epoch == 3
    assert job.plan.layout.active == (0, 2)


def beats(job: Direct, stopped: int, seconds: float) -> None:
    """All agents beat; that rank's process is stopped."""
    for _ in range(round(seconds / 0.25)):
        for node in ("n1", "n2", "n3"):
            ranks = [rank for rank in job.job.live if job.job.members[rank].node == node]
            told = tuple(
                m.WorkerBeat(rank=rank, age_s=0.1, state="T" if rank == stopped else "S", progress=None)
                for rank in ranks
            )
            job.feed(api.AgentBeat(node=node, beat=m.Beat(workers=told)), 0.0)
        job.feed(api.Tick(), 0.25)


def test_a_stopped_process_that_is_to_park_is_given_a_moment_and_no_more() -> None:
    job = Direct(nodes=3).run(2)
    job.crash(1)
    job.park(0, 2, 3, 4, stepped=2)
    beats(job, 5, 0.5)
    assert not [a for a in job.actions if isinstance(a, api.SignalWorker)]
    beats(job, 5, 4)
    assert [a.rank for a in job.actions if isinstance(a, api.SignalWorker)] == [5]


def test_nobody_else_is_hurried_for_a_stopped_process_whose_end_settles_it() -> None:
    job = pausing()
    job.step(3, pause=True)
    job.park(0, stepped=3, epoch=3)
    beats(job, 5, 8)
    assert [a.rank for a in job.actions if isinstance(a, api.SignalWorker)] == [5]
    assert [park for _, park in job.orders(m.Park) if park.epoch == 3 and not park.after_iteration] == []


def test_the_first_iteration_of_a_job_may_take_the_time_of_a_start() -> None:
    """Kernels are compiled, caches filled; how long an iteration takes is not known yet."""
    job = Direct().run()
    job.wait(60, primitives={}, activity="compute")
    assert not [a for a in job.actions if isinstance(a, api.SignalWorker)]
    assert job.orders(m.Park) == []
    job.step(1)
    assert job.job.record.committed == 1


def test_why_a_rank_is_suspected_is_told() -> None:
    job = Direct().run(3)
    job.wait(30, primitives={}, activity="compute")
    told = [entry.evidence for entry in job.all(Suspected)]
    assert told
    assert all("while its peers wait for it" in evidence for evidence in told)


def test_a_rank_that_hangs_before_it_can_pause_is_urged_then_fenced() -> None:
    job = pausing(iteration_s=0.5, declare=msgspec.structs.replace(DECLARE, iterations=600))
    job.step(3, pause=True)
    job.park(0, 2, 3, 4, 6, stepped=3, epoch=3)
    job.wait(5)
    assert job.orders(m.Park)[-1] == ((5,), job.orders(m.Park)[-1][1])
    assert job.orders(m.Park)[-1][1].after_iteration is False
    job.wait(12)
    assert [action.rank for action in job.actions if isinstance(action, api.SignalWorker)] == [5]
    assert [ranks for ranks, park in job.orders(m.Park) if not park.after_iteration][-2:] != [(5,), (5,)], "urged once"


@pytest.mark.parametrize("seed", FEW)
def test_hangs_are_found_while_pausing(seed: int) -> None:
    crash = Disturbance("kill", "sync", nth=9, delay=0.1, rank=1)
    hang = Disturbance("hang", "pause", rank=4)
    result = adapt(seed, crash, hang, nodes=3, iterations=60)
    assert result.exit_code == 0
    assert committed(result) == list(range(1, 61))
    assert {rank for failure in result.failures for rank in failure.ranks} == {1, 4}


# --- connections that are cut on purpose --------------------------------------------------------------------------


def test_a_disconnect_cuts_one_connection_after_the_waiting_rank_was_released() -> None:
    fault = Fault(id=0, kind="disconnect", node="n2", iteration=2)
    job = Direct(faults=(fault,)).run(1)
    answer = job.say(2, m.FaultDue(fault=0))
    kinds = [type(action).__name__ for action in answer]
    assert kinds == ["Log", "Order", "CutConnection"]
    assert job.orders(m.FaultGo, answer) == [((2,), m.FaultGo(fault=0, fire=False))]
    assert answer[-1] == api.CutConnection(node="n2")
    assert job.orders(m.FaultGo, job.say(3, m.FaultDue(fault=0))) == [((3,), m.FaultGo(fault=0, fire=False))]
    for iteration in range(2, 7):
        job.step(iteration)
    for rank in range(4):
        job.say(rank, m.Finished(iteration=6))
    for rank in range(4):
        job.crash(rank, status=0)
    assert job.end is not None
    assert job.end.exit_code == 0


def test_a_connection_to_a_rank_or_to_a_dead_node_cannot_be_cut() -> None:
    job = Direct(nodes=3).run(1)
    job.feed(api.InjectAsked(request=1, fault=Fault(id=9, kind="disconnect", rank=1)))
    job.feed(api.AgentLost(node="n3", reason="gone"))
    job.feed(api.InjectAsked(request=2, fault=Fault(id=9, kind="disconnect", node="n3")))
    replies = {a.request: a for a in job.actions if isinstance(a, api.Reply)}
    assert not replies[1].ok
    assert "not a rank" in replies[1].text
    assert not replies[2].ok
    assert "already gone" in replies[2].text
    assert not [action for action in job.actions if isinstance(action, api.CutConnection)]


# --- signs of life ---------------------------------------------------------------------------------------------------


def test_an_agent_that_tells_of_an_exit_is_not_silent() -> None:
    """Found by the fuzz (18226): a node was given up just after its agent had told how one of its workers ended."""
    job = Direct(nodes=1, gpus=3).run(1)
    for _ in range(19):
        job.feed(api.Tick(), 0.25)
    job.crash(2, status=0)
    for _ in range(4):
        job.feed(api.Tick(), 0.25)
    assert not [action for action in job.actions if isinstance(action, api.DropNode)]
    assert job.end is None


# --- accounting ---------------------------------------------------------------------------------------------------


def test_a_killed_device_and_a_crashed_process_are_told_apart() -> None:
    kill = adapt(0, faults=("kill:rank=1@iteration=3",)).failures
    crash = adapt(0, faults=("crash:rank=1@iteration=3",)).failures
    assert [failure.component for failure in (*kill, *crash)] == ["device", "process"]


def test_the_newcomers_iterations_count_from_the_state_that_they_got() -> None:
    job = pausing()
    job.step(3, pause=True)
    job.park(0, stepped=3, epoch=3)
    job.park(stepped=3)
    job.run()
    assert job.job.members[6].stepped == 3
    job.step(4)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [1, 2, 3, 4]
    assert len(job.all(FailureFound)) == 1


def test_communication_that_fails_again_and_again_ends_the_job() -> None:
    """All ranks are alive: nothing shrinks by it, and it could go on for ever."""
    job = Direct().run(1)
    for _ in range(MAX_REBUILDS):
        job.say(0, m.Stuck(epoch=job.job.epoch, error="connection reset"))
        job.wait(1)
        job.park(stepped=1)
        job.run()
    assert job.end is None
    job.say(0, m.Stuck(epoch=job.job.epoch, error="connection reset"))
    job.wait(1)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (1, False)
    assert "connection reset" in job.end.reason


def test_communication_that_fails_now_and_then_does_not() -> None:
    job = Direct(declare=msgspec.structs.replace(DECLARE, iterations=100)).run(1)
    for _ in range(3 * MAX_REBUILDS):
        done = job.job.record.committed
        job.say(0, m.Stuck(epoch=job.job.epoch, error="connection reset"))
        job.wait(1)
        job.park(stepped=done)
        job.run(1)
    assert job.end is None
    assert len(job.all(Reconfigured)) == 3 * MAX_REBUILDS


def part(rank: int, iteration: int, epoch: int, **more: Any) -> m.CheckpointPart:
    file = f"part-e{epoch:04d}-r{rank:05d}.pt"
    return m.CheckpointPart(epoch=epoch, iteration=iteration, folder="saved", file=file, bytes=10, seconds=0.1, **more)


def test_a_checkpoint_counts_whatever_plan_is_in_effect_when_its_last_part_comes() -> None:
    """It is written behind training: of an iteration that is committed, by those who held one replica then."""
    job = Direct(nodes=3).run(2)
    first, *others = job.job.record.writers[1]
    job.say(first, part(first, 2, 1))
    victim = next(rank for rank in job.job.record.active if rank not in (first, *others))
    job.crash(victim)
    job.park(stepped=2)
    job.run(1)
    assert job.job.record.plan is not None
    assert job.job.record.plan.epoch == 2
    answers = [job.say(rank, part(rank, 2, 1)) for rank in others]
    (commit,) = [action for answer in answers for action in answer if isinstance(action, api.CommitCheckpoint)]
    assert commit.iteration == 2
    assert [file for file, _ in commit.parts] == [part(rank, 2, 1).file for rank in (first, *others)]


def test_a_part_that_could_not_be_written_is_said_so_and_counts_for_nothing() -> None:
    job = Direct(nodes=3).run(2)
    writers = job.job.record.writers[1]
    answers = [job.say(rank, part(rank, 2, 1, error="OSError: disk full")) for rank in writers]
    said = [action for answer in answers for action in answer]
    assert not [action for action in said if isinstance(action, api.CommitCheckpoint)]
    assert any(isinstance(action, api.Say) and "disk full" in action.text for action in said)


def test_parts_of_no_plan_that_is_known_make_no_checkpoint() -> None:
    job = Direct(nodes=3).run(2)
    assert job.say(0, part(0, 2, 77)) == []


def test_what_a_plan_before_wrote_of_an_iteration_that_does_not_count_is_no_checkpoint() -> None:
    job = Direct(nodes=3).run(2)
    writers = job.job.record.writers[1]
    job.crash(5)
    job.park(stepped=2)
    job.run(0)
    assert {*writers} <= {*job.job.live}
    answers = [job.say(rank, part(rank, 3, 1)) for rank in writers]
    assert answers == [[]] * len(writers)


def test_of_a_checkpoint_that_is_complete_nothing_is_kept() -> None:
    """Nor of those before it that never were: a job of months writes many."""
    job = Direct(nodes=3).run(3)
    first, *others = job.job.record.writers[1]
    for rank, iteration in ((first, 1), (first, 2), *((rank, 2) for rank in others), (first, 3)):
        job.say(rank, part(rank, iteration, 1))
    assert [action.iteration for action in job.actions if isinstance(action, api.CommitCheckpoint)] == [2]
    assert [iteration for _, iteration, _ in job.job.parts] == [3]


def test_who_finishes_while_a_loss_is_being_settled_does_not_end_the_job() -> None:
    """That its last step counts is decided when all have parked."""
    job = Direct(nodes=3).run(5)
    job.crash(5)
    for rank in range(5):
        job.say(rank, m.Stepped(epoch=1, outcome=outcome(6), seconds=0.5, compute_s=0.4))
        job.say(rank, m.Finished(iteration=6))
    assert job.orders(m.Halt) == []
    job.park(stepped=6)
    assert job.job.record.committed == 6
    assert job.all(JobEnded) == []
    job.run()
    assert [ranks for ranks, _ in job.orders(m.Halt)] == [(0, 1, 2, 3, 4)], "they do not say so twice"


def test_an_answer_before_its_question_is_told_and_changes_nothing() -> None:
    job = Direct()
    epoch = job.plan.epoch
    answer = job.say(1, m.Ready(epoch=epoch, groups_s=0.1, state_s=0.1))
    (odd,) = [action.text for action in answer if isinstance(action, api.Say) and action.level == "warning"]
    assert odd == f"rank 1 (n1 device 1): answered stage building of epoch {epoch} while the job is in stage proposing"
    assert job.job.stage == "proposing"
    job.run(1)
    assert job.job.record.committed == 1


# --- many at once -----------------------------------------------------------------------------------------------------


def test_a_rack_that_dies_node_by_node_is_one_change() -> None:
    """Each of them had everybody park anew: 64 nodes of 2,048 were 130,000 orders."""
    job = Direct(nodes=6, gpus=1).run(1)
    for node in ("n3", "n4"):
        job.feed(api.AgentLost(node=node, reason="gone"))
    job.park(0, stepped=1)
    job.feed(api.AgentLost(node="n1", reason="gone"))
    assert [order.epoch for _, order in job.orders(m.Park)] == [2]
    job.park(stepped=1)
    assert len(job.all(PlanDecided)) == 2
    assert set(job.plan.layout.ranks) == {1, 4, 5}
    assert [(found.node, found.ranks) for found in job.all(FailureFound)] == [("n3", (2,)), ("n4", (3,)), ("n1", (0,))]
    job.run(1)
    assert job.job.stage == "running"
