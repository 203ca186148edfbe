"""Whether, and when, what a search needs is loaded beside a job."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec
import pytest

from benchmarks.random_jobs import random_question
from resihp.record.journal import ModelDeclared, PlanWithdrawn, Record
from resihp.scheduler import decide
from resihp.scheduler.what_if.question import first_plan, pose
from resihp.settings import Settings
from resihp.wrapper.supervisor.thinking.loading import SearchLoader
from tests.resihp.controller.direct import DECLARE


def declared(memory_bytes: int | None) -> Record:
    entry = ModelDeclared(declare=msgspec.structs.replace(DECLARE, memory_bytes=memory_bytes))
    return Record(seq=2, at=0.0, entry=entry)


class Loads:
    def __init__(self) -> None:
        self.count, self.came = 0, threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.came.set()


def settings(**changes: object) -> Settings:
    return msgspec.structs.replace(Settings(job="local-1", nodes=2, gpus_per_node=2, tp=1, pp=2), **changes)


@pytest.mark.parametrize(("told", "has"), [(None, 80_000_000_000), (1_000_000_000, None)])
def test_once_it_is_known_what_is_trained_on_devices_of_a_known_size(told: int | None, has: int | None) -> None:
    loads = Loads()
    loader = SearchLoader(settings(memory_bytes=told), [], loads)
    loader.submit(Record(seq=1, at=0.0, entry=PlanWithdrawn(epoch=1, reason="other")))
    assert not loads.came.wait(0.05)
    loader.submit(declared(has))
    assert loads.came.wait(10)
    loader.submit(declared(has))
    loader.close(0.0)
    assert loads.count == 1


def test_not_where_nothing_is_ever_searched_for() -> None:
    loads = Loads()
    SearchLoader(settings(), [declared(None)], loads)
    SearchLoader(settings(planner="resihp-paper"), [declared(1 << 36)], loads)
    assert not loads.came.wait(0.05)


@pytest.mark.parametrize("planner", ["resihp", "resihp-paper"])
def test_a_supervisor_starts_without_scipy_and_has_it_once_it_is_known_what_is_trained(planner: str) -> None:
    probe = f"""
import sys, time
import resihp.wrapper.supervisor.process
from tests.wrapper.supervisor.thinking.test_loading import declared, settings, SearchLoader
assert not [name for name in sys.modules if name.startswith("scipy")]
SearchLoader(settings(planner="{planner}"), [declared(None)])
deadline = time.monotonic() + 20
while not hasattr(sys.modules.get("scipy.optimize"), "linear_sum_assignment") and time.monotonic() < deadline:
    time.sleep(0.01)
print(time.monotonic() < deadline)
"""
    answer = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "True"


def test_a_supervisor_that_takes_over_knows_from_the_journal() -> None:
    loads = Loads()
    SearchLoader(settings(), [declared(1 << 36)], loads)
    assert loads.came.wait(10)


def test_until_it_is_there_plans_are_made_without_a_search() -> None:
    """Whoever waits for a compiler in the supervisor is taken for dead by its agents."""
    go = threading.Event()

    def load() -> None:
        assert go.wait(10)

    loader = SearchLoader(settings(), [declared(1 << 36)], load)
    assert loader.planner is not None
    question = random_question(30016)
    case = pose(question, first_plan(question))
    assert not loader.planner.decide(case).reason.startswith("searched")
    go.set()
    assert loader.ready.wait(10)
    assert loader.planner.decide(case) == decide(case)
    assert decide(case).reason.startswith("searched")


def test_what_cannot_be_loaded_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> None:
        raise OSError("no space left on device")

    with caplog.at_level("ERROR"):
        loader = SearchLoader(settings(), [declared(1 << 36)], load)
        while not caplog.records:
            assert not loader.ready.wait(0.01)
    assert not loader.ready.is_set()


def test_all_that_is_compiled_is_loaded() -> None:
    """Searches afterwards, of whatever schedule and links, load nothing more."""
    probe = """
import sys
import msgspec
from benchmarks.near_best import question_of, first_plan, pose
from resihp.scheduler import anytime, decide
anytime.load()
kernels = [module for name, module in sys.modules.items() if name.startswith("resihp.scheduler.search.kernels.")]
def loaded():
    functions = [one for module in kernels for one in vars(module).values() if hasattr(one, "signatures")]
    return {(one.__module__, one.__name__): len(one.signatures) for one in functions}
before = loaded()
assert sum(before.values()) > 6, before
for schedule in ("1f1b", "zero-bubble"):
    for links in ({}, {("n1", "n2"): 0.5}):
        question = msgspec.structs.replace(question_of(30016, False), schedule=schedule, slow_links=links)
        decision = decide(pose(question, first_plan(question)))
        assert decision.reason.startswith("searched"), decision.reason
print(before == loaded())
"""
    answer = subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "True"
