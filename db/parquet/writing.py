"""Writer of an export folder: one Parquet file per table, and one per month for tables that grow with iterations.

    manifest.json
    jobs.parquet  plans.parquet  maintenance.parquet  ...
    iterations/month=2026-11/part-0.parquet  rank_reports/month=2026-11/part-0.parquet  ...

The files of a month are taken over from an earlier export if the jobs of the month have not changed and its files are
intact. The files of the other months, and of all tables that are not split by month, are written. Jobs are ordered by
month, then by uuid, and all rows of a job are contiguous, so that a reader of one job reads one or two row groups.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from sqlalchemy import Table

from resihp.db import migrate
from resihp.db.parquet.manifest import FORMAT, MANIFEST, ExportedFile, Manifest, fault
from resihp.db.parquet.tables import (
    JOBS,
    MAINTENANCE,
    MONTHLY_TABLES,
    OF_JOBS,
    Row,
    Source,
    arrow_schema,
    columns_of,
    file_order_key,
    month_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_IN_GROUP = 100_000
"""Smallest number of rows in a row group, if the table has that many; no group has twice as many. Parquet's readers are
made for groups of this size, which also fit into a reader's memory."""
BYTES_IN_GROUP = 256 << 20
"""Size in bytes from which on a row group is written, whatever its number of rows, because texts may be long."""
PART_FILE = "part-0.parquet"


class StatedSource(Source, Protocol):
    """A source that cheaply reports whether a job's rows have changed."""

    def states(self) -> Mapping[str, Sequence[Any]]:
        """Return, by job uuid, a value that changes whenever any row of `MONTHLY_TABLES` changes."""


@dataclass(frozen=True)
class Exported:
    """Result of an export. `written`: months with files that were written; `kept`: months with files that were taken
    over from the earlier export. Both are in order, oldest first."""

    manifest: Manifest
    written: tuple[str, ...]
    kept: tuple[str, ...]


def write(
    source: StatedSource,
    jobs: Sequence[Row],
    maintenance: Sequence[Row],
    folder: Path,
    min_reader: str,
    before: tuple[Path, Manifest] | None = None,
) -> Exported:
    """Write an export into an empty folder, the manifest last. The export has the newest known schema, whatever the
    source's: unknown parts of the source are left out. `min_reader`: oldest schema version of clients that may read the
    export. `before`: an earlier export with unchanged files that are linked or copied; it is not changed."""
    from resihp import __version__

    months: dict[str, list[Row]] = {}
    for job in sorted(jobs, key=file_order_key):
        months.setdefault(month_of(job["started_at"]), []).append(job)
    states = source.states()
    state_by_month = {month: _state(of_month, states) for month, of_month in months.items()}
    files: list[ExportedFile] = []
    kept: list[str] = []
    for month, of_month in months.items():
        taken = _take_over_month(before, month, state_by_month[month], folder)
        if taken:
            kept.append(month)
        else:
            taken = [
                _of_jobs(source, table, of_month, folder, f"{table.name}/month={month}/{PART_FILE}")
                for table in MONTHLY_TABLES
            ]
        files += taken
    in_order = [job for of_month in months.values() for job in of_month]
    files.append(_file(folder, "jobs.parquet", JOBS, [_columns(JOBS, in_order)]))
    files.append(_file(folder, "maintenance.parquet", MAINTENANCE, [_columns(MAINTENANCE, maintenance)]))
    files += [
        _of_jobs(source, table, in_order, folder, f"{table.name}.parquet")
        for table in OF_JOBS
        if table not in MONTHLY_TABLES
    ]
    rows = {"jobs": 0, **{file.table: 0 for file in files}}
    for file in files:
        rows[file.table] += file.rows
    manifest = Manifest(
        FORMAT,
        migrate.head(),
        __version__,
        rows,
        tuple(job["uuid"] for job in jobs),
        min_reader,
        tuple(source.left_out()),
        tuple(sorted(files, key=lambda file: file.path)),
        state_by_month,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return Exported(manifest, tuple(month for month in months if month not in kept), tuple(kept))


def _state(jobs: Iterable[Row], states: Mapping[str, Sequence[Any]]) -> str:
    """Return the state of a month: a digest that changes if a job is added or removed, or if the state of a job
    changes."""
    job_states = [(job["uuid"], job["journal_seq"], job["last_entry_at"], states.get(job["uuid"], ())) for job in jobs]
    return sha256(msgspec.json.encode(job_states)).hexdigest()


def _take_over_month(before: tuple[Path, Manifest] | None, month: str, state: str, folder: Path) -> list[ExportedFile]:
    """Link or copy the files of a month from the earlier export. Return no files if the month must be written
    instead."""
    if before is None or before[1].schema != migrate.head() or before[1].months.get(month) != state:
        return []
    place, manifest = before
    files = {file.path: file for file in manifest.files if file.month == month}
    if set(files) != {f"{table.name}/month={month}/{PART_FILE}" for table in MONTHLY_TABLES}:
        return []
    if any(fault(place, file) for file in files.values()):
        return []
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(place / path, folder / path)
        except OSError:  # a file system without links
            shutil.copyfile(place / path, folder / path)
    return list(files.values())


def _columns(table: Table, rows: Sequence[Row]) -> list[list[Any]]:
    return [[row[name] for row in rows] for name in columns_of(table)]


def _of_jobs(source: Source, table: Table, jobs: Iterable[Row], folder: Path, path: str) -> ExportedFile:
    def parts() -> Iterable[Sequence[Sequence[Any]]]:
        for job in jobs:
            for part in source.rows(table, job["uuid"]):
                if part:
                    yield [[job["uuid"]] * len(part), *zip(*part, strict=True)]

    return _file(folder, path, table, parts())


def _file(folder: Path, path: str, table: Table, parts: Iterable[Sequence[Sequence[Any]]]) -> ExportedFile:
    """Write a table's file; each part has the values by column."""
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    with closing(_RowGroups(place, arrow_schema(table))) as groups:
        for part in parts:
            groups.add(part)
    with place.open("rb") as content:
        return ExportedFile(path, groups.rows, place.stat().st_size, file_digest(content, "sha256").hexdigest())


class _RowGroups:
    """A file that is written in row groups of suitable size, whatever the size of the added parts."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._schema, self._writer = schema, pq.ParquetWriter(path, schema)
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        self.rows = 0

    def add(self, columns: Sequence[Sequence[Any]]) -> None:
        import pyarrow as pa

        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        part = pa.Table.from_arrays(arrays, schema=self._schema)
        self._waiting.append(part)
        self._waiting_rows += part.num_rows
        self._waiting_bytes += part.nbytes
        self.rows += part.num_rows
        while self._waiting_rows >= 2 * ROWS_IN_GROUP:
            self._write(ROWS_IN_GROUP)
        if self._waiting_bytes >= BYTES_IN_GROUP:
            self._write(self._waiting_rows)

    def _write(self, rows: int) -> None:
        import pyarrow as pa

        waiting = pa.concat_tables(self._waiting)
        self._writer.write_table(waiting.slice(0, rows), row_group_size=rows)
        rest = waiting.slice(rows)
        self._waiting = [rest] if rest.num_rows else []
        self._waiting_rows, self._waiting_bytes = rest.num_rows, rest.nbytes

    def close(self) -> None:
        if self._waiting_rows:
            self._write(self._waiting_rows)
        self._writer.close()
