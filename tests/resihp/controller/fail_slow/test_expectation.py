"""How long an iteration may be without progress follows from its own workload, told before it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from resihp.controller import interface as api
from resihp.detector.observation import pack
from resihp.pipeline.schedules import orders_of
from resihp.protocol import messages as m
from resihp.record.journal import Suspected
from tests.resihp.controller.direct import DECLARE, Direct, outcome
from tests.resihp.controller.test_takeover import TakenOver
from tests.resihp.detector.small_jobs import observations

LONG = msgspec.structs.replace(DECLARE, iterations=1000)
LEARNT = 40
"""Iterations after which chunks are known."""
DOCUMENT = 32_768
"""Tokens of an enormous one; micro-batches have 6,000 to 8,192 else."""


class Job(Direct):
    """DP2 x PP2, with the real detector, which has seen `LEARNT` iterations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(declare=LONG, **settings)
        self.run()
        assert self.job.plan is not None
        seen = observations(self.job.plan, orders_of(self.job.plan), range(1, LEARNT + 1), iteration_noise=0.0)
        for one in seen:
            for rank, times in one.times.items():
                step = m.Stepped(
                    epoch=self.job.epoch,
                    outcome=outcome(one.iteration),
                    seconds=one.seconds,
                    compute_s=float(times.compute.sum()),
                    reduced_s=times.reduced,
                    chunks=pack(times.chunks),
                )
                self.say(rank, step)
        assert self.job.committed == LEARNT

    def begins(self, *tokens: int, epoch: int | None = None) -> None:
        """The next iteration: micro-batches of one document each, of 7,000 tokens where nothing else is said."""
        all_tokens = (*tokens, *[7000] * (DECLARE.micro_batches - len(tokens)))
        told = m.Workload(
            epoch=self.job.epoch if epoch is None else epoch,
            iteration=self.job.committed + 1,
            tokens=all_tokens,
            squares=tuple(n * n for n in all_tokens),
        )
        self.say(0, told)

    def silent_for(self, seconds: float) -> list[str]:
        """No primitive is done for so long, all in the middle of one; what has been done about it."""
        before = len(self.actions)
        self.wait(seconds, activity="compute")
        done = self.actions[before:]
        found = [a.entry for a in done if isinstance(a, api.Log) and isinstance(a.entry, Suspected)]
        return ["suspected"] * bool(found) + ["given up"] * any(isinstance(a, api.SignalWorker) for a in done)


def test_the_usual_iteration_is_given_up_after_ten_times_its_time() -> None:
    job = Job()
    usual_s = job.job.usual_s
    assert 1.5 < usual_s < 4.0
    job.begins()
    assert job.job.predicted_s == pytest.approx(usual_s, rel=0.2)
    assert job.silent_for(2.9 * usual_s) == []
    assert job.silent_for(6.0 * usual_s) == ["suspected"]
    assert job.silent_for(5.0 * usual_s)[-1] == "given up"


def test_an_enormous_document_is_given_the_time_that_it_needs() -> None:
    job = Job()
    usual_s = job.job.usual_s
    job.begins(DOCUMENT)
    needed_s = job.job.predicted_s
    assert needed_s > 4 * usual_s
    assert job.silent_for(2.0 * needed_s) == [], "not even suspected"
    assert job.silent_for(7.5 * needed_s) == ["suspected"]
    assert job.silent_for(2.0 * needed_s) == ["given up"]


def test_the_same_iteration_is_given_up_where_nobody_told_its_workload() -> None:
    job = Job()
    job.begins(DOCUMENT)
    needed_s = job.job.predicted_s
    job = Job()
    assert job.silent_for(5.0 * needed_s) == ["suspected", "given up"]


def test_a_small_iteration_is_not_given_up_sooner_than_the_usual() -> None:
    job = Job()
    job.begins(*[200] * DECLARE.micro_batches)
    assert job.job.predicted_s == job.job.usual_s


def test_the_prediction_ends_with_its_iteration() -> None:
    job = Job()
    job.begins(DOCUMENT)
    job.step(job.job.committed + 1)
    assert job.job.predicted_s == job.job.usual_s


def test_a_workload_of_another_epoch_or_of_another_size_predicts_nothing() -> None:
    job = Job()
    job.begins(DOCUMENT, epoch=7)
    job.begins(*[DOCUMENT] * (DECLARE.micro_batches + 1))
    assert job.job.predicted_s == job.job.usual_s


def test_the_first_iteration_of_another_plan_is_predicted_as_well() -> None:
    """It may be the very iteration with the enormous document that has to be redone."""
    job = Job()
    job.begins(DOCUMENT)
    before_s = job.job.predicted_s
    job.crash(3)
    job.park(stepped=LEARNT)
    job.confirm()
    job.ready()
    assert job.job.predicted_s == job.job.usual_s
    job.begins(DOCUMENT)
    assert job.job.predicted_s > 0.9 * before_s


def test_nothing_is_predicted_before_the_detector_knows_enough_or_when_it_is_not_wanted() -> None:
    heir = TakenOver(Job()).all_back()
    heir.say(0, m.Workload(epoch=1, iteration=LEARNT + 1, tokens=(DOCUMENT,) * 8, squares=(DOCUMENT**2,) * 8))
    assert heir.job.predicted_s == heir.job.usual_s > 0.0
    job = Job(detect=False)
    job.begins(DOCUMENT)
    assert job.job.predicted_s == job.job.usual_s


def test_how_many_iterations_are_left_is_not_counted_by_an_enormous_one() -> None:
    """Whether a replacement pays follows from the usual time."""
    job = Job()
    usual_s = job.job.usual_s
    job.begins(DOCUMENT)
    assert job.job.usual_s == usual_s
    assert dataclasses.asdict(job.job.forecast)["iteration"] == LEARNT + 1  # type: ignore[arg-type]
