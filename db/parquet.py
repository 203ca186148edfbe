"""A ledger's tables as Parquet files in a folder, and back: what `db.exchange` writes and reads.

One file for each table, in which `job_uuid` stands for the job's number, and `manifest.json`. pyarrow and the version
are imported where they are used: most who import `db` need neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from sqlalchemy import BigInteger, Boolean, Float, Integer, Table

from db import migrate
from db.models import JobRow, LedgerTable, UtcDateTime
from resihp.errors import LedgerError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
FORMAT = "resihp ledger"
MANIFEST = "manifest.json"
ROWS_AT_ONCE = 20_000
JOBS = cast(Table, JobRow.__table__)
OF_JOBS = tuple(table for table in LedgerTable.metadata.sorted_tables if "job_id" in table.c)
"""Every table whose rows are a job's, those referred to first."""


class Manifest(msgspec.Struct, frozen=True):
    """What `manifest.json` tells of a folder: the schema of what is in it, rows of each table, the jobs' uuids.

    `min_reader`: the oldest schema whose clients may read it; empty in exports from before. `left_out`: tables and
    columns of a newer ledger that the client that wrote this did not know.
    """

    format: str
    schema: str
    version: str
    rows: dict[str, int]
    jobs: tuple[str, ...]
    min_reader: str = ""
    left_out: tuple[str, ...] = ()


def columns_of(table: Table) -> tuple[str, ...]:
    """What is copied: not the numbers that a ledger gives its own rows, nor who wrote them into it."""
    return tuple(column.name for column in table.columns if column.name not in ("id", "job_id", "written_by"))


class Source(Protocol):
    """Where jobs come from; of the newest schema, or of a newer one that lets us read it."""

    def left_out(self) -> list[str]:
        """Tables and columns of it that we do not know, and do not hand on."""

    def jobs(self) -> list[Row]:
        """Rows of `jobs`, without their number."""

    def rows(self, table: Table, uuid: str) -> Iterator[list[Row]]:
        """A job's rows, `ROWS_AT_ONCE` at most at a time, without its number."""


@dataclass(frozen=True)
class Folder:
    path: Path

    def left_out(self) -> list[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        found: list[str] = []
        for file in sorted(self.path.glob("*.parquet")):
            table = LedgerTable.metadata.tables.get(file.stem)
            if table is None:
                found.append(file.stem)
                continue
            try:
                names = pq.read_schema(file).names
            except (OSError, pa.ArrowException) as error:
                raise _unreadable(self.path, file, error) from error
            found += [f"{file.stem}.{name}" for name in names if name not in (*columns_of(table), "job_uuid")]
        return found

    def jobs(self) -> list[Row]:
        return [row for rows in self._read(JOBS, None) for row in rows]

    def rows(self, table: Table, uuid: str) -> Iterator[list[Row]]:
        return self._read(table, uuid)

    def _read(self, table: Table, uuid: str | None) -> Iterator[list[Row]]:
        import pyarrow as pa
        import pyarrow.dataset as ds

        file = self.path / f"{table.name}.parquet"
        try:
            found = ds.dataset(file, schema=_arrow(table), format="parquet")
            only = None if uuid is None else ds.field("job_uuid") == uuid
            for batch in found.to_batches(columns=list(columns_of(table)), filter=only, batch_size=ROWS_AT_ONCE):
                if batch.num_rows:
                    yield batch.to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.path, file, error) from error


def _unreadable(folder: Path, file: Path, error: Exception) -> LedgerError:
    reason = str(error).splitlines()[0]
    return LedgerError(f"export {folder}: {file.name} cannot be read: {reason}; export it again")


def _arrow(table: Table) -> pa.Schema:
    import pyarrow as pa

    fields = [] if table is JOBS else [pa.field("job_uuid", pa.string(), nullable=False)]
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


def check_manifest(folder: Path) -> Manifest:
    """Raises LedgerError unless the folder is an export of our schema, or of a newer one that we may read, of plain
    files alone."""
    for file in folder.iterdir():
        if not file.is_file():  # a pipe is never waited for
            raise LedgerError(f"export {folder}: {file.name!a} is no plain file; name a folder of resihp db export")
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, UnicodeError, RecursionError, msgspec.DecodeError) as error:
        raise LedgerError(f"export {folder}: {MANIFEST} cannot be read: {error}; export it again") from error
    if manifest.format != FORMAT:
        raise LedgerError(f"export {folder}: {MANIFEST} is of another program; name a folder of resihp db export")
    if migrate.is_newer(manifest.schema):
        migrate.check_compatible(manifest.schema, manifest.min_reader or None, str(folder), "read")
    elif manifest.schema != migrate.head():
        raise LedgerError(
            f"export {folder}: its schema {manifest.schema} is older than {migrate.head()}; run resihp db upgrade on "
            "the ledger that it came from, and resihp db export again"
        )
    return manifest


def write(source: Source, jobs: list[Row], folder: Path, min_reader: str) -> Manifest:
    """Files and manifest. What is in them is of our schema, whichever the source's: what we do not know is left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from resihp import __version__

    rows = {"jobs": len(jobs)}
    pq.write_table(pa.Table.from_pylist(jobs, _arrow(JOBS)), folder / "jobs.parquet")
    for table in OF_JOBS:
        rows[table.name] = 0
        with pq.ParquetWriter(folder / f"{table.name}.parquet", _arrow(table)) as writer:
            for job in jobs:
                for part in source.rows(table, job["uuid"]):
                    named = [{"job_uuid": job["uuid"], **row} for row in part]
                    writer.write_table(pa.Table.from_pylist(named, _arrow(table)))
                    rows[table.name] += len(part)
    uuids = tuple(job["uuid"] for job in jobs)
    left_out = tuple(source.left_out())
    manifest = Manifest(FORMAT, migrate.head(), __version__, rows, uuids, min_reader, left_out)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return manifest
