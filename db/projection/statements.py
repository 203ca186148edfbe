"""SQL statements that bypass the session: for many rows at once, or for a row that another client may write as well.

Decides whether existing rows are replaced or kept; never decides the contents of a row. Called by the other modules of
this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Insert, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from resihp.db import models


def upsert(
    session: Session, row: type[models.LedgerTable], rows: Sequence[Mapping[str, Any]], key: tuple[str, ...]
) -> None:
    """Write many rows in one statement, replacing rows that have the same keys."""
    session.flush()
    for instance in session:
        if isinstance(instance, row):
            session.expire(instance)  # the statement changes rows without the session's knowledge
    connection = session.connection()
    connection.execute(_upserting(row, key, connection.dialect.name), rows)


@cache
def _upserting(row: type[models.LedgerTable], key: tuple[str, ...], dialect: str) -> Insert:
    """Return the statement, which takes a fifth of a small transaction to build."""
    table = row.__table__
    assert isinstance(table, Table)
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    changed = {name: insert.excluded[name] for name in table.c.keys() if name not in key}  # noqa: SIM118 - no mapping
    statement: Insert = insert.on_conflict_do_update(index_elements=key, set_=changed)
    return statement


def add_if_missing(session: Session, row: type[models.LedgerTable], values: Mapping[str, Any]) -> None:
    """Insert one row, unless it exists: another client may insert it at the same time."""
    connection = session.connection()
    table = row.__table__
    assert isinstance(table, Table)
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
    connection.execute(insert.values(values).on_conflict_do_nothing())
