"""Writes a folder of Parquet files: one for each table, of those that grow with iterations one for each month.

    manifest.json
    jobs.parquet  plans.parquet  maintenance.parquet  ...
    iterations/month=2026-11/part-0.parquet  rank_reports/month=2026-11/part-0.parquet  ...

A month is kept from an export of before where its jobs are in the state that they were in then, and its files are as
they were written; the others, and all tables that are not split, are written anew. Jobs stand in the order of their
months, then of their uuids, and all rows of one together: who asks for one job reads a row group or two.
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

from db import migrate
from db.parquet.manifest import FORMAT, MANIFEST, ExportedFile, Manifest, fault
from db.parquet.tables import (
    JOBS,
    MAINTENANCE,
    MONTHLY,
    OF_JOBS,
    Row,
    Source,
    arrow_schema,
    columns_of,
    in_files,
    month_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_IN_GROUP = 100_000
"""Of a row group at least, where a table has as many, and less than twice that: what Parquet's readers are made for,
and what fits in memory whoever reads it."""
BYTES_IN_GROUP = 256 << 20
"""A group of rows this large is written whatever their number: texts have no bound."""
PART = "part-0.parquet"


class StatedSource(Source, Protocol):
    """A source that tells cheaply whether a job's rows are those that they were."""

    def states(self) -> Mapping[str, Sequence[Any]]:
        """Of each job, by its uuid, what is another whenever a row of `MONTHLY` is another."""


@dataclass(frozen=True)
class Exported:
    """`written` and `kept`: months, oldest first, whose files were made anew, or taken over from the export before."""

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
    """Fill an empty folder, the manifest last. What is in it is of our schema, whichever the source's: what we do not
    know is left out. `before`: an export whose files are linked to, or copied, where they would be the same; it is left
    as it is."""
    from resihp import __version__

    months: dict[str, list[Row]] = {}
    for job in sorted(jobs, key=in_files):
        months.setdefault(month_of(job["started_at"]), []).append(job)
    states = source.states()
    known = {month: _state(of_month, states) for month, of_month in months.items()}
    files: list[ExportedFile] = []
    kept: list[str] = []
    for month, of_month in months.items():
        taken = _taken_over(before, month, known[month], folder)
        if taken:
            kept.append(month)
        else:
            taken = [
                _of_jobs(source, table, of_month, folder, f"{table.name}/month={month}/{PART}") for table in MONTHLY
            ]
        files += taken
    in_order = [job for of_month in months.values() for job in of_month]
    files.append(_file(folder, "jobs.parquet", JOBS, [_columns(JOBS, in_order)]))
    files.append(_file(folder, "maintenance.parquet", MAINTENANCE, [_columns(MAINTENANCE, maintenance)]))
    files += [
        _of_jobs(source, table, in_order, folder, f"{table.name}.parquet") for table in OF_JOBS if table not in MONTHLY
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
        known,
    )
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return Exported(manifest, tuple(month for month in months if month not in kept), tuple(kept))


def _state(jobs: Iterable[Row], states: Mapping[str, Sequence[Any]]) -> str:
    """Of a month: another where a job is more or less, or one of them is in another state."""
    told = [(job["uuid"], job["journal_seq"], job["last_entry_at"], states.get(job["uuid"], ())) for job in jobs]
    return sha256(msgspec.json.encode(told)).hexdigest()


def _taken_over(before: tuple[Path, Manifest] | None, month: str, state: str, folder: Path) -> list[ExportedFile]:
    """Files of a month from the export before, now in this one too; none where it is to be written anew."""
    if before is None or before[1].schema != migrate.head() or before[1].months.get(month) != state:
        return []
    place, manifest = before
    found = {file.path: file for file in manifest.files if file.month == month}
    if set(found) != {f"{table.name}/month={month}/{PART}" for table in MONTHLY}:
        return []
    if any(fault(place, file) for file in found.values()):
        return []
    for path in found:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(place / path, folder / path)
        except OSError:  # a file system without links
            shutil.copyfile(place / path, folder / path)
    return list(found.values())


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
    """A table's file, of parts in columns."""
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    with closing(_RowGroups(place, arrow_schema(table))) as groups:
        for part in parts:
            groups.add(part)
    with place.open("rb") as content:
        return ExportedFile(path, groups.rows, place.stat().st_size, file_digest(content, "sha256").hexdigest())


class _RowGroups:
    """A file that is written in row groups of a sound size, whatever the parts that it comes in."""

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
