"""Defines the results of the detector for one iteration: findings, and the judgement of each rank.

Made by `resihp.detector.online.monitor` and its channels, and by `resihp.detector.rivals`; the controller decides on
reactions. Plain data, nothing is computed here.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.detector.sequential.shifts import Alarm

Known = Literal["warming up", "workload", "plain times"]
Component = Literal["device", "link", "job", "collective", "reduction", "data"]
"""The slow component. "device": a rank's own work. "link": transfers from one rank to another. "job": whole iterations,
without any rank that stands out. "collective": collectives of one tensor-parallel group. "reduction": the gradient
reduction. "data": a first stage's wait for its first micro-batch."""


class Intermittent(msgspec.Struct, frozen=True, kw_only=True):
    """Slowness that comes and goes."""

    share: float
    """Share of the iterations that are slow, 0 to 1."""
    factor: float
    """Time of a rank's own work in a slow iteration, over its healthy time."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding: a rank, a link or the whole job became slow, became slower still, or recovered."""

    kind: Literal["fail-slow", "recovered", "workload"]
    iteration: int
    """First iteration of the change (onset)."""
    detected: int
    """Iteration after which the change was detected."""
    change: float
    """Slow-down: time over healthy time, minus 1. The time is that of a rank's own work or of a link's transfers; for
    other components, that of the whole iteration."""
    confidence: float
    """Posterior probability of the finding, in (0, 1)."""
    ranks: tuple[int, ...]
    """Suspected ranks, the most likely first; empty if no rank stands out, and for most links."""
    link: tuple[int, int] | None
    """Sending and receiving rank of the slow link; None if no link is concerned."""
    evidence: str
    """The measurements behind the finding, in words."""
    component: Component = "device"
    """The slow component. For "collective", `ranks` are the ranks of the tensor-parallel group; for "reduction" and
    "data", the ranks that wait. A finding without ranks and without a link concerns the whole job."""
    intermittent: Intermittent | None = None
    """Set if the ranks are slow in some iterations only; `change` is then the average over all iterations."""
    alarm: Alarm | None = None
    """State of the statistical test that raised the finding; None if no test did."""
    transfers: float | None = None
    """For component "job": factor by which all transfers between nodes take longer since the onset; None if the factor
    is small or unknown."""


class RankStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of one rank, and the figures behind it."""

    rank: int
    reported: int | None
    """Last iteration with measurements of the rank; None if there was none yet."""
    level: float
    """Recent time of the rank's own work over its healthy time; 1 is healthy, NaN while the healthy time is unknown."""
    noise: float
    """Standard deviation of the rank's time in one iteration, relative to that time."""
    evidence: float
    """Accumulated evidence that the rank is slow, as a fraction of the threshold: a finding is raised at 1."""
    slow: bool
    """Whether a finding has reported the rank as slow, and it has not recovered."""
    pardon: float
    """Slow-down, relative, that counts as healthy until `pardoned_until`, because a probe found the rank healthy; 0 if
    there is none."""
    pardoned_until: int | None
    """Iteration at which `pardon` ends; None without a pardon."""
    peers: int
    """Number of ranks with the same work, with which the rank is compared from the start; 0: only with its own past."""


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """The detector's judgement of one iteration."""

    predicted_s: float | None
    """Seconds that the iteration would have taken with all ranks and links healthy; None while that is unknown."""
    findings: tuple[Finding, ...] = ()
    known: Known
    """Basis of the judgement. "warming up": too little has been learnt for findings. "workload": predictions from the
    iteration's sequence lengths. "plain times": iteration times alone."""
