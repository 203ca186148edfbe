"""The last request for a Slurm job: to run it again, or not to.

`requeue` asks Slurm to run the job again, unless Slurm is preempting it and will requeue it by itself: then, on some
releases, our request would run it once more after it has completed (`slurm.releases`). `end_for_good` makes sure that a
job that ends with an error is neither run again nor held for that.

Slurm ends the batch script as soon as it has accepted, so we may never get the answer: `requeue` ignores TERM
meanwhile, and so does the command that it starts. Without an answer, the request may have been accepted; asking twice
does no harm, since a job that already waits is the desired state. The job begins about two minutes later: Slurm sets
its begin time when the last of its processes has ended, so that no process is left to ask for an earlier time; a job
with an expedited requeue begins at once. `until_noticed` first waits, on releases that would otherwise start the job
without its GPUs. Decides nothing else.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from resihp.errors import ResihpError
from resihp.record.journal import NodeLost
from slurm import releases
from slurm.client import Slurm
from slurm.errors import SlurmError, SlurmRefusedError
from wrapper.job_folder import Job

REQUEUE_TIMEOUT_S = 20.0
"""How long to ask a controller that does not answer: by default, Slurm kills the batch script 30 s after TERM."""
RETRY_PAUSE_S = 1.0
NOTICE_TIMEOUT_S = 330.0
"""How long Slurm may take to notice a dead node: SlurmdTimeout is usually 300 s."""
LOOK_EVERY_S = 5.0


def dead_nodes(job: Job) -> set[str]:
    """Return nodes that a job has lost and that do not answer; none if its journal cannot be read."""
    try:
        losses = [record.entry for record in job.records() if isinstance(record.entry, NodeLost)]
    except (ResihpError, OSError):
        return set()
    return {loss.node for loss in losses if loss.how == "silent"}


def until_noticed(
    job_id: str,
    slurm: Slurm,
    dead: Collection[str],
    *,
    patience_s: float = NOTICE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until Slurm has removed dead nodes from a job with GPUs, on releases where that matters. TERM ends us
    here."""
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
            _say(f"{error}; asking again")
        if not is_reported:
            names = ", ".join(sorted(dead))
            _say(f"job {job_id}: will be requeued once Slurm has noticed that {names} is dead, within {patience_s:g} s")
            is_reported = True
        sleep(LOOK_EVERY_S)


def requeue(
    job_id: str,
    slurm: Slurm,
    *,
    leaves: bool = False,
    patience_s: float = REQUEUE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Ask until Slurm has answered; return whether it accepted, as far as we know. Main thread only.

    `leaves`: the batch script ends after this, so a job that Slurm then requeues by itself is left to Slurm.
    """
    deadline = clock() + patience_s
    with _ignoring_term():
        if leaves and _slurm_requeues_itself(slurm, job_id):
            _say(f"job {job_id}: preempted; Slurm requeues it by itself, it continues from its last checkpoint")
            return False
        while True:
            try:
                slurm.requeue(job_id)
            except SlurmRefusedError as error:
                _say(f"{error}; submit it again to continue from its last checkpoint")
                return False
            except SlurmError as error:
                if clock() + RETRY_PAUSE_S > deadline:
                    _say(f"{error}; if it is not requeued, try: scontrol requeue {job_id}")
                    return False
            else:
                _say(f"job {job_id}: requeued; it continues from its last checkpoint, usually in two minutes or later")
                return True
            sleep(RETRY_PAUSE_S)


def _slurm_requeues_itself(slurm: Slurm, job_id: str) -> bool:
    """Return whether Slurm requeues the job by itself. If unknown, False: a needless request does less harm than a
    missing one, because a run that finds the job done ends at once."""
    try:
        return slurm.runs_again(job_id)
    except SlurmError:
        return False


def end_for_good(job_id: str, slurm: Slurm) -> None:
    """Tell Slurm not to run the job again after an error that another run would not fix. Main thread only."""
    with _ignoring_term():
        try:
            slurm.end_for_good(job_id)
        except SlurmError as error:
            _say(f"{error}; if the job is held in the queue then, try: scancel {job_id}")


def _say(text: str) -> None:
    print(f"resihp: {text}", file=sys.stderr, flush=True)


@contextmanager
def _ignoring_term() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
