"""The supervisor's process: opens a job's resources, runs `resihp.wrapper.supervisor.shell.Supervisor`, maps errors to
exit codes.

`python -P -m resihp.wrapper.supervisor.process --run FILE --listen FD`, started by the guardian. With `--take-over` it
replaces a supervisor that died. With `--successor` it was started by an agent, because the guardian's node is lost. In
both cases it rebuilds the controller from the journal, and agents that accept its term report the rest. With `--bury`,
after the last permitted restart, it only records the job's end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import resihp
from resihp.controller.fail_stop.onsets import MAX_KEPT_COMMITS, Commit
from resihp.controller.interface import AnyEvent, Dependencies
from resihp.errors import ProtocolError, ResihpError
from resihp.process import die_with_parent, inherited_socket, name_process, raise_open_files
from resihp.record.journal import AnyEntry, JobStarted, LeaderChosen
from resihp.record.journal_file import Journal
from resihp.record.packing import last_commits
from resihp.wrapper import early_signals
from resihp.wrapper.config.run_spec import RunRequest, load
from resihp.wrapper.exit_codes import CANNOT_LEAD, LEADER_DEPOSED, TRAINING_BROKEN, exit_code_of
from resihp.wrapper.job_files.registered import user_name
from resihp.wrapper.launch.allocation import end_time
from resihp.wrapper.launch.launcher import Followers, Launcher, LocalLauncher
from resihp.wrapper.output.first_rank import FirstRank
from resihp.wrapper.output.job_history import JobHistory
from resihp.wrapper.output.render import say
from resihp.wrapper.sinks.deferred_ledger import DeferredLedger
from resihp.wrapper.sinks.fanout import LedgerLike, Listeners, listeners
from resihp.wrapper.sinks.progress_file import ProgressFileWriter
from resihp.wrapper.slurm_tasks.job_comment import JobComment
from resihp.wrapper.supervisor.aftermath import end_slurm_job, leave_chain_note, mark_dead
from resihp.wrapper.supervisor.collaborators import ControllerLike, SlurmDeskLike, ViewLike
from resihp.wrapper.supervisor.node_history import NodeMemory
from resihp.wrapper.supervisor.patient_output import log_without_waiting, never_wait_for
from resihp.wrapper.supervisor.shell import Supervisor
from resihp.wrapper.supervisor.takeover import TakeoverSource, agents_are_started, inherit, takeover_source
from resihp.wrapper.supervisor.thinking.loading import SearchLoader
from resihp.wrapper.supervisor.thinking.thinker import Thinker, command

if TYPE_CHECKING:
    from resihp.db.writer import Ledger


async def supervise(
    request: RunRequest,
    listener: socket.socket,
    takeover: TakeoverSource | None,
    journal: Path,
    forks: socket.socket | None = None,
) -> int:
    """Run one job to its end and return the exit code. Raises UsageError before anything is started."""
    from rich.console import Console

    from resihp.controller import Controller
    from resihp.wrapper.sinks.terminal import LiveView

    job = request.of_job
    loop = asyncio.get_running_loop()

    def warn(text: str) -> None:
        loop.call_soon_threadsafe(lambda: view.say("warning", text))

    def open_ledger() -> Ledger:
        from resihp.db.writer import Ledger

        keep_s = request.ledger_keep_s
        return Ledger.open(request.ledger_url, job.folder, say=warn, journal_path=journal, keep_s=keep_s)

    ledger: LedgerLike
    if takeover is not None:
        ledger = DeferredLedger(open_ledger, journal, warn)
    elif (server := _server(request)) is not None:
        job.set_ledger(server)
        ledger = DeferredLedger(open_ledger, journal, warn, pause_s=0.0)
    else:
        ledger = opened = open_ledger()
        job.set_ledger(opened.url)
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        console = Console(stderr=True, width=120, height=25)  # asking a hung file for its size would block, too
    view: ViewLike = LiveView(console, request.settings, past=takeover.records if takeover else ())
    loader = SearchLoader(request.settings, takeover.records if takeover else ())
    asks = Dependencies(planner=loader.planner)
    if takeover is None:
        controller = Controller(request.settings, asks)
    else:
        entries, now = (record.entry for record in takeover.records), time.time()
        commits = [
            Commit(i, min(at - now, 0.0), took) for i, at, took in last_commits(takeover.records, MAX_KEPT_COMMITS)
        ]
        controller = Controller.recover(request.settings, entries, asks, commits)
    return await supervise_with(
        request,
        controller,
        ledger,
        view,
        listener=listener,
        takeover=takeover,
        journal=journal,
        forks=forks,
        loader=loader,
    )


def _server(request: RunRequest) -> str | None:
    """Return the ledger's absolute URL if it is on a server, else None. A ledger on a server is opened in the
    background, because the server may be down, full, hung, or waiting for its administrator. Raises LedgerError for a
    URL that can never be opened."""
    from resihp.db.engine import check, file_of, resolve

    url = resolve(request.ledger_url, request.of_job.folder)
    if file_of(url) is not None:
        return None
    check(url)
    return url.render_as_string(hide_password=False)


async def supervise_with(
    request: RunRequest,
    controller: ControllerLike,
    ledger: LedgerLike,
    view: ViewLike,
    *,
    listener: socket.socket,
    takeover: TakeoverSource | None = None,
    journal: Path | None = None,
    forks: socket.socket | None = None,
    loader: SearchLoader | None = None,
) -> int:
    """Run one job with the given controller, ledger and view; see `supervise`."""
    job = request.of_job
    host = listener.getsockname()[0]
    loop = asyncio.get_running_loop()

    def warn(text: str) -> None:
        loop.call_soon_threadsafe(view.say, "warning", text)

    def show(lines: Sequence[str], left_out: int) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(view.output, lines, left_out)

    past = takeover.records if takeover else ()
    history = JobHistory.of_records(past, plans_kept=1)
    comment, first = JobComment(request, past), FirstRank(job.logs, show, past)
    progress = ProgressFileWriter(job, past, history=history)
    others = [*listeners(request, ledger, warn, past, history), comment, first, progress]
    ledger = Listeners(ledger, [*others, *([loader] if loader else [])])
    supervisor = Supervisor(
        request,
        controller=controller,
        launcher=_launcher(request, host, takeover, view, forks),
        journal=takeover.journal if takeover else Journal(journal or job.journal_file),
        ledger=ledger,
        view=view,
        slurm=_desk(request, takeover, comment),
        memory=_memory(request),
        thinker=partial(_thinker, request) if request.settings.plans_ahead else None,
        listener=listener,
        lead=takeover.lead if takeover else None,
        membership=takeover.membership if takeover else None,
    )
    return await supervisor.run(_first_entry(request, takeover))


def _launcher(
    request: RunRequest, host: str, takeover: TakeoverSource | None, view: ViewLike, forks: socket.socket | None
) -> Launcher:
    if takeover is not None and takeover.how == "elected":
        return Followers(host, tuple(sorted(takeover.membership.joined)))
    if request.slurm is not None:
        from resihp.wrapper.launch.slurm_launcher import SlurmLauncher

        return SlurmLauncher(request, host, view.say)
    return LocalLauncher(request.of_job, request.of_job.run_file, request.settings.nodes, forks)


def _desk(
    request: RunRequest, takeover: TakeoverSource | None, comment: JobComment
) -> Callable[[Callable[[AnyEvent], None]], SlurmDeskLike] | None:
    if request.slurm is None:
        return None
    from resihp.wrapper.slurm_tasks.desk import SlurmDesk

    known_end_time = end_time(os.environ, time.time()) if takeover is None else None  # it may have changed since
    return lambda event: SlurmDesk(request, event, comment=comment, end_time=known_end_time)


def _memory(request: RunRequest) -> NodeMemory | None:
    if not request.settings.examine or request.ledger_url == "sqlite":
        return None
    return NodeMemory(request.ledger_url, cluster=request.slurm.cluster if request.slurm else "")


def _thinker(request: RunRequest, event: Callable[[AnyEvent], None]) -> Thinker:
    return Thinker(event, command(request.settings.planner))


def _first_entry(request: RunRequest, takeover: TakeoverSource | None) -> AnyEntry:
    if takeover is not None:
        host = socket.gethostname()
        return LeaderChosen(
            term=takeover.term, node=takeover.node, host=host, how=takeover.how, after=takeover.lead.log
        )
    settings = request.settings
    return JobStarted(
        job=request.job,
        command=request.command,
        nodes=settings.nodes,
        gpus_per_node=settings.gpus_per_node,
        tp=settings.tp,
        pp=settings.pp,
        schedule=settings.schedule,
        host=socket.gethostname(),
        user=user_name(),
        restart_count=request.restart_count,
        version=resihp.__version__,
        configuration=_with_spares(request.configuration, settings.spares),
        leader=settings.batch_node,
        run=request.run,
        slurm=None if request.slurm is None else request.slurm.identity,
    )


def _with_spares(configuration: dict[str, Any], spares: int) -> dict[str, Any]:
    """Return the configuration with the actual number of spare nodes, because Slurm may have allocated more nodes than
    requested. The ledger derives from this number how many devices the first layout was meant to have."""
    slurm = configuration.get("slurm")
    return {**configuration, "slurm": {**(slurm if isinstance(slurm, dict) else {}), "spares": spares}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="resihp.wrapper.supervisor.process")
    parser.add_argument("--run", required=True, type=Path, help="the job's run.json")
    parser.add_argument("--listen", required=True, type=int, help="bound socket that agents connect to")
    parser.add_argument("--parent", type=int, help="process id of the guardian")
    parser.add_argument(
        "--forks", type=int, help="inherited socket of the process that forks fork servers of virtual nodes"
    )
    parser.add_argument("--take-over", help="how the previous supervisor died")
    parser.add_argument("--bury", help="how the last supervisor died; no other is started")
    parser.add_argument("--successor", help="node whose agent has started this supervisor")
    parser.add_argument("--copy", type=Path, help="that agent's copy of the journal")
    parser.add_argument("--term", type=int, default=0, help="term for which the agents have voted")
    options = parser.parse_args(arguments)
    early_signals.note()
    never_wait_for("stdout", "stderr")
    # vfork stops this process until the child has closed its inherited files, which is slow on a file system that
    # hangs.
    subprocess._USE_VFORK = False  # type: ignore[misc]
    raise_open_files()
    if options.parent is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the shell listens to it
        die_with_parent(options.parent, signal.SIGHUP)
    try:
        request = load(options.run)
        name_process(request.job, "supervisor", keep=4)
        listener = socket.socket(fileno=options.listen)
        forks = None if options.forks is None else inherited_socket(options.forks)
        if options.bury:
            sys.exit(mark_dead(request, options.bury, listener))
        log_without_waiting(request.of_job.logs / "supervisor.log")
        takeover, journal = None, request.of_job.journal_file
        try:
            if options.successor:
                journal = inherit(options.copy)
                takeover = takeover_source(journal, options.successor, "elected", options.term)
                request.of_job.move_journal(journal)  # from here on, commands find it here
            elif options.take_over:
                are_started = partial(agents_are_started, request)
                takeover = takeover_source(journal, request.settings.batch_node, "restarted", are_started=are_started)
        except (ProtocolError, OSError, ValueError) as error:
            say(f"job {request.job}: cannot be taken over: {error}")
            if options.successor:
                sys.exit(CANNOT_LEAD)  # other agents, of this node and all others, must not be ended
            sys.exit(mark_dead(request, options.take_over, listener))
        status = asyncio.run(supervise(request, listener, takeover, journal, forks))
        early_signals.ignore()  # the job is done: dying of a signal now would cause a take-over
        if request.chained and status == TRAINING_BROKEN:
            leave_chain_note(request, journal)
        if options.successor and request.slurm is not None and status != LEADER_DEPOSED:
            end_slurm_job(request, status)
        sys.exit(status)
    except ResihpError as error:
        say(f"{error}")
        sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
