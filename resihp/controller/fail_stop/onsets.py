"""When what failed did fail, as well as it can be known: told with each failure, in the journal, and reckoned nowhere
else. Pure.

The moment, of what died, hung or broke:

- of a fault that was injected, that of the fault;
- where another supervisor took over since the last commit, that commit: the last sign of life that there is of a batch
  host that died. It may have lived up to an iteration longer;
- else the end of a usual iteration after the last commit, for in what went by beyond that nothing was computed; and of
  what was suspected of being silent, the last sign that was heard of it, if that was earlier. Of a process whose end
  its agent saw, which takes no time, that is the notice itself, unless the notice was late.

Of what is slow it is the fault, or the end of the last healthy iteration. Times are the controller's clock, on which a
supervisor that was stopped heard nothing and knows of nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

RECENT = 20
"""Iterations that tell how long one usually takes."""
KEPT = 4096
"""Commits among which the last healthy one is looked up."""


class Commit(NamedTuple):
    iteration: int
    at: float
    seconds: float | None
    """The slowest rank's; None where none told."""


@dataclass
class Onsets:
    """What the moment of a failure is told by."""

    last: deque[Commit] = field(default_factory=lambda: deque(maxlen=KEPT))
    """In order."""
    inherited: int = 0
    """The last iteration that was committed under another supervisor."""
    silent_since: dict[int | str, float] = field(default_factory=dict)
    """Since when nothing had been heard of ranks and nodes that are suspected of being silent, or were lost so."""

    @classmethod
    def before_us(cls, commits: Iterable[Commit]) -> Onsets:
        """Those of supervisors before this one, whose times are seconds before it began, negative."""
        made = cls()
        made.last.extend(commits)
        made.inherited = made.last[-1].iteration if made.last else 0
        return made

    def begin(self, now: float) -> None:
        """The clock that times are on begins now."""
        self.last = deque((commit._replace(at=now + commit.at) for commit in self.last), maxlen=KEPT)

    def add(self, iteration: int, at: float, seconds: float | None) -> None:
        self.last.append(Commit(iteration, at, seconds))

    def before_notice_s(self, noticed_at: float, *, fault_s: float | None, silent_s: float | None) -> float | None:
        """Seconds from the moment of a failure that is not slowness to its being noticed. `fault_s`, `silent_s`: for
        how long then a fault had been injected, or nothing had been heard; None where that is not so. None where there
        is nothing to tell by."""
        newest = islice(reversed(self.last), 2 * RECENT)
        before = [commit for commit in newest if commit.at <= noticed_at][:RECENT]
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
        """How long what is slow has been so, `iteration` being the first slow one; None where that is too long ago, or
        there was none before."""
        if fault_s is not None:
            return fault_s
        at = next((commit.at for commit in reversed(self.last) if commit.iteration == iteration - 1), None)
        return None if at is None else max(now - at, 0.0)


def micros(seconds: float) -> float:
    """As precise as the times of a journal are."""
    return round(seconds, 6)
