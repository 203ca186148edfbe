"""Tests the slow-down that all links between nodes share; the test of links (`link_channel`) cannot see it.

`link_channel` compares links with each other. If all links between nodes join the same two nodes, a slow path between
these nodes slows all of them. Their common part is therefore tested against its own past, and reported as a slow link.
The common slow-down of the ranks' own work is subtracted first, because a busy machine delays both. If links join
several pairs of nodes, the common part makes no finding; it is mentioned in a finding that iterations take longer,
because the network may be the cause. Pure, no clock; called by `resihp.detector.online.monitor`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import msgspec
import numpy as np

from resihp.detector.findings import Finding
from resihp.detector.observation import Floats
from resihp.detector.online.iteration_channel import WholeTest
from resihp.detector.online.link_channel import LinkTest
from resihp.detector.sequential.window import low_median
from resihp.pipeline.compiled import Ints

MIN_SHIFT = 0.4
"""Smallest slow-down that is reported, log units: transfers take 50 % longer. It is large, because without peers noise
looks much like a slower path."""
NOISE_FLOOR = 0.1
"""Lower bound of the noise of transfers, log units."""
RECENT_ITERATIONS = 256
"""Number of latest iterations for which the common part is kept."""
MIN_ITERATIONS = 3
"""Iterations needed before and after an onset to measure by how much transfers take longer."""


class BetweenNodes:
    """Test of all links between nodes under one plan, as one series.

    `links`: the test of single links, which has their levels and is updated with findings. `patience`: iterations for
    which a path is not suspected again after a probe found it healthy.
    """

    def __init__(self, links: LinkTest, *, false_alarms_per: int, patience: int) -> None:
        self._links, self._false_alarms_per, self._patience = links, false_alarms_per, patience
        self._series: Ints = np.flatnonzero((links.links.kind == 0) & links.links.comparable)
        self._pairs = [(sender, receiver) for sender, receiver in links.links.pairs[self._series].tolist()]
        self._one_path = links.links.one_path
        self._named: tuple[int, int] | None = None
        """The link that findings name for all links between the two nodes; None without a finding under this plan."""
        self._quiet_until = -math.inf
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_ITERATIONS)
        self._begin()
        if self._one_path and all(links.test.is_slow(i) for i in self._series.tolist()):
            self._test.slow_before(0.0)

    def _begin(self) -> None:
        self._test = WholeTest(
            "all links between two nodes", least=MIN_SHIFT, floor=NOISE_FLOOR, false_alarms_per=self._false_alarms_per
        )

    def cleared(self, name: tuple[int, int], iteration: int) -> bool:
        """Note that a probe found the path healthy at its present level.

        `name`: the probed link. False, and nothing changes, if findings name another link for the path.
        """
        if name != self._named:
            return False
        for i in self._series.tolist():
            self._links.test.accept(i, 0.0, slow=False)
        self._named, self._quiet_until = None, iteration + self._patience
        self._begin()
        return True

    def update(self, iteration: int, ratios: Floats) -> tuple[Finding, ...]:
        """Test an iteration and return its findings. Call after the test of links has taken the same iteration.

        `ratios` (R,): measured over expected seconds of each rank's own work.
        """
        if not self._series.size:
            return ()
        own, ratios = self._links.apart_from_healthy[self._series], ratios[ratios > 0.0]
        own = own[np.isfinite(own)]
        if not own.size or not ratios.size:
            return ()
        later = low_median(own) - max(math.log(low_median(ratios)), 0.0)
        self._recent.append((iteration, later))
        if not self._one_path or iteration < self._quiet_until:
            return ()
        findings: list[Finding] = []
        for change in self._test.update(iteration, later):
            findings += self._findings_per_link(change)
        return tuple(findings)

    def longer_since(self, onset: int) -> float | None:
        """Return the factor by which transfers take longer since iteration `onset`; None if it is small or unknown."""
        before, after = (
            [value for iteration, value in self._recent if (iteration >= onset) == since] for since in (False, True)
        )
        if min(len(before), len(after)) < MIN_ITERATIONS:
            return None
        moved = statistics.median(after) - statistics.median(before)
        return math.exp(moved) if moved > MIN_SHIFT else None

    def _findings_per_link(self, change: Finding) -> list[Finding]:
        slow, test = change.kind == "fail-slow", self._links.test
        for i in self._series.tolist():
            test.accept(i, math.log1p(change.change) if slow else 0.0, slow=slow)
        if slow:
            self._named = self._named or self._pairs[0]
        pairs = self._pairs if self._named is None else [self._named]
        if not slow:
            self._named = None
        return [
            msgspec.structs.replace(
                change,
                link=pair,
                component="device",
                evidence=f"{change.evidence}; {self._series.size} of them, and no others to compare them with",
            )
            for pair in pairs
        ]
