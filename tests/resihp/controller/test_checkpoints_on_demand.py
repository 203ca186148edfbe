"""`resihp checkpoint now`: who is told to write one, and what whoever asked for it hears."""

from __future__ import annotations

from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.journal import CheckpointCommitted
from tests.resihp.controller.direct import Direct


def ask(job: Direct, request: int = 5) -> list[api.AnyAction]:
    return job.feed(api.CheckpointAsked(request=request))


def write(job: Direct, *ranks: int, iteration: int, error: str = "") -> None:
    assert job.job.record.plan is not None
    for rank in ranks:
        part = m.CheckpointPart(
            epoch=job.job.record.plan.epoch,
            iteration=iteration,
            folder="f",
            file=f"r{rank}",
            bytes=9,
            seconds=0.5,
            error=error,
        )
        job.say(rank, part)


def commit(job: Direct, iteration: int) -> None:
    """As the supervisor does once the manifest is written."""
    job.controller.journaled(CheckpointCommitted(iteration=iteration, folder="f", bytes=18, seconds=0.5))


def replies(job: Direct) -> list[api.Reply]:
    return [action for action in job.actions if isinstance(action, api.Reply)]


def told(job: Direct) -> list[tuple[tuple[int, ...], int]]:
    return [(ranks, order.number) for ranks, order in job.orders(m.SaveNext)]


def test_one_rank_is_told_and_whoever_asked_hears_of_it_once_it_is_committed() -> None:
    job = Direct().run(2)
    ask(job)
    assert told(job) == [((0,), 1)]
    job.feed(api.Tick())
    job.step(3)
    write(job, 0, 1, iteration=3)
    (written,) = [action for action in job.actions if isinstance(action, api.CommitCheckpoint)]
    assert (written.iteration, written.layout) == (3, job.job.record.plan.layout.describe())  # type: ignore[union-attr]
    assert replies(job) == []
    commit(job, 3)
    job.feed(api.Tick())
    assert replies(job) == [api.Reply(request=5, ok=True, text="checkpoint of iteration 3 is complete")]
    assert told(job) == [((0,), 1)], "told once"
    assert job.orders(m.Park) == [], "training goes on"


def test_several_who_ask_share_one_and_a_later_one_gets_another() -> None:
    job = Direct().run(2)
    ask(job, 5)
    ask(job, 6)
    job.step(3)
    write(job, 0, 1, iteration=3)
    commit(job, 3)
    job.feed(api.Tick())
    assert [reply.request for reply in replies(job)] == [5, 6]
    ask(job, 7)
    assert told(job) == [((0,), 1), ((0,), 2)]
    assert len(replies(job)) == 2


def test_whoever_asks_while_a_checkpoint_is_being_written_gets_a_later_one() -> None:
    job = Direct().run(2)
    ask(job, 5)
    job.step(3)
    ask(job, 6)
    write(job, 0, 1, iteration=3)
    commit(job, 3)
    job.feed(api.Tick())
    assert [reply.request for reply in replies(job)] == [5]
    assert told(job) == [((0,), 1), ((0,), 2)]
    job.step(4)
    write(job, 0, 1, iteration=4)
    commit(job, 4)
    job.feed(api.Tick())
    assert [reply.request for reply in replies(job)] == [5, 6]


def test_a_checkpoint_from_before_is_no_answer() -> None:
    job = Direct().run(2)
    commit(job, 2)
    ask(job)
    job.feed(api.Tick())
    assert replies(job) == []


def test_where_the_rank_that_was_told_is_lost_another_one_is() -> None:
    job = Direct(nodes=3, gpus=2).run(2)
    ask(job)
    job.crash(0)
    epoch = job.job.epoch
    job.park(1, 2, 3, 4, 5, stepped=2, epoch=epoch)
    job.confirm()
    job.ready()
    assert [number for _, number in told(job)] == [1, 2]
    assert told(job)[1][0] != (0,)
    assert replies(job) == []


def test_what_goes_wrong_is_told() -> None:
    job = Direct().run(2)
    ask(job, 5)
    job.step(3)
    write(job, 1, iteration=3, error="OSError: No space left on device")
    ask(job, 6)
    job.feed(api.CheckpointLost(reason="checkpoint f: part r0 of 9 bytes is not there; not committed"))
    assert [(reply.request, reply.ok, reply.text) for reply in replies(job)] == [
        (5, False, "rank 1 (n1 device 1): no checkpoint of iteration 3: OSError: No space left on device"),
        (6, False, "checkpoint f: part r0 of 9 bytes is not there; not committed"),
    ]


def test_no_checkpoint_is_promised_where_there_will_be_none() -> None:
    early = Direct(declares=False)
    ask(early)
    stopping = Direct(slurm=True).run(2)
    ask(stopping)
    stopping.feed(api.Signalled(signal=2))
    done = Direct().run(6)
    for rank in range(4):
        done.say(rank, m.Finished(iteration=6))
    ask(done)
    ending = Direct().run(2)
    ask(ending)
    ending.feed(api.StopAsked(request=9, at_once=True))
    assert [replies(job)[-1].text for job in (early, stopping, done)] == [
        "no checkpoint: training has not begun",
        "the job is stopping, and writes a last checkpoint if it can",
        "no checkpoint: training is done",
    ]
    assert not any(reply.ok for job in (early, stopping, done) for reply in replies(job))
    assert replies(ending)[-1].text.startswith("no checkpoint; the job has ended: stopped by an operator, at once")


def ends_after(job: Direct, *saved: int) -> list[str]:
    """What a job says that has trained all of its iterations, and of whose checkpoints these were written."""
    for iteration in saved:
        write(job, 0, 1, iteration=iteration)
    for rank in range(4):
        job.say(rank, m.Finished(iteration=6))
    for rank in range(4):
        job.feed(api.WorkerExited(rank=rank, status=0))
    assert job.end is not None
    assert job.end.exit_code == 0
    return [action.text for action in job.actions if isinstance(action, api.Say) and action.level == "notice"]


def test_what_was_trained_and_is_not_saved_is_told_at_the_end() -> None:
    assert any("the trained model was not saved: --checkpoint-every N" in text for text in ends_after(Direct().run(6)))
    lost = ends_after(Direct(checkpoint_every=4).run(6), 4)
    assert any(
        text == "no complete checkpoint of iteration 6: not all of its writers survived; the newest one is of "
        "iteration 4"
        for text in lost
    )


def test_a_job_whose_last_iteration_is_saved_ends_without_a_word_on_it() -> None:
    assert not any("checkpoint" in text for text in ends_after(Direct(checkpoint_every=4).run(6), 4, 6))
