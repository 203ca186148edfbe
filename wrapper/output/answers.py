"""What commands answer with: JSON, CSV, Parquet, messages; and the times that they are asked about.

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
    """`value` as JSON has it: NaN and infinities null, times ISO 8601 in UTC."""
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


YEARS = range(1900, 2900)
"""In which something may have happened that is asked for."""


def moment(text: str | None, now: datetime | None = None) -> datetime | None:
    """`2026-01-31`, `2026-01-31T12:00`, or an age: `90s`, `30m`, `2h`, `1d`. Raises UsageError."""
    if text is None:
        return None
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    try:
        if seconds is not None:
            found = (now or datetime.now(UTC)) - timedelta(seconds=float(text[:-1]) * seconds)
        else:
            time = datetime.fromisoformat(text)
            found = (time.replace(tzinfo=UTC) if time.tzinfo is None else time).astimezone(UTC)
        if found.year not in YEARS:  # others reckon with it, days and weeks before and after
            raise ValueError
        return found
    except (ValueError, OverflowError):
        raise UsageError(f"time {text!r}: not a time; examples: 2026-01-31T12:00, 30m, 2h, 1d") from None


def for_stdout(text: str) -> str:
    """Return `text` as it is printed to stdout: a terminal is not steered by what a log, a ledger or a file's name
    holds; a pipe or a file gets it as it is, since what reads it there wants the data."""
    from wrapper.output.render import literal

    return literal(text) if sys.stdout.isatty() else text


def write_csv(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as CSV; a terminal shows control characters in their cells escaped (`for_stdout`)."""
    import csv
    import json

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [plain(row[column]) for column in columns]
        texts = [json.dumps(cell) if isinstance(cell, dict | list) else cell for cell in cells]
        writer.writerow(for_stdout(text) if isinstance(text, str) else text for text in texts)


def write_parquet(found: pd.DataFrame, path: Path, what: str) -> None:
    """Raises UsageError if the file cannot be written."""
    try:
        with replacing(path, named_by_user=True) as file:
            found.to_parquet(file, index=False)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}; name another file") from error
    message(f"{what} written to {path}")


def message(text: str) -> None:
    """A line on stderr. What it quotes may come from anywhere: no name of a job steers the terminal, or begins a line
    as if it were ours."""
    from wrapper.output.render import literal

    print("resihp: " + literal(text).replace("\n", "\n  "), file=sys.stderr)


def tell(screen: Console, text: str) -> None:
    """Print a sentence: broken between words in a terminal, on one line elsewhere."""
    from wrapper.output.render import literal

    screen.print(literal(text), soft_wrap=not screen.is_terminal)


PIPE_COLUMNS = 10_000


def console() -> Console:
    """Stdout, as wide as the terminal. A pipe or a file has room for everything, unless COLUMNS is set for it (as
    `watch` does)."""
    import os

    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)
