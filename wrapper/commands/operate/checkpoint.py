"""`resihp checkpoint now|list`: have a running job write a checkpoint, and show which ones a job has.

A checkpoint on demand is the controller's to order (`resihp.controller.iterations`), written while training goes
on. The list is read from the checkpoints' folder alone: it needs neither the job nor its ledger. Everything that takes
time to import is imported in the functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wrapper.output.answers import SCHEMA, JobArgument, JsonOption, console, for_stdout, message, to_json

if TYPE_CHECKING:
    from pathlib import Path

    from resihp.worker.checkpoints import Stored

Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add `resihp checkpoint` to the command line."""
    checkpoints = typer.Typer(help="Checkpoints: one now, and those that there are.", no_args_is_help=True)
    checkpoints.command("now")(now)
    checkpoints.command("list")(show)
    app.add_typer(checkpoints, name="checkpoint")


def now(
    job: JobArgument = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for it.", min=1.0)] = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Have a running job write a checkpoint after the iteration under way; training goes on.

    Waits until it is complete.

    Example: resihp checkpoint now local-3
    """
    import asyncio

    from resihp.errors import ResihpError
    from resihp.protocol.messages import AskCheckpoint
    from wrapper.commands.operate.request import ask
    from wrapper.commands.resume import checkpoint_folder_of
    from wrapper.job_folder import find_job

    found = find_job(job, acts=True)
    try:
        reply = asyncio.run(ask(found, AskCheckpoint(), patience_s=patience))
    except KeyboardInterrupt:
        told = f"it is written all the same: resihp checkpoint list {found.name}"
        message(f"job {found.name}: not waited for any longer; {told}")
        raise typer.Exit(130) from None
    if not reply.ok:
        raise ResihpError(f"job {found.name}: {reply.text}")
    row = next((row for row in rows(checkpoint_folder_of(found)) if row["resumes"]), None)
    if as_json:
        print(to_json({"schema": SCHEMA, "job": found.name, "checkpoint": row}))
        return
    message(f"job {found.name}: {reply.text}")
    if row is not None:
        print(for_stdout(row["folder"]))


def show(
    job: JobArgument = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all of each, as --resume does.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List a job's checkpoints, newest first; > marks the one that --resume would take.

    Example: resihp checkpoint list local-3
    """
    from wrapper.commands.resume import checkpoint_folder_of
    from wrapper.job_folder import find_job

    found = find_job(job)
    folder = checkpoint_folder_of(found)
    listed = rows(folder, verify=verify)
    if as_json:
        print(to_json({"schema": SCHEMA, "job": found.name, "folder": str(folder), "rows": listed}))
    elif not listed:
        message(f"job {found.name}: no checkpoint in {folder}")
    else:
        _print(listed, folder)


def rows(folder: Path, *, verify: bool = False) -> list[Row]:
    """What `checkpoint list --json` prints, newest first. `resumes`: whether `--resume` would take it."""
    from resihp.worker.checkpoints import stored

    listed = stored(folder, verify=verify)
    taken = next((one.iteration for one in listed if not one.fault), None)
    return [_row(one, one.iteration == taken) for one in listed]


def _row(one: Stored, resumes: bool) -> Row:
    from datetime import UTC, datetime

    return {
        "iteration": one.iteration,
        "resumes": resumes,
        "at": datetime.fromtimestamp(one.at, UTC),
        "bytes": one.bytes,
        "seconds": one.seconds,
        "layout": one.layout or None,
        "complete": not one.fault,
        "fault": one.fault or None,
        "folder": str(one.folder),
    }


def _print(listed: list[Row], folder: Path) -> None:
    from resihp.record.describe import size
    from wrapper.output.render import duration
    from wrapper.output.tables import Column
    from wrapper.output.tables import show as show_table

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
