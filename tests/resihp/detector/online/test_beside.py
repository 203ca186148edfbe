"""Ranks that are slow now and then, in a job under the monitor: one finding, with all that cannot be told from them."""

from __future__ import annotations

import pytest

from resihp.detector.findings import Finding
from resihp.detector.observation import Observation
from resihp.detector.online.monitor import Monitor
from resihp.parallelism.layout import Layout
from tests.resihp.detector.small_jobs import MODEL, Slower, observations, plan_of, uniform


def now_and_then(rank: int, factor: float, onset: int, until: int = 100_000, *, slow: int = 1, of: int = 10) -> Slower:
    return lambda which, i: factor if which == rank and onset <= i < until and i % of < slow else 1.0


class FlickeringJob:
    """A job under a monitor, plan after plan."""

    def __init__(self, layout: Layout) -> None:
        self.monitor = Monitor()
        self.now = self.epoch = 0
        self.adopt(layout)

    def adopt(self, layout: Layout) -> None:
        self.epoch += 1
        self.plan, self.orders = plan_of(layout, epoch=self.epoch)
        self.monitor.adopt(self.plan, MODEL, self.orders)

    def run(self, iterations: int, slower: Slower, *, apart: bool = True) -> list[Finding]:
        span = range(self.now, self.now + iterations)
        self.now += iterations
        made = observations(self.plan, self.orders, span, slower=slower, apart=apart)
        return [finding for one in made for finding in self.observe(one)]

    def observe(self, one: Observation) -> tuple[Finding, ...]:
        return self.monitor.observe(one).findings


@pytest.mark.parametrize("layout", [uniform(2, 2, 2), uniform(1, 1, 4), uniform(4, 2, 1)])
@pytest.mark.parametrize(("slow", "of", "factor"), [(1, 10, 3.0), (2, 12, 1.5)])
def test_a_rank_that_is_slow_now_and_then_is_one_finding(layout: Layout, slow: int, of: int, factor: float) -> None:
    job = FlickeringJob(layout)
    (found,) = job.run(190, now_and_then(3, factor, 90, slow=slow, of=of))
    assert (found.kind, found.component, found.ranks, found.link) == ("fail-slow", "device", (3,), None)
    assert found.intermittent is not None
    assert found.intermittent.share == pytest.approx(slow / of, rel=0.3)
    assert found.intermittent.factor == pytest.approx(factor, rel=0.05)
    assert found.change == pytest.approx(slow / of * (factor - 1.0), rel=0.35)
    assert found.detected < 190
    assert job.monitor.speeds() == {}, "it is not slow all the time"


def test_it_ends() -> None:
    job = FlickeringJob(uniform(2, 2, 2))
    first, second = job.run(300, now_and_then(5, 2.0, 80, 160))
    assert (first.kind, first.ranks) == ("fail-slow", (5,))
    assert (second.kind, second.ranks) == ("recovered", (5,))
    assert second.intermittent is not None
    assert 150 < second.iteration <= 160


def test_ranks_of_a_group_that_look_alike_are_one_finding_and_one_end() -> None:
    job = FlickeringJob(uniform(2, 2, 2))
    first, second = job.run(300, now_and_then(5, 2.0, 80, 160), apart=False)
    assert (first.kind, sorted(first.ranks)) == ("fail-slow", [4, 5])
    assert (second.kind, sorted(second.ranks)) == ("recovered", [4, 5])


def test_who_is_found_slow_does_not_flicker_and_what_lasts_is_told_as_such() -> None:
    job = FlickeringJob(uniform(2, 2, 2))
    found = job.run(200, lambda rank, i: 1.6 if rank == 2 and i >= 90 else 1.0)
    assert [(one.kind, one.ranks, one.intermittent) for one in found] == [("fail-slow", (2,), None)]


def test_what_flickers_is_known_under_the_next_plan_and_its_end_is_told_there() -> None:
    job = FlickeringJob(uniform(2, 2, 2))
    slower = now_and_then(6, 2.0, 80, 300)
    assert [one.ranks for one in job.run(180, slower)] == [(6,)]
    job.adopt(uniform(1, 2, 4))
    assert job.run(120, slower) == []
    (end,) = job.run(120, slower)
    assert (end.kind, end.ranks) == ("recovered", (6,))


def test_single_slow_iterations_of_anybody_are_nothing() -> None:
    job = FlickeringJob(uniform(2, 2, 2))
    assert job.run(500, lambda rank, i: 3.0 if (i * 13 + rank * 29) % 97 == 0 else 1.0) == []
