"""`resihp compare`: two jobs of one ledger, or of this home, side by side. Only asks and shows."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wrapper.output.answers import SCHEMA, JsonOption, LedgerOption, console, message, to_json


def register(app: typer.Typer) -> None:
    """Add `resihp compare` to the command line."""
    app.command()(compare)


def compare(
    first: Annotated[str, typer.Argument(help="The job that the other one is compared with.")],
    second: Annotated[str, typer.Argument(help="The other one.")],
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Compare two jobs: what differs between them, and what iterations take at equal work.

    Iterations of each one's first plan, before anything was slow.

    Example: resihp compare 4711 4805
    """
    from db.reading.comparison import compare as compared
    from wrapper.output.ledgers import both

    with both(first, second, ledger) as (one, other):
        rows = [_without_secrets(row) for row in compared(*one, *other)]
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": rows}))
    elif not rows:
        message(f"jobs {first} and {second}: nothing differs, and nothing was trained")
    else:
        _show(first, second, rows)


def _without_secrets(row: dict[str, Any]) -> dict[str, Any]:
    """As a report shows them: what differs may be a web hook."""
    from wrapper.commands.report.story import MASK, SECRET_NAME, safe

    is_figure = row["difference"] is not None  # seconds for so many tokens
    hidden = not is_figure and bool(SECRET_NAME.search(row["what"]))
    return row | {name: MASK if hidden else safe(row[name]) for name in ("first", "second")}


def _show(first: str, second: str, rows: list[dict[str, Any]]) -> None:
    from wrapper.output.render import one_line
    from wrapper.output.tables import Column, show

    columns = [Column(one_line(heading), wraps=True, kept=True) for heading in ("", first, second, "difference")]
    cells = [[one_line(row[name] or "") for name in ("what", "first", "second", "difference")] for row in rows]
    show(console(), columns, cells)
