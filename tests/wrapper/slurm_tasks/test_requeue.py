"""Asking Slurm to run the job again: refusals, silence, answers that are lost, and the TERM that follows."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from resihp.slurm.errors import SlurmOutputError, SlurmUnavailableError
from resihp.wrapper.slurm_tasks.requeue import (
    HURRIED_S,
    NOTICE_TIMEOUT_S,
    PATIENCE_S,
    end_for_good,
    requeue,
    until_noticed,
)
from tests.slurm.fake_slurm import FakeSlurm


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
    assert PATIENCE_S - 6 <= clock.now <= PATIENCE_S
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.endswith("; asking to be requeued for up to 60 min")
    assert f"try: scontrol requeue {job}" in last


def test_a_controller_that_is_away_for_ten_minutes_is_asked_until_it_is_back() -> None:
    slurm, clock = FakeSlurm(["n1"]), Clock()
    job = slurm.add_job("n1")
    slurm.unavailable = True
    clock.naps = [lambda: setattr(slurm, "unavailable", clock.now < 600)] * 1000
    assert ask(slurm, job, clock)
    assert 600 <= clock.now < 610
    assert slurm.calls["requeue"] < 130


def test_after_a_term_little_time_is_left() -> None:
    slurm, clock = FakeSlurm(["n1"]), Clock()
    job = slurm.add_job("n1")
    slurm.unavailable = True
    clock.naps = [lambda: None] * 100
    clock.naps[50] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    told_at = sum((1.0, 2.0, 4.0)) + 48 * 5.0
    assert not ask(slurm, job, clock)
    assert told_at < clock.now <= told_at + HURRIED_S


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


@pytest.mark.parametrize(("version", "asked"), [((22, 5, 8), 1), ((24, 11, 5), 0), ((26, 5, 5), 1)])
def test_a_preempted_job_is_left_to_a_slurm_that_would_run_it_twice(
    version: tuple[int, int, int], asked: int, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(["n1"], version=version)
    job = slurm.add_job("n1", preempted=True)
    assert requeue(job, slurm, leaves=True) == bool(asked)
    assert slurm.calls["requeue"] == asked
    assert ("Slurm requeues it by itself" in capsys.readouterr().err) == (not asked)


def test_where_the_script_does_not_end_slurm_is_asked() -> None:
    slurm = FakeSlurm(["n1"], version=(24, 11, 5))
    assert ask(slurm, slurm.add_job("n1", preempted=True))


def test_where_nobody_knows_slurm_is_asked() -> None:
    slurm = FakeSlurm(["n1"], version=(24, 11, 5))
    job = slurm.add_job("n1", preempted=True)
    slurm.refuse["runs_again"] = "the moon is full"
    assert requeue(job, slurm, leaves=True)


def test_a_job_that_may_be_held_after_its_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm(["n1"], version=(26, 5, 5))
    job = slurm.add_job("n1")
    end_for_good(job, slurm)
    assert capsys.readouterr().err == ""
    slurm.unavailable = True
    end_for_good(job, slurm)
    assert f"try: scancel {job}" in capsys.readouterr().err


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


def notice(slurm: FakeSlurm, job_id: str, dead: set[str], clock: Clock) -> float:
    until_noticed(job_id, slurm, dead, clock=clock, sleep=clock.sleep)
    return clock.now


def test_22_05_notices_dead_nodes_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Started before that, the next run would have no GPUs."""
    slurm, clock = FakeSlurm(["n1", "n2"], version=(22, 5, 8)), Clock()
    job = slurm.add_job("n1", "n2")
    clock.naps = [lambda: None, lambda: slurm.set_job(job, nodes=("n1",))]
    assert 0 < notice(slurm, job, {"n2"}, clock) < NOTICE_TIMEOUT_S
    assert "noticed that n2 is dead" in capsys.readouterr().err
    again = slurm.add_job("n1", "n2")
    assert notice(slurm, again, {"n2"}, Clock()) >= NOTICE_TIMEOUT_S  # it never does: asked all the same
    assert notice(slurm, again, set(), Clock()) == 0
    slurm.cancel(again)
    assert notice(slurm, again, {"n2"}, Clock()) == 0


def test_later_releases_need_not() -> None:
    slurm = FakeSlurm(["n1", "n2"], version=(24, 11, 5))
    assert notice(slurm, slurm.add_job("n1", "n2"), {"n2"}, Clock()) == 0
