"""Defines the results of `resihp.detector.sequential.peer_cusum`: shifts, and the state of a series. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """State of a test when it raised an alarm: the `statistic` reached the `threshold`.

    `test`: the kind of statistic. "log evidence": natural logarithm of the ratio of the observations' likelihoods with
    and without a change. "shift": deviation of the level from the healthy level, log units.
    """

    test: str
    statistic: float
    threshold: float


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """A shift: the level of series `series` changed at iteration `onset`, which was detected at iteration
    `detected`."""

    series: int
    kind: Literal["slow", "recovered"]
    onset: int
    detected: int
    before: float
    """Level before the shift, log units relative to the healthy level; above 0 is slower. Likewise `after`."""
    after: float
    confidence: float
    """Posterior probability in (0, 1), under the prior that some series shifts once in 10,000 iterations."""
    alarm: Alarm | None = None
    """State of the test that found the shift; None if it follows from alarms of other series."""


class SeriesStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one series in the test."""

    level: float
    """Recent level relative to the healthy level before any cooldown, log units; NaN while unknown."""
    noise: float
    """Standard deviation of one value, log units."""
    evidence: float
    """Evidence that the series is slower, as a fraction of the threshold of an alarm."""
    slow: bool
    """Whether the series was found slow and has not recovered."""
    pardon: float
    """Shift that counts as healthy during a cooldown, log units; 0 without one."""
    pardoned_until: int | None
    """Index of the value at which the cooldown ends; None without one."""
    peers: int
    """Number of other series in the same group."""


class Cooldown(msgspec.Struct, frozen=True, kw_only=True):
    """Cooldown of a series that looked slow and was then measured to be healthy: its shift counts as healthy for a
    while."""

    shift: float
    """Shift that counts as healthy, log units."""
    until: int
    """Index of the value at which the cooldown ends."""
    patience: int
    """Length of the cooldown in values; a next cooldown is twice as long."""
