"""What is to be asked of Slurm and when: by what it is about, so that the same thing is not done twice at a time.

Knows nothing of Slurm. Owned by `wrapper.slurm_tasks.desk`; planned from the event loop alone.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from resihp.controller import interface as api


@dataclass
class Done:
    """What came of some work: what to tell, and what to do next, in how many seconds."""

    events: list[api.AnyEvent] = field(default_factory=list)
    then: list[tuple[Hashable, float, Work]] = field(default_factory=list)


Work = Callable[[], Done]
"""Runs in the desk's thread; may wait for Slurm."""


class Agenda:
    """`clock` is monotonic. `wake` is set whenever something is planned that may be due sooner than all else."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wake = asyncio.Event()
        self._clock = clock
        self._planned: dict[Hashable, tuple[float, int, Work]] = {}
        """(when, in which order)."""
        self._order = itertools.count()

    def plan(self, key: Hashable, pause_s: float, work: Work) -> None:
        """Do it then, or sooner if it is planned for sooner."""
        at = self._clock() + pause_s
        planned = self._planned.get(key)
        if planned is None or at < planned[0]:
            self._planned[key] = (at, next(self._order), work)
            self.wake.set()

    def due(self) -> Work | None:
        """Take what is due off the agenda, the earliest first."""
        now = self._clock()
        key = min(self._planned, key=lambda key: self._planned[key][:2], default=None)
        if key is None or self._planned[key][0] > now:
            return None
        return self._planned.pop(key)[2]

    def pause_s(self, most: float) -> float:
        """Until something is due; `most` where nothing is planned."""
        soonest = min((at for at, _, _ in self._planned.values()), default=None)
        return most if soonest is None else max(0.0, soonest - self._clock())

    def keep(self, kind: str) -> None:
        """Forget all that is not about (`kind`, ...)."""
        self._planned = {key: of for key, of in self._planned.items() if isinstance(key, tuple) and key[0] == kind}


def pause_of(pauses_s: tuple[float, ...], tries: int) -> float:
    """The last one again and again."""
    return pauses_s[min(tries, len(pauses_s) - 1)]
