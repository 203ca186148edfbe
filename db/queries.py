"""What the ledger answers: rows as plain Python, the same as pandas frames, and a job's summary. Reads only.

`Reader.open(url)` checks that there is a ledger of our schema and never changes it. `rows(table, ...)` costs no pandas;
the functions that return frames import it when called.

Summary (all times in seconds): *useful* is the sum of the committed iterations' seconds, an unknown one counted as the
median. *Goodput* = useful / wall time of training: from the start of the first committed iteration to the end (now,
while it runs); of a completed job to its last commit, since winding down is as little training as starting up.
*ETTR*, effective training time ratio, has the same numerator and counts wall time from the job's start (Kokolis et
al., "Revisiting reliability in large-scale ML clusters", productive run time / available time). What is lost to a
failure runs from the last commit before it was noticed to the first commit after it, less the iterations in between.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    Float,
    FromClause,
    Integer,
    Select,
    String,
    case,
    exists,
    or_,
    select,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import aliased

from db import models
from db.engine import file_of, make_engine, masked, refusal, resolve
from db.migrate import check_readable
from db.models import Event, Failure, Iteration, Job, Plan, Reconfiguration, Worker
from resihp.errors import JobNotFoundError, LedgerError, UsageError

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

JOB_COLUMNS = (
    *("id", "name", "host", "owner", "state", "exit_code", "reason", "started_at", "ended_at", "last_entry_at"),
    *("restart_count", "nodes", "gpus_per_node", "tp", "pp", "schedule", "version", "telemetry_dropped"),
)


def _columns(model: type[models.Base], *left_out: str) -> tuple[ColumnElement[Any], ...]:
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
    model: type[models.Base], order: str, time: str, json_columns: tuple[str, ...] = (), left_out: tuple[str, ...] = ()
) -> Table:
    return Table(select(*_columns(model, *left_out)), model.__table__, order, time, json_columns)


_recovery = Failure.__table__.outerjoin(
    Reconfiguration.__table__,
    (Reconfiguration.job_id == Failure.job_id) & (Reconfiguration.epoch == Failure.recovered_epoch),
)
_failure_columns = (
    *_columns(Failure, "recovered_epoch", "evidence"),
    Reconfiguration.seconds.label("seconds_to_recover"),
    Reconfiguration.action.label("action"),
    Failure.recovered_epoch,
    Failure.evidence,
)

_later = aliased(Plan)
_plan_columns = (
    *_columns(Plan),
    case(
        (Plan.in_effect_at.is_not(None), "in effect"),
        (Plan.refused_reason.is_not(None), "refused"),
        (exists().where(_later.job_id == Plan.job_id, _later.epoch > Plan.epoch), "superseded"),
        else_="pending",
    ).label("outcome"),
)
"""`outcome`: it took effect, at `in_effect_at`; it was refused; the next one was decided before it took effect; or it
is on its way."""

TABLES: Mapping[str, Table] = {
    "failures": Table(
        select(*_failure_columns).select_from(_recovery), Failure.__table__, "failure", "noticed_at", ("ranks",)
    ),
    "nodes": _table(models.Node, "node", "joined_at"),
    "workers": _table(Worker, "rank", "started_at"),
    "iterations": _table(Iteration, "iteration", "finished_at"),
    "plans": Table(select(*_plan_columns), Plan.__table__, "epoch", "decided_at", ("layout", "assignment")),
    "reconfigurations": _table(Reconfiguration, "epoch", "finished_at"),
    "drains": _table(models.Drain, "drain", "drained_at", ("answers",)),
    "replacements": _table(models.Replacement, "replacement", "asked_at", ("excluded",)),
    "probes": _table(models.Probe, "id", "measured_at", left_out=("id",)),
    "events": _table(Event, "seq", "at"),
}


class Reader:
    """An open ledger, for reading."""

    def __init__(self, connection: Connection, name: str) -> None:
        """Use `Reader.open`."""
        self._connection = connection
        self.name = name

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
        return cls(connection, masked(parsed))

    def close(self) -> None:
        engine = self._connection.engine
        self._connection.close()
        engine.dispose()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fetch(self, query: Select[Any]) -> list[Row]:
        """All rows of one query, in a transaction that ends with it (a reader must not hold up the writer)."""
        try:
            found = [dict(row) for row in self._connection.execute(query).mappings()]
            self._connection.rollback()
        except DBAPIError as error:
            self._connection.rollback()
            raise refusal(self._connection.engine.url, error) from error
        return found

    def jobs(self) -> list[Row]:
        """All jobs of this ledger, newest first, columns `JOB_COLUMNS`."""
        columns = [Job.__table__.columns[name] for name in JOB_COLUMNS]
        return self.fetch(select(*columns).order_by(Job.started_at.desc(), Job.id.desc()))

    def job(self, name: str | None = None, *, host: str | None = None, started: datetime | None = None) -> Row:
        """The newest job, or the newest of that name; with `host` and `started`, the one that began there nearest then.

        Raises JobNotFoundError naming the jobs that there are.
        """
        jobs = self.jobs()
        found = [job for job in jobs if name is None or job["name"] == name]
        found = [job for job in found if job["host"] == host] or found if host is not None else found
        if not found:
            if not jobs:
                raise JobNotFoundError(f"ledger {self.name}: holds no job yet")
            known = ", ".join(dict.fromkeys(str(job["name"]) for job in jobs[:8]))
            raise JobNotFoundError(f"job {name}: not in ledger {self.name}, which holds {known}")
        if started is not None:
            return min(found, key=lambda job: abs((job["started_at"] - started).total_seconds()))
        return found[0]

    def applied(self, job_id: int) -> int:
        """Number of the last journal record that the ledger holds."""
        return int(self.fetch(select(Job.journal_seq).where(Job.id == job_id))[0]["journal_seq"])

    def rows(
        self,
        table: str,
        job_id: int,
        *,
        node: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        last: int | None = None,
    ) -> list[Row]:
        """Rows of one of `TABLES` in order, `last` of them at most; JSON columns decoded.

        Raises UsageError when the table has no nodes to ask for.
        """
        asked = TABLES[table]
        columns = asked.source.c
        query = asked.query.where(columns.job_id == job_id)
        if node is not None:
            named = [columns[name] == node for name in ("node", "instead") if name in columns]
            if not named:
                raise UsageError(f"history {table}: has no nodes; leave --node out")
            query = query.where(or_(*named))
        if since is not None:
            query = query.where(columns[asked.time] >= since)
        if until is not None:
            query = query.where(columns[asked.time] <= until)
        if last is not None:
            return self._decoded(table, query.order_by(columns[asked.order].desc()).limit(last))[::-1]
        return self._decoded(table, query.order_by(columns[asked.order]))

    def _decoded(self, table: str, query: Select[Any]) -> list[Row]:
        found = self.fetch(query)
        for row in found:
            for column in TABLES[table].json_columns:
                row[column] = json.loads(row[column])
        return found

    def events(self, job_id: int, kinds: Sequence[str], last: int) -> list[Row]:
        """The `last` events of these kinds (names of journal entries), oldest first."""
        query = TABLES["events"].query.where(Event.job_id == job_id, Event.kind.in_(kinds))
        return self.fetch(query.order_by(Event.seq.desc()).limit(last))[::-1]

    def shown_plan(self, job_id: int) -> list[Row]:
        """The plan that a job's status is about, if any: the newest not refused, in effect or about to be."""
        query = TABLES["plans"].query.where(Plan.job_id == job_id, Plan.refused_reason.is_(None))
        return self._decoded("plans", query.order_by(Plan.epoch.desc()).limit(1))

    def summary(self, job_id: int, now: datetime | None = None) -> Row:
        """The job in figures, as `summarise` tells them."""
        [job] = [job for job in self.jobs() if job["id"] == job_id]
        return summarise(
            job,
            self.rows("iterations", job_id),
            self.rows("failures", job_id),
            self.rows("reconfigurations", job_id),
            self.shown_plan(job_id),
            now or datetime.now(UTC),
        )


def summarise(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    now: datetime,
) -> Row:
    """Figures of a job from its rows; see the module's docstring for what they mean. Pure."""
    known = [row["seconds"] for row in iterations if row["seconds"] is not None]
    typical = statistics.median(known) if known else 0.0
    useful = [(row["finished_at"], typical if row["seconds"] is None else row["seconds"]) for row in iterations]
    useful_seconds = sum(seconds for _, seconds in useful)
    end = job["ended_at"] or now
    if job["state"] == "abnormal":
        end = job["last_entry_at"]
    stop = useful[-1][0] if job["state"] == "completed" and useful else end
    begin = None
    if useful:
        begin = useful[0][0] - timedelta(seconds=useful[0][1])
    elif plans:
        begin = plans[0]["decided_at"]
    wall = max((stop - begin).total_seconds(), 0.0) if begin is not None else 0.0
    available = max((end - job["started_at"]).total_seconds(), 0.0)
    lost = _lost(useful, failures, reconfigurations, stop, begin)
    overall = max(wall - useful_seconds, 0.0)
    lost["other"] = max(overall - sum(lost.values()), 0.0)
    last = iterations[-1] if iterations else None
    recent = [row["seconds"] for row in iterations[-20:] if row["seconds"] is not None]
    return {
        "job": job["name"],
        "host": job["host"],
        "owner": job["owner"],
        "state": job["state"],
        "exit_code": job["exit_code"],
        "reason": job["reason"],
        "started_at": job["started_at"],
        "ended_at": job["ended_at"],
        "epoch": plans[-1]["epoch"] if plans else None,
        "iteration": last["iteration"] if last else 0,
        "loss": last["loss"] if last else None,
        "committed_iterations": len(iterations),
        "iteration_seconds": statistics.median(recent) if recent else None,
        "failures": len(failures),
        "useful_seconds": useful_seconds,
        "wall_seconds": wall,
        "goodput": min(useful_seconds / wall, 1.0) if wall > 0 and useful else None,
        "ettr": min(useful_seconds / available, 1.0) if available > 0 and useful else None,
        "lost_seconds": lost,
    }


def _lost(
    useful: Sequence[tuple[datetime, float]],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    end: datetime,
    begin: datetime | None,
) -> dict[str, float]:
    """Seconds lost to each kind of failure. A transition that mended several is charged to the first one's kind."""
    spans: list[tuple[str, datetime, datetime]] = []
    for transition in reconfigurations:
        kinds = [row["kind"] for row in failures if row["recovered_epoch"] == transition["epoch"]]
        noticed = transition["finished_at"] - timedelta(seconds=transition["seconds"])
        spans.append((kinds[0] if kinds else "reconfiguration", noticed, transition["finished_at"]))
    unmended = [row for row in failures if row["recovered_epoch"] is None and row["kind"] != "fail-slow"]
    if unmended:
        spans.append((unmended[0]["kind"], min(row["noticed_at"] for row in unmended), end))
    lost: dict[str, float] = {}
    for kind, noticed, over in spans:
        before = max((at for at, _ in useful if at <= noticed), default=begin)
        if before is None or over <= before:
            continue
        kept = sum(seconds for at, seconds in useful if before < at <= over)
        lost[kind] = lost.get(kind, 0.0) + max((over - before).total_seconds() - kept, 0.0)
    return lost


# --- frames ---------------------------------------------------------------------------------------------------------


def frame(reader: Reader, table: str, job_id: int, **filters: Any) -> pd.DataFrame:
    """One of `TABLES` as a pandas frame; filters as of `Reader.rows`. Whole numbers that may be missing are `Int64`,
    times UTC."""
    import pandas as pd

    columns = TABLES[table].query.selected_columns
    found = pd.DataFrame(reader.rows(table, job_id, **filters), columns=[column.key for column in columns])
    for column in columns:
        if column.key in TABLES[table].json_columns:
            continue
        if isinstance(column.type, Integer | BigInteger):
            found[column.key] = found[column.key].astype("Int64")
        elif isinstance(column.type, Boolean):
            found[column.key] = found[column.key].astype("boolean")
        elif isinstance(column.type, Float):
            found[column.key] = found[column.key].astype("float64")
        elif isinstance(column.type, models.UtcDateTime):
            found[column.key] = pd.to_datetime(found[column.key], utc=True)
        elif isinstance(column.type, String):
            found[column.key] = found[column.key].astype("string")
    return found


def iterations(reader: Reader, job_id: int) -> pd.DataFrame:
    """One row for each committed iteration."""
    return frame(reader, "iterations", job_id)


def workers(reader: Reader, job_id: int) -> pd.DataFrame:
    """One row for each process."""
    return frame(reader, "workers", job_id)


def failures(reader: Reader, job_id: int) -> pd.DataFrame:
    """One row for each root cause; `seconds_to_recover` from its detection to the next committed iteration."""
    return frame(reader, "failures", job_id)


def plans(reader: Reader, job_id: int) -> pd.DataFrame:
    """One row for each epoch; `layout` as interface.md's LAYOUT."""
    return frame(reader, "plans", job_id)


def nodes(reader: Reader, job_id: int) -> pd.DataFrame:
    """One row for each node that joined."""
    return frame(reader, "nodes", job_id)


def reconfigurations(reader: Reader, job_id: int) -> pd.DataFrame:
    """One row for each transition that led back to training, with its phases."""
    return frame(reader, "reconfigurations", job_id)
