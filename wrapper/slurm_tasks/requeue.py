"""The last request for a Slurm job: to requeue it, to make sure that it is not requeued, or to cancel it.

`requeue` requests a requeue, unless Slurm is preempting the job and will requeue it by itself: on some releases, a
request would then run the job once more after it has completed (`resihp.slurm.releases`). `end_for_good` makes sure
that a job that ends with an error is neither requeued nor held because of it.

While Slurm does not answer, the request is repeated for an hour: nobody else can get the job's nodes meanwhile. Once
SIGTERM has arrived, little time is left, because Slurm kills the batch script 30 s later by default.

Slurm ends the batch script as soon as it has accepted the request, so the answer may never arrive: SIGTERM ends neither
`requeue` nor the command that it starts. Without an answer, the request may have been accepted; a
repeated request does no harm, because a pending job stays pending. The job starts about two minutes later: Slurm sets
its begin time when the last of its processes has ended, so no process is left to request an earlier time. A job with an
expedited requeue starts at once. `until_noticed` first waits for Slurm to notice dead nodes, on releases that would
otherwise start the job without its GPUs. Decides nothing else.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from resihp.errors import ResihpError
from resihp.record.journal import NodeLost
from resihp.slurm import releases
from resihp.slurm.client import Slurm
from resihp.slurm.errors import SlurmError, SlurmRefusedError
from resihp.wrapper.job_folder import Job
from resihp.wrapper.output.render import say

PATIENCE_S = 3600.0
"""How long to send requests to a controller that does not answer."""
HURRIED_S = 20.0
"""The same, after SIGTERM has arrived: by default, Slurm kills the batch script 30 s after SIGTERM."""
RETRY_PAUSE_S = 1.0
MAX_RETRY_PAUSE_S = 5.0
NOTICE_TIMEOUT_S = 330.0
"""How long Slurm may take to notice a dead node: SlurmdTimeout is usually 300 s."""
LOOK_EVERY_S = 5.0


def dead_nodes(job: Job) -> set[str]:
    """Return the nodes that the job lost because they were silent; none if the journal cannot be read."""
    try:
        losses = [record.entry for record in job.records() if isinstance(record.entry, NodeLost)]
    except (ResihpError, OSError):
        return set()
    return {loss.node for loss in losses if loss.how in ("", "silent")}


def until_noticed(
    job_id: str,
    slurm: Slurm,
    dead: Collection[str],
    *,
    patience_s: float = NOTICE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until Slurm has removed the dead nodes from a job with GPUs, on releases where this matters. SIGTERM ends
    this process here."""
    deadline = clock() + patience_s
    is_reported = False
    while clock() < deadline:
        try:
            if not dead or not releases.of(slurm.version()).forgets_gpus:
                return
            view = slurm.job(job_id)
            if view is None or view.state != "running" or not set(dead).intersection(view.nodes):
                return
        except SlurmError as error:
            say(f"{error}; asking again")
        if not is_reported:
            names = ", ".join(sorted(dead))
            say(f"job {job_id}: will be requeued once Slurm has noticed that {names} is dead, within {patience_s:g} s")
            is_reported = True
        sleep(LOOK_EVERY_S)


def requeue(
    job_id: str,
    slurm: Slurm,
    *,
    leaves: bool = False,
    accepted: Callable[[], None] = lambda: None,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Request a requeue until Slurm answers; return whether Slurm is known to have accepted. Main thread only.

    `leaves`: the batch script ends after this call, so a job that Slurm then requeues by itself needs no request.
    `accepted` is called once Slurm has accepted, while SIGTERM is still ignored; Slurm kills this process soon after.
    """
    deadline, pause_s, is_hurried = clock() + patience_s, RETRY_PAUSE_S, False
    with _deferring_term() as has_term_arrived:
        if leaves and _slurm_requeues_itself(slurm, job_id):
            say(f"job {job_id}: preempted; Slurm requeues it by itself, it continues from its last checkpoint")
            return False
        while True:
            try:
                slurm.requeue(job_id)
            except SlurmRefusedError as error:
                say(f"{error}; submit it again to continue from its last checkpoint")
                return False
            except SlurmError as error:
                if has_term_arrived() and not is_hurried:
                    is_hurried, deadline = True, min(deadline, clock() + HURRIED_S)
                if clock() + pause_s > deadline:
                    say(f"{error}; if it is not requeued, try: scontrol requeue {job_id}")
                    return False
                if pause_s == RETRY_PAUSE_S:
                    say(f"{error}; asking to be requeued for up to {(deadline - clock()) / 60:.0f} min")
            else:
                say(f"job {job_id}: requeued; it continues from its last checkpoint, usually in two minutes or later")
                accepted()
                return True
            sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)


def _slurm_requeues_itself(slurm: Slurm, job_id: str) -> bool:
    """Return whether Slurm requeues the job by itself; False if unknown. A needless request does less harm than a
    missing one, because a run that finds the job completed ends at once."""
    try:
        return slurm.runs_again(job_id)
    except SlurmError:
        return False


def end_for_good(job_id: str, slurm: Slurm) -> None:
    """Make sure that Slurm does not requeue the job, after an error that another run would not fix. Main thread
    only."""
    with _deferring_term():
        try:
            slurm.end_for_good(job_id)
        except SlurmError as error:
            say(f"{error}; if the job is held in the queue then, try: scancel {job_id}")


def cancel(job_id: str, slurm: Slurm) -> None:
    """Cancel the job if it is still running, so that Slurm records it as CANCELLED. Main thread only."""
    with _deferring_term():
        try:
            view = slurm.job(job_id)
            if view is not None and view.state == "running":
                slurm.cancel(job_id)
        except SlurmError as error:
            say(f"{error}; Slurm will record the job as FAILED with the exit code of a stopped job")


@contextmanager
def _deferring_term() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM end neither this process nor the commands that it starts, which inherit the mask; yield a function
    that tells whether SIGTERM has arrived. At the end, a SIGTERM that has arrived is forgotten."""
    noted: list[int] = []
    handler = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))  # if another thread receives it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield lambda: bool(noted) or signal.SIGTERM in signal.sigpending()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, handler)
