"""What of a ledger is copied, as rows and as Parquet: tables, their columns, and which are split by months.

The number that a ledger gives a job stays behind: in files `job_uuid` stands for it. pyarrow is imported where it is
used, here and in the modules beside this one: most who import `db` do not need it.
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
"""Every table whose rows are a job's, those referred to first."""
MONTHLY = tuple(
    table for table in OF_JOBS if table.name in ("events", "iterations", "rank_quantiles", "rank_reports", "scores")
)
"""Those that grow with iterations: a file for each month in which jobs began. Of the others all rows are in one."""


def columns_of(table: Table) -> tuple[str, ...]:
    """What is copied: not the numbers that a ledger gives its own rows, nor who wrote them into it."""
    return tuple(column.name for column in table.columns if column.name not in ("id", "job_id", "written_by"))


def month_of(started_at: datetime) -> str:
    """The month that a job belongs to, of however many it lasts: the one in which it began, in UTC."""
    return f"{started_at.year:04}-{started_at.month:02}"


def in_files(job: Row) -> tuple[str, str]:
    """Key of the order in which jobs stand in files: their months, then their uuids."""
    return month_of(job["started_at"]) if job["started_at"] else "", str(job["uuid"])


class Source(Protocol):
    """Where jobs come from; of the newest schema, or of a newer one that lets us read it."""

    def left_out(self) -> list[str]:
        """Tables and columns of it that we do not know, and do not hand on."""

    def jobs(self) -> list[Row]:
        """Rows of `jobs`, without their number."""

    def rows(self, table: Table, uuid: str) -> Iterator[Sequence[Values]]:
        """A job's rows, many at a time, but not all."""

    def maintenance(self) -> list[Row]:
        """What was repaired, as far as it counts for who reads."""


def arrow_schema(table: Table) -> pa.Schema:
    """Columns of a table's files."""
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
