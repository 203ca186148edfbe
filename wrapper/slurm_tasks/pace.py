"""The pace of one user's jobs on a cluster: the more of them run, the longer each of them pauses between its routine
queries, so that the queries of all of them together hardly grow with the number of jobs.

Counts the jobs in the user's registry, and asks Slurm nothing. A registry that does not answer changes nothing. Called
by `resihp.wrapper.slurm_tasks.desk`, which stretches the pauses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from resihp.wrapper import registry
from resihp.wrapper.slurm_tasks.agenda import Done

FULL_PACE_JOBS = 10
"""Number of running jobs up to which no pause is stretched."""
MAX_STRETCH = 10.0
COUNT_EVERY_S = 600.0
COUNTED_FOR_S = 7 * 86400.0
"""Age up to which a job counts: the registry keeps a job as running if it died without recording its end."""

_log = logging.getLogger("slurm")


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
