"""Rows about the plans of jobs, from a ledger: promises, decisions, and the time that spare nodes would have saved.

Reads the inputs of `promises`, `decisions` and `spares`, and decides nothing itself. Changes nothing. Called by
`history` and `resihp.db.reading.queries`.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select

from resihp.db import models
from resihp.db.reading.plans import decisions as taken
from resihp.db.reading.plans import promises as promised
from resihp.db.reading.plans import spares as spares_saved
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row


def promises_rows(reader: Reader, job_id: int) -> list[Row]:
    """Return the promise of each plan of a job and whether it was kept, as defined in
    `resihp.db.reading.plans.promises`."""
    rates = reader.narrow("iterations", job_id, ("iteration", "epoch", "seconds", "tokens"))
    return promised.promises(reader.narrow("plans", job_id), rates, reader.narrow("failures", job_id))


def decisions_rows(
    reader: Reader, job_id: int, *, since: datetime | None = None, until: datetime | None = None
) -> list[Row]:
    """Return every decision of a job, as defined in `resihp.db.reading.plans.decisions`; with `since` or `until`, only
    those of that period."""
    rows = taken.decisions(
        plans=reader.rows("plans", job_id),
        declined=reader.rows("declined_changes", job_id),
        replacements=reader.rows("replacements", job_id),
        promised=promises_rows(reader, job_id),
        failures=reader.narrow("failures", job_id, ("failure", "recovered_epoch")),
        iterations=reader.narrow("iterations", job_id, ("epoch", "seconds")),
    )
    return [row for row in rows if (since is None or row["at"] >= since) and (until is None or row["at"] < until)]


def spares_rows(
    reader: Reader,
    job: Row | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    jobs: int | None = None,
) -> list[Row]:
    """Return the time that one more spare node would have saved, as defined in `resihp.db.reading.plans.spares`,
    largest saving first. With `job` (a row), for this job only; otherwise for the newest `jobs`, or all, that were
    alive in the period and changed their plan."""
    if job is not None:
        return [_spare_of(reader, job)]
    plans, job_columns = models.PlanRow.__table__.c, models.JobRow.__table__.c
    changed = select(plans.job_id).group_by(plans.job_id).having(func.count() > 1)
    query = select(models.JobRow.__table__).where(job_columns.id.in_(changed))
    query = query.order_by(job_columns.started_at.desc(), job_columns.id.desc()).limit(jobs)
    if since is not None:
        query = query.where(job_columns.last_entry_at >= since)
    if until is not None:
        query = query.where(job_columns.started_at < until)
    rows = [_spare_of(reader, job_row) for job_row in reader.fetch(query)]
    return sorted(rows, key=lambda row: (-row["saved_gpu_hours"], row["started_at"]))


def _spare_of(reader: Reader, job: Row) -> Row:
    workers = reader.narrow("workers", job["id"], ("rank", "node"))
    return spares_saved.saved(
        job,
        reader.rows("plans", job["id"]),
        {row["rank"]: row["node"] for row in workers},
        reader.narrow("iterations", job["id"], ("iteration", "epoch", "seconds")),
        ((job["ended_at"] or job["last_entry_at"]) - job["started_at"]).total_seconds(),
    )


def promises_of_all(
    reader: Reader, jobs: int, *, since: datetime | None = None, until: datetime | None = None
) -> list[Row]:
    """Return the promises of the newest `jobs` that changed their plan, with `job`, `job_uuid` and `started_at` of each
    job."""
    plans, job_columns = models.PlanRow.__table__.c, models.JobRow.__table__.c
    changed = select(plans.job_id).where(plans.in_effect_at.is_not(None))
    changed = changed.group_by(plans.job_id).having(func.count() > 1)
    query = (
        select(job_columns.id, job_columns.name, job_columns.uuid, job_columns.started_at)
        .where(job_columns.id.in_(changed))
        .order_by(job_columns.started_at.desc())
        .limit(jobs)
    )
    if since is not None:
        query = query.where(job_columns.last_entry_at >= since)
    if until is not None:
        query = query.where(job_columns.started_at < until)
    return [
        {"job": job["name"], "job_uuid": job["uuid"], "started_at": job["started_at"], **row}
        for job in reader.fetch(query)
        for row in promises_rows(reader, job["id"])
        if row["promised"] is not None
    ]


def plans_until(reader: Reader, job_id: int, epoch: int) -> list[Row]:
    """Return the job's first plan and the plan of that epoch, as `Reader.explanations` takes them."""
    rows = reader.rows("plans", job_id)
    return [row for row in rows[:1] if row["epoch"] < epoch] + [row for row in rows if row["epoch"] == epoch]
