"""The order to save what a parked rank holds: of which plan, after which step, and by whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resihp.executor.state import checkpoint
from resihp.executor.supervised.worker import SupervisedWorker
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.protocol import messages as m
from tests.resihp.controller.direct import outcome


def plan_of(epoch: int) -> Plan:
    return Plan(epoch=epoch, layout=Layout.uniform(tp=1, pp=2, dp=2, layers=4), assignment=spread(8, 2))


class Engine(SimpleNamespace):
    """A parked engine: what it holds, without any of it."""

    def begin(self, epoch: int) -> None:
        self.holds, self.acknowledged = (epoch,), None

    def step(self, taken: m.StepOutcome) -> None:
        self.stepped = taken.iteration


def parked(rank: int, monkeypatch: pytest.MonkeyPatch, **engine: Any) -> tuple[Any, list[Any]]:
    """A supervised rank between orders, and the parts that it writes: (epoch of the plan, folder, replica)."""
    written: list[Any] = []

    def save_part(engine: Any, plan: Plan, folder: Path, replica: int) -> tuple[str, int]:
        written.append((plan.epoch, folder.name, replica))
        return "part", 10

    monkeypatch.setattr(checkpoint, "save_part", save_part)
    said: list[m.WorkerMessage] = []
    client = SimpleNamespace(start=SimpleNamespace(rank=rank), send=said.append, attend=None, activity="parked")
    state = {"holds": (1,), "acknowledged": None, "stepped": 3, "ready": None} | engine
    worker = SupervisedWorker(client, Engine(**state), None, 0, 9, Path("/checkpoints"), 0)  # type: ignore[arg-type]
    worker._held = {epoch: plan_of(epoch) for epoch in (1, 2)}
    return worker, [written, said]


def save(epoch: int = 1, replica: int = 0, iteration: int = 3) -> m.Save:
    return m.Save(epoch=epoch, replica=replica, finish=outcome(iteration))


def test_a_rank_of_the_replica_writes_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (written, said) = parked(1, monkeypatch)
    worker._save_parked(save())
    assert written == [(1, "iteration-000003", 0)]
    (part,) = said
    assert (part.epoch, part.iteration, part.file, part.bytes) == (1, 3, "part", 10)
    assert worker._client.activity == "parked"


def test_another_replica_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (written, _) = parked(2, monkeypatch)
    worker._save_parked(save(replica=1))
    assert written == [(1, "iteration-000003", 1)]


def test_whoever_has_no_work_in_that_replica_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (2, 7):
        worker, answers = parked(rank, monkeypatch)
        worker._save_parked(save())
        assert answers == [[], []]


def test_a_step_that_others_took_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (written, _) = parked(0, monkeypatch, stepped=2, ready=3)
    worker._save_parked(save())
    assert written == [(1, "iteration-000003", 0)]


@pytest.mark.parametrize("engine", [{"stepped": 2, "ready": None}, {"stepped": 4}, {"holds": ()}, {"holds": (2,)}])
def test_what_is_not_wanted_is_not_written(monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]) -> None:
    worker, answers = parked(0, monkeypatch, **engine)
    worker._save_parked(save())
    assert answers == [[], []]


def test_a_plan_that_took_effect_unheard_is_written_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (written, _) = parked(0, monkeypatch, holds=(1, 2), acknowledged=2)
    worker._save_parked(save(epoch=2))
    assert written == [(2, "iteration-000003", 0)]
    assert worker._engine.holds == (2,)


def test_a_plan_that_did_not_take_effect_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, (written, _) = parked(0, monkeypatch, holds=(1, 2), acknowledged=2)
    worker._save_parked(save(epoch=1))
    assert written == [(1, "iteration-000003", 0)]
