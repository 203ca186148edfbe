"""Journal suspicions of slowness: their beginnings, and an outcome for each. One suspicion is open at a time.

They are numbered together with suspicions of silence (`fail_stop.silence`). Makes no decision. Called by
`slow_devices`, `device_verdicts`, `slow_links`, `slow_parts` and `slowness`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from resihp.controller.fail_slow.thresholds import MIN_EXCESS_SAMPLES, MIN_EXCESS_SHARE, SAME_CAUSE_ITERATIONS
from resihp.controller.state.job import Job
from resihp.detector.findings import Component, Finding
from resihp.record.describe import rank_list
from resihp.record.journal import Outcome, Suspected

MAX_RANKS_IN_LINE = 16
"""Largest number of ranks that a log line names."""


def change(finding: Finding) -> str:
    return f"{finding.change:+.0%} since iteration {finding.iteration}"


def some(ranks: Sequence[int]) -> str:
    """Name the first `MAX_RANKS_IN_LINE` ranks and count the others: `ranks 0-15 and 4 more`."""
    more = f" and {len(ranks) - MAX_RANKS_IN_LINE} more" if len(ranks) > MAX_RANKS_IN_LINE else ""
    return f"{rank_list(ranks[:MAX_RANKS_IN_LINE])}{more}"


def speed_of(finding: Finding) -> float:
    """Return the speed, as a share of the healthy speed, that a finding's change of time corresponds to."""
    return possible(1.0 / (1.0 + max(finding.change, 0.0)))


def possible(speed: float) -> float:
    """Return `speed` limited to the range from 0.01 to 1. Values outside can only come from a clock error."""
    return min(max(speed, 0.01), 1.0)


class IterationExcess(msgspec.Struct, frozen=True, kw_only=True):
    """Excess time of iterations since an onset (`longer_s`), and their time before it (`healthy_s`): medians, in
    seconds.

    A slow component explains at most the excess that would arise if the whole iteration ran at its speed.
    """

    healthy_s: float
    longer_s: float
    slowest: float
    """Speed of the slowest device or link that is known to be slow since about the onset, including those about to be
    declared slow. Components that have been slow for longer are already part of the time before the onset."""

    @property
    def mostly_unexplained(self) -> bool:
        """Whether all known slow components together explain less than half of the excess, so that another cause
        exists."""
        return self.mostly_unexplained_with(1.0)

    def mostly_unexplained_with(self, speed: float) -> bool:
        """Return whether less than half of the excess would be explained even if another component of this speed were
        slow."""
        return self._is_notable and self._explained_s(min(self.slowest, speed)) < self.longer_s / 2

    def explanation(self, speed: float) -> str:
        """Return, in words, how much of the excess a component of this speed explains; empty if the excess is too small
        to need an explanation."""
        explained_s = self._explained_s(speed)
        text = f"accounts for up to {explained_s:.3g} s of the {self.longer_s:.3g} s excess per iteration"
        if self.mostly_unexplained:
            text = f"{text}; {self.longer_s - explained_s:.3g} s unexplained"
        return text if self._is_notable else ""

    def unexplained(self) -> str:
        """Return the log line for an excess that is mostly unexplained. It is logged before the verdicts."""
        explained_s = self._explained_s(self.slowest)
        left_s = self.longer_s - explained_s
        return (
            f"job: iterations take {self.longer_s:.3g} s longer, {left_s:.3g} s of it unexplained: the slow devices "
            f"and links found account for up to {explained_s:.3g} s"
        )

    @property
    def _is_notable(self) -> bool:
        return self.longer_s > MIN_EXCESS_SHARE * self.healthy_s

    def _explained_s(self, speed: float) -> float:
        return min(self.healthy_s * (1.0 / speed - 1.0), self.longer_s)


def excess(job: Job, since: int, speeds: Iterable[float]) -> IterationExcess | None:
    """Return the excess iteration time since iteration `since`; None if there are too few iterations under the plan.
    `speeds`: those of new verdicts.

    Durations are divided by the predicted times to remove the influence of the workload. The ratio before the onset
    shows how far off the predictions are.
    """
    judged = [(n, seconds / predicted, predicted) for n, seconds, predicted in job.inquiry.judged]
    before = [ratio for n, ratio, _ in judged if n < since]
    after = [(ratio, predicted) for n, ratio, predicted in judged if n >= since]
    if min(len(before), len(after)) < MIN_EXCESS_SAMPLES:
        return None
    usual, now, scale = (statistics.median(column) for column in (before, *zip(*after, strict=True)))
    devices = {job.device_of(rank) for rank in job.record.working}.intersection(job.record.slow)
    slow_ones = [*(job.record.slow[device] for device in devices), *job.record.slow_links.values()]
    lately = [slow.speed for slow in slow_ones if slow.since >= since - SAME_CAUSE_ITERATIONS]
    return IterationExcess(
        healthy_s=usual * scale, longer_s=max(now - usual, 0.0) * scale, slowest=min((*speeds, *lately, 1.0))
    )


PARTS_OF_ITERATION: tuple[Component, ...] = ("collective", "reduction", "data")


def component(finding: Finding) -> Component:
    """Return the component that a finding is about. A finding without ranks is about the job, unless it is about a part
    of an iteration."""
    if finding.link is not None:
        return "link"
    return finding.component if finding.ranks or finding.component in PARTS_OF_ITERATION else "job"


def opened(job: Job, finding: Finding, ranks: tuple[int, ...] = (), evidence: str = "") -> None:
    """Journal the beginning of a suspicion. `ranks`: all suspects, the most likely first."""
    job.log(_entry(job, finding, ranks, evidence or f"slow, {change(finding)}: {finding.evidence}"))


def ended(job: Job, outcome: Outcome, why: str, probe: int = 0, ranks: tuple[int, ...] | None = None) -> None:
    """Journal the outcome of the open suspicion. `ranks`: all suspects if some have been added since the beginning;
    `probe`: number of the probe, 0 for none."""
    suspected = job.record.suspects_slow
    assert suspected is not None
    ranks = suspected.ranks if ranks is None else ranks
    job.log(msgspec.structs.replace(suspected, evidence=why, cleared=True, outcome=outcome, probe=probe, ranks=ranks))


def dropped(job: Job, finding: Finding, why: str, outcome: Outcome = "dropped") -> None:
    """Journal a finding that is not examined, as a suspicion that ends as it begins. Another suspicion may be open."""
    ranks = tuple(rank for rank in finding.ranks if rank in job.members)
    entry = _entry(job, finding, ranks, why)
    job.log(msgspec.structs.replace(entry, cleared=True, outcome=outcome))


def _entry(job: Job, finding: Finding, ranks: tuple[int, ...], evidence: str) -> Suspected:
    about, alarm = component(finding), finding.alarm
    suspect = ranks[0] if ranks and about == "device" else None  # a link is not the fault of one end alone
    return Suspected(
        rank=suspect,
        node=None if suspect is None else job.members[suspect].node,
        evidence=evidence,
        kind="slow",
        suspicion=job.record.suspicions + 1,
        component=about,
        ranks=finding.link or ranks,
        iteration=finding.iteration,
        detected=finding.detected,
        change=finding.change,
        confidence=finding.confidence,
        test="" if alarm is None else alarm.test,
        statistic=None if alarm is None else alarm.statistic,
        threshold=None if alarm is None else alarm.threshold,
    )
