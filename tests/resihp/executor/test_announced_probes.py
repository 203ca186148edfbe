"""Links are measured at the moment that was announced to both ends, or not at all: then it is told why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resihp.executor.supervised import probe
from resihp.executor.supervised.worker import SupervisedWorker
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.protocol import messages as m
from tests.resihp.controller.direct import outcome

PLAN = Plan(epoch=4, layout=Layout.uniform(tp=1, pp=2, dp=2, layers=4), assignment=spread(8, 2))


class Client(SimpleNamespace):
    """An agent's client with probes that were announced."""

    def due_link_probes(self, iteration: int | None = None) -> list[m.Probe]:
        due = [p for p in self.announced if iteration is None or p.after_iteration <= iteration]
        self.announced = [p for p in self.announced if p not in due]
        return due

    def attend(self, meeting: m.MeetingId, groups: Any, patience_s: float) -> Any:
        raise AssertionError("nobody is to be met")

    def park_asked(self, epoch: int) -> bool:
        return bool(self.park_epoch > epoch)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured: (probe, what the rank said it was in, whether it was asked to park)."""
    return []


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> Any:
    said: list[m.Probed] = []
    announced = [m.Probe(probe=1, after_iteration=5), m.Probe(probe=2, after_iteration=7)]
    start = SimpleNamespace(rank=0)
    client = Client(start=start, send=said.append, said=said, activity="compute", announced=announced, park_epoch=0)

    def measure_links(asked: m.Probe, rank: int, engine: Any, rendezvous: Any, called_off: Any) -> m.Probed:
        told.append((asked.probe, client.activity, called_off()))
        return m.Probed(probe=asked.probe, seconds=0.1)

    monkeypatch.setattr(probe, "measure_links", measure_links)
    return SupervisedWorker(client, SimpleNamespace(), None, 0, 9, Path("/checkpoints"), 0)  # type: ignore[arg-type]


def test_it_is_measured_at_its_moment_and_peers_that_wait_are_victims(worker: Any, told: list[Any]) -> None:
    worker._measure_links(PLAN, outcome(4))
    assert (told, worker._client.said) == ([], [])
    worker._measure_links(PLAN, outcome(5))
    assert told == [(1, "communication", False)]
    assert [(answer.probe, answer.missed) for answer in worker._client.said] == [(1, "")]
    assert worker._client.activity == "compute"


def test_whoever_hears_of_it_too_late_does_not_come(worker: Any, told: list[Any]) -> None:
    worker._measure_links(PLAN, outcome(6))
    assert told == []
    answers = [(answer.probe, answer.missed) for answer in worker._client.said]
    assert answers == [(1, "order received after iteration 6")]


def test_nobody_measures_when_all_are_about_to_park(worker: Any, told: list[Any]) -> None:
    """All ranks know that from the same synchronisation."""
    worker._measure_links(PLAN, outcome(5, pause=True))
    assert told == []
    assert [answer.probe for answer in worker._client.said] == [1]


def test_whoever_was_asked_to_park_meanwhile_calls_it_off(worker: Any, told: list[Any]) -> None:
    worker._client.park_epoch = 5
    worker._measure_links(PLAN, outcome(5))
    assert told == [(1, "communication", True)]


def test_a_parked_rank_declines_whatever_was_announced(worker: Any, told: list[Any]) -> None:
    worker._decline_link_probes()
    assert told == []
    assert [(answer.probe, answer.missed) for answer in worker._client.said] == [
        (1, "does not train now"),
        (2, "does not train now"),
    ]
