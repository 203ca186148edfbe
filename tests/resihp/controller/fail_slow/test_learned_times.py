"""What the detector has learnt of healthy chunks and transfers is what plans are priced in, and slow links count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from resihp.controller import interface as api
from resihp.controller import replan_policy
from resihp.detector.online.predictor import Key
from resihp.record.journal import FailureEnded, FailureFound, PlanDecided
from tests.resihp.controller.fail_slow.test_slowness import Job, Scripted, finding, linked, measure_links


class Known:
    """A predictor that was taught: seconds of each kind, of a layer and of what embedding and head add, on one rank."""

    def __init__(self, tp: int = 1, kinds: Sequence[str] = ("F", "BW")) -> None:
        self.tp = tp
        self.asked: list[tuple[float, float]] = []
        self.layer = {kind: {"F": 0.01, "BW": 0.024, "B": 0.011, "W": 0.013}[kind] for kind in kinds}

    def predict(
        self, key: Key, kind: str, tokens: Sequence[float], squares: Sequence[float]
    ) -> npt.NDArray[np.float64] | None:
        layers, tp, _, last = key
        assert tp == self.tp
        self.asked.append((tokens[0], squares[0]))
        if kind not in self.layer:
            return None
        return np.array([self.layer[kind] * (layers + 0.5 * last) / tp])


class Learnt(Scripted):
    """A detector that has learnt all there is to learn."""

    def __init__(self, predictor: Known, between_s: float | None = 0.02, within_s: float | None = None) -> None:
        super().__init__()
        self.predictor, self.settled, self.beside_s = predictor, True, 0.003
        self.transfers = between_s, within_s

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        return self.transfers


def learnt(job: Job, **options: object) -> Job:
    tp = job.job.settings.tp
    job.monitor = Learnt(Known(tp=tp, **options))  # type: ignore[arg-type]
    job.job.monitor = job.monitor  # type: ignore[assignment]
    return job


def test_times_are_those_of_a_device_alone_at_the_mean_workload() -> None:
    job = learnt(Job(nodes=2, gpus=2, tp=2, pp=2)).run(3)
    profile = job.job.profile
    assert profile is not None
    layer, head = profile.layers[0], profile.head
    assert (layer.f, layer.b, layer.w) == pytest.approx((0.01, 0.012, 0.012))
    assert (head.f, head.b, head.w) == pytest.approx((0.005, 0.006, 0.006))
    assert profile.embedding.total == 0.0
    assert (profile.transfer_s, profile.inside_s, profile.step_s) == (0.02, 0.02, 0.003)
    assert len(profile.layers) == job.job.declaration.model.layers
    predictor = job.monitor.predictor  # type: ignore[attr-defined]
    outcome = job.job.record.last_outcome
    assert outcome is not None
    per = job.job.declaration.micro_batches
    assert predictor.asked[0] == (outcome.tokens / per, outcome.sum_squared_lengths / per)


def test_gradients_of_weights_that_are_timed_apart_stay_apart() -> None:
    job = learnt(Job(), kinds=("F", "B", "W", "BW")).run(2)
    assert job.job.profile is not None
    assert job.job.profile.layers[0].b == pytest.approx(0.011)
    assert job.job.profile.layers[0].w == pytest.approx(0.013)


def test_what_was_learnt_stays_so_that_predictions_of_one_job_compare() -> None:
    job = learnt(Job()).run(2)
    before = job.job.profile
    job.monitor.predictor.layer["F"] = 1.0  # type: ignore[attr-defined]
    job.step(3)
    assert job.job.profile is before is not None


@pytest.mark.parametrize("missing", ["F", "BW"])
def test_without_a_kind_of_chunk_plans_are_priced_in_layer_times(missing: str) -> None:
    job = learnt(Job(), kinds=[kind for kind in ("F", "BW") if kind != missing]).run(2)
    assert job.job.profile is None
    job.feed(api.AgentLost(node="n3", reason="gone"))
    job.park(stepped=2)
    decided = job.all(PlanDecided)[-1]
    assert decided.unit == "layer times"


def test_a_plan_promises_seconds_once_they_are_known() -> None:
    job = learnt(Job()).run(2)
    first = job.all(PlanDecided)[0]
    assert (first.unit, first.present) == ("layer times", None)
    assert first.predicted is not None
    job.feed(api.AgentLost(node="n3", reason="gone"))
    job.park(stepped=2)
    decided = job.all(PlanDecided)[-1]
    assert decided.unit == "s"
    assert decided.present is None, "the plan in effect cannot run any more"
    assert decided.predicted is not None
    assert 0.05 < decided.predicted < 10.0


def test_work_moves_away_from_a_slow_link_and_back_when_it_recovers() -> None:
    """DP3 x PP2 on three nodes of two would send within nodes only: here stages lie on nodes of one."""
    job = learnt(linked(nodes=4, gpus=1, pp=2)).run(4)
    # type: ignore[union-attr]
    (a, b) = (
        job.job.record.plan.layout.replicas[0].stages[0].ranks[0],
        job.job.record.plan.layout.replicas[0].stages[1].ranks[0],
    )
    job.find(finding(a, b, link=(a, b), iteration=4))
    measure_links(job, {(a, b): 1e-2})
    job.feed(api.Tick(), 0.1)
    verdict = job.all(FailureFound)[-1]
    assert (verdict.component, verdict.link) == ("link", (a, b))
    assert job.job.pause is not None, job.texts("notice")
    job.paused()
    decided = job.all(PlanDecided)[-1]
    assert decided.present is not None
    assert decided.predicted is not None
    assert decided.predicted < 0.95 * decided.present
    plan = job.job.record.plan
    assert plan is not None
    crossing = [
        d for d, replica in enumerate(plan.layout.replicas) if {a, b} <= set(replica.ranks) and plan.assignment[d]
    ]
    assert not crossing or len(plan.assignment[crossing[0]]) < 6
    job.find(finding(a, b, kind="recovered", link=(a, b), iteration=job.job.record.committed))
    assert job.all(FailureEnded)
    job.feed(api.Tick(), 0.1)
    assert job.job.record.slow_links == {}


def test_a_slow_link_is_planned_for_as_soon_as_transfers_have_times() -> None:
    """Until then all plans are equally good: in layer times, transfers take none."""
    job = learnt(linked(nodes=4, gpus=1, pp=2))
    monitor = job.monitor
    monitor.settled = False
    job.run(4)
    job.find(finding(0, 1, link=(0, 1), iteration=4))
    measure_links(job, {(0, 1): 1e-2})
    job.feed(api.Tick(), 0.1)
    assert [*job.job.record.slow_links] == [(0, 1)]
    assert job.job.pause is None
    assert "the plan stays, no other is faster" in job.texts("notice")[-1]
    monitor.settled = True
    job.step(job.job.record.committed + 1)
    job.feed(api.Tick(), 0.1)
    assert job.job.pause is not None, job.texts("notice")
    job.paused()
    plan = job.job.record.plan
    assert plan is not None
    assert not any({0, 1} <= set(replica.ranks) for replica in plan.layout.replicas), plan.layout.describe()


def test_slow_links_are_planned_for_once_and_not_at_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    job = learnt(linked(nodes=4, gpus=1, pp=2))
    looked: list[float] = []
    monkeypatch.setattr(replan_policy, "consider_links", lambda of: looked.append(of.now))
    job.run(8)
    assert len(looked) == 1


def test_of_links_between_two_nodes_the_slowest_counts_and_within_a_node_none() -> None:
    from resihp.controller.fail_slow import learned_times
    from resihp.record.state import Slow

    job = Job(nodes=2, gpus=2, pp=2).run(1)
    speeds = {(0, 1): 0.1, (0, 2): 0.5, (3, 1): 0.4}
    job.job.record.slow_links = {link: Slow(failure=1, speed=speed, since=1) for link, speed in speeds.items()}
    assert learned_times.links(job.job) == {("n1", "n2"): 0.4}
