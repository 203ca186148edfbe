"""Suspicions to be slow, as they stand in the journal: numbered, told whole, one open at a time, each with an outcome.

The numbers are those of silence as well (`fail_stop.silence`). Decides nothing. Called by `slow_devices`, `slow_links`,
`slow_parts` and `slowness`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from resihp.controller.state.job import Job
from resihp.detector.findings import Component, Finding
from resihp.record.describe import rank_list
from resihp.record.journal import Outcome, Suspected

SAME = 8
"""Iterations between onsets that may still have one cause."""
OTHER = 0.05
"""By so much a speed has to differ from that of the verdict to be another one."""
FEW = 3
"""Iterations before an onset, and after it, that tell by how much they take longer."""
WORTH_A_WORD = 0.10
"""Of an iteration: what takes less longer needs no explanation."""
MOST_RANKS = 16
"""Ranks that a line names."""


def change(finding: Finding) -> str:
    return f"{finding.change:+.0%} since iteration {finding.iteration}"


def some(ranks: Sequence[int]) -> str:
    """`ranks 0-15 and 4 more`."""
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"{rank_list(ranks[:MOST_RANKS])}{more}"


def speed_of(finding: Finding) -> float:
    """What the change of time comes to."""
    return possible(1.0 / (1.0 + max(finding.change, 0.0)))


def possible(speed: float) -> float:
    """A speed that a verdict can have: others are a mistake of some clock."""
    return min(max(speed, 0.01), 1.0)


class IterationExcess(msgspec.Struct, frozen=True, kw_only=True):
    """By how much iterations take longer than before an onset, and what they took before; medians, in seconds.

    Something of a speed explains at most what it would be if all of an iteration were as slow.
    """

    healthy_s: float
    longer_s: float
    slowest: float
    """Speed of the slowest device or link that is known to be slow since about then, those that are about to be told
    included. What has been so for longer is part of what iterations took before."""

    @property
    def left(self) -> bool:
        """Whether all that is known to be slow explains less than half: then it is not the cause, and most is
        unexplained."""
        return self.leaves_most(1.0)

    def leaves_most(self, speed: float) -> bool:
        """The same where something of that speed is slow as well."""
        return self._counts and self._explained_s(min(self.slowest, speed)) < self.longer_s / 2

    def told(self, speed: float) -> str:
        """What something of that speed explains, in words; empty where iterations take hardly longer."""
        explained_s = self._explained_s(speed)
        told = f"explains up to {explained_s:.3g} of the {self.longer_s:.3g} s that iterations take longer"
        if self.left:
            told = f"{told}; {self.longer_s - explained_s:.3g} s unexplained"
        return told if self._counts else ""

    def unexplained(self) -> str:
        """A line of its own, ahead of what was found, where most is left."""
        explained_s = self._explained_s(self.slowest)
        left_s = self.longer_s - explained_s
        return (
            f"job: iterations take {self.longer_s:.3g} s longer, {left_s:.3g} s of it unexplained: what was found slow "
            f"explains up to {explained_s:.3g} s"
        )

    @property
    def _counts(self) -> bool:
        return self.longer_s > WORTH_A_WORD * self.healthy_s

    def _explained_s(self, speed: float) -> float:
        return min(self.healthy_s * (1.0 / speed - 1.0), self.longer_s)


def excess(job: Job, since: int, speeds: Iterable[float]) -> IterationExcess | None:
    """Since then, beside verdicts of these speeds; None while too few iterations of the plan tell.

    What was predicted for each takes its workload out, and how far off predictions are is taken from those before.
    """
    judged = [(n, seconds / predicted, predicted) for n, seconds, predicted in job.inquiry.judged]
    before = [ratio for n, ratio, _ in judged if n < since]
    after = [(ratio, predicted) for n, ratio, predicted in judged if n >= since]
    if min(len(before), len(after)) < FEW:
        return None
    usual, now, scale = (statistics.median(of) for of in (before, *zip(*after, strict=True)))
    devices = {job.device_of(rank) for rank in job.record.working}.intersection(job.record.slow)
    known = [*(job.record.slow[device] for device in devices), *job.record.slow_links.values()]
    lately = [slow.speed for slow in known if slow.since >= since - SAME]
    return IterationExcess(
        healthy_s=usual * scale, longer_s=max(now - usual, 0.0) * scale, slowest=min((*speeds, *lately, 1.0))
    )


PARTS: tuple[Component, ...] = ("collective", "reduction", "data")


def component(finding: Finding) -> Component:
    """Of a finding of nobody in particular: the job."""
    if finding.link is not None:
        return "link"
    return finding.component if finding.ranks or finding.component in PARTS else "job"


def opened(job: Job, finding: Finding, ranks: tuple[int, ...] = (), evidence: str = "") -> None:
    """A suspicion begins. `ranks`: all suspects, the most likely first."""
    job.log(_entry(job, finding, ranks, evidence or f"slow, {change(finding)}: {finding.evidence}"))


def ended(job: Job, outcome: Outcome, why: str, probe: int = 0, ranks: tuple[int, ...] | None = None) -> None:
    """The open one came to this. `ranks`: all suspects, where some have joined it."""
    suspected = job.record.suspects_slow
    assert suspected is not None
    ranks = suspected.ranks if ranks is None else ranks
    job.log(msgspec.structs.replace(suspected, evidence=why, cleared=True, outcome=outcome, probe=probe, ranks=ranks))


def dropped(job: Job, finding: Finding, why: str, outcome: Outcome = "dropped") -> None:
    """A finding that nobody looks into: a suspicion that ends as it begins, whichever is open."""
    ranks = tuple(rank for rank in finding.ranks if rank in job.members)
    entry = _entry(job, finding, ranks, why)
    job.log(msgspec.structs.replace(entry, cleared=True, outcome=outcome))


def _entry(job: Job, finding: Finding, ranks: tuple[int, ...], evidence: str) -> Suspected:
    about, alarm = component(finding), finding.alarm
    suspect = ranks[0] if ranks and about == "device" else None  # neither end of a link is it by itself
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
