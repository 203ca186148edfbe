"""The last thing that is done for a Slurm job: it is to come back, or not to.

`requeue` asks Slurm to run it again, unless Slurm preempts it and will do so by itself: then asking would have it
queued once more when it has completed, on some releases (`slurm.releases`). `end_for_good` sees that a job whose exit
code is an error is not run again, or held, for that.

Slurm ends the batch script as soon as it has accepted, so the answer may never be heard: `requeue` is deaf to TERM
meanwhile, and so is the command that it starts. No answer means that it may have happened; asking twice does no harm,
for a job that already waits is what was asked for. The job begins about two minutes later: Slurm sets its begin time
when the last of its processes is gone, so that nobody is left who could ask for less; one with an expedited requeue
begins at once. `until_noticed` waits before, where a release would start it without its GPUs. Decides nothing else.
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

PATIENCE_S = 20.0
"""How long to ask a controller that does not answer: Slurm kills the batch script 30 s after TERM, if not told else."""
PAUSE_S = 1.0
NOTICED_S = 330.0
"""How long Slurm may take to notice a dead node: SlurmdTimeout is 300 s usually."""
LOOK_EVERY_S = 5.0


def dead_nodes(job: Job) -> set[str]:
    """Nodes that a job has lost and that do not answer; none where its journal cannot be read."""
    from resihp.controller.state import still_answers

    try:
        losses = [record.entry for record in job.records() if isinstance(record.entry, NodeLost)]
    except (ResihpError, OSError):
        return set()
    return {loss.node for loss in losses if not still_answers(loss.reason)}


def until_noticed(
    job_id: str,
    slurm: Slurm,
    dead: Collection[str],
    *,
    patience_s: float = NOTICED_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until Slurm has taken dead nodes from a job with GPUs, on releases where that matters. TERM ends us here."""
    deadline = clock() + patience_s
    told = False
    while clock() < deadline:
        try:
            if not dead or not releases.of(slurm.version()).forgets_gpus:
                return
            view = slurm.job(job_id)
            if view is None or view.state != "running" or not set(dead).intersection(view.nodes):
                return
        except SlurmError as error:
            _say(f"{error}; asking again")
        if not told:
            names = ", ".join(sorted(dead))
            _say(f"job {job_id}: to be requeued once Slurm has noticed that {names} is dead, within {patience_s:g} s")
            told = True
        sleep(LOOK_EVERY_S)


def requeue(
    job_id: str,
    slurm: Slurm,
    *,
    leaves: bool = False,
    patience_s: float = PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Ask until Slurm has answered; whether it has been asked, as far as is known. Main thread only.

    `leaves`: the batch script ends after this, so that a job that Slurm itself runs again then is left to it.
    """
    deadline = clock() + patience_s
    with _deaf():
        if leaves and _left_to(slurm, job_id):
            _say(f"job {job_id}: preempted; Slurm runs it again by itself, it goes on from its last checkpoint")
            return False
        while True:
            try:
                slurm.requeue(job_id)
            except SlurmRefusedError as error:
                _say(f"{error}; it can be submitted again, to go on from its last checkpoint")
                return False
            except SlurmError as error:
                if clock() + PAUSE_S > deadline:
                    _say(f"{error}; if it does not come back, try: scontrol requeue {job_id}")
                    return False
            else:
                _say(f"job {job_id}: requeued; it goes on from its last checkpoint, usually in two minutes or later")
                return True
            sleep(PAUSE_S)


def _left_to(slurm: Slurm, job_id: str) -> bool:
    """Asking in vain does less harm than not asking: a run that finds the job done ends at once."""
    try:
        return slurm.runs_again(job_id)
    except SlurmError:
        return False


def end_for_good(job_id: str, slurm: Slurm) -> None:
    """The job ends with an error that another run would not mend. Main thread only."""
    with _deaf():
        try:
            slurm.end_for_good(job_id)
        except SlurmError as error:
            _say(f"{error}; if the job is held in the queue then, try: scancel {job_id}")


def _say(text: str) -> None:
    print(f"resihp: {text}", file=sys.stderr, flush=True)


@contextmanager
def _deaf() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
