"""The command line: `resihp ...`. Parses options, calls the command, maps errors to exit codes; decides nothing.

Slow imports happen inside the command that needs them, so that `resihp --help` answers at once. Data goes to stdout,
messages to stderr.
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
from typing import TYPE_CHECKING, Annotated

import typer

from resihp.errors import ResihpError
from resihp.wrapper.commands import analyze, compare, db, init, why_not
from resihp.wrapper.commands.doctor import command as doctor
from resihp.wrapper.commands.history import command as history
from resihp.wrapper.commands.jobs import command as jobs
from resihp.wrapper.commands.logs import command as logs
from resihp.wrapper.commands.node import command as node
from resihp.wrapper.commands.operate import checkpoint, stop
from resihp.wrapper.commands.options import command_of
from resihp.wrapper.commands.plan import command as plan
from resihp.wrapper.commands.report import command as report
from resihp.wrapper.commands.status import command as status
from resihp.wrapper.config.torchrun_options import TorchrunOptions, hyphenated
from resihp.wrapper.exit_codes import INTERNAL_ERROR, OUTPUT_CLOSED, SERVICE_UNAVAILABLE, exit_code_of
from resihp.wrapper.output.answers import SCHEMA, JsonOption, message, to_json

if TYPE_CHECKING:
    from resihp.wrapper.commands.run import Options

SELF_REGISTERING_COMMANDS = (
    *(jobs, status, logs, stop, checkpoint),
    *(history, why_not, compare, db, node, analyze, plan, doctor, init, report),
)
"""Modules with a `register` function that adds the module's command, in the order of `resihp --help`."""

SELF_EXPLANATORY_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ELOOP}
    | {errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE}
)
"""Errors of files whose message is explanation enough, so that no traceback is printed."""

app = typer.Typer(
    name="resihp",
    help="Keep LLM training running when GPUs fail or slow down.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        from resihp import __version__

        print(f"resihp {__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of `resihp` itself."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options given on the command line; None for an option that was not given."""

    command: Annotated[
        list[str] | None, typer.Argument(help="train.py ARGS, or after --: the command of each worker.")
    ] = None
    config: Annotated[Path | None, typer.Option(help="Job file (TOML).")] = None
    local: Annotated[bool, typer.Option("--local", help="Run on this machine, with virtual nodes n1..nN.")] = False
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", show_default="1")] = None
    gpus_per_node: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Devices per node; auto: all of them.", show_default="1")
    ] = None
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.", show_default="1")] = None
    pp: Annotated[int | None, typer.Option(help="Pipeline-parallel degree.", show_default="1")] = None
    schedule: Annotated[str | None, typer.Option(help="1f1b, interleaved or zero-bubble.", show_default="1f1b")] = None
    virtual_stages: Annotated[
        int | None, typer.Option(help="Layer chunks per stage (interleaved).", show_default="1")
    ] = None
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split activations along the sequence.")
    ] = False
    tune: Annotated[bool, typer.Option("--tune", help="Balance stages by layer cost, and tune the order of work.")] = (
        False
    )
    planner: Annotated[
        str | None,
        typer.Option(
            help="resihp; for comparison: resihp-paper, paper-tp-pp, paper-tp, drop-replica.", show_default="resihp"
        ),
    ] = None
    memory_per_device: Annotated[
        str | None, typer.Option(help="Device memory for the job: 80GB, 79.5GiB.", show_default="unknown")
    ] = None
    ledger: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the ledger.", show_default="in the job's folder")
    ] = None
    fault: Annotated[
        list[str] | None,
        typer.Option(help="Inject a fault, KIND:TARGET@WHEN; repeatable."),
    ] = None
    checkpoint_every: Annotated[int | None, typer.Option(help="Iterations between checkpoints.", show_default="0")] = (
        None
    )
    checkpoint_folder: Annotated[Path | None, typer.Option(help="Folder of checkpoints.")] = None
    checkpoint_latest: Annotated[
        str | None, typer.Option(help="Checkpoints of a script of your own: 'ckpt/step_*'.", metavar="<pattern>")
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint, or [JOB]'s.")] = False
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="Resume if --checkpoint-folder has a checkpoint.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the run's layout and memory; start nothing.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on stdout at the end.")] = False


def run(options: RunOptions, torchrun: TorchrunOptions) -> None:
    """Run a training script under supervision, one worker for each device.

    Example: resihp run --local --nodes 2 --gpus-per-node 4 --tp 2 --pp 2 -- python train.py
    In place of torchrun: resihp run --nproc-per-node 4 train.py --lr 0.1

    In a Slurm allocation, nodes and devices are found automatically: leave out
    --local, --nodes and --gpus-per-node. A job that Slurm requeues resumes by
    itself.

    --resume takes the newest complete checkpoint of this folder's jobs and names
    the job; --resume JOB (last before the --) takes JOB's, from any folder.

    --fault injects a fault for testing. KIND: kill, crash, stop, hang, raise or
    disconnect. TARGET: rank=R or node=N. WHEN: iteration=I[,phase=P], where P is
    a phase of the iteration (forward, backward, reduce, step) or of the
    transition before it (park, groups, transfer, resume).
    Example: --fault kill:rank=1@iteration=3,phase=backward
    """
    from resihp.wrapper.commands import run as start

    start_options = _start_options(options, torchrun)
    if options.dry_run:
        from resihp.wrapper.commands.dry_run import show

        show(start.check(start_options), as_json=options.as_json)
        return
    raise typer.Exit(start.run(start_options))


def _start_options(options: RunOptions, torchrun: TorchrunOptions) -> Options:
    from resihp.wrapper.commands.run import Options
    from resihp.wrapper.config.torchrun_options import command_of_script, shape_of

    source_job, words = "", tuple(options.command or ())
    if options.resume and words[1:2] == ("--",):
        source_job, words = words[0], words[2:]
    shape = shape_of(
        torchrun, nodes=options.nodes, gpus_per_node=options.gpus_per_node, local=options.local, notice=message
    )
    return Options(
        job={
            "nodes": shape.nodes,
            "min_nodes": shape.min_nodes,
            "gpus_per_node": shape.devices,
            "memory_per_device": options.memory_per_device,
            "command": command_of_script(torchrun, words) or None,
        },
        layout={
            "tp": options.tp,
            "pp": options.pp,
            "schedule": options.schedule,
            "virtual_stages": options.virtual_stages,
            "sequence_parallel": options.sequence_parallel or None,
            "tune": options.tune or None,
        },
        adapt={"planner": options.planner, "max_restarts": torchrun.max_restarts},
        ledger={"url": options.ledger},
        checkpoint={
            "every": options.checkpoint_every,
            "folder": None if options.checkpoint_folder is None else str(options.checkpoint_folder.absolute()),
            "latest": options.checkpoint_latest,
        },
        config=options.config,
        local=shape.local,
        faults=tuple(options.fault or ()),
        resume=source_job if options.resume else None,
        resume_or_start=options.resume_or_start,
        arguments=tuple(sys.argv[1:]),
        words=words,
        as_json=options.as_json,
    )


app.command(context_settings={"allow_interspersed_args": False, "token_normalize_func": hyphenated})(
    command_of(run, RunOptions, TorchrunOptions)
)


@app.command()
def submit(
    job_file: Annotated[Path, typer.Argument(help="Job file (TOML).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script, without --exclude; submit nothing.")
    ] = False,
    chain: Annotated[int, typer.Option(help="Number of jobs in a row, each resuming the one before.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Submit a job to Slurm and print its id; for a chain, one id per line.

    Example: resihp submit job.toml
    """
    from resihp.slurm.commands import CommandLine
    from resihp.wrapper.commands.submit import submit as submit_job

    submission = submit_job(job_file, dry_run=dry_run, chain=chain, slurm=CommandLine, notice=message)
    if as_json:
        path = None if submission.path is None else str(submission.path)
        print(
            to_json(
                {
                    "schema": SCHEMA,
                    "dry_run": dry_run,
                    "jobs": submission.ids,
                    "script": submission.script,
                    "path": path,
                }
            )
        )
    else:
        print("\n".join(submission.ids) if submission.ids else submission.script.rstrip("\n"))


@app.command()
def inject(
    kind: Annotated[str, typer.Argument(help="kill, crash, stop, disconnect or slow.")],
    job: Annotated[str | None, typer.Argument(help="Job name; default: the newest job.")] = None,
    rank: Annotated[int | None, typer.Option(help="Target worker.")] = None,
    node: Annotated[str | None, typer.Option(help="Target node.")] = None,
    link: Annotated[str | None, typer.Option(help="Link to slow down: n1-n2.")] = None,
    speed: Annotated[float | None, typer.Option(help="Remaining speed for slow: 0.5 is half; 1 ends it.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Inject a fault into a running test job immediately."""
    from resihp.wrapper.commands.operate import inject as operate

    injected = operate.inject(job, kind, rank, node, speed, link)
    message(f"job {injected['job']}: {injected['text']}")
    if as_json:
        print(to_json({"schema": SCHEMA, **injected}))


for command in SELF_REGISTERING_COMMANDS:
    command.register(app)


class _Output(io.TextIOWrapper):
    """Stdout that exits quietly if its reader has closed it (`| head`) or its disk is full.

    In both cases, no traceback is printed, and the exit code cannot be taken for a result of the job.
    """

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
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self.fileno())  # discards the rest of the buffer
            if isinstance(error, BrokenPipeError):
                raise SystemExit(OUTPUT_CLOSED) from None
            message(f"stdout: cannot be written: {error.strerror}")
            raise SystemExit(SERVICE_UNAVAILABLE) from None


def main() -> None:
    """Run the command line; the entry point of `resihp`."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal may report a width of zero columns; then nothing would be printed
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - stdout was closed; this file stays open until exit
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output is sys.__stdout__:  # unless the caller has replaced stdout
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
        if error.filename is None or error.errno not in SELF_EXPLANATORY_ERRNOS:
            sys.excepthook(*sys.exc_info())
            sys.exit(INTERNAL_ERROR)
        message(f"{error.filename}: {error.strerror}; check it with ls -ld and df -h")
        sys.exit(SERVICE_UNAVAILABLE)
    except Exception:  # noqa: BLE001 - an unforeseen error must not look like failed training
        sys.excepthook(*sys.exc_info())
        sys.exit(INTERNAL_ERROR)
