"""Exports as others would make them: forged ones whose manifest agrees with what was done to them, and former ones."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from resihp.db.parquet.manifest import MANIFEST


def files_of(folder: Path, table: str) -> list[Path]:
    """Of a table, oldest month first."""
    whole = folder / f"{table}.parquet"
    return [whole] if whole.exists() else sorted((folder / table).glob("*/*.parquet"))


def set_column(path: Path, column: str, value: object) -> None:
    rows = pq.read_table(path, partitioning=None).to_pylist()
    schema = pq.read_schema(path)
    if column not in schema.names:
        schema = schema.append(pa.field(column, pa.string()))
    pq.write_table(pa.Table.from_pylist([{**row, column: value} for row in rows], schema), path)


def rows_of(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return 1


def sealed(folder: Path, **fields: object) -> None:
    """The manifest as it would be, were the folder's files an export's, with other `fields`."""
    manifest = json.loads((folder / MANIFEST).read_text())
    files = []
    for path in sorted(folder.rglob("*.parquet")):
        content = path.read_bytes()
        files.append(
            {
                "path": path.relative_to(folder).as_posix(),
                "rows": rows_of(path),
                "bytes": len(content),
                "sha256": sha256(content).hexdigest(),
            }
        )
    rows: dict[str, int] = {}
    for file in files:
        table = str(file["path"]).partition("/")[0].removesuffix(".parquet")
        rows[table] = rows.get(table, 0) + int(str(file["rows"]))
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": files, "rows": rows} | fields))


def former(folder: Path) -> Path:
    """The same as versions of before wrote it: a file for each table, a row group for each job."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for table in manifest["rows"]:
        parts = [pq.read_table(path, partitioning=None) for path in files_of(folder, table)]
        whole = pa.concat_tables(parts)
        shutil.rmtree(folder / table, ignore_errors=True)
        with pq.ParquetWriter(folder / f"{table}.parquet", whole.schema) as writer:
            if table == "jobs":
                writer.write_table(whole)
            elif "job_uuid" in whole.schema.names:
                for uuid in manifest["jobs"]:
                    writer.write_table(whole.filter(pa.compute.equal(whole.column("job_uuid"), uuid)))
    (folder / "maintenance.parquet").unlink()
    del manifest["files"], manifest["months"], manifest["rows"]["maintenance"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
