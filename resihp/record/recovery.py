"""The times of a failure, of its notice, and of the recovery from it: computed only here.

Every display of these figures takes them from `recovery`: the live view, hooks, traces and metrics with the moments of
the journal's records; the ledger's rows, events and accounts with those of its columns, which are the same. Moments are
seconds since 1970, to the microsecond. Pure; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple


class Moments(NamedTuple):
    """The moments of a failure (None if not known) and of its notice."""

    failed_at: float | None
    noticed_at: float

    @classmethod
    def of_times(cls, failed_at: datetime | None, noticed_at: datetime) -> Moments:
        """Return the moments of a failure's row in the ledger."""
        return cls(None if failed_at is None else failed_at.timestamp(), noticed_at.timestamp())

    @property
    def began_at(self) -> float:
        """Return the moment of the failure, as far as it is known: that of its notice if no earlier moment is."""
        return self.noticed_at if self.failed_at is None else self.failed_at


class RecoveryTimes(NamedTuple):
    """Seconds of one recovery; both parts make up the whole unless clocks were set back."""

    seconds_to_recover: float
    """From the failure to the first iteration committed after it."""
    noticed_after: float | None
    """From the failure to its notice; None if the moment of the failure is not known."""
    seconds_without_noticing: float
    """From the notice to the first iteration committed after it."""


def first_of(failures: Sequence[Moments]) -> Moments:
    """Return the moments of the failures that one change of plan recovered from: the first failure, and the first
    notice."""
    failed_at = min(failure.began_at for failure in failures)
    noticed_at = min(failure.noticed_at for failure in failures)
    is_known = any(failure.failed_at is not None for failure in failures)
    return Moments(failed_at if is_known else None, noticed_at)


def recovery(failure: Moments, back_at: float) -> RecoveryTimes:
    """Return how long it took from a failure until training resumed. `back_at`: the moment the change of plan was over.

    Moments may come from the clocks of several hosts, so no duration is less than 0.
    """
    return RecoveryTimes(
        seconds_to_recover=_passed(failure.began_at, back_at),
        noticed_after=noticed_after(failure),
        seconds_without_noticing=_passed(failure.noticed_at, back_at),
    )


def noticed_after(failure: Moments) -> float | None:
    """Return the seconds from a failure to its notice; None if the moment of the failure is not known."""
    return None if failure.failed_at is None else _passed(failure.failed_at, failure.noticed_at)


def _passed(since: float, until: float) -> float:
    return max(round(until - since, 6), 0.0)
