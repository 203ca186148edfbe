"""`resihp status`: show a job from its ledger. Data goes to stdout, messages to stderr.

Reads only, except that `resihp.wrapper.output.ledgers` first brings the ledger up to date. Slow imports are inside the
function.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from resihp.errors import JobNotFoundError
from resihp.wrapper.output.answers import SCHEMA, JobArgument, JsonOption, LedgerOption, console, to_json
from resihp.wrapper.output.ledgers import folder_of, opened, pinned


def register(app: typer.Typer) -> None:
    """Add `resihp status` to the command line."""
    app.command()(status)


def status(
    job: JobArgument = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep updating until the job ends.")] = False,
    ledger: LedgerOption = None,
) -> None:
    """Show a job: progress, layout with the health of each rank, goodput, last events.

    Exit code 1 if the job has failed; 0 while it runs, after it has completed,
    and after it was stopped on request.

    Of a job whose folder you cannot read, its summary is shown if it shares one
    with the site.
    """
    try:
        job = pinned(job, ledger)
    except JobNotFoundError:
        if job is None or not _show_shared(job, as_json):
            raise
        return
    if watch:
        from resihp.wrapper.commands.watch.command import watch as follow

        raise typer.Exit(exit_code_of_state(follow(job, ledger, as_json)))
    from resihp.wrapper.commands.status.job_status import job_status

    with opened(job, ledger) as (reader, row):
        state = job_status(reader, row, folder=folder_of(job, ledger))
    if as_json:
        print(to_json(state))
    else:
        from resihp.wrapper.commands.status.tables import render_status

        screen = console()
        screen.print(render_status(state, screen.width))
    raise typer.Exit(exit_code_of_state(state["state"]))


def _show_shared(job: str, as_json: bool) -> bool:
    """Show what a job of this name shares with the site; return False if none does."""
    from resihp.wrapper.commands.jobs.shared import shared_rows_of
    from resihp.wrapper.commands.status.shared import shared_lines

    now = datetime.now(UTC)
    rows = shared_rows_of(job, now.timestamp())
    if as_json and rows:
        print(to_json({"schema": SCHEMA, "shared": rows}))
    elif rows:
        print("\n\n".join("\n".join(shared_lines(row, now)) for row in rows))
    return bool(rows)


def exit_code_of_state(state: str) -> int:
    """Return 1 for a job that has failed, else 0, for scripts that wait for a job."""
    return 1 if state in ("failed", "abnormal") else 0
