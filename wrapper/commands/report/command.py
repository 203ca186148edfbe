"""`resihp report`: write a job's history as a page, or as Markdown. Data goes to files, messages to stderr."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from resihp.durable_files import replacing
from resihp.errors import UsageError
from resihp.wrapper.output.answers import SCHEMA, JsonOption, message, to_json


def register(app: typer.Typer) -> None:
    """Add `resihp report` to the command line."""
    app.command()(report)


def report(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job name; default: the newest job.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write.", show_default="report-JOB.html")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Short text for a ticket, on stdout or to -o.")] = False,
    as_json: JsonOption = False,
    ledger: Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)] = None,
) -> None:
    """Write a job's history as one self-contained HTML page.

    Shows progress, failures with their cost, and plans with their outcome.

    Example: resihp report local-3 -o report.html
    """
    from resihp.wrapper.commands.report import facts, runs
    from resihp.wrapper.commands.report.story import figures, sentences
    from resihp.wrapper.output.ledgers import attempts_here, opened, pinned

    job = pinned(job, ledger)
    with opened(job, ledger) as (reader, row):
        now = datetime.now(UTC)
        slurm = runs.read(reader, row["name"], job, ledger, now)
        job_facts = facts.read(reader, row, now, slurm, attempts_here(ledger, row["run"]))
    name = str(row["name"])
    result = {
        "job": name,
        "summary": sentences(job_facts),
        "figures": figures(job_facts),
        "format": "markdown" if markdown else "html",
    }
    if markdown:
        from resihp.wrapper.commands.report.markdown import markdown as as_markdown

        text = as_markdown(job_facts)
        if output is None:
            sys.stdout.write(f"{to_json({'schema': SCHEMA, **result, 'text': text})}\n" if as_json else text)
            return
    else:
        from resihp.wrapper.commands.report.page import html

        text = html(job_facts)
        output = output or Path(f"report-{file_name(name)}.html")
    size = write(output, text)
    message(f"job {name}: report written to {output} ({size / 1000:,.0f} kB)")
    if as_json:
        print(to_json({"schema": SCHEMA, **result, "file": str(output.absolute()), "bytes": size}))


def file_name(job: str) -> str:
    """Return a job's name as a part of a file name; a name from a shared ledger must not lead to another folder."""
    return re.sub(r"[^\w.-]+", "_", job).strip(".") or "job"


def write(path: Path, text: str) -> int:
    """Write a file completely or not at all, and return its size in bytes. Raises UsageError if that fails."""
    content = text.encode()
    try:
        with replacing(path, named_by_user=True) as file:
            file.write(content)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path}: the report cannot be written: {reason}; name another file with -o") from error
    return len(content)
