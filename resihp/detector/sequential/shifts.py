"""Statements of `resihp.detector.sequential.peer_cusum` about a series. Facts only."""

from __future__ import annotations

from typing import Literal

import msgspec


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """State of a test when it raised an alarm: `statistic` against the `threshold` that it has to reach.

    `test`: "log evidence", natural logarithm of how much more likely the observations are after a change; or "shift",
    deviation of a level from the healthy one in log units.
    """

    test: str
    statistic: float
    threshold: float


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """Series `series` left its level at `onset`. Levels are log ratios to its healthy level: 0 healthy, > 0 slower."""

    series: int
    kind: Literal["slow", "recovered"]
    onset: int
    detected: int
    before: float
    after: float
    confidence: float
    """Posterior probability in (0, 1), if a shift of any series once in 10,000 iterations is usual."""
    alarm: Alarm | None = None
    """None if alarms of other series show it."""


class SeriesStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A series' standing in the test; levels are log ratios to its healthy level, disregarding any cooldown."""

    level: float
    """Recent level; NaN while it is unknown."""
    noise: float
    """Standard deviation of one value, log units."""
    evidence: float
    """Evidence that it is slower, relative to the threshold of an alarm."""
    slow: bool
    pardon: float
    """Shift that counts as healthy because a measurement cleared it, log units."""
    pardoned_until: int | None
    """Index at which that ends."""
    peers: int


class Cooldown(msgspec.Struct, frozen=True, kw_only=True):
    """Cooldown of a series that was measured to be healthy although it looks slower."""

    shift: float
    """The cleared shift, log units."""
    until: int
    """Index at which the cooldown ends."""
    patience: int
    """Length of the cooldown in values; the next one is twice as long."""
