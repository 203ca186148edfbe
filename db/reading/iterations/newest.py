"""The newest committed iterations of all jobs, found without reading all iterations.

Decides which jobs are read. Reads only. Called by `history`.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select

from resihp.db.models import IterationRow, JobRow
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import TABLES, Row
from resihp.errors import UsageError


def newest_iterations(
    reader: Reader,
    last: int,
    *,
    user: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[Row]:
    """Return the `last` committed iterations of all jobs, or of a `user`'s jobs, in order of time, as rows of
    `Reader.rows` for all jobs.

    Reads job by job, newest first, until the remaining jobs had all ended earlier. Raises UsageError if `last` is not
    positive.
    """
    if last < 1:
        raise UsageError(f"history: --last {last}: give 1 or more")
    jobs = JobRow.__table__.c
    query = select(jobs.id, jobs.name, jobs.uuid, jobs.last_entry_at).order_by(jobs.last_entry_at.desc())
    if user is not None:
        query = query.where(reader.is_of(user))
    if since is not None:
        query = query.where(jobs.last_entry_at >= since)
    if until is not None:
        query = query.where(jobs.started_at < until)
    newest_rows: list[Row] = []
    columns = IterationRow.__table__.c
    for job in reader.fetch(query):
        if len(newest_rows) == last and newest_rows[0]["finished_at"] >= job["last_entry_at"]:
            break
        newest = TABLES["iterations"].query.where(columns.job_id == job["id"])
        if since is not None:
            newest = newest.where(columns.finished_at >= since)
        if until is not None:
            newest = newest.where(columns.finished_at < until)
        rows = reader.fetch(newest.order_by(columns.finished_at.desc()).limit(last))
        newest_rows += [{"job": job["name"], "job_uuid": job["uuid"], **row} for row in rows]
        newest_rows = sorted(newest_rows, key=lambda row: (row["finished_at"], row["job"], row["iteration"]))[-last:]
    return newest_rows
