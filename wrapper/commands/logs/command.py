"""`resihp logs`: print the ends of a job's logs, of all its processes or of one, and follow them.

Reads files in the job's folder, to which agents copy the output of their processes about once a second. Never contacts
the job. The supervisor's output is in its own log; after the job's host has died, it is in the log of the agent whose
node has led the job since. `-f` waits for a log that does not exist yet, unless the job can never have it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from resihp.errors import ResihpError, UsageError
from resihp.plain_files import is_plain
from resihp.wrapper.output.answers import SCHEMA, JobArgument, JsonOption, for_stdout, message, to_json
from resihp.wrapper.output.tail import GrowingFiles, last_lines
from resihp.wrapper.strict_modes import check_links, read_plain

if TYPE_CHECKING:
    from resihp.wrapper.job_folder import Job

DEFAULT_LINES, DEFAULT_LINES_PER_LOG = 50, 10
MAX_FILES = 16
"""Most logs that are shown at once: those written last."""
POLL_INTERVAL_S = 0.5
SEARCH_INTERVAL_S = 5.0
"""Seconds between two searches for logs of new processes and of a new leader."""
NO_SUPERVISOR_TIMEOUT_S = 60.0
"""Seconds without a supervisor after which no further output is expected."""
MAX_LEADERS = 100
_OF_RANK = re.compile(r"\.rank(\d+)\.log$")


class LogSelection(NamedTuple):
    """The processes whose logs are shown; by default all processes."""

    rank: int | None = None
    node: str | None = None
    supervisor: bool = False

    def __str__(self) -> str:
        if self.supervisor:
            return "the supervisor"
        of_rank = "" if self.rank is None else f"rank {self.rank}"
        parts = [part for part in (of_rank, f"node {self.node}" if self.node else "") if part]
        return " on ".join(parts) or "its processes"


class _FileStat(NamedTuple):
    """Size and time of a file, read only once, because a large job has tens of thousands of logs on a shared file
    system."""

    size: int
    written_at: float


def register(app: typer.Typer) -> None:
    """Add `resihp logs` to the command line."""
    app.command()(logs)


def logs(
    job: JobArgument = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0, show_default=False)] = None,
    node: Annotated[str | None, typer.Option(help="Only processes of this node.", show_default=False)] = None,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="The supervisor's log, and those of later leaders.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new output until the job ends.")] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="Lines of each log.", min=0, show_default="50; of several, 10")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the ends of a job's logs: of one process, of a node, or of the latest to print.

    Example: resihp logs 4711 --rank 5 -f
    """
    from resihp.wrapper.job_folder import find_job

    if supervisor and (rank is not None or node is not None):
        raise UsageError("logs: use --supervisor alone; for a rank on a node, --rank R --node N")
    if follow and as_json:
        raise UsageError("logs: --json prints the current logs only; leave -f out")
    this_job, wanted = find_job(job), LogSelection(rank, node, supervisor)
    paths = files_of(this_job, wanted)
    if not paths:
        _check_may_come(this_job, wanted, follow=follow)
        message(f"job {this_job.name}: waiting for {wanted} to start{_existing_logs(this_job)}")
    stats = {path: _file_stat(path) for path in paths}
    written = [path for path in paths if stats[path].size] or paths[:1]
    shown_paths = sorted(written, key=lambda path: stats[path].written_at)[-MAX_FILES:]
    many = len(paths) > 1
    growing = GrowingFiles()
    for path in paths:
        growing.begin(path, stats[path].size)
    ends = _read_ends(shown_paths, _line_count(lines, many=many), growing)
    if as_json:
        print(to_json({"schema": SCHEMA, "job": this_job.name, "folder": str(this_job.logs), "logs": _rows(ends)}))
        return
    _print_ends(ends, many=many)
    if hidden := len(written) - len(shown_paths):
        choice = "choose with --rank R, --node N or --supervisor"
        message(f"job {this_job.name}: {hidden} more logs in {this_job.logs}; {choice}")
    if supervisor and not follow:
        message(f"for its decisions and reasons: resihp history events {this_job.name}")
    if follow:
        with suppress(KeyboardInterrupt):
            _follow(this_job, wanted, growing, many)


def _check_may_come(job: Job, wanted: LogSelection, *, follow: bool) -> None:
    """Raise UsageError if the selected logs are missing, unless they may still come and `follow` waits for them."""
    if not follow or job.is_over or job.never_began(time.time()):
        raise UsageError(f"job {job.name}: {_missing_log(job, wanted)}")
    if why_not := _cannot_come(job, wanted):
        raise UsageError(f"job {job.name}: {why_not}{_existing_logs(job)}")


def _line_count(lines: int | None, *, many: bool) -> int:
    """Return the number of lines to show of each log."""
    if lines is not None:
        return lines
    return DEFAULT_LINES_PER_LOG if many else DEFAULT_LINES


def _read_ends(paths: Sequence[Path], line_count: int, growing: GrowingFiles) -> dict[Path, list[str]]:
    """Return the last lines of each log, and follow the logs from there. Logs that cannot be read are left out."""
    ends = {}
    for path in paths:
        with suppress(OSError):
            ends[path], at = last_lines(path, line_count)
            growing.begin(path, at)
    return ends


def _print_ends(ends: Mapping[Path, list[str]], *, many: bool) -> None:
    for path, log_lines in ends.items():
        if many:
            print(f"==> {for_stdout(path.name)} <==")
        for line in log_lines:
            print(_shown(line))


def files_of(job: Job, wanted: LogSelection) -> list[Path]:
    """Return the existing logs of the selected processes."""
    try:
        check_links(job.logs)
        paths = [path for path in job.logs.iterdir() if path.suffix == ".log" and is_plain(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ResihpError(f"job {job.name}: {job.logs}: {error.strerror}") from error
    if wanted.supervisor:
        names = {"supervisor.log", *(f"{node}.agent.log" for node in _leaders(job))}
        return sorted(path for path in paths if path.name in names)
    if wanted.node is not None:
        paths = [path for path in paths if path.name.startswith(f"{wanted.node}.")]
    if wanted.rank is not None:
        paths = [path for path in paths if (match := _OF_RANK.search(path.name)) and int(match[1]) == wanted.rank]
    return sorted(paths)


def _leaders(job: Job) -> set[str]:
    """Return the nodes whose agents have led the job after its first supervisor, from its ledger."""
    from resihp.wrapper.output.ledgers import opened

    with suppress(ResihpError), opened(str(job.folder), None) as (reader, row):
        return {event["node"] for event in reader.events(row["id"], ["LeaderChosen"], MAX_LEADERS) if event["node"]}
    return set()


class _JobSize(msgspec.Struct, frozen=True):
    """The settings of a job that limit its ranks and nodes."""

    nodes: int
    gpus_per_node: int
    node_names: tuple[str, ...] = ()
    come_backs: int = 3
    replacements: int = 0


class _RunFile(msgspec.Struct, frozen=True):
    settings: _JobSize


def _cannot_come(job: Job, wanted: LogSelection) -> str:
    """Return the reason why the selected processes can never start; empty if they may start.

    A worker that is started again gets a new rank, as do workers of replacement nodes.
    """
    try:
        size = msgspec.json.decode(read_plain(job.run_file), type=_RunFile).settings
    except (OSError, ValueError, RecursionError):
        return ""  # the file is just being written, or is from an older version
    ranks = (size.nodes + size.replacements) * size.gpus_per_node * (1 + size.come_backs)
    if wanted.rank is not None and wanted.rank >= ranks:
        return f"there will be no rank {wanted.rank}; its ranks are at most 0 to {ranks - 1}"
    if wanted.node is not None and size.node_names and not size.replacements and wanted.node not in size.node_names:
        return f"there will be no node {wanted.node}; it is not one of the job's {len(size.node_names)}"
    return ""


def _missing_log(job: Job, wanted: LogSelection) -> str:
    """Return a description of the missing log, and of the logs that exist."""
    if not (existing := _existing_logs(job)):
        return f"no log of {wanted} in {job.logs}, as its workers have not begun; see resihp status {job.name}"
    return f"no log of {wanted} in {job.logs}{existing}"


def _existing_logs(job: Job) -> str:
    """Return a description of the ranks and nodes that have logs; empty if there are no logs."""
    paths = files_of(job, LogSelection())
    ranks = sorted({int(match[1]) for path in paths if (match := _OF_RANK.search(path.name))})
    nodes = sorted({path.name.partition(".")[0] for path in paths} - {"supervisor", "forkserver"})
    if not nodes:
        return ""
    named_nodes = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
    of_ranks = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
    return f"; there are {of_ranks}, nodes {named_nodes}"


def _follow(job: Job, wanted: LogSelection, growing: GrowingFiles, many: bool) -> None:
    pause_s = POLL_INTERVAL_S if len(files_of(job, wanted)) <= MAX_FILES else SEARCH_INTERVAL_S
    search_at, no_supervisor_since = time.monotonic() + SEARCH_INTERVAL_S, None
    while True:
        is_over, no_supervisor = job.is_over, job.supervisor() is None
        if time.monotonic() >= search_at or is_over or not growing:
            search_at = time.monotonic() + SEARCH_INTERVAL_S
            for path in files_of(job, wanted):
                if path not in growing:
                    many = many or bool(growing)
                    growing.begin(path, 0)
        for path, line in growing.new():
            _print(path, line, many)
        if is_over:
            for path, line in growing.rest():
                _print(path, line, many)
            if not growing:
                raise UsageError(f"job {job.name}: has ended: {_missing_log(job, wanted)}")
            message(f"job {job.name}: has ended; see resihp status {job.name}")
            return
        no_supervisor_since = (no_supervisor_since or time.monotonic()) if no_supervisor else None
        if no_supervisor_since is not None and time.monotonic() - no_supervisor_since > NO_SUPERVISOR_TIMEOUT_S:
            message(
                f"job {job.name}: has had no supervisor for {NO_SUPERVISOR_TIMEOUT_S:.0f} s; "
                f"see resihp status {job.name}"
            )
            return
        time.sleep(pause_s)


def _print(path: Path, line: str, many: bool) -> None:
    print(f"{for_stdout(path.stem)}| {_shown(line)}" if many else _shown(line), flush=True)


def _shown(line: str) -> str:
    """Return a line with control characters escaped if stdout is a terminal; else unchanged."""
    return for_stdout(line.replace("\t", "    ")) if sys.stdout.isatty() else line


def _rows(ends: dict[Path, list[str]]) -> list[dict[str, object]]:
    return [{"log": path.name, "path": str(path), "lines": lines} for path, lines in ends.items()]


def _file_stat(path: Path) -> _FileStat:
    try:
        stat = path.lstat()
    except OSError:
        return _FileStat(0, 0.0)
    return _FileStat(stat.st_size, stat.st_mtime)
