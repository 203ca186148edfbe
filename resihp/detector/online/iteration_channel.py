"""Whether whole iterations take longer than expected: sees all there is, and cannot say where. Pure, no clock.

Tests the logarithm of measured over expected seconds, or of plain seconds where nothing is expected, for change points
(`resihp.detector.sequential.changes`). The caller is `resihp.detector.online.monitor`.
"""

from __future__ import annotations

import math

from resihp.detector.findings import Finding
from resihp.detector.sequential.changes import ChangeDetector, ChangePoint

CORRELATION = 0.5
"""Of values from one iteration to the next, until they have shown it themselves."""
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
        self.begin()

    def begin(self, expected: float | None = None) -> None:
        """Learn the level anew; values that are held are forgotten. What is slow stays so until it is seen to end.

        `expected`: about the level of healthy values, if it is known: what becomes much slower while it is learnt anew
        is not taken for healthy, unless that was told already.
        """
        self._held.clear()
        self._expected = expected = None if self._slow else expected
        self._detector = ChangeDetector(
            correlation=CORRELATION,
            least=self._least,
            false_alarms_per=self._false_alarms_per,
            floor=self._floor,
            expected=expected,
        )

    @property
    def expected(self) -> float | None:
        """About the level of healthy values: as learnt, else as told; None if neither."""
        return self._detector.healthy if self._detector.ready else self._expected

    @property
    def ready(self) -> bool:
        return self._detector.ready

    @property
    def level(self) -> float:
        """Of healthy values; NaN while it is learnt."""
        return self._detector.healthy

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
        return tuple(findings)

    def _told(self, iteration: int, change: ChangePoint) -> list[Finding]:
        """That iterations became faster than ever is no finding."""
        shift = change.after - self._detector.healthy
        slow = self._detector.changed and shift > 0.0
        if not slow and not self._slow:
            return []
        self._slow = slow
        return [
            Finding(
                kind="fail-slow" if slow else "recovered",
                iteration=change.onset,
                detected=iteration,
                change=math.expm1(shift),
                confidence=change.confidence,
                ranks=(),
                link=None,
                evidence=(
                    f"{self._what}: at {math.exp(shift):.3f} of the healthy time since iteration {change.onset}, "
                    f"noise {self._detector.noise:.1%}"
                ),
            )
        ]
