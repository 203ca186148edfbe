"""Output of commands: JSON, CSV, Parquet, messages. Also parses the times in options such as --since.

Data goes to stdout, messages to stderr. Used by the commands that read ledgers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.durable_files import replacing
from resihp.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

SCHEMA = 1

JobArgument = Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job; the newest if left out.")]
LedgerOption = Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def plain(value: Any) -> Any:
    """Return `value` as JSON data: NaN and infinities become null, times become ISO 8601 in UTC."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def to_json(value: Any) -> str:
    import json

    return json.dumps(plain(value), allow_nan=False)


VALID_YEARS = range(1900, 2900)
"""Years that are accepted in a time."""


def moment(text: str | None, now: datetime | None = None) -> datetime | None:
    """Return the time for a text such as `2026-01-31` or `2026-01-31T12:00`, or for an age (`90s`, `30m`, `2h`, `1d`)
    before `now`; None for None. Raises UsageError."""
    if text is None:
        return None
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    try:
        if seconds is not None:
            time = (now or datetime.now(UTC)) - timedelta(seconds=float(text[:-1]) * seconds)
        else:
            local = datetime.fromisoformat(text)
            time = (local.replace(tzinfo=UTC) if local.tzinfo is None else local).astimezone(UTC)
        if time.year not in VALID_YEARS:  # callers add and subtract days and weeks
            raise ValueError
        return time
    except (ValueError, OverflowError):
        raise UsageError(f"time {text!r}: not a time; examples: 2026-01-31T12:00, 30m, 2h, 1d") from None


def for_stdout(text: str) -> str:
    """Return `text` as it is printed to stdout. On a terminal, control characters from a log, a ledger or a file name
    are escaped; a pipe or a file gets the text unchanged, because the reader wants the data."""
    from resihp.wrapper.output.render import literal

    return literal(text) if sys.stdout.isatty() else text


def write_csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as CSV. On a terminal, control characters are escaped (`for_stdout`)."""
    import csv
    import json

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [plain(row[column]) for column in columns]
        texts = [json.dumps(cell) if isinstance(cell, dict | list) else cell for cell in cells]
        writer.writerow(for_stdout(text) if isinstance(text, str) else text for text in texts)


def write_parquet(table: pd.DataFrame, path: Path, subject: str) -> None:
    """Write a table to a Parquet file at `path`. Raises UsageError if the file cannot be written. `subject` names the
    table in the message about success."""
    try:
        with replacing(path, named_by_user=True) as file:
            table.to_parquet(file, index=False)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}; name another file") from error
    message(f"{subject} written to {path}")


def message(text: str) -> None:
    """Print a message on stderr.

    Control characters are escaped, and lines after the first are indented, because the text may quote anything: a job's
    name must not control the terminal, or look like another message of resihp.
    """
    from resihp.wrapper.output.render import literal

    print("resihp: " + literal(text).replace("\n", "\n  "), file=sys.stderr)


def tell(screen: Console, text: str) -> None:
    """Print a sentence on `screen`: wrapped between words on a terminal, on one line elsewhere."""
    from resihp.wrapper.output.render import literal

    screen.print(literal(text), soft_wrap=not screen.is_terminal)


PIPE_COLUMNS = 10_000


def console() -> Console:
    """Return a console on stdout that is as wide as the terminal. A pipe or a file gets unlimited width, unless COLUMNS
    is set (as `watch` does)."""
    import os

    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)
