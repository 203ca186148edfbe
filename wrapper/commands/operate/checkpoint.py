"""`resihp checkpoint now|list`: have a running job write a checkpoint, and list a job's checkpoints.

The controller orders the checkpoint (`resihp.controller.iterations`), and training continues meanwhile. The list is
read from the checkpoint folder alone, without contacting the job or reading its ledger. Slow imports are inside the
functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.wrapper.output.answers import SCHEMA, JobArgument, JsonOption, console, for_stdout, message, to_json

if TYPE_CHECKING:
    from pathlib import Path

    from resihp.worker.checkpoints import Stored

Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add `resihp checkpoint` to the command line."""
    checkpoints = typer.Typer(help="Write a checkpoint now, or list checkpoints.", no_args_is_help=True)
    checkpoints.command("now")(now)
    checkpoints.command("list")(show)
    app.add_typer(checkpoints, name="checkpoint")


def now(
    job: JobArgument = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for it.", min=1.0)] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Have a running job write a checkpoint after the current iteration.

    Training continues. Waits until the checkpoint is complete.

    Example: resihp checkpoint now local-3
    """
    import asyncio

    from resihp.errors import ResihpError
    from resihp.protocol.messages import AskCheckpoint
    from resihp.wrapper.commands.operate.request import ask
    from resihp.wrapper.commands.resume import checkpoint_folder_of
    from resihp.wrapper.job_folder import find_job

    this_job = find_job(job, acts=True)
    try:
        reply = asyncio.run(ask(this_job, AskCheckpoint(), patience_s=patience))
    except KeyboardInterrupt:
        hint = f"the checkpoint is still being written: resihp checkpoint list {this_job.name}"
        message(f"job {this_job.name}: stopped waiting; {hint}")
        raise typer.Exit(130) from None
    if not reply.ok:
        raise ResihpError(f"job {this_job.name}: {reply.text}")
    row = next((row for row in rows(checkpoint_folder_of(this_job)) if row["resumes"]), None)
    if as_json:
        print(to_json({"schema": SCHEMA, "job": this_job.name, "checkpoint": row}))
        return
    message(f"job {this_job.name}: {reply.text}")
    if row is not None:
        print(for_stdout(row["folder"]))


def show(
    job: JobArgument = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file, as --resume does.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List a job's checkpoints, newest first; > marks the one that --resume would take.

    Example: resihp checkpoint list local-3
    """
    from resihp.wrapper.commands.resume import checkpoint_folder_of
    from resihp.wrapper.job_folder import find_job

    this_job = find_job(job)
    folder = checkpoint_folder_of(this_job)
    listed = rows(folder, verify=verify)
    if as_json:
        print(to_json({"schema": SCHEMA, "job": this_job.name, "folder": str(folder), "rows": listed}))
    elif not listed:
        message(f"job {this_job.name}: no checkpoint in {folder}")
    else:
        _print(listed, folder)


def rows(folder: Path, *, verify: bool = False) -> list[Row]:
    """Return the rows of `checkpoint list --json`, newest first. `resumes` in a row: whether `--resume` would take its
    checkpoint."""
    from resihp.worker.checkpoints import stored

    listed = stored(folder, verify=verify)
    resumed_iteration = next((checkpoint.iteration for checkpoint in listed if not checkpoint.fault), None)
    return [_row(checkpoint, checkpoint.iteration == resumed_iteration) for checkpoint in listed]


def _row(checkpoint: Stored, resumes: bool) -> Row:
    from datetime import UTC, datetime

    return {
        "iteration": checkpoint.iteration,
        "resumes": resumes,
        "at": datetime.fromtimestamp(checkpoint.at, UTC),
        "bytes": checkpoint.bytes,
        "seconds": checkpoint.seconds,
        "layout": checkpoint.layout or None,
        "complete": not checkpoint.fault,
        "fault": checkpoint.fault or None,
        "folder": str(checkpoint.folder),
    }


def _print(listed: list[Row], folder: Path) -> None:
    from resihp.record.describe import size
    from resihp.wrapper.output.render import duration
    from resihp.wrapper.output.tables import Column
    from resihp.wrapper.output.tables import show as show_table

    cells = [
        (
            f"{'>' if row['resumes'] else ' '} {row['iteration']}",
            f"{row['at']:%Y-%m-%d %H:%M:%S}",
            size(row["bytes"]),
            duration(row["seconds"]),
            row["layout"] or "-",
            row["fault"] or "complete",
        )
        for row in listed
    ]
    screen = console()
    columns = (
        *(Column("  iteration"), Column("when (UTC)"), Column("size"), Column("took")),
        *(Column("layout", wraps=True), Column("state", wraps=True, kept=True)),
    )
    show_table(screen, columns, cells)
    screen.print(f"in {for_stdout(str(folder))}", soft_wrap=True)
