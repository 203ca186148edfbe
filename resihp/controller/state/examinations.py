"""Data about probes in progress, repeated probes of doubtful devices, and past suspicions of slowness."""

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
"""Number of latest iterations of a plan that are kept, to measure the excess time since an onset."""


@dataclass(kw_only=True)
class Examination:
    """A probe in progress: the ranks that are measured, the reason, and the answers so far."""

    probe: int
    occasion: Literal["start", "join", "suspicion", "standby"]
    asked: tuple[int, ...]
    asked_at: float
    answers: dict[int, Probed] = field(default_factory=dict)
    silent: set[int] = field(init=False)
    """Ranks that have not answered."""
    findings: list[Finding] = field(default_factory=list)
    """Findings that the probe is to confirm, including later findings about the same devices."""
    ahead_s: float = 0.0
    """Seconds from the order until ranks can answer; above 0 if the measurement is announced for a later iteration."""
    after: int = 0
    """The latest iteration with a reported step when the probe was ordered."""
    looks: int = 1
    """Number of times that doubtful devices were measured."""
    best: dict[int, DeviceSpeed] = field(default_factory=dict)
    """Best speeds of doubtful devices and of their reference devices in all looks but the first. For suspects: in all
    looks but the last."""
    failed: dict[int, str] = field(default_factory=dict)
    """Errors of suspects in earlier looks. A device that computes a wrong result once is not fit."""
    settled: dict[int, Judged] = field(default_factory=dict)
    """Judgements on doubtful devices, from all looks."""
    slow_looks: tuple[JudgedLink, ...] = ()
    """Earlier looks at the suspected link, all of which found it slow."""
    _settled: int = 0
    """Number of ranks at the start of `asked` that have answered or can no longer answer."""

    def __post_init__(self) -> None:
        self.silent = set(self.asked)

    def waits(self, may_answer: Callable[[int], bool]) -> bool:
        """Return whether any silent rank may still answer. `may_answer`: whether a rank may; once False for a rank, it
        must stay so."""
        while self._settled < len(self.asked):
            rank = self.asked[self._settled]
            if rank in self.silent and may_answer(rank):
                return True
            self._settled += 1
        return False

    @property
    def link(self) -> Link | None:
        """The suspected link; None if the probe is not about a link."""
        return self.findings[0].link if self.findings else None

    def answered(self, rank: int, answer: Probed) -> None:
        self.answers[rank] = answer
        self.silent.discard(rank)


@dataclass(kw_only=True)
class SecondLooks:
    """Repeated measurements of devices that are doubtful after an examination, always together with the same reference
    devices."""

    first: Examination
    """The first examination, kept until all devices are judged."""
    doubted: tuple[int, ...]
    references: tuple[int, ...]
    turns: list[tuple[int, ...]] = field(default_factory=list)
    """Groups of ranks that are still to be measured in the present look, one group after another."""
    taken: int = 0
    """Number of looks after the first one, including the one in progress."""


@dataclass
class Rechecks:
    """Devices to measure again: doubtful devices, and devices that stand by."""

    second_looks: dict[int, SecondLooks] = field(default_factory=dict)
    """Repeated measurements in progress, by the number of their present probe."""
    slow_at: float = 0.0
    """Time of the next probe of devices that stand by because they are slow."""
    unfit_at: dict[Device, float] = field(default_factory=dict)
    """Time of the next probe of each unfit device; a device without an entry has none scheduled."""


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """A finding of longer iterations that the probes do not explain: every device passed its probe, or the slow devices
    account for only a part. It becomes a verdict on the job if it lasts."""

    finding: Finding
    epoch: int
    since: int
    """The latest reported iteration when all devices had been measured."""


@dataclass
class Inquiry:
    """Volatile data about past suspicions of slowness."""

    cleared: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Ranks with a probe that did not confirm a suspicion: the latest reported iteration at that time, and the
    iteration of the first onset."""
    lasting: Lasting | None = None
    """The open finding that no device explains; None if there is none."""
    healthy_s: float | None = None
    """Predicted healthy seconds of the last iteration for which a prediction was possible; None before the first."""
    judged: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=MAX_JUDGED_ITERATIONS))
    """(iteration, seconds, predicted healthy seconds) of the latest iterations under the plan in effect."""
