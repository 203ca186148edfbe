"""Probes under way, second looks, and the memory of past suspicions of slowness."""

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

MAX_JUDGED_ITERATIONS = 100
"""Number of iterations of a plan that are remembered, to measure the excess time since an onset."""


@dataclass(kw_only=True)
class Examination:
    """A probe under way: the ranks that are measured, and the reason."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    asked: tuple[int, ...]
    asked_at: float
    answers: dict[int, Probed] = field(default_factory=dict)
    silent: set[int] = field(init=False)
    """Ranks that were asked and have not answered."""
    findings: list[Finding] = field(default_factory=list)
    """Findings it is to confirm; later findings about the same devices included."""
    ahead_s: float = 0.0
    """Seconds after the order until it can be answered."""
    after: int = 0
    """The furthest iteration whose step had been reported when the order was given."""
    looks: int = 1
    """Number of times that devices in doubt were measured."""
    best: dict[int, DeviceSpeed] = field(default_factory=dict)
    """Best speeds of devices in doubt and their references in all looks but the first; of suspects, in all looks but
    the last."""
    failed: dict[int, str] = field(default_factory=dict)
    """Errors of suspects in former looks: a device that computes wrongly once is not fit."""
    settled: dict[int, Judged] = field(default_factory=dict)
    """Judgements of these looks on devices that were in doubt."""
    slow_looks: tuple[JudgedLink, ...] = ()
    """Former looks at a link, all of which found it slow."""
    _settled: int = 0
    """Number of ranks at the start of `asked` that have answered or died."""

    def __post_init__(self) -> None:
        self.silent = set(self.asked)

    def waits(self, may_answer: Callable[[int], bool]) -> bool:
        """Return whether any silent rank may still answer; a rank that may not answer once never will."""
        while self._settled < len(self.asked):
            rank = self.asked[self._settled]
            if rank in self.silent and may_answer(rank):
                return True
            self._settled += 1
        return False

    @property
    def link(self) -> Link | None:
        """The suspected link, if it is about one."""
        return self.findings[0].link if self.findings else None

    def answered(self, rank: int, answer: Probed) -> None:
        self.answers[rank] = answer
        self.silent.discard(rank)


@dataclass(kw_only=True)
class SecondLooks:
    """Devices in doubt after an examination, measured again together with the same reference devices."""

    first: Examination
    """The first examination, kept until all devices are judged."""
    doubted: tuple[int, ...]
    references: tuple[int, ...]
    turns: list[tuple[int, ...]] = field(default_factory=list)
    """Groups of ranks to measure, one after the other, in the look under way."""
    taken: int = 0
    """Number of looks after the first one, including the one under way."""


@dataclass
class Rechecks:
    """Devices to measure again: those in doubt, and those that stand by."""

    second_looks: dict[int, SecondLooks] = field(default_factory=dict)
    """Looks under way at devices in doubt, by the number of the current probe."""
    slow_at: float = 0.0
    """Time of the next measurement of devices that stand by for being slow."""
    unfit_at: dict[Device, float] = field(default_factory=dict)
    """Time of the next measurement of each device that a probe set aside, as far as it is scheduled."""


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """Excess iteration time although every device's probe is fine, or beyond the share of the slow devices; reported
    once it has lasted."""

    finding: Finding
    epoch: int
    since: int
    """The furthest iteration when all were measured."""


@dataclass
class Inquiry:
    """Memory of suspicions of slowness, beside the record."""

    cleared: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Ranks whose probe did not confirm a suspicion: the furthest iteration then, and the first onset found."""
    lasting: Lasting | None = None
    """The finding that no device explains."""
    healthy_s: float | None = None
    """Predicted healthy time of the last iteration, as far as it is known."""
    judged: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=MAX_JUDGED_ITERATIONS))
    """Iterations of the plan in effect: number, seconds, and the predicted healthy seconds."""
