"""How ranks stand with the detector: what is told of one that is healthy, slow, pardoned, silent."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import pytest

from resihp.detector.findings import Finding
from resihp.detector.observation import Observation
from resihp.detector.online.monitor import Monitor
from tests.resihp.detector.small_jobs import MODEL, observations, plan_of, uniform

LAYOUT = uniform(2, 2, 2)


def watched(made: Iterable[Observation], monitor: Monitor) -> list[Finding]:
    return [finding for one in made for finding in monitor.observe(one).findings]


def test_a_rank_s_standing_tells_level_evidence_and_peers() -> None:
    monitor = Monitor()
    assert monitor.standing(3) is None
    assert monitor.coverage() == {}
    plan, orders = plan_of(LAYOUT)
    monitor.adopt(plan, MODEL, orders)
    early = monitor.standing(3)
    assert early is not None
    assert math.isnan(early.level)
    assert early.reported is None
    slower = lambda rank, i: 1.25 if rank == 3 and i >= 80 else 1.0  # noqa: E731
    (finding,) = watched(observations(plan, orders, range(120), slower=slower), monitor)
    slow, well = monitor.standing(3), monitor.standing(4)
    assert slow is not None
    assert well is not None
    assert slow.slow
    assert slow.level == pytest.approx(1.25, rel=0.02)
    assert (slow.reported, slow.peers) == (119, 3)
    assert not well.slow
    assert well.level == pytest.approx(1.0, abs=0.02)
    assert 0.0 <= well.evidence < 1.0
    assert 0.0 < well.noise < 0.05
    assert monitor.standing(99) is None
    assert finding.ranks == (3,)


def test_a_pardon_is_told_with_its_end() -> None:
    monitor = Monitor(patience=200)
    plan, orders = plan_of(LAYOUT)
    monitor.adopt(plan, MODEL, orders)
    slower = lambda rank, i: 1.14 if rank == 5 and i >= 80 else 1.0  # noqa: E731
    watched(observations(plan, orders, range(100), slower=slower), monitor)
    monitor.cleared(5)
    standing = monitor.standing(5)
    assert standing is not None
    assert not standing.slow
    assert standing.pardon == pytest.approx(0.14, abs=0.02)
    assert standing.level == pytest.approx(1.14, abs=0.03)
    assert standing.pardoned_until == 299


def test_who_does_not_report_is_seen_not_to_be_watched() -> None:
    monitor = Monitor()
    plan, orders = plan_of(LAYOUT)
    monitor.adopt(plan, MODEL, orders)
    for one in observations(plan, orders, range(50)):
        silent = {6} if one.iteration < 30 else {5}
        times = {rank: own for rank, own in one.times.items() if rank not in silent | {7}}
        monitor.observe(msgspec.structs.replace(one, times=times))
    covered = monitor.coverage()
    assert covered == {0: 49, 1: 49, 2: 49, 3: 49, 4: 49, 5: 29, 6: 49, 7: -1}
    standing = monitor.standing(7)
    assert standing is not None
    assert standing.reported is None
    assert math.isnan(standing.level)


def test_scores_are_the_standings_of_all_ranks() -> None:
    monitor = Monitor()
    assert monitor.scores() is None
    plan, orders = plan_of(LAYOUT)
    monitor.adopt(plan, MODEL, orders)
    slower = lambda rank, i: 1.14 if rank == 5 and i >= 80 else 1.0  # noqa: E731
    watched(observations(plan, orders, range(100), slower=slower), monitor)
    monitor.cleared(5)
    scores = monitor.scores()
    assert scores is not None
    for rank, level, evidence in zip(*scores, strict=True):
        standing = monitor.standing(int(rank))
        assert standing is not None
        assert (level, evidence) == pytest.approx((standing.level, standing.evidence))
