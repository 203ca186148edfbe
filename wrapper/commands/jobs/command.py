"""`resihp jobs`: which of a user's jobs run, how far they are, and how the last ones ended. Data goes to stdout.

Only reads, but for jobs that are found dead, whose end is noted. What takes time to import is imported where it is
needed: a ledger is opened for a running job alone whose supervisor has not told of late how far it is.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from wrapper.output.answers import SCHEMA, JsonOption, console, message, to_json


def register(app: typer.Typer) -> None:
    """Add `resihp jobs` to the command line."""
    app.command()(jobs)


def jobs(
    every: Annotated[bool, typer.Option("--all", help="Also those that ended more than a day ago.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List your jobs, of all folders: those that run, and those that ended in the last day.

    Other commands take a job by its name from any folder, or by the folder shown here.
    """
    from wrapper.commands.jobs.listing import listed

    rows, hidden = listed(every=every, now_s=time.time(), say=message)
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": rows}))
    elif rows:
        from wrapper.commands.jobs.tables import lines

        screen = console()
        if screen.is_terminal or "COLUMNS" in os.environ:
            for line in lines(rows, screen.width):
                screen.print(line, soft_wrap=True)
        else:  # a pipe has room for everything
            print("\n".join(line.plain for line in lines(rows, None)))
    if hidden and not as_json:
        message(f"{hidden} that ended earlier: resihp jobs --all")
    elif not rows:
        message("no job of yours is known; start one with resihp run")
