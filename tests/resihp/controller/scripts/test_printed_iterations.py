"""Iterations of a script that does not report to resihp, as its agents read them from its output."""

from __future__ import annotations

import math
from typing import Any

import pytest

from resihp.controller import Controller
from resihp.controller import interface as api
from resihp.protocol import messages as m
from resihp.record.fold import fold
from resihp.record.journal import CounterSeen, IterationCommitted, LossNotFinite, Reconfigured
from tests.resihp.controller.direct import DECLARE
from tests.resihp.controller.fail_stop.test_early_losses import gathered
from tests.resihp.controller.test_startup import Start


def script(**settings: Any) -> Start:
    """A plain script of four ranks on two nodes."""
    job = gathered(**{"slurm": False, "node_given_up_s": 1e9, "spares_wait": True, **settings})
    job.spawn(0, 1, 2, 3)
    return job


def prints(job: Start, *iterations: int, rank: int = 0, goal: int | None = 100, loss: float | None = 2.5) -> None:
    figures = tuple(m.PrintedFigures(iteration=i, seconds=0.5, loss=loss) for i in iterations)
    job.feed(api.WorkerPrinted(printed=m.Printed(rank=rank, figures=figures, goal=goal)), 1.0)


def committed(job: Start) -> list[int]:
    return [entry.outcome.iteration for entry in job.all(IterationCommitted)]


def test_printed_iterations_are_committed_with_their_seconds_and_loss() -> None:
    job = script()
    prints(job, 1, 2, 3)
    prints(job, 10, loss=None)
    assert committed(job) == [1, 2, 3, 10]
    assert [entry.seconds for entry in job.all(IterationCommitted)] == [0.5] * 4
    assert [entry.outcome.loss_is_unknown for entry in job.all(IterationCommitted)] == [False, False, False, True]
    assert job.all(CounterSeen) == [CounterSeen(rank=0, iteration=1, goal=100)]
    record = fold(job.journal)
    assert (record.committed, record.goal, list(record.recent)) == (10, 100, [0.5] * 4)


def test_iterations_that_are_done_again_are_not_committed_again() -> None:
    job = script()
    prints(job, *range(1, 41))
    prints(job, 31, 32)
    for i in range(33, 41):
        prints(job, i)
    prints(job, 41)
    assert committed(job) == list(range(1, 42))
    assert job.all(CounterSeen)[1:] == [CounterSeen(rank=0, iteration=31, furthest=40, goal=100)]


def test_a_counter_that_stays_behind_for_long_is_noted_now_and_then() -> None:
    job = script()
    prints(job, *range(1, 101))
    for i in range(1, 95):
        prints(job, i)
    assert [entry.iteration for entry in job.all(CounterSeen)] == [1, 1, 31, 61, 91]
    assert committed(job) == list(range(1, 101))


def test_two_ranks_that_print_the_same_counter_are_one() -> None:
    job = script()
    for i in range(1, 20):
        prints(job, i, rank=0)
        prints(job, i, rank=3, goal=None)
    assert committed(job) == list(range(1, 20))
    assert len(job.all(CounterSeen)) == 1


def test_after_a_rank_has_ended_another_one_is_followed() -> None:
    job = script()
    prints(job, *range(1, 20), rank=3)
    job.feed(api.WorkerExited(rank=3, status=0))
    prints(job, 10, rank=0)
    assert job.all(CounterSeen)[-1] == CounterSeen(rank=0, iteration=10, furthest=19, goal=100)
    prints(job, 21, rank=3)
    assert committed(job) == list(range(1, 20)), "the last lines of a process come before its exit"


def test_a_loss_that_is_not_finite_is_recorded_once() -> None:
    job = script()
    prints(job, 1)
    prints(job, 2, 3, loss=math.nan)
    prints(job, 4, loss=math.inf)
    assert job.all(LossNotFinite) == [LossNotFinite(rank=0, iteration=2, loss="nan")]
    assert fold(job.journal).loss_not_finite == 2
    prints(job, 5, loss=None)
    assert fold(job.journal).loss_not_finite == 2, "an unknown loss says nothing"
    prints(job, 6, loss=2.0)
    assert fold(job.journal).loss_not_finite == 0
    (warning,) = [action.text for action in job.actions if isinstance(action, api.Say) and action.level == "warning"]
    assert warning == "iteration 2: rank 0 printed the loss nan"


def test_a_new_supervisor_goes_on_from_the_furthest_iteration() -> None:
    job = script()
    prints(job, *range(1, 20))
    again = Controller.recover(job.settings, job.journal).job
    assert again.record.committed == 19
    assert again.record.counter == CounterSeen(rank=0, iteration=1, goal=100)


def test_what_a_script_printed_before_it_declares_a_model_does_not_count() -> None:
    job = script()
    prints(job, *range(1, 20))
    for rank in range(4):
        job.feed(api.WorkerSaid(rank=rank, message=DECLARE))
    job.wait(1)
    prints(job, 20)
    assert committed(job)[:19] == list(range(1, 20))
    assert job.controller.job.record.committed == 0


def restarted(job: Start) -> None:
    """Rank 1 is killed, and all are started again."""
    job.feed(api.WorkerExited(rank=1, status=-9))
    job.feed(api.Tick(), 1.5)
    for rank in (0, 2, 3):
        job.feed(api.WorkerExited(rank=rank, status=-15))
    for node in ("n1", "n2"):
        job.feed(api.ProcessesEnded(node=node, round=job.controller.job.record.round), 2.0)
    job.spawn(0, 1, 2, 3)


def test_a_restart_has_mended_the_failure_once_an_iteration_is_printed() -> None:
    job = script(max_restarts=3)
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    prints(job, *range(1, 41))
    restarted(job)
    assert job.end is None
    assert job.all(Reconfigured) == []
    prints(job, 31)
    prints(job, 32)
    (mended,) = job.all(Reconfigured)
    assert (mended.epoch, mended.failures, mended.attempts, mended.action) == (1, (1,), 1, "redo")
    assert mended.seconds == pytest.approx(mended.park_s + mended.first_iteration_s)
    restarted(job)
    restarted(job)
    prints(job, 41)
    (_, again) = job.all(Reconfigured)
    assert (again.epoch, again.failures, again.attempts) == (3, (2, 3), 2)
    assert [entry.epoch for entry in job.all(IterationCommitted)][-2:] == [0, 3]


def test_a_script_that_mentions_resihp_has_no_printed_iterations_before_its_ranks_have_met() -> None:
    """It may count its samples before it declares its model."""
    job = script(spares_wait=False)
    prints(job, *range(1, 500))
    assert job.journal == [entry for entry in job.journal if not isinstance(entry, CounterSeen | IterationCommitted)]
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    prints(job, 1, 2)
    assert committed(job) == [1, 2]


# --- resihp.iteration ------------------------------------------------------------------------------------------------


def calls(
    job: Start, *iterations: int, rank: int = 0, loss: float | None = 2.5, tokens: int = 0, seconds: float = 0.5
) -> None:
    figures = tuple(
        m.PrintedFigures(
            iteration=i, seconds=seconds, loss=loss, tokens=tokens, sum_squared_lengths=tokens * tokens // 8
        )
        for i in iterations
    )
    job.feed(api.WorkerPrinted(printed=m.Printed(rank=rank, figures=figures, called=True)), 1.0)


def test_once_a_rank_reports_its_iterations_printed_lines_give_only_the_goal() -> None:
    job = script()
    prints(job, 1, 2, goal=None)
    calls(job, 3)
    prints(job, 40, 41, goal=60)
    for i in range(4, 40):
        calls(job, i)
    assert committed(job) == list(range(1, 40))
    assert fold(job.journal).goal == 60


def test_calls_are_heard_before_it_is_known_that_a_script_declares_no_model() -> None:
    job = script(spares_wait=False)
    prints(job, 1, 2)
    assert not committed(job)
    calls(job, 1, 2)
    assert committed(job) == [1, 2]


def test_the_calls_of_a_rank_that_reports_losses_count() -> None:
    job = script()
    for i in range(1, 6):
        calls(job, i, loss=None)
        calls(job, i, rank=3, loss=1.0 + i)
    assert committed(job) == [1, 2, 3, 4, 5]
    losses = [entry.outcome.loss for entry in job.all(IterationCommitted)]
    assert losses[1:] == [3.0, 4.0, 5.0, 6.0]


def test_tokens_are_recorded_and_predict_the_time_of_an_iteration() -> None:
    job = script()
    for i in range(1, 101):
        tokens = 1000 + 100 * (i % 10)
        calls(job, i, tokens=tokens, seconds=0.1 + 2e-4 * tokens)
    last = job.all(IterationCommitted)[-2]
    assert (last.outcome.tokens, last.outcome.sum_squared_lengths) == (1900, 1900 * 1900 // 8)
    assert last.predicted_seconds == pytest.approx(last.seconds, rel=0.03)
    assert not last.outcome.samples
    calls(job, 101, loss=None, tokens=5)
    assert job.all(IterationCommitted)[-1].outcome.loss_is_unknown
