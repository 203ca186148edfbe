"""The supervisor's process: opens what a job needs, runs `wrapper.supervisor.shell.Supervisor`, maps errors to exit
codes.

`python -P -m wrapper.supervisor.process --run FILE --listen FD`, started by the guardian. With `--take-over` it runs
after one that died, and with `--successor` an agent has started it because the guardian's node is gone: both make their
controller from the journal, and agents that accept their term tell them the rest. With `--bury` nothing is left to be
tried: it writes the job's end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

import resihp
from resihp.controller.fail_stop.onsets import MAX_KEPT_COMMITS, Commit
from resihp.controller.interface import AnyEvent, Dependencies
from resihp.errors import LedgerError, ProtocolError, ResihpError
from resihp.process import die_with_parent, inherited_socket, name_process, raise_open_files
from resihp.protocol.messages import Lead
from resihp.record.journal import AnyEntry, JobEnded, JobStarted, LeaderChosen, NodeJoined, Record
from resihp.record.journal_file import Journal, read_packed
from resihp.record.packing import last_commits
from resihp.record.quorum import Membership
from wrapper import early_signals
from wrapper.config.run_spec import RunRequest, load
from wrapper.exit_codes import BROKEN, CANNOT_LEAD, DEPOSED, REQUEUE, exit_code_of
from wrapper.job_files import user_name
from wrapper.job_folder import Job, finish_dead_job, note_end, write_private
from wrapper.launch.allocation import end_time
from wrapper.launch.launcher import Followers, Launcher, LocalLauncher
from wrapper.output.first_rank import FirstRank
from wrapper.output.render import literal
from wrapper.sinks.deferred_ledger import LateLedger
from wrapper.sinks.fanout import LedgerLike, Listeners, listeners, tell_of_the_end
from wrapper.sinks.progress_file import ProgressFileWriter
from wrapper.slurm_tasks.job_comment import JobComment, say_at_last
from wrapper.supervisor.collaborators import ControllerLike, SlurmDeskLike, ViewLike
from wrapper.supervisor.node_history import NodeMemory
from wrapper.supervisor.patient_output import log_without_waiting, never_wait_for
from wrapper.supervisor.shell import Supervisor
from wrapper.supervisor.thinking.loading import SearchLoader
from wrapper.supervisor.thinking.thinker import Thinker, command

if TYPE_CHECKING:
    from db.writer import Ledger

AGENTS_GONE_S = 10.0
GUARDIAN_LEAVES_S = 5.0
"""How long a guardian that waits for its job's end takes to notice it, and to leave."""
END_PATIENCE_S = 45.0
"""How long a Slurm that does not answer is asked to end its job: our agent waits a little longer for us."""


@dataclass(frozen=True)
class Heir:
    """Who takes over, from what: the journal as the one before left it, or as an agent's copy has it."""

    node: str
    term: int
    how: Literal["restarted", "elected"]
    records: tuple[Record, ...]
    membership: Membership
    """What they say of leaders and voters."""
    journal: Journal
    """The file that they are from, to be written on."""

    @property
    def lead(self) -> Lead:
        return Lead(term=self.term, node=self.node, log=self.records[-1].seq)


async def supervise(
    request: RunRequest,
    listener: socket.socket,
    heir: Heir | None,
    journal: Path,
    forks: socket.socket | None = None,
) -> int:
    """Run one job to its end; returns the exit code. Raises UsageError before anything is started."""
    from rich.console import Console

    from resihp.controller import Controller
    from wrapper.sinks.terminal import LiveView

    job = request.of_job
    loop = asyncio.get_running_loop()

    def warn(text: str) -> None:
        loop.call_soon_threadsafe(lambda: view.say("warning", text))

    def open_ledger() -> Ledger:
        from db.writer import Ledger

        keep_s = request.ledger_keep_s
        return Ledger.open(request.ledger_url, job.folder, say=warn, journal_path=journal, keep_s=keep_s)

    ledger: LedgerLike
    if heir is not None:
        ledger = LateLedger(open_ledger, journal, warn)
    elif (server := _server(request)) is not None:
        job.set_ledger(server)
        ledger = LateLedger(open_ledger, journal, warn, pause_s=0.0)
    else:
        ledger = opened = open_ledger()
        job.set_ledger(opened.url)
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        console = Console(stderr=True, width=120, height=25)  # asking a hung file for its size would wait, too
    view: ViewLike = LiveView(console, request.settings, past=heir.records if heir else ())
    loader = SearchLoader(request.settings, heir.records if heir else ())
    asks = Dependencies(planner=loader.planner)
    if heir is None:
        controller = Controller(request.settings, asks)
    else:
        entries, now = (record.entry for record in heir.records), time.time()
        commits = [Commit(i, min(at - now, 0.0), took) for i, at, took in last_commits(heir.records, MAX_KEPT_COMMITS)]
        controller = Controller.recover(request.settings, entries, asks, commits)
    return await supervise_with(
        request, controller, ledger, view, listener=listener, heir=heir, journal=journal, forks=forks, loader=loader
    )


def _server(request: RunRequest) -> str | None:
    """The ledger's absolute URL if it is a server's, which is opened behind: it may be down, full, hung, or wait for
    its administrator. Raises LedgerError for one that can never be opened."""
    from db.engine import check, file_of, resolve

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
    heir: Heir | None = None,
    journal: Path | None = None,
    forks: socket.socket | None = None,
    loader: SearchLoader | None = None,
) -> int:
    """`supervise` with its parts given."""
    job = request.of_job
    host = listener.getsockname()[0]
    loop = asyncio.get_running_loop()

    def warn(text: str) -> None:
        loop.call_soon_threadsafe(view.say, "warning", text)

    def show(lines: Sequence[str], left_out: int) -> None:
        with suppress(RuntimeError):  # all is over
            loop.call_soon_threadsafe(view.output, lines, left_out)

    past = heir.records if heir else ()
    comment, first = JobComment(request, past), FirstRank(job.logs, show, past)
    others = [*listeners(request, ledger, warn, past), comment, first, ProgressFileWriter(job, past)]
    ledger = Listeners(ledger, [*others, *([loader] if loader else [])])
    supervisor = Supervisor(
        request,
        controller=controller,
        launcher=_launcher(request, host, heir, view, forks),
        journal=heir.journal if heir else Journal(journal or job.journal_file),
        ledger=ledger,
        view=view,
        slurm=_desk(request, heir, comment),
        memory=_memory(request),
        thinker=partial(_thinker, request) if request.settings.plans_ahead else None,
        listener=listener,
        lead=heir.lead if heir else None,
        membership=heir.membership if heir else None,
    )
    return await supervisor.run(_first_entry(request, heir))


def _launcher(
    request: RunRequest, host: str, heir: Heir | None, view: ViewLike, forks: socket.socket | None
) -> Launcher:
    if heir is not None and heir.how == "elected":
        return Followers(host, tuple(sorted(heir.membership.joined)))
    if request.slurm is not None:
        from wrapper.launch.slurm_launcher import SlurmLauncher

        return SlurmLauncher(request, host, view.say)
    return LocalLauncher(request.of_job, request.of_job.run_file, request.settings.nodes, forks)


def _desk(
    request: RunRequest, heir: Heir | None, comment: JobComment
) -> Callable[[Callable[[AnyEvent], None]], SlurmDeskLike] | None:
    if request.slurm is None:
        return None
    from wrapper.slurm_tasks.desk import SlurmDesk

    said = end_time(os.environ, time.time()) if heir is None else None  # it may have been changed since
    return lambda event: SlurmDesk(request, event, comment=comment, end_time=said)


def _memory(request: RunRequest) -> NodeMemory | None:
    if not request.settings.examine or request.ledger_url == "sqlite":
        return None
    return NodeMemory(request.ledger_url, cluster=request.slurm.cluster if request.slurm else "")


def _thinker(request: RunRequest, event: Callable[[AnyEvent], None]) -> Thinker:
    return Thinker(event, command(request.settings.planner))


def _end_slurm_job(request: RunRequest, status: int) -> None:
    """A successor has ended the job, and nobody may be left on the batch host to end Slurm's: do it then."""
    assert request.slurm is not None
    from slurm.commands import CommandLine
    from slurm.errors import SlurmError, SlurmRefusedError
    from wrapper.slurm_tasks.requeue import dead_nodes, requeue, until_noticed

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it to whoever is still in the job, so to us
    slurm, number = CommandLine(), request.slurm.job_id
    if status == REQUEUE:
        if request.slurm.gpus:
            until_noticed(number, slurm, dead_nodes(request.of_job), patience_s=END_PATIENCE_S)
        requeue(number, slurm)
        return
    deadline = time.monotonic() + END_PATIENCE_S
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
                _say(f"job {request.job}: {text}")
                return


def _tell_the_chain(request: RunRequest, journal: Path) -> None:
    from wrapper.slurm_tasks import chain

    chain.leave_note(request, read_packed(journal), lambda text: _say(f"job {request.job}: {text}"))


def _first_entry(request: RunRequest, heir: Heir | None) -> AnyEntry:
    if heir is not None:
        host = socket.gethostname()
        return LeaderChosen(term=heir.term, node=heir.node, host=host, how=heir.how, after=heir.lead.log)
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
    """With the spare nodes that there are: Slurm may have given more than were asked for. So the ledger knows how many
    devices the layout was to have."""
    slurm = configuration.get("slurm")
    return {**configuration, "slurm": {**(slurm if isinstance(slurm, dict) else {}), "spares": spares}}


def heir_of(
    journal: Path,
    node: str,
    how: Literal["restarted", "elected"],
    least_term: int = 0,
    are_started: Callable[[], bool] = lambda: False,
) -> Heir:
    """Who takes over from this journal. Raises ProtocolError when there is nothing to take over.

    `are_started`: whether agents are there that will join although none of them has. A term is noted beside the journal
    before anybody hears of it: one that was tried in vain is never tried again.
    """
    records: list[Record] = []
    opened = Journal(journal, found=records)
    if not records or not isinstance(records[0].entry, JobStarted):
        raise ProtocolError("the journal has no beginning")
    ended = next((record.entry for record in records if isinstance(record.entry, JobEnded)), None)
    if ended is not None:
        raise ProtocolError(f"the job has ended: {ended.reason}")
    membership = Membership()
    for record in records:
        membership.apply(record)
    heir = Heir(node, 0, how, tuple(records), membership, opened)
    if not any(isinstance(record.entry, NodeJoined) for record in records) and not are_started():
        raise ProtocolError("no agent had joined it, and not all were started")
    noted = journal.with_suffix(".term")
    tried = int(noted.read_text()) if noted.exists() else 0
    term = max(least_term, heir.membership.term + 1, tried + 1)
    write_private(noted, str(term).encode(), sync=True)
    return replace(heir, term=term)


def agents_are_started(request: RunRequest) -> bool:
    """Whether no agent is missing, as far as can be seen from here: srun starts those of all other nodes."""
    started: set[str] = set()
    for process in _agents(request.of_job):
        with suppress(psutil.Error):
            words = process.cmdline()
            started.update(node for option, node in itertools.pairwise(words) if option == "--node")
    return bool(started) if request.slurm is not None else len(started) == request.settings.nodes


def bury(request: RunRequest, how: str, listener: socket.socket) -> int:
    """Write the end of a job whose supervisor died, unless it did; wait until its agents are gone. Its exit code."""
    listener.shutdown(socket.SHUT_RDWR)  # whoever else has it open: nobody is to wait there any more
    job = request.of_job
    finished = True
    with _told_of_ledger(job):
        finished = finish_dead_job(job, f"the supervisor {how}", locked=True)
    ended = next((record.entry for record in job.records() if isinstance(record.entry, JobEnded)), None)
    status = 1 if ended is None or ended.exit_code is None else ended.exit_code
    text = "the job ended abnormally"
    if ended is not None and not finished:
        text = f"the job had ended: {ended.reason}"
        write_private(job.exit_code_file, f"{status}\n".encode())
        note_end(job, status)
        with _told_of_ledger(job):
            if (url := job.ledger_url) is not None and job.journal_file.exists():
                from db.writer import catch_up

                catch_up(url, job.folder, job.journal_file)
    _say(f"job {job.name}: the supervisor {how}; {text}, logs in {job.logs}")
    tell_of_the_end(request, job.records(), lambda text: _say(f"job {job.name}: {text}"))
    if request.slurm is not None:
        _say_at_last(request)
    deadline = time.monotonic() + AGENTS_GONE_S
    while (left := _agents(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        _say(f"job {job.name}: process {process.pid} is still there, killing it")
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    return status


@contextmanager
def _told_of_ledger(job: Job) -> Iterator[None]:
    """A ledger that cannot be written changes nothing of the job's end, which the journal has."""
    try:
        yield
    except LedgerError as error:
        _say(f"job {job.name}: {error}; the next resihp status brings in what it lacks")


def _say(text: str) -> None:
    """Print a line on stderr. What it quotes may come from a worker's log or from Slurm, and steers no terminal."""
    print(f"resihp: {literal(text)}", file=sys.stderr)


def _say_at_last(request: RunRequest) -> None:
    from slurm.commands import CommandLine
    from slurm.errors import SlurmError

    try:
        say_at_last(request, request.of_job.records(), CommandLine())
    except SlurmError as error:
        _say(f"job {request.job}: {error}")


def _agents(job: Job) -> list[psutil.Process]:
    """Agents of the job on this machine: live processes that were started for its run file."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if "wrapper.agent.process" in command and str(job.run_file) in command:  # a zombie has no command line
            found.append(process)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="wrapper.supervisor.process")
    parser.add_argument("--run", required=True, type=Path, help="the job's run.json")
    parser.add_argument("--listen", required=True, type=int, help="bound socket that agents connect to")
    parser.add_argument("--parent", type=int, help="process id of who watches over it")
    parser.add_argument("--forks", type=int, help="inherited socket to what forks the fork servers of virtual nodes")
    parser.add_argument("--take-over", help="a supervisor died before this one: how")
    parser.add_argument("--bury", help="all supervisors died: how the last one did")
    parser.add_argument("--successor", help="the node on which it was started, by its agent")
    parser.add_argument("--copy", type=Path, help="that agent's copy of the journal")
    parser.add_argument("--term", type=int, default=0, help="the term that agents were asked about")
    options = parser.parse_args(arguments)
    early_signals.note()
    never_wait_for("stdout", "stderr")
    # vfork stops all of us until a child has closed what it inherited, and files of a folder that hangs take long.
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
            sys.exit(bury(request, options.bury, listener))
        log_without_waiting(request.of_job.logs / "supervisor.log")
        heir, journal = None, request.of_job.journal_file
        try:
            if options.successor:
                journal = _inherit(options.copy)
                heir = heir_of(journal, options.successor, "elected", options.term)
                request.of_job.move_journal(journal)  # from here on, commands look for it here
            elif options.take_over:
                are_started = partial(agents_are_started, request)
                heir = heir_of(journal, request.settings.batch_node, "restarted", are_started=are_started)
        except (ProtocolError, OSError, ValueError) as error:
            _say(f"job {request.job}: cannot be taken over: {error}")
            if options.successor:
                sys.exit(CANNOT_LEAD)  # the agents of this node and all others are not ours to end
            sys.exit(bury(request, options.take_over, listener))
        status = asyncio.run(supervise(request, listener, heir, journal, forks))
        early_signals.ignore()  # all is done: who dies of one now would be taken over
        if request.chained and status == BROKEN:
            _tell_the_chain(request, journal)
        if options.successor and request.slurm is not None and status != DEPOSED:
            _end_slurm_job(request, status)
        sys.exit(status)
    except ResihpError as error:
        _say(f"{error}")
        sys.exit(exit_code_of(error))


def _inherit(copy: Path) -> Path:
    """The journal of a supervisor on this node: what its agent has of it."""
    journal = copy.with_suffix(".journal")
    if not journal.exists():  # else one of ours was here before, and wrote on
        shutil.copyfile(copy, journal)
    return journal


if __name__ == "__main__":
    main()
