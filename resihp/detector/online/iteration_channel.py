"""Tests whether whole iterations take longer than expected. Pure, no clock.

Every slow-down shows here, but this test cannot name the slow part. It searches for change points
(`resihp.detector.sequential.changes`) in the logarithm of measured over expected seconds, or of plain seconds if there
is no expectation. Called by `resihp.detector.online.monitor`.
"""

from __future__ import annotations

import math

import msgspec

from resihp.detector.findings import Finding
from resihp.detector.sequential.changes import ChangeDetector
from resihp.detector.sequential.levels import ChangePoint
from resihp.detector.sequential.shifts import Alarm

ASSUMED_CORRELATION = 0.5
"""Assumed lag-one correlation of iterations, until it can be estimated from the series."""
RECOVERY_CONFIDENCE = 0.99
"""Confidence of a recovery that is found when a level is learnt again, as under a new plan."""
RECOVERED_SHARE = 0.1
"""A slow-down is over if less than this share of it remains: the healthy level is not known more precisely after so
long."""
MAX_HELD_ITERATIONS = 4
"""Number of iterations for which values are held back while the tests of ranks or links gather evidence that may have
the same cause."""


class WholeTest:
    """Test of one series: the log ratio, or plain log, of the seconds of iterations (or of transfers).

    `description`: name of the series in the evidence. `least`: smallest change that is reported, and `floor`: lower
    bound of the noise, both in log units.
    """

    def __init__(self, description: str, *, least: float, floor: float, false_alarms_per: int) -> None:
        self._what, self._least, self._floor, self._false_alarms_per = description, least, floor, false_alarms_per
        self._held: list[tuple[int, float]] = []
        self._slow = False
        self._well = math.nan
        """Level of healthy values, learnt before the present slowness began; NaN if unknown."""
        self.begin()

    def slow_before(self, healthy_level: float = math.nan) -> None:
        """Regard the series as slow since before its first value, until a recovery is found.

        `healthy_level`: approximate healthy level; NaN if unknown.
        """
        self._slow, self._well = True, healthy_level

    def begin(self, expected: float | None = None) -> None:
        """Learn the level again, and discard the values held back. A slow series stays slow until a recovery is found.

        `expected`: approximate level of healthy values; None if unknown. A learnt level far above it is not taken for
        healthy, unless slowness was already reported.
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
        """Approximate level of healthy values: the learnt level, else the one given to `begin`; None if both are
        missing."""
        if self._slow:
            return self._well if math.isfinite(self._well) else None
        return self._detector.healthy if self._detector.ready else self._expected

    @property
    def ready(self) -> bool:
        return self._detector.ready

    @property
    def slow(self) -> bool:
        """Whether a slow-down was reported, and no recovery since."""
        return self._slow

    @property
    def level(self) -> float:
        """Level of healthy values; NaN while it is being learnt."""
        return self._well if self._slow and math.isfinite(self._well) else self._detector.healthy

    @property
    def now(self) -> float:
        """Present level of the values, including a slow-down; NaN while it is being learnt."""
        return self._detector.level

    def update(self, iteration: int, value: float, *, hold: bool = False) -> tuple[Finding, ...]:
        """Test the value of an iteration and return the findings.

        `hold`: hold the value back, because another test may be about to find its cause; at most
        `MAX_HELD_ITERATIONS` values are held back.
        """
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
        """Return a recovery if the newly learnt level is the former healthy level; else nothing."""
        deviation = self._detector.healthy - self._well
        if not self._slow or not abs(deviation) < self._least / 2:  # NaN if the former healthy level is unknown
            return []
        self._slow = False
        return [self._finding(iteration, iteration, deviation, RECOVERY_CONFIDENCE, None, slow=False)]

    def _as_findings(self, iteration: int, change: ChangePoint) -> list[Finding]:
        """Return the finding of a change point; nothing if iterations became faster without having been slow."""
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
    """Merge the slow-downs of one update into one finding: the largest change, since the earliest onset."""
    if len(findings) < 2 or any(finding.kind != "fail-slow" for finding in findings):
        return tuple(findings)
    largest = max(findings, key=lambda finding: finding.change)
    return (msgspec.structs.replace(largest, iteration=min(finding.iteration for finding in findings)),)
