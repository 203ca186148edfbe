"""Probes under way, second looks, and what is remembered of suspicions to be slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from resihp.detector.findings import Finding
from resihp.detector.probes import Judged, JudgedLink
from resihp.protocol.messages import Probed
from resihp.protocol.messages import Speed as DeviceSpeed
from resihp.record.state import Device, Link

JUDGED = 100
"""Iterations of a plan that are remembered, for what they take longer since an onset."""


@dataclass(kw_only=True)
class Examination:
    """A probe under way: who is measured, and for what."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    asked: tuple[int, ...]
    asked_at: float
    answers: dict[int, Probed] = field(default_factory=dict)
    silent: set[int] = field(init=False)
    """Who was asked and has not answered."""
    findings: list[Finding] = field(default_factory=list)
    """What it is to confirm; what is found meanwhile of the same devices as well."""
    ahead_s: float = 0.0
    """How long after it was asked it can be answered."""
    after: int = 0
    """The furthest iteration whose step was reported when it was asked."""
    looks: int = 1
    """How often devices in doubt were measured."""
    best: dict[int, DeviceSpeed] = field(default_factory=dict)
    """Of what devices in doubt and their witnesses gave in all looks but the first; of suspects, all but the last."""
    failed: dict[int, str] = field(default_factory=dict)
    """Errors that suspects answered with in former looks: a device that computes wrongly once is not fit."""
    settled: dict[int, Judged] = field(default_factory=dict)
    """Devices that were in doubt: what these looks found."""
    slow_looks: tuple[JudgedLink, ...] = ()
    """Of a link: what former looks found, all of them that it is slow."""
    _settled: int = 0
    """So many of `asked` have answered or died."""

    def __post_init__(self) -> None:
        self.silent = set(self.asked)

    def waits(self, may_answer: Callable[[int], bool]) -> bool:
        """Whether anybody is silent who may still answer; who once may not never will."""
        while self._settled < len(self.asked):
            rank = self.asked[self._settled]
            if rank in self.silent and may_answer(rank):
                return True
            self._settled += 1
        return False

    @property
    def link(self) -> Link | None:
        """That is under suspicion."""
        return self.findings[0].link if self.findings else None

    def answered(self, rank: int, answer: Probed) -> None:
        self.answers[rank] = answer
        self.silent.discard(rank)


@dataclass(kw_only=True)
class SecondLooks:
    """Devices in doubt after an examination, measured again beside the same witnesses."""

    first: Examination
    """What was answered first, kept until they are judged."""
    doubted: tuple[int, ...]
    witnesses: tuple[int, ...]
    turns: list[tuple[int, ...]] = field(default_factory=list)
    """Who is measured next, and after them, in the look under way."""
    taken: int = 0
    """Looks after the first one, with the one under way."""


@dataclass
class Rechecks:
    """Devices that are measured again: those in doubt, and those that stand by."""

    second_looks: dict[int, SecondLooks] = field(default_factory=dict)
    """Of devices in doubt, by the number of the probe under way for them."""
    slow_at: float = 0.0
    """When what stands by for being slow is measured next."""
    unfit_at: dict[Device, float] = field(default_factory=dict)
    """When each device that a probe set aside is measured next, as far as that is settled."""


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """Iterations take longer although every device's probe is fine, or who is slow does not explain it: told once that
    has lasted."""

    finding: Finding
    epoch: int
    since: int
    """The furthest iteration when all were measured."""


@dataclass
class Inquiry:
    """What is remembered of suspicions to be slow, beside what is on record."""

    acquitted: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Ranks whose probe did not confirm one: the furthest iteration then, and the onset that was found first."""
    lasting: Lasting | None = None
    """What nobody could be blamed for."""
    healthy_s: float | None = None
    """What the last iteration would have taken where all is well, as far as that is known."""
    judged: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=JUDGED))
    """Iterations of the plan in effect: number, seconds, and what was predicted where all is well."""
