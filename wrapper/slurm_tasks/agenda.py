"""Queue of requests to Slurm with their due times, by key, so that the same request is not planned twice.

Knows nothing about Slurm. Owned by `wrapper.slurm_tasks.desk`; used from the event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from resihp.controller import interface as api


@dataclass
class Done:
    """Result of some work: events for the controller, and (key, seconds from now, work) to do next."""

    events: list[api.AnyEvent] = field(default_factory=list)
    then: list[tuple[Hashable, float, Work]] = field(default_factory=list)


Work = Callable[[], Done]
"""Runs in the desk's thread; may wait for Slurm."""


class Agenda:
    """The queue. `clock` is monotonic. `wake` is set whenever new work may be due before all other work."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wake = asyncio.Event()
        self._clock = clock
        self._planned: dict[Hashable, tuple[float, int, Work]] = {}
        """(due time, sequence number, work) by key."""
        self._order = itertools.count()

    def plan(self, key: Hashable, pause_s: float, work: Work) -> None:
        """Plan work in `pause_s` seconds, unless work of the same key is due sooner."""
        at = self._clock() + pause_s
        planned = self._planned.get(key)
        if planned is None or at < planned[0]:
            self._planned[key] = (at, next(self._order), work)
            self.wake.set()

    def due(self) -> Work | None:
        """Remove and return the earliest work that is due."""
        now = self._clock()
        key = min(self._planned, key=lambda key: self._planned[key][:2], default=None)
        if key is None or self._planned[key][0] > now:
            return None
        return self._planned.pop(key)[2]

    def pause_s(self, default_s: float) -> float:
        """Return the seconds until the next work is due; `default_s` if nothing is planned."""
        soonest = min((at for at, _, _ in self._planned.values()), default=None)
        return default_s if soonest is None else max(0.0, soonest - self._clock())

    def keep(self, kind: str) -> None:
        """Forget all work except that of keys (`kind`, ...)."""
        self._planned = {
            key: entry for key, entry in self._planned.items() if isinstance(key, tuple) and key[0] == kind
        }


def pause_of(pauses_s: tuple[float, ...], tries: int) -> float:
    """Return the pause after this many tries; the last pause repeats."""
    return pauses_s[min(tries, len(pauses_s) - 1)]
