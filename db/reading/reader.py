"""An open ledger, for reading: the tables that it shows, a job's rows and figures. Never changes it.

`Reader.open(url)` checks that there is a ledger of our schema. Rows are plain Python, JSON columns decoded, times in
UTC. `db.reading.queries` has the same as pandas frames, `db.reading.fleet` what is asked of many jobs at once.
"""

from __future__ import annotations

import difflib
import gc
import getpass
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    FromClause,
    Select,
    case,
    exists,
    extract,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    text,
    true,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute, aliased

from db import models
from db.engine import file_of, make_engine, masked, refusal, resolve
from db.migrate import check_readable
from db.models import EventRow, FailureRow, IterationRow, JobRow, PlanRow, ReconfigurationRow, WorkerRow
from db.reading.costs import cost_accounts
from db.reading.costs.timeline import Again, HeldTime, committed_again
from db.reading.plans.explanations import explanations
from resihp.errors import JobNotFoundError, LedgerError, UsageError

if TYPE_CHECKING:
    from resihp.scheduler.explained.explanation import Explanation

Row = dict[str, Any]

JOB_COLUMNS = (
    *("id", "name", "host", "owner", "state", "exit_code", "reason", "started_at", "ended_at", "last_entry_at"),
    *("restart_count", "nodes", "gpus_per_node", "tp", "pp", "schedule", "version", "telemetry_dropped"),
    *("uuid", "run", "cluster", "slurm_job", "array_job", "array_task", "submitted_at", "slurm_account", "partition"),
    *("qos", "torch", "megatron_core", "cuda", "nccl", "script_commit"),
)


OF_JOB = ("job", "job_uuid")
"""What rows of all jobs have besides: names repeat, between folders and hosts."""

_ACCOUNT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "iterations": ("iteration", "epoch", "seconds", "predicted_seconds", "tokens", "loss", "finished_at"),
    "failures": (
        *("failure", "kind", "node", "iteration", "failed_at", "noticed_at", "detect_seconds", "recovered_epoch"),
        *("ended_iteration", "speed", "component", "hardware", "epoch", "idle"),
    ),
    "reconfigurations": ("epoch", "action", "seconds", "finished_at"),
    "plans": (
        *("epoch", "active", "standby", "decided_at", "in_effect_at", "reason", "description"),
        *("predicted", "present", "unit", "unaffected_by"),
    ),
}
"""What is reckoned with of each table: no layouts, which take longer than all else."""


def _columns(model: type[models.LedgerTable], *left_out: str) -> tuple[ColumnElement[Any], ...]:
    return tuple(column for column in model.__table__.columns if column.key not in ("job_id", *left_out))


@dataclass(frozen=True)
class Table:
    """One table of `resihp history`: its columns, and by which of them it is ordered and filtered."""

    query: Select[Any]
    source: FromClause
    order: str
    time: str
    json_columns: tuple[str, ...] = ()


def _table(
    model: type[models.LedgerTable],
    order: str,
    time: str,
    json_columns: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
) -> Table:
    return Table(select(*_columns(model, *left_out)), model.__table__, order, time, json_columns)


_recovery = FailureRow.__table__.outerjoin(
    ReconfigurationRow.__table__,
    (ReconfigurationRow.job_id == FailureRow.job_id) & (ReconfigurationRow.epoch == FailureRow.recovered_epoch),
)
_failure_columns = (
    *_columns(FailureRow, "recovered_epoch", "evidence"),
    *(
        sql_cast(null(), Float(53)).label(name)
        for name in ("seconds_to_recover", "noticed_after_seconds", "seconds_without_noticing")
    ),
    ReconfigurationRow.action.label("action"),
    FailureRow.recovered_epoch,
    FailureRow.evidence,
)
"""The three times are reckoned from `_back_at` (`_with_times`)."""
_back_at = ReconfigurationRow.finished_at.label("back_at")

_node_columns_told = (
    *(
        case((models.NodeRow.host != "", column)).label("joined_at") if column.key == "joined_at" else column
        for column in _columns(models.NodeRow)
    ),
    select(func.max(models.ReplacementRow.node))
    .where(
        models.ReplacementRow.job_id == models.NodeRow.job_id,
        models.ReplacementRow.instead == models.NodeRow.node,
        models.ReplacementRow.joined_at.is_not(None),
    )
    .scalar_subquery()
    .label("replaced_by"),
)
"""`joined_at`: null of one that never came; `replaced_by`: the node that joined in its place."""

_later = aliased(PlanRow)
_plan_columns = (
    *_columns(PlanRow),
    case(
        (PlanRow.in_effect_at.is_not(None), "in effect"),
        (PlanRow.refused_reason.is_not(None), "refused"),
        (exists().where(_later.job_id == PlanRow.job_id, _later.epoch > PlanRow.epoch), "superseded"),
        else_="pending",
    ).label("outcome"),
)
"""`outcome`: it took effect, at `in_effect_at`; it was refused; the next one was decided before it took effect; or it
is on its way."""

_suspicion_kind = func.coalesce(
    models.SuspicionRow.kind,
    case((models.SuspicionRow.component == "device", "slow-compute"), else_="slow-" + models.SuspicionRow.component),
)
_suspicion_columns = (
    *(_suspicion_kind.label("kind") if column.key == "kind" else column for column in _columns(models.SuspicionRow)),
    select(models.SuspicionKindRow.meaning)
    .where(models.SuspicionKindRow.kind == _suspicion_kind)
    .scalar_subquery()
    .label("meaning"),
)
"""Older clients knew of slowness alone, and of no kinds."""

TABLES: Mapping[str, Table] = {
    "failures": Table(
        select(*_failure_columns).select_from(_recovery), FailureRow.__table__, "failure", "noticed_at", ("ranks",)
    ),
    "nodes": Table(select(*_node_columns_told), models.NodeRow.__table__, "node", "joined_at"),
    "memberships": _table(models.MembershipRow, "joined_at", "joined_at", ("nic_firmware",)),
    "devices": _table(models.DeviceRow, "device", "joined_at"),
    "checkpoints": _table(models.CheckpointRow, "iteration", "committed_at"),
    "workers": _table(WorkerRow, "rank", "started_at"),
    "iterations": _table(IterationRow, "iteration", "finished_at"),
    "plans": Table(
        select(*_plan_columns),
        PlanRow.__table__,
        "epoch",
        "decided_at",
        ("layout", "assignment", "basis", "considered"),
    ),
    "reconfigurations": _table(ReconfigurationRow, "epoch", "finished_at"),
    "drains": _table(models.DrainRow, "drain", "drained_at", ("answers",)),
    "declined_changes": _table(models.DeclinedChangeRow, "declined", "declined_at", ("failures", "considered")),
    "replacements": _table(models.ReplacementRow, "replacement", "asked_at", ("excluded",)),
    "probes": _table(models.ProbeRow, "id", "measured_at", left_out=("id",)),
    "suspicions": Table(
        select(*_suspicion_columns), models.SuspicionRow.__table__, "suspicion", "raised_at", ("ranks",)
    ),
    "scores": _table(models.RankScoreRow, "iteration", "iteration"),
    "events": _table(EventRow, "seq", "at"),
}


TRUSTED = "resihp_trusted"
"""A role of PostgreSQL: what its members write of nodes counts for everybody. An administrator makes it and says who is
in it (`resihp db grant --trusted`)."""
NEAR = 3
"""Names told when one is not known."""
UUID_PREFIX = 4
"""Letters of a uuid by which a job may be named, at least; and those told of it."""
UUID_SHOWN = 8
CHOICES = 6
"""Jobs told where several are meant."""
DIGITS = 19
"""A number of so many is none of Slurm's."""
NAMES = 20_000
"""Names looked through for near ones."""
CLOCKS_APART = timedelta(minutes=1)
"""Between the clocks of two hosts, or of one that was set meanwhile, at most."""
JOBS_AT_ONCE = 100
"""Whose rows are read together: of tables of which a job has few."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The rest of a message on a name that is not known: `; did you mean n1 or n2?`, `, which holds ...`."""
    names = list(dict.fromkeys(known))
    folded = {each.casefold(): each for each in reversed(names)}
    near = [folded[each] for each in difflib.get_close_matches(name.casefold(), list(folded), n=NEAR)]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f", which holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else ", which has none"


@contextmanager
def no_collection() -> Iterator[None]:
    """While many rows are made: Python's collector of cycles would look through all of them again and again, and find
    none, which takes as long as everything else."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class NamedJob:
    """Which job a name means: `1234`, also `1234_5`, `1234-r1`; `user/1234`; the beginning of a uuid."""

    name: str
    user: str | None

    @classmethod
    def of(cls, text: str) -> NamedJob:
        user, slash, name = text.rpartition("/")
        return cls(name, user if slash else None)

    def _of_user(self, condition: ColumnElement[bool]) -> ColumnElement[bool]:
        return condition if self.user is None else condition & (JobRow.__table__.c.owner == self.user)

    @property
    def named(self) -> ColumnElement[bool]:
        return self._of_user(JobRow.__table__.c.name == self.name)

    @property
    def numbered(self) -> ColumnElement[bool]:
        """Runs again of a Slurm job, and what is called otherwise and has its number."""
        columns = JobRow.__table__.c
        again = columns.name.like(f"{_plain(self.name)}-r%", escape="\\")
        number = int(self.name) if self.name.isdecimal() and len(self.name) < DIGITS else None
        return self._of_user(again if number is None else again | (columns.slurm_job == number))

    @property
    def prefix(self) -> ColumnElement[bool] | None:
        """None where it cannot be the beginning of a uuid that somebody meant."""
        if len(self.name) < UUID_PREFIX or not set(self.name) <= set("0123456789abcdef-"):
            return None
        return self._of_user(JobRow.__table__.c.uuid.startswith(self.name))


def _by_job(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["job_id"], []).append(row)
    return found


def _with_times(failure: Row) -> Row:
    """From the failure to the first commit after it, and from there to its being noticed, and from there on: by the
    clocks of those who wrote it, which may have been several hosts'."""
    back_at, failed_at, noticed_at = failure.pop("back_at"), failure["failed_at"], failure["noticed_at"]
    known_at = noticed_at if failed_at is None else failed_at
    if back_at is not None:
        failure["seconds_to_recover"] = max((back_at - known_at).total_seconds(), 0.0)
        failure["seconds_without_noticing"] = max((back_at - noticed_at).total_seconds(), 0.0)
    if failed_at is not None:
        failure["noticed_after_seconds"] = max((noticed_at - failed_at).total_seconds(), 0.0)
    return failure


def _plain(name: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", name)


def _me() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container has no name for us
        return ""


def _choices(name: str, found: Sequence[Row]) -> str:
    told = [
        f"{job['uuid'][:UUID_SHOWN]} ({job['owner']}, {job['cluster'] or job['host']}, began "
        f"{job['started_at']:%Y-%m-%d %H:%M}, {job['state']})"
        for job in found[:CHOICES]
    ]
    more = f", and {len(found) - CHOICES} older ones" if len(found) > CHOICES else ""
    how = f"{found[0]['owner']}/{name} or its id" if len({job["owner"] for job in found}) > 1 else "its id"
    return f"job {name}: {len(found)} jobs have that name; name one by {how}: {', '.join(told)}{more}"


class Reader:
    """An open ledger, for reading. A server's connection ends with each question: a notebook that stays open has none.

    Within a `with` it lasts from the first question to the end, for those who ask many.
    """

    def __init__(self, connection: Connection, name: str, *, borrowed: bool = False) -> None:
        """Use `Reader.open`, or `Reader.within`."""
        self._connection, self._borrowed = connection, borrowed
        self._lasts = connection.dialect.name == "sqlite"
        self.name = name
        self.other_clusters: Collection[str] = ()
        """Of ledgers that are asked beside this one: nodes are named as if all were in one."""

    @classmethod
    def within(cls, connection: Connection) -> Reader:
        """For a writer that reads in its own transaction: neither ended nor closed by the reader."""
        return cls(connection, masked(connection.engine.url), borrowed=True)

    @classmethod
    def open(cls, url: str) -> Reader:
        """Raises LedgerError if there is no ledger at `url`, or one of another schema than ours."""
        parsed = resolve(url)
        file = file_of(parsed)
        if file is not None and not file.exists():
            raise LedgerError(f"ledger {masked(parsed)}: no such file; name another with --ledger")
        engine = make_engine(parsed, write=False)
        try:
            connection = engine.connect()
        except (DBAPIError, OSError) as error:
            engine.dispose()
            raise refusal(parsed, error) from error
        try:
            check_readable(connection, masked(parsed))
            connection.rollback()
        except (DBAPIError, OSError, LedgerError) as error:
            connection.close()
            engine.dispose()
            raise error if isinstance(error, LedgerError) else refusal(parsed, error) from error
        reader = cls(connection, masked(parsed))
        reader._part()
        return reader

    def close(self) -> None:
        if self._borrowed:
            return
        engine = self._connection.engine
        self._connection.close()
        engine.dispose()

    def __enter__(self) -> Reader:
        self._lasts = True
        return self

    def _part(self) -> None:
        if not self._lasts:
            self._connection.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def seconds(self, time: ColumnElement[Any]) -> ColumnElement[float]:
        """A time since 1970, reckoned by the database: many rows are read in half the time that datetimes take."""
        if self._connection.dialect.name == "sqlite":
            fraction = func.substr(time, 20)  # julianday rounds to milliseconds
            return sql_cast(func.strftime("%s", time), Float) + sql_cast(fraction, Float)
        return sql_cast(extract("epoch", time), Float)

    def period(self, time: ColumnElement[Any], by: str) -> ColumnElement[str]:
        """The month of a time, `2026-11`, or its week, by its Monday, `2026-11-16`; UTC."""
        if self._connection.dialect.name == "sqlite":
            words = ("'%Y-%m'",) if by == "month" else ()
            steps = () if by == "month" else ("'-6 days'", "'weekday 1'")
            call = func.strftime if by == "month" else func.date
            return call(*map(literal_column, words), time, *map(literal_column, steps))
        here = func.timezone(literal_column("'UTC'"), time)
        if by == "month":
            return func.to_char(here, literal_column("'YYYY-MM'"))
        return func.to_char(func.date_trunc(literal_column("'week'"), here), literal_column("'YYYY-MM-DD'"))

    def believed(self, query: Select[Any], job: ColumnElement[int]) -> Select[Any]:
        """A query over rows of many jobs, of those that may count against a node, or for it: `job` is their `job_id`.

        In a PostgreSQL that many users write to, jobs of the reader's own role, of the owner of the tables, and of
        roles that are members of `TRUSTED`: anybody else could set the reader's nodes aside with figures of his own.
        """
        if self._connection.dialect.name == "sqlite":
            return query
        return query.where(job.in_(select(JobRow.id).where(self.is_believed(JobRow.written_by))))

    def is_believed(self, writer: ColumnElement[Any] | InstrumentedAttribute[Any]) -> ColumnElement[bool]:
        """Whether a row counts that this role has written, as in `believed`; in SQLite every row does."""
        if self._connection.dialect.name == "sqlite":
            return true()
        owner = text("(SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = to_regclass('jobs'))")
        trusted = text(
            "(SELECT member.rolname FROM pg_roles member, pg_roles trusted WHERE trusted.rolname = :trusted "
            "AND pg_has_role(member.oid, trusted.oid, 'MEMBER'))"
        ).bindparams(trusted=TRUSTED)
        return or_(writer == func.current_user(), writer == owner, writer.in_(trusted))

    def clusters(self) -> list[str]:
        """Clusters whose jobs are here, of those that we believe, and `other_clusters`."""
        columns = JobRow.__table__.c
        query = select(columns.cluster).distinct().where(columns.cluster.is_not(None), columns.cluster != "")
        here = (row["cluster"] for row in self.fetch(self.believed(query, columns.id)))
        return sorted({*here, *self.other_clusters})

    def node_name(self, node: ColumnElement[Any], job: ColumnElement[int]) -> ColumnElement[Any]:
        """What a node, or a host, of a job is called among those of all jobs: `node`, or `cluster/node` where jobs of
        several clusters are here, whose nodes may have the same names. `job` is their `job_id`."""
        clusters = self.clusters()
        if len(clusters) < 2:
            return node
        of = JobRow.__table__.c
        return case(
            *((job.in_(select(of.id).where(of.cluster == name)), literal(f"{name}/") + node) for name in clusters),
            else_=node,
        )

    def is_asked(self, asked: str, node: ColumnElement[Any], job: ColumnElement[int]) -> ColumnElement[bool]:
        """That a node of a job is the one asked for among those of all jobs, as `is_node`; `job` is its `job_id`."""
        of = JobRow.__table__.c
        named = [node == asked]
        clusters = self.clusters() if "/" in asked else []
        for cluster in clusters if len(clusters) > 1 else ():
            if asked.startswith(f"{cluster}/"):  # not `node_name`, for which every row would be looked at
                own = job.in_(select(of.id).where(of.cluster == cluster))
                named.append((node == asked[len(cluster) + 1 :]) & own)
        return or_(*named)

    def fetch(self, query: Select[Any]) -> list[Row]:
        """All rows of one query, in a transaction that ends with it (a reader must not hold up the writer)."""
        if self._borrowed:
            return self._dicts(query)
        try:
            if self._connection.closed:
                self._connection = self._connection.engine.connect()
            found = self._dicts(query)
            self._connection.rollback()
        except DBAPIError as error:
            self._connection.rollback()
            raise refusal(self._connection.engine.url, error) from error
        finally:
            self._part()
        return found

    def _dicts(self, query: Select[Any]) -> list[Row]:
        result = self._connection.execute(query)
        names = tuple(result.keys())
        with no_collection():
            return [dict(zip(names, row, strict=True)) for row in result.all()]

    def jobs(
        self,
        *,
        user: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        last: int | None = None,
    ) -> list[Row]:
        """All jobs of this ledger, or of a `user`, that were alive meanwhile; newest first, columns `JOB_COLUMNS`."""
        columns = [JobRow.__table__.columns[name] for name in JOB_COLUMNS]
        query = select(*columns).order_by(JobRow.started_at.desc(), JobRow.id.desc()).limit(last)
        if user is not None:
            query = query.where(JobRow.owner == user)
        if since is not None:
            query = query.where(JobRow.last_entry_at >= since)
        if until is not None:
            query = query.where(JobRow.started_at < until)
        return self.fetch(query)

    def job(
        self,
        name: str | None = None,
        *,
        host: str | None = None,
        started: datetime | None = None,
        uuid: str | None = None,
    ) -> Row:
        """The job of that name (`NamedJob`), the reader's newest one without a name; with `uuid`, that one; with `host`
        and `started`, the one that began there nearest then, and not before. All columns of its row.

        Names are a user's own: where several users have that name, the reader's own job is meant, if he has one. Of
        attempts of one run the newest is meant. Raises JobNotFoundError naming near ones, or those that there are, and
        UsageError with the choices where several are meant.
        """
        query = select(*JobRow.__table__.columns).order_by(JobRow.started_at.desc(), JobRow.id.desc())
        if name is None and host is None:
            found = self.fetch(query.where(JobRow.owner == _me()).limit(1)) or self.fetch(query.limit(1))
            if not found:
                raise JobNotFoundError(f"ledger {self.name}: holds no job yet")
            return found[0]
        if uuid is not None:
            return self._job_of_folder(self.fetch(query.where(JobRow.uuid == uuid)), name or "", None, None)
        if host is not None or started is not None:
            return self._job_of_folder(self.fetch(query.where(JobRow.name == name)), name or "", host, started)
        wanted = NamedJob.of(name or "")
        found = (
            self.fetch(query.where(JobRow.name == name))
            or self.fetch(query.where(wanted.named))
            or self.fetch(query.where(wanted.numbered))
        )
        if not found and wanted.prefix is not None:
            found = self.fetch(query.where(wanted.prefix))
        if not found:
            raise JobNotFoundError(f"job {name}: not in ledger {self.name}{nearest(wanted.name, self._names())}")
        mine = [job for job in found if job["owner"] == _me()]
        candidates = mine if mine and wanted.user is None else found
        newest = {job["run"] or job["uuid"]: job for job in reversed(candidates)}
        if len(newest) > 1:
            raise UsageError(_choices(name or "", [*newest.values()][::-1]))
        return candidates[0]

    def _job_of_folder(self, found: list[Row], name: str, host: str | None, started: datetime | None) -> Row:
        found = [job for job in found if job["host"] == host] or found if host is not None else found
        if started is not None:  # one that began before this one's folder was made is another folder's
            found = [job for job in found if job["started_at"] > started - CLOCKS_APART]
        if not found:
            raise JobNotFoundError(f"job {name}: not in ledger {self.name}{nearest(name, self._names())}")
        if started is not None:
            return min(found, key=lambda job: abs((job["started_at"] - started).total_seconds()))
        return found[0]

    def _names(self) -> list[str]:
        query = select(JobRow.name).order_by(JobRow.started_at.desc()).limit(NAMES)
        return [row["name"] for row in self.fetch(query)]

    def applied(self, job_id: int) -> int:
        """Number of the last journal record that the ledger holds."""
        return int(self.fetch(select(JobRow.journal_seq).where(JobRow.id == job_id))[0]["journal_seq"])

    def rows(
        self,
        table: str,
        job_id: int | None,
        *,
        node: str | None = None,
        rank: int | None = None,
        user: str | None = None,
        kind: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        last: int | None = None,
    ) -> list[Row]:
        """Rows of one of `TABLES` in order, the `last` of them at most; JSON columns decoded. Scores have no time.

        With `job_id` None of all jobs, or of a `user`'s, in order of time, each with its `job` as the first column.
        From `since` on and before `until`, as everywhere: of two times that follow one another nothing counts twice.
        `kind`: of that kind alone. Raises UsageError when the table has no nodes, or no kinds, to ask for.
        """
        asked = TABLES[table]
        columns, query = asked.source.c, asked.query.add_columns(*((_back_at,) if table == "failures" else ()))
        order = [columns[asked.order], *(c for c in asked.source.primary_key if c.key not in ("job_id", asked.order))]
        if job_id is not None:
            query = query.where(columns.job_id == job_id)
        else:
            if table == "devices":  # the same device is looked for in all of them
                there = self.node_name(columns.node, columns.job_id).label("node")
                told = (there if column.key == "node" else column for column in query.selected_columns)
                query = query.with_only_columns(*told)
            query = query.add_columns(JobRow.name.label("job"), JobRow.uuid.label("job_uuid"))
            # An inner join SQLite would begin with the jobs.
            query = query.outerjoin(JobRow, JobRow.id == columns.job_id)
            order = [columns[asked.time], columns.job_id, *order]
        if node is not None:
            named = [columns[name] for name in _node_columns(table)]
            query = query.where(
                or_(*(each == node if job_id else self.is_asked(node, each, columns.job_id) for each in named))
            )
        if rank is not None:
            query = query.where(columns.rank == rank)
        if kind is not None:
            if "kind" not in columns:
                raise UsageError(f"history {table}: has no kinds; leave --kind out")
            query = query.where(asked.query.selected_columns.kind == kind)
        if user is not None:
            query = query.where(columns.job_id.in_(select(JobRow.id).where(JobRow.owner == user)))
        if since is not None:
            query = query.where(columns[asked.time] >= since)
        if until is not None:
            query = query.where(columns[asked.time] < until)
        if last is None:
            found = self.fetch(query.order_by(*order))
        else:
            found = self.fetch(query.order_by(*(column.desc() for column in order)).limit(last))[::-1]
        found = [_with_times(row) for row in found] if table == "failures" else found
        with no_collection():
            for row in found:
                for column in asked.json_columns:
                    row[column] = self._decoded(row[column], column)
            return found if job_id is not None else [{name: row.pop(name) for name in OF_JOB} | row for row in found]

    def _decoded(self, content: str | None, column: str) -> Any:
        """Raises LedgerError: what was imported may hold anything."""
        try:
            return None if content is None else msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise LedgerError(
                f"ledger {self.name}: a row's {column} is not JSON: {error}; import the job again"
            ) from error

    def count(self, table: str, job_id: int, *, since: datetime | None = None, until: datetime | None = None) -> int:
        """How many rows of a table there are of a job."""
        asked = TABLES[table]
        columns = asked.source.c
        query = select(func.count().label("rows")).select_from(asked.source).where(columns.job_id == job_id)
        if since is not None:
            query = query.where(columns[asked.time] >= since)
        if until is not None:
            query = query.where(columns[asked.time] < until)
        return int(self.fetch(query)[0]["rows"])

    def nodes(self, job_id: int | None) -> list[str]:
        """Names of the nodes of a job, or of all jobs, as `node_name` has them."""
        columns = models.NodeRow.__table__.c
        if job_id is not None:
            query = select(columns.node).distinct().where(columns.job_id == job_id)
        else:
            query = select(self.node_name(columns.node, columns.job_id).label("node")).distinct()
        return [row["node"] for row in self.fetch(query.order_by("node").limit(NAMES))]

    def events(self, job_id: int, kinds: Sequence[str], last: int) -> list[Row]:
        """The `last` events of these kinds (names of journal entries), oldest first."""
        query = TABLES["events"].query.where(EventRow.job_id == job_id, EventRow.kind.in_(kinds))
        return self.fetch(query.order_by(EventRow.seq.desc()).limit(last))[::-1]

    def shown_plan(self, job_id: int) -> list[Row]:
        """The plan that a job's status is about, if any: the newest not refused, in effect or about to be."""
        query = TABLES["plans"].query.where(PlanRow.job_id == job_id, PlanRow.refused_reason.is_(None))
        found = self.fetch(query.order_by(PlanRow.epoch.desc()).limit(1))
        return [
            {**row, **{name: self._decoded(row[name], name) for name in TABLES["plans"].json_columns}} for row in found
        ]

    def explanations(self, job_id: int, plans: Sequence[Row]) -> dict[int, Explanation]:
        """Why these plans of a job, rows of `rows`, take as long as they do, by epoch: worked out now."""
        if not plans:
            return {}
        columns = JobRow.__table__.columns
        asked = select(columns["model"], columns["configuration"], columns["tp"], columns["pp"])
        [job] = self.fetch(asked.where(columns["id"] == job_id))
        workers = WorkerRow.__table__.columns
        places = self.fetch(select(workers["rank"], workers["node"]).where(workers["job_id"] == job_id))
        return explanations(job, plans, {row["rank"]: row["node"] for row in places})

    def narrow(self, table: str, job_id: int, names: Sequence[str] = ()) -> list[Row]:
        """All rows of a job in order, of the columns that accounts are reckoned from, or those of these `names`."""
        asked = TABLES[table]
        columns = asked.source.c
        query = select(*(columns[name] for name in names or _ACCOUNT_COLUMNS[table])).where(columns.job_id == job_id)
        return self.fetch(query.order_by(columns[asked.order]))

    def _narrow_of(self, table: str, job_ids: Sequence[int]) -> dict[int, list[Row]]:
        """The same of several jobs, with their `job_id`."""
        asked = TABLES[table]
        columns = asked.source.c
        query = select(columns.job_id, *(columns[name] for name in _ACCOUNT_COLUMNS[table]))
        return _by_job(self.fetch(query.where(columns.job_id.in_(job_ids)).order_by(columns[asked.order])))

    def attempts(self, run: str | None = None, others: Sequence[Row] = ()) -> list[Row]:
        """Jobs of a run, or of all runs that have several, here or with `others`: `uuid`, `run`, `started_at`,
        `written_by`, and the `first` and `last` iterations that they committed, null where there are none. With
        `others`."""
        jobs, iterations = JobRow.__table__.c, IterationRow.__table__.c
        of_job = iterations.job_id == jobs.id
        ends = [
            select(end(iterations.iteration)).where(of_job).scalar_subquery().label(name)
            for name, end in (("first", func.min), ("last", func.max))
        ]
        query = select(jobs.uuid, jobs.run, jobs.started_at, jobs.written_by, *ends)
        several = select(jobs.run).where(jobs.run != "").group_by(jobs.run).having(func.count() > 1)
        which = or_(jobs.run.in_(several), jobs.run.in_({row["run"] for row in others}))
        return [*self.fetch(query.where(which if run is None else jobs.run == run)), *others]

    def account(self, job: Row, now: datetime | None = None, again: Again | None = None) -> cost_accounts.Account:
        """Where the time of a job went; `job` is its row. Of one that is over it was kept. `again`: what was committed
        again, by attempts of other ledgers, too; None for those of this one."""
        if again is None:
            again = self.committed_again(job)
        if (kept := cost_accounts.kept_with(job, again)) is not None:
            return kept
        return cost_accounts.between(self.timeline(job, now, again))

    def committed_again(self, job: Row, others: Sequence[Row] = ()) -> Again:
        """What later attempts of the job's run committed again: those of this ledger, and `others`."""
        attempts = self.attempts(job["run"], others) if job["run"] else []
        return committed_again(attempts).get(job["uuid"], ())

    def timeline(self, job: Row, now: datetime | None = None, again: Again = ()) -> HeldTime:
        """Where the time of a job went, moment by moment; `job` is its row, `again` as of `timeline`."""
        [found] = self.timelines([job], now)
        return found(again)

    def timelines(self, jobs: Sequence[Row], now: datetime | None = None) -> Iterator[Callable[[Again], HeldTime]]:
        """The same of many jobs, in their order: rows are read once, those that a job has few of for `JOBS_AT_ONCE`."""
        checkpoints = models.CheckpointRow.__table__.c
        now = now or datetime.now(UTC)
        for begin in range(0, len(jobs), JOBS_AT_ONCE):
            part = jobs[begin : begin + JOBS_AT_ONCE]
            ids = [job["id"] for job in part]
            few = [self._narrow_of(table, ids) for table in ("failures", "reconfigurations", "plans")]
            query = select(checkpoints.job_id, checkpoints.iteration).where(checkpoints.job_id.in_(ids))
            saved, held = _by_job(self.fetch(query)), self._holdings(ids)
            columns = JobRow.__table__.c
            asked = self.fetch(select(columns.id, columns.configuration).where(columns.id.in_(ids)))
            configurations = {row["id"]: row["configuration"] for row in asked}
            for job in part:
                number = job["id"]
                failures, reconfigurations, plans = (of.get(number, []) for of in few)
                yield partial(
                    cost_accounts.timeline,
                    {**job, "configuration": configurations.get(job["id"])},
                    self.narrow("iterations", number),
                    failures,
                    reconfigurations,
                    plans,
                    [row["iteration"] for row in saved.get(number, [])],
                    held.get(number, []),
                    now,
                )

    def _holdings(self, job_ids: Sequence[int]) -> dict[int, list[Row]]:
        """Nodes of jobs, for what they cost: `node`, `devices`, `joined_at` (the first time, of one that came back),
        `released_at`, and the number of the request that it answered (`replacement`), null of the job's own."""
        nodes, served, asked = (m.__table__.c for m in (models.NodeRow, models.MembershipRow, models.ReplacementRow))
        first = select(func.min(served.joined_at)).where(served.job_id == nodes.job_id, served.node == nodes.node)
        answered = select(func.min(asked.replacement)).where(
            asked.job_id == nodes.job_id, asked.node == nodes.node, asked.joined_at.is_not(None)
        )
        query = select(
            *(nodes.job_id, nodes.node, nodes.devices, nodes.released_at),
            func.coalesce(first.scalar_subquery(), nodes.joined_at).label("joined_at"),
            func.coalesce(answered.scalar_subquery(), nodes.replacement).label("replacement"),
        )
        return _by_job(self.fetch(query.where(nodes.job_id.in_(job_ids)).order_by(nodes.node)))

    def settled(self, job_id: int) -> str:
        """The account of a job that is over, to be kept in its row, with what later attempts made of it."""
        [job] = self.fetch(select(*JobRow.__table__.columns).where(JobRow.id == job_id))
        again, alone = self.committed_again(job), cost_accounts.kept_with(job, ())
        if alone is None or again:
            [timeline] = self.timelines([job])
            alone = alone or cost_accounts.between(timeline(()))
            whole = cost_accounts.between(timeline(again)) if again else alone
        else:
            whole = alone
        return msgspec.json.encode(cost_accounts.to_keep(alone, whole, again)).decode()

    def unsettled(self, run: str | None = None) -> list[Row]:
        """Jobs that are over, of a run or all, whose row lacks their account, or what later attempts committed again of
        it: `id`, `uuid`, `run`, `written_by`."""
        again = committed_again(self.attempts(run))
        jobs = JobRow.__table__.c
        query = select(jobs.id, jobs.uuid, jobs.run, jobs.state, jobs.account, jobs.written_by)
        query = query.where(jobs.state != "running")
        if run is not None:
            query = query.where(jobs.run == run)
        return [
            {name: job[name] for name in ("id", "uuid", "run", "written_by")}
            for job in self.fetch(query.order_by(jobs.started_at, jobs.id))
            if cost_accounts.kept_with(job, again.get(job["uuid"], ())) is None
        ]

    def summary(self, job_id: int, now: datetime | None = None) -> Row:
        """The job in figures, as `db.reading.costs.cost_accounts.summarise` tells them."""
        [job] = self.fetch(select(*JobRow.__table__.columns).where(JobRow.id == job_id))
        shown = self.shown_plan(job_id)
        return cost_accounts.summarise(
            job,
            self.narrow("iterations", job_id),
            self.narrow("failures", job_id),
            self.narrow("reconfigurations", job_id),
            self.narrow("plans", job_id),
            now or datetime.now(UTC),
        ) | {"epoch": shown[0]["epoch"] if shown else None}


def is_node(asked: str | None, name: str, clusters: Iterable[str]) -> bool:
    """Whether a node of this name (`Reader.node_name`) is asked for, with its cluster or without; None asks for all.
    A node's own name may have a slash, too."""
    return asked is None or name == asked or any(name == f"{cluster}/{asked}" for cluster in clusters)


def _node_columns(table: str) -> list[str]:
    """Columns that name nodes. Raises UsageError for a table that has none."""
    found = [name for name in ("node", "instead") if name in TABLES[table].source.c]
    if not found:
        raise UsageError(f"history {table}: has no nodes; leave --node out")
    return found
