"""How long it took from a failure until training was back, by a journal's records: for the live view, traces, metrics.

The moment of a failure is the journal's to tell (`journal.FailureFound.failed_at`); a ledger's rows have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.record import journal


@dataclass
class Recoveries:
    """`follow` every record in order."""

    _failed_at: dict[int, float] = field(default_factory=dict)
    """Of failures that are not over, where it is known: UTC, in seconds since 1970."""

    def follow(self, record: journal.Record) -> None:
        entry = record.entry
        match entry:
            case journal.FailureFound():
                if (failed_at := entry.failed_at(record.at)) is not None:
                    self._failed_at[entry.failure] = failed_at
            case journal.FailureEnded():
                self._failed_at.pop(entry.failure, None)

    def noticed_after(self, entry: journal.Reconfigured, at: float) -> float | None:
        """Seconds from the first of the failures that a change of plan mended to the moment from which on its own
        `seconds` are counted; `at`: of its record. None where nothing tells, or nothing had failed."""
        known = [self._failed_at[failure] for failure in entry.failures if failure in self._failed_at]
        return max(at - entry.seconds - min(known), 0.0) if known else None

    def __copy__(self) -> Recoveries:
        return Recoveries({**self._failed_at})
