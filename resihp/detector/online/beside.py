"""What stands beside the tests of ranks, links and whole iterations: flickering ranks, and waits of lanes.

Both are looked at once predictions are known, and heed what the others have found: a rank that is slow does not
flicker, and a wait that begins with it has its cause there. Pure, no clock; called by
`resihp.detector.online.monitor`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec
import numpy as np

from resihp.detector.findings import Finding, Intermittent
from resihp.detector.observation import Floats
from resihp.detector.online.lane_channel import LaneTests
from resihp.detector.online.plan_arrays import Stacked, Sums
from resihp.detector.sequential.flicker import Flicker, Flickering
from resihp.detector.sequential.peer_cusum import PeerTest
from resihp.detector.sequential.window import low_median

ALIKE = 0.6
"""A rank of the same group that is slow in the same iterations, by this share, cannot be told from it."""
REMEMBERED = 256
"""Iterations in which something became slow that are remembered, the last ones."""

_Subject = int | tuple[int, int] | None
"""A rank, a link, or the job."""


class Beside:
    """Tests of flicker and of lanes, under one plan. `before`: those under the plan before it."""

    def __init__(self, stacked: Stacked, before: Beside | None, *, false_alarms_per: int, patience: int) -> None:
        self._stacked = stacked
        known = [] if before is None else before.flickering
        self._together: dict[int, tuple[int, ...]] = {} if before is None else before._together
        self._flicker = Flicker(
            stacked.group,
            stacked.lane,
            known=[
                msgspec.structs.replace(one, series=stacked.row[rank]) for rank, one in known if rank in stacked.row
            ],
            false_alarms_per=2 * false_alarms_per,
        )
        self.lanes: LaneTests = LaneTests(
            stacked,
            None if before is None else before.lanes,
            false_alarms_per=false_alarms_per,
            patience=patience,
        )
        self._causes: dict[int, set[_Subject]] = {} if before is None else before._of(stacked.row)
        """What else is slow, by the iteration in which it became so."""
        self._by_lane: dict[int, list[int]] | None = None

    @property
    def flickering(self) -> list[tuple[int, Flickering]]:
        """Ranks that are slow now and then."""
        return [(int(self._stacked.ranks[row]), one) for row, one in self._flicker.told.items()]

    @property
    def added_s(self) -> float:
        """Seconds by which an iteration is longer for what lanes wait for."""
        return self.lanes.added_s

    @property
    def suspects(self) -> bool:
        """It is about to find something: others may wait for it."""
        return self.lanes.suspects

    def _of(self, ranks: Container[int]) -> dict[int, set[_Subject]]:
        """Causes that are still there when these ranks alone have work."""
        found: dict[int, set[_Subject]] = {}
        for onset, subjects in self._causes.items():
            left = {one for one in subjects if one is None or all(rank in ranks for rank in _ranks(one))}
            if left:
                found[onset] = left
        return found

    def heed(self, findings: Iterable[Finding], slow_links: Container[tuple[int, int]]) -> None:
        """Others found this: what became longer together with it has its cause there, while it lasts."""
        for finding in findings:
            subjects: set[_Subject] = {finding.link} if finding.link else {*finding.ranks} or {None}
            self._by_lane = None
            if finding.kind == "fail-slow":
                self._causes.setdefault(finding.iteration, set()).update(subjects)
            elif finding.link:  # one is named for several
                links = (one for others in self._causes.values() for one in others if isinstance(one, tuple))
                self._no_causes({one for one in links if one not in slow_links})
            else:
                self._no_causes(subjects)
        for onset in [*self._causes][:-REMEMBERED]:
            del self._causes[onset]

    def cleared(self, rank: int) -> None:
        """A probe says that it is healthy; should it flicker on, or more, that is told anew."""
        self._no_causes({rank})
        if rank in self._stacked.row:
            self._flicker.clear(self._stacked.row[rank])
            self._together.pop(rank, None)

    def cleared_link(self, sender: int, receiver: int) -> None:
        """A probe says that it is healthy, in this direction."""
        self._no_causes({(sender, receiver)})

    def _no_causes(self, well: set[_Subject]) -> None:
        self._causes = {onset: left for onset, subjects in self._causes.items() if (left := subjects - well)}
        self._by_lane = None

    def _causes_by_lane(self) -> dict[int, list[int]]:
        if self._by_lane is not None:
            return self._by_lane
        row, lane = self._stacked.row, self._stacked.lane
        found: dict[int, list[int]] = {}
        for onset, subjects in self._causes.items():
            for where in {int(lane[row[one]]) if isinstance(one, int) else -1 for one in subjects}:
                found.setdefault(where, []).append(onset)
        self._by_lane = found
        return found

    def update(
        self, iteration: int, sums: Sums, ratios: Floats, healthy_s: float, test: PeerTest
    ) -> tuple[Finding, ...]:
        """Take an iteration. `ratios` (R,): measured over predicted seconds of ranks, which `test` has taken already;
        `healthy_s`: what the iteration should have taken."""
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.log(ratios)
        values[~np.isfinite(values)] = np.nan
        known = values[np.isfinite(values)]
        if not test.ready or not known.size:
            return ()
        slow = np.zeros(values.size, dtype=bool)
        slow[list(test.slow)] = True
        away = values - test.levels(healthy=False)
        away -= low_median(away[np.isfinite(away)])
        found = self._flicker.update(iteration, away, test.noise, slow)
        named: set[int] = set()
        findings = [finding for one in found if (finding := self._named(iteration, one, named)) is not None]
        flickering = {rank for rank, _ in self.flickering}
        self._together = {rank: ranks for rank, ranks in self._together.items() if rank in flickering}
        if sums.lanes is not None:
            common = float(np.exp(low_median(known)))
            findings += self.lanes.update(iteration, sums.lanes, healthy_s, common, self._causes_by_lane)
        return tuple(findings)

    def _named(self, iteration: int, one: Flickering, named: set[int]) -> Finding | None:
        """As a finding, with all of its group that cannot be told from it. `named`: in this iteration, so far."""
        stacked = self._stacked
        rank = int(stacked.ranks[one.series])
        well = one.kind == "recovered"
        if well:
            ranks = self._together.pop(rank, (rank,))
            if any(other in self._together for other in ranks if other != rank):
                return None  # the last of them tells it
        else:
            if rank in named:
                return None  # beside another
            lane = stacked.lane[one.series]
            rows = range(int(stacked.first_row[lane]), int(stacked.first_row[lane + 1]))
            alike = [
                row for row in self._flicker.alike(one, rows, ALIKE) if int(stacked.ranks[row]) not in self._together
            ]
            for row in alike:
                self._flicker.tell(msgspec.structs.replace(one, series=row))
            ranks = (rank, *stacked.ranks[alike].tolist())
            self._together |= dict.fromkeys(ranks, ranks)
            named.update(ranks)
        who = f"rank {rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}, which look alike"
        return Finding(
            kind="recovered" if well else "fail-slow",
            iteration=one.onset,
            detected=iteration,
            change=0.0 if well else one.cost,
            confidence=one.confidence,
            alarm=one.alarm,
            ranks=ranks,
            link=None,
            intermittent=Intermittent(share=one.share, factor=one.factor),
            evidence=(
                f"{who}: not slow once since iteration {one.onset}, before in {one.share:.1%} of the iterations"
                if well
                else f"{who}: own work at {one.factor:.2f} of its healthy time in {one.share:.1%} of the iterations "
                f"since iteration {one.onset}, {one.bursts} times; others once in {1 / one.rate:.0f}"
            ),
        )


def _ranks(subject: int | tuple[int, int]) -> tuple[int, ...]:
    return subject if isinstance(subject, tuple) else (subject,)
