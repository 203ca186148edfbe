"""Queue of work for Slurm with due times, and the pace of one user's jobs.

Each work has a key, so that the same work is not planned twice.

The more jobs of a user run on a cluster, the longer each of them pauses between its routine queries, so that the
queries of all of them together hardly grow with the number of jobs. Jobs are counted in the user's registry; Slurm is
asked nothing, and a registry that does not answer changes nothing. Owned by `resihp.wrapper.slurm_tasks.desk`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from resihp.controller import interface as api
from resihp.wrapper import registry

FULL_PACE_JOBS = 10
"""Number of running jobs up to which no pause is stretched."""
MAX_STRETCH = 10.0
COUNT_EVERY_S = 600.0
COUNTED_FOR_S = 7 * 86400.0
"""Age up to which a job counts: the registry keeps a job as running if it died without recording its end."""

_log = logging.getLogger("slurm")


@dataclass
class Done:
    """Result of some work: events for the controller, and further work as (key, seconds from now, work)."""

    events: list[api.AnyEvent] = field(default_factory=list)
    then: list[tuple[Hashable, float, Work]] = field(default_factory=list)


Work = Callable[[], Done]
"""Work that runs in the desk's thread, and may wait for Slurm."""


class Agenda:
    """Queue of planned work. `clock` is monotonic. `wake` is set whenever work was planned."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.wake = asyncio.Event()
        self._clock = clock
        self._planned: dict[Hashable, tuple[float, int, Work]] = {}
        """(due time, sequence number, work), by key."""
        self._order = itertools.count()

    def plan(self, key: Hashable, pause_s: float, work: Work) -> None:
        """Plan `work` to be due in `pause_s` seconds, unless work with the same key is due sooner."""
        at = self._clock() + pause_s
        planned = self._planned.get(key)
        if planned is None or at < planned[0]:
            self._planned[key] = (at, next(self._order), work)
            self.wake.set()

    def due(self) -> Work | None:
        """Remove and return the earliest work that is due; None if no work is due."""
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
        """Remove all planned work except that with keys (`kind`, ...)."""
        self._planned = {
            key: entry for key, entry in self._planned.items() if isinstance(key, tuple) and key[0] == kind
        }


def pause_of(pauses_s: tuple[float, ...], tries: int) -> float:
    """Return the pause after `tries` attempts; the last pause repeats."""
    return pauses_s[min(tries, len(pauses_s) - 1)]


class Pace:
    """Factor for the pauses between the routine queries of each job of this user: `stretch`, from 1 to MAX_STRETCH."""

    def __init__(self, cluster: str, now: Callable[[], float]) -> None:
        """`now` returns UTC in seconds since 1970."""
        self.stretch = 1.0
        self._cluster = cluster
        self._now = now

    def count(self) -> Done:
        """Count the user's running jobs on this cluster, now and every ten minutes."""
        counts: list[int] = []
        trouble = registry.promptly(lambda: counts.append(self._running_jobs()), "registry of jobs")
        if trouble:
            _log.info("number of running jobs: %s", trouble)
        else:
            self.stretch = min(max(1.0, counts[0] / FULL_PACE_JOBS), MAX_STRETCH)
        return Done(then=[("pace", COUNT_EVERY_S, self.count)])

    def _running_jobs(self) -> int:
        since = self._now() - COUNTED_FOR_S
        return len(
            {
                entry.slurm_job
                for entry in registry.entries()[0]
                if entry.state == "running" and entry.cluster == self._cluster and entry.began_at > since
            }
        )
