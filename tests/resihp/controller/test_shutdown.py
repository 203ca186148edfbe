"""Being asked to stop: what each signal means, what is saved before the end, and that nobody is blamed for it."""

from __future__ import annotations

import signal as signals
from typing import Any

import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound, IterationCommitted, JobEnded, JobSignalled, PlanDecided, PlanWithdrawn
from resihp.simulator.scenarios.stopped_jobs import draw_interrupted, draw_stopped
from resihp.simulator.world import Result
from tests.resihp.controller.direct import Direct, outcome
from tests.resihp.controller.test_fuzz import CHUNK, FUZZ_SEEDS, assert_reached, play_chunk

TERM, INT = int(signals.SIGTERM), int(signals.SIGINT)
LAYOUT = "DP2 x PP2 x TP1"
USR1, USR2, CONT = int(signals.SIGUSR1), int(signals.SIGUSR2), int(signals.SIGCONT)


def trained(iterations: int = 2, **settings: Any) -> Direct:
    """Two nodes of two, under Slurm unless told otherwise; replicas (0, 1) and (2, 3), some iterations done."""
    return Direct(**{"slurm": True, "batch_node": "n1"} | settings).run(iterations)


def supervisor_gets(job: Direct, number: int) -> list[api.AnyAction]:
    return job.feed(api.Signalled(signal=number))


def agent_gets(job: Direct, node: str, number: int, later_s: float = 0.01) -> list[api.AnyAction]:
    return job.feed(api.AgentSignalled(node=node, signal=number), later_s)


def pause(job: Direct, stepped: int = 3, ready: bool = False) -> list[api.AnyAction]:
    """All ranks come to the end of the iteration, and park there."""
    epoch = job.job.epoch + 1
    job.step(stepped)
    return job.park(0, 1, 2, 3, stepped=stepped, epoch=epoch, ready=ready)


def write(job: Direct, *ranks: int, iteration: int = 3) -> list[api.AnyAction]:
    """Ranks have written their parts."""
    answer: list[api.AnyAction] = []
    assert job.job.record.plan is not None
    for rank in ranks:
        part = m.CheckpointPart(
            epoch=job.job.record.plan.epoch, iteration=iteration, folder="f", file=f"r{rank}", bytes=9, seconds=0.5
        )
        answer = job.say(rank, part)
    return answer


def parks(job: Direct, after_iteration: bool) -> list[tuple[int, ...]]:
    return [ranks for ranks, order in job.orders(m.Park) if order.after_iteration == after_iteration]


def said(job: Direct) -> str:
    return "\n".join(action.text for action in job.actions if isinstance(action, api.Say))


def asked(job: Direct, kind: type) -> list[api.AnyAction]:
    return [action for action in job.actions if isinstance(action, kind)]


# --- a warning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [USR1, USR2])
def test_a_warning_leads_to_a_checkpoint_of_the_iteration_under_way_and_a_requeue(number: int) -> None:
    job = trained(slurm=False, batch_node="")
    supervisor_gets(job, number)
    assert job.all(JobSignalled) == [JobSignalled(signal=number, nodes=(), meaning="warning")]
    name = signals.Signals(number).name
    assert f"received {name}: time is running out; stopping after the iteration under way" in said(job)
    assert parks(job, after_iteration=True) == [(0, 1, 2, 3)]
    pause(job)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [1, 2, 3]
    assert job.orders(m.Save) == [((0, 1), m.Save(epoch=1, replica=0, finish=outcome(3)))]
    assert job.end is None
    write(job, 0)
    last = write(job, 1)
    assert [type(action) for action in last] == [api.CommitCheckpoint, api.Say, api.Log, api.End]
    assert last[0] == api.CommitCheckpoint(
        iteration=3, folder="f", parts=(("r0", 9), ("r1", 9)), seconds=0.5, layout=LAYOUT
    )
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue, job.end.workers_leave) == (75, True, False)
    assert job.all(JobEnded)[0].state == "cancelled"
    assert "checkpoint is written" in job.end.reason
    assert len(job.all(PlanDecided)) == 1
    assert asked(job, api.AskWhy) == []


def warned_after(seconds: float, limit_s: float | None, lead_s: float = 300.0) -> api.End:
    """How a job ends that is warned so long after its start."""
    job = trained(warning_lead_s=lead_s)
    if limit_s is not None:
        job.feed(api.TimeLeft(seconds=limit_s))
    job.now += seconds
    supervisor_gets(job, USR2)
    pause(job)
    write(job, 0, 1)
    job.wait(3)
    assert job.end is not None
    return job.end


def test_a_run_that_is_warned_right_after_its_start_is_not_requeued_for_ever() -> None:
    """`--time=4` with `--signal=B:USR2@300`: each run would save one iteration, and wait in the queue for the next."""
    end = warned_after(2.0, 240.0)
    assert (end.exit_code, end.requeue) == (143, False)
    assert "checkpoint is written; not run again: each run would be warned 2 s after its start; " in end.reason
    assert "raise the time limit (--time)" in end.reason


@pytest.mark.parametrize(
    ("seconds", "limit_s", "lead_s"),
    [(100.0, 400.0, 300.0), (2.0, 3000.0, 300.0), (2.0, None, 300.0), (2.0, 240.0, 0.0)],
)
def test_a_warning_for_another_reason_leads_to_a_requeue(seconds: float, limit_s: float | None, lead_s: float) -> None:
    """A preemption within a minute of the start, for example, where Slurm announces it with the same signal."""
    end = warned_after(seconds, limit_s, lead_s)
    assert (end.exit_code, end.requeue) == (75, True)


def test_a_warning_that_comes_before_the_time_limit_is_known_waits_for_it() -> None:
    """It may have arrived while the supervisor was being imported."""
    job = Direct(slurm=True, warning_lead_s=300.0)
    job.confirm()
    supervisor_gets(job, USR2)
    assert job.end is None
    job.feed(api.TimeLeft(seconds=240.0))
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (143, False)


def test_a_warning_ends_the_job_if_it_is_not_to_come_back() -> None:
    job = trained(on_warning="end")
    supervisor_gets(job, USR2)
    pause(job)
    write(job, 0, 1)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (143, False)


def test_a_second_warning_changes_nothing() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    assert supervisor_gets(job, USR2) == []


def test_a_warning_before_training_ends_the_job_as_it_is() -> None:
    job = Direct(slurm=True)
    job.confirm()
    supervisor_gets(job, USR2)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (75, True)
    assert "training had not begun" in job.end.reason
    assert job.orders(m.Go)[1:] == []


def test_training_that_ends_first_is_done() -> None:
    job = trained(5)
    supervisor_gets(job, USR2)
    job.step(6)
    for rank in range(4):
        job.say(rank, m.Finished(iteration=6))
    supervisor_gets(job, USR2)
    for rank in range(4):
        job.crash(rank, status=0)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (0, False)
    assert job.orders(m.Save) == []


def done(**settings: Any) -> Direct:
    """All iterations are committed, and everybody was told to halt."""
    job = trained(6, **settings)
    for rank in range(4):
        job.say(rank, m.Finished(iteration=6))
    assert [ranks for ranks, _ in job.orders(m.Halt)] == [(0, 1, 2, 3)]
    return job


def test_a_worker_that_a_stop_ends_after_training_is_no_failure_of_the_script() -> None:
    job = done()
    supervisor_gets(job, TERM)
    job.crash(0, -TERM)
    assert job.end is None
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert job.end is not None
    assert job.end.exit_code == 143
    assert "rank 0 (n1 device 0): killed by signal 15 (SIGTERM) after training was done" in job.end.reason


def test_nodes_that_go_once_training_is_done_end_a_job_that_is_done() -> None:
    job = done()
    for node in ("n1", "n2"):
        job.feed(api.AgentLost(node=node, reason="its agent is gone"))
    assert job.end is not None
    assert job.end.exit_code == 0


def test_workers_that_do_not_leave_after_training_are_not_waited_for_beyond_a_stops_grace() -> None:
    job = done()
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert "the job is to stop; training is done" in said(job)
    job.wait(job.job.settings.signal_grace_s - 1)
    assert job.end is None
    job.wait(2)
    assert job.end is not None
    assert job.end.exit_code == 143
    assert "workers had not left" in job.end.reason


def test_a_worker_that_fails_after_training_fails_the_job_though_time_runs_out() -> None:
    job = done()
    supervisor_gets(job, USR2)
    job.crash(0, 3)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (1, False)


def test_how_much_time_is_left_is_asked_for_once_more_when_it_matters() -> None:
    """The limit may have been changed since it was last looked at."""
    job = trained()
    supervisor_gets(job, USR2)
    assert asked(job, api.AskTimeLeft) == [api.AskTimeLeft()]
    job = trained(replacements=1, nodes=3)
    job.feed(api.AgentLost(node="n3", reason="connection closed for 1 s"))
    assert asked(job, api.AskTimeLeft) == [api.AskTimeLeft()]


def test_what_time_there_is_after_a_warning_is_until_shortly_before_the_limit() -> None:
    job = trained()
    job.now += 3600.0
    job.feed(api.TimeLeft(seconds=300.0))
    assert job.job.deadline == pytest.approx(job.now + 300.0)
    supervisor_gets(job, USR2)
    job.wait(200, dict.fromkeys(range(4), 5), "compute")
    assert parks(job, after_iteration=False) == []
    job.wait(20, dict.fromkeys(range(4), 1000), "compute")
    assert parks(job, after_iteration=False) == [(0, 1, 2, 3)], "270 s, less a minute to park and write"
    job.park(stepped=2)
    write(job, 0, 1, iteration=2)
    assert job.end is not None
    assert job.end.exit_code == 75


# --- a stop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meaning", "code", "requeue"),
    [("time-limit", 75, True), ("preempted", 75, True), ("cancelled", 143, False), ("unknown", 143, False)],
)
def test_slurm_tells_why_it_stops_the_job(meaning: Any, code: int, requeue: bool) -> None:
    job = trained()
    supervisor_gets(job, TERM)
    assert asked(job, api.AskWhy) == [api.AskWhy()]
    assert parks(job, after_iteration=True) == [(0, 1, 2, 3)], "the pause does not wait for the answer"
    job.feed(api.StopMeaning(meaning=meaning))
    assert job.all(JobSignalled) == [JobSignalled(signal=TERM, nodes=(), meaning=meaning)]
    pause(job)
    write(job, 0, 1)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (code, requeue)


@pytest.mark.parametrize("meaning", ["time-limit", "preempted"])
def test_a_job_that_is_not_to_come_back_is_not_requeued(meaning: Any) -> None:
    job = trained(on_warning="end")
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning=meaning))
    pause(job)
    write(job, 0, 1)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (143, False)


def test_whose_agents_were_signalled_until_slurm_answered_is_in_the_journal() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    agent_gets(job, "n2", TERM)
    agent_gets(job, "n1", TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert job.all(JobSignalled) == [JobSignalled(signal=TERM, nodes=("n1", "n2"), meaning="cancelled")]
    job.wait(5)
    assert "the job goes on" not in said(job)


def test_the_end_waits_for_slurms_answer_but_not_for_long() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    pause(job)
    write(job, 0, 1)
    assert job.end is None
    job.feed(api.Tick(), 1.0)
    assert job.end is None
    job.feed(api.Tick(), 1.0)
    assert job.all(JobSignalled) == [JobSignalled(signal=TERM, nodes=(), meaning="unknown")]
    assert job.end is not None
    assert job.end.exit_code == 143
    assert len(asked(job, api.CommitCheckpoint)) == 1


def test_an_answer_that_comes_too_late_is_not_believed() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    job.feed(api.Tick(), 2.1)
    job.feed(api.StopMeaning(meaning="time-limit"))
    pause(job)
    write(job, 0, 1)
    assert [entry.meaning for entry in job.all(JobSignalled)] == ["unknown"]
    assert job.end is not None
    assert job.end.exit_code == 143


OPERATORS = [(INT, True), (INT, False), (TERM, False), (0, True), (0, False)]
"""Signals that are an operator's, and under Slurm or not; 0 for `resihp stop`. TERM under Slurm is Slurm's."""


def operator_asks(job: Direct, number: int, at_once: bool = False) -> list[api.AnyAction]:
    return supervisor_gets(job, number) if number else job.feed(api.StopAsked(request=7, at_once=at_once))


@pytest.mark.parametrize(("number", "slurm"), OPERATORS)
def test_what_an_operator_stops_is_saved_first(number: int, slurm: bool) -> None:
    job = trained(slurm=slurm)
    operator_asks(job, number)
    assert job.all(JobSignalled) == [JobSignalled(signal=number, nodes=(), meaning="operator")]
    assert parks(job, after_iteration=True) == [(0, 1, 2, 3)]
    pause(job)
    write(job, 0, 1)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (130 if number == INT else 143, False)
    assert job.end.reason.endswith("stopped after iteration 3; its checkpoint is written")
    assert job.all(JobEnded)[0].state == "cancelled"


@pytest.mark.parametrize(
    ("number", "slurm", "again"),
    [(*asked, again) for asked in OPERATORS for again in (INT, TERM) if (again, asked[1]) != (TERM, True)],
)
def test_asked_once_more_the_job_ends_at_once(number: int, slurm: bool, again: int) -> None:
    job = trained(slurm=slurm)
    operator_asks(job, number)
    supervisor_gets(job, again)
    assert job.end is not None
    assert job.end.exit_code == 128 + again
    assert "again: ended at once; did not wait for a checkpoint of iteration 2" in job.end.reason
    assert "this run has written none" in job.end.reason


def test_stop_tells_what_follows_and_at_once_does_not_wait() -> None:
    job = trained()
    assert operator_asks(job, 0)[-1] != []
    (reply,) = asked(job, api.Reply)
    assert reply == api.Reply(request=7, ok=True, text="stopping after the iteration under way, with a checkpoint")
    operator_asks(job, 0)
    assert asked(job, api.Reply)[-1] == api.Reply(request=7, ok=True, text="the job is already stopping")
    assert job.end is None
    operator_asks(job, 0, at_once=True)
    assert job.end is not None
    assert job.end.exit_code == 143
    assert "stopped by an operator, at once; did not wait for a checkpoint of iteration 2" in job.end.reason


def test_an_operator_has_more_patience_than_slurm_but_not_more_than_there_is_time() -> None:
    for settings, deadline_s, most_s in (({}, None, 300), ({}, 100.0, 70), ({"slurm": False}, None, 300)):
        job = trained(**settings)
        supervisor_gets(job, INT)
        if deadline_s is not None:
            job.feed(api.TimeLeft(seconds=deadline_s))
        job.wait(most_s - 2)
        assert job.end is None
        job.wait(4)
        assert job.end is not None
        assert "no checkpoint of it" in job.end.reason


def test_a_cancellation_after_an_operators_stop_has_less_time() -> None:
    job = trained()
    supervisor_gets(job, INT)
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert [entry.meaning for entry in job.all(JobSignalled)] == ["operator", "cancelled"]
    job.wait(21)
    assert job.end is not None
    assert job.end.exit_code == 143


def test_signals_to_all_processes_are_one_stop() -> None:
    """As `kill` to a process group sends them, in any order, without Slurm."""
    for first_agents in (True, False):
        job = trained(slurm=False, batch_node="")
        if not first_agents:
            supervisor_gets(job, TERM)
        agent_gets(job, "n1", TERM)
        agent_gets(job, "n2", TERM)
        if first_agents:
            supervisor_gets(job, TERM)
        pause(job)
        write(job, 0, 1)
        assert job.end is not None
        assert (job.end.exit_code, len(job.all(JobSignalled))) == (143, 1)
        assert "its checkpoint is written" in job.end.reason


def test_a_cancellation_after_a_warning_is_heeded() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert [entry.meaning for entry in job.all(JobSignalled)] == ["warning", "cancelled"]
    assert len(parks(job, after_iteration=True)) == 1
    pause(job)
    write(job, 0, 1)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (143, False)


def test_a_stop_ends_within_its_grace_though_a_warning_had_more_time() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    job.wait(5)
    supervisor_gets(job, TERM)
    job.wait(21)
    assert job.end is not None
    assert job.now < 30.0


def test_a_lost_quorum_ends_the_job_and_asks_nothing_of_slurm() -> None:
    job = trained()
    job.feed(api.QuorumLost(reason="1 of 4 agents"))
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (75, False)
    assert job.all(JobEnded)[0].state == "failed"


# --- agents that are signalled ------------------------------------------------------------------------------------


def test_a_lone_agents_signal_is_only_told() -> None:
    job = trained()
    agent_gets(job, "n2", TERM)
    job.wait(3)
    job.step(3)
    assert "node n2: only its agent received SIGTERM; the job goes on" in said(job)
    assert job.orders(m.Park) == []
    assert job.all(JobSignalled) == []
    agent_gets(job, "n1", TERM)
    assert job.orders(m.Park) == [], "three seconds apart is not together"


def test_agents_of_two_nodes_are_signalled_for_the_whole_job() -> None:
    job = trained()
    agent_gets(job, "n2", TERM)
    agent_gets(job, "n1", TERM, 1.5)
    assert parks(job, after_iteration=True) == [(0, 1, 2, 3)]
    job.feed(api.StopMeaning(meaning="cancelled"))
    assert job.all(JobSignalled) == [JobSignalled(signal=TERM, nodes=("n1", "n2"), meaning="cancelled")]
    assert "only its agent" not in said(job)


def test_the_only_nodes_agent_speaks_for_the_job() -> None:
    job = trained(nodes=1, gpus=4, slurm=False, batch_node="")
    agent_gets(job, "n1", TERM)
    assert job.all(JobSignalled) == [JobSignalled(signal=TERM, nodes=("n1",), meaning="unknown")]


def test_a_signal_to_go_on_means_nothing() -> None:
    job = trained(nodes=1, gpus=4)
    assert agent_gets(job, "n1", CONT) == []


@pytest.mark.parametrize("number", [USR1, USR2])
def test_what_slurm_sends_ahead_to_all_agents_is_a_warning(number: int) -> None:
    job = trained()
    agent_gets(job, "n1", number)
    agent_gets(job, "n2", number)
    assert job.all(JobSignalled) == [JobSignalled(signal=number, nodes=("n1", "n2"), meaning="warning")]


def test_a_node_that_ends_after_its_agent_was_told_to_is_not_blamed() -> None:
    job = trained()
    agent_gets(job, "n2", TERM)
    job.wait(3)
    job.step(3)
    job.crash(2, status=-15)
    job.feed(api.AgentLost(node="n2", reason="was killed by SIGKILL"))
    job.park(stepped=3)
    (failure,) = job.all(FailureFound)
    assert (failure.ranks, failure.component, failure.node, failure.device) == ((2, 3), "process", None, None)
    assert "agents were told to stop" in failure.cause
    assert asked(job, api.StartWorkers)[2:] == [], "nothing is started again on a node that goes"
    assert len(job.all(PlanDecided)) == 2, "the job goes on without it"


def test_what_dies_elsewhere_when_an_agent_is_signalled_is_not_blamed() -> None:
    job = trained()
    job.crash(3, status=-15)
    agent_gets(job, "n1", TERM, 0.5)
    job.park(stepped=2)
    (failure,) = job.all(FailureFound)
    assert failure.node is None


def test_a_verdict_that_a_signal_puts_in_doubt_leads_to_no_drain() -> None:
    job = trained(nodes=3, drains_left=4)
    job.feed(api.AgentLost(node="n2", reason="connection closed"))
    job.park(stepped=2)
    assert [failure.node for failure in job.all(FailureFound)] == ["n2"]
    agent_gets(job, "n1", USR1, 0.5)
    job.wait(5)
    assert asked(job, api.DrainNode) == []


def test_another_node_that_dies_later_is_blamed() -> None:
    job = trained()
    agent_gets(job, "n1", TERM)
    job.wait(3)
    job.crash(3)
    job.park(stepped=2)
    (failure,) = job.all(FailureFound)
    assert (failure.node, failure.device) == ("n2", 1)


# --- what does not go smoothly ------------------------------------------------------------------------------------


def test_ranks_that_die_before_the_pause_are_not_replaced_and_another_replica_is_saved() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="time-limit"))
    job.crash(1, status=-15)
    job.crash(0, status=-15)
    job.park(stepped=2)
    assert job.orders(m.Save) == [((2, 3), m.Save(epoch=1, replica=1, finish=outcome(2)))]
    write(job, 2, 3, iteration=2)
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (75, True)
    assert job.all(FailureFound) == []
    assert len(job.all(PlanDecided)) == 1
    assert asked(job, api.StartWorkers)[2:] == []


def test_ranks_that_were_kept_from_a_step_that_counts_take_it_before_they_write() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    job.crash(2)
    job.park(0, stepped=3)
    job.park(1, stepped=2, ready=True)
    job.park(3, stepped=3)
    assert job.orders(m.Save) == [((0, 1), m.Save(epoch=1, replica=0, finish=outcome(3)))]


def test_a_rank_that_cannot_take_the_step_does_not_write() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    job.crash(2)
    job.park(0, stepped=3)
    job.park(1, stepped=2)
    job.park(3, stepped=3)
    assert job.orders(m.Save) == []
    assert job.end is not None
    assert job.end.exit_code == 75
    assert "no replica is complete" in job.end.reason


def test_a_writer_that_dies_leaves_it_to_another_replica() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    pause(job)
    write(job, 1)
    job.crash(0)
    assert [ranks for ranks, _ in job.orders(m.Save)] == [(0, 1), (2, 3)]
    write(job, 2, 3)
    assert asked(job, api.CommitCheckpoint) == [
        api.CommitCheckpoint(iteration=3, folder="f", parts=(("r2", 9), ("r3", 9)), seconds=0.5, layout=LAYOUT)
    ]
    assert parks(job, after_iteration=False) == [], "all are parked already"


def test_somebody_else_who_dies_while_it_is_written_does_not_matter() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    pause(job)
    job.crash(3)
    assert len(job.orders(m.Save)) == 1
    write(job, 0, 1)
    assert job.end is not None
    assert job.end.exit_code == 75


def test_an_iteration_that_takes_too_long_is_given_up_for_the_one_before() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    job.wait(9)
    assert parks(job, after_iteration=False) == []
    job.wait(2)
    assert parks(job, after_iteration=False) == [(0, 1, 2, 3)], "half of twenty seconds"
    job.park(stepped=2)
    assert [order.finish.iteration for _, order in job.orders(m.Save)] == [2]


def test_the_first_iteration_of_a_plan_is_given_up_like_any_other() -> None:
    job = trained(nodes=3)
    job.crash(5)
    job.park(stepped=2)
    job.run()
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    job.wait(11)
    assert parks(job, after_iteration=False)[-1] == (0, 1, 2, 3, 4)
    job.park(stepped=2, holds=(2,))
    assert [order.finish.iteration for _, order in job.orders(m.Save)] == [2]


def test_a_stop_in_the_very_first_iteration_that_takes_too_long_leaves_nothing_to_save() -> None:
    job = trained(0)
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    job.wait(11)
    assert job.end is not None
    assert job.end.exit_code == 143
    assert "there is nothing to save" in job.end.reason


def test_ranks_that_do_not_park_are_not_waited_for_to_the_end() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    job.wait(11)
    job.park(0, 2, 3, stepped=2)
    job.wait(2)
    assert job.orders(m.Save) == []
    job.wait(3)
    assert [ranks for ranks, _ in job.orders(m.Save)] == [(2, 3)]
    write(job, 2, 3, iteration=2)
    assert job.end is not None
    assert job.end.exit_code == 143


def test_a_checkpoint_that_is_not_written_in_time_is_done_without() -> None:
    job = trained()
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    pause(job)
    began = job.now
    write(job, 0)
    job.wait(22)
    assert job.end is not None
    assert job.end.exit_code == 143
    assert job.now - began < 25.0
    assert "no checkpoint of it: not all parts were written in time" in job.end.reason
    assert asked(job, api.CommitCheckpoint) == []


def test_a_job_that_has_done_nothing_has_nothing_to_save() -> None:
    job = trained(0)
    supervisor_gets(job, USR2)
    job.crash(0)
    job.park(stepped=0)
    assert job.orders(m.Save) == []
    assert job.end is not None
    assert job.end.exit_code == 75


def test_a_checkpoint_that_is_there_is_not_written_again() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    job.step(3)
    write(job, 0, 1)
    job.park(0, 1, 2, 3, stepped=3, epoch=2)
    assert len(asked(job, api.CommitCheckpoint)) == 1
    assert job.orders(m.Save) == []
    assert job.end is not None
    assert job.end.exit_code == 75


# --- in the middle of something else ------------------------------------------------------------------------------


def test_a_plan_that_nobody_has_acted_on_is_dropped() -> None:
    job = trained()
    job.crash(3)
    job.park(stepped=2)
    assert len(job.all(PlanDecided)) == 2
    supervisor_gets(job, USR2)
    assert [entry.epoch for entry in job.all(PlanWithdrawn)] == [2]
    assert [ranks for ranks, _ in job.orders(m.Save)] == [(0, 1)]
    job.confirm()
    assert len(job.orders(m.Go)) == 1
    write(job, 0, 1, iteration=2)
    assert job.end is not None
    assert job.end.exit_code == 75


def test_a_transition_that_parks_goes_no_further() -> None:
    job = trained()
    job.crash(3)
    supervisor_gets(job, USR2)
    job.park(stepped=2)
    assert [ranks for ranks, _ in job.orders(m.Save)] == [(0, 1)]
    assert len(job.all(PlanDecided)) == 1


def test_a_plan_that_is_being_built_takes_effect_first() -> None:
    job = trained(come_backs=0)
    job.crash(3)
    job.park(stepped=2)
    job.confirm()
    supervisor_gets(job, USR2)
    job.ready()
    assert parks(job, after_iteration=True) == []
    job.step(3)
    assert len(parks(job, after_iteration=True)) == 1
    job.step(4)
    epoch = job.job.epoch + 1
    active = job.job.record.active
    for rank in job.job.ready:
        job.park(rank, stepped=4, epoch=epoch)
    ((writers, order),) = job.orders(m.Save)
    assert set(writers) <= set(active)
    assert (order.epoch, order.finish.iteration) == (job.plan.epoch, 4)


def test_a_newcomer_is_not_given_work_any_more() -> None:
    job = trained()
    job.crash(3)
    job.park(stepped=2)
    job.run(0)
    job.step(3)
    newcomer = len(job.job.record.placements) - 1
    supervisor_gets(job, USR2)
    job.join(newcomer)
    assert newcomer in job.job.ready
    assert len(job.all(PlanDecided)) == 2
    assert len({order.epoch for _, order in job.orders(m.Park) if order.after_iteration}) == 1


def test_a_failure_before_the_stop_keeps_its_verdict() -> None:
    job = trained()
    job.crash(3)
    job.wait(3)
    supervisor_gets(job, TERM)
    job.feed(api.StopMeaning(meaning="cancelled"))
    job.park(stepped=2)
    write(job, 0, 1, iteration=2)
    (failure,) = job.all(FailureFound)
    assert (failure.node, failure.device) == ("n2", 1)


def test_another_supervisor_goes_on_with_the_stop() -> None:
    job = trained()
    supervisor_gets(job, USR2)
    entries = [action.entry for action in job.actions if isinstance(action, api.Log)]
    job.controller = Controller.recover(job.controller.job.settings, entries)
    job.job, job.actions = job.controller.job, []
    for name, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        steps = tuple(
            m.Stepped(epoch=1, outcome=outcome(iteration), seconds=0.5, compute_s=0.4) for iteration in (1, 2)
        )
        running = tuple(
            m.RunningWorker(rank=rank, device=rank % 2, pid=1000 + rank, steps=steps, said=(job.declare,))
            for rank in ranks
        )
        job.feed(api.AgentJoined(node=name, host="h", devices=2, inventory=m.Inventory(workers=running, epoch=1)))
    assert parks(job, after_iteration=True) == [(0, 1, 2, 3)]
    pause(job)
    write(job, 0, 1)
    assert job.all(JobSignalled) == []
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (75, True)


# --- at any moment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"stops-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_jobs_are_asked_to_stop(first: int) -> None:
    play_chunk(draw_stopped, first)


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 4, CHUNK), ids=lambda first: f"asks-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_operators_stop_jobs(first: int) -> None:
    play_chunk(draw_interrupted, first)


def test_the_seeds_reach_what_they_are_for() -> None:
    def kinds(result: Result) -> set[str]:
        return {
            f"exit {result.exit_code}",
            *(entry.meaning for entry in result.all(JobSignalled)),
            *(f"replica {order.order.replica}" for order in result.orders(m.Save)),  # type: ignore[union-attr]
            *("excused" for failure in result.failures if "told to stop" in failure.cause),
            *("not whole" for _ in (1,) if "no replica is complete" in result.reason),
            *("saved" for _ in (1,) if "its checkpoint is written" in result.reason),
            *("hurried" for line in result.said if "takes too long" in line),
            *("lone" for line in result.said if "only its agent received" in line),
        }

    wanted = {
        *("exit 0", "exit 75", "exit 143"),
        *("warning", "time-limit", "cancelled", "preempted", "unknown"),
        *("replica 0", "replica 1", "excused", "not whole", "saved", "hurried", "lone"),
    }
    assert_reached(draw_stopped, range(3000, 3300), kinds, wanted)
