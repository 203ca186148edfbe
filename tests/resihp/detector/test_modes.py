"""Which detector a job has, and that what it was configured with reaches it."""

from __future__ import annotations

import pytest

from resihp.detector import modes
from resihp.detector.findings import Finding
from resihp.detector.interface import Detector
from resihp.detector.online.monitor import Monitor
from resihp.detector.rivals.change_points import ChangePointDetector
from resihp.parallelism.layout import Layout
from resihp.settings import Detection
from tests.resihp.detector.small_jobs import MODEL, observations, plan_of, uniform


def found(detector: Detector, layout: Layout, factor: float) -> list[Finding]:
    """What is found in 60 iterations in which rank 0 takes so many times as long, after 90 that were well."""
    plan, orders = plan_of(layout)
    detector.adopt(plan, MODEL, orders)
    seen = observations(plan, orders, range(150), slower=lambda rank, i: factor if rank == 0 and i >= 90 else 1.0)
    return [finding for one in seen for finding in detector.observe(one).findings]


def test_ours_unless_told_otherwise() -> None:
    assert isinstance(modes.detector(Detection()), Monitor)
    assert isinstance(modes.detector(Detection(mode="paper")), ChangePointDetector)
    assert isinstance(modes.detector(Detection(mode="greyhound")), ChangePointDetector)


@pytest.mark.parametrize(("least", "tells"), [(0.03, True), (0.2, False)])
def test_what_is_milder_than_the_least_slow_down_is_not_told(least: float, tells: bool) -> None:
    findings = found(modes.detector(Detection(least=least)), uniform(2, 2, 2), 1.08)
    assert bool(findings) is tells
    assert bool(found(modes.detector(Detection(least=least)), uniform(2, 2, 2), 1.5))


@pytest.mark.parametrize("mode", ["sequential", "paper", "greyhound"])
def test_a_rank_that_nobody_can_be_compared_with_is_never_named(mode: str) -> None:
    """That iterations take longer is seen; whose fault it is cannot be."""
    detector = modes.detector(Detection(mode=mode))  # type: ignore[arg-type]
    findings = found(detector, uniform(1, 1, 1), 2.0)
    assert findings
    assert all(finding.ranks == () and finding.link is None for finding in findings)
    assert detector.speeds() == {}
    standing = detector.standing(0)
    assert standing is None or (standing.peers, standing.slow) == (0, False)
