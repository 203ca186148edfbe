"""What the detector says of an iteration. Facts only; who made them: `resihp.detector.online.monitor` and its
channels."""

from __future__ import annotations

from typing import Literal

import msgspec

from resihp.detector.sequential.shifts import Alarm

Known = Literal["warming up", "workload", "plain times"]
Component = Literal["device", "link", "job", "collective", "reduction", "data"]
"""What is slow. "device": a rank's own work. "link": transfers from one rank to another. "job": whole iterations, and
nobody stands out. "collective": tensor-parallel collectives of a stage's group. "reduction": the sums of gradients.
"data": the wait for a stage's first micro-batch."""


class Intermittent(msgspec.Struct, frozen=True, kw_only=True):
    """Slow now and then: in `share` of the iterations, at `factor` times the healthy time in those."""

    share: float
    factor: float


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something became slow, slower still, or healthy again."""

    kind: Literal["fail-slow", "recovered", "workload"]
    iteration: int
    """Of the onset."""
    detected: int
    change: float
    """Time relative to healthy, minus 1: of a rank's own work, of a link's transfers, else of the whole iteration."""
    confidence: float
    """Posterior probability, in (0, 1)."""
    ranks: tuple[int, ...]
    """Suspects, the most likely first; empty where nobody stands out, and for most links."""
    link: tuple[int, int] | None
    """Ranks: sender, receiver."""
    evidence: str
    component: Component = "device"
    """`ranks` of a collective are its group; of a reduction, of data, those that wait. A finding without ranks or link
    is the job's."""
    intermittent: Intermittent | None = None
    """Where it is not slow all the time; `change` is then what it costs on average."""
    alarm: Alarm | None = None
    """What the test had come to; None where none raised it."""
    transfers: float | None = None
    """Of whole iterations: by how many times transfers between nodes, all of them, take longer since then."""


class RankStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank stands with the detector: why it is suspected, or why it is not."""

    rank: int
    reported: int | None
    """The iteration that it was last measured in."""
    level: float
    """Its own work's time over what is healthy for it, of late; 1 healthy, NaN while that is not known."""
    noise: float
    """Standard deviation of one iteration's, relative."""
    evidence: float
    """What has been gathered against it over what makes a finding: 1 is one."""
    slow: bool
    pardon: float
    """By how much of its level it is taken to be healthy all the same, since a probe said so; relative."""
    pardoned_until: int | None
    """Iteration at which that ends."""
    peers: int
    """Others with the same work, that it is compared with from the start; 0: with its own past alone."""


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration, judged."""

    predicted_s: float | None
    """What it would have taken where all is well; None while that is not known."""
    findings: tuple[Finding, ...] = ()
    known: Known
    """What the judgement rests on. "warming up": too little is known yet to find anything."""
