"""The supervisor's process: opens what a job needs, runs `wrapper.shell.Supervisor`, maps errors to exit codes.

`python -P -m wrapper.supervisor --run FILE [--recover HOW]`, started by the guardian. With `--recover` it runs after a
supervisor that died: it writes the job's end and waits for the agents, which end themselves; it does not take over.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

import resihp
from resihp.errors import ResihpError, UsageError
from resihp.journal import JobStarted, Journal
from resihp.process import die_with_parent
from wrapper.exit_codes import exit_code_of
from wrapper.jobs import Job, finish_dead_job, take_lock
from wrapper.launcher import LocalLauncher
from wrapper.request import RunRequest, load
from wrapper.shell import ControllerLike, LedgerLike, StoreLike, Supervisor, ViewLike
from wrapper.store_process import StoreProcess

LOCK_PATIENCE_S = 2.0
"""Commands that look whether a job is alive hold its lock for a moment."""
AGENTS_GONE_S = 10.0


async def supervise(request: RunRequest) -> int:
    """Run one job to its end; returns the exit code. Raises UsageError before anything is started."""
    from rich.console import Console

    from db.writer import Ledger
    from resihp.controller import Controller
    from wrapper.live import LiveView

    job = request.of_job
    loop = asyncio.get_running_loop()

    def warn(text: str) -> None:
        loop.call_soon_threadsafe(lambda: view.say("warning", text))

    ledger = Ledger.open(request.ledger_url, job.folder, say=warn, journal_path=job.journal_file)
    job.set_ledger(ledger.url)
    view: ViewLike = LiveView(Console(stderr=True), request.settings)
    return await supervise_with(request, Controller(request.settings), ledger, view)


async def supervise_with(
    request: RunRequest,
    controller: ControllerLike,
    ledger: LedgerLike,
    view: ViewLike,
    store: StoreLike | None = None,
) -> int:
    """`supervise` with its parts given."""
    job = request.of_job
    supervisor = Supervisor(
        request,
        controller=controller,
        launcher=LocalLauncher(job, job.run_file, request.nodes),
        store=store or StoreProcess("127.0.0.1", request.program.interpreter, job.logs / "store.log"),
        journal=Journal(job.journal_file),
        ledger=ledger,
        view=view,
    )
    return await supervisor.run(
        JobStarted(
            job=request.job,
            command=request.command,
            nodes=request.nodes,
            gpus_per_node=request.gpus_per_node,
            tp=request.tp,
            pp=request.pp,
            schedule=request.schedule,
            host=socket.gethostname(),
            user=getpass.getuser(),
            restart_count=request.restart_count,
            version=resihp.__version__,
            configuration=request.configuration,
        )
    )


def hold_lock(job: Job) -> int:
    """Take the job's lock. Raises UsageError when another supervisor has it."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (lock := take_lock(job)) is None:
        if time.monotonic() > deadline:
            raise UsageError(f"job {job.name}: another supervisor holds {job.folder / 'supervisor.lock'}")
        time.sleep(0.05)
    return lock


def recover(request: RunRequest, how: str) -> int:
    """Write the end of a job whose supervisor died, and wait until its agents are gone."""
    job = request.of_job
    reason = f"the supervisor {how}"
    if not finish_dead_job(job, reason) and (url := job.read().ledger) is not None and job.journal_file.exists():
        from db.writer import catch_up

        catch_up(url, job.folder, job.journal_file)
    print(f"resihp: job {job.name}: {reason}; the job ended abnormally, logs in {job.logs}", file=sys.stderr)
    deadline = time.monotonic() + AGENTS_GONE_S
    while (left := _agents(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        print(f"resihp: job {job.name}: process {process.pid} is still there, killing it", file=sys.stderr)
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    return 1


def _agents(job: Job) -> list[psutil.Process]:
    """Agents of the job on this machine: live processes that were started for its run file."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "wrapper.agent" in command and str(job.run_file) in command:  # a zombie has no command line
            found.append(process)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="wrapper.supervisor")
    parser.add_argument("--run", required=True, type=Path, help="the job's run.json")
    parser.add_argument("--parent", type=int, help="process id of the guardian")
    parser.add_argument("--recover", help="a supervisor died before this one: how")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the shell listens to it
        die_with_parent(options.parent, signal.SIGHUP)
    try:
        request = load(options.run)
        if options.recover:
            sys.exit(recover(request, options.recover))
        logging.basicConfig(
            filename=request.of_job.logs / "supervisor.log", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        lock = hold_lock(request.of_job)
        try:
            sys.exit(asyncio.run(supervise(request)))
        finally:
            os.close(lock)
    except ResihpError as error:
        print(f"resihp: {error}", file=sys.stderr)
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
