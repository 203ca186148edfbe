"""When what failed did fail, and how long until training was back, by a journal's records. Pure.

The live view, traces and metrics ask it; `db.reading.recoveries` tells the same of a ledger's rows, by the same rule
(`db.reading.costs.goodput.noticed_after_s`). Follows packed records, too.
"""

from __future__ import annotations

import statistics
from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from db.reading.costs.goodput import RECENT, SAME_MOMENT_S, noticed_after_s
from db.reading.recoveries import SILENT
from resihp.record import journal
from resihp.record.packing import column

COMMITS_KEPT = 4096
"""Where the last healthy iteration of what is slow is looked up."""


class Commit(NamedTuple):
    iteration: int
    at: float
    seconds: float | None


class FoundFailure(NamedTuple):
    """A failure, with when it was noticed, what it was suspected of before, and when somebody last took over."""

    entry: journal.FailureFound
    noticed_at: float
    silent_since: float | None
    led_at: float | None


class Silence(NamedTuple):
    """Who was suspected of it, since when nothing had been heard, and whether that ended with a loss."""

    suspected: journal.Suspected
    since: float
    lost: bool = False


@dataclass
class Silences:
    """What was suspected of being silent, and led to no failure yet; as `db.projection` puts failures to suspicions."""

    known: dict[int, Silence] = field(default_factory=dict)
    """By number."""

    def follow(self, entry: journal.Suspected, at: float) -> None:
        if not entry.suspicion or entry.kind != "silent":
            return
        if not entry.cleared and entry.statistic is not None and entry.test in SILENT:
            self.known[entry.suspicion] = Silence(entry, at - entry.statistic)
        elif entry.cleared:
            known = self.known.pop(entry.suspicion, None)
            if known is not None and entry.outcome == "lost":
                self.known[entry.suspicion] = known._replace(suspected=entry, lost=True)

    def led_to(self, failure: journal.FailureFound) -> float | None:
        """Since when nothing had been heard of what this failure names; forgets that. None where nobody was
        suspected."""
        found = []
        for number, one in list(self.known.items()):
            told = one.suspected
            of_node = told.component == failure.component == "node" and told.node is not None
            if one.lost and (set(told.ranks) & set(failure.ranks) or (of_node and told.node == failure.node)):
                found.append(self.known.pop(number).since)
        return min(found, default=None)

    def __copy__(self) -> Silences:
        return Silences({**self.known})


@dataclass
class Recoveries:
    """`follow` every record in order; times are UTC in seconds since 1970, to the microsecond."""

    _commits: deque[Commit] = field(default_factory=lambda: deque(maxlen=COMMITS_KEPT))
    _ended: dict[int, float] = field(default_factory=dict)
    _silences: Silences = field(default_factory=Silences)
    _led_at: float | None = None
    _found: dict[int, FoundFailure] = field(default_factory=dict)

    def follow(self, record: journal.Record) -> None:
        entry, at = record.entry, record.at
        match entry:
            case journal.IterationCommitted():
                seconds = None if entry.seconds is None else _micros(entry.seconds)
                self._commits.append(Commit(entry.outcome.iteration, _micros(at), seconds))
            case journal.IterationsPacked():
                self._unpack(record, entry)
            case journal.LeaderChosen():
                self._led_at = at
            case journal.WorkerEnded():
                self._ended[entry.rank] = at
            case journal.Suspected():
                self._silences.follow(entry, at)
            case journal.FailureFound():
                noticed_at = min([at, *(self._ended[rank] for rank in entry.ranks if rank in self._ended)])
                silent_since = None if entry.kind == "fail-slow" else self._silences.led_to(entry)
                self._found[entry.failure] = FoundFailure(entry, noticed_at, silent_since, self._led_at)
            case journal.FailureEnded():
                self._found.pop(entry.failure, None)

    def began_at(self, failure: int, noticed_at: float | None = None) -> float | None:
        """The moment of a failure that was found; None where nothing tells. `noticed_at`: where what was done about it
        began before it was told."""
        if (found := self._found.get(failure)) is None:
            return None
        if found.entry.kind == "fail-slow":
            return self._done_at(found.entry.iteration - 1)
        noticed_at = found.noticed_at if noticed_at is None else min(found.noticed_at, noticed_at)
        before = [commit for commit in self._commits if commit.at <= noticed_at + SAME_MOMENT_S][-RECENT:]
        silent_s = None if found.silent_since is None else noticed_at - found.silent_since
        fault_s = found.entry.detect_s
        if not before:
            known = fault_s if fault_s is not None else silent_s
            return None if known is None else noticed_at - max(known, 0.0)
        unnoticed_s = max(noticed_at - before[-1].at, 0.0)
        seconds = [commit.seconds for commit in before if commit.seconds is not None]
        return noticed_at - noticed_after_s(
            unnoticed_s,
            statistics.median(seconds) if seconds else unnoticed_s,
            fault_s=fault_s,
            silent_s=silent_s,
            leaderless=found.led_at is not None and before[-1].at <= found.led_at <= found.noticed_at,
        )

    def noticed_after(self, entry: journal.Reconfigured, at: float) -> float | None:
        """Seconds from the first of the failures that a change of plan mended to the moment from which on its own
        `seconds` are counted; `at`: of its record, which may have been written late. None where nothing tells, or
        nothing had failed."""
        known = []
        for found in (self._found[failure] for failure in entry.failures if failure in self._found):
            slow = found.entry.kind == "fail-slow"
            noticed_at = at - entry.seconds if slow else min(found.noticed_at, at - entry.seconds)
            began_at = self.began_at(found.entry.failure, noticed_at)
            if began_at is not None:
                known.append(max(noticed_at - began_at, 0.0))
        return max(known, default=None)

    def __copy__(self) -> Recoveries:
        return Recoveries(self._commits.copy(), {**self._ended}, copy(self._silences), self._led_at, {**self._found})

    def _unpack(self, record: journal.Record, entry: journal.IterationsPacked) -> None:
        micros = 0
        seconds = column(record, "seconds")
        for i, passed in enumerate(column(record, "passed")):
            micros += passed
            if entry.count - i <= COMMITS_KEPT:
                taken = None if seconds[i] < 0 else seconds[i] / 1e6
                self._commits.append(Commit(entry.first + i, micros / 1e6, taken))

    def _done_at(self, iteration: int) -> float | None:
        return next((commit.at for commit in reversed(self._commits) if commit.iteration == iteration), None)


def _micros(seconds: float) -> float:
    """As packed records have them."""
    return round(seconds * 1e6) / 1e6
