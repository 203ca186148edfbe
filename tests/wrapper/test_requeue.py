"""Asking Slurm to run the job again: refusals, silence, answers that are lost, and the TERM that follows."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from slurm.errors import SlurmOutputError, SlurmUnavailableError
from slurm.fake import FakeSlurm
from wrapper.requeue import PATIENCE_S, requeue


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.naps: list[Any] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for happens in self.naps[:1]:
            self.naps.pop(0)
            happens()


def ask(slurm: FakeSlurm, job_id: str, clock: Clock | None = None) -> bool:
    clock = clock or Clock()
    return requeue(job_id, slurm, clock=clock, sleep=clock.sleep)


def test_a_job_is_requeued(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm(["n1"])
    job = slurm.add_job("n1")
    assert ask(slurm, job)
    assert slurm.job_views[job].state == "pending"
    assert f"job {job}: requeued" in capsys.readouterr().err


def test_a_refusal_is_told_with_slurms_words(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm(["n1"])
    job = slurm.add_job("n1")
    slurm.refuse["requeue"] = "Requested operation is presently disabled"
    assert not ask(slurm, job)
    assert slurm.calls["requeue"] == 1
    assert "presently disabled" in capsys.readouterr().err


def test_a_controller_that_comes_back_is_asked_again() -> None:
    slurm, clock = FakeSlurm(["n1"]), Clock()
    job = slurm.add_job("n1")
    slurm.unavailable = True
    clock.naps = [lambda: None, lambda: setattr(slurm, "unavailable", False)]
    assert ask(slurm, job, clock)
    assert slurm.calls["requeue"] == 3


def test_a_controller_that_is_away_is_not_asked_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    slurm, clock = FakeSlurm(["n1"]), Clock()
    job = slurm.add_job("n1")
    slurm.unavailable = True
    assert not ask(slurm, job, clock)
    assert PATIENCE_S - 2 <= clock.now <= PATIENCE_S
    assert f"try: scontrol requeue {job}" in capsys.readouterr().err


def test_an_answer_that_was_lost_does_no_harm() -> None:
    slurm, clock = FakeSlurm(["n1"]), Clock()
    job = slurm.add_job("n1")
    slurm.swallow_answers = True
    clock.naps = [lambda: setattr(slurm, "swallow_answers", False)]
    assert ask(slurm, job, clock)
    assert slurm.job_views[job].restarts == 1


@pytest.mark.parametrize("error", [SlurmUnavailableError("scontrol was ended by signal 15"), SlurmOutputError("odd")])
def test_what_is_not_a_refusal_may_have_happened(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, asked = FakeSlurm(["n1"]), []

    def answer(job_id: str) -> None:
        asked.append(job_id)
        if len(asked) == 1:
            raise error

    monkeypatch.setattr(slurm, "requeue", answer)
    assert ask(slurm, "7")
    assert asked == ["7", "7"]


def test_the_term_that_comes_with_the_answer_does_not_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = FakeSlurm(["n1"])
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        monkeypatch.setattr(slurm, "requeue", lambda job_id: os.kill(os.getpid(), signal.SIGTERM))
        assert ask(slurm, "7")
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
