"""`resihp report`: write what happened to a job as a page, or as Markdown. Data goes to files, messages to stderr."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from resihp.durable_files import replacing
from resihp.errors import UsageError
from wrapper.output.answers import SCHEMA, JsonOption, message, to_json


def register(app: typer.Typer) -> None:
    """Add `resihp report` to the command line."""
    app.command()(report)


def report(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job; the newest if left out.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write.", show_default="report-JOB.html")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Short text for a ticket, on stdout or to -o.")] = False,
    as_json: JsonOption = False,
    ledger: Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)] = None,
) -> None:
    """Write what happened to a job as one page that needs nothing else.

    What it did, what failed, what that cost and where, what was planned and kept.

    Example: resihp report local-3 -o report.html
    """
    from wrapper.commands.report import facts, runs
    from wrapper.commands.report.story import figures, sentences
    from wrapper.output.ledgers import attempts_here, opened, pinned

    job = pinned(job, ledger)
    with opened(job, ledger) as (reader, row):
        now = datetime.now(UTC)
        slurm = runs.read(reader, row["name"], job, ledger, now)
        found = facts.read(reader, row, now, slurm, attempts_here(ledger, row["run"]))
    name = str(row["name"])
    told = {
        "job": name,
        "summary": sentences(found),
        "figures": figures(found),
        "format": "markdown" if markdown else "html",
    }
    if markdown:
        from wrapper.commands.report.markdown import markdown as made

        text = made(found)
        if output is None:
            sys.stdout.write(f"{to_json({'schema': SCHEMA, **told, 'text': text})}\n" if as_json else text)
            return
    else:
        from wrapper.commands.report.page import html

        text = html(found)
        output = output or Path(f"report-{file_name(name)}.html")
    size = write(output, text)
    message(f"job {name}: report written to {output} ({size / 1000:,.0f} kB)")
    if as_json:
        print(to_json({"schema": SCHEMA, **told, "file": str(output.absolute()), "bytes": size}))


def file_name(job: str) -> str:
    """A job's name as part of a file's: a name from a shared ledger must not lead to another folder."""
    return re.sub(r"[^\w.-]+", "_", job).strip(".") or "job"


def write(path: Path, text: str) -> int:
    """Write a file whole or not at all; its size in bytes. Raises UsageError if it cannot be written."""
    content = text.encode()
    try:
        with replacing(path, named_by_user=True) as file:
            file.write(content)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path}: the report cannot be written: {reason}; name another file with -o") from error
    return len(content)
