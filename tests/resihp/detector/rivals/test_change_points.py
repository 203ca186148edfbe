"""The paper's detector and Greyhound's: what each suspects and what it does not, behind the interface that ours has."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import pytest

from resihp.detector import modes
from resihp.detector.findings import Finding
from resihp.detector.interface import Detector
from resihp.detector.observation import Observation
from resihp.settings import Detection, Mode
from tests.resihp.detector.small_jobs import MODEL, observations, plan_of, uniform

BOTH = pytest.mark.parametrize("mode", ["paper", "greyhound"])
EVERY = pytest.mark.parametrize("mode", ["sequential", "paper", "greyhound"])


class Job:
    """DP2 x PP2 x TP2 under a detector. `slow`: how many times as long rank 3 takes, by iteration."""

    def __init__(self, mode: Mode) -> None:
        self.detector: Detector = modes.detector(Detection(mode=mode))
        self.now, self.epoch, self.factor = 0, 0, 1.0
        self.adopt()

    def adopt(self) -> None:
        self.epoch += 1
        self.plan, self.orders = plan_of(uniform(2, 2, 2), epoch=self.epoch)
        self.detector.adopt(self.plan, MODEL, self.orders)

    def made(self, iterations: int, **how: object) -> list[Observation]:
        span = range(self.now, self.now + iterations)
        self.now += iterations
        factor = self.factor
        given = {"slower": lambda rank, _: factor if rank == 3 else 1.0, "iteration_noise": 0.01} | how
        return list(observations(self.plan, self.orders, span, **given))  # type: ignore[arg-type]

    def run(self, iterations: int, **how: object) -> list[Finding]:
        return [one for seen in self.made(iterations, **how) for one in self.detector.observe(seen).findings]

    def slows_down(self, factor: float) -> list[Finding]:
        """What is found in 30 iterations of rank 3 being slower, after 80 that were well."""
        assert self.run(80) == []
        self.factor = factor
        return self.run(30)


@BOTH
def test_a_slow_device_is_a_suspicion_of_nobody_in_particular(mode: Mode) -> None:
    job = Job(mode)
    first = job.slows_down(2.0)[0]
    assert (first.kind, first.ranks, first.link, first.component) == ("fail-slow", (), None, "job")
    assert abs(first.iteration - 80) <= 1
    assert first.detected - 80 <= 4
    assert 0.3 < first.change < 1.2
    assert 0 < first.confidence < 1
    assert job.detector.speeds() == {}


def test_the_papers_rule_is_blind_to_what_takes_less_than_a_quarter_longer() -> None:
    assert Job("paper").slows_down(1.2) == []
    assert len(Job("greyhound").slows_down(1.2)) == 1


def test_a_heavier_workload_is_benign_for_who_predicts_it_and_a_false_alarm_for_who_does_not() -> None:
    """From a change of the data on, iterations are longer because of what is in them."""

    def found(mode: Mode) -> list[Finding]:
        job = Job(mode)
        made = [*job.made(60), *job.made(20)]
        heavy = [_with_more_work(one, 1.8) if one.iteration >= 60 else one for one in made]
        return [one for seen in heavy for one in job.detector.observe(seen).findings]

    assert found("paper") == []
    assert [one.kind for one in found("greyhound")] == ["fail-slow"]


def _with_more_work(observation: Observation, times: float) -> Observation:
    """The same iteration with so many times the tokens, squares and seconds."""
    reports = {
        rank: msgspec.structs.replace(report, chunks=report.chunks * times, seconds=report.seconds * times)
        for rank, report in observation.times.items()
    }
    return msgspec.structs.replace(observation, seconds=observation.seconds * times, times=reports)


@BOTH
@pytest.mark.parametrize("declared_slow", [True, False])
def test_its_end_is_found_by_the_same_means(mode: Mode, declared_slow: bool) -> None:
    job = Job(mode)
    job.slows_down(2.5)
    if declared_slow:
        job.detector.confirmed(3, 0.4)
        assert job.detector.speeds() == {3: 0.4}
    job.run(30)
    job.factor = 1.0
    found = job.run(30)
    assert [(one.kind, one.ranks) for one in found] == [("recovered", (3,) if declared_slow else ())]
    assert job.detector.speeds() == {}


def test_a_device_that_is_known_to_be_slow_is_expected_to_be_and_may_be_found_well_under_another_plan() -> None:
    job = Job("paper")
    job.slows_down(2.5)
    job.detector.confirmed(3, 0.4)
    last = job.made(1)[0]
    workload = np.full((2, 8), 7000.0) * [[1.0], [3000.0]]
    slow_s = job.detector.forecast(*workload)
    assert slow_s is not None
    assert slow_s == pytest.approx(last.seconds, rel=0.25)
    job.adopt()
    assert job.run(20) == []
    job.adopt()
    job.factor = 1.0
    assert [(one.kind, one.ranks) for one in job.run(20)] == [("recovered", (3,))]


@EVERY
def test_all_of_them_know_healthy_times_which_plans_are_made_with(mode: Mode) -> None:
    job = Job(mode)
    made = job.made(80)
    judged = [job.detector.observe(one) for one in made]
    predicted = judged[-1].predicted_s
    assert predicted == pytest.approx(made[-1].seconds, rel=0.1)
    assert job.detector.settled
    between_s, _ = job.detector.healthy_transfers()
    assert between_s == pytest.approx(0.004, rel=0.2)
    assert job.detector.beside_s == pytest.approx(0.05, rel=0.2)
    assert job.detector.predictor.predict((4, 2, True, False), "F", [7000.0], [2e7]) is not None


@EVERY
@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_times_that_cannot_be_are_no_finding(mode: Mode, seconds: float) -> None:
    job = Job(mode)
    assert job.run(60) == []
    for seen in job.made(5):
        rows = {
            r: msgspec.structs.replace(one, chunks=np.full_like(one.chunks, seconds)) for r, one in seen.times.items()
        }
        impossible = msgspec.structs.replace(seen, seconds=seconds, times=rows)
        assert job.detector.observe(impossible).findings == ()
    assert job.run(40) == []


@EVERY
def test_reports_of_ranks_that_left_and_of_other_plans_count_for_nothing(mode: Mode) -> None:
    job = Job(mode)
    assert job.run(60) == []
    before = job.made(1)[0]
    for seen in job.made(10):
        stranger = msgspec.structs.replace(seen.times[3], rank=99, chunks=seen.times[3].chunks * 50)
        more = msgspec.structs.replace(seen, times={**seen.times, 99: stranger})
        assert job.detector.observe(more).findings == ()
    assert job.detector.observe(msgspec.structs.replace(before, seconds=99.0)).findings == ()  # it came too late
    other = msgspec.structs.replace(job.made(1)[0], epoch=7, seconds=99.0)
    assert job.detector.observe(other).findings == ()
    assert job.detector.speeds() == {}


@EVERY
@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
def test_a_speed_that_cannot_be_is_refused(mode: Literal["sequential", "paper"], speed: float) -> None:
    with pytest.raises(ValueError, match="is not a positive number"):
        Job(mode).detector.confirmed(3, speed)


def test_without_measurements_of_chunks_only_greyhounds_rule_finds_anything() -> None:
    def found(mode: Mode) -> list[str]:
        job = Job(mode)
        made = [msgspec.structs.replace(one, times={}) for one in job.made(60)]
        job.factor = 2.0
        made += [msgspec.structs.replace(one, times={}) for one in job.made(20)]
        return [one.kind for seen in made for one in job.detector.observe(seen).findings]

    assert found("greyhound") == ["fail-slow"]
    assert found("paper") == []


@BOTH
def test_no_rank_is_judged_by_itself(mode: Mode) -> None:
    job = Job(mode)
    job.run(20)
    job.detector.confirmed(3, 0.5)
    assert (job.detector.standing(3), job.detector.scores(), job.detector.coverage()) == (None, None, {})
