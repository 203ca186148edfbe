"""What the detector says of an iteration. Facts only; who made them: `resihp.detector.online.monitor` and its
channels."""

from __future__ import annotations

from typing import Literal

import msgspec

Known = Literal["warming up", "workload", "plain times"]


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


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration, judged."""

    predicted_s: float | None
    """What it would have taken where all is well; None while that is not known."""
    findings: tuple[Finding, ...] = ()
    known: Known
    """What the judgement rests on. "warming up": too little is known yet to find anything."""
