"""What `resihp.detector.sequential.peer_cusum` says of a series. Facts only."""

from __future__ import annotations

from typing import Literal

import msgspec


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """What a test had come to when it raised an alarm: `statistic` against the `threshold` that it has to reach.

    `test`: "log evidence", natural logarithm of how much more likely what was seen is after a change, or "shift", log
    units by which a level is away from the healthy one.
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
    """Posterior probability in (0, 1), a shift of any series once in 10,000 iterations being usual."""
    alarm: Alarm | None = None
    """None where others' alarms show it."""


class SeriesStanding(msgspec.Struct, frozen=True, kw_only=True):
    """How a series stands with the test; levels are log ratios to its healthy level without any pardon."""

    level: float
    """Of late; NaN while it is not known."""
    noise: float
    """Standard deviation of one value, log units."""
    evidence: float
    """Gathered for its being slower, over what raises an alarm."""
    slow: bool
    pardon: float
    """By how much a measurement that said it is healthy has raised the healthy level, log units."""
    pardoned_until: int | None
    """Index at which that ends."""
    peers: int


class Pardon(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement said that a series is healthy although it is slower: it is, for a while."""

    shift: float
    """By how much it was slower, log units."""
    until: int
    """Index at which that ends."""
    patience: int
    """Values that it lasts for; the next one lasts twice as long."""
