"""Recovery times, from failure to resumed training, from a journal's records: for live views, hooks, metrics.

Keeps the moments of each failure that are in the journal; `resihp.record.recovery` computes the times, for the ledger's
rows as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp.record import journal
from resihp.record.recovery import Moments, RecoveryTimes, first_of, recovery


@dataclass
class Recoveries:
    """Recovery times of a job. `follow` takes every record, in order."""

    _moments: dict[int, Moments] = field(default_factory=dict)
    """Moments of each failure, in UTC seconds since 1970."""

    def follow(self, record: journal.Record) -> None:
        if isinstance(entry := record.entry, journal.FailureFound):
            self._moments[entry.failure] = Moments(entry.failed_at(record.at), entry.noticed_at(record.at))

    def of(self, entry: journal.Reconfigured, at: float) -> RecoveryTimes | None:
        """Return the recovery times of the failures that a change of plan mended, taken together; `at`: time of its
        record.

        None if nothing had failed.
        """
        mended = [self._moments[failure] for failure in entry.failures if failure in self._moments]
        return recovery(first_of(mended), at) if mended else None

    def __copy__(self) -> Recoveries:
        return Recoveries({**self._moments})
