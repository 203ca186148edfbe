"""Tests whether whole iterations take longer than expected; this covers everything, but cannot localise. Pure, no
clock.

Tests the logarithm of measured over expected seconds, or of plain seconds if there is no expectation, for change points
(`resihp.detector.sequential.changes`). Called by `resihp.detector.online.monitor`.
"""

from __future__ import annotations

import math

import msgspec

from resihp.detector.findings import Finding
from resihp.detector.sequential.changes import ChangeDetector
from resihp.detector.sequential.levels import ChangePoint
from resihp.detector.sequential.shifts import Alarm

ASSUMED_CORRELATION = 0.5
"""Assumed lag-one correlation of iterations, until the series has shown its own."""
RECOVERY_CONFIDENCE = 0.99
"""Confidence that slowness found under another plan is over."""
RECOVERED_SHARE = 0.1
"""A slow-down of which less than this share is left is over: after so long, the healthy level is no better known."""
MAX_HELD_ITERATIONS = 4
"""Iterations for which values are held back while ranks or links gather evidence that may have the same cause."""


class WholeTest:
    """Test of one series of log ratios, or of logs. `description` names the series in the evidence.

    `least`: smallest change that counts; `floor`: lower bound of the noise. Both in log units.
    """

    def __init__(self, description: str, *, least: float, floor: float, false_alarms_per: int) -> None:
        self._what, self._least, self._floor, self._false_alarms_per = description, least, floor, false_alarms_per
        self._held: list[tuple[int, float]] = []
        self._slow = False
        self._well = math.nan
        """Level of healthy values, as learnt before the present slowness began."""
        self.begin()

    def slow_before(self, healthy_level: float = math.nan) -> None:
        """Treat the channel as slow from before its first value until a recovery is seen.

        `healthy_level`: approximate healthy level, if known.
        """
        self._slow, self._well = True, healthy_level

    def begin(self, expected: float | None = None) -> None:
        """Learn the level anew and forget held values. Slowness persists until a recovery is seen.

        `expected`: approximate level of healthy values, if known. A level that turns out much slower while it is learnt
        anew is then not taken for healthy, unless slowness was already reported.
        """
        self._held.clear()
        self._seen = False
        if self._slow and expected is not None:
            self._well = expected
        self._expected = expected = None if self._slow else expected
        self._detector = ChangeDetector(
            correlation=ASSUMED_CORRELATION,
            familiar=True,
            least=self._least,
            false_alarms_per=self._false_alarms_per,
            floor=self._floor,
            expected=expected,
        )

    @property
    def expected(self) -> float | None:
        """Approximate level of healthy values: as learnt, else as given; None if neither."""
        if self._slow:
            return self._well if math.isfinite(self._well) else None
        return self._detector.healthy if self._detector.ready else self._expected

    @property
    def ready(self) -> bool:
        return self._detector.ready

    @property
    def slow(self) -> bool:
        """Whether slowness was reported, and its recovery was not."""
        return self._slow

    @property
    def level(self) -> float:
        """Level of healthy values; NaN while it is learnt."""
        return self._well if self._slow and math.isfinite(self._well) else self._detector.healthy

    @property
    def now(self) -> float:
        """Present level, including slowness; NaN while it is learnt."""
        return self._detector.level

    def update(self, iteration: int, value: float, *, hold: bool = False) -> tuple[Finding, ...]:
        """Take an iteration's value. `hold`: wait, because other tests may be about to find the cause of this value."""
        self._held.append((iteration, value))
        if hold and len(self._held) <= MAX_HELD_ITERATIONS:
            return ()
        values, self._held = self._held, []
        findings: list[Finding] = []
        for held_iteration, held_value in values:
            change = self._detector.update(held_iteration, held_value)
            findings += [] if change is None else self._as_findings(iteration, change)
        if not self._seen and self._detector.ready:
            self._seen = True
            findings += self._recovery(iteration)
        return _merged(findings)

    def _recovery(self, iteration: int) -> list[Finding]:
        """Return a recovery if, by the newly learnt level, earlier slowness is over."""
        deviation = self._detector.healthy - self._well
        if not self._slow or not abs(deviation) < self._least / 2:  # NaN if the former healthy level is unknown
            return []
        self._slow = False
        return [self._finding(iteration, iteration, deviation, RECOVERY_CONFIDENCE, None, slow=False)]

    def _as_findings(self, iteration: int, change: ChangePoint) -> list[Finding]:
        """Return a change point as findings; iterations that became faster than ever are not one."""
        shift = change.after - self.level
        slow = self._detector.changed and shift > 0.0
        if self._slow:  # and the level may have been learnt anew since
            slow = slow or (not self._detector.changed and self._detector.healthy - self.level > self._least)
            slow = slow and shift > RECOVERED_SHARE * (change.before - self.level)
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
                f"{self._what}: {math.exp(shift):.3f} times the healthy time since iteration {onset}, "
                f"noise {self._detector.noise:.1%}"
            ),
        )


def _merged(findings: list[Finding]) -> tuple[Finding, ...]:
    """Merge a slow-down with an immediate change of its size: only other tests' findings lie in between."""
    if len(findings) < 2 or any(finding.kind != "fail-slow" for finding in findings):
        return tuple(findings)
    largest = max(findings, key=lambda finding: finding.change)
    return (msgspec.structs.replace(largest, iteration=min(finding.iteration for finding in findings)),)
