"""Settles jobs that are over: computes their costs, including work that later attempts of their run made useless, and
stores them in the job's row. Readers then need not compute them from all rows each time
(`resihp.db.reading.costs.cost_accounts`).

Called when the end of a job is recorded, for the job and its earlier attempts; by `resihp db import` for runs of the
imported jobs; and by `resihp db upgrade` and `db prune` for all other jobs, such as those written by an older version.
Changes only `jobs.account`, and only of jobs that this database user may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from sqlalchemy import Connection, Engine, select, update
from sqlalchemy.exc import DBAPIError

from resihp.db.engine import file_of, make_engine, masked, refusal, resolve
from resihp.db.models import JobRow
from resihp.db.reading.reader import Reader
from resihp.errors import LedgerError

_JOBS = JobRow.__table__
_NO_PRIVILEGE = "42501"
"""PostgreSQL's insufficient_privilege."""


def settle_earlier(connection: Connection, job_id: int) -> None:
    """Settle earlier attempts of a job's run, within the caller's transaction: those that are over and that the same
    database user wrote.

    Two kinds of attempts are skipped, and computed by readers: attempts whose row another transaction has locked, so
    that two attempts that end at once do not wait for each other; and attempts with inconsistent rows, for example
    imported ones, because they must not prevent this job's end from being written.
    """
    own = connection.execute(select(_JOBS.c.run, _JOBS.c.written_by).where(_JOBS.c.id == job_id)).one()
    for row in Reader.within(connection).unsettled(own.run) if own.run else ():
        if row["id"] != job_id and row["written_by"] == own.written_by:
            with suppress(ArithmeticError, TypeError, ValueError):
                settle_job(connection, row["id"], wait=False)


def settle_imported(engine: Engine, uuids: Collection[str]) -> None:
    """Settle the imported jobs with these uuids, and all other attempts of their runs, if they are over and this
    database user may change them. Each is settled in its own transaction. Skips the attempts that `settle_earlier`
    skips. Raises SQLAlchemy's errors."""
    with engine.connect() as connection:
        with connection.begin():
            rows = connection.execute(select(_JOBS.c.uuid, _JOBS.c.run).where(_JOBS.c.run != "")).all()
            runs = {row.run for row in rows if row.uuid in uuids}
            reader = Reader.within(connection)
            unsettled = reader.unsettled(*runs) if len(runs) == len(uuids) == 1 else reader.unsettled()
        for row in unsettled:
            if row["uuid"] in uuids or row["run"] in runs:
                with suppress(ArithmeticError, TypeError, ValueError), connection.begin():
                    settle_job(connection, row["id"], wait=False)


def settle_job(connection: Connection, job_id: int, *, wait: bool = True) -> bool:
    """Settle one job within the caller's transaction. Return False, without a change, if the job is still running, if
    this database user may not change it, or, without `wait`, if its row is locked."""
    mine = select(_JOBS.c.id).where(_JOBS.c.id == job_id, _JOBS.c.state != "running")
    mine = mine.with_for_update(skip_locked=not wait)  # PostgreSQL shows only rows that this user may change
    if connection.execute(mine).first() is None:
        return False
    account = Reader.within(connection).settled(job_id)
    connection.execute(update(JobRow).where(JobRow.id == job_id).values(account=account))
    return True


def settle(url: str, tell: Callable[[str], None] = lambda text: None) -> int:
    """Settle all jobs of the ledger at `url` that are over and that this database user may change, each in its own
    transaction. Return the number of settled jobs. Jobs with inconsistent rows are reported through `tell`. Raises
    LedgerError."""
    parsed = resolve(url)
    file = file_of(parsed)
    if file is not None and not file.exists():
        raise LedgerError(f"ledger {masked(parsed)}: no such file; name another with --ledger")
    engine = make_engine(parsed, write=True)
    number = 0
    try:
        with engine.connect() as connection:
            with connection.begin():
                jobs = Reader.within(connection).unsettled()
            for job in jobs:
                try:
                    with connection.begin():
                        number += settle_job(connection, job["id"])
                except (ArithmeticError, TypeError, ValueError) as error:
                    tell(
                        f"warning: job {job['uuid']}: cannot compute its costs from its rows: {error}; import it again"
                    )
    except (DBAPIError, OSError) as error:
        if getattr(getattr(error, "orig", None), "sqlstate", None) != _NO_PRIVILEGE:
            raise refusal(parsed, error) from error
    finally:
        engine.dispose()
    return number
