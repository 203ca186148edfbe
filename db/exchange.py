"""Jobs from one ledger into another: as Parquet files, from another ledger, or from a journal; and what was repaired.

A job is recognised by its uuid, and the copy that has more of the journal (`journal_seq`) is the newer one: it takes
the place of an older one as a whole, and an older or equal one changes nothing but rank reports that were missing. Of a
source that is newer than we know what we do not know is left out, and named. One transaction for each job. Records of
maintenance are no job's: they come along with all of a ledger (`db.maintenance`). Called by `resihp db export|import`;
`db.writer` brings journals in.
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

from db import maintenance, migrate, projection, settling
from db.engine import file_of, make_engine, masked, prepare_folder, refusal, resolve
from db.foreign.cells import check_cells
from db.foreign.files import is_ours, is_shared_with_group, private_copy
from db.parquet.manifest import MANIFEST
from db.parquet.place import export_of_before, put_in_place
from db.parquet.reading import opened
from db.parquet.tables import JOBS, MONTHLY, OF_JOBS, Row, Source, Values, columns_of, in_files
from db.parquet.writing import Exported, write
from db.telemetry import report_rows
from db.writer import catch_up
from resihp.durable_files import own_links_followed
from resihp.errors import JobNotFoundError, LedgerError, UsageError
from resihp.record import journal, journal_file
from resihp.record.job_uuid import job_uuid
from resihp.record.packing import first_of

SQLITE_MAGIC = b"SQLite format 3\x00"
ROWS_AT_ONCE = 20_000


@dataclass(frozen=True)
class Merged:
    """What became of one job: `new`, `brought forward` (an older copy was there), or `unchanged`. `rows`: brought in,
    of a journal its records. `job` and `uuid` are empty for records of maintenance, where some are new."""

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
        found = self.connection.execution_options(yield_per=ROWS_AT_ONCE).execute(query)
        return cast(Iterator[Sequence[Values]], found.partitions(ROWS_AT_ONCE))

    def maintenance(self) -> list[Row]:
        return maintenance.carried(self.connection)

    def states(self) -> Mapping[str, Sequence[Any]]:
        """How many rows of `MONTHLY` there are of each job, the first and the last: what the journal brings changes
        `journal_seq` as well, telemetry is never changed, only added and thinned."""
        uuids = {row.id: row.uuid for row in self.connection.execute(select(JOBS.c.id, JOBS.c.uuid))}
        found: dict[str, list[Any]] = {uuid: [] for uuid in uuids.values()}
        for table in MONTHLY:
            job, key = table.c.job_id, next(column for column in table.primary_key if column.name != "job_id")
            query = select(job, func.count(), func.min(key), func.max(key)).group_by(job).order_by(job)
            for number, *told in self.connection.execute(query):
                found[uuids[number]].append((str(table.name), *told))
        return found


# --- out ------------------------------------------------------------------------------------------------------------


def export(url: str, folder: Path, uuids: Sequence[str] | None = None) -> Exported:
    """Write jobs, all of them where `uuids` is left out, to Parquet files in a new folder, or in that of an export of
    before, of which what would be the same stays.

    Of one moment, also while jobs write. The folder is made beside its place: what stands there is whole at any time,
    of before or of now. Raises LedgerError if there is no ledger of our schema at `url`, JobNotFoundError if it holds
    no such job, UsageError if the folder cannot be made, or has what would be lost.
    """
    folder = own_links_followed(folder)
    if folder.is_symlink():
        raise UsageError(f"{folder}: is another user's link, which is not followed; name the folder that it leads to")
    folder = folder.resolve()
    before = export_of_before(folder)
    with _reading(url) as connection:
        source = _Ledger(connection)
        jobs = [row for row in source.jobs() if uuids is None or row["uuid"] in uuids]
        if not jobs:
            raise JobNotFoundError(f"ledger {masked(resolve(url))}: holds no such job")
        if before is not None and (lost := set(before.jobs) - {row["uuid"] for row in jobs}):
            raise UsageError(
                f"{folder}: is there already, and has {len(lost)} job{'s' * (len(lost) != 1)} that would not be in it "
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
                min(oldest or migrate.head(), migrate.head()),  # a newer ledger's own may be newer than the files
                None if before is None else (folder, before),
            )
            put_in_place(part, folder)
        except OSError as error:
            raise UsageError(f"{folder}: cannot be written: {error.strerror or error}; name another with -o") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return exported


# --- in -------------------------------------------------------------------------------------------------------------


def import_from(path: str, url: str) -> list[Merged]:
    """Merge what is at `path` into the ledger at `url`, which is made if it is not there.

    `path`: a folder that `export` wrote, a journal, a job's folder, a SQLite ledger, or a ledger's URL. Raises
    LedgerError or UsageError that say what is wrong with either; nothing of the job at hand is changed then.
    """
    if "://" in path:
        with _reading(path) as connection:
            return merge(_Ledger(connection), url)
    place = Path(path)
    if os.path.isdir(place):  # which raises nothing, as Path's does where a link leads to what one may not look at
        return _import_folder(place, url)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError("is no plain file")
            begins = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise UsageError(f"{place}: {error.strerror or error}; name a journal, a ledger or a job's folder") from error
    if journal_file.MAGIC.startswith(begins[: len(journal_file.MAGIC)]):
        return [import_journal(place, url)]
    if begins == SQLITE_MAGIC:
        return _import_file(place, url)
    raise UsageError(
        f"{place}: neither a journal nor a SQLite ledger; name one, a folder that resihp db export wrote, or a job's"
    )


def _import_folder(folder: Path, url: str) -> list[Merged]:
    if (folder / MANIFEST).exists():
        return merge(opened(folder), url)
    kept, own = folder / "journal", folder / "ledger.db"
    found: list[Merged] = []
    if own.exists():  # first: it alone has rank reports
        if _same_file(own, url):
            own = folder / "none"
        else:
            found = _import_file(own, url)
    if kept.exists():
        brought = import_journal(kept, url)
        older = {each.uuid: each for each in found}
        if brought.uuid in older and brought.outcome == "unchanged":
            brought = older[brought.uuid]
        found = [each for each in found if each.uuid != brought.uuid] + [brought]
    elif not own.exists():
        raise UsageError(
            f"{folder}: holds no {MANIFEST}, no journal and no ledger.db; name a job's folder or an export"
        )
    return found


def _same_file(file: Path, url: str) -> bool:
    target = file_of(resolve(url))
    return target is not None and target.exists() and target.samefile(file)


def _import_file(file: Path, url: str) -> list[Merged]:
    """Another SQLite ledger: a copy of it, so that one of an older schema can be brought to ours and stays as it is."""
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
        with _reading(str(copied), name) as connection:
            return merge(_Ledger(connection), url)


def _copy_of(file: Path, name: str) -> tempfile.TemporaryDirectory[str]:
    """A folder with a copy of a ledger. Raises LedgerError."""
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
    """Bring in a journal; a torn tail is passed over. Raises UsageError if it holds no job's beginning."""
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
        projection.moment(first.at)
    except ValueError as error:
        raise UsageError(f"journal {path}: begins as no job does: {error}; name a whole journal") from error
    before = _journal_seq(url, uuid)
    if before is not None and before >= records[-1].seq:
        return Merged(first.entry.job, uuid, "unchanged", 0, _torn(path))
    catch_up(url, path.parent, path)
    after = _journal_seq(url, uuid) or 0
    if after < records[-1].seq:
        raise LedgerError(f"ledger {masked(url)}: ends at record {after} of {path}, which has {records[-1].seq}; again")
    outcome = "new" if before is None else "unchanged" if before >= after else "brought forward"
    new = sum(record.seq - max(first_of(record) - 1, before or 0) for record in records if record.seq > (before or 0))
    return Merged(first.entry.job, uuid, outcome, new, _torn(path))


def _torn(path: Path) -> str:
    torn = journal_file.torn_bytes(path)
    return f"its last {torn} bytes are of a record that was never finished, and are passed over" if torn else ""


def _journal_seq(url: str, uuid: str) -> int | None:
    parsed = resolve(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        return None
    version = migrate.current(url)
    if version is None or migrate.is_older(version) or migrate.is_too_old(version):
        return None
    with _reading(url) as connection:
        return connection.execute(select(JOBS.c.journal_seq).where(JOBS.c.uuid == uuid)).scalar_one_or_none()


def merge(source: Source, url: str) -> list[Merged]:
    """Merge all jobs of `source` into the ledger at `url`, which is made if need be, and what was repaired. Raises
    LedgerError."""
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
        for job in sorted(jobs, key=in_files):
            with Session(engine) as session, session.begin():
                one = _merge_job(session, source, job)
                merged.append(one if one.outcome == "unchanged" else replace(one, note=note))
        if changed := {one.uuid for one in merged if one.outcome != "unchanged"}:
            settling.settle_imported(engine, changed)
        with engine.begin() as connection:
            if brought := maintenance.bring_in(connection, repairs):
                merged.append(Merged("", "", "new", brought))
        return merged
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def _is_in(connection: Connection, uuid: str, seq: int) -> bool:
    """Whether all of a job up to record `seq` is in the ledger, whoever wrote it: then there is nothing to replace."""
    found = connection.execute(select(JOBS.c.journal_seq).where(JOBS.c.uuid == uuid)).scalar_one_or_none()
    return found is not None and found >= seq


def _merge_job(session: Session, source: Source, row: Row) -> Merged:
    try:
        there = projection.own_job(session, row["uuid"], row["name"])
    except LedgerError:
        if not _is_in(session.connection(), row["uuid"], row["journal_seq"]):
            raise
        return Merged(row["name"], row["uuid"], "unchanged", 0)
    connection = session.connection()
    outcome, rows = "unchanged", 0
    if there is None:
        number = connection.execute(insert(JOBS).values(row)).inserted_primary_key[0]  # type: ignore[index]
        outcome = "new"
    else:
        number = there.id
        if row["journal_seq"] > there.journal_seq:
            projection.forget(session, there)
            session.flush()
            dropped = max(row["telemetry_dropped"], there.telemetry_dropped)
            values = {**row, "telemetry_dropped": dropped}
            connection.execute(update(JOBS).where(JOBS.c.id == number).values(values))
            outcome = "brought forward"
    for table in OF_JOBS:
        if table.name in projection.TELEMETRY:
            rows += _merge_telemetry(connection, number, table, source.rows(table, row["uuid"]))
        elif outcome != "unchanged":
            names = columns_of(table)
            for part in source.rows(table, row["uuid"]):
                named = [{"job_id": number, **dict(zip(names, each, strict=True))} for each in part]
                if named:
                    connection.execute(insert(table), named)
                rows += len(part)
    if outcome == "unchanged" and rows:
        outcome = "brought forward"
    return Merged(row["name"], row["uuid"], outcome, rows)


def _merge_telemetry(connection: Connection, number: int, table: Table, parts: Iterator[Sequence[Values]]) -> int:
    """How many rows of a table of telemetry were missing."""
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
def _reading(url: str, name: str | None = None) -> Iterator[Connection]:
    """A ledger that we can read as it is at one moment. Raises LedgerError."""
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
