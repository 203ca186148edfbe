"""`manifest.json`: what a folder of Parquet files holds, and whether it still does.

Written last, into a folder that is not in its place yet. Each file is in it with its rows and digest, so that a folder
which lacks a month, or has one of another export, is told from a whole one before anything of it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path

import msgspec

from db import migrate
from db.parquet.tables import JOBS, MAINTENANCE, OF_JOBS
from resihp.errors import LedgerError

FORMAT = "resihp ledger"
MANIFEST = "manifest.json"
PATH = re.compile(r"[a-z_]+(/month=\d{4}-\d\d/[\w-]+)?\.parquet", re.ASCII)
"""Of a file in the folder: nothing outside of it can be named."""


class ExportedFile(msgspec.Struct, frozen=True):
    """`path`: in the folder, `TABLE.parquet` or `TABLE/month=2026-11/NAME.parquet`. `sha256`: of its bytes, in hex."""

    path: str
    rows: int
    bytes: int
    sha256: str

    @property
    def table(self) -> str:
        return self.path.partition("/")[0].removesuffix(".parquet")

    @property
    def month(self) -> str | None:
        """Whose jobs are in it; None where all are."""
        _, slash, rest = self.path.partition("/month=")
        return rest.partition("/")[0] if slash else None


class Manifest(msgspec.Struct, frozen=True):
    """The schema of what is in a folder, rows of each table, the jobs' uuids.

    `min_reader`: the oldest schema whose clients may read it; empty in exports from before. `left_out`: tables and
    columns of a newer ledger that the client that wrote this did not know. `files`: empty in exports from before, which
    have one for each table. `months`: of each month the state that its jobs were in (`db.parquet.writing`).
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
    """Raises LedgerError where it cannot be read, or is none of ours. Looks at nothing else in the folder."""
    file = folder / MANIFEST
    try:
        if not file.is_file():  # a pipe is never waited for
            raise OSError("is no plain file")
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except (OSError, UnicodeError, RecursionError, msgspec.DecodeError) as error:
        raise LedgerError(f"export {folder}: {MANIFEST} cannot be read: {error}; export it again") from error
    if manifest.format != FORMAT:
        raise LedgerError(f"export {folder}: {MANIFEST} is of another program; name a folder of resihp db export")
    for path in (*(each.path for each in manifest.files), *(f"{table}.parquet" for table in manifest.rows)):
        if not PATH.fullmatch(path):
            raise LedgerError(f"export {folder}: {MANIFEST} names {path[:80]!a}, which no export has")
    return manifest


def check_manifest(folder: Path) -> Manifest:
    """Raises LedgerError unless the folder is an export of our schema, or of a newer one that we may read, and each of
    its files is as it was written. Reads all of them."""
    manifest = read_manifest(folder)
    _check_schema(folder, manifest)
    tables = {file.stem for file in folder.glob("*.parquet")}
    files = [f"{table}.parquet" for table in sorted(tables | set(manifest.rows))] if not manifest.files else []
    for path in foreign(folder, manifest, [MANIFEST, *files]):
        if (folder / path).is_file() and not path.endswith(".parquet"):
            continue  # a note of somebody's
        what = "is not in its manifest" if (folder / path).is_file() else "is no plain file"
        raise LedgerError(f"export {folder}: {path!a} {what}; take it away, or export again")
    if manifest.files:
        _check_months(folder, manifest)
        for each in manifest.files:
            if wrong := fault(folder, each):
                raise LedgerError(f"export {folder}: {each.path} {wrong}; export it again")
    _check_rows(folder, manifest)
    return manifest


def foreign(folder: Path, manifest: Manifest, others: list[str]) -> Iterator[str]:
    """What is in a folder and belongs to neither its manifest nor `others`; sub-folders that are in it are looked
    through."""
    known = {file.path for file in manifest.files} | set(others)
    within = {str(parent) for path in known for parent in Path(path).parents}
    waiting = sorted(folder.iterdir())
    while waiting:
        file = waiting.pop()
        path = file.relative_to(folder).as_posix()
        if path in within and file.is_dir():
            waiting += sorted(file.iterdir())
        elif path not in known or not file.is_file():
            yield path


def fault(folder: Path, file: ExportedFile) -> str:
    """What is wrong with a file that should be as it was written, in words; empty where nothing is."""
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
                return "is not what was exported (its digest is another)"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return ""


def unreadable(folder: Path, path: str, error: Exception) -> LedgerError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return LedgerError(f"export {folder}: {path} cannot be read: {reason}; export it again")


def _check_schema(folder: Path, manifest: Manifest) -> None:
    if migrate.is_newer(manifest.schema):
        migrate.check_compatible(manifest.schema, manifest.min_reader or None, str(folder), "read")
    elif migrate.is_too_old(manifest.schema):
        raise LedgerError(
            f"export {folder}: its schema {manifest.schema} was made by a development version before 0.1.0 and cannot "
            "be read; import the journals of its jobs instead: resihp db import JOURNAL"
        )
    elif manifest.schema != migrate.head():
        raise LedgerError(
            f"export {folder}: its schema {manifest.schema} is older than {migrate.head()}; run resihp db upgrade on "
            "the ledger that it came from, and resihp db export again"
        )


def _check_months(folder: Path, manifest: Manifest) -> None:
    """No table is missing, and one that is split has a file for each month."""
    for each in (JOBS, MAINTENANCE, *OF_JOBS):
        if not manifest.of(each.name):
            raise LedgerError(f"export {folder}: {MANIFEST} has no {each.name}; export it again")
    split = {file.table for file in manifest.files if file.month is not None}
    there = {(file.table, file.month) for file in manifest.files}
    for table in sorted(split):
        for month in sorted(manifest.months):
            if (table, month) not in there:
                raise LedgerError(
                    f"export {folder}: {MANIFEST} has no {table} of {month[:20]!a}, as of other tables; export it again"
                )


def _check_rows(folder: Path, manifest: Manifest) -> None:
    """As many as the manifest says, by what the files say of themselves."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = [(file.path, file.rows) for file in manifest.files]
    if not expected:
        expected = [(f"{table}.parquet", rows) for table, rows in manifest.rows.items()]
    for path, rows in expected:
        try:
            found = pq.read_metadata(folder / path).num_rows
        except (OSError, pa.ArrowException) as error:
            raise unreadable(folder, path, error) from error
        if found != rows:
            raise LedgerError(f"export {folder}: {path} has {found} rows, its manifest says {rows}; export it again")
    for table, rows in manifest.rows.items():
        if manifest.files and (found := sum(file.rows for file in manifest.of(table))) != rows:
            raise LedgerError(
                f"export {folder}: {MANIFEST} says {rows} rows of {table}, and {found} in its files; export it again"
            )
