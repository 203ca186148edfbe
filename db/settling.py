"""Settles jobs that are over: stores their costs, including work that later attempts of their run made useless, in the
job's row, so that readers need not recompute them from all rows each time (`db.reading.costs.cost_accounts`).

Called by the fold as a job ends, for the job and the attempts before it; by `resihp db import` for runs of the imported
jobs; and by `resihp db upgrade` and `db prune` for the rest, such as jobs written by an older version. Changes nothing
but `jobs.account`, and only of jobs that this database user may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from sqlalchemy import Connection, Engine, select, update
from sqlalchemy.exc import DBAPIError

from db.engine import file_of, make_engine, masked, refusal, resolve
from db.models import JobRow
from db.reading.reader import Reader
from resihp.errors import LedgerError

_JOBS = JobRow.__table__
_NO_PRIVILEGE = "42501"
"""PostgreSQL's insufficient_privilege."""


def settle_earlier(connection: Connection, job_id: int) -> None:
    """Settle the earlier attempts of a job's run that are over and that the same database user wrote, within the
    transaction.

    Two kinds are left for readers to compute: attempts whose row another transaction holds, so that two attempts that
    end at once do not wait for each other; and attempts whose rows, perhaps imported, are inconsistent, since this
    job's end must be written all the same.
    """
    own = connection.execute(select(_JOBS.c.run, _JOBS.c.written_by).where(_JOBS.c.id == job_id)).one()
    for row in Reader.within(connection).unsettled(own.run) if own.run else ():
        if row["id"] != job_id and row["written_by"] == own.written_by:
            with suppress(ArithmeticError, TypeError, ValueError):
                settle_job(connection, row["id"], wait=False)


def settle_imported(engine: Engine, uuids: Collection[str]) -> None:
    """Settle these imported jobs and all attempts of their runs that are over and that this database user may change,
    in one transaction each. Skips the attempts that `settle_earlier` skips. Raises SQLAlchemy's errors."""
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
    """Settle one job within the transaction; return whether it is over, may be changed, and, without `wait`, was not
    locked."""
    mine = select(_JOBS.c.id).where(_JOBS.c.id == job_id, _JOBS.c.state != "running")
    mine = mine.with_for_update(skip_locked=not wait)  # PostgreSQL shows only rows that we may change
    if connection.execute(mine).first() is None:
        return False
    account = Reader.within(connection).settled(job_id)
    connection.execute(update(JobRow).where(JobRow.id == job_id).values(account=account))
    return True


def settle(url: str, tell: Callable[[str], None] = lambda text: None) -> int:
    """Settle all jobs of the ledger at `url` that are over and that this database user may change, in one transaction
    each. Returns how many were settled; jobs with inconsistent rows are reported to `tell`. Raises LedgerError."""
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
