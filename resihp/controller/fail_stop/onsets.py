"""Compute the time at which a failure really began (its onset), as precisely as it can be known. No other module
computes it; it is journaled with each failure. Pure.

The onset of a death, a hang or broken communication is the first of these that applies:

- The time of the fault, if one was injected.
- If another supervisor took over since the last commit: the time of that commit, the last sign of life of a batch
  host that died. The host may have lived up to an iteration longer.
- Otherwise the end of a usual iteration after the last commit, because nothing was computed after that; for a rank
  or node suspected of silence, its last sign of life if that was earlier. An agent reports the end of a process at
  once, so the onset is then the notice itself, unless the notice came late.

The onset of slowness is the time of the injected fault, or the end of the last healthy iteration. Times are on the
controller's clock, which does not count the time during which a supervisor was stopped.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

USUAL_SAMPLES = 20
"""Number of latest iterations from which the usual (median) duration is computed."""
MAX_KEPT_COMMITS = 4096
"""Number of latest commits that are kept, to look up the last healthy iteration."""


class Commit(NamedTuple):
    iteration: int
    at: float
    seconds: float | None
    """Seconds on the slowest rank; None if no rank reported a duration."""


@dataclass
class Onsets:
    """The commits and signs of life from which onsets are computed."""

    last: deque[Commit] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_COMMITS))
    """The latest commits, in order."""
    inherited: int = 0
    """Last iteration that was committed under an earlier supervisor; 0 if there is none."""
    silent_since: dict[int | str, float] = field(default_factory=dict)
    """Time of the last sign of life of each rank or node that is suspected of silence or was lost after such a
    suspicion."""

    @classmethod
    def before_us(cls, commits: Iterable[Commit]) -> Onsets:
        """Return onsets with the commits of earlier supervisors. Their times are in seconds before this supervisor
        began (negative)."""
        onsets = cls()
        onsets.last.extend(commits)
        onsets.inherited = onsets.last[-1].iteration if onsets.last else 0
        return onsets

    def begin(self, now: float) -> None:
        """Convert the times of the inherited commits to this supervisor's clock. `now`: its present time."""
        self.last = deque((commit._replace(at=now + commit.at) for commit in self.last), maxlen=MAX_KEPT_COMMITS)

    def add(self, iteration: int, at: float, seconds: float | None) -> None:
        self.last.append(Commit(iteration, at, seconds))

    def before_notice_s(self, noticed_at: float, *, fault_s: float | None, silent_s: float | None) -> float | None:
        """Return the seconds from the onset of a failure, other than slowness, to its notice; None if nothing shows the
        onset.

        `fault_s`: seconds since a fault was injected; `silent_s`: seconds since the last sign of life of the rank or
        node; each None if it does not apply.
        """
        newest = islice(reversed(self.last), 2 * USUAL_SAMPLES)
        before = [commit for commit in newest if commit.at <= noticed_at][:USUAL_SAMPLES]
        if not before:
            return fault_s if fault_s is not None else silent_s
        unnoticed_s = noticed_at - before[0].at
        if fault_s is not None:
            return min(fault_s, unnoticed_s)
        if before[0].iteration <= self.inherited:
            return unnoticed_s
        seconds = [commit.seconds for commit in before if commit.seconds is not None]
        usual_s = statistics.median(seconds) if seconds else unnoticed_s
        return min(max(unnoticed_s - usual_s, silent_s or 0.0), unnoticed_s)

    def slow_for_s(self, iteration: int, now: float, fault_s: float | None = None) -> float | None:
        """Return the seconds for which a component has been slow. `iteration`: the first slow one; `fault_s`: seconds
        since a slowdown was injected. None if the onset is too long ago, or there was no iteration before it."""
        if fault_s is not None:
            return fault_s
        at = next((commit.at for commit in reversed(self.last) if commit.iteration == iteration - 1), None)
        return None if at is None else max(now - at, 0.0)


def micros(seconds: float) -> float:
    """Return `seconds` rounded to microseconds, the precision of times in the journal."""
    return round(seconds, 6)
