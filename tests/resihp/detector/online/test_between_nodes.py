"""What all links between nodes have in common: a path that has no peers is found, a network that is slow is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from resihp.detector.findings import Finding
from resihp.detector.online.monitor import Monitor
from resihp.parallelism.layout import Layout
from tests.resihp.detector.small_jobs import MODEL, observations, plan_of, uniform

TWO_STAGES = uniform(4, 2, 1)
TWO_NODES = {rank: f"n{rank // 4}" for rank in range(8)}
FOUR_NODES = {rank: f"n{rank // 2}" for rank in range(8)}


class Watched:
    def __init__(self, layout: Layout = TWO_STAGES, nodes: dict[int, str] = TWO_NODES) -> None:
        self.monitor = Monitor()
        self.plan, self.orders = plan_of(layout)
        self.monitor.adopt(self.plan, MODEL, self.orders, nodes)

    def run(
        self,
        iterations: range,
        factor: Callable[[int], float] = lambda i: 1.0,
        everybody: Callable[[int], float] = lambda i: 1.0,
        slower: Callable[[int, int], float] = lambda rank, i: 1.0,
    ) -> list[Finding]:
        found: list[Finding] = []
        for observation in observations(
            self.plan,
            self.orders,
            iterations,
            slower_link=lambda sender, receiver, i: factor(i),
            everybody=everybody,
            slower=slower,
        ):
            found += self.monitor.observe(observation).findings
        return found


@pytest.mark.parametrize("factor", [2.0, 20.0])
def test_it_is_found_and_is_the_one_finding(factor: float) -> None:
    watched = Watched()
    (finding,) = watched.run(range(140), lambda i: factor if i >= 60 else 1.0)
    assert (finding.kind, finding.link, finding.ranks) == ("fail-slow", (0, 4), ())
    assert abs(finding.iteration - 60) <= 1
    assert finding.detected <= 66
    assert 1 + finding.change == pytest.approx(factor, rel=0.15)
    assert "no others to compare them with" in finding.evidence


def test_it_is_found_soon_after_a_job_began() -> None:
    findings = Watched().run(range(60), lambda i: 20.0 if i >= 25 else 1.0)
    assert [(finding.link, finding.iteration) for finding in findings] == [((0, 4), 25)]


def test_it_recovers() -> None:
    watched = Watched()
    findings = watched.run(range(200), lambda i: 5.0 if 60 <= i < 120 else 1.0)
    assert [(finding.kind, finding.link) for finding in findings] == [("fail-slow", (0, 4)), ("recovered", (0, 4))]
    assert abs(findings[1].iteration - 120) <= 1


def test_its_end_is_seen_under_another_plan_as_well() -> None:
    watched = Watched()
    watched.run(range(100), lambda i: 5.0 if i >= 60 else 1.0)
    watched.plan, watched.orders = plan_of(TWO_STAGES, epoch=2)
    watched.monitor.adopt(watched.plan, MODEL, watched.orders, TWO_NODES)
    findings = watched.run(range(100, 200), lambda i: 5.0 if i < 140 else 1.0)
    assert {finding.kind for finding in findings} == {"recovered"}
    assert (0, 4) in {finding.link for finding in findings}


def test_a_measurement_that_finds_nothing_is_heeded_for_a_while() -> None:
    watched = Watched()
    (finding,) = watched.run(range(80), lambda i: 3.0 if i >= 60 else 1.0)
    assert finding.link is not None
    watched.monitor.cleared_link(*finding.link)
    later = watched.run(range(80, 300), lambda i: 3.0)
    assert [one for one in later if one.link is not None] == []


def test_links_between_several_nodes_have_each_other_to_be_compared_with() -> None:
    layout = uniform(2, 4, 1)
    (finding,) = Watched(layout, FOUR_NODES).run(range(140), lambda i: 20.0 if i >= 60 else 1.0)
    assert (finding.link, finding.ranks, finding.component) == (None, (), "job")
    assert finding.transfers == pytest.approx(20.0, rel=0.15), "it may be the network"
    assert "transfers between nodes take" in finding.evidence


@pytest.mark.parametrize("least", [1.06, 1.12])
def test_ranks_that_are_a_little_slower_with_it_do_not_hide_that_the_network_is(least: float) -> None:
    """Kernels of transfers that last longer take processors from others, and clocks fall while a device waits."""
    watched = Watched(uniform(2, 4, 1), FOUR_NODES)
    findings = watched.run(
        range(140),
        lambda i: 20.0 if i >= 60 else 1.0,
        slower=lambda rank, i: least if i >= 60 and rank in (2, 3, 6) else 1.0,
    )
    assert {rank for finding in findings for rank in finding.ranks} >= {2, 6}
    (whole,) = (finding for finding in findings if finding.component == "job")
    assert abs(whole.iteration - 60) <= 1
    assert whole.detected <= 70
    assert whole.transfers == pytest.approx(20.0, rel=0.15)


def test_a_rank_that_recovers_while_the_network_is_slow_does_not_hide_that_it_is() -> None:
    watched = Watched(uniform(2, 4, 1), FOUR_NODES)
    findings = watched.run(
        range(160),
        lambda i: 20.0 if 80 <= i < 120 else 1.0,
        slower=lambda rank, i: 1.3 if rank == 2 and 50 <= i < 78 else 1.0,
    )
    told = [(finding.kind, finding.component) for finding in findings]
    assert ("recovered", "device") in told
    assert told.count(("fail-slow", "job")) == 1
    assert told.count(("recovered", "job")) == 1


def test_a_rank_that_comes_and_goes_while_the_network_is_slow_tells_no_more_of_the_job() -> None:
    findings = Watched(uniform(2, 4, 1), FOUR_NODES).run(
        range(240),
        lambda i: 60.0 if 60 <= i < 200 else 1.0,
        slower=lambda rank, i: 3.0 if rank == 2 and 100 <= i < 140 else 1.0,
    )
    assert [finding.kind for finding in findings if finding.component == "job"] == ["fail-slow", "recovered"]


def test_a_machine_that_is_slower_as_a_whole_accuses_no_link() -> None:
    (finding,) = Watched().run(range(140), everybody=lambda i: 2.5 if i >= 60 else 1.0)
    assert (finding.link, finding.component, finding.transfers) == (None, "job", None)


def test_healthy_jobs_are_left_alone() -> None:
    assert [finding for finding in Watched().run(range(1000)) if finding.link is not None] == []
