"""Collectives, sums of gradients, data: told with kind and place, once; what others explain is not told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest

from benchmarks.simulated_jobs import Job, NoLengths, Setting, Timeline, simulate
from resihp.detector.findings import Finding
from resihp.detector.observation import Floats, Observation
from resihp.detector.online.lane_channel import LASTING_ITERATIONS, LaneTests
from resihp.detector.online.monitor import Monitor
from resihp.detector.online.plan_arrays import LaneTimes, Stacked
from resihp.pipeline.compiled import compile_orders
from tests.resihp.detector.small_jobs import MODEL, Slower, observations, plan_of, uniform

SETTINGS = (Setting(dp=4), Setting(budget=32768, schedule="zero-bubble"))
ONSET = 90
COLLECTIVE = 0.08
"""Of a chunk's time, its collectives."""


def played(setting: Setting, seed: int, change: Callable[[Timeline], None], iterations: int = 150) -> Job:
    """A job whose chunks have collectives, with a change of its timeline."""

    def disturb(line: Timeline) -> None:
        noise = np.random.default_rng(seed).standard_normal(line.collectives.shape)
        line.collectives += COLLECTIVE * line.compute.mean(axis=-1) * np.exp(0.05 * noise)
        change(line)

    try:
        return simulate(setting, seed, iterations, disturb=disturb)
    except NoLengths as error:
        pytest.skip(str(error))


def watched(job: Job) -> list[Finding]:
    monitor = Monitor()
    monitor.adopt(job.plan, job.model, job.orders)
    return [finding for one in job.observations() for finding in monitor.observe(one).findings]


def ranks_of(job: Job, stage: int, replicas: Iterable[int]) -> set[int]:
    return {rank for d in replicas for rank in job.plan.layout.replicas[d].stages[stage].ranks}


def at(until: int | None = None) -> slice:
    return slice(ONSET, until)


# --- each kind, with its place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_collectives_of_a_group_that_take_twice_as_long_are_told_with_the_group_and_their_end(setting: Setting) -> None:
    def change(line: Timeline) -> None:
        line.collectives[at(130), line.compiled.slots(1, 0)] *= 2.0

    job = played(setting, 1, change, 170)
    first, second = watched(job)
    assert (first.kind, first.component, set(first.ranks)) == ("fail-slow", "collective", ranks_of(job, 0, [1]))
    assert abs(first.iteration - ONSET) <= 1
    assert first.detected <= ONSET + LASTING_ITERATIONS
    assert 0.03 < first.change < 0.09, "of an iteration"
    assert (second.kind, second.component, set(second.ranks)) == ("recovered", "collective", set(first.ranks))
    assert abs(second.iteration - 130) <= 1


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("stage", [0, 1])
def test_sums_of_gradients_of_a_stage_are_told_with_all_who_wait(setting: Setting, stage: int) -> None:
    def change(line: Timeline) -> None:
        line.sums[at(130), stage] *= 3.0

    job = played(setting, 2, change, 170)
    first, second = watched(job)
    assert (first.kind, first.component) == ("fail-slow", "reduction")
    assert set(first.ranks) == ranks_of(job, stage, range(setting.dp))
    assert first.detected <= ONSET + LASTING_ITERATIONS
    assert (second.kind, second.component, set(second.ranks)) == ("recovered", "reduction", set(first.ranks))


@pytest.mark.parametrize("setting", [*SETTINGS, Setting(pp=1, tp=1, dp=4), Setting(pp=1, tp=2, dp=1)])
def test_sums_of_gradients_of_all_are_told_as_such(setting: Setting) -> None:
    def change(line: Timeline) -> None:
        line.sums[at(130)] *= 3.0

    job = played(setting, 4, change, 200)
    first, second = watched(job)
    assert (first.kind, first.component, second.kind, second.component) == (
        "fail-slow",
        "reduction",
        "recovered",
        "reduction",
    )
    assert set(first.ranks) == set(job.plan.layout.active)
    assert first.detected <= ONSET + LASTING_ITERATIONS


@pytest.mark.parametrize("setting", SETTINGS)
def test_data_that_come_late_are_told_with_the_replica_that_waits(setting: Setting) -> None:
    def change(line: Timeline) -> None:
        line.late[at(130), line.compiled.slots(1, 0)[0]] = line.forward_s

    job = played(setting, 3, change, 170)
    first, second = watched(job)
    assert (first.kind, first.component, set(first.ranks)) == ("fail-slow", "data", ranks_of(job, 0, [1]))
    assert first.detected <= ONSET + LASTING_ITERATIONS
    assert (second.kind, second.component) == ("recovered", "data")


# --- what is no finding, or another's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_slow_device_a_slow_link_and_a_slow_job_are_one_finding_each(setting: Setting) -> None:
    def device(line: Timeline) -> None:
        line.compute[at(), line.compiled.slots(0, 1), 0] *= 1.25

    def link(line: Timeline) -> None:
        source, target = line.compiled.edges
        here = (line.compiled.replica[source] == 0) & (line.compiled.stage[target] == 1)
        line.transfers[at(), here, 0] += 0.3 * line.forward_s

    def everybody(line: Timeline) -> None:
        line.compute[at()] *= 1.25
        line.collectives[at()] *= 1.25
        line.sums[at()] *= 1.25

    for change in (device, link, everybody):
        (finding,) = watched(played(setting, 5, change))
        assert finding.component not in ("collective", "reduction", "data")


@pytest.mark.parametrize("lasts", [10, 14])
def test_who_did_not_wait_longer_with_the_others_is_not_slower_once_they_are_well(lasts: int) -> None:
    """The last to come waits for nobody, however slow the rest is."""
    plan, orders = plan_of(uniform(1, 3, 1))
    tests = LaneTests(Stacked(plan, compile_orders(plan, orders)), None, false_alarms_per=10_000, patience=500)
    rng, found = np.random.default_rng(1), []
    for i in range(1, ONSET + lasts + 60):
        waits = (0.2 if ONSET <= i < ONSET + lasts else 0.02) + 0.001 * rng.standard_normal(3)
        waits[0] = 1e-4
        times = LaneTimes(collective=np.full(3, np.nan), reduction=waits, data=np.array([0.001, np.nan, np.nan]))
        found += tests.update(i, times, 0.4, 1.0, lambda: {-1: (ONSET,)})
    assert found == []


@pytest.mark.parametrize("lasts", [20, 60])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_slow_network_is_the_jobs_at_once_though_the_sums_of_gradients_wait_a_little_for_it(
    setting: Setting, lasts: int
) -> None:
    """They explain a tenth of it, and would be told after `LASTING_ITERATIONS` iterations, with nothing before."""

    def change(line: Timeline) -> None:
        line.transfers[at(ONSET + lasts)] += 2.0 * line.forward_s
        line.sums[at(ONSET + lasts)] += 2.0 * line.forward_s

    job = played(setting, 5, change, ONSET + lasts + 40)
    monitor = Monitor()
    monitor.adopt(job.plan, job.model, job.orders, {rank: f"n{rank}" for rank in job.plan.layout.active})
    slow, well = [found for one in job.observations() for found in monitor.observe(one).findings]
    assert (slow.kind, slow.component, slow.ranks, slow.link) == ("fail-slow", "job", (), None)
    assert abs(slow.iteration - ONSET) <= 1
    assert slow.detected <= ONSET + 10
    assert slow.transfers is not None
    assert slow.transfers > 3.0
    assert (well.kind, well.component) == ("recovered", "job")
    assert abs(well.iteration - ONSET - lasts) <= 1


@pytest.mark.parametrize("lasts", [20, 60])
def test_of_two_groups_one_whose_collectives_become_shorter_makes_the_other_no_slower(lasts: int) -> None:
    """Workers that share processors have them to themselves while others wait."""

    def change(line: Timeline) -> None:
        line.collectives[:, :, ...] += 0.15 * line.compute.mean(axis=-1)
        line.collectives[at(ONSET + lasts), line.compiled.slots(0, 0)] *= 0.2

    assert watched(played(Setting(pp=1, tp=2, dp=2), 6, change, ONSET + 2 * lasts)) == []


def test_what_costs_less_than_a_hundredth_is_no_finding() -> None:
    def change(line: Timeline) -> None:
        line.collectives[at(), line.compiled.slots(0, 0)] *= 1.08
        line.late[at(), line.compiled.slots(1, 0)[0]] = 0.06 * line.forward_s

    assert watched(played(SETTINGS[0], 6, change, 300)) == []


def test_jobs_that_are_well_have_none() -> None:
    def rough(line: Timeline) -> None:
        rng = np.random.default_rng(7)
        line.sums *= np.exp(0.3 * rng.standard_normal(line.sums.shape))
        line.collectives *= np.exp(0.3 * rng.standard_normal(line.collectives.shape))
        line.late[:, line.compiled.slots(0, 0)[0]] = 0.1 * line.forward_s * rng.random(len(line.late))
        line.beside[49::50] += 3.0

    for setting in SETTINGS:
        assert watched(played(setting, 7, rough, 400)) == []


# --- how waits are read -----------------------------------------------------------------------------------------------


def lane_times(made: Observation, stacked: Stacked) -> LaneTimes:
    return stacked.lane_times(stacked.columns(made.times), made.times)


def test_waits_are_read_from_what_ranks_measured() -> None:
    def change(line: Timeline) -> None:
        line.late[:, line.compiled.slots(1, 0)[0]] = line.forward_s

    job = played(SETTINGS[0], 8, change, 3)
    stacked = Stacked(job.plan, job.compiled)
    for i, made in enumerate(job.observations()):
        times = lane_times(made, stacked)
        for lane, (d, s) in enumerate(stacked.places):
            own = job.compute[i, job.compiled.slots(d, s)].mean(axis=-1).sum()
            assert times.collective[lane] == pytest.approx(COLLECTIVE * own, rel=0.1)
            assert times.reduction[lane] == pytest.approx(job.synchronisation_s * job.factor[i], rel=1e-6)
            assert np.isnan(times.data[lane]) == (s > 0)
            if s == 0 and d != 1:
                assert times.data[lane] == 0.0
        late = times.data[stacked.places.index((1, 0))]
        assert late > 0.0


def test_a_group_of_one_has_no_collectives_and_who_did_not_report_no_waits() -> None:
    plan, orders = plan_of(uniform(1, 2, 2))
    stacked = Stacked(plan, compile_orders(plan, orders))
    (made,) = observations(plan, orders, range(1))
    times = lane_times(made, stacked)
    assert np.isnan(times.collective).all()
    assert np.isfinite(times.reduction).all()
    lost = msgspec.structs.replace(made, times={rank: own for rank, own in made.times.items() if rank != 0})
    missing = lane_times(lost, stacked)
    assert np.isnan(missing.data[0])
    assert np.isnan(missing.reduction[0])
    nothing = lane_times(msgspec.structs.replace(made, times={}), stacked)
    assert np.isnan(nothing.reduction).all()
    assert np.isnan(nothing.data).all()


def test_sums_that_all_end_together_have_waited_for_the_last_of_all() -> None:
    """A job whose ranks tell when everybody's were done: a slow device of one stage is not the other one's sums."""
    slower: Slower = lambda rank, i: 1.6 if rank == 0 and i >= ONSET else 1.0  # noqa: E731
    plan, orders = plan_of(uniform(2, 2, 2))
    monitor = Monitor()
    monitor.adopt(plan, MODEL, orders)
    made = observations(plan, orders, range(140), slower=slower)
    (finding,) = [finding for one in made for finding in monitor.observe(one).findings]
    assert (finding.component, finding.ranks) == ("device", (0,))


# --- plans ------------------------------------------------------------------------------------------------------------


class Waits:
    """Lanes of two ranks, one for each replica, which wait for their data as told."""

    def __init__(self, before: Waits | None = None, replicas: int = 4) -> None:
        plan, orders = plan_of(uniform(2, 1, replicas))
        self.stacked = Stacked(plan, compile_orders(plan, orders))
        self.tests = LaneTests(self.stacked, before and before.tests, false_alarms_per=10_000, patience=500)
        self.rng = np.random.default_rng(0)

    def run(
        self,
        iterations: range,
        late_s: dict[int, float],
        causes: dict[int, list[int]] | None = None,
        noise: float = 0.005,
    ) -> list[Finding]:
        """Iterations of a second, in which lanes wait so long for their data; not a number for no report."""
        found = []
        for i in iterations:
            n = len(self.stacked.places)
            data: Floats = 0.02 + noise * self.rng.standard_normal(n)
            data += [late_s.get(lane, 0.0) for lane in range(n)]
            none = np.full(n, np.nan)
            times = LaneTimes(collective=none, reduction=none, data=data)
            found += self.tests.update(i, times, 1.0, 1.0, lambda: causes or {})
        return found


def told(findings: Iterable[Finding]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.kind, one.iteration, tuple(sorted(one.ranks))) for one in findings]


def begun(replicas: int = 4, seed: int = 0, noise: float = 0.005) -> Waits:
    waits = Waits(replicas=replicas)
    waits.rng = np.random.default_rng(seed)
    assert waits.run(range(40), {}, noise=noise) == []
    return waits


ALL = {lane: 0.1 for lane in range(4)}


def test_what_is_known_under_a_plan_is_no_news_under_the_next_and_its_end_is() -> None:
    before = begun()
    (finding,) = before.run(range(40, 70), {0: 0.1})
    assert finding.change == pytest.approx(0.1, rel=0.1)
    assert before.tests.added_s == pytest.approx(0.1, rel=0.1)
    after = Waits(before)
    assert after.tests.added_s == before.tests.added_s, "until it has been seen"
    assert after.run(range(70, 120), {0: 0.1}) == []
    assert told(after.run(range(120, 140), {})) == [("recovered", 120, (0, 1))]
    assert after.tests.added_s == 0.0


def test_what_has_not_lasted_long_enough_under_a_plan_is_told_under_the_next() -> None:
    before = begun()
    assert before.run(range(40, 50), {0: 0.1}) == []
    assert told(Waits(before).run(range(50, 80), {0: 0.1})) == [("fail-slow", 40, (0, 1))]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("late_s", [{0: 0.1}, ALL])
def test_what_ends_with_a_plan_is_told_as_over_if_it_was_told_at_all(known: bool, late_s: dict[int, float]) -> None:
    before = begun()
    at = 70 if known else 50
    assert bool(before.run(range(40, at), late_s)) == known
    after = Waits(before)
    assert [kind for kind, _, _ in told(after.run(range(at, at + 60), {}))] == (["recovered"] if known else [])
    assert (after.tests.slow, after.tests.added_s) == ({}, 0.0)


def test_a_group_that_always_waits_longer_than_others_is_well_under_every_plan() -> None:
    """One that has three times as many micro-batches, say."""
    first = Waits()
    assert first.run(range(60), {0: 0.5}) == []
    assert Waits(first).run(range(60, 120), {1: 0.5}) == []


def test_what_is_over_soon_is_not_told() -> None:
    waits = begun()
    assert waits.run(range(40, 40 + LASTING_ITERATIONS - 2), {0: 0.1}) == []
    assert waits.run(range(40 + LASTING_ITERATIONS - 2, 100), {}) == []
    assert waits.tests.slow == {}


def test_of_several_that_became_slow_together_those_that_stay_so_are_told() -> None:
    waits = begun()
    assert waits.run(range(40, 50), {0: 0.1, 1: 0.1}) == []
    assert told(waits.run(range(50, 80), {0: 0.1})) == [("fail-slow", 40, (0, 1))]
    assert told(waits.run(range(80, 100), {})) == [("recovered", 80, (0, 1))]


def test_of_several_one_that_gets_worse_is_told_by_itself() -> None:
    waits = begun(8)
    waits.run(range(40, 50), {0: 0.1, 1: 0.1, 2: 0.1})
    found = told(waits.run(range(50, 100), {0: 0.1, 1: 0.1, 2: 0.4}))
    assert sorted(found) == [("fail-slow", 40, (0, 1, 2, 3)), ("fail-slow", 50, (4, 5))]


@pytest.mark.parametrize("lane", [0, 1])
def test_what_begins_with_something_slow_of_its_ranks_has_its_cause_there(lane: int) -> None:
    waits = begun()
    found = waits.run(range(40, 80), {0: 0.1}, {lane: [40]})
    assert told(found) == ([] if lane == 0 else [("fail-slow", 40, (0, 1))])
    assert bool(waits.tests.slow) == (lane != 0)
    assert bool(waits.tests.added_s) == (lane != 0)


@pytest.mark.parametrize("replanned", [False, True])
def test_what_outlasts_its_cause_is_told_also_under_another_plan(replanned: bool) -> None:
    waits = begun()
    assert waits.run(range(40, 80), {0: 0.1}, {0: [40]}) == []
    waits = Waits(waits) if replanned else waits
    assert waits.run(range(80, 80 + LASTING_ITERATIONS - 2), {0: 0.1}) == []
    (finding,) = waits.run(range(80 + LASTING_ITERATIONS - 2, 110), {0: 0.1})
    assert told([finding]) == [("fail-slow", 40, (0, 1))]
    assert finding.change == pytest.approx(0.1, rel=0.1)
    assert told(waits.run(range(110, 130), {})) == [("recovered", 110, (0, 1))]


@pytest.mark.parametrize(("late_s", "causes"), [({}, {}), ({0: 0.1}, {0: [41]})])
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_what_ends_with_its_cause_or_has_another_is_not_told(
    late_s: dict[int, float], causes: dict[int, list[int]], noise: float
) -> None:
    for seed in range(30):
        waits = begun(seed=seed, noise=noise)
        assert waits.run(range(40, 80), {0: 0.1}, {0: [40]}, noise) == []
        assert waits.run(range(80, 140), late_s, causes, noise) == []


def test_what_gets_worse_by_itself_beside_its_cause_is_told_once() -> None:
    waits = begun()
    waits.run(range(40, 80), {0: 0.1}, {0: [40]})
    (finding,) = waits.run(range(80, 120), {0: 0.4}, {0: [40]})
    assert finding.iteration == 80
    assert waits.run(range(120, 160), {0: 0.4}) == []


def test_what_gets_better_beside_its_cause_is_no_failure_before_that_ends() -> None:
    waits = begun()
    waits.run(range(40, 80), {0: 0.4}, {0: [40]})
    assert waits.run(range(80, 120), {0: 0.1}, {0: [40]}) == []
    (finding,) = waits.run(range(120, 150), {0: 0.1})
    assert finding.change == pytest.approx(0.1, rel=0.2)
    assert told(waits.run(range(150, 170), {})) == [("recovered", 150, (0, 1))]


def test_what_all_wait_for_is_told_once_the_lane_that_might_have_been_its_cause_is_well() -> None:
    waits = begun()
    assert told(waits.run(range(40, 100), {**ALL, 0: 0.3})) == [("fail-slow", 40, (0, 1))]
    found = told(waits.run(range(100, 140), ALL))
    assert found == [("recovered", 100, (0, 1)), ("fail-slow", 40, tuple(range(8)))]


def test_a_lane_that_reports_late_is_compared_with_what_it_reports_first() -> None:
    waits = Waits()
    assert waits.run(range(40), {0: np.nan, 1: 0.05}) == []
    assert waits.run(range(40, 120), {0: 0.1, 1: 0.05}) == []
    assert told(waits.run(range(120, 150), {0: 0.2, 1: 0.05})) == [("fail-slow", 120, (0, 1))]
