"""Rows of the tables of `resihp history`: queries with filters, and decoding of JSON.

Decides which rows match, and their order. Implements the methods of `Reader` with the same names; the docstrings there
describe the results. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Select, func, or_, select

from resihp.db.models import EventRow, JobRow, PlanRow
from resihp.db.reading.tables import (
    ACCOUNT_COLUMNS,
    BACK_AT,
    OF_JOB,
    TABLES,
    Row,
    Table,
    no_collection,
    node_columns,
    with_times,
)
from resihp.errors import UsageError

if TYPE_CHECKING:
    from resihp.db.reading.reader import Reader


@dataclass(frozen=True)
class Filters:
    """Conditions for rows; None for no condition. `last`: limit on the number of rows."""

    node: str | None = None
    rank: int | None = None
    user: str | None = None
    kind: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    last: int | None = None


def rows(reader: Reader, table: str, job_id: int | None, filters: Filters) -> list[Row]:
    view = TABLES[table]
    query = view.query
    if table == "failures":
        query = query.add_columns(BACK_AT)
    order: list[ColumnElement[Any]] = [view.source.c[view.order]]
    order += (c for c in view.source.primary_key if c.key not in ("job_id", view.order))
    if job_id is not None:
        query = query.where(view.source.c.job_id == job_id)
    else:
        query = _of_all_jobs(reader, table, query)
        order = [view.source.c[view.time], view.source.c.job_id, *order]
    query = _filtered(reader, table, job_id, query, filters)
    if filters.last is None:
        matches = reader.fetch(query.order_by(*order))
    else:
        newest_first = (column.desc() for column in order)
        matches = reader.fetch(query.order_by(*newest_first).limit(filters.last))[::-1]
    if table == "failures":
        matches = [with_times(row) for row in matches]
    with no_collection():
        for row in matches:
            _decode(reader, view, row)
        if job_id is not None:
            return matches
        return [{name: row.pop(name) for name in OF_JOB} | row for row in matches]


def _of_all_jobs(reader: Reader, table: str, query: Select[Any]) -> Select[Any]:
    """Add the columns with the name and the uuid of each row's job."""
    columns = TABLES[table].source.c
    if table == "devices":  # readers look for the same device in all jobs
        node_label = reader.node_name(columns.node, columns.job_id).label("node")
        selected = (node_label if column.key == "node" else column for column in query.selected_columns)
        query = query.with_only_columns(*selected)
    query = query.add_columns(JobRow.name.label("job"), JobRow.uuid.label("job_uuid"))
    # With an inner join, SQLite would begin with the jobs.
    return query.outerjoin(JobRow, JobRow.id == columns.job_id)


def _filtered(reader: Reader, table: str, job_id: int | None, query: Select[Any], filters: Filters) -> Select[Any]:
    view = TABLES[table]
    columns = view.source.c
    if filters.node is not None:
        query = query.where(_names_node(reader, table, job_id, filters.node))
    if filters.rank is not None:
        query = query.where(columns.rank == filters.rank)
    if filters.kind is not None:
        if "kind" not in columns:
            raise UsageError(f"history {table}: has no kinds; leave --kind out")
        query = query.where(view.query.selected_columns.kind == filters.kind)
    if filters.user is not None:
        query = query.where(columns.job_id.in_(select(JobRow.id).where(reader.is_of(filters.user))))
    return _within(view, query, filters.since, filters.until)


def _names_node(reader: Reader, table: str, job_id: int | None, node: str) -> ColumnElement[bool]:
    """Match rows about this node. Raises UsageError for a table without nodes."""
    columns = TABLES[table].source.c
    named = [columns[name] for name in node_columns(table)]
    if job_id:
        return or_(*(column == node for column in named))
    return or_(*(reader.is_asked(node, column, columns.job_id) for column in named))


def _within(view: Table, query: Select[Any], since: datetime | None, until: datetime | None) -> Select[Any]:
    if since is not None:
        query = query.where(view.source.c[view.time] >= since)
    if until is not None:
        query = query.where(view.source.c[view.time] < until)
    return query


def _decode(reader: Reader, view: Table, row: Row) -> None:
    """Decode the JSON columns of a row in place."""
    for column in view.json_columns:
        row[column] = reader.decoded(row[column], column)


def count(reader: Reader, table: str, job_id: int, since: datetime | None, until: datetime | None) -> int:
    view = TABLES[table]
    query = select(func.count().label("rows")).select_from(view.source).where(view.source.c.job_id == job_id)
    return int(reader.fetch(_within(view, query, since, until))[0]["rows"])


def narrow(reader: Reader, table: str, job_id: int, names: Sequence[str]) -> list[Row]:
    view = TABLES[table]
    columns = view.source.c
    query = select(*(columns[name] for name in names or ACCOUNT_COLUMNS[table])).where(columns.job_id == job_id)
    return reader.fetch(query.order_by(columns[view.order]))


def events(reader: Reader, job_id: int, kinds: Sequence[str], last: int, always_last: str) -> list[Row]:
    query = TABLES["events"].query.where(EventRow.job_id == job_id)
    of_kinds = EventRow.kind.in_(kinds)
    if not always_last:
        return reader.fetch(query.where(of_kinds).order_by(EventRow.seq.desc()).limit(last))[::-1]
    newest = select(EventRow.seq).where(EventRow.job_id == job_id, of_kinds)
    newest = newest.order_by(EventRow.seq.desc()).limit(last)
    last_of_kind = select(func.max(EventRow.seq)).where(EventRow.job_id == job_id, EventRow.kind == always_last)
    wanted = or_(EventRow.seq.in_(newest), EventRow.seq == last_of_kind.scalar_subquery())
    return reader.fetch(query.where(wanted).order_by(EventRow.seq))


def shown_plan(reader: Reader, job_id: int) -> list[Row]:
    view, columns = TABLES["plans"], PlanRow.__table__.c
    query = view.query.where(columns.job_id == job_id)
    plans = reader.fetch(query.order_by(columns.in_effect_at.is_(None), columns.epoch.desc()).limit(1))
    current = [plan for plan in plans if plan["outcome"] in ("in effect", "pending")]
    for plan in current:
        _decode(reader, view, plan)
    return current
