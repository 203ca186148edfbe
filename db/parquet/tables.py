"""The tables and columns of a ledger that are copied, as rows and as Parquet, and the tables that are split by month.

The number that identifies a job within its ledger is not copied: files have `job_uuid` in its place. In this package,
pyarrow is imported only where it is used, because most users of `db` do not need it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, cast

from sqlalchemy import BigInteger, Boolean, Float, Integer, Table

from resihp.db.models import JobRow, LedgerTable, MaintenanceRow, UtcDateTime

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Values = tuple[Any, ...]
"""A row, with values in the order of the table's `columns_of`."""
JOBS, MAINTENANCE = cast(Table, JobRow.__table__), cast(Table, MaintenanceRow.__table__)
OF_JOBS = tuple(table for table in LedgerTable.metadata.sorted_tables if "job_id" in table.c)
"""All tables with rows that belong to jobs; referenced tables come first."""
MONTHLY_TABLES = tuple(
    table for table in OF_JOBS if table.name in ("events", "iterations", "rank_quantiles", "rank_reports", "scores")
)
"""Tables that grow with the number of iterations. They have one file for each month in which jobs began; each other
table is one file."""


def columns_of(table: Table) -> tuple[str, ...]:
    """Return the columns to copy: all except those that identify rows only within one ledger, and the database user who
    wrote the row."""
    return tuple(column.name for column in table.columns if column.name not in ("id", "job_id", "written_by"))


def month_of(started_at: datetime) -> str:
    """Return the month in which a job began, in UTC. All rows of the job belong to this month."""
    return f"{started_at.year:04}-{started_at.month:02}"


def file_order_key(job: Row) -> tuple[str, str]:
    """Return the sort key of a job in files: its month, then its uuid."""
    return month_of(job["started_at"]) if job["started_at"] else "", str(job["uuid"])


class Source(Protocol):
    """Source of jobs, with the newest known schema, or with a newer one that this resihp may read."""

    def left_out(self) -> list[str]:
        """Return the source's tables and columns that this resihp does not know and does not copy."""

    def jobs(self) -> list[Row]:
        """Return the rows of the table `jobs`, without their number in the ledger."""

    def rows(self, table: Table, uuid: str) -> Iterator[Sequence[Values]]:
        """Yield the rows of a job in one table, in parts of limited size."""

    def maintenance(self) -> list[Row]:
        """Return the maintenance records that count for the current user."""


def arrow_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of a table's files."""
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
