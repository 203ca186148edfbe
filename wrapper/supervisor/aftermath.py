"""Clean-up after a supervisor: records the end of a job whose supervisor died, and ends its processes and its Slurm
job.

Decides nothing about training. Waits for agents and for Slurm, but always with a time limit. Called by
`resihp.wrapper.supervisor.process`.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from resihp.errors import LedgerError
from resihp.record.journal import JobEnded
from resihp.record.journal_file import read_packed
from resihp.wrapper.config.run_spec import RunRequest
from resihp.wrapper.exit_codes import REQUEUE_REQUESTED
from resihp.wrapper.job_files.dead_jobs import agents_of, finish_dead_job
from resihp.wrapper.job_folder import Job, note_end, write_private
from resihp.wrapper.output.render import say
from resihp.wrapper.sinks.fanout import notify_of_end
from resihp.wrapper.slurm_tasks.job_comment import write_last_comment

AGENTS_GONE_S = 10.0
GUARDIAN_LEAVES_S = 5.0
"""Time that a guardian which waits for the job's end needs to notice the end, and to exit."""
END_JOB_TIMEOUT_S = 45.0
"""Time limit of attempts to end the job in an unresponsive Slurm. The agent that started this supervisor waits a little
longer."""


def mark_dead(request: RunRequest, how: str, listener: socket.socket) -> int:
    """Record the end of a job whose supervisor died, unless the supervisor had recorded it; wait until the job's agents
    have exited, and kill those that remain. Return the job's exit code."""
    listener.shutdown(socket.SHUT_RDWR)  # other processes may have it open, and clients must not wait there any more
    job = request.of_job
    finished = True
    with _warn_of_ledger(job):
        finished = finish_dead_job(job, f"the supervisor {how}", locked=True)
    ended = next((record.entry for record in job.records() if isinstance(record.entry, JobEnded)), None)
    status = 1 if ended is None or ended.exit_code is None else ended.exit_code
    text = "the job ended abnormally"
    if ended is not None and not finished:
        text = f"the job had ended: {ended.reason}"
        write_private(job.exit_code_file, f"{status}\n".encode())
        note_end(job, status)
        with _warn_of_ledger(job):
            if (url := job.ledger_url) is not None and job.journal_file.exists():
                from resihp.db.writing.catch_up import catch_up

                catch_up(url, job.folder, job.journal_file)
    say(f"job {job.name}: the supervisor {how}; {text}, logs in {job.logs}")
    notify_of_end(request, job.records(), lambda text: say(f"job {job.name}: {text}"))
    if request.slurm is not None:
        _write_last_comment(request)
    deadline = time.monotonic() + AGENTS_GONE_S
    while (remaining := agents_of(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in remaining:
        say(f"job {job.name}: process {process.pid} is still there, killing it")
        for victim in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                victim.kill()
    return status


@contextmanager
def _warn_of_ledger(job: Job) -> Iterator[None]:
    """Report a ledger that cannot be written. The job's end is recorded in the journal in any case."""
    try:
        yield
    except LedgerError as error:
        say(f"job {job.name}: {error}; the next resihp status adds the missing records")


def _write_last_comment(request: RunRequest) -> None:
    from resihp.slurm.commands import CommandLine
    from resihp.slurm.errors import SlurmError

    try:
        write_last_comment(request, request.of_job.records(), CommandLine())
    except SlurmError as error:
        say(f"job {request.job}: {error}")


def end_slurm_job(request: RunRequest, status: int) -> None:
    """End the Slurm job, or requeue it, after this successor has ended the training job: on the batch host perhaps no
    process is left to do so."""
    assert request.slurm is not None
    from resihp.slurm.commands import CommandLine
    from resihp.slurm.errors import SlurmError, SlurmRefusedError
    from resihp.wrapper.slurm_tasks.next_run import exclude_bad_nodes
    from resihp.wrapper.slurm_tasks.requeue import dead_nodes, requeue, until_noticed

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to all processes of the job, also to this one
    slurm, number = CommandLine(), request.slurm.job_id
    if status == REQUEUE_REQUESTED:
        if request.slurm.gpus:
            until_noticed(number, slurm, dead_nodes(request.of_job), patience_s=END_JOB_TIMEOUT_S)
        requeue(
            number,
            slurm,
            accepted=lambda: exclude_bad_nodes(request, slurm, say),
            patience_s=END_JOB_TIMEOUT_S,
        )
        return
    deadline = time.monotonic() + END_JOB_TIMEOUT_S
    while True:
        time.sleep(GUARDIAN_LEAVES_S)
        try:
            view = slurm.job(number)
            if view is not None and view.state == "running":
                slurm.cancel(number)
            return
        except SlurmError as error:
            if isinstance(error, SlurmRefusedError) or time.monotonic() > deadline:
                text = f"Slurm job {number} may still run: {error}; scancel {number}"
                say(f"job {request.job}: {text}")
                return


def leave_chain_note(request: RunRequest, journal: Path) -> None:
    from resihp.wrapper.slurm_tasks import chain

    chain.leave_note(request, read_packed(journal), lambda text: say(f"job {request.job}: {text}"))
