"""Measures how long a worker has been idle: no processor time, no wait for a disk, and no output of the worker or its
child processes.

Checked every few seconds, and only for workers whose script has not declared a model, because heartbeats show the
progress of the other workers. A process that sleeps in a lock, or waits for a peer, is idle. Threads that wake
regularly to look for work use too little processor time to count. Owned by `resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from resihp.process import Work, thread_times, work_of

LOOK_EVERY_S = 10.0
"""Time between two measurements of a worker."""
BUSY_SHARE = 0.005
"""Share of one processor's time from which on a worker counts as busy."""
POLLING_SHARE = 0.2
"""Share up to which a worker does not count as busy if none of its threads has `BUSY_SHARE`. Each process group of gloo
or NCCL has threads that wake up to a hundred times a second, and a script may have dozens of groups."""
ROUNDING_S = 0.05
"""Error of a difference between the processor time of a process and that of its threads."""
BUSY_BYTES_PER_S = 4096.0
"""Bytes read and written per second from which on a worker counts as busy. Bytes that the worker itself writes always
count."""


@dataclass
class _Worker:
    looked_at: float
    active_at: float
    work: Work
    threads: dict[int, float] = field(default_factory=dict)
    """Processor time of each thread; empty unless the worker used little of a processor before the last measurement."""


class Idleness:
    """Knows when each worker of one agent was last busy. Nothing here waits."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._inspected: set[int] = set()

    def idle_s(self, pid: int, now: float | None = None) -> float:
        """Return for how many seconds a process and its children have been idle; measure again if the last measurement
        is old."""
        now = time.monotonic() if now is None else now
        worker = self._workers.get(pid)
        if worker is None:
            self._workers[pid] = _Worker(looked_at=now, active_at=now, work=work_of(pid))
            return 0.0
        passed_s = now - worker.looked_at
        if passed_s >= LOOK_EVERY_S and pid not in self._inspected:
            work = work_of(pid)
            used = (work.processor_s - worker.work.processor_s) / passed_s
            threads = thread_times(work.processes) if BUSY_SHARE <= used < POLLING_SHARE else {}
            computes = used >= BUSY_SHARE and not _only_polls(worker.threads, threads, used, passed_s)
            if computes or _is_active(worker.work, work, passed_s):
                worker.active_at = now
            worker.looked_at, worker.work, worker.threads = now, work, threads
        return now - worker.active_at

    def begin_inspection(self, pid: int) -> None:
        """Measure a process no more until it has written what its agent demands."""
        self._inspected.add(pid)

    def end_inspection(self, pid: int, size: int) -> None:
        """Do not count the `size` bytes that a process has written since `begin_inspection` as activity."""
        self._inspected.discard(pid)
        if pid in self._workers:
            worker = self._workers[pid]
            moved, own = worker.work.bytes_moved + size, worker.work.bytes_written_by_itself + size
            worker.work = worker.work._replace(bytes_moved=moved, bytes_written_by_itself=own)

    def forget(self, pid: int) -> None:
        self._workers.pop(pid, None)
        self._inspected.discard(pid)


def _only_polls(before: dict[int, float], after: dict[int, float], used: float, passed_s: float) -> bool:
    """Return whether none of the threads used much of a processor, and nor did threads and children that have ended.
    `used`: the share that all of them used. False without two measurements."""
    if not before or not after:
        return False
    used_s = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    ended_s = used * passed_s - sum(used_s) - ROUNDING_S
    return max(*used_s, ended_s) < BUSY_SHARE * passed_s


def _is_active(before: Work, after: Work, passed_s: float) -> bool:
    """Return whether the work between two measurements counts as busy, apart from processor time. A change in the tree
    of processes counts, too."""
    moved = after.bytes_moved - before.bytes_moved
    return (
        after.waits_for_disk
        or after.processes != before.processes
        or after.bytes_written_by_itself != before.bytes_written_by_itself
        or moved >= BUSY_BYTES_PER_S * passed_s
    )
