"""The tables and columns of a ledger that are copied, as rows and as Parquet, and which tables are split by month.

A ledger's own number of a job is not copied: in files, `job_uuid` replaces it. pyarrow is imported where it is used,
here and in the modules beside this one: most users of `db` do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, cast

from sqlalchemy import BigInteger, Boolean, Float, Integer, Table

from db.models import JobRow, LedgerTable, MaintenanceRow, UtcDateTime

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Values = tuple[Any, ...]
"""A row, in the order of `columns_of` its table."""
JOBS, MAINTENANCE = cast(Table, JobRow.__table__), cast(Table, MaintenanceRow.__table__)
OF_JOBS = tuple(table for table in LedgerTable.metadata.sorted_tables if "job_id" in table.c)
"""Every table whose rows belong to jobs; referenced tables first."""
MONTHLY_TABLES = tuple(
    table for table in OF_JOBS if table.name in ("events", "iterations", "rank_quantiles", "rank_reports", "scores")
)
"""Tables that grow with iterations: one file for each month in which jobs began. Each other table is a single file."""


def columns_of(table: Table) -> tuple[str, ...]:
    """Return the columns to copy: not a ledger's numbers of its own rows, nor the database user who wrote them."""
    return tuple(column.name for column in table.columns if column.name not in ("id", "job_id", "written_by"))


def month_of(started_at: datetime) -> str:
    """Return the month of a job, regardless of its duration: the one in which it began, in UTC."""
    return f"{started_at.year:04}-{started_at.month:02}"


def file_order_key(job: Row) -> tuple[str, str]:
    """Return the sort key of a job's place in files: its month, then its uuid."""
    return month_of(job["started_at"]) if job["started_at"] else "", str(job["uuid"])


class Source(Protocol):
    """Source of jobs; of the newest schema, or of a newer one that permits us to read it."""

    def left_out(self) -> list[str]:
        """Return its tables and columns that we do not know, and do not pass on."""

    def jobs(self) -> list[Row]:
        """Return rows of `jobs`, without their number."""

    def rows(self, table: Table, uuid: str) -> Iterator[Sequence[Values]]:
        """Yield a job's rows in parts of limited size."""

    def maintenance(self) -> list[Row]:
        """Return the maintenance records that count for the current user."""


def arrow_schema(table: Table) -> pa.Schema:
    """Return the schema of a table's files."""
    import pyarrow as pa

    fields = [pa.field("job_uuid", pa.string(), nullable=False)] if table in OF_JOBS else []
    for name in columns_of(table):
        kind = table.c[name].type
        if isinstance(kind, Integer | BigInteger):
            arrow = pa.int64()
        elif isinstance(kind, Boolean):
            arrow = pa.bool_()
        elif isinstance(kind, Float):
            arrow = pa.float64()
        elif isinstance(kind, UtcDateTime):
            arrow = pa.timestamp("us", tz="UTC")
        else:
            arrow = pa.string()
        fields.append(pa.field(name, arrow))
    return pa.schema(fields)
