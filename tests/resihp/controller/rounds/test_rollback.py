"""A job that trains with resihp.Trainer goes back to its newest checkpoint when no rank holds some of its state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.controller.interface import Dependencies
from resihp.controller.rounds.rollback import MANIFEST_PATIENCE_S
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import (
    CheckpointCommitted,
    EvaluationDone,
    IterationCommitted,
    PlanDecided,
    Reconfigured,
    RollbackDecided,
)
from resihp.simulator.harness import play
from resihp.simulator.scenarios.mixed_jobs import draw_unreplicated
from tests.resihp.controller.direct import DECLARE, Direct, outcome


def trained(iterations: int = 3, checkpoint: int = 0, **settings: Any) -> Direct:
    """Four ranks in two replicas of two stages, whose processes are not started again after a loss."""
    given = {"max_restarts": 100, "come_backs": 0, "declare": msgspec.structs.replace(DECLARE, iterations=20)}
    job = Direct(**given | settings).run()
    for iteration in range(job.job.record.committed + 1, iterations + 1):
        job.step(iteration)
        if iteration == checkpoint:
            save(job, iteration)
    return job


def save(job: Direct, iteration: int, *, is_complete: bool = True) -> None:
    """The ranks of one replica write a checkpoint, and the supervisor completes it."""
    epoch, writers = max(job.job.record.writers.items())
    for rank in writers:
        file = f"part-{epoch}-{rank}"
        job.say(
            rank,
            m.CheckpointPart(epoch=epoch, iteration=iteration, folder=f"i{iteration}", file=file, bytes=9, seconds=0.5),
        )
    if is_complete:
        complete(job, iteration)


def complete(job: Direct, iteration: int) -> None:
    folder = f"/ckpt/i{iteration}"
    entry = CheckpointCommitted(iteration=iteration, folder=folder, bytes=18, seconds=0.5)
    job.actions.append(api.Log(entry=entry))
    job.controller.journaled(entry)


def lose_a_stage(job: Direct, stepped: int) -> None:
    """Both holders of the second stage are lost; the other ranks park."""
    for rank in (1, 3):
        job.crash(rank)
    job.park(stepped=stepped)


def entries(job: Direct) -> list[Any]:
    return [action.entry for action in job.actions if isinstance(action, api.Log)]


def proposal(job: Direct) -> m.Propose:
    return job.orders(m.Propose)[-1][1]


def texts(job: Direct) -> list[str]:
    return [action.text for action in job.actions if isinstance(action, api.Say)]


def test_it_goes_back_to_the_newest_checkpoint_and_trains_the_later_iterations_again() -> None:
    job = trained(5, checkpoint=3)
    lose_a_stage(job, stepped=5)
    job.wait(1)
    assert job.end is None
    (entry,) = job.all(RollbackDecided)
    assert (entry.iteration, entry.folder, entry.epoch) == (3, "/ckpt/i3", job.job.epoch)
    assert "goes back to the checkpoint of iteration 3, 2 iterations to be trained again" in texts(job)[-1]
    assert (proposal(job).base, proposal(job).checkpoint, proposal(job).next_iteration) == (None, "/ckpt/i3", 4)
    assert job.all(PlanDecided)[-1].action == "redo"
    assert sorted(proposal(job).plan.layout.active) == [0, 2]
    job.run(2)
    assert [entry.outcome.iteration for entry in job.all(IterationCommitted)] == [1, 2, 3, 4, 5, 4, 5]
    (change,) = job.all(Reconfigured)
    assert change.failures == (1, 2)
    assert fold(entries(job)) == job.job.record


def test_without_a_checkpoint_it_begins_again() -> None:
    job = trained(2)
    lose_a_stage(job, stepped=2)
    job.wait(1)
    assert (job.all(RollbackDecided)[0].iteration, proposal(job).checkpoint, proposal(job).next_iteration) == (0, "", 1)
    assert any("goes back to the beginning, 2 iterations to be trained again" in text for text in texts(job))


def test_a_job_that_resumed_goes_back_to_the_checkpoint_from_which_it_did() -> None:
    resumed = msgspec.structs.replace(DECLARE, iterations=20, resume_from=4, resume_folder="/old/i4")
    job = trained(6, declare=resumed)
    assert job.orders(m.Propose)[0][1].checkpoint == "/old/i4"
    lose_a_stage(job, stepped=6)
    job.wait(1)
    assert (job.all(RollbackDecided)[0].iteration, proposal(job).checkpoint, proposal(job).next_iteration) == (
        4,
        "/old/i4",
        5,
    )


def test_losses_of_the_same_moment_are_part_of_one_rollback() -> None:
    job = trained(3, checkpoint=3, nodes=3)
    for rank in (1, 3, 5):
        job.crash(rank)
    job.park(stepped=3)
    assert not job.all(RollbackDecided)
    job.feed(api.AgentLost(node="n2", reason="agent process ended"))
    job.wait(1)
    assert len(job.all(RollbackDecided)) == 1
    assert sorted(proposal(job).plan.layout.ranks) == [0, 4]


def test_what_ranks_did_before_the_rollback_does_not_count_after_it() -> None:
    """Rank 2 parks again, with the state that it still has, before it has heard of the plan."""
    declare = msgspec.structs.replace(DECLARE, iterations=20, evaluates=True)
    job = trained(5, checkpoint=3, declare=declare)
    lose_a_stage(job, stepped=5)
    job.wait(1)
    old = job.job.record.plan.epoch
    job.say(0, m.Stepped(epoch=old, outcome=outcome(6), seconds=0.5, compute_s=0.4))
    job.say(0, m.Evaluated(epoch=old, iteration=5, loss=1.0, tokens=8))
    job.crash(0)
    job.say(2, m.Parked(epoch=job.job.epoch, holds=(old,), stepped=6, outcome=outcome(6), ready=False))
    assert job.job.record.committed == 3
    assert not job.all(EvaluationDone)
    assert (proposal(job).base, proposal(job).next_iteration) == (None, 4)
    assert len(job.all(RollbackDecided)) == 1
    job.run(1)
    assert job.job.record.committed == 4


def test_a_loss_after_the_rollback_and_before_the_first_iteration_loads_the_checkpoint_again() -> None:
    job = trained(5, checkpoint=3, nodes=3)
    for rank in (1, 3, 5):
        job.crash(rank)
    job.park(stepped=5)
    job.wait(1)
    job.run()
    job.crash(proposal(job).plan.layout.active[-1])
    for rank in job.job.ready:
        job.say(rank, m.Parked(epoch=job.job.epoch, holds=(2,), stepped=3, outcome=None, ready=False))
    assert len(job.all(RollbackDecided)) == 1
    assert (proposal(job).base, proposal(job).checkpoint, proposal(job).next_iteration) == (None, "/ckpt/i3", 4)


@pytest.mark.parametrize("is_saved", [True, False])
def test_it_gives_up_when_it_went_back_to_one_checkpoint_again_and_again(is_saved: bool) -> None:
    """A checkpoint in between is progress."""
    job = trained(4, checkpoint=3, nodes=1, gpus=2, come_backs=99)
    for count in range(6):
        if job.end is not None:
            break
        victim = job.plan.layout.active[-1]
        job.crash(victim)
        job.park(stepped=job.job.record.committed)
        job.wait(1)
        if job.end is None:
            newest = len(job.job.record.placements) - 1
            job.join(newest)
            job.wait(1)
            job.park(newest, stepped=0)
            job.wait(1)
            job.run(1)
        if is_saved and job.end is None:
            save(job, job.job.record.committed)
        assert count < 6
    assert len(job.all(RollbackDecided)) == (6 if is_saved else 3)
    if not is_saved:
        assert job.end is not None
        assert (job.end.exit_code, job.end.requeue) == (5, False)
        refusal = "it has gone back to the checkpoint of iteration 3 3 times, and saved no checkpoint since"
        assert any(refusal in text for text in texts(job))


def test_the_limit_of_the_user_holds() -> None:
    job = trained(3, checkpoint=3, max_restarts=0)
    lose_a_stage(job, stepped=3)
    assert job.end is not None
    assert job.end.exit_code == 5
    assert not job.all(RollbackDecided)


def test_a_process_that_is_started_again_takes_part() -> None:
    """A model may need all devices: the plan waits until the next process on the device is ready."""
    job = trained(5, checkpoint=3, nodes=1, gpus=2, come_backs=3)
    job.crash(1)
    job.park(stepped=5)
    job.wait(1)
    assert len(job.all(RollbackDecided)) == 1
    assert len(job.orders(m.Propose)) == 1, "the first plan"
    job.join(2)
    job.wait(1)
    assert job.orders(m.Park)[-1] == ((2,), m.Park(epoch=job.job.epoch, reason=job.orders(m.Park)[-1][1].reason))
    job.park(2, stepped=0)
    job.wait(1)
    assert sorted(proposal(job).plan.layout.active) == [0, 2]
    assert job.run(1).job.record.committed == 4


def test_the_only_rank_may_be_lost() -> None:
    job = trained(5, checkpoint=3, nodes=1, gpus=1, pp=1, come_backs=3)
    job.crash(0)
    job.wait(1)
    job.join(1)
    job.wait(1)
    job.park(1, stepped=0)
    job.wait(1)
    assert (proposal(job).checkpoint, proposal(job).next_iteration) == ("/ckpt/i3", 4)
    assert job.run(1).job.record.committed == 4


def test_the_only_rank_may_be_lost_before_its_first_iteration() -> None:
    job = trained(0, nodes=1, gpus=1, pp=1, come_backs=3)
    job.crash(0)
    job.wait(1)
    assert job.end is None
    job.join(1)
    job.wait(1)
    job.park(1, stepped=0)
    job.wait(1)
    assert not job.all(RollbackDecided)
    assert job.run(1).job.record.committed == 1


def test_a_process_that_does_not_start_in_time_is_not_waited_for() -> None:
    job = trained(5, checkpoint=3, nodes=1, gpus=2, come_backs=3, start_budget_s=60.0)
    job.crash(1)
    job.park(stepped=5)
    job.spawn(2)
    job.wait(50)
    assert len(job.orders(m.Propose)) == 1
    job.wait(15)
    assert proposal(job).plan.layout.active == (0,)


def test_a_checkpoint_with_all_parts_written_is_waited_for() -> None:
    job = trained(5, checkpoint=3)
    save(job, 5, is_complete=False)
    lose_a_stage(job, stepped=5)
    job.wait(3)
    assert not job.all(RollbackDecided)
    complete(job, 5)
    job.wait(1)
    assert job.all(RollbackDecided)[0].folder == "/ckpt/i5"


def test_a_checkpoint_that_stays_incomplete_is_not_waited_for_long_and_not_used_later() -> None:
    job = trained(5, checkpoint=3)
    save(job, 5, is_complete=False)
    lose_a_stage(job, stepped=5)
    job.wait(MANIFEST_PATIENCE_S + 2)
    assert job.all(RollbackDecided)[0].folder == "/ckpt/i3"
    complete(job, 5)
    assert job.job.record.rollbacks.newest == (3, "/ckpt/i3")
    job.run(2)
    save(job, 5)
    assert job.job.record.rollbacks.newest == (5, "/ckpt/i5")


def test_parts_from_before_the_rollback_complete_no_checkpoint() -> None:
    job = trained(5, checkpoint=3)
    lose_a_stage(job, stepped=5)
    job.wait(1)
    job.run(2)
    before = [action for action in job.actions if isinstance(action, api.CommitCheckpoint)]
    for rank in (0, 1):
        job.say(rank, m.CheckpointPart(epoch=1, iteration=5, folder="i5", file=f"part-1-{rank}", bytes=9, seconds=0.5))
    assert [action for action in job.actions if isinstance(action, api.CommitCheckpoint)] == before


def test_another_supervisor_carries_the_rollback_out() -> None:
    """It knows of the rollback from the journal, and does not count the steps that agents have kept from before."""
    job = trained(5, checkpoint=3)
    lose_a_stage(job, stepped=5)
    job.wait(1)
    log = entries(job)
    until = next(number for number, entry in enumerate(log) if isinstance(entry, RollbackDecided)) + 1
    after = object.__new__(Direct)
    after.controller = Controller.recover(job.job.settings, log[:until], None, ())
    after.job, after.now, after.actions, after.declare = after.controller.job, 0.0, [], job.declare
    steps = tuple(m.Stepped(epoch=1, outcome=outcome(i), seconds=0.5, compute_s=0.4) for i in (4, 5, 6))
    for node, rank in (("n1", 0), ("n2", 2)):
        running = m.RunningWorker(rank=rank, device=0, pid=1000 + rank, steps=steps, said=(job.declare,))
        ended = ((rank + 1, -9),)
        after.feed(
            api.AgentJoined(
                node=node, host="h", devices=2, inventory=m.Inventory(workers=(running,), ended=ended, epoch=2)
            )
        )
    after.park(stepped=5)
    after.wait(1)
    assert not after.all(RollbackDecided)
    assert after.job.record.committed == 3
    assert (proposal(after).base, proposal(after).checkpoint, proposal(after).next_iteration) == (None, "/ckpt/i3", 4)


def test_invariants_hold_in_jobs_with_a_single_replica() -> None:
    """With and without checkpoints, killed supervisors and processes that are started again."""
    results = [play(draw_unreplicated(seed)) for seed in range(150)]
    went_back = [result for result in results if result.all(RollbackDecided)]
    assert len(went_back) >= 30
    assert sum(result.exit_code == 0 for result in went_back) >= 15


def test_a_newcomer_has_time_to_park_although_the_others_have_waited_for_long() -> None:
    """The others had to wait until a rank that hung was killed."""
    play(draw_unreplicated(165))


def test_no_later_plan_has_an_epoch_before_the_rollback() -> None:
    """All agents that had heard of the last epochs may be gone; steps of an earlier epoch would not count."""
    job = trained(5, checkpoint=3)
    lose_a_stage(job, stepped=5)
    job.wait(1)
    log = entries(job)
    at = next(number for number, entry in enumerate(log) if isinstance(entry, RollbackDecided))
    after = Controller.recover(
        job.job.settings, [*log[:at], msgspec.structs.replace(log[at], epoch=9)], Dependencies(), ()
    )
    assert after.job.epoch == 9
