"""Reader of an export folder that `resihp.db.parquet.writing` wrote, or of an older export with one file for each
table.

Exports are checked first (`manifest.check_manifest`), but are still not trusted: their rows have to satisfy the
ledger's constraints, and rows that are not in an export's order are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Table

from resihp.db.models import LedgerTable
from resihp.db.parquet.manifest import MANIFEST, Manifest, check_manifest, unreadable
from resihp.db.parquet.tables import JOBS, MAINTENANCE, Row, Source, Values, arrow_schema, columns_of
from resihp.errors import LedgerError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_AT_ONCE = 20_000


def open_export(folder: Path) -> Source:
    """Open an export. Raises LedgerError unless it is complete, readable and unchanged."""
    manifest = check_manifest(folder)
    return Folder(folder, manifest) if manifest.files else FormerFolder(folder)


@dataclass
class JobRows:
    """The position of a job's rows in one row group of a file."""

    file: pq.ParquetFile
    path: str
    group: int
    start: int
    rows: int


@dataclass
class Folder:
    """Reader of an export. If jobs are requested in the order of the files, each row group is read once, because the
    last row group of each table is cached."""

    path: Path
    manifest: Manifest
    _runs: dict[str, dict[str, list[JobRows]]] = field(default_factory=dict)
    _last: dict[str, tuple[pq.ParquetFile, int, pa.Table]] = field(default_factory=dict)

    def left_out(self) -> list[str]:
        """Return the tables and columns in the files that this resihp does not know."""
        return _left_out(self.path, [file.path for file in self.manifest.files])

    def jobs(self) -> list[Row]:
        rows = self._all(JOBS)
        if sorted(str(row["uuid"]) for row in rows) != sorted(self.manifest.jobs):
            raise LedgerError(f"export {self.path}: jobs.parquet has other jobs than {MANIFEST}; export it again")
        return rows

    def maintenance(self) -> list[Row]:
        return self._all(MAINTENANCE)

    def rows(self, table: Table, uuid: str) -> Iterator[Sequence[Values]]:
        if table.name not in self._runs:
            self._runs[table.name] = self._locate_jobs(table)
        for run in self._runs[table.name].get(uuid, ()):
            try:
                part = self._group(table, run).slice(run.start, run.rows)
                for start in range(0, run.rows, ROWS_AT_ONCE):
                    yield _values(part.slice(start, ROWS_AT_ONCE))
            except read_errors() as error:
                raise unreadable(self.path, run.path, error) from error

    def _all(self, table: Table) -> list[Row]:
        import pyarrow.parquet as pq

        rows: list[Row] = []
        for file in self.manifest.of(table.name):
            try:
                rows += _fit_to_schema(pq.ParquetFile(self.path / file.path).read(), table).to_pylist()
            except read_errors() as error:
                raise unreadable(self.path, file.path, error) from error
        return rows

    def _group(self, table: Table, run: JobRows) -> pa.Table:
        last = self._last.get(table.name)
        if last is None or last[0] is not run.file or last[1] != run.group:
            self._last.pop(table.name, None)  # never keep two
            names = [name for name in run.file.schema_arrow.names if name in table.c]
            group = run.file.read_row_group(run.group, columns=names)
            last = self._last[table.name] = (run.file, run.group, _fit_to_schema(group, table))
        return last[2]

    def _locate_jobs(self, table: Table) -> dict[str, list[JobRows]]:
        """Return the positions of each job's rows, by uuid, from one column of each file."""
        import pyarrow.parquet as pq

        runs: dict[str, list[JobRows]] = {}
        for exported in self.manifest.of(table.name):
            try:
                file = pq.ParquetFile(self.path / exported.path, read_dictionary=["job_uuid"])
                for group in range(file.num_row_groups):
                    column = file.read_row_group(group, columns=["job_uuid"]).column("job_uuid")
                    for uuid, start, rows in self._runs_in(column, exported.path):
                        runs.setdefault(uuid, []).append(JobRows(file, exported.path, group, start, rows))
            except read_errors() as error:
                raise unreadable(self.path, exported.path, error) from error
        return runs

    def _runs_in(self, column: pa.ChunkedArray, path: str) -> Iterator[tuple[str, int, int]]:
        """Yield each job's uuid with the start and number of its rows in a row group. Raises LedgerError if a job's
        rows are not contiguous, as they are in every export: scattered rows could make reading very slow."""
        import numpy as np
        import pyarrow as pa

        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        joined = column.combine_chunks()
        codes = joined.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        starts = np.flatnonzero(np.diff(codes, prepend=-2))
        ends = [*starts[1:].tolist(), len(codes)]
        if len(starts) > len(joined.dictionary):
            raise LedgerError(f"export {self.path}: {path} has rows of a job in several places; export it again")
        for start, end in zip(starts.tolist(), ends, strict=True):
            yield str(joined[start].as_py()), start, end - start


@dataclass(frozen=True)
class FormerFolder:
    """Reader of an older export: its manifest lists no files, it has no maintenance records, and each job has a row
    group of its own."""

    path: Path

    def left_out(self) -> list[str]:
        return _left_out(self.path, sorted(file.name for file in self.path.glob("*.parquet")))

    def jobs(self) -> list[Row]:
        names = columns_of(JOBS)
        return [dict(zip(names, row, strict=True)) for rows in self._read(JOBS, None) for row in rows]

    def maintenance(self) -> list[Row]:
        return []

    def rows(self, table: Table, uuid: str) -> Iterator[Sequence[Values]]:
        return self._read(table, uuid)

    def _read(self, table: Table, uuid: str | None) -> Iterator[Sequence[Values]]:
        import pyarrow.dataset as ds

        name = f"{table.name}.parquet"
        try:
            dataset = ds.dataset(self.path / name, schema=arrow_schema(table), format="parquet")
            only = None if uuid is None else ds.field("job_uuid") == uuid
            for batch in dataset.to_batches(columns=list(columns_of(table)), filter=only, batch_size=ROWS_AT_ONCE):
                if batch.num_rows:
                    yield _values(batch)
        except read_errors() as error:
            raise unreadable(self.path, name, error) from error


def read_errors() -> tuple[type[Exception], ...]:
    """Return the types of errors that reading a damaged or malicious file may raise, including those for impossible
    times and undecodable texts."""
    import pyarrow as pa

    return OSError, KeyError, ValueError, OverflowError, pa.ArrowException


def _values(part: Any) -> list[Values]:
    """Return the rows of an Arrow table or batch."""
    return list(zip(*(column.to_pylist() for column in part.columns), strict=True))


def _fit_to_schema(raw: pa.Table, table: Table) -> pa.Table:
    """Return a table with the columns and types of `columns_of`, from the raw table of a file. Missing columns become
    null. Raises pyarrow's error if the types do not fit."""
    import pyarrow as pa

    names = columns_of(table)
    schema = pa.schema([field for field in arrow_schema(table) if field.name in names])
    columns = [
        raw.column(field.name).cast(field.type) if field.name in raw.column_names else pa.nulls(len(raw), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _left_out(folder: Path, paths: Sequence[str]) -> list[str]:
    import pyarrow.parquet as pq

    unknown: dict[str, None] = {}
    for path in paths:
        name = path.partition("/")[0].removesuffix(".parquet")
        table = LedgerTable.metadata.tables.get(name)
        if table is None:
            unknown[name] = None
            continue
        try:
            names = pq.read_schema(folder / path).names
        except read_errors() as error:
            raise unreadable(folder, path, error) from error
        unknown |= {f"{name}.{column}": None for column in names if column not in (*columns_of(table), "job_uuid")}
    return list(unknown)
