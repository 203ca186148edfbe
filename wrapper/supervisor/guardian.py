"""The guardian: the process of `resihp run` while the job runs.

It holds the job's lock and the socket that agents connect to, and starts the supervisor as its child. On one machine,
it first starts the process that imports once for all virtual nodes (`resihp.wrapper.launch.preloading`). It forwards
signals to the supervisor and returns the supervisor's exit code. A supervisor that dies by a signal is started again:
it takes over the running agents, which find it at the same address. A supervisor that stepped back because no quorum
followed it is not started again: a successor then ends the job, and the guardian waits for the successor, because the
guardian's exit would end the Slurm job. Decides nothing else, and imports few modules.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from resihp.errors import ResihpError
from resihp.process import adopt_orphans, ending, name_process, wait_for
from resihp.wrapper import early_signals
from resihp.wrapper.config.run_spec import RunRequest, load
from resihp.wrapper.exit_codes import LEADER_DEPOSED, REQUEUE_REQUESTED
from resihp.wrapper.job_folder import Job, SupervisorFile, hold_lock, note_end
from resihp.wrapper.launch.launcher import own_environment
from resihp.wrapper.launch.ports import listen
from resihp.wrapper.launch.preloading import preloading

MAX_RESTARTS = 5
"""How often a supervisor that died by a signal is started again before the job is ended."""
SUCCESSOR_TIMEOUT_S = 90.0
"""How long the job may have no leader before the guardian has Slurm requeue it: longer than agents survive without a
leader."""
LOOK_EVERY_S = 1.0
STOPPED_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of a job that was stopped, by an operator or by Slurm."""

Command = Callable[[Path, Sequence[str]], Sequence[str]]
"""(run file, extra options) -> command line that starts a supervisor."""


def supervisor_command(run_file: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "resihp.wrapper.supervisor.process", "--run", str(run_file), *options]


def guard(run_file: Path, command: Command = supervisor_command) -> int:
    """Run the job to its end and return the exit code. Raises UsageError if another supervisor controls the job."""
    request = load(run_file)
    lock = hold_lock(request.of_job)
    name_process(request.job, "guardian", keep=1, since=b"run")
    adopt_orphans()  # processes of a dead supervisor still belong to this job
    with preloading(request) as forks, listen(request.host, request.ports) as listener:
        inherited = [lock, listener.fileno()]
        options = ["--parent", str(os.getpid()), "--listen", str(listener.fileno())]
        if forks is not None:
            inherited.append(forks.fileno())
            options += ["--forks", str(forks.fileno())]
        status = _watch(command(run_file, options), inherited)
        for _ in range(MAX_RESTARTS):
            if status >= 0:
                break
            print(f"resihp: job {request.job}: the supervisor {ending(status)}; starting another", file=sys.stderr)
            status = _watch(command(run_file, [*options, "--take-over", ending(status)]), inherited)
        if status < 0:
            status = _watch(command(run_file, [*options, "--bury", ending(status)]), inherited)
            status = status if status >= 0 else 1
    early_signals.as_before()
    if status == LEADER_DEPOSED:
        status = _await_successor(request)
    elif status != REQUEUE_REQUESTED and not request.of_job.exit_code_file.exists():
        note_end(request.of_job, status)  # it was refused before it began
    if status == REQUEUE_REQUESTED:
        status = _requeue(request)
    return status


def _watch(command: Sequence[str], inherited: Sequence[int]) -> int:
    """Run one supervisor to its exit and return its status. The supervisor has its own process group, so that Ctrl-C
    reaches it once, through the guardian."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = [*early_signals.noted()]

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    previous = {number: signal.signal(number, forward) for number in early_signals.of_command()}
    try:
        with early_signals.held():
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=own_environment(), process_group=0, pass_fds=inherited
            )
        for number in early:
            forward(number, None)
        return wait_for(child)  # and for adopted processes
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _await_successor(request: RunRequest) -> int:
    """Wait until a successor has ended the job, and return the job's exit code; REQUEUE_REQUESTED if no successor
    leads."""
    job = request.of_job
    print(f"resihp: job {request.job}: no quorum follows this supervisor; waiting for its successor", file=sys.stderr)
    heard_at = time.monotonic()
    while time.monotonic() - heard_at < SUCCESSOR_TIMEOUT_S:
        if (code := job.exit_code()) is not None:
            return code
        if _is_led(job):
            heard_at = time.monotonic()
        time.sleep(LOOK_EVERY_S)
    return REQUEUE_REQUESTED


def _is_led(job: Job) -> bool:
    """Return whether a process accepts connections at the recorded address of the job's supervisor."""
    with suppress(OSError, msgspec.DecodeError):
        address = msgspec.json.decode(job.supervisor_file.read_bytes(), type=SupervisorFile)
        with socket.create_connection((address.host, address.port), timeout=LOOK_EVERY_S):
            return True
    return False


def _is_batch_script() -> bool:
    """Return whether this process is the batch script itself (`exec resihp run`), so that nothing follows it in the
    Slurm job."""
    step = os.environ.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < 1 << 31:
        return False  # a task of srun, which has such a parent, too; the id of a batch script is none, or -5 (26.05)
    with suppress(OSError):
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() == "slurmstepd"
    return False


def cancel_if_stopped(request: RunRequest, status: int) -> None:
    """Cancel the Slurm job if an operator has stopped its training: Slurm would call it FAILED because of its exit
    code. A job that Slurm itself has stopped may be queued again. To be called last: Slurm kills this process soon
    after."""
    if request.slurm is None or status not in STOPPED_CODES or not _is_batch_script():
        return
    from resihp.record.journal import JobSignalled
    from resihp.slurm.commands import CommandLine
    from resihp.wrapper.slurm_tasks.requeue import cancel

    with suppress(OSError, ResihpError):
        signals = [record.entry for record in request.of_job.records() if isinstance(record.entry, JobSignalled)]
        if any(entry.meaning == "operator" for entry in signals):
            cancel(request.slurm.job_id, CommandLine())


def _requeue(request: RunRequest) -> int:
    """Have Slurm requeue the job and return 0; return REQUEUE_REQUESTED if Slurm refuses, or if the job is not in
    Slurm."""
    if request.slurm is None:
        return REQUEUE_REQUESTED
    from resihp.slurm.commands import CommandLine
    from resihp.wrapper.output.render import say
    from resihp.wrapper.slurm_tasks.next_run import exclude_bad_nodes
    from resihp.wrapper.slurm_tasks.requeue import dead_nodes, requeue, until_noticed

    for signal_number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # a warning must not end this process before the requeue
    number, slurm = request.slurm.job_id, CommandLine()
    if request.slurm.gpus:
        until_noticed(number, slurm, dead_nodes(request.of_job))
    is_requeued = requeue(number, slurm, leaves=True, accepted=lambda: exclude_bad_nodes(request, slurm, say))
    return 0 if is_requeued else REQUEUE_REQUESTED
