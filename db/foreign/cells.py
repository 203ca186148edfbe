"""Type checks of cells in a SQLite ledger that another user may have written: each cell must have its column's type.

SQLite stores any value in any column, and a table may generate a column whenever it is read, while all readers of a
ledger rely on the numbers, times and texts of the schema. Called for copies of other users' files
(`resihp.db.foreign.files`): by `resihp.db.reading.reader` for the tables of a query, and by imports for all tables.
Ledgers that only this user can write are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from sqlalchemy import Boolean, Connection, Float, Integer, Table, event, inspect, text
from sqlalchemy.types import TypeEngine

from resihp.db.models import LedgerTable, UtcDateTime
from resihp.errors import LedgerError

MAX_TEXT_BYTES = 16 << 20
"""Largest permitted size of a text. The largest texts that resihp writes, the inputs of a plan's decision, have some
hundred kB."""
TIME_PATTERN = (
    "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9] [0-2][0-9]:[0-5][0-9]:[0-5][0-9].[0-9][0-9][0-9][0-9][0-9][0-9]"
)


def check_cells(connection: Connection, name: str) -> None:
    """Raise LedgerError for a cell that does not have its column's type, or for a generated column.

    Tables and columns that are not in the known schema are skipped.
    """
    check_columns(connection, name)
    for table in _tables(connection):
        _check_table(connection, table, name)


def check_columns(connection: Connection, name: str) -> None:
    """Raise LedgerError for a generated column, which SQLite computes whenever it is read."""
    for table in _tables(connection):
        hidden = f"SELECT name FROM pragma_table_xinfo('{table.name}') WHERE hidden > 0"
        if (generated := connection.execute(text(hidden)).scalar()) is not None:
            raise LedgerError(
                f"ledger {name}: {table.name}.{generated!a} is a generated column; resihp's tables have none"
            )


def check_cells_when_read(connection: Connection, name: str) -> None:
    """Check the cells of each table before the first query on this connection that names the table.

    Such a query raises LedgerError for a cell that does not have its column's type. Tables are checked late because
    most of a large ledger is in tables that few queries read. Raises LedgerError at once for a generated column.
    """
    check_columns(connection, name)
    unchecked = {table.name: table for table in _tables(connection)}
    is_checking = False

    def check_named(connection: Connection, _: Any, statement: str, *_others: Any) -> None:
        nonlocal is_checking
        if is_checking:  # the check's own question
            return
        words = set(re.findall(r"(?<![.\w])\w+", statement))  # no columns, which follow a dot
        is_checking = True
        try:
            for table in [table for table in unchecked.values() if table.name in words]:
                _check_table(connection, table, name)
                del unchecked[table.name]
        finally:
            is_checking = False

    event.listen(connection, "before_cursor_execute", check_named)


def _tables(connection: Connection) -> Collection[Table]:
    """Return the tables of the known schema that the ledger has."""
    existing = set(inspect(connection).get_table_names())
    return [table for table in LedgerTable.metadata.sorted_tables if table.name in existing]


def _check_table(connection: Connection, table: Table, name: str) -> None:
    names = {row[1] for row in connection.exec_driver_sql(f'PRAGMA table_info("{table.name}")')}
    wrong = {column.name: _is_wrong(column.name, column.type) for column in table.columns if column.name in names}
    query = f'SELECT {", ".join(f"total({test})" for test in wrong.values())} FROM "{table.name}"'
    counts = connection.exec_driver_sql(query).one()
    for column, count in zip(wrong, counts, strict=True):
        if count:
            raise LedgerError(
                f"ledger {name}: {table.name}.{column} has values of the wrong type in {int(count)} rows; the file is "
                "damaged or was edited. Rebuild it: resihp db import JOURNAL"
            )


def _is_wrong(column: str, kind: TypeEngine[object]) -> str:
    """Return an SQL expression that is true for a cell of the wrong type. Null is always accepted here, because the
    schema restricts it."""
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
    """Return an SQL expression that is true for a time on a day of the calendar, in years that Python supports."""
    return f"{cell} >= '0001-01-02' AND {cell} < '9999-12-31' AND date({cell}, '+0 days') = substr({cell}, 1, 10)"
