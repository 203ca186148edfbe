"""Export and import of jobs and maintenance records. Sources are Parquet files, another ledger, or a journal.

A job is identified by its uuid. Of two copies, the one with more records of the journal (`journal_seq`) is newer. A
newer copy replaces an older one as a whole; an older or equal copy only adds missing rank reports. Tables and columns
of a newer source that this version does not know are not imported, and are reported. Each job is imported in one
transaction. Maintenance records belong to no job: they are copied only with a whole ledger (`resihp.db.maintenance`).
Called by `resihp db export|import`; `resihp.db.writing.catch_up` imports journals.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from sqlalchemy import Connection, Table, func, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from resihp.db import maintenance, migrate, settling
from resihp.db.engine import file_of, make_engine, masked, prepare_folder, refusal, resolve
from resihp.db.foreign.cells import check_cells
from resihp.db.foreign.files import is_ours, is_shared_with_group, private_copy
from resihp.db.parquet.manifest import MANIFEST
from resihp.db.parquet.place import earlier_export, put_in_place
from resihp.db.parquet.reading import open_export
from resihp.db.parquet.tables import JOBS, MONTHLY_TABLES, OF_JOBS, Row, Source, Values, columns_of, file_order_key
from resihp.db.parquet.writing import Exported, write
from resihp.db.projection.columns import moment
from resihp.db.projection.jobs import TELEMETRY_TABLES, forget, own_job
from resihp.db.telemetry import report_rows
from resihp.db.writing.catch_up import catch_up
from resihp.durable_files import own_links_followed
from resihp.errors import JobNotFoundError, LedgerError, UsageError
from resihp.record import journal, journal_file, journal_format
from resihp.record.job_uuid import job_uuid
from resihp.record.packing import first_of

SQLITE_MAGIC = b"SQLite format 3\x00"
ROWS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Merged:
    """Result of the import of one job. `outcome`: `new`, `brought forward` (an older copy was present), or `unchanged`.
    `rows`: number of imported rows, or records of a journal. `job` and `uuid`: empty for maintenance records."""

    job: str
    uuid: str
    outcome: str
    rows: int
    note: str = ""


@dataclass(frozen=True)
class _Ledger:
    connection: Connection

    def left_out(self) -> list[str]:
        return migrate.unknown_parts(self.connection)

    def jobs(self) -> list[Row]:
        query = select(*(JOBS.c[name] for name in columns_of(JOBS))).order_by(JOBS.c.started_at, JOBS.c.id)
        return [dict(row) for row in self.connection.execute(query).mappings()]

    def rows(self, table: Table, uuid: str) -> Iterator[Sequence[Values]]:
        columns = [table.c[name] for name in columns_of(table)]
        query = select(*columns).join(JOBS, JOBS.c.id == table.c.job_id).where(JOBS.c.uuid == uuid)
        query = query.order_by(*table.primary_key.columns)
        result = self.connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query)
        return cast(Iterator[Sequence[Values]], result.partitions(ROWS_AT_ONCE))

    def maintenance(self) -> list[Row]:
        return maintenance.exportable(self.connection)

    def states(self) -> Mapping[str, Sequence[Any]]:
        """Return, for each job, the number of rows and the first and last key in each table of `MONTHLY_TABLES`.
        Together with `journal_seq` they detect every change: rows from the journal change `journal_seq`, and telemetry
        rows are only added or removed."""
        uuids = {row.id: row.uuid for row in self.connection.execute(select(JOBS.c.id, JOBS.c.uuid))}
        states: dict[str, list[Any]] = {uuid: [] for uuid in uuids.values()}
        for table in MONTHLY_TABLES:
            job, key = table.c.job_id, next(column for column in table.primary_key if column.name != "job_id")
            query = select(job, func.count(), func.min(key), func.max(key)).group_by(job).order_by(job)
            for number, *counts in self.connection.execute(query):
                states[uuids[number]].append((str(table.name), *counts))
        return states


# --- export ---------------------------------------------------------------------------------------------------------


def export(url: str, folder: Path, uuids: Sequence[str] | None = None) -> Exported:
    """Export jobs to Parquet files in `folder`: those with these uuids, or all if `uuids` is None. The folder is new,
    or contains an earlier export, of which unchanged files are kept.

    The export is a snapshot, even while jobs write. It is built in a temporary folder and then moved, so that readers
    always find a complete export, old or new. Raises LedgerError if there is no ledger of this schema at `url`,
    JobNotFoundError if the ledger has none of the jobs, UsageError if the folder cannot be written, or if the earlier
    export has jobs that would be lost.
    """
    folder = own_links_followed(folder)
    if folder.is_symlink():
        raise UsageError(f"{folder}: is another user's link, which is not followed; name its target folder")
    folder = folder.resolve()
    before = earlier_export(folder)
    with _open_for_reading(url) as connection:
        source = _Ledger(connection)
        jobs = [row for row in source.jobs() if uuids is None or row["uuid"] in uuids]
        if not jobs:
            raise JobNotFoundError(f"ledger {masked(resolve(url))}: holds no such job")
        if before is not None and (lost_jobs := set(before.jobs) - {row["uuid"] for row in jobs}):
            raise UsageError(
                f"{folder}: exists, and has {len(lost_jobs)} job{'s' * (len(lost_jobs) != 1)} that would not be in it "
                "any more; name a new folder with -o"
            )
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            part.mkdir(parents=True)
            oldest = migrate.oldest_client(connection, "read")
            exported = write(
                source,
                jobs,
                source.maintenance() if uuids is None else [],
                part,
                min(
                    oldest or migrate.head(), migrate.head()
                ),  # a newer ledger's oldest client may be newer than the files
                None if before is None else (folder, before),
            )
            put_in_place(part, folder)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be written: {error.strerror or error}; name another with -o") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return exported


# --- import ---------------------------------------------------------------------------------------------------------


def import_from(path: str, url: str) -> list[Merged]:
    """Merge the jobs of the source at `path` into the ledger at `url`, which is created if missing.

    `path`: a folder that `export` wrote, a journal, a job's folder, a SQLite ledger, or the URL of a ledger. Raises
    LedgerError or UsageError if one of them cannot be used; the job that was being imported is then unchanged.
    """
    if "://" in path:
        with _open_for_reading(path) as connection:
            return merge(_Ledger(connection), url)
    place = Path(path)
    if os.path.isdir(place):  # unlike Path.is_dir, it never raises, even for a link to an inaccessible place
        return _import_folder(place, url)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("is no plain file")
            begins = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}; name a journal, a ledger or a job's folder") from error
    if journal_format.MAGIC.startswith(begins[: len(journal_format.MAGIC)]):
        return [import_journal(place, url)]
    if begins == SQLITE_MAGIC:
        return _import_file(place, url)
    raise UsageError(f"{place}: neither a journal nor a SQLite ledger; name one of these, a job's folder, or an export")


def _import_folder(folder: Path, url: str) -> list[Merged]:
    if (folder / MANIFEST).exists():
        return merge(open_export(folder), url)
    kept, own = folder / "journal", folder / "ledger.db"
    merged: list[Merged] = []
    if own.exists():  # first: only the ledger has rank reports
        if _same_file(own, url):
            own = folder / "none"
        else:
            merged = _import_file(own, url)
    if kept.exists():
        brought = import_journal(kept, url)
        older = {job.uuid: job for job in merged}
        if brought.uuid in older and brought.outcome == "unchanged":
            brought = older[brought.uuid]
        merged = [job for job in merged if job.uuid != brought.uuid] + [brought]
    elif not own.exists():
        raise UsageError(
            f"{folder}: holds no {MANIFEST}, no journal and no ledger.db; name a job's folder or an export"
        )
    return merged


def _same_file(file: Path, url: str) -> bool:
    target = file_of(resolve(url))
    return target is not None and target.exists() and target.samefile(file)


def _import_file(file: Path, url: str) -> list[Merged]:
    """Import another SQLite ledger. It is copied first, so that an older schema can be upgraded in the copy and the
    original stays unchanged."""
    if _same_file(file, url):
        raise UsageError(f"{file}: is the ledger itself; name another source, or another ledger with --ledger")
    name = f"sqlite:///{file.absolute()}"
    with _copy_of(file, name) as folder:
        copied = resolve(f"sqlite:///{folder}/ledger.db")
        try:
            engine = make_engine(copied, write=True, migrate=True)
            with engine.begin() as connection:
                migrate.check_plain(connection, name)
                if migrate.version_of(connection) is None:
                    raise LedgerError(f"ledger {name}: holds no ledger of resihp; name another source")
                migrate.upgrade_connection(connection, name)
                if not is_ours(file):
                    check_cells(connection, name)
        except DBAPIError as error:
            raise refusal(resolve(name), error) from error
        finally:
            engine.dispose()
        with _open_for_reading(str(copied), name) as connection:
            return merge(_Ledger(connection), url)


def _copy_of(file: Path, name: str) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder that contains a copy of a ledger. Raises LedgerError."""
    if not is_ours(file):
        return private_copy(file, name, with_journal=is_shared_with_group(file))
    folder = tempfile.TemporaryDirectory(prefix="resihp-import-")
    try:
        source = sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro", uri=True)
        with closing(source), closing(sqlite3.connect(f"{folder.name}/ledger.db")) as target:
            source.backup(target)
    except sqlite3.Error as error:
        folder.cleanup()
        raise refusal(resolve(f"sqlite:///{file}"), DBAPIError(None, None, error)) from error
    return folder


def import_journal(path: Path, url: str) -> Merged:
    """Import a journal; an unfinished last record is skipped. Raises UsageError if the journal does not begin with the
    start of a job."""
    records = journal_file.read_packed(path)
    if not records:
        raise UsageError(f"journal {path}: holds no record; nothing to import")
    first = records[0]
    if not isinstance(first.entry, journal.JobStarted):
        raise UsageError(
            f"journal {path}: begins with record {first.seq}, not with a job's start; name a whole journal"
        )
    try:
        uuid = job_uuid(first)
        moment(first.at)
    except ValueError as error:
        raise UsageError(f"journal {path}: its first record is invalid: {error}; name a whole journal") from error
    before = _journal_seq(url, uuid)
    if before is not None and before >= records[-1].seq:
        return Merged(first.entry.job, uuid, "unchanged", 0, _torn_tail_note(path))
    catch_up(url, path.parent, path)
    after = _journal_seq(url, uuid) or 0
    if after < records[-1].seq:
        raise LedgerError(
            f"ledger {masked(url)}: ends at record {after} of {path}, which has {records[-1].seq}; import it again"
        )
    outcome = "new" if before is None else "unchanged" if before >= after else "brought forward"
    new = sum(record.seq - max(first_of(record) - 1, before or 0) for record in records if record.seq > (before or 0))
    return Merged(first.entry.job, uuid, outcome, new, _torn_tail_note(path))


def _torn_tail_note(path: Path) -> str:
    torn = journal_file.torn_bytes(path)
    return f"its last {torn} bytes are an unfinished record and were skipped" if torn else ""


def _journal_seq(url: str, uuid: str) -> int | None:
    parsed = resolve(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        return None
    version = migrate.current(url)
    if version is None or migrate.is_older(version) or migrate.is_too_old(version):
        return None
    with _open_for_reading(url) as connection:
        return connection.execute(select(JOBS.c.journal_seq).where(JOBS.c.uuid == uuid)).scalar_one_or_none()


def merge(source: Source, url: str) -> list[Merged]:
    """Merge all jobs and maintenance records of `source` into the ledger at `url`, created if missing."""
    parsed = resolve(url)
    jobs, repairs = source.jobs(), source.maintenance()
    maintenance.check(repairs)
    prepare_folder(parsed)
    migrate.make_ready(parsed.render_as_string(hide_password=False))
    engine = make_engine(parsed, write=True)
    try:
        merged = []
        unknown = source.left_out()
        note = f"left out, newer than this resihp: {', '.join(unknown)}" if unknown else ""
        for job in sorted(jobs, key=file_order_key):
            with Session(engine) as session, session.begin():
                merged_job = _merge_job(session, source, job)
                merged.append(merged_job if merged_job.outcome == "unchanged" else replace(merged_job, note=note))
        if changed := {merged_job.uuid for merged_job in merged if merged_job.outcome != "unchanged"}:
            settling.settle_imported(engine, changed)
        with engine.begin() as connection:
            if brought := maintenance.add_missing(connection, repairs):
                merged.append(Merged("", "", "new", brought))
        return merged
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def _is_up_to_date(connection: Connection, uuid: str, seq: int) -> bool:
    """Decide whether the ledger has a job up to record `seq`, whoever wrote it: then nothing has to be replaced."""
    journal_seq = connection.execute(select(JOBS.c.journal_seq).where(JOBS.c.uuid == uuid)).scalar_one_or_none()
    return journal_seq is not None and journal_seq >= seq


def _merge_job(session: Session, source: Source, row: Row) -> Merged:
    try:
        existing = own_job(session, row["uuid"], row["name"])
    except LedgerError:
        if not _is_up_to_date(session.connection(), row["uuid"], row["journal_seq"]):
            raise
        return Merged(row["name"], row["uuid"], "unchanged", 0)
    connection = session.connection()
    outcome, rows = "unchanged", 0
    if existing is None:
        number = connection.execute(insert(JOBS).values(row)).inserted_primary_key[0]  # type: ignore[index]
        outcome = "new"
    else:
        number = existing.id
        if row["journal_seq"] > existing.journal_seq:
            forget(session, existing)
            session.flush()
            dropped = max(row["telemetry_dropped"], existing.telemetry_dropped)
            values = {**row, "telemetry_dropped": dropped}
            connection.execute(update(JOBS).where(JOBS.c.id == number).values(values))
            outcome = "brought forward"
    for table in OF_JOBS:
        if table.name in TELEMETRY_TABLES:
            rows += _merge_telemetry(connection, number, table, source.rows(table, row["uuid"]))
        elif outcome != "unchanged":
            names = columns_of(table)
            for part in source.rows(table, row["uuid"]):
                named = [{"job_id": number, **dict(zip(names, values_of_row, strict=True))} for values_of_row in part]
                if named:
                    connection.execute(insert(table), named)
                rows += len(part)
    if outcome == "unchanged" and rows:
        outcome = "brought forward"
    return Merged(row["name"], row["uuid"], outcome, rows)


def _merge_telemetry(connection: Connection, number: int, table: Table, parts: Iterator[Sequence[Values]]) -> int:
    """Insert the missing rows of a telemetry table; return their number."""
    count = select(func.count()).select_from(table).where(table.c.job_id == number)
    before = connection.execute(count).scalar_one()
    wanted = {"rank_reports": report_rows.COLUMNS, "rank_quantiles": report_rows.QUANTILE_COLUMNS}
    in_order = itemgetter(*map(columns_of(table).index, wanted.get(table.name, report_rows.SCORE_COLUMNS)))
    for part in parts:
        rows: list[Any] = [in_order(row) for row in part]
        if table.name == "rank_reports":
            report_rows.insert_reports(connection, number, report_rows.sound(rows))
        elif table.name == "rank_quantiles":
            report_rows.insert_quantiles(connection, number, rows)
        else:
            report_rows.insert_scores(connection, number, report_rows.sound_scores(rows))
    return int(connection.execute(count).scalar_one() - before)


@contextmanager
def _open_for_reading(url: str, name: str | None = None) -> Iterator[Connection]:
    """Open a ledger for reading in one snapshot. `name`: the ledger's name in messages. Raises LedgerError."""
    parsed = resolve(url)
    name = name or masked(parsed)
    file = file_of(parsed)
    if file is not None and not os.path.exists(file):
        raise LedgerError(f"ledger {name}: no such file; name another with --ledger")
    engine = make_engine(parsed, write=False)
    if parsed.get_backend_name() == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    try:
        with engine.connect() as connection:
            migrate.check_readable(connection, name)
            if file is not None and not is_ours(file):
                check_cells(connection, name)
            yield connection
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()
