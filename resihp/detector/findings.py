"""Statements of the detector about one iteration. Facts only, made by `resihp.detector.online.monitor` and its
channels."""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.detector.sequential.shifts import Alarm

Known = Literal["warming up", "workload", "plain times"]
Component = Literal["device", "link", "job", "collective", "reduction", "data"]
"""The component that is slow. "device": a rank's own work. "link": transfers from one rank to another. "job": whole
iterations, without any rank that stands out. "collective": tensor-parallel collectives of a stage's group.
"reduction": the gradient reduction. "data": the wait for a stage's first micro-batch."""


class Intermittent(msgspec.Struct, frozen=True, kw_only=True):
    """Slowness that comes and goes: in `share` of the iterations, at `factor` times the healthy time in those."""

    share: float
    factor: float


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something became slow, slower still, or healthy again."""

    kind: Literal["fail-slow", "recovered", "workload"]
    iteration: int
    """First iteration of the change (onset)."""
    detected: int
    change: float
    """Relative time minus 1: of a rank's own work, of a link's transfers, else of the whole iteration."""
    confidence: float
    """Posterior probability, in (0, 1)."""
    ranks: tuple[int, ...]
    """Suspects, the most likely first; empty if none stands out, and for most links."""
    link: tuple[int, int] | None
    """Ranks of sender and receiver."""
    evidence: str
    component: Component = "device"
    """For "collective", `ranks` are its group; for "reduction" and "data", the ranks that wait. A finding without ranks
    and link concerns the whole job."""
    intermittent: Intermittent | None = None
    """Set if it is slow only part of the time; `change` is then the average cost."""
    alarm: Alarm | None = None
    """State of the test that raised it; None if no test did."""
    transfers: float | None = None
    """For whole iterations: factor by which all transfers between nodes take longer since the onset."""


class RankStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's current standing: why it is suspected, or why it is not."""

    rank: int
    reported: int | None
    """Last iteration in which it was measured."""
    level: float
    """Recent time of its own work relative to its healthy time; 1 is healthy, NaN while the healthy time is unknown."""
    noise: float
    """Standard deviation of one iteration's time, relative."""
    evidence: float
    """Accumulated evidence of slowness, relative to the threshold of a finding: 1 raises one."""
    slow: bool
    pardon: float
    """Part of its level, relative, that counts as healthy for now because a probe cleared it."""
    pardoned_until: int | None
    """Iteration at which that allowance ends."""
    peers: int
    """Number of ranks with the same work, to which it is compared from the start; 0: only to its own past."""


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """The detector's judgement of one iteration."""

    predicted_s: float | None
    """Time that it would have taken with everything healthy; None while that is unknown."""
    findings: tuple[Finding, ...] = ()
    known: Known
    """Basis of the judgement. "warming up": too little has been learnt to find anything."""
