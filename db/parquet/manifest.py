"""`manifest.json`: the list of the Parquet files in a folder, and the check that they are unchanged.

The manifest is written last, before the folder is moved into place. It lists each file with its number of rows and its
digest, so that a folder that lacks a month, or that has a file of another export, is detected before any file is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path

import msgspec

from resihp.db import migrate
from resihp.db.parquet.tables import JOBS, MAINTENANCE, OF_JOBS
from resihp.errors import LedgerError

FORMAT = "resihp ledger"
MANIFEST = "manifest.json"
PATH = re.compile(r"[a-z_]+(/month=\d{4}-\d\d/[\w-]+)?\.parquet", re.ASCII)
"""Permitted path of a file in the folder, so that a manifest cannot name a file outside of it."""


class ExportedFile(msgspec.Struct, frozen=True):
    """One file. `path`: relative to the folder, `TABLE.parquet` or `TABLE/month=2026-11/NAME.parquet`. `sha256`: digest
    of its content, in hex."""

    path: str
    rows: int
    bytes: int
    sha256: str

    @property
    def table(self) -> str:
        return self.path.partition("/")[0].removesuffix(".parquet")

    @property
    def month(self) -> str | None:
        """Month in which the jobs of this file began; None if the file has the rows of all jobs."""
        _, slash, rest = self.path.partition("/month=")
        return rest.partition("/")[0] if slash else None


class Manifest(msgspec.Struct, frozen=True):
    """Content of an export folder: its schema version, the number of rows of each table, the jobs' uuids.

    `min_reader`: oldest schema version of clients that may read it; empty in older exports. `left_out`: tables and
    columns of a newer ledger that the exporting client did not know. `files`: empty in older exports, which have one
    file for each table. `months`: the state of each month's jobs (`resihp.db.parquet.writing`).
    """

    format: str
    schema: str
    version: str
    rows: dict[str, int]
    jobs: tuple[str, ...]
    min_reader: str = ""
    left_out: tuple[str, ...] = ()
    files: tuple[ExportedFile, ...] = ()
    months: dict[str, str] = {}

    def of(self, table: str) -> list[ExportedFile]:
        return [file for file in self.files if file.table == table]


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest. Raises LedgerError if it cannot be read, or if another program wrote it. Reads no other
    file of the folder."""
    file = folder / MANIFEST
    try:
        if not file.is_file():  # a pipe is never waited for
            raise OSError("is no plain file")
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except (OSError, UnicodeError, RecursionError, msgspec.DecodeError) as error:
        raise LedgerError(f"export {folder}: {MANIFEST} cannot be read: {error}; export it again") from error
    if manifest.format != FORMAT:
        raise LedgerError(f"export {folder}: {MANIFEST} is of another program; name a folder of resihp db export")
    for path in (
        *(file_in_manifest.path for file_in_manifest in manifest.files),
        *(f"{table}.parquet" for table in manifest.rows),
    ):
        if not PATH.fullmatch(path):
            raise LedgerError(f"export {folder}: {MANIFEST} names {path[:80]!a}, which is not a file of an export")
    return manifest


def check_manifest(folder: Path) -> Manifest:
    """Check an export by reading all its files, and return its manifest. Raises LedgerError unless the folder is an
    export of the newest known schema, or of a newer one that this resihp may read, and each of its files is
    unchanged."""
    manifest = read_manifest(folder)
    _check_schema(folder, manifest)
    tables = {file.stem for file in folder.glob("*.parquet")}
    files = [f"{table}.parquet" for table in sorted(tables | set(manifest.rows))] if not manifest.files else []
    for path in foreign(folder, manifest, [MANIFEST, *files]):
        if (folder / path).is_file() and not path.endswith(".parquet"):
            continue  # a user's note
        reason = "is not in its manifest" if (folder / path).is_file() else "is no plain file"
        raise LedgerError(f"export {folder}: {path!a} {reason}; remove it, or export again")
    if manifest.files:
        _check_months(folder, manifest)
        for exported in manifest.files:
            if wrong := fault(folder, exported):
                raise LedgerError(f"export {folder}: {exported.path} {wrong}; export it again")
    _check_rows(folder, manifest)
    return manifest


def foreign(folder: Path, manifest: Manifest, others: list[str]) -> Iterator[str]:
    """Yield the entries of a folder that are neither in its manifest nor in `others`. Searches sub-folders only if the
    manifest names files in them."""
    known_paths = {file.path for file in manifest.files} | set(others)
    within = {str(parent) for path in known_paths for parent in Path(path).parents}
    waiting = sorted(folder.iterdir())
    while waiting:
        file = waiting.pop()
        path = file.relative_to(folder).as_posix()
        if path in within and file.is_dir():
            waiting += sorted(file.iterdir())
        elif path not in known_paths or not file.is_file():
            yield path


def fault(folder: Path, file: ExportedFile) -> str:
    """Describe how a file differs from its entry in the manifest; empty if it does not differ."""
    path = folder / file.path
    try:
        if not path.exists():
            return "is missing"
        if not path.is_file():
            return "is no plain file"
        size = path.stat().st_size
        if size != file.bytes:
            return f"has {size} bytes, its manifest says {file.bytes}"
        with path.open("rb") as content:
            if file_digest(content, "sha256").hexdigest() != file.sha256:
                return "was changed since the export (its digest differs)"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return ""


def unreadable(folder: Path, path: str, error: Exception) -> LedgerError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return LedgerError(f"export {folder}: {path} cannot be read: {reason}; export it again")


def _check_schema(folder: Path, manifest: Manifest) -> None:
    migrate.refuse_too_old(manifest.schema, f"export {folder}")
    if migrate.is_newer(manifest.schema):
        migrate.check_compatible(manifest.schema, manifest.min_reader or None, str(folder), "read")
    elif manifest.schema != migrate.head():
        raise LedgerError(
            f"export {folder}: its schema {manifest.schema} is older than {migrate.head()}; run resihp db upgrade on "
            "the ledger that it came from, and resihp db export again"
        )


def _check_months(folder: Path, manifest: Manifest) -> None:
    """Raise LedgerError if a table is missing, or if a table with monthly files lacks a month."""
    for expected in (JOBS, MAINTENANCE, *OF_JOBS):
        if not manifest.of(expected.name):
            raise LedgerError(f"export {folder}: {MANIFEST} has no {expected.name}; export it again")
    split = {file.table for file in manifest.files if file.month is not None}
    present = {(file.table, file.month) for file in manifest.files}
    for table in sorted(split):
        for month in sorted(manifest.months):
            if (table, month) not in present:
                raise LedgerError(
                    f"export {folder}: {MANIFEST} has no {table} of {month[:20]!a}, as of other tables; export it again"
                )


def _check_rows(folder: Path, manifest: Manifest) -> None:
    """Raise LedgerError if the metadata of a file has another number of rows than the manifest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = [(file.path, file.rows) for file in manifest.files]
    if not expected:
        expected = [(f"{table}.parquet", rows) for table, rows in manifest.rows.items()]
    for path, rows in expected:
        try:
            row_count = pq.read_metadata(folder / path).num_rows
        except (OSError, pa.ArrowException) as error:
            raise unreadable(folder, path, error) from error
        if row_count != rows:
            raise LedgerError(
                f"export {folder}: {path} has {row_count} rows, its manifest says {rows}; export it again"
            )
    for table, rows in manifest.rows.items():
        if manifest.files and (row_count := sum(file.rows for file in manifest.of(table))) != rows:
            raise LedgerError(
                f"export {folder}: {MANIFEST} says {rows} rows of {table}, and {row_count} in its files; export again"
            )
