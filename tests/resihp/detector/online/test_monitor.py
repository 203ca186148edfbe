"""What the controller gets to hear of iterations: what is slow is found soon and named, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
import pytest

from benchmarks.simulated_jobs import SLOWDOWNS, NoLengths, Setting, simulate
from resihp.detector.observation import Observation, RankTimes
from resihp.detector.online.monitor import Assessment, Finding, Monitor
from resihp.detector.online.plan_arrays import LaneTimes, Sums
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders
from tests.resihp.detector.small_jobs import MODEL, Slower, observations, plan_of, uniform


def slow_rank(rank: int, factor: float, onset: int, until: int = 100_000) -> Slower:
    return lambda which, i: factor if which == rank and onset <= i < until else 1.0


class Job:
    """A job under a monitor, iteration after iteration."""

    def __init__(self, layout: Layout, **how: object) -> None:
        self.monitor = Monitor()
        self.now = 0
        self.how = how
        self.epoch = 0
        self.adopt(layout)

    def adopt(self, layout: Layout, **options: object) -> None:
        self.epoch += 1
        self.plan, self.orders = plan_of(layout, epoch=self.epoch, **options)  # type: ignore[arg-type]
        self.monitor.adopt(self.plan, MODEL, self.orders)

    def made(self, iterations: int, **how: object) -> list[Observation]:
        span = range(self.now, self.now + iterations)
        self.now += iterations
        return list(observations(self.plan, self.orders, span, **{**self.how, **how}))  # type: ignore[arg-type]

    def run(self, iterations: int, **how: object) -> list[Finding]:
        return findings(self.monitor.observe(one) for one in self.made(iterations, **how))


def findings(assessments: Iterable[Assessment]) -> list[Finding]:
    return [finding for assessment in assessments for finding in assessment.findings]


# --- one slow device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [uniform(2, 2, 2), uniform(1, 2, 2), uniform(4, 2, 1), uniform(1, 1, 4)])
@pytest.mark.parametrize("factor", [1.0526, 1.25, 3.33])
def test_a_slow_device_is_one_finding_that_names_it(layout: Layout, factor: float) -> None:
    job = Job(layout, slower=slow_rank(3, factor, 90))
    (finding,) = job.run(140)
    assert finding.kind == "fail-slow"
    assert finding.ranks == (3,)
    assert finding.link is None
    assert abs(finding.iteration - 90) <= 1
    assert finding.detected <= (92 if factor > 1.2 else 100)
    assert finding.change == pytest.approx(factor - 1, rel=0.25, abs=0.01)
    assert 0.9 < finding.confidence < 1
    assert "rank 3" in finding.evidence
    assert job.monitor.speeds() == {3: pytest.approx(1 / factor, rel=0.02)}


@pytest.mark.parametrize("layout", [uniform(2, 2, 2), uniform(1, 4, 1), uniform(1, 1, 4)])
def test_a_batch_that_grows_is_no_finding(layout: Layout) -> None:
    """Times of chunks are known by then: an iteration of more micro-batches is predicted from its first one on."""
    job = Job(layout)
    assert job.run(90, iteration_noise=0.01) == []
    for micro_batches in (6, 8, 16, 32):
        job.adopt(layout, micro_batches=micro_batches)
        made = job.made(40, iteration_noise=0.01)
        seen = [job.monitor.observe(one) for one in made]
        assert findings(seen) == []
        predicted = [one.predicted_s for one in seen]
        assert predicted == [pytest.approx(one.seconds, rel=0.1) for one in made]
    assert job.monitor.speeds() == {}


def test_what_was_slow_stays_slow_and_what_becomes_slow_is_found_in_a_batch_that_grows() -> None:
    layout = uniform(2, 2, 2)
    job = Job(layout, slower=slow_rank(3, 1.5, 60))
    (finding,) = job.run(100)
    assert finding.ranks == (3,)
    job.adopt(layout, micro_batches=12)
    assert job.run(40) == []
    assert job.monitor.speeds() == {3: pytest.approx(1 / 1.5, rel=0.05)}
    job.adopt(layout, micro_batches=24)
    slow_too = slow_rank(6, 1.5, job.now + 20)
    (second,) = job.run(60, slower=lambda rank, i: max(slow_too(rank, i), 1.5 if rank == 3 else 1.0))
    assert (second.kind, second.ranks) == ("fail-slow", (6,))


@pytest.mark.parametrize("layout", [uniform(2, 2, 2), uniform(1, 4, 1)])
@pytest.mark.parametrize("until", [12, 100_000])
def test_a_speed_counts_once_where_predictions_change_just_after_it_is_found(layout: Layout, until: int) -> None:
    """Levels are learnt anew from what is remembered: a device at 0.3 was told to be at 0.09, its speed squared."""
    for onset in (6, 7, 9, 12, 13, 16, 21, 22, 24, 30, 33, 36):  # predictions change after 8, 20 and 40 iterations
        job = Job(layout, slower=slow_rank(2, 1 / 0.3, onset, onset + until))
        told = [(one.kind, round(1 / (1 + one.change), 1)) for one in job.run(max(onset + 30, 45)) if 2 in one.ranks]
        assert told == [("fail-slow", 0.3), ("recovered", 1.0)][: 2 if until == 12 else 1], onset


def test_it_recovers() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.5, 80, 120))
    first, second = job.run(200)
    assert (first.kind, first.ranks) == ("fail-slow", (5,))
    assert (second.kind, second.ranks) == ("recovered", (5,))
    assert abs(second.iteration - 120) <= 1
    assert second.detected <= 123
    assert job.monitor.speeds() == {}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("factor", "took"), [(2.0, 1.0), (3.0, 1.0), (2.0, 0.8)])
def test_once_it_is_well_the_job_as_a_whole_is_not_slow(seed: int, factor: float, took: float) -> None:
    """Iterations become shorter before it is found to be well; or took less than what it should have cost."""
    job = Job(uniform(2, 4, 1), slower=slow_rank(2, factor, 60, 120), apart=False, seed=seed)
    made = job.made(220)
    shorter = {one.iteration: one.seconds * (took if 60 <= one.iteration < 120 else 1.0) for one in made}
    given = (msgspec.structs.replace(one, seconds=shorter[one.iteration]) for one in made)
    found = findings(job.monitor.observe(one) for one in given)
    assert [finding.kind for finding in found if finding.ranks] == ["fail-slow", "recovered"]
    assert [finding for finding in found if finding.component == "job"] == []


def test_ranks_of_a_group_that_look_alike_are_all_suspects() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.5, 80, 120), apart=False)
    first, second = job.run(200)
    assert first.kind == "fail-slow"
    assert sorted(first.ranks) == [4, 5]
    assert second.kind == "recovered"
    assert sorted(second.ranks) == [4, 5]


def test_a_peer_that_seems_a_little_slower_for_waiting_is_no_suspect() -> None:
    factors = {4: 1.12, 5: 1.8}
    job = Job(uniform(2, 2, 2), slower=lambda rank, i: factors.get(rank, 1.0) if 80 <= i < 130 else 1.0)
    first, second = job.run(250)
    assert (first.kind, first.ranks, second.kind, second.ranks) == ("fail-slow", (5,), "recovered", (5,))


def test_two_devices_are_two_findings() -> None:
    factors = {1: 1.3, 6: 1.8}
    job = Job(uniform(2, 2, 2), slower=lambda rank, i: factors.get(rank, 1.0) if i >= 80 else 1.0)
    assert sorted(finding.ranks for finding in job.run(130)) == [(1,), (6,)]


def test_slow_from_the_first_iteration_on_is_found_against_peers() -> None:
    for layout, rank in ((uniform(2, 2, 2), 5), (uniform(4, 2, 1), 6)):
        job = Job(layout, slower=slow_rank(rank, 1.25, 0))
        (finding,) = job.run(60)
        assert finding.ranks == (rank,)
        assert finding.change == pytest.approx(0.25, abs=0.04)


def test_without_any_peer_nobody_can_know() -> None:
    assert Job(uniform(1, 4, 1), slower=slow_rank(3, 1.5, 0)).run(120) == []


# --- before it runs ---------------------------------------------------------------------------------------------------


def workload(job: Job, observation: Observation) -> tuple[np.ndarray, np.ndarray]:
    """N and S of each micro-batch of the global batch."""
    assert job.monitor.stacked is not None
    return job.monitor.stacked.workload(job.monitor.stacked.columns(observation.times))


def test_an_iteration_is_forecast_from_its_workload_alone() -> None:
    job = Job(uniform(2, 2, 2), iteration_noise=0.0)
    job.run(60)
    errors = []
    for one in job.made(20):
        forecast = job.monitor.forecast(*workload(job, one))
        assert forecast is not None
        errors.append(abs(forecast / one.seconds - 1.0))
        assert job.monitor.observe(one).predicted_s == pytest.approx(forecast, rel=1e-6)
    assert np.median(errors) < 0.02


def test_what_is_slow_is_forecast_to_stay_so() -> None:
    job = Job(uniform(2, 2, 2), iteration_noise=0.0, slower=slow_rank(3, 2.0, 70))
    job.run(100)
    (one,) = job.made(1)
    forecast = job.monitor.forecast(*workload(job, one))
    predicted = job.monitor.observe(one).predicted_s
    assert predicted is not None
    assert forecast == pytest.approx(one.seconds, rel=0.1)
    assert predicted < 0.8 * one.seconds, "which is where all is well"


def test_nothing_is_forecast_while_too_little_is_known() -> None:
    tokens = np.full(8, 7000.0)
    assert Monitor().forecast(tokens, tokens**2) is None
    job = Job(uniform(2, 2, 2))
    assert job.monitor.forecast(tokens, tokens**2) is None
    job.run(60)
    assert job.monitor.forecast(tokens[1:], tokens[1:] ** 2) is None, "another number of micro-batches"


# --- nobody in particular ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [uniform(2, 2, 2), uniform(1, 1, 1), uniform(1, 2, 1)])
def test_healthy_jobs_give_no_alarm(layout: Layout) -> None:
    assert Job(layout).run(400) == []


def test_what_hits_everybody_is_found_but_not_located() -> None:
    job = Job(uniform(2, 2, 2), everybody=lambda i: 1.3 if 100 <= i < 160 else 1.0)
    first, second = job.run(220)
    assert first.kind == "fail-slow"
    assert (first.ranks, first.link) == ((), None)
    assert abs(first.iteration - 100) <= 2
    assert first.detected <= 110
    assert first.change == pytest.approx(0.3, abs=0.06)
    assert (second.kind, second.ranks) == ("recovered", ())
    assert job.monitor.speeds() == {}


@pytest.mark.parametrize("onset", [14, 20, 30])
def test_what_becomes_slow_while_predictions_still_improve_is_found(onset: int) -> None:
    """All transfers of the only pipeline: no link stands out, and chunks take what they did."""
    job = Job(uniform(1, 2, 1), slower_link=lambda a, b, i: 400.0 if i >= onset else 1.0)
    first = job.run(100)[0]
    assert (first.kind, first.ranks, first.link) == ("fail-slow", (), None)
    assert abs(first.iteration - onset) <= 2
    assert first.detected <= onset + 20


def test_a_single_slow_iteration_is_nothing() -> None:
    job = Job(uniform(2, 2, 2), everybody=lambda i: 4.0 if i in (90, 150, 151) else 1.0)
    assert job.run(220) == []
    job = Job(uniform(2, 2, 2), slower=lambda rank, i: 4.0 if rank == 2 and i in (90, 150, 151) else 1.0)
    assert job.run(220) == []


def test_the_prediction_is_of_healthy_iterations() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(2, 2.0, 100))
    made = job.made(160)
    assessments = [job.monitor.observe(one) for one in made]
    assert assessments[0].predicted_s is None
    assert assessments[0].known == "warming up"
    assert {one.known for one in assessments[45:]} == {"workload"}
    seconds = np.array([one.seconds for one in made])
    predicted = np.array([one.predicted_s for one in assessments[60:]], dtype=np.float64)
    assert np.abs(predicted[:40] / seconds[60:100] - 1).mean() < 0.04
    assert (seconds[100:] / predicted[40:]).mean() > 1.3


def test_plain_times_are_judged_for_what_they_are() -> None:
    rng = np.random.default_rng(1)
    job = Job(uniform(2, 2, 2))
    known, found = [], []
    for i in range(160):
        seconds = (1.5 if i >= 100 else 1.0) * float(np.exp(0.02 * rng.standard_normal()))
        assessment = job.monitor.observe(Observation(iteration=i, epoch=1, seconds=seconds, times={}))
        known.append(assessment.known)
        found += assessment.findings
    assert known[0] == "warming up"
    assert known[-1] == "plain times"
    (finding,) = found
    assert (finding.kind, finding.ranks, finding.link) == ("fail-slow", (), None)
    assert "workload not known" in finding.evidence


# --- probes -----------------------------------------------------------------------------------------------------------


def test_a_cleared_rank_is_not_suspected_again_at_once() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.06, 80))
    assert len(job.run(110)) == 1
    job.monitor.cleared(5)
    assert job.monitor.speeds() == {}
    assert job.run(300) == []
    job.adopt(uniform(2, 2, 2))
    assert job.run(100) == []
    (finding,) = job.run(10, slower=slow_rank(5, 1.6, 0))
    assert finding.ranks == (5,)


def test_what_a_probe_measured_is_the_speed_until_something_changes() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.5, 80, 140))
    assert len(job.run(100)) == 1
    job.monitor.confirmed(5, 0.61)
    assert job.monitor.speeds() == {5: 0.61}
    assert job.run(30) == []
    assert job.monitor.speeds() == {5: 0.61}
    assert [finding.kind for finding in job.run(40)] == ["recovered"]
    assert job.monitor.speeds() == {}


def test_a_probe_may_tell_before_anything_was_seen() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 2.0, 0))
    job.monitor.confirmed(5, 0.5)
    assert job.run(80) == []
    assert job.monitor.speeds() == {5: 0.5}


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speeds_are_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="is not a positive number"):
        Job(uniform(2, 2, 2)).monitor.confirmed(3, speed)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_slow_rank_stays_known_across_plans_and_recovers_under_another() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.6, 80, 200))
    assert len(job.run(100)) == 1
    job.adopt(uniform(2, 2, 2))
    assert job.monitor.speeds() == {5: pytest.approx(1 / 1.6, rel=0.02)}
    assert job.run(100) == []
    assert [(finding.kind, finding.ranks) for finding in job.run(40)] == [("recovered", (5,))]


def test_after_a_reconfiguration_ranks_are_tested_again_soon() -> None:
    """Another shape of stages, rescaled predictions: what is found right after has to be right."""
    layout = Layout(
        (
            Replica((Stage((0, 1), ((0, 3),)), Stage((2, 3), ((4, 7),)))),
            Replica((Stage((4,), ((0, 2),)), Stage((6, 7), ((3, 7),)))),
        ),
        standby=(5,),
    )
    job = Job(uniform(2, 2, 2))
    assert job.run(100) == []
    job.adopt(layout)
    assert job.run(60) == []
    (finding,) = job.run(20, slower=slow_rank(4, 1.4, 0))
    assert finding.ranks == (4,)


def test_who_has_no_work_keeps_its_speed_and_who_is_gone_is_forgotten() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.6, 80))
    job.run(100)
    half = uniform(2, 2, 1)
    job.adopt(Layout(half.replicas, standby=(5,)))
    assert list(job.monitor.speeds()) == [5]
    job.adopt(half)
    assert job.monitor.speeds() == {}


def test_iterations_of_another_epoch_or_out_of_order_are_ignored() -> None:
    job = Job(uniform(2, 2, 2))
    made = job.made(100)
    for one in made:
        job.monitor.observe(one)
    slow = list(observations(job.plan, job.orders, range(200, 260), slower=slow_rank(1, 3.0, 0)))
    for one in slow:
        stale = msgspec.structs.replace(one, epoch=7)
        assert job.monitor.observe(stale) == Assessment(predicted_s=None, known="workload")
    for one in slow:
        repeated = msgspec.structs.replace(one, iteration=one.iteration % 100)
        assert job.monitor.observe(repeated).predicted_s is None
    assert job.monitor.speeds() == {}
    assert job.run(100) == []


def test_nothing_is_known_before_a_plan() -> None:
    monitor = Monitor()
    assert monitor.observe(Observation(iteration=0, epoch=0, seconds=1.0, times={})).known == "warming up"
    assert monitor.speeds() == {}
    monitor.cleared(3)


# --- bad input --------------------------------------------------------------------------------------------------------


def spoil(one: Observation, rng: np.random.Generator) -> Observation:
    """Some ranks' reports lost, some with numbers that cannot be, sometimes a clock that jumped."""
    times: dict[int, RankTimes] = {}
    for rank, own in one.times.items():
        luck = rng.random()
        if luck < 0.1:
            continue
        chunks = own.chunks.copy()
        if luck < 0.3:
            values = (np.nan, 0.0, -1.0, np.inf, 1e9, -1e9)
            chunks[rng.integers(5), rng.integers(chunks.shape[1])] = values[rng.integers(len(values))]
        elif luck < 0.33:
            chunks = chunks[:, :-1]
        elif luck < 0.36:
            chunks[0] += 3600.0
        times[rank] = msgspec.structs.replace(own, chunks=chunks)
    values = (one.seconds, one.seconds, one.seconds, np.nan, -1.0, 0.0, 1e9)
    return msgspec.structs.replace(one, times=times, seconds=float(values[rng.integers(len(values))]))


def test_bad_reports_neither_crash_nor_deceive() -> None:
    job = Job(uniform(2, 2, 2))
    rng = np.random.default_rng(5)
    with np.errstate(all="raise"):
        found = findings(job.monitor.observe(spoil(one, rng)) for one in job.made(400))
        assert found == []
        slow = [spoil(one, rng) for one in job.made(40, slower=slow_rank(6, 1.4, 0))]
        (finding,) = findings(map(job.monitor.observe, slow))
    assert finding.ranks == (6,)


def test_reports_without_anything_are_nothing() -> None:
    job = Job(uniform(2, 2, 2))
    job.run(60)
    for one in job.made(10):
        lost: Mapping[int, RankTimes] = {}
        assert job.monitor.observe(msgspec.structs.replace(one, times=lost)).findings == ()
        empty = {rank: msgspec.structs.replace(own, chunks=np.empty((5, 0))) for rank, own in one.times.items()}
        assert job.monitor.observe(msgspec.structs.replace(one, iteration=one.iteration + 50, times=empty))


# --- sums of ranks ----------------------------------------------------------------------------------------------------


def test_sums_say_the_same_as_chunks() -> None:
    """A shell that adds up what ranks measured gets the same judgement."""
    job = Job(uniform(2, 2, 2), slower=slow_rank(2, 1.2, 90))
    made = job.made(130)
    other = Monitor()
    other.adopt(job.plan, MODEL, job.orders)
    stacked, links = other.stacked, other.links
    assert stacked is not None
    assert links is not None
    expected = [job.monitor.observe(one) for one in made]
    got = []
    for one in made:
        other.learn(one)
        columns = stacked.columns(one.times)
        tokens, squares = stacked.workload(columns)
        delays, delay_tokens, delay_counts = links.measured(columns)
        sums = Sums(
            tokens=tokens,
            squares=squares,
            compute=stacked.compute(columns),
            delays=delays,
            delay_tokens=delay_tokens,
            delay_counts=delay_counts,
            busy_s=stacked.busy_s(columns),
            lanes=stacked.lane_times(columns, one.times),
        )
        got.append(other.observe_stacked(one.iteration, one.epoch, one.seconds, sums))
    assert got == expected
    assert findings(got)
    with pytest.raises(ValueError, match="iteration 500: sums of shapes"):
        other.observe_stacked(500, 1, 1.0, msgspec.structs.replace(sums, compute=np.zeros(3)))
    few = LaneTimes(collective=np.zeros(3), reduction=np.zeros(3), data=np.zeros(3))
    with pytest.raises(ValueError, match="iteration 501: sums of shapes"):
        other.observe_stacked(501, 1, 1.0, msgspec.structs.replace(sums, lanes=few))


# --- the benchmark, smaller -------------------------------------------------------------------------------------------


def test_simulated_jobs_of_known_truth() -> None:
    """`benchmarks/detector.py slow` in small: every size, devices and links, two settings, no false alarm."""
    settings = (Setting(micro_batches=4), Setting(budget=32768, micro_batches=8, schedule="zero-bubble"))
    for i, slowdown in enumerate(SLOWDOWNS):
        for kind in ("device", "link"):
            try:
                job = simulate(settings[i % 2], 77 + i, 110, kind, slowdown=slowdown)  # type: ignore[arg-type]
            except NoLengths as error:
                pytest.skip(str(error))
            assert job.failure is not None
            (finding,) = _watched(job.plan, job.orders, job.observations())
            assert finding.detected - job.failure.onset < 3
            assert finding.link == job.failure.link
            assert finding.ranks == (() if job.failure.rank is None else (job.failure.rank,))


def _watched(plan: Plan, orders: Orders, made: Iterable[Observation]) -> list[Finding]:
    monitor = Monitor()
    monitor.adopt(plan, MODEL, orders)
    return findings(map(monitor.observe, made))


def test_a_pardon_survives_a_plan_and_ends_when_it_would_have() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.14, 80))
    assert len(job.run(100)) == 1
    job.monitor.cleared(5)
    job.run(20)
    job.adopt(uniform(2, 2, 2))
    assert job.run(470) == []
    found = job.run(60)
    assert [(finding.kind, finding.ranks) for finding in found] == [("fail-slow", (5,))]
    assert found[0].change == pytest.approx(0.14, abs=0.03)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("factor", [1.08, 1.25])
def test_what_slows_everybody_is_the_job_s_whenever_it_comes(seed: int, factor: float) -> None:
    onset = 60 + 17 * seed
    job = Job(uniform(2, 2, 2), seed=seed, everybody=lambda i: factor if i >= onset else 1.0)
    found = job.run(onset + (50 if factor < 1.1 else 15))
    assert {(one.component, one.ranks, one.kind) for one in found} == {("job", (), "fail-slow")}


def test_a_job_that_is_slower_is_forecast_to_stay_so_until_it_recovers() -> None:
    job = Job(uniform(2, 2, 2), everybody=lambda i: 1.25 if 90 <= i < 160 else 1.0)
    before = job.made(90)
    assert findings(map(job.monitor.observe, before)) == []
    share = before[-1].seconds / (job.monitor.forecast(*workload(job, before[-1])) or np.nan)
    during = job.made(60)
    assert [one.kind for one in findings(map(job.monitor.observe, during))] == ["fail-slow"]
    slow = [one.seconds / (job.monitor.forecast(*workload(job, one)) or np.nan) for one in during[10:]]
    assert np.median(slow) == pytest.approx(share, rel=0.08)
    assert [(one.kind, one.component) for one in job.run(40)] == [("recovered", "job")]


def test_a_job_that_was_slow_under_the_plan_before_recovers_under_the_next() -> None:
    job = Job(uniform(2, 2, 2), everybody=lambda i: 1.25 if 90 <= i < 200 else 1.0)
    assert [one.kind for one in job.run(110)] == ["fail-slow"]
    job.adopt(uniform(1, 2, 2))
    assert job.run(90) == []
    assert [(one.kind, one.component) for one in job.run(40)] == [("recovered", "job")]


def test_a_job_that_was_slow_under_the_plan_before_and_is_well_from_the_first_iteration_of_the_next_has_recovered() -> (
    None
):
    job = Job(uniform(2, 2, 2), everybody=lambda i: 1.25 if 90 <= i < 110 else 1.0)
    assert [one.kind for one in job.run(110)] == ["fail-slow"]
    job.adopt(uniform(2, 2, 2))
    assert [(one.kind, one.component) for one in job.run(40)] == [("recovered", "job")]


def test_a_new_monitor_that_is_told_that_the_job_is_slow_tells_its_end() -> None:
    job = Job(uniform(2, 2, 2), everybody=lambda i: 1.25 if i < 90 else 1.0)
    job.monitor = Monitor()
    job.monitor.job_is_slow()
    job.adopt(uniform(2, 2, 2))
    assert job.run(90) == []
    assert [(one.kind, one.component) for one in job.run(40)] == [("recovered", "job")]


# --- workloads that were not learnt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, 4])
def test_longer_micro_batches_now_and_then_are_learnt_and_judged(every: int) -> None:
    job = Job(uniform(2, 2, 2), longer=lambda i: 2.0 if i >= 90 and i % every == 0 else 1.0)
    assert job.run(250) == []
    seen = [job.monitor.observe(one) for one in job.made(40)]
    assert all(one.predicted_s is not None for one in seen)


def test_longer_micro_batches_are_no_slow_device_and_are_learnt() -> None:
    for seed in range(3):
        job = Job(uniform(2, 2, 2), seed=seed, longer=lambda i: 2.0 if i >= 90 else 1.0)
        assert job.run(90) == []
        during = [job.monitor.observe(one) for one in job.made(80)]
        assert findings(during) == []
        assert during[0].predicted_s is None
        late = job.made(30)
        predicted = np.array([job.monitor.observe(one).predicted_s for one in late], dtype=float)
        assert np.median([one.seconds for one in late] / predicted) == pytest.approx(1.0, abs=0.05)
        assert job.run(40, longer=lambda i: 1.0) == []


@pytest.mark.parametrize("onset", [88, 93, 97, 110, 125])
def test_what_fails_while_other_lengths_are_learnt_is_found_afterwards(onset: int) -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.25, onset), longer=lambda i: 2.0 if i >= 90 else 1.0)
    found = job.run(180)
    assert {(one.kind, one.ranks) for one in found} == {("fail-slow", (5,))}
    assert found[-1].change == pytest.approx(0.25, abs=0.04)


def test_what_is_known_to_be_slow_teaches_no_other_lengths() -> None:
    job = Job(uniform(2, 2, 2), slower=slow_rank(5, 1.25, 60), longer=lambda i: 2.0 if i >= 120 else 1.0)
    assert [one.ranks for one in job.run(120)] == [(5,)]
    assert job.run(80) == []
    assert job.monitor.speeds() == {5: pytest.approx(0.8, abs=0.03)}


def test_micro_batches_that_grow_without_end_are_no_slow_device() -> None:
    job = Job(uniform(2, 2, 2), longer=lambda i: 1.0 + i / 100)
    assert job.run(300) == []
