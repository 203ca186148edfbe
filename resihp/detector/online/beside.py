"""Runs two more tests on each iteration: for ranks that are slow in some iterations only, and for waits of lanes.

A lane is a tensor-parallel group of a stage; a rank *flickers* if it is slow in some iterations only. Both tests run
once predictions are known, and consider the findings of the other channels: a slow rank does not flicker, and a wait
that begins when a rank becomes slow is caused by that rank. Never measures or probes. Pure, no clock; called by
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

ALIKE_SHARE = 0.6
"""A rank of the same lane with at least this share of the outliers, and of their excess, of a flickering rank cannot be
distinguished from it."""
MAX_REMEMBERED_ONSETS = 256
"""Number of latest onsets of slowness that are remembered."""

_Subject = int | tuple[int, int] | None
"""Subject of a finding: a rank, a link (sender, receiver), or None for the whole job."""


class Beside:
    """Tests of flickering ranks, and of waits of lanes, under one plan. `before`: the tests under the previous plan."""

    def __init__(self, stacked: Stacked, before: Beside | None, *, false_alarms_per: int, patience: int) -> None:
        self._stacked = stacked
        known_flicker = [] if before is None else before.flickering
        self._together: dict[int, tuple[int, ...]] = {} if before is None else before._together
        self._flicker = Flicker(
            stacked.group,
            stacked.lane,
            known_flicker=[
                msgspec.structs.replace(flicker, series=stacked.row[rank])
                for rank, flicker in known_flicker
                if rank in stacked.row
            ],
            false_alarms_per=2 * false_alarms_per,
        )
        self.lanes: LaneTests = LaneTests(
            stacked,
            None if before is None else before.lanes,
            false_alarms_per=false_alarms_per,
            patience=patience,
        )
        self._causes: dict[int, set[_Subject]] = {} if before is None else before._causes_within(stacked.row)
        """Ranks, links and job that other channels found slow, by the iteration in which they became slow."""
        self._by_lane: dict[int, list[int]] | None = None

    @property
    def flickering(self) -> list[tuple[int, Flickering]]:
        """Ranks that are slow in some iterations only, each with the figures of its flicker."""
        return [(int(self._stacked.ranks[row]), flicker) for row, flicker in self._flicker.flickering.items()]

    @property
    def added_s(self) -> float:
        """Seconds by which slow waits of lanes lengthen an iteration."""
        return self.lanes.added_s

    @property
    def suspects(self) -> bool:
        """Whether a finding about a lane may be imminent, so that the test of whole iterations waits for it."""
        return self.lanes.suspects

    def _causes_within(self, ranks: Container[int]) -> dict[int, set[_Subject]]:
        """Return the causes that remain under a plan in which only `ranks` have work."""
        causes: dict[int, set[_Subject]] = {}
        for onset, subjects in self._causes.items():
            remaining = {
                subject for subject in subjects if subject is None or all(rank in ranks for rank in _ranks(subject))
            }
            if remaining:
                causes[onset] = remaining
        return causes

    def note_findings(self, findings: Iterable[Finding], slow_links: Container[tuple[int, int]]) -> None:
        """Note the findings of other channels as possible causes of waits that began at the same time.

        A cause remains until its recovery. `slow_links`: links that are still slow.
        """
        for finding in findings:
            subjects: set[_Subject] = {finding.link} if finding.link else {*finding.ranks} or {None}
            self._by_lane = None
            if finding.kind == "fail-slow":
                self._causes.setdefault(finding.iteration, set()).update(subjects)
            elif finding.link:  # one link stands for several
                links = (link for subjects in self._causes.values() for link in subjects if isinstance(link, tuple))
                self._no_causes({link for link in links if link not in slow_links})
            else:
                self._no_causes(subjects)
        for onset in [*self._causes][:-MAX_REMEMBERED_ONSETS]:
            del self._causes[onset]

    def cleared(self, rank: int) -> None:
        """Note that a probe found `rank` healthy. Its flicker is reported again if it becomes much worse."""
        self._no_causes({rank})
        if rank in self._stacked.row:
            self._flicker.clear(self._stacked.row[rank])
            self._together.pop(rank, None)

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Note that a probe found the link from rank `sender` to rank `receiver` healthy."""
        self._no_causes({(sender, receiver)})

    def _no_causes(self, healthy_subjects: set[_Subject]) -> None:
        self._causes = {
            onset: remaining for onset, subjects in self._causes.items() if (remaining := subjects - healthy_subjects)
        }
        self._by_lane = None

    def _causes_by_lane(self) -> dict[int, list[int]]:
        if self._by_lane is not None:
            return self._by_lane
        row, lane = self._stacked.row, self._stacked.lane
        by_lane: dict[int, list[int]] = {}
        for onset, subjects in self._causes.items():
            for lane_index in {int(lane[row[subject]]) if isinstance(subject, int) else -1 for subject in subjects}:
                by_lane.setdefault(lane_index, []).append(onset)
        self._by_lane = by_lane
        return by_lane

    def update(
        self, iteration: int, sums: Sums, ratios: Floats, healthy_s: float, test: PeerTest
    ) -> tuple[Finding, ...]:
        """Test an iteration and return its findings.

        `ratios` (R,): measured over predicted seconds of each rank's own work; `test`: the test of ranks, which has
        taken these ratios already. `healthy_s`: predicted healthy seconds of the iteration.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.log(ratios)
        values[~np.isfinite(values)] = np.nan
        finite = values[np.isfinite(values)]
        if not test.ready or not finite.size:
            return ()
        slow = np.zeros(values.size, dtype=bool)
        slow[list(test.slow)] = True
        deviations = values - test.levels(healthy=False)
        deviations -= low_median(deviations[np.isfinite(deviations)])
        flickers = self._flicker.update(iteration, deviations, test.noise, slow)
        named_ranks: set[int] = set()
        findings = [
            finding
            for flicker in flickers
            if (finding := self._as_finding(iteration, flicker, named_ranks)) is not None
        ]
        flickering = {rank for rank, _ in self.flickering}
        self._together = {rank: ranks for rank, ranks in self._together.items() if rank in flickering}
        if sums.lanes is not None:
            common = float(np.exp(low_median(finite)))
            findings += self.lanes.update(iteration, sums.lanes, healthy_s, common, self._causes_by_lane)
        return tuple(findings)

    def _as_finding(self, iteration: int, flicker: Flickering, named_ranks: set[int]) -> Finding | None:
        """Return a rank's flicker as a finding that also names the ranks of its lane which cannot be distinguished.

        `named_ranks`: ranks that findings of this iteration have named so far. None if another rank's finding covers
        this one.
        """
        stacked = self._stacked
        rank = int(stacked.ranks[flicker.series])
        recovered = flicker.kind == "recovered"
        if recovered:
            ranks = self._together.pop(rank, (rank,))
            if any(member in self._together for member in ranks if member != rank):
                return None  # the last of them reports the recovery
        else:
            if rank in named_ranks:
                return None  # named together with another rank
            lane = stacked.lane[flicker.series]
            rows = range(int(stacked.first_row[lane]), int(stacked.first_row[lane + 1]))
            alike = [
                row
                for row in self._flicker.alike(flicker, rows, ALIKE_SHARE)
                if int(stacked.ranks[row]) not in self._together
            ]
            for row in alike:
                self._flicker.record(msgspec.structs.replace(flicker, series=row))
            ranks = (rank, *stacked.ranks[alike].tolist())
            self._together |= dict.fromkeys(ranks, ranks)
            named_ranks.update(ranks)
        subject = (
            f"rank {rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}, which cannot be distinguished"
        )
        return Finding(
            kind="recovered" if recovered else "fail-slow",
            iteration=flicker.onset,
            detected=iteration,
            change=0.0 if recovered else flicker.cost,
            confidence=flicker.confidence,
            alarm=flicker.alarm,
            ranks=ranks,
            link=None,
            intermittent=Intermittent(share=flicker.share, factor=flicker.factor),
            evidence=(
                f"{subject}: no slow iteration since iteration {flicker.onset}, "
                f"before in {flicker.share:.1%} of the iterations"
                if recovered
                else f"{subject}: own work takes {flicker.factor:.2f} times its healthy time "
                f"in {flicker.share:.1%} of the iterations since iteration {flicker.onset}, "
                f"in {flicker.bursts} bursts; other ranks have a burst once in {1 / flicker.rate:.0f} iterations"
            ),
        )


def _ranks(subject: int | tuple[int, int]) -> tuple[int, ...]:
    return subject if isinstance(subject, tuple) else (subject,)
