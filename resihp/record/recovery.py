"""Compute the times of a failure, of its notice, and of the recovery from it. No other module computes these.

All displays take the figures from `recovery`. The live view, hooks, traces and metrics pass it the times of the
journal's records; the ledger's rows, events and accounts pass it the same times from their columns. Times are seconds
since 1970, to the microsecond. Pure; makes no decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple


class Moments(NamedTuple):
    """The time of a failure (None if not known) and the time at which it was noticed, in seconds since 1970."""

    failed_at: float | None
    noticed_at: float

    @classmethod
    def of_times(cls, failed_at: datetime | None, noticed_at: datetime) -> Moments:
        """Return the times of a failure from its row in the ledger."""
        return cls(None if failed_at is None else failed_at.timestamp(), noticed_at.timestamp())

    @property
    def began_at(self) -> float:
        """Time of the failure if it is known, else the time at which it was noticed."""
        return self.noticed_at if self.failed_at is None else self.failed_at


class RecoveryTimes(NamedTuple):
    """Durations of one recovery in seconds. `noticed_after` and `seconds_without_noticing` add up to
    `seconds_to_recover` unless a clock was set back."""

    seconds_to_recover: float
    """Seconds from the failure to the first iteration committed after it."""
    noticed_after: float | None
    """Seconds from the failure to its notice; None if the time of the failure is not known."""
    seconds_without_noticing: float
    """Seconds from the notice to the first iteration committed after it."""


def first_of(failures: Sequence[Moments]) -> Moments:
    """Return, for several failures followed by one change of plan, the time of the first failure and the time of the
    first notice."""
    failed_at = min(failure.began_at for failure in failures)
    noticed_at = min(failure.noticed_at for failure in failures)
    is_known = any(failure.failed_at is not None for failure in failures)
    return Moments(failed_at if is_known else None, noticed_at)


def recovery(failure: Moments, back_at: float) -> RecoveryTimes:
    """Return the durations of the recovery from a failure. `back_at`: the time at which the first iteration under the
    new plan was committed.

    The times may come from the clocks of several hosts, so a negative duration is returned as 0.
    """
    return RecoveryTimes(
        seconds_to_recover=_passed(failure.began_at, back_at),
        noticed_after=noticed_after(failure),
        seconds_without_noticing=_passed(failure.noticed_at, back_at),
    )


def noticed_after(failure: Moments) -> float | None:
    """Return the seconds from a failure to its notice; None if the time of the failure is not known."""
    return None if failure.failed_at is None else _passed(failure.failed_at, failure.noticed_at)


def _passed(since: float, until: float) -> float:
    return max(round(until - since, 6), 0.0)
