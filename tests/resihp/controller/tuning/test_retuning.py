"""A tuned job is tuned again by its own times: when, for how much, what is remembered, whether promises are kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from resihp.controller import interface as api
from resihp.controller.tuning.retuning import RETUNE_ITERATIONS, VERIFY_ITERATIONS
from resihp.detector.online.predictor import Key
from resihp.record.journal import ChangeDecided, PlanDecided
from tests.resihp.controller.direct import DECLARE
from tests.resihp.controller.fail_slow.test_learned_times import Known, Learnt
from tests.resihp.controller.fail_slow.test_slowness import DEAR, Job

DEEP = msgspec.structs.replace(
    DECLARE, model=msgspec.structs.replace(DECLARE.model, layers=12), iterations=10_000, micro_batches=16
)


class Heavy(Known):
    """A head that takes as long as so many layers."""

    head = 3.0

    def predict(
        self, key: Key, kind: str, tokens: Sequence[float], squares: Sequence[float]
    ) -> npt.NDArray[np.float64] | None:
        return None if kind not in self.layer else np.array([self.layer[kind] * (key[0] + self.head * key[3])])


def job_of(head: float = 3.0, **options: Any) -> Job:
    given: dict[str, Any] = {"nodes": 2, "gpus": 4, "pp": 4, "declare": DEEP, "tune": True} | options
    job = Job(**given)
    predictor = Heavy()
    predictor.head = head
    job.monitor = Learnt(predictor, between_s=0.001)
    job.job.monitor = job.monitor  # type: ignore[assignment]
    return job


def changes(job: Job) -> list[ChangeDecided]:
    return [entry for entry in job.all(ChangeDecided) if entry.tuned]


def test_layers_move_away_from_a_head_that_is_heavier_than_thought() -> None:
    job = job_of().run(RETUNE_ITERATIONS - 1)
    assert changes(job) == []
    before = job.plan
    job.step(RETUNE_ITERATIONS)
    (decided,) = changes(job)
    assert (decided.devices, decided.links) == ((), ())
    assert decided.reason.startswith("saves ")
    assert job.job.pause is not None
    assert job.job.pause.reason == f"tuned by measured times: {decided.reason}"
    job.paused()
    entry = job.all(PlanDecided)[-1]
    assert (entry.action, entry.unit) == ("between", "s")
    assert entry.predicted < 0.9 * entry.present
    assert job.plan.layout.active == before.layout.active
    assert job.plan.orders
    last = [len(plan.layout.replicas[0].stages[-1].layers) for plan in (before, job.plan)]
    assert last[1] < last[0]
    assert max(len(stage.chunks) for replica in job.plan.layout.replicas for stage in replica.stages) > 1


def test_it_is_asked_once_and_again_only_when_times_have_moved() -> None:
    job = job_of().run(RETUNE_ITERATIONS)
    job.paused()
    asked = len(job.texts("notice"))
    job.run(3 * RETUNE_ITERATIONS)
    assert len(changes(job)) == 1
    assert not [text for text in job.texts("notice")[asked:] if "the plan stays" in text]
    job.monitor.predictor.head = 3.04  # type: ignore[attr-defined]
    job.run(RETUNE_ITERATIONS)
    assert len(changes(job)) == 1
    job.monitor.predictor.head = 0.5  # type: ignore[attr-defined]
    job.run(2 * RETUNE_ITERATIONS)
    assert len(changes(job)) == 2


def test_recent_changes_make_the_next_one_dearer_also_for_a_new_supervisor() -> None:
    job = job_of()
    job.job.changed_at["tuned"] = [0.0] * 20
    job.run(RETUNE_ITERATIONS)
    assert changes(job) == []
    assert any("tuned by measured times" in text and "after recent changes" in text for text in job.texts("notice"))
    other = job_of().run(RETUNE_ITERATIONS)
    assert (other.job.record.changes["tuned"], other.job.changed_at["tuned"]) == (1, [other.now])


@pytest.mark.parametrize(
    "options",
    [
        {"tune": False},
        {"planner": "resihp-paper"},
        {"observes": True},
        {"pp": 1, "micro_batches": 16},
        {"records": DEAR, "declare": msgspec.structs.replace(DEEP, iterations=RETUNE_ITERATIONS + 5)},
    ],
    ids=["not asked for", "another rule", "only observed", "one stage", "not worth it"],
)
def test_nothing_is_changed_where_that_is_not_wanted_or_not_worth_it(options: dict[str, Any]) -> None:
    options.pop("micro_batches", None)
    job = job_of(**options).run(RETUNE_ITERATIONS + 2)
    assert changes(job) == []
    assert job.job.pause is None


def test_a_slow_device_is_the_other_policys_business() -> None:
    job = job_of(records=DEAR).run(2)
    job.slow_by_verdict(1, 0.9)
    job.run(RETUNE_ITERATIONS + 5)
    assert job.job.record.slow
    assert changes(job) == []


def test_a_failure_on_the_way_is_answered_as_ever() -> None:
    """The tuned plan had work for somebody who is gone now."""
    job = job_of().run(RETUNE_ITERATIONS)
    assert job.job.pause is not None
    job.crash(1)
    job.park(stepped=RETUNE_ITERATIONS)
    assert 1 not in job.plan.layout.active
    assert "layers and orders by measured times" not in job.all(PlanDecided)[-1].reason


@pytest.mark.parametrize(("factor", "level"), [(0.55, "notice"), (1.0, "warning")])
def test_a_promise_is_looked_up(factor: float, level: str) -> None:
    job = job_of().run(RETUNE_ITERATIONS)
    job.paused()
    job.iteration_s *= factor
    job.run(VERIFY_ITERATIONS)
    (told,) = [text for text in job.texts(level) if "predicted" in text]
    assert f"actual {factor:.1%}" in told


def test_times_that_contradict_the_model_are_told_once_and_used() -> None:
    job = job_of(head=3.0).run(RETUNE_ITERATIONS)
    (told,) = [text for text in job.texts("warning") if "contradict" in text]
    assert "the head takes 3.00 layers" in told
    assert changes(job), "and used"
    assert not [text for text in job_of(head=0.3).run(3).texts("warning") if "contradict" in text]


def test_a_large_job_is_tuned_within_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the supervisor's loop: as many orders as it may play, however long the pipeline is."""
    from resihp.controller.tuning import retuning
    from resihp.scheduler.orders.tuner import tune

    asked: list[int] = []

    def counted(*args: Any, evaluations: int, **more: Any) -> Any:
        asked.append(evaluations)
        return tune(*args, evaluations=evaluations, **more)

    job = job_of()
    monkeypatch.setattr("resihp.scheduler.layouts.first_layout.tune", counted)
    job.run(RETUNE_ITERATIONS)
    assert asked
    assert max(asked) * 4 * 8 <= retuning.TRIAL_BUDGET
    assert statistics.median(job.job.tuning.rates) > 0
    assert not [action for action in job.actions if isinstance(action, api.End)]
