"""How often a job asks Slurm, in virtual time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resihp.slurm.client import NodeView
from resihp.slurm.errors import SlurmRefusedError, SlurmUnavailableError
from resihp.slurm.rate_limited import FIRST_PAUSE_S, LONGEST_PAUSE_S, Polite
from tests.slurm.fake_slurm import FakeSlurm

NODES = ("n1", "n2", "n3")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fake() -> FakeSlurm:
    return FakeSlurm(NODES, operator=True)


@pytest.fixture
def slurm(fake: FakeSlurm, clock: Clock) -> Polite:
    return Polite(fake, clock=clock)


def test_a_steady_job_asks_about_its_nodes_once_a_minute(slurm: Polite, fake: FakeSlurm, clock: Clock) -> None:
    """An hour of several askers, each for other nodes, twice a second."""
    slurm.nodes(NODES)
    for _ in range(7200):
        slurm.nodes(NODES)
        slurm.nodes(["n2"])
        slurm.nodes(["n3", "nowhere"])
        clock.now += 0.5
    assert slurm.calls["nodes"] == fake.calls["nodes"] == 2 * 60, "for the three, and for the one that is nowhere"
    assert slurm.calls.total() == 2 * 60


def test_jobs_are_asked_about_more_often(slurm: Polite, fake: FakeSlurm, clock: Clock) -> None:
    jobs = [fake.add_job("n1"), fake.add_job("n2")]
    for _ in range(60):
        slurm.job(jobs[0])
        slurm.jobs(jobs)
        clock.now += 1
    assert slurm.calls["jobs"] == 2 * 4


def test_what_slurm_does_not_know_is_remembered_too(slurm: Polite) -> None:
    for _ in range(5):
        assert slurm.nodes(["nowhere"]) == {}
        assert slurm.job("77") is None
    assert slurm.calls == {"nodes": 1, "jobs": 1}


def test_who_knows_of_a_change_gets_a_new_answer(slurm: Polite, fake: FakeSlurm, clock: Clock) -> None:
    slurm.nodes(NODES)
    fake.set_node("n2", state="down")
    clock.now += 10
    assert slurm.nodes(["n2"])["n2"].state == "idle"
    assert slurm.nodes(["n2"], fresh_s=30)["n2"].state == "idle"
    assert slurm.nodes(["n2"], fresh_s=5)["n2"].state == "down"
    assert slurm.nodes(["n1"], fresh_s=5)["n1"].state == "idle"
    assert slurm.calls["nodes"] == 3
    slurm.nodes(["n1"], fresh_s=0)
    assert slurm.calls["nodes"] == 4


def test_what_we_have_changed_ourselves_is_asked_again(slurm: Polite, fake: FakeSlurm) -> None:
    slurm.nodes(NODES)
    slurm.drain("n2", "bad")
    assert slurm.nodes(["n2"])["n2"].draining
    slurm.undrain("n2")
    assert not slurm.nodes(["n2"])["n2"].draining
    job = fake.add_job("n1", "n3")
    assert slurm.job(job)
    slurm.keep_nodes(job, ["n1"])
    kept = slurm.job(job)
    assert kept is not None
    assert kept.nodes == ("n1",)
    slurm.requeue(job)
    again = slurm.job(job)
    assert again is not None
    assert again.restarts == 1
    slurm.cancel(job)
    cancelled = slurm.job(job)
    assert cancelled is not None
    assert cancelled.state == "cancelled"


def test_a_lost_answer_to_a_change_makes_old_views_worthless(slurm: Polite, fake: FakeSlurm) -> None:
    slurm.nodes(NODES)
    fake.swallow_answers = True
    with pytest.raises(SlurmUnavailableError):
        slurm.drain("n2", "bad")
    fake.swallow_answers = False
    assert slurm.nodes(["n2"])["n2"].draining


def test_only_nodes_without_a_recent_answer_are_asked_about(fake: FakeSlurm, clock: Clock) -> None:
    """Each of them costs slurmctld an answer."""
    asked: list[Sequence[str]] = []
    original = fake.nodes

    def noted(names: Sequence[str]) -> Mapping[str, NodeView]:
        asked.append(tuple(names))
        return original(names)

    fake.nodes = noted  # type: ignore[method-assign]
    slurm = Polite(fake, clock=clock)
    slurm.nodes(["n1"])
    clock.now += 30
    assert set(slurm.nodes(["n1", "n2"])) == {"n1", "n2"}
    clock.now += 30
    slurm.nodes(["n1", "n2"])
    assert asked == [("n1",), ("n2",), ("n1",)]


def test_after_a_failure_slurm_is_left_alone_for_longer_and_longer(
    slurm: Polite, fake: FakeSlurm, clock: Clock
) -> None:
    slurm.nodes(NODES)
    clock.now += 60
    fake.unavailable = True
    times = []
    for _ in range(3600):
        before = fake.calls["nodes"]
        with pytest.raises(SlurmUnavailableError):
            slurm.nodes(NODES)
        if fake.calls["nodes"] > before:
            times.append(clock.now)
        clock.now += 1
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    fake.unavailable = False
    clock.now += LONGEST_PAUSE_S
    assert set(slurm.nodes(NODES)) == set(NODES)
    clock.now += 60
    fake.unavailable = True
    with pytest.raises(SlurmUnavailableError):
        slurm.nodes(NODES)
    fake.unavailable = False
    clock.now += FIRST_PAUSE_S
    assert slurm.nodes(NODES)


def test_a_view_that_is_fresh_enough_outlives_an_outage(slurm: Polite, fake: FakeSlurm, clock: Clock) -> None:
    slurm.nodes(NODES)
    fake.unavailable = True
    clock.now += 30
    assert set(slurm.nodes(NODES)) == set(NODES)
    clock.now += 31
    with pytest.raises(SlurmUnavailableError):
        slurm.nodes(NODES)


def test_one_question_that_fails_does_not_keep_others_back(slurm: Polite, fake: FakeSlurm) -> None:
    fake.refuse["nodes"] = "Invalid node format specification"
    for _ in range(3):
        with pytest.raises(SlurmRefusedError):
            slurm.nodes(NODES)
    assert fake.calls["nodes"] == 1
    assert slurm.job("77") is None
    assert slurm.cluster() == "fake"


def test_changes_are_always_asked_for(slurm: Polite, fake: FakeSlurm, tmp_path: Path) -> None:
    fake.unavailable = True
    for _ in range(3):
        with pytest.raises(SlurmUnavailableError):
            slurm.nodes(NODES)
        with pytest.raises(SlurmUnavailableError):
            slurm.drain("n1", "bad")
    assert fake.calls["drain"] == slurm.calls["drain"] == 3
    assert fake.calls["nodes"] == 1


def test_version_and_cluster_are_asked_for_once(slurm: Polite, fake: FakeSlurm, clock: Clock) -> None:
    fake.unavailable = True
    for _ in range(3):
        with pytest.raises(SlurmUnavailableError):
            slurm.cluster()
    fake.unavailable = False
    clock.now += FIRST_PAUSE_S
    for _ in range(3):
        assert slurm.cluster() == "fake"
        assert slurm.version() == (22, 5, 8)
    assert fake.calls == {"cluster": 2, "version": 1}


def test_threads_that_ask_the_same_share_a_call(fake: FakeSlurm, clock: Clock) -> None:
    entered, answer = threading.Event(), threading.Event()
    original = fake.nodes

    def slow(names: Sequence[str]) -> Mapping[str, NodeView]:
        entered.set()
        assert answer.wait(10)
        return original(names)

    fake.nodes = slow  # type: ignore[method-assign]
    slurm = Polite(fake, clock=clock)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(slurm.nodes, NODES)
        assert entered.wait(10)
        others = [threads.submit(slurm.nodes, [name]) for name in NODES for _ in range(2)]
        # A question of another kind is not held up.
        assert slurm.job("77") is None
        answer.set()
        assert set(first.result(10)) == set(NODES)
        assert [set(each.result(10)) for each in others] == [{name} for name in NODES for _ in range(2)]
    assert slurm.calls["nodes"] == 1


def test_what_is_asked_anew_each_time_is_answered_as_slurm_does_and_counted(clock: Clock) -> None:
    fake = FakeSlurm(NODES, operator=True, version=(24, 11, 5))
    slurm = Polite(fake, clock=clock)
    number = fake.add_job("n1", "n2", script="#!/bin/sh\n")
    fake.job_gpus[number] = {"n1": 8, "n2": 4}
    fake.set_node("n3", flags=frozenset({"drain"}))
    preempted = fake.add_job("n3", preempted=True)
    assert slurm.gpus(number) == {"n1": 8, "n2": 4}
    assert slurm.batch_script(number) == "#!/bin/sh\n"
    assert slurm.expand("n[1-2]") == ("n1", "n2")
    assert list(slurm.drained()) == ["n3"]
    assert [slurm.runs_again(job) for job in (number, preempted)] == [False, True]
    slurm.end_for_good(number)
    slurm.comment(number, "half way")
    assert fake.job_views[number].comment == "half way"
    asked = ("gpus", "batch_script", "expand", "drained", "runs_again", "end_for_good", "comment")
    assert [slurm.calls[kind] for kind in asked] == [1, 1, 1, 1, 2, 1, 1]
