"""Whether whole iterations take longer than expected: sees all there is, and cannot say where. Pure, no clock.

Tests the logarithm of measured over expected seconds, or of plain seconds where nothing is expected, for change points
(`resihp.detector.sequential.changes`). The caller is `resihp.detector.online.monitor`.
"""

from __future__ import annotations

import math

import msgspec

from resihp.detector.findings import Finding
from resihp.detector.sequential.changes import ChangeDetector, ChangePoint
from resihp.detector.sequential.shifts import Alarm

CORRELATION = 0.5
"""Of values from one iteration to the next, until they have shown it themselves."""
CERTAIN = 0.99
"""Confidence that what was slow under another plan is over."""
REST = 0.1
"""What is left of a shift by less than this is over: the healthy level is not known better after so long."""
HELD = 4
"""Iterations that are not looked at while ranks or links gather evidence of what may be the same."""


class WholeTest:
    """One series of log ratios, or of logs. `what` tells in the evidence what they are.

    `least`: smallest change that counts; `floor`: noise is never taken to be smaller. Both in log units.
    """

    def __init__(self, what: str, *, least: float, floor: float, false_alarms_per: int) -> None:
        self._what, self._least, self._floor, self._false_alarms_per = what, least, floor, false_alarms_per
        self._held: list[tuple[int, float]] = []
        self._slow = False
        self._well = math.nan
        """Level of healthy values, as it was learnt before what is slow became so."""
        self.begin()

    def slow_before(self, well: float = math.nan) -> None:
        """All was slow before the first value: what comes is slow until it is seen to end. `well`: about the healthy
        level, if it is known."""
        self._slow, self._well = True, well

    def begin(self, expected: float | None = None) -> None:
        """Learn the level anew; values that are held are forgotten. What is slow stays so until it is seen to end.

        `expected`: about the level of healthy values, if it is known: what becomes much slower while it is learnt anew
        is not taken for healthy, unless that was told already.
        """
        self._held.clear()
        self._seen = False
        if self._slow and expected is not None:
            self._well = expected
        self._expected = expected = None if self._slow else expected
        self._detector = ChangeDetector(
            correlation=CORRELATION,
            familiar=True,
            least=self._least,
            false_alarms_per=self._false_alarms_per,
            floor=self._floor,
            expected=expected,
        )

    @property
    def expected(self) -> float | None:
        """About the level of healthy values: as learnt, else as told; None if neither."""
        if self._slow:
            return self._well if math.isfinite(self._well) else None
        return self._detector.healthy if self._detector.ready else self._expected

    @property
    def ready(self) -> bool:
        return self._detector.ready

    @property
    def slow(self) -> bool:
        """Whether it was told that all is slow, and not that it is over."""
        return self._slow

    @property
    def level(self) -> float:
        """Of healthy values; NaN while it is learnt."""
        return self._well if self._slow and math.isfinite(self._well) else self._detector.healthy

    @property
    def now(self) -> float:
        """Present level, that of what is slow included; NaN while it is learnt."""
        return self._detector.level

    def update(self, iteration: int, value: float, *, hold: bool = False) -> tuple[Finding, ...]:
        """Take an iteration's value. `hold`: wait, others may be about to find the reason of what it shows."""
        self._held.append((iteration, value))
        if hold and len(self._held) <= HELD:
            return ()
        held, self._held = self._held, []
        findings: list[Finding] = []
        for then, waiting in held:
            change = self._detector.update(then, waiting)
            findings += [] if change is None else self._told(iteration, change)
        if not self._seen and self._detector.ready:
            self._seen = True
            findings += self._over(iteration)
        return _merged(findings)

    def _over(self, iteration: int) -> list[Finding]:
        """Of what was slow before the level was learnt anew, and is not any more by that."""
        away = self._detector.healthy - self._well
        if not self._slow or not abs(away) < self._least / 2:  # NaN where nobody can tell
            return []
        self._slow = False
        return [self._finding(iteration, iteration, away, CERTAIN, None, slow=False)]

    def _told(self, iteration: int, change: ChangePoint) -> list[Finding]:
        """That iterations became faster than ever is no finding."""
        shift = change.after - self.level
        slow = self._detector.changed and shift > 0.0
        if self._slow:  # and the level was perhaps learnt anew since
            slow = slow or (not self._detector.changed and self._detector.healthy - self.level > self._least)
            slow = slow and shift > REST * (change.before - self.level)
        if not slow and not self._slow:
            return []
        if slow and not self._slow:
            self._well = self._detector.healthy
        self._slow = slow
        return [self._finding(iteration, change.onset, shift, change.confidence, change.alarm, slow=slow)]

    def _finding(
        self, iteration: int, onset: int, shift: float, confidence: float, alarm: Alarm | None, *, slow: bool
    ) -> Finding:
        return Finding(
            kind="fail-slow" if slow else "recovered",
            iteration=onset,
            detected=iteration,
            change=math.expm1(shift),
            confidence=confidence,
            alarm=alarm,
            ranks=(),
            link=None,
            component="job",
            evidence=(
                f"{self._what}: at {math.exp(shift):.3f} of the healthy time since iteration {onset}, "
                f"noise {self._detector.noise:.1%}"
            ),
        )


def _merged(findings: list[Finding]) -> tuple[Finding, ...]:
    """Slow, and at once slower still or less so, is one: in between stands only what others found meanwhile."""
    if len(findings) < 2 or any(finding.kind != "fail-slow" for finding in findings):
        return tuple(findings)
    largest = max(findings, key=lambda finding: finding.change)
    return (msgspec.structs.replace(largest, iteration=min(finding.iteration for finding in findings)),)
