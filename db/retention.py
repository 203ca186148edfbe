"""Retention: how long the bulk of a ledger is kept, which is rows of iterations, rank reports, quantiles and scores.
Called by `resihp db prune`, and by a job's own writer if `[ledger] keep` is set.

All other rows stay: jobs, failures, plans, reconfigurations, events, nodes. A pruned job also keeps the iterations that
explain it: the first and the last; each iteration at which a failure began or ended or a plan took over, with the
iteration before it; and, on request, every N-th. A kept row then represents the rows removed before it. The cost
account of a job that is over is computed before its rows are removed, including work that later attempts made useless
(`resihp.db.settling`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, and_, delete, func, or_, select, union
from sqlalchemy.exc import DBAPIError

from resihp.db import migrate, settling
from resihp.db.engine import file_of, make_engine, masked, refusal, resolve
from resihp.db.models import FailureRow, IterationRow, JobRow, PlanRow, RankQuantilesRow, RankReportRow, RankScoreRow
from resihp.db.reading.reader import Reader
from resihp.errors import LedgerError, UsageError

TELEMETRY_TABLES = (RankReportRow, RankQuantilesRow, RankScoreRow)
ROWS_PER_PRUNE = 200_000


@dataclass(frozen=True)
class Pruned:
    """Numbers of rows that were removed from one job."""

    job: str
    owner: str
    iterations: int
    rank_reports: int
    """Number of removed telemetry rows: rank reports, scores and quantiles."""


def prune(url: str, before: datetime, keep_every: int | None = None, *, dry_run: bool = False) -> list[Pruned]:
    """Remove rows of iterations that finished before the time `before`. Return the jobs that lost rows; with `dry_run`,
    those that would lose rows.

    `keep_every`: also keep every N-th iteration. Raises UsageError for a `keep_every` below 1, LedgerError if the
    ledger cannot be written or has another schema.
    """
    if keep_every is not None and keep_every < 1:
        raise UsageError(
            f"--keep-every {keep_every}: at least 1; leave it out to keep only iterations at failures and plan changes"
        )
    parsed = resolve(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        raise LedgerError(f"ledger {masked(parsed)}: no such file; name another with --ledger")
    engine = make_engine(parsed, write=not dry_run)
    try:
        with engine.connect() as connection:
            migrate.check_readable(connection, masked(parsed))
            if not dry_run:
                migrate.check_writable(connection, masked(parsed))
            query = select(JobRow.id).order_by(JobRow.started_at, JobRow.id)
            changeable = query.with_for_update(
                read=True, key_share=True
            )  # PostgreSQL locks only rows that this user may change
            jobs = connection.execute(changeable).scalars().all()
            connection.rollback()
            pruned_jobs = []
            with connection.begin():
                unsettled = {row["id"] for row in Reader.within(connection).unsettled()}
            for job_id in jobs:
                with connection.begin():
                    if job_id in unsettled and not dry_run:
                        settling.settle_job(connection, job_id)
                    pruned_jobs.append(_prune_job(connection, job_id, before, keep_every, dry_run))
        removed = [pruned for pruned in pruned_jobs if pruned.iterations or pruned.rank_reports]
        if removed and file is not None and not dry_run:
            _give_back_space(str(parsed.database))
        return removed
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def prune_telemetry(engine: Engine, owner: str, before: datetime) -> int:
    """Remove some telemetry of iterations that finished before the time `before`, from one job that `owner` started and
    this database user may change. Removes about `ROWS_PER_PRUNE` rows of each table at most. Return the number of
    removed rows; 0 if none remain. Raises SQLAlchemy's errors."""
    query = select(JobRow.id, JobRow.nodes * JobRow.gpus_per_node).where(JobRow.owner == owner).order_by(JobRow.id)
    with engine.begin() as connection:  # locks only rows that this user may change, for the time of this query
        jobs = connection.execute(query.with_for_update(read=True, key_share=True)).all()
    for job_id, ranks in jobs:
        with engine.begin() as connection:
            of_old = and_(IterationRow.job_id == job_id, IterationRow.finished_at < before)
            last_old = connection.execute(select(func.max(IterationRow.iteration)).where(of_old)).scalar_one()
            firsts = [
                connection.execute(select(func.min(table.iteration)).where(table.job_id == job_id)).scalar_one()
                for table in TELEMETRY_TABLES
            ]
            first = min((iteration for iteration in firsts if iteration is not None), default=None)
            if last_old is None or first is None or first > last_old:
                continue
            until = min(last_old, first + ROWS_PER_PRUNE // max(ranks, 1))
            deletions = [
                delete(table).where(table.job_id == job_id, table.iteration <= until) for table in TELEMETRY_TABLES
            ]
            return sum(connection.execute(deletion).rowcount for deletion in deletions)
    return 0


def _prune_job(connection: Connection, job_id: int, before: datetime, keep_every: int | None, dry_run: bool) -> Pruned:
    job = connection.execute(select(JobRow.name, JobRow.owner).where(JobRow.id == job_id)).one()
    old = and_(IterationRow.job_id == job_id, IterationRow.finished_at < before)
    last_old = connection.execute(select(func.max(IterationRow.iteration)).where(old)).scalar_one()
    if last_old is None:
        return Pruned(job.name, job.owner, 0, 0)
    unneeded = and_(
        old, IterationRow.iteration.not_in(_kept_iterations(job_id)), _is_not_nth(IterationRow.iteration, keep_every)
    )
    telemetry = [
        (
            table,
            and_(table.job_id == job_id, table.iteration <= last_old, _is_not_nth(table.iteration, keep_every)),
        )
        for table in TELEMETRY_TABLES
    ]
    if dry_run:
        counts = [
            connection.execute(select(func.count()).select_from(table).where(condition)).scalar_one()
            for table, condition in ((IterationRow, unneeded), *telemetry)
        ]
        return Pruned(job.name, job.owner, counts[0], sum(counts[1:]))
    iterations = connection.execute(delete(IterationRow).where(unneeded)).rowcount
    removed = sum(connection.execute(delete(table).where(condition)).rowcount for table, condition in telemetry)
    return Pruned(job.name, job.owner, iterations, removed)


def _is_not_nth(iteration: Any, keep_every: int | None) -> ColumnElement[bool]:
    return or_(iteration.is_(None), iteration % keep_every != 0) if keep_every else iteration.is_not(None)


def _kept_iterations(job_id: int) -> Select[Any]:
    """Select the iterations to keep: the first, the last, the iterations of failures and changes of plan, and the ones
    just before these."""
    parts: list[Select[Any]] = []
    for column in (FailureRow.iteration, FailureRow.ended_iteration, PlanRow.next_iteration):
        of_job = column.class_.job_id == job_id
        parts += [
            select(column.label("iteration")).where(of_job, column.is_not(None)),
            select((column - 1).label("iteration")).where(of_job, column.is_not(None)),
        ]
    parts += [
        select(end(IterationRow.iteration).label("iteration")).where(IterationRow.job_id == job_id).having(end(1) == 1)
        for end in (func.min, func.max)
    ]
    return select(union(*parts).subquery().c.iteration)


def _give_back_space(path: str) -> None:
    """Shrink SQLite's file, which otherwise keeps its size. Skipped if another process is reading the file."""
    import sqlite3
    from contextlib import closing, suppress

    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("VACUUM")
