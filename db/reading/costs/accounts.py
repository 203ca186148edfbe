"""Cost accounts of a ledger's jobs: reads the rows from which `resihp.db.reading.costs` computes how time was spent.
Changes nothing.

Implements the methods of `Reader` with the same names; the docstrings there describe the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import func, or_, select

from resihp.db import models
from resihp.db.models import IterationRow, JobRow
from resihp.db.reading.costs.cost_accounts import Account, between
from resihp.db.reading.costs.job_timeline import timeline
from resihp.db.reading.costs.stored_accounts import account_to_store, stored_account_with
from resihp.db.reading.costs.summary import summarise
from resihp.db.reading.costs.timeline import Again, HeldTime, committed_again
from resihp.db.reading.tables import ACCOUNT_COLUMNS, TABLES, Row

if TYPE_CHECKING:
    from resihp.db.reading.reader import Reader

JOBS_AT_ONCE = 100
"""Number of jobs with rows that are read together, from tables with few rows per job."""


def _by_job(rows: Iterable[Row]) -> dict[int, list[Row]]:
    rows_by_job: dict[int, list[Row]] = {}
    for row in rows:
        rows_by_job.setdefault(row["job_id"], []).append(row)
    return rows_by_job


def attempts(reader: Reader, run: str | None = None, others: Sequence[Row] = ()) -> list[Row]:
    jobs, iterations = JobRow.__table__.c, IterationRow.__table__.c
    of_job = iterations.job_id == jobs.id
    ends = [
        select(end(iterations.iteration)).where(of_job).scalar_subquery().label(name)
        for name, end in (("first", func.min), ("last", func.max))
    ]
    query = select(jobs.uuid, jobs.run, jobs.started_at, jobs.written_by, *ends)
    several = select(jobs.run).where(jobs.run != "").group_by(jobs.run).having(func.count() > 1)
    of_runs = or_(jobs.run.in_(several), jobs.run.in_({row["run"] for row in others}))
    return [*reader.fetch(query.where(of_runs if run is None else jobs.run == run)), *others]


def account(reader: Reader, job: Row, now: datetime | None = None, again: Again | None = None) -> Account:
    if again is None:
        again = reader.committed_again(job)
    if (kept := stored_account_with(job, again)) is not None:
        return kept
    return between(reader.timeline(job, now, again))


def timelines(
    reader: Reader, jobs: Sequence[Row], now: datetime | None = None
) -> Iterator[Callable[[Again], HeldTime]]:
    checkpoints = models.CheckpointRow.__table__.c
    now = now or datetime.now(UTC)
    for begin in range(0, len(jobs), JOBS_AT_ONCE):
        part = jobs[begin : begin + JOBS_AT_ONCE]
        ids = [job["id"] for job in part]
        few = [_narrow_of(reader, table, ids) for table in ("failures", "reconfigurations", "plans")]
        query = select(checkpoints.job_id, checkpoints.iteration).where(checkpoints.job_id.in_(ids))
        saved, holdings = _by_job(reader.fetch(query)), _holdings(reader, ids)
        columns = JobRow.__table__.c
        configuration_rows = reader.fetch(select(columns.id, columns.configuration).where(columns.id.in_(ids)))
        configurations = {row["id"]: row["configuration"] for row in configuration_rows}
        for job in part:
            number = job["id"]
            failures, reconfigurations, plans = (rows_by_job.get(number, []) for rows_by_job in few)
            yield partial(
                timeline,
                {**job, "configuration": configurations.get(job["id"])},
                reader.narrow("iterations", number),
                failures,
                reconfigurations,
                plans,
                [row["iteration"] for row in saved.get(number, [])],
                holdings.get(number, []),
                now,
            )


def _narrow_of(reader: Reader, table: str, job_ids: Sequence[int]) -> dict[int, list[Row]]:
    """Return the rows of `Reader.narrow` for several jobs, by job id."""
    view = TABLES[table]
    columns = view.source.c
    query = select(columns.job_id, *(columns[name] for name in ACCOUNT_COLUMNS[table]))
    return _by_job(reader.fetch(query.where(columns.job_id.in_(job_ids)).order_by(columns[view.order])))


def _holdings(reader: Reader, job_ids: Sequence[int]) -> dict[int, list[Row]]:
    """Return the nodes of jobs, by job id, for computing costs. Columns: `node`, `devices`, `joined_at` (of the first
    stay, for a node that returned), `released_at`, and `replacement`, the number of the request that the node answered,
    null for a node of the job's own allocation."""
    nodes, served, requests = (m.__table__.c for m in (models.NodeRow, models.MembershipRow, models.ReplacementRow))
    first = select(func.min(served.joined_at)).where(served.job_id == nodes.job_id, served.node == nodes.node)
    answered = select(func.min(requests.replacement)).where(
        requests.job_id == nodes.job_id, requests.node == nodes.node, requests.joined_at.is_not(None)
    )
    query = select(
        *(nodes.job_id, nodes.node, nodes.devices, nodes.released_at),
        func.coalesce(first.scalar_subquery(), nodes.joined_at).label("joined_at"),
        func.coalesce(answered.scalar_subquery(), nodes.replacement).label("replacement"),
    )
    return _by_job(reader.fetch(query.where(nodes.job_id.in_(job_ids)).order_by(nodes.node)))


def settled(reader: Reader, job_id: int) -> str:
    [job] = reader.fetch(select(*JobRow.__table__.columns).where(JobRow.id == job_id))
    again, alone = reader.committed_again(job), stored_account_with(job, ())
    if alone is None or again:
        [build] = reader.timelines([job])
        alone = alone or between(build(()))
        whole = between(build(again)) if again else alone
    else:
        whole = alone
    return msgspec.json.encode(account_to_store(alone, whole, again)).decode()


def unsettled(reader: Reader, run: str | None = None) -> list[Row]:
    again = committed_again(reader.attempts(run))
    jobs = JobRow.__table__.c
    query = select(jobs.id, jobs.uuid, jobs.run, jobs.state, jobs.account, jobs.written_by)
    query = query.where(jobs.state != "running")
    if run is not None:
        query = query.where(jobs.run == run)
    return [
        {name: job[name] for name in ("id", "uuid", "run", "written_by")}
        for job in reader.fetch(query.order_by(jobs.started_at, jobs.id))
        if stored_account_with(job, again.get(job["uuid"], ())) is None
    ]


def summary(reader: Reader, job_id: int, now: datetime | None = None) -> Row:
    [job] = reader.fetch(select(*JobRow.__table__.columns).where(JobRow.id == job_id))
    shown_plans = reader.shown_plan(job_id)
    return summarise(
        job,
        reader.narrow("iterations", job_id),
        reader.narrow("failures", job_id),
        reader.narrow("reconfigurations", job_id),
        reader.narrow("plans", job_id),
        now or datetime.now(UTC),
    ) | {"epoch": shown_plans[0]["epoch"] if shown_plans else None}
