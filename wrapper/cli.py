"""The command line: `resihp ...`. Parses, calls, maps errors to exit codes; decides nothing.

Everything that takes time to import is imported in the command that needs it: `resihp --help` answers at once. Data
goes to stdout, messages to stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from resihp.errors import ResihpError
from wrapper.commands import analyze, compare, db, init, why_not
from wrapper.commands.doctor import command as doctor
from wrapper.commands.history import command as history
from wrapper.commands.jobs import command as jobs
from wrapper.commands.logs import command as logs
from wrapper.commands.node import command as node
from wrapper.commands.operate import checkpoint, stop
from wrapper.commands.options import command_of
from wrapper.commands.plan import command as plan
from wrapper.commands.report import command as report
from wrapper.commands.status import command as status
from wrapper.exit_codes import INTERNAL, OUTPUT_CLOSED, UNAVAILABLE, exit_code_of
from wrapper.output.answers import SCHEMA, JsonOption, message, to_json

OTHERS = (
    *(jobs, status, logs, stop, checkpoint),
    *(history, why_not, compare, db, node, analyze, plan, doctor, init, report),
)
"""Commands that say themselves how they are called, in the order of the help."""

OF_THE_SYSTEM = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ELOOP}
    | {errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE}
)
"""Errors of files that say all there is to say by themselves: no traceback is printed."""

app = typer.Typer(
    name="resihp",
    help="Keeps LLM training running when GPUs die.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        from resihp import __version__

        print(f"resihp {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version, and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Of `resihp` itself."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the command line said; None where it said nothing."""

    command: Annotated[list[str] | None, typer.Argument(help="After --: what each worker runs.")] = None
    config: Annotated[Path | None, typer.Option(help="A job file (TOML).")] = None
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, with virtual nodes n1..nN.")] = False
    nodes: Annotated[int | None, typer.Option(help="Nodes.", show_default="1")] = None
    gpus_per_node: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Devices of a node; auto: all there are.", show_default="1")
    ] = None
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.", show_default="1")] = None
    pp: Annotated[int | None, typer.Option(help="Pipeline-parallel degree.", show_default="1")] = None
    schedule: Annotated[str | None, typer.Option(help="1f1b, interleaved or zero-bubble.", show_default="1f1b")] = None
    virtual_stages: Annotated[
        int | None, typer.Option(help="Layer chunks of each stage, for interleaved.", show_default="1")
    ] = None
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split activations along the sequence.")
    ] = False
    tune: Annotated[
        bool, typer.Option("--tune", help="Spread layers over stages by what they cost, with orders of their own.")
    ] = False
    planner: Annotated[
        str | None,
        typer.Option(
            help="resihp; resihp-paper, paper-tp-pp, paper-tp, drop-replica to compare.", show_default="resihp"
        ),
    ] = None
    memory_per_device: Annotated[
        str | None, typer.Option(help="What a device has for the job: 80GB, 79.5GiB.", show_default="unknown")
    ] = None
    ledger: Annotated[str | None, typer.Option(help="SQLAlchemy URL.", show_default="in the job's folder")] = None
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Inject KIND:TARGET@WHEN; repeatable."),
    ] = None
    checkpoint_every: Annotated[int | None, typer.Option(help="Iterations between.", show_default="0")] = None
    checkpoint_folder: Annotated[Path | None, typer.Option(help="Where checkpoints are.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from a checkpoint; [JOB] names whose.")] = False
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Go on if --checkpoint-folder has a checkpoint.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would be; start and write nothing.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="At the end, what became of it, as JSON on stdout.")] = False


def run(said: RunOptions) -> None:
    """Run a training script under supervision, one worker for each device.

    Example: resihp run --local --nodes 2 --gpus-per-node 4 --tp 2 --pp 2 -- python train.py

    In a Slurm allocation it finds nodes and devices itself: leave out --local,
    --nodes and --gpus-per-node. What Slurm runs again goes on by itself.

    --resume takes the newest complete checkpoint of this folder's jobs, and says
    whose; --resume JOB (last before the --) that of another job, of any folder.

    --fault hurts the job on purpose. KIND: kill, crash, stop, hang, raise or
    disconnect. TARGET: rank=R or node=N. WHEN: iteration=I[,phase=P], where P is
    a moment of the iteration (forward, backward, reduce, step) or of the
    transition that leads up to it (park, groups, transfer, resume).
    Example: --fault kill:rank=1@iteration=3,phase=backward
    """
    from wrapper.commands import run as start
    from wrapper.config.shape import devices_of

    whose, command = "", said.command
    if said.resume and command and len(command) > 1 and command[1] == "--":
        whose, command = command[0], command[2:]
    options = start.Options(
        job={
            "nodes": said.nodes,
            "gpus_per_node": devices_of(said.gpus_per_node, said.nodes or 1, local=said.local),
            "memory_per_device": said.memory_per_device,
            "command": tuple(command) if command else None,
        },
        layout={
            "tp": said.tp,
            "pp": said.pp,
            "schedule": said.schedule,
            "virtual_stages": said.virtual_stages,
            "sequence_parallel": said.sequence_parallel or None,
            "tune": said.tune or None,
        },
        adapt={"planner": said.planner},
        ledger={"url": said.ledger},
        checkpoint={
            "every": said.checkpoint_every,
            "folder": None if said.checkpoint_folder is None else str(said.checkpoint_folder.absolute()),
        },
        config=said.config,
        local=said.local,
        faults=tuple(said.fault or ()),
        resume=whose if said.resume else None,
        resume_or_start=said.resume_or_start,
        arguments=tuple(sys.argv[1:]),
        as_json=said.as_json,
    )
    if said.dry_run:
        from wrapper.commands.dry_run import show

        show(start.check(options), as_json=said.as_json)
        return
    raise typer.Exit(start.run(options))


app.command(context_settings={"allow_interspersed_args": False})(command_of(RunOptions, run))


@app.command()
def submit(
    job_file: Annotated[Path, typer.Argument(help="A job file (TOML).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script, without --exclude; submit nothing.")
    ] = False,
    chain: Annotated[int, typer.Option(help="Submit so many jobs, each going on where the last one ended.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Submit a job to Slurm. Prints the job's id, one a line for a chain.

    Example: resihp submit job.toml
    """
    from slurm.commands import CommandLine
    from wrapper.commands.submit import submit as submit_job

    done = submit_job(job_file, dry_run=dry_run, chain=chain, slurm=CommandLine, notice=message)
    if as_json:
        path = None if done.path is None else str(done.path)
        print(to_json({"schema": SCHEMA, "dry_run": dry_run, "jobs": done.ids, "script": done.script, "path": path}))
    else:
        print("\n".join(done.ids) if done.ids else done.script.rstrip("\n"))


@app.command()
def inject(
    kind: Annotated[str, typer.Argument(help="kill, crash, stop, disconnect or slow.")],
    job: Annotated[str | None, typer.Argument(help="The job; the newest if left out.")] = None,
    rank: Annotated[int | None, typer.Option(help="The worker to hit.")] = None,
    node: Annotated[str | None, typer.Option(help="The node to hit.")] = None,
    link: Annotated[str | None, typer.Option(help="The link to make slow: n1-n2.")] = None,
    speed: Annotated[float | None, typer.Option(help="How fast slow leaves it; 1 ends it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Inject a fault into a running test job, at once."""
    from wrapper.commands.operate import inject as operate

    done = operate.inject(job, kind, rank, node, speed, link)
    message(f"job {done['job']}: {done['text']}")
    if as_json:
        print(to_json({"schema": SCHEMA, **done}))


for other in OTHERS:
    other.register(app)


class _Output(io.TextIOWrapper):
    """Stdout, which nobody may read to its end (`| head`), or whose disk may be full: no traceback, and no exit code
    that says something else of a job."""

    def write(self, text: str) -> int:
        with self._ended_where_it_fails():
            return super().write(text)

    def flush(self) -> None:
        with self._ended_where_it_fails():
            super().flush()

    @contextmanager
    def _ended_where_it_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # what is left in the buffer goes there
            if isinstance(error, BrokenPipeError):
                raise SystemExit(OUTPUT_CLOSED) from None
            message(f"what is printed cannot be written: {error.strerror}")
            raise SystemExit(UNAVAILABLE) from None


def main() -> None:
    """Entry point of `resihp`."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal that has none, for which nothing at all would be printed
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - it was closed, and is as long as we are
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output is sys.__stdout__:  # whoever calls us may have another there
        encoding, errors, live = output.encoding, output.errors, output.isatty()
        sys.stdout = _Output(output.detach(), encoding=encoding, errors=errors, line_buffering=live)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ResihpError as error:
        message(str(error))
        sys.exit(exit_code_of(error))
    except OSError as error:
        if error.filename is None or error.errno not in OF_THE_SYSTEM:
            sys.excepthook(*sys.exc_info())
            sys.exit(INTERNAL)
        message(f"{error.filename}: {error.strerror}; ls -ld and df -h on it show more")
        sys.exit(UNAVAILABLE)
    except Exception:  # noqa: BLE001 - what nobody foresaw must not pass for a training that failed
        sys.excepthook(*sys.exc_info())
        sys.exit(INTERNAL)
