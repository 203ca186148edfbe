"""`resihp jobs`: list a user's running jobs with their progress, and the outcome of recently ended jobs. Data goes to
stdout.

Reads only, except that the end of a dead job is recorded. Slow imports are inside the functions: a ledger is opened
only for a running job whose supervisor has not reported progress recently.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from resihp.errors import UsageError
from resihp.wrapper.output.answers import SCHEMA, JsonOption, console, message, to_json


def register(app: typer.Typer) -> None:
    """Add `resihp jobs` to the command line."""
    app.command()(jobs)


def jobs(
    include_old: Annotated[bool, typer.Option("--all", help="Also jobs that ended over a day ago.")] = False,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="Running jobs of all users, where the site shares them.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List your jobs of all folders: running jobs, and those that ended in the last day.

    Other commands accept a job's name, from any folder, or the folder shown here.
    """
    if all_users and include_old:
        raise UsageError("--all-users lists running jobs only; leave out --all")
    if all_users:
        from resihp.wrapper.commands.jobs.shared import listed_of_all_users

        rows, hidden = listed_of_all_users(time.time(), message), 0
    else:
        from resihp.wrapper.commands.jobs.listing import listed

        rows, hidden = listed(include_old=include_old, now_s=time.time(), say=message)
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": rows}))
    elif rows:
        from resihp.wrapper.commands.jobs.tables import lines

        screen = console()
        if screen.is_terminal or "COLUMNS" in os.environ:
            for line in lines(rows, screen.width):
                screen.print(line, soft_wrap=True)
        else:  # a pipe has unlimited width
            print("\n".join(line.plain for line in lines(rows, None)))
    if hidden and not as_json:
        message(f"{hidden} more ended earlier: resihp jobs --all")
    elif not rows:
        message("no running job shares its progress" if all_users else "you have no jobs; start one with resihp run")
