"""`resihp logs`: the ends of a job's logs, of all its processes or of one, and what is added to them.

Reads files in the job's folder, where agents bring what their processes print about once a second; never speaks to the
job. What the supervisor printed is in its log and, where the job's host has died, in the log of the agent whose node
leads since then. Whose log is not there yet is waited for by `-f`, unless the job cannot have it.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from resihp.errors import ResihpError, UsageError
from resihp.plain_files import is_plain
from wrapper.output.answers import SCHEMA, JobArgument, JsonOption, for_stdout, message, to_json
from wrapper.output.tail import GrowingFiles, last_lines
from wrapper.strict_modes import check_links, read_plain

if TYPE_CHECKING:
    from wrapper.job_folder import Job

LINES, LINES_OF_EACH = 50, 10
MOST_FILES = 16
"""Of which the ends are shown at once, those that were written last."""
LOOK_EVERY_S = 0.5
FIND_EVERY_S = 5.0
"""New processes, and whoever leads the job now."""
GONE_S = 60.0
"""Without a supervisor, after which there is nothing more to come."""
MOST_LEADERS = 100
_OF_RANK = re.compile(r"\.rank(\d+)\.log$")


class Whose(NamedTuple):
    """Whose logs; all where nothing is said."""

    rank: int | None = None
    node: str | None = None
    supervisor: bool = False

    def __str__(self) -> str:
        if self.supervisor:
            return "the supervisor"
        of_rank = "" if self.rank is None else f"rank {self.rank}"
        parts = [part for part in (of_rank, f"node {self.node}" if self.node else "") if part]
        return " on ".join(parts) or "its processes"


class _Look(NamedTuple):
    """At a file, once: a large job has tens of thousands, on a shared file system."""

    size: int
    written_at: float


def register(app: typer.Typer) -> None:
    """Add `resihp logs` to the command line."""
    app.command()(logs)


def logs(
    job: JobArgument = None,
    rank: Annotated[int | None, typer.Option(help="This worker's.", min=0, show_default=False)] = None,
    node: Annotated[str | None, typer.Option(help="Those of this node's processes.", show_default=False)] = None,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="The supervisor's, and those of whoever led the job after it.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until the job ends.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="Of each.", min=0, show_default="50; of many, 10")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the ends of a job's logs: of one process, of a node, or of those that printed last.

    Example: resihp logs 4711 --rank 5 -f
    """
    from wrapper.job_folder import find_job

    if supervisor and (rank is not None or node is not None):
        raise UsageError("logs: name one of --supervisor, --rank and --node; a rank on a node is --rank R --node N")
    if follow and as_json:
        raise UsageError("logs: --json is what there is now; leave -f out")
    found, wanted = find_job(job), Whose(rank, node, supervisor)
    paths = files_of(found, wanted)
    if not paths:
        if not follow or found.is_over or found.never_began(time.time()):
            raise UsageError(f"job {found.name}: {_nothing(found, wanted)}")
        if why_not := _cannot_come(found, wanted):
            raise UsageError(f"job {found.name}: {why_not}{_instead(found)}")
        message(f"job {found.name}: waiting for {wanted} to start{_instead(found)}")
    looked = {path: _look(path) for path in paths}
    written = [path for path in paths if looked[path].size] or paths[:1]
    shown = sorted(written, key=lambda path: looked[path].written_at)[-MOST_FILES:]
    many = len(paths) > 1
    each = (LINES_OF_EACH if many else LINES) if lines is None else lines
    growing, ends = GrowingFiles(), {}
    for path in paths:
        growing.begin(path, looked[path].size)
    for path in shown:
        with suppress(OSError):
            ends[path], at = last_lines(path, each)
            growing.begin(path, at)
    if as_json:
        print(to_json({"schema": SCHEMA, "job": found.name, "folder": str(found.logs), "logs": _rows(ends)}))
        return
    for path, told in ends.items():
        if many:
            print(f"==> {for_stdout(path.name)} <==")
        for line in told:
            print(_shown(line))
    if left := len(written) - len(shown):
        message(f"job {found.name}: {left} more logs in {found.logs}; choose with --rank R, --node N or --supervisor")
    if supervisor and not follow:
        message(f"what it did and why: resihp history events {found.name}")
    if follow:
        with suppress(KeyboardInterrupt):
            _follow(found, wanted, growing, many)


def files_of(job: Job, wanted: Whose) -> list[Path]:
    """Logs of these processes that are there."""
    try:
        check_links(job.logs)
        every = [path for path in job.logs.iterdir() if path.suffix == ".log" and is_plain(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ResihpError(f"job {job.name}: {job.logs}: {error.strerror}") from error
    if wanted.supervisor:
        names = {"supervisor.log", *(f"{node}.agent.log" for node in _leaders(job))}
        return sorted(path for path in every if path.name in names)
    if wanted.node is not None:
        every = [path for path in every if path.name.startswith(f"{wanted.node}.")]
    if wanted.rank is not None:
        every = [path for path in every if (of := _OF_RANK.search(path.name)) and int(of[1]) == wanted.rank]
    return sorted(every)


def _leaders(job: Job) -> set[str]:
    """Nodes whose agents have led the job since its first supervisor, as far as its ledger tells."""
    from wrapper.output.ledgers import opened

    with suppress(ResihpError), opened(str(job.folder), None) as (reader, row):
        return {event["node"] for event in reader.events(row["id"], ["LeaderChosen"], MOST_LEADERS) if event["node"]}
    return set()


class _Most(msgspec.Struct, frozen=True):
    """Of a job's settings, what tells which ranks and nodes it may have at most."""

    nodes: int
    gpus_per_node: int
    node_names: tuple[str, ...] = ()
    come_backs: int = 3
    replacements: int = 0


class _Asked(msgspec.Struct, frozen=True):
    settings: _Most


def _cannot_come(job: Job, wanted: Whose) -> str:
    """Why no such process can start any more; empty if one may. Each that comes back has a rank of its own, as those of
    nodes that come instead of others have."""
    try:
        most = msgspec.json.decode(read_plain(job.run_file), type=_Asked).settings
    except (OSError, ValueError, RecursionError):
        return ""  # it is just being written, or by an older version
    ranks = (most.nodes + most.replacements) * most.gpus_per_node * (1 + most.come_backs)
    if wanted.rank is not None and wanted.rank >= ranks:
        return f"there will be no rank {wanted.rank}, they are 0 to {ranks - 1} at most"
    if wanted.node is not None and most.node_names and not most.replacements and wanted.node not in most.node_names:
        return f"there will be no node {wanted.node}, it is none of the job's {len(most.node_names)}"
    return ""


def _nothing(job: Job, wanted: Whose) -> str:
    """What is missing, and whose logs there are instead."""
    if not (instead := _instead(job)):
        return f"no log of {wanted} in {job.logs}, its workers have not begun; resihp status {job.name} tells more"
    return f"no log of {wanted} in {job.logs}{instead}"


def _instead(job: Job) -> str:
    """Whose logs there are; empty where no node has any."""
    there = files_of(job, Whose())
    ranks = sorted({int(of[1]) for path in there if (of := _OF_RANK.search(path.name))})
    nodes = sorted({path.name.partition(".")[0] for path in there} - {"supervisor", "forkserver"})
    if not nodes:
        return ""
    some = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    of_ranks = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
    return f"; there are {of_ranks}, nodes {some}"


def _follow(job: Job, wanted: Whose, growing: GrowingFiles, many: bool) -> None:
    pause_s = LOOK_EVERY_S if len(files_of(job, wanted)) <= MOST_FILES else FIND_EVERY_S
    find_at, gone_at = time.monotonic() + FIND_EVERY_S, None
    while True:
        over, gone = job.is_over, job.supervisor() is None
        if time.monotonic() >= find_at or over or not growing:
            find_at = time.monotonic() + FIND_EVERY_S
            for path in files_of(job, wanted):
                if path not in growing:
                    many = many or bool(growing)
                    growing.begin(path, 0)
        for path, line in growing.new():
            _print(path, line, many)
        if over:
            for path, line in growing.rest():
                _print(path, line, many)
            if not growing:
                raise UsageError(f"job {job.name}: has ended: {_nothing(job, wanted)}")
            message(f"job {job.name}: has ended; resihp status {job.name} tells how")
            return
        gone_at = (gone_at or time.monotonic()) if gone else None
        if gone_at is not None and time.monotonic() - gone_at > GONE_S:
            message(f"job {job.name}: has had no supervisor for {GONE_S:.0f} s; resihp status {job.name} tells more")
            return
        time.sleep(pause_s)


def _print(path: Path, line: str, many: bool) -> None:
    print(f"{for_stdout(path.stem)}| {_shown(line)}" if many else _shown(line), flush=True)


def _shown(line: str) -> str:
    """What a process printed must not steer the terminal; elsewhere it is left as it is."""
    return for_stdout(line.replace("\t", "    ")) if sys.stdout.isatty() else line


def _rows(ends: dict[Path, list[str]]) -> list[dict[str, object]]:
    return [{"log": path.name, "path": str(path), "lines": lines} for path, lines in ends.items()]


def _look(path: Path) -> _Look:
    try:
        found = path.lstat()
    except OSError:
        return _Look(0, 0.0)
    return _Look(found.st_size, found.st_mtime)
