"""Decides the health of each rank of a job: active, standby, starting, slow, suspected or dead. Pure.

Called by the live view, metrics and `status`, with the job's history; no other module decides it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resihp.parallelism.layout import Layout
    from resihp.wrapper.output.job_history import JobHistory
    from resihp.wrapper.output.render import Health


def rank_health(history: JobHistory, layout: Layout | None, stopped: Collection[int] = ()) -> dict[int, Health]:
    """Return the health of each rank. A healthy rank's health follows from its role in `layout`; a rank that ended
    before it had a role is omitted.

    `stopped`: ranks whose processes are stopped now, according to heartbeats. In a job that is over, only ranks named
    by a failure are dead: all others were asked to exit, some by a signal. None of them is suspected or slow.
    """
    failed, slow = _failed_and_slow(history)
    suspected = {suspicion.rank for suspicion in history.suspicions.values()} | set(stopped)
    standby = set(layout.standby) if layout else set()
    active = set(layout.active) if layout else set()
    health: dict[int, Health] = {}
    for rank, worker in sorted(history.workers.items()):
        if worker.ended and worker.exit != 0 and (history.running or rank in failed):
            health[rank] = "dead"
        elif history.running and not worker.ended and rank in suspected:
            health[rank] = "suspected"
        elif history.running and rank in slow:
            health[rank] = "slow"
        elif rank in standby:
            health[rank] = "standby"
        elif rank in active:
            health[rank] = "active"
        elif not worker.ended:
            health[rank] = "starting"
    return health


def _failed_and_slow(history: JobHistory) -> tuple[set[int], set[int]]:
    """Return the ranks of failures that stop a rank, and the ranks of devices and links that are slow now."""
    failed: set[int] = set()
    slow: set[int] = set()
    for failure in history.failures.values():
        if failure.kind == "fail-stop":
            failed.update(failure.ranks)
        elif failure.kind == "fail-slow" and failure.component in ("device", "link") and not failure.ended:
            slow.update(failure.ranks)
    return failed, slow
