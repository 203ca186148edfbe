"""For how long a worker has done nothing: no processor time, no wait for a disk, no output, of it or what it started.

Looked at every few seconds, and only of workers whose script does not say what it trains: of the others the beats tell.
A process that sleeps in a lock, or waits for a peer, is idle. Threads that wake now and then to see whether there is
anything to do are too little to count. Owned by `wrapper.agent.workers`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from resihp.process import Work, work_of

EACH_S = 10.0
"""How often a worker is looked at."""
BUSY_SHARE = 0.005
"""Share of one processor from which on a worker is at work."""
BUSY_BYTES_PER_S = 4096.0
"""So much read and written is work, too; what the worker itself writes is work however little."""


@dataclass
class _Worker:
    looked_at: float
    active_at: float
    work: Work


class Idleness:
    """When each worker was last seen at work. One for each agent; nothing here waits."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}

    def idle_s(self, pid: int, now: float | None = None) -> float:
        """For how long a process and all that it started have done nothing; looks anew if the last look is old."""
        now = time.monotonic() if now is None else now
        known = self._workers.get(pid)
        if known is None:
            self._workers[pid] = _Worker(looked_at=now, active_at=now, work=work_of(pid))
            return 0.0
        passed_s = now - known.looked_at
        if passed_s >= EACH_S:
            work = work_of(pid)
            if _is_active(known.work, work, passed_s):
                known.active_at = now
            known.looked_at, known.work = now, work
        return now - known.active_at

    def forget(self, pid: int) -> None:
        self._workers.pop(pid, None)


def _is_active(before: Work, after: Work, passed_s: float) -> bool:
    """Whether that much was done between two looks; a tree of processes that has changed is at work as well."""
    used_s = after.processor_s - before.processor_s
    moved = after.bytes_moved - before.bytes_moved
    return (
        after.waits_for_disk
        or after.processes != before.processes
        or after.bytes_written_by_itself != before.bytes_written_by_itself
        or used_s >= BUSY_SHARE * passed_s
        or moved >= BUSY_BYTES_PER_S * passed_s
    )
