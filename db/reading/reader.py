"""An open ledger, for reading: rows of its tables, of one job or all jobs, and a job's figures. Changes nothing.

`Reader.open(url)` checks that there is a ledger of a known schema. Rows are plain dictionaries, with JSON columns
decoded and times in UTC. `resihp.db.reading.queries` returns the same rows as pandas frames; `resihp.db.reading.fleet`
computes statistics over many jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Select,
    and_,
    case,
    extract,
    false,
    func,
    literal_column,
    or_,
    select,
    text,
    true,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute

from resihp.db.engine import file_of, make_engine, masked, refusal, resolve
from resihp.db.foreign.cells import check_cells_when_read, check_columns
from resihp.db.foreign.files import is_ours, is_read_in_place
from resihp.db.migrate import check_readable
from resihp.db.models import JobRow, WorkerRow
from resihp.db.reading import naming, table_rows
from resihp.db.reading.costs import accounts
from resihp.db.reading.costs.cost_accounts import Account
from resihp.db.reading.costs.timeline import Again, HeldTime, committed_again
from resihp.db.reading.plans.explanations import explanations
from resihp.db.reading.tables import JOB_COLUMNS, Row, no_collection
from resihp.errors import LedgerError, UsageError

if TYPE_CHECKING:
    from resihp.scheduler.explained.explanation import Explanation

TRUSTED_ROLE = "resihp_trusted"
"""PostgreSQL role with trusted members: rows about nodes that they write count for all users. An administrator creates
the role and decides its members (`resihp db grant --trusted`)."""


class Reader:
    """An open ledger, for reading. On a server, the connection is closed after each query, so that an open notebook
    occupies no connection.

    Within a `with` statement, the connection stays open from the first query to the end, for callers with many queries.
    """

    def __init__(self, connection: Connection, name: str, *, borrowed: bool = False) -> None:
        """Do not call this directly: use `Reader.open` or `Reader.within`."""
        self._connection, self._borrowed = connection, borrowed
        self._lasts = connection.dialect.name == "sqlite"
        self.name = name
        self.other_clusters: Collection[str] = ()
        """Clusters of other ledgers read with this one; nodes are named as if all were in one ledger."""

    @classmethod
    def within(cls, connection: Connection) -> Reader:
        """Return a reader that works within a writer's transaction, and neither ends nor closes it."""
        return cls(connection, masked(connection.engine.url), borrowed=True)

    @classmethod
    def open(cls, url: str) -> Reader:
        """Open the ledger at `url`. Raises LedgerError if there is none, or if its schema cannot be read."""
        parsed = resolve(url)
        file = file_of(parsed)
        if file is not None and not os.path.exists(file):
            raise LedgerError(f"ledger {masked(parsed)}: no such file; name another with --ledger")
        engine = make_engine(parsed, write=False)
        try:
            connection = engine.connect()
        except (DBAPIError, OSError) as error:
            engine.dispose()
            raise refusal(parsed, error) from error
        try:
            check_readable(connection, masked(parsed))
            if file is not None and not is_read_in_place(file):
                check_cells_when_read(connection, masked(parsed))
            elif file is not None and not is_ours(file):
                check_columns(connection, masked(parsed))
            connection.rollback()
        except (DBAPIError, OSError, LedgerError) as error:
            connection.close()
            engine.dispose()
            raise error if isinstance(error, LedgerError) else refusal(parsed, error) from error
        reader = cls(connection, masked(parsed))
        reader._release_connection()
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

    def _release_connection(self) -> None:
        if not self._lasts:
            self._connection.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def seconds(self, time: ColumnElement[Any]) -> ColumnElement[float]:
        """Return a time column as seconds since 1970, computed by the database: for many rows this takes half the time
        of reading datetimes."""
        if self._connection.dialect.name == "sqlite":
            fraction = func.substr(time, 20)  # julianday rounds to milliseconds
            return sql_cast(func.strftime("%s", time), Float) + sql_cast(fraction, Float)
        return sql_cast(extract("epoch", time), Float)

    def period(self, time: ColumnElement[Any], by: str) -> ColumnElement[str]:
        """Return the month of a time column, such as `2026-11`, or its week, named by its Monday, such as `2026-11-16`;
        in UTC."""
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
        """Restrict a query over rows of many jobs to rows that may count for or against a node. `job`: the column with
        their `job_id`.

        In a PostgreSQL database with many writers, these are the rows of jobs that were written by the reader's own
        role, by the owner of the tables, or by members of `TRUSTED_ROLE`. Otherwise any user could discredit the
        reader's nodes with invented figures.
        """
        if self._connection.dialect.name == "sqlite":
            return query
        return query.where(job.in_(select(JobRow.id).where(self.is_believed(JobRow.written_by))))

    def is_believed(self, writer: ColumnElement[Any] | InstrumentedAttribute[Any]) -> ColumnElement[bool]:
        """Match rows written by a role that counts, as in `believed`; in SQLite every row counts."""
        if self._connection.dialect.name == "sqlite":
            return true()
        owner = text("(SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = to_regclass('jobs'))")
        trusted = text(
            "(SELECT member.rolname FROM pg_roles member, pg_roles trusted WHERE trusted.rolname = :trusted "
            "AND pg_has_role(member.oid, trusted.oid, 'MEMBER'))"
        ).bindparams(trusted=TRUSTED_ROLE)
        return or_(writer == func.current_user(), writer == owner, writer.in_(trusted))

    def owner(self) -> ColumnElement[str]:
        """Return a job's owner as the column `owner`: the user whom the job itself names.

        In a PostgreSQL database with many writers, any user can write any name there. The name stands alone if the
        database confirms it, because a role of that name, or a role that counts (`is_believed`), wrote the job.
        Otherwise the writer is added, as in `alice (by mallory)`, so that no job passes as another user's.
        """
        columns = JobRow.__table__.c
        if self._connection.dialect.name == "sqlite":
            return columns.owner
        vouched = or_(columns.written_by.is_(None), columns.written_by == columns.owner)
        with_writer = columns.owner + " (by " + columns.written_by + ")"
        owner = case((or_(vouched, self.is_believed(columns.written_by)), columns.owner), else_=with_writer)
        return owner.label("owner")

    def is_of(self, user: str) -> ColumnElement[bool]:
        """Match jobs of this user, with a name as in `owner`."""
        columns = JobRow.__table__.c
        if self._connection.dialect.name == "sqlite":
            return columns.owner == user
        names = {user, user.rpartition(" (by ")[0] or user}  # an index covers this condition
        return and_(columns.owner.in_(names), self.owner() == user)

    def is_written_by_reader(self) -> ColumnElement[bool]:
        """Match jobs written by the current database user; none in SQLite, which has no users."""
        if self._connection.dialect.name == "sqlite":
            return false()
        return JobRow.written_by == func.current_user()

    def clusters(self) -> list[str]:
        """Return the clusters of trusted jobs in this ledger, and `other_clusters`."""
        columns = JobRow.__table__.c
        query = select(columns.cluster).distinct().where(columns.cluster.is_not(None), columns.cluster != "")
        here = (row["cluster"] for row in self.fetch(self.believed(query, columns.id)))
        return sorted({*here, *self.other_clusters})

    def node_name(self, node: ColumnElement[Any], job: ColumnElement[int]) -> ColumnElement[Any]:
        """Return the name by which a node or host is unique among all jobs: `node`, or `cluster/node` if the ledger has
        jobs of several clusters, which may use equal names. `job`: the column with the `job_id`."""
        return naming.node_name(self.clusters(), node, job)

    def is_asked(self, wanted: str, node: ColumnElement[Any], job: ColumnElement[int]) -> ColumnElement[bool]:
        """Match rows with the node that `wanted` names among the nodes of all jobs, as `naming.is_node` does. `job`:
        the column with the `job_id`."""
        return naming.is_asked(self.clusters() if "/" in wanted else (), wanted, node, job)

    def fetch(self, query: Select[Any]) -> list[Row]:
        """Return all rows of one query. Its transaction ends with it, since a reader must not delay the writer."""
        if self._borrowed:
            return self._dicts(query)
        try:
            if self._connection.closed:
                self._connection = self._connection.engine.connect()
            rows = self._dicts(query)
            self._connection.rollback()
        except DBAPIError as error:
            self._connection.rollback()
            raise refusal(self._connection.engine.url, error) from error
        except LedgerError:  # from the check of a cell in a table that the query names
            self._connection.rollback()
            raise
        except (ValueError, TypeError) as error:  # from a driver or a type that cannot convert a stored value
            self._connection.rollback()
            raise LedgerError(
                f"ledger {self.name}: has values of the wrong type: {error}; the file is damaged or was edited. "
                "Rebuild it: resihp db import JOURNAL"
            ) from error
        except OverflowError as error:  # SQLite's driver has no number beyond 64 bits
            self._connection.rollback()
            raise UsageError(f"ledger {self.name}: a number in the query exceeds 64 bits") from error
        finally:
            self._release_connection()
        return rows

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
        """Return the jobs of this ledger, or of a `user`, that were alive in the period; newest first, with columns
        `JOB_COLUMNS`."""
        columns = [self.owner() if name == "owner" else JobRow.__table__.columns[name] for name in JOB_COLUMNS]
        query = select(*columns).order_by(JobRow.started_at.desc(), JobRow.id.desc()).limit(last)
        if user is not None:
            query = query.where(self.is_of(user))
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
        """Return a job's row. With `name`, the job that it means (`NamedJob`); without arguments, the user's newest
        job; with `uuid`, the job with this uuid; with `host` and `started`, the job of this name on that host that
        began nearest to that time, and not before it.

        Names belong to users: if several users have a job of that name, the reader's own is preferred. Of several
        attempts of one run, the newest is returned. Raises JobNotFoundError with suggestions or known names, and
        UsageError with the choices if the name is ambiguous.
        """
        return naming.job(self, name, host=host, started=started, uuid=uuid)

    def applied(self, job_id: int) -> int:
        """Return the number of the job's last journal record that the ledger contains."""
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
        """Return rows of one of `TABLES` in order, at most the `last` ones, with JSON columns decoded. Scores have no
        time.

        With `job_id` None: rows of all jobs, or of a `user`'s jobs, in order of time, with `job` and `job_uuid` as
        first columns. The time of a row is from `since` on and before `until`, so that no row counts in two consecutive
        periods. `kind`: only rows of this kind. Raises UsageError if `node` or `kind` is given for a table without such
        a column.
        """
        filters = table_rows.Filters(node=node, rank=rank, user=user, kind=kind, since=since, until=until, last=last)
        return table_rows.rows(self, table, job_id, filters)

    def decoded(self, content: str | None, column: str) -> Any:
        """Decode a JSON column; None for null. Raises LedgerError for invalid JSON, which imported rows may contain."""
        try:
            return None if content is None else msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise LedgerError(
                f"ledger {self.name}: a row's {column} is not JSON: {error}; import the job again"
            ) from error

    def count(self, table: str, job_id: int, *, since: datetime | None = None, until: datetime | None = None) -> int:
        """Return the number of a job's rows in a table, in the period if given."""
        return table_rows.count(self, table, job_id, since, until)

    def nodes(self, job_id: int | None) -> list[str]:
        """Return the names of the nodes of a job, or of all jobs, as in `node_name`."""
        return naming.nodes(self, job_id)

    def events(self, job_id: int, kinds: Sequence[str], last: int, always_last: str = "") -> list[Row]:
        """Return the `last` events of these kinds (names of journal entries), oldest first. If the last event of the
        kind `always_last` is older, it comes before them."""
        return table_rows.events(self, job_id, kinds, last, always_last)

    def shown_plan(self, job_id: int) -> list[Row]:
        """Return the plan that a job's status shows, by the rule of `JobRecord.shown_plan`, as a list with at most one
        row."""
        return table_rows.shown_plan(self, job_id)

    def explanations(self, job_id: int, plans: Sequence[Row]) -> dict[int, Explanation]:
        """Explain the iteration times of these plans of a job (rows of `rows`), by epoch. Computed on each call."""
        if not plans:
            return {}
        columns = JobRow.__table__.columns
        job_query = select(columns["model"], columns["configuration"], columns["tp"], columns["pp"])
        [job] = self.fetch(job_query.where(columns["id"] == job_id))
        workers = WorkerRow.__table__.columns
        places = self.fetch(select(workers["rank"], workers["node"]).where(workers["job_id"] == job_id))
        return explanations(job, plans, {row["rank"]: row["node"] for row in places})

    def narrow(self, table: str, job_id: int, names: Sequence[str] = ()) -> list[Row]:
        """Return all rows of a job in order, with the columns `names`, or with the columns from which cost accounts are
        computed."""
        return table_rows.narrow(self, table, job_id, names)

    def attempts(self, run: str | None = None, others: Sequence[Row] = ()) -> list[Row]:
        """Return the jobs of a run, or of all runs with several jobs (including `others`): `uuid`, `run`, `started_at`,
        `written_by`, and the `first` and `last` iterations that they committed, null if there are none. The result
        includes `others`."""
        return accounts.attempts(self, run, others)

    def account(self, job: Row, now: datetime | None = None, again: Again | None = None) -> Account:
        """Return how the time of a job was spent; `job` is its row. For a job that is over, the stored account is used.
        `again`: iterations that later attempts committed again, including attempts in other ledgers; None to look for
        them in this ledger."""
        return accounts.account(self, job, now, again)

    def committed_again(self, job: Row, others: Sequence[Row] = ()) -> Again:
        """Return the iterations that later attempts of the job's run committed again. Considered are attempts in this
        ledger, and `others`."""
        attempts = self.attempts(job["run"], others) if job["run"] else []
        return committed_again(attempts).get(job["uuid"], ())

    def timeline(self, job: Row, now: datetime | None = None, again: Again = ()) -> HeldTime:
        """Return how the time of a job was spent, moment by moment; `job` is its row, `again` as from
        `committed_again`."""
        [build] = self.timelines([job], now)
        return build(again)

    def timelines(self, jobs: Sequence[Row], now: datetime | None = None) -> Iterator[Callable[[Again], HeldTime]]:
        """Yield, for each of `jobs` in order, a function that computes the job's timeline. Rows are read once, and rows
        of small tables for `JOBS_AT_ONCE` jobs at a time."""
        return accounts.timelines(self, jobs, now)

    def settled(self, job_id: int) -> str:
        """Return the cost account of a job that is over, as JSON for its row, including the work that later attempts
        repeated."""
        return accounts.settled(self, job_id)

    def unsettled(self, run: str | None = None) -> list[Row]:
        """Return the jobs that are over, of a run or of all runs, and that lack in their row the cost account, or the
        iterations that later attempts committed again: `id`, `uuid`, `run`, `written_by`."""
        return accounts.unsettled(self, run)

    def summary(self, job_id: int, now: datetime | None = None) -> Row:
        """Return a job's main figures, as defined in `resihp.db.reading.costs.summary.summarise`."""
        return accounts.summary(self, job_id, now)
