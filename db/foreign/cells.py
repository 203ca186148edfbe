"""What stands in the cells of a SQLite ledger that somebody else may have written: of its column's type, or refused.

SQLite keeps any value in any column, and a table may reckon a column when it is read. All that reads a ledger reckons
with numbers, times and texts as our schema has them. Called for copies of foreign files (`db.foreign.files`), by
`db.reading.reader` and imports; a ledger of ours is not looked through.
"""

from __future__ import annotations

from sqlalchemy import Boolean, Connection, Float, Integer, inspect, text
from sqlalchemy.types import TypeEngine

from db.models import LedgerTable, UtcDateTime
from resihp.errors import LedgerError

MAX_TEXT_BYTES = 16 << 20
"""Of a cell; the largest of ours, what a plan was decided from, has some hundred kB."""
TIME_PATTERN = (
    "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]"
)


def check_cells(connection: Connection, name: str) -> None:
    """Raise LedgerError for a cell that is not of its column's type, or a column that is reckoned when it is read.

    Tables and columns that our schema does not have, or that are of a later version, are passed over.
    """
    seen = inspect(connection)
    there = set(seen.get_table_names())
    for table in LedgerTable.metadata.sorted_tables:
        if table.name not in there:
            continue
        hidden = f"SELECT name FROM pragma_table_xinfo('{table.name}') WHERE hidden > 0"
        if (reckoned := connection.execute(text(hidden)).scalar()) is not None:
            raise LedgerError(f"ledger {name}: column {table.name}.{reckoned!a} is reckoned; it was not made by resihp")
        names = {row[1] for row in connection.exec_driver_sql(f'PRAGMA table_info("{table.name}")')}
        wrong = {column.name: _is_wrong(column.name, column.type) for column in table.columns if column.name in names}
        query = f'SELECT {", ".join(f"total({test})" for test in wrong.values())} FROM "{table.name}"'
        counts = connection.exec_driver_sql(query).one()
        for column, count in zip(wrong, counts, strict=True):
            if count:
                raise LedgerError(
                    f"ledger {name}: {table.name}.{column} holds what resihp never writes there, in {int(count)} rows; "
                    "resihp db import JOURNAL makes a ledger anew from a job's journal"
                )


def _is_wrong(column: str, kind: TypeEngine[object]) -> str:
    """SQL that is true of a cell that is not of that type. Null is the schema's to forbid."""
    cell = f'"{column}"'
    if isinstance(kind, Boolean):
        fits = f"{cell} IN (0, 1)"
    elif isinstance(kind, Integer):
        fits = f"typeof({cell}) = 'integer'"
    elif isinstance(kind, Float):
        fits = f"typeof({cell}) IN ('real', 'integer')"
    elif isinstance(kind, UtcDateTime):
        fits = f"typeof({cell}) = 'text' AND {cell} GLOB '{TIME_PATTERN}' AND {_is_day(cell)}"
    else:
        fits = f"typeof({cell}) = 'text' AND length({cell}) <= {MAX_TEXT_BYTES}"
    return f"{cell} IS NOT NULL AND NOT coalesce({fits}, 0)"


def _is_day(cell: str) -> str:
    """SQL that is true of a time on a day of the calendar, of years that Python knows."""
    return f"{cell} >= '0001-01-02' AND {cell} < '9999-12-31' AND date({cell}, '+0 days') = substr({cell}, 1, 10)"
