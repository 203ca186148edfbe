"""`resihp compare`: show two jobs of one ledger, or of this home, side by side. Queries and prints; decides nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from resihp.wrapper.output.answers import SCHEMA, JsonOption, LedgerOption, console, message, to_json


def register(app: typer.Typer) -> None:
    """Add `resihp compare` to the command line."""
    app.command()(compare)


def compare(
    first: Annotated[str, typer.Argument(help="First job, the baseline.")],
    second: Annotated[str, typer.Argument(help="Second job.")],
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Compare two jobs: their differences, and their iteration times at equal work.

    Times are of iterations of each job's first plan, before anything was slow.

    Example: resihp compare 4711 4805
    """
    from resihp.db.reading.comparison import compare as compare_rows
    from resihp.wrapper.output.ledgers import both

    with both(first, second, ledger) as (first_job, second_job):
        rows = [_without_secrets(row) for row in compare_rows(*first_job, *second_job)]
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": rows}))
    elif not rows:
        message(f"jobs {first} and {second}: no differences, and no iterations to compare")
    else:
        _show(first, second, rows)


def _without_secrets(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with secrets masked, as in a report, because the compared setting may be a webhook's URL."""
    from resihp.wrapper.commands.report.story import SECRET_MASK, SECRET_NAME, safe

    is_figure = row["difference"] is not None  # seconds per iteration, at a number of tokens
    hidden = not is_figure and bool(SECRET_NAME.search(row["what"]))
    return row | {name: SECRET_MASK if hidden else safe(row[name]) for name in ("first", "second")}


def _show(first: str, second: str, rows: list[dict[str, Any]]) -> None:
    from resihp.wrapper.output.render import one_line
    from resihp.wrapper.output.tables import Column, show

    columns = [Column(one_line(heading), wraps=True, kept=True) for heading in ("", first, second, "difference")]
    cells = [[one_line(row[name] or "") for name in ("what", "first", "second", "difference")] for row in rows]
    show(console(), columns, cells)
