"""Supervisors that die at any moment, and others that take over from the journal and the agents' inventories.

A failing seed is shown by `python -m resihp.simulator.harness --orphan SEED`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.fail_stop import silence
from resihp.controller.fail_stop.onsets import Commit
from resihp.controller.takeover import AGENT_RETURN_S, FIRST_AGENT_S
from resihp.errors import ProtocolError
from resihp.faults import Fault
from resihp.protocol import messages as m
from resihp.record.journal import (
    AnyEntry,
    EvaluationDone,
    FailureFound,
    FaultInjected,
    IterationCommitted,
    JobEnded,
    JobSignalled,
    NodeJoined,
    NodeLost,
    PlanDecided,
    PlanInEffect,
    Suspected,
    WorkerEnded,
    WorkerStarted,
)
from resihp.settings import Settings
from resihp.simulator.scenarios.plain_jobs import draw_orphaned
from tests.resihp.controller.direct import DECLARE, PLAIN, Direct, outcome
from tests.resihp.controller.test_fuzz import CHUNK, FUZZ_SEEDS, play_chunk


@pytest.mark.parametrize(
    "first", range(0, FUZZ_SEEDS // 2, CHUNK), ids=lambda first: f"orphans-{first}-{first + CHUNK - 1}"
)
def test_invariants_hold_when_supervisors_die(first: int) -> None:
    play_chunk(draw_orphaned, first)


def journal_of(job: Direct) -> list[AnyEntry]:
    return [action.entry for action in job.actions if isinstance(action, api.Log)]


class TakenOver(Direct):
    """A controller that takes over from another one's journal. `forgets`: the last so many entries are not in it."""

    def __init__(self, before: Direct, forgets: int = 0, commits: Sequence[Commit] = ()) -> None:
        self.before = before
        self.declare = before.declare
        self.controller = Controller.recover(
            before.job.settings, journal_of(before)[: len(journal_of(before)) - forgets], commits=commits
        )
        self.job = self.controller.job
        self.now = 0.0
        self.actions = []

    def back(
        self,
        node: str,
        *,
        epoch: int | None = None,
        steps: dict[int, tuple[int, ...]] | None = None,
        said: dict[int, tuple[m.WorkerMessage, ...]] | None = None,
        gone: dict[int, int | None] | None = None,
        started: dict[int, int] | None = None,
    ) -> list[api.AnyAction]:
        """A node's agent comes with all that ran there under the one before.

        `gone`: how ranks ended, None if nobody knows. `started`: process ids of ranks that the one before had ordered.
        """
        job, gone = self.before.job, gone or {}
        epoch = job.epoch if epoch is None else epoch
        ranks = {rank: member.pid for rank, member in job.members.items() if member.node == node and member.alive}
        running = tuple(
            m.RunningWorker(
                rank=rank,
                device=job.record.placements[rank].device,
                pid=pid,
                steps=tuple(
                    m.Stepped(epoch=epoch, outcome=outcome(i), seconds=0.5, compute_s=0.4)
                    for i in (steps or {}).get(rank, ())
                ),
                said=(self.declare, *(said or {}).get(rank, ())),
            )
            for rank, pid in (ranks | (started or {})).items()
            if rank not in gone
        )
        ended = tuple((rank, status) for rank, status in gone.items() if status is not None)
        inventory = m.Inventory(workers=running, ended=ended, epoch=epoch)
        return self.feed(api.AgentJoined(node=node, host="h", devices=2, inventory=inventory))

    def all_back(self, **told: Any) -> TakenOver:
        for name, node in self.before.job.nodes.items():
            if node.alive:
                self.back(name, **told)
        return self

    @property
    def said(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, api.Say)]


# --- nothing was under way ----------------------------------------------------------------------------------------


def test_training_that_was_not_disturbed_is_left_alone() -> None:
    job = TakenOver(Direct().run(3))
    steps: dict[int, tuple[int, ...]] = {rank: (3, 4, 5) for rank in range(4)}
    assert job.back("n1", steps=steps) == [], "nothing is decided before everybody is back"
    assert job.feed(api.Tick()) == []
    job.back("n2", steps=steps)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [4, 5]
    assert {type(action) for action in job.actions} == {api.Log, api.Say}, "nobody is told anything"
    assert job.said == ["took over: 4 workers train on, iteration 4"]
    job.step(6)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [4, 5, 6]


def test_a_step_that_only_some_have_reported_waits_for_the_others() -> None:
    job = TakenOver(Direct().run(3)).all_back(steps={0: (4,), 1: (4,)})
    assert job.all(IterationCommitted) == []
    job.step(4, 2, 3)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [4]


def part(rank: int, iteration: int) -> m.CheckpointPart:
    folder, file = f"iteration-{iteration}", f"r{rank}"
    return m.CheckpointPart(epoch=1, iteration=iteration, folder=folder, file=file, bytes=9, seconds=0.5)


def test_checkpoints_that_were_written_while_nobody_led_are_completed() -> None:
    """Rank 0 and rank 1 hold the first replica; what the one before had heard of their parts is gone with it."""
    before = Direct(checkpoint_every=2).run(3)
    before.say(0, part(0, 2))
    job = TakenOver(before)
    writers = job.job.record.writers[1]
    steps: dict[int, tuple[int, ...]] = {rank: (4, 5) for rank in range(4)}
    job.all_back(steps=steps, said={rank: (part(rank, 4), part(rank, 2)) for rank in writers})
    commits = [action for action in job.actions if isinstance(action, api.CommitCheckpoint)]
    assert [(commit.iteration, commit.folder) for commit in commits] == [(2, "iteration-2"), (4, "iteration-4")]
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [4, 5]
    assert not any("not completed" in text for text in job.said)


def test_checkpoints_that_nobody_can_complete_any_more_are_told_of() -> None:
    before = Direct(checkpoint_every=2).run(3)
    job = TakenOver(before, commits=[Commit(iteration, -1.0, 0.5) for iteration in (1, 2, 3)])
    writers = job.job.record.writers[1]
    steps: dict[int, tuple[int, ...]] = {rank: (4, 5, 6, 7) for rank in range(4)}
    job.all_back(steps=steps, said={writers[0]: (part(writers[0], 2),)})
    for rank in writers:
        job.say(rank, part(rank, 6))
    commits = [action for action in job.actions if isinstance(action, api.CommitCheckpoint)]
    assert [commit.iteration for commit in commits] == [6]
    told = "2 checkpoints, of iterations 2 to 4, were not completed: the supervisor was replaced meanwhile"
    assert f"{told}; the newest complete one is of iteration 6" in job.said
    for rank in writers:
        job.say(rank, part(rank, 6))
    job.step(8)
    for rank in writers:
        job.say(rank, part(rank, 8))
    assert sum("not completed" in text for text in job.said) == 1


def test_a_job_that_always_had_its_supervisor_is_told_of_none() -> None:
    """Rank 0 dies before its part of iteration 2 is written; iteration 4 is the first that is complete."""
    job = Direct(checkpoint_every=2).run(2)
    writers = job.job.record.writers[1]
    for iteration in (3, 4):
        job.step(iteration)
    for rank in writers:
        job.say(rank, part(rank, 4))
    assert [action.iteration for action in job.actions if isinstance(action, api.CommitCheckpoint)] == [4]
    assert not any("not completed" in action.text for action in job.actions if isinstance(action, api.Say))


def test_what_comes_before_everybody_is_back_is_handled_then() -> None:
    job = TakenOver(Direct().run(3))
    job.back("n1")
    report = m.Stepped(epoch=1, outcome=outcome(4), seconds=0.5, compute_s=0.4)
    for rank in (0, 1):
        assert job.say(rank, report) == []
    fault = Fault(id=7, kind="kill", rank=9)
    assert job.feed(api.InjectAsked(request=3, fault=fault)) == []
    answer = job.back("n2", steps={2: (4,), 3: (4,)})
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [4]
    assert answer[-1] == api.Reply(request=3, ok=False, text="there is no rank 9")


def test_the_wait_for_agents_is_no_lack_of_progress() -> None:
    job = TakenOver(Direct().run(2))
    for _ in range(20):
        job.feed(api.Tick(), 1.0)
    job.all_back()
    job.feed(api.Tick(), 0.5)
    assert job.all(Suspected) == []
    assert {type(action) for action in job.actions} == {api.Say}, "nobody is told anything"


def test_iterations_that_nobody_remembers_are_passed_over() -> None:
    declare = m.Declare(model=DECLARE.model, micro_batches=8, iterations=99, resume_from=0, fingerprint="same")
    job = TakenOver(Direct(declare=declare).run(3))
    job.all_back(steps={rank: (40, 41) for rank in range(4)})
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [40, 41]
    assert job.said[0] == "iterations 4 to 39 were done while no supervisor led; their figures are lost"


def test_training_that_is_done_is_ended() -> None:
    job = TakenOver(Direct().run(5))
    job.all_back(steps={rank: (6,) for rank in range(4)}, said={rank: (m.Finished(iteration=6),) for rank in range(4)})
    assert job.job.record.committed == 6
    assert [ranks for ranks, _ in job.orders(m.Halt)] == [(0, 1, 2, 3)]
    for rank in range(4):
        job.crash(rank, 0)
    assert job.end is not None
    assert job.end.exit_code == 0


@pytest.mark.parametrize("left", [(0, 1, 2, 3), (2,), ()])
def test_workers_that_were_told_to_halt_may_be_gone(left: tuple[int, ...]) -> None:
    """The last commit is in the journal; whether the order to halt went out, nobody knows."""
    job = TakenOver(Direct().run(6))
    job.all_back(gone={rank: 0 for rank in range(4) if rank not in left})
    assert [ranks for ranks, _ in job.orders(m.Halt)] == ([left] if left else [])
    for rank in left:
        assert job.end is None
        job.crash(rank, 0)
    assert job.end is not None
    assert job.end.exit_code == 0
    assert [entry.exit for entry in job.all(WorkerEnded)] == [0, 0, 0, 0]


EVALUATES = msgspec.structs.replace(DECLARE, evaluates=True)
LOSS = m.Evaluated(epoch=1, iteration=6, loss=2.5, tokens=4096)


def test_an_evaluation_after_the_last_step_goes_on_under_a_new_supervisor() -> None:
    job = TakenOver(Direct(declare=EVALUATES).run(6)).all_back(said={1: (LOSS, m.Finished(iteration=6))})
    assert (job.job.stage, job.orders(m.Halt)) == ("running", [])
    assert [(entry.iteration, entry.loss) for entry in job.all(EvaluationDone)] == [(6, 2.5)]
    for rank in (0, 2, 3):
        job.say(rank, LOSS)
        job.say(rank, m.Finished(iteration=6))
    assert len(job.all(EvaluationDone)) == 1
    assert [ranks for ranks, _ in job.orders(m.Halt)] == [(0, 1, 2, 3)]


def test_a_rank_that_was_lost_in_the_last_evaluation_is_done_without_by_a_new_supervisor() -> None:
    job = TakenOver(Direct(declare=EVALUATES).run(6)).all_back(gone={1: -9})
    assert job.orders(m.Park), "or the others would wait for it for ever"
    job.park(stepped=6)
    assert job.all(PlanDecided)[-1].next_iteration == 7


@pytest.mark.parametrize("left", [(0, 1, 2, 3), (2,), ()])
def test_workers_that_were_told_to_halt_after_an_evaluation_may_be_gone(left: tuple[int, ...]) -> None:
    before = Direct(declare=EVALUATES).run(6)
    before.say(0, LOSS)
    job = TakenOver(before)
    said: dict[int, tuple[m.WorkerMessage, ...]] = {rank: (LOSS, m.Finished(iteration=6)) for rank in left}
    job.all_back(gone={rank: 0 for rank in range(4) if rank not in left}, said=said)
    assert [ranks for ranks, _ in job.orders(m.Halt)] == ([left] if left else [])
    for rank in left:
        job.crash(rank, 0)
    assert job.end is not None
    assert job.end.exit_code == 0


def test_workers_have_their_time_to_leave_also_under_a_new_supervisor() -> None:
    job = TakenOver(Direct().run(6))
    job.now = 10_000.0  # as long as its machine is up
    job.all_back()
    job.feed(api.Tick())
    assert job.end is None


# --- a transition was under way -----------------------------------------------------------------------------------


def disturbed(job: Direct, stage: str) -> Direct:
    """Rank 1 dies after iteration 2; the transition is brought up to that stage."""
    job.run(2).crash(1)
    if stage != "parking":
        job.park(stepped=2)
    if stage in ("building", "in effect"):
        job.confirm()
    if stage == "in effect":
        job.ready()
    return job


@pytest.mark.parametrize("stage", ["parking", "proposing", "building"])
def test_a_transition_begins_again_from_the_plan_in_effect(stage: str) -> None:
    before = disturbed(Direct(nodes=3), stage)
    job = TakenOver(before).all_back()
    ((ranks, park),) = job.orders(m.Park)
    assert ranks == (0, 2, 3, 4, 5)
    assert park.epoch == before.job.epoch + 1
    job.park(stepped=2, holds=(1,))
    (_, proposed) = job.orders(m.Propose)[-1]
    assert proposed.base.epoch == 1
    assert proposed.plan.epoch == park.epoch
    job.run(1)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [3]
    failures = [*before.all(FailureFound), *job.all(FailureFound)]
    assert [(entry.failure, entry.ranks) for entry in failures] == [(1, (1,))], "named once, whoever names it"
    assert job.all(WorkerEnded) == [], "that is in the journal already"


def test_an_order_to_begin_that_was_lost_is_not_waited_for() -> None:
    """The plan is in effect, all are ready for it, and none was told."""
    before = disturbed(Direct(nodes=3), "in effect")
    ready = m.Ready(epoch=2, groups_s=0.1, state_s=0.1)
    job = TakenOver(before).all_back(said={rank: (ready,) for rank in before.job.record.active})
    ((_, park),) = job.orders(m.Park)
    assert park.epoch == 3
    job.park(stepped=2, holds=(1, 2))
    (_, proposed) = job.orders(m.Propose)[-1]
    assert proposed.base.epoch == 2, "from here on the state is where that plan says"


def test_what_broke_before_everybody_was_asked_to_park_is_not_why() -> None:
    before = disturbed(Direct(nodes=3), "in effect")
    ready = m.Ready(epoch=2, groups_s=0.1, state_s=0.1)
    job = TakenOver(before).all_back(said={rank: (ready,) for rank in before.job.record.active})
    job.say(0, m.Stuck(epoch=2, error="connection reset"))
    job.park(stepped=2, holds=(1, 2))
    assert "communication failed" not in job.all(PlanDecided)[-1].reason


def test_an_order_to_begin_that_was_heard_is_enough() -> None:
    before = disturbed(Direct(nodes=3), "in effect")
    job = TakenOver(before).all_back(steps={rank: (3,) for rank in before.job.record.active})
    assert job.orders(m.Park) == []
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [3]


def test_a_plan_that_was_not_in_the_journal_never_was() -> None:
    """No quorum knew of it; but some rank may have heard its epoch, which is not used again."""
    before = disturbed(Direct(nodes=3), "proposing")
    assert isinstance(journal_of(before)[-1], PlanDecided)
    assert before.job.epoch == 2
    job = TakenOver(before, forgets=2).all_back()
    ((_, park),) = job.orders(m.Park)
    assert park.epoch == 3
    job.park(stepped=2, holds=(1,))
    (failure,) = job.all(FailureFound)
    assert (failure.failure, failure.ranks) == (1, (1,))
    assert job.plan.epoch == 3


def test_a_start_that_was_under_way_is_done_again() -> None:
    before = Direct()
    before.confirm()
    before.ready(0, 1)
    assert before.all(PlanInEffect) == []
    job = TakenOver(before).all_back()
    ((_, park),) = job.orders(m.Park)
    assert park.epoch == 2
    job.park(stepped=0)
    job.run(1)
    assert [entry.epoch for entry in job.all(PlanInEffect)] == [2]
    assert [entry.action for entry in job.all(PlanDecided)] == ["start"]
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [1]
    assert job.all(FailureFound) == []


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "known"), [(-6, -6), (None, -9)])
def test_a_rank_that_died_meanwhile_is_a_failure(status: int | None, known: int) -> None:
    job = TakenOver(Direct(nodes=3).run(2)).all_back(gone={3: status})
    (ended,) = job.all(WorkerEnded)
    assert (ended.rank, ended.exit) == (3, known)
    ((ranks, _),) = job.orders(m.Park)
    assert ranks == (0, 1, 2, 4, 5)
    job.park(stepped=2, holds=(1,))
    (failure,) = job.all(FailureFound)
    assert failure.ranks == (3,)
    (start,) = [action for action in job.actions if isinstance(action, api.StartWorkers)]
    assert (start.node, start.workers, start.joins) == ("n2", ((6, 1),), True)


def test_what_its_script_raised_meanwhile_is_why_a_rank_is_lost() -> None:
    raised = m.Raised(error="ValueError: no such sample", traceback="in the script", iteration=3)
    job = TakenOver(Direct(nodes=3).run(2)).all_back(said={3: (raised,)})
    job.crash(3, 1)
    job.park(stepped=2, holds=(1,))
    (failure,) = job.all(FailureFound)
    assert (failure.kind, failure.cause) == ("program", "rank 3 raised ValueError: no such sample")


def test_a_node_that_does_not_come_back_is_lost_after_a_while() -> None:
    job = TakenOver(Direct(nodes=3).run(2))
    job.back("n1")
    job.back("n3")
    for _ in range(int(AGENT_RETURN_S / 0.25) - 1):
        assert job.feed(api.Tick(), 0.25) == []
    job.feed(api.Tick(), 0.25)
    (lost,) = job.all(NodeLost)
    assert (lost.node, lost.reason) == ("n2", "its agent did not reconnect to the new supervisor")
    assert api.DropNode(node="n2") in job.actions
    job.park(stepped=2, holds=(1,))
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("node", "n2", (2, 3))


def test_a_node_whose_agent_is_seen_to_end_is_not_waited_for() -> None:
    job = TakenOver(Direct(nodes=3).run(2))
    job.back("n1")
    job.back("n3")
    job.feed(api.AgentLost(node="n2", reason="its agent is gone"))
    (lost,) = job.all(NodeLost)
    assert lost.reason == "its agent is gone"


def test_nobody_comes_back() -> None:
    job = TakenOver(Direct().run(2))
    for _ in range(int(FIRST_AGENT_S)):
        assert job.feed(api.Tick(), 1.0) == []
    job.feed(api.Tick(), 1.1)
    assert job.end is not None
    assert job.end.exit_code == 5
    assert job.all(NodeLost) == []


def test_a_lost_node_that_no_failure_explains_is_one() -> None:
    """It was in the journal; the decision that would have named it was not made."""
    before = Direct(nodes=3).run(2)
    before.feed(api.AgentLost(node="n2", reason="its agent is gone"))
    assert before.all(FailureFound) == []
    job = TakenOver(before).all_back()
    job.park(stepped=2, holds=(1,))
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("node", "n2", (2, 3))
    assert job.all(NodeLost) == job.all(WorkerEnded) == []


def test_a_killed_device_stays_dead() -> None:
    """The fault was in the journal, and carried out; that the rank died of it was not."""
    before = Direct(nodes=3, faults=(Fault(id=1, kind="kill", rank=3, iteration=3, phase="forward"),)).run(2)
    before.say(3, m.FaultDue(fault=1))
    assert isinstance(journal_of(before)[-1], FaultInjected)
    job = TakenOver(before).all_back(gone={3: -9})
    assert not [action for action in job.actions if isinstance(action, api.StartWorkers)]


def test_a_fault_that_was_carried_out_is_not_carried_out_again() -> None:
    before = Direct(nodes=3, faults=(Fault(id=1, kind="stop", rank=3, iteration=3, phase="forward"),)).run(2)
    before.say(3, m.FaultDue(fault=1))
    job = TakenOver(before).all_back(said={3: (m.FaultDue(fault=1),)})
    assert job.orders(m.FaultGo) == [((3,), m.FaultGo(fault=1, fire=False))]
    assert job.all(FaultInjected) == []
    assert job.orders(m.Park) == []


# --- the start was not complete -----------------------------------------------------------------------------------


class Beginning(Direct):
    """A start, step by step."""

    def __init__(
        self, *nodes: str, spawned: tuple[int, ...] = (), declared: tuple[int, ...] = (), **settings: Any
    ) -> None:
        self.declare = DECLARE
        given = {"job": "local-1", "nodes": 2, "gpus_per_node": 2, "tp": 1, "pp": 2} | PLAIN | settings
        self.controller = Controller(Settings(**given))
        self.job = self.controller.job
        self.now, self.actions = 0.0, []
        for node in nodes:
            self.feed(api.AgentJoined(node=node, host="h", devices=2))
        for rank in spawned:
            self.spawn(rank)
        for rank in declared:
            self.say(rank, DECLARE)


def starts(job: Direct) -> list[tuple[int, ...]]:
    return [tuple(rank for rank, _ in action.workers) for action in job.actions if isinstance(action, api.StartWorkers)]


def test_nodes_that_had_not_joined_are_waited_for() -> None:
    job = TakenOver(Beginning("n1"))
    job.back("n1")
    assert starts(job) == []
    job.feed(api.AgentJoined(node="n2", host="h", devices=2, inventory=m.Inventory()))
    assert [entry.node for entry in job.all(NodeJoined)] == ["n2"]
    assert starts(job) == [(0, 1), (2, 3)]


def test_workers_that_were_not_started_are_and_no_others() -> None:
    job = TakenOver(Beginning("n1", "n2", spawned=(0,)))
    job.back("n1")
    job.back("n2", started={3: 1003})  # of which the one before never heard
    assert [(entry.rank, entry.pid) for entry in job.all(WorkerStarted)] == [(3, 1003)]
    assert starts(job) == [(1,), (2,)]


def test_a_worker_that_is_about_to_be_forked_is_not_started_twice() -> None:
    job = TakenOver(Beginning("n1", "n2", spawned=(0, 1, 2)))
    job.back("n1")
    job.back("n2", started={3: 0})
    assert starts(job) == []
    job.feed(api.WorkerSpawned(rank=3, node="n2", device=1, pid=1003))
    job.say(3, DECLARE)
    assert job.plan.epoch == 1


def test_what_was_declared_to_the_one_before_counts() -> None:
    job = TakenOver(Beginning("n1", "n2", spawned=(0, 1, 2, 3), declared=(0, 1, 2, 3)), forgets=2)
    assert job.orders(m.Propose) == []
    job.all_back()
    assert starts(job) == []
    job.run(1)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [1]


def test_a_worker_that_began_and_ended_while_nobody_led_is_a_failure_of_the_start() -> None:
    job = TakenOver(Beginning("n1", "n2", spawned=(0, 1)))
    job.back("n1")
    job.back("n2", gone={2: 1}, started={3: 1003})
    assert job.plan.layout.ranks == (0, 1, 3)
    (failure,) = job.all(FailureFound)
    assert (failure.component, failure.node, failure.ranks) == ("process", "n2", (2,))
    assert starts(job) == [(4,)], "its device is tried again"


def test_a_rank_number_that_was_given_is_not_given_again() -> None:
    """Rank 4 was started in place of rank 1, and the journal never heard of it."""
    before = disturbed(Direct(), "parking")
    assert starts(before)[-1] == (4,)
    job = TakenOver(before)
    job.back("n1", started={4: 1004})
    job.back("n2")
    assert [(entry.rank, entry.pid) for entry in job.all(WorkerStarted)] == [(4, 1004)]
    job.crash(4)
    assert starts(job)[-1:] == [(5,)]


def test_a_process_that_was_ordered_and_never_begun_is_ordered_again_and_joins() -> None:
    job = TakenOver(disturbed(Direct(nodes=3), "parking")).all_back()
    assert starts(job) == [(6,)]
    job.park(stepped=2, holds=(1,))
    job.run(1)
    job.join(6)
    assert 6 in job.job.ready


def test_where_a_process_was_that_is_gone_unheard_of_stays_known() -> None:
    before = disturbed(Direct(nodes=3), "parking")
    job = TakenOver(before)
    job.back("n1", gone={6: 1})
    job.back("n2")
    job.back("n3")
    assert job.job.record.placements[6] == before.job.record.placements[6]
    assert starts(job) == [], "its device had its chance"


# --- told to stop -------------------------------------------------------------------------------------------------


def test_a_signal_is_obeyed_while_agents_come_back() -> None:
    job = TakenOver(Direct().run(2))
    job.feed(api.Signalled(signal=signal.SIGTERM))
    assert job.end is None
    job.feed(api.Signalled(signal=signal.SIGTERM))
    assert job.end is not None
    assert job.end.exit_code == 143


def test_a_quorum_that_is_lost_while_agents_come_back_ends_the_lead() -> None:
    job = TakenOver(Direct().run(2))
    job.feed(api.QuorumLost(reason="somebody else leads"))
    assert job.end is not None
    assert (job.end.exit_code, job.end.requeue) == (75, False)


def test_what_slurm_answers_while_agents_come_back_counts() -> None:
    job = TakenOver(Direct(slurm=True, batch_node="n1").run(2))
    job.feed(api.Signalled(signal=signal.SIGTERM))
    assert api.AskWhy() in job.actions
    job.feed(api.StopMeaning(meaning="preempted"))
    job.all_back()
    assert [entry.meaning for entry in job.all(JobSignalled)] == ["preempted"]


def test_agents_may_be_told_to_stop_while_they_come_back() -> None:
    job = TakenOver(Direct(slurm=True, batch_node="n1").run(2))
    for node in ("n1", "n2"):
        job.feed(api.AgentSignalled(node=node, signal=signal.SIGTERM))
    assert api.AskWhy() in job.actions


def test_the_time_that_is_left_may_be_told_while_agents_come_back() -> None:
    """Until shortly before the limit, however long that is: the ranks have 500 s to end their iteration."""
    job = TakenOver(Direct(slurm=True, batch_node="n1").run(2))
    job.feed(api.Signalled(signal=signal.SIGUSR2))
    job.feed(api.TimeLeft(seconds=600.0))
    job.all_back()
    assert [ranks for ranks, park in job.orders(m.Park) if park.after_iteration] == [(0, 1, 2, 3)]
    job.wait(500)
    assert job.end is None
    job.wait(100)
    assert job.end is not None
    assert job.end.requeue


@pytest.mark.parametrize(
    ("entries", "reason"),
    [([], "its journal is empty"), ([JobEnded(exit_code=0, state="completed", reason="done")], "has ended: done")],
)
def test_what_cannot_be_taken_over(entries: list[AnyEntry], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Controller.recover(Settings(job="local-1", nodes=1, gpus_per_node=1, tp=1, pp=1, **PLAIN), entries)


@pytest.mark.parametrize("forgets", range(1, 5))
def test_a_node_noted_as_lost_during_the_start_ends_the_job_wherever_the_supervisor_died(forgets: int) -> None:
    """It notes the node, then each of its processes, the failure, the end: any may be the last that it wrote."""
    before = Beginning("n1", "n2", spawned=(0, 1, 2, 3), least=1.0)
    before.feed(api.AgentLost(node="n2", reason="its agent was killed by SIGKILL"))
    kinds = [type(entry).__name__ for entry in journal_of(before)][-5:]
    assert kinds == ["NodeLost", "WorkerEnded", "WorkerEnded", "FailureFound", "JobEnded"]
    job = TakenOver(before, forgets=forgets)
    job.back("n1")
    assert job.end is not None
    assert job.end.exit_code == 5
    assert "node n2: its agent was killed by SIGKILL before training began" in job.end.reason


def test_a_job_that_two_lost_nodes_end_is_ended_once() -> None:
    """One that could be spared, and that no failure tells of, for nothing had been started there; and another one."""
    before = Beginning("n1", "n2", nodes=3, spares=1, least=1.0)
    before.feed(api.AgentLost(node="n3", reason="its agent could not be started"))
    before.feed(api.AgentLost(node="n2", reason="its agent was killed by SIGKILL"))
    assert isinstance(journal_of(before)[-1], JobEnded)
    job = TakenOver(before, forgets=1)
    job.back("n1")
    assert [entry.exit_code for entry in job.all(JobEnded)] == [5]


@pytest.mark.parametrize("forgets", range(3))
def test_a_node_noted_as_lost_while_training_takes_its_processes_along(forgets: int) -> None:
    before = Direct(nodes=3).run(2)
    before.feed(api.AgentLost(node="n2", reason="its agent was killed by SIGKILL"))
    names = [type(entry).__name__ for entry in journal_of(before)]
    assert "NodeLost" in names[: len(names) - forgets]
    job = TakenOver(before, forgets=forgets)
    for name in ("n1", "n3"):
        job.back(name)
    assert {2, 3}.isdisjoint(job.job.live)
    assert job.end is None
    job.park(stepped=2)
    job.run(1)
    assert {2, 3}.isdisjoint(job.job.record.active)


def test_who_was_suspected_and_then_stands_by_is_not_shown_as_suspected_for_good() -> None:
    job = Direct(nodes=3, gpus=2, spares=1).run(1)
    assert job.job.record.plan is not None
    assert 4 in job.job.record.plan.layout.standby
    silence.of_rank(job.job, job.job.members[4], 4.0, 3.0)  # from a plan in which it had work
    job.wait(2)
    assert [(entry.rank, entry.outcome) for entry in job.all(Suspected)] == [(4, "passed")]
