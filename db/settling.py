"""Keeps in the row of a job that is over what it cost, with what later attempts of its run made useless: reckoned once,
not anew from all its rows each time that somebody asks (`db.reading.costs.cost_accounts`).

Called by the fold as a job ends, for itself and the attempts before it, by `resihp db import` for runs of which it
brought a job, and for what is left, as of an older version, by `resihp db upgrade` and `db prune`. Changes nothing but
`jobs.account`, and only of jobs that this database user may change.
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
    """As a job ends, within the transaction: attempts of its run that the same database user wrote, and that are over.

    Left as they are, for readers to reckon: whose row another transaction has, so that two attempts that end at once
    wait for nothing, and one whose rows, which may come from an import, cannot be reckoned with: this job's end is told
    all the same.
    """
    own = connection.execute(select(_JOBS.c.run, _JOBS.c.written_by).where(_JOBS.c.id == job_id)).one()
    for row in Reader.within(connection).unsettled(own.run) if own.run else ():
        if row["id"] != job_id and row["written_by"] == own.written_by:
            with suppress(ArithmeticError, TypeError, ValueError):
                settle_job(connection, row["id"], wait=False)


def settle_imported(engine: Engine, uuids: Collection[str]) -> None:
    """After an import of these jobs: they and all attempts of their runs that are over and that this database user may
    change, one transaction for each. Left as they are whoever `settle_earlier` leaves. Raises what SQLAlchemy raises.
    """
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
    """Within the transaction, one job; whether it is over and may be changed, and without `wait`, could be had."""
    mine = select(_JOBS.c.id).where(_JOBS.c.id == job_id, _JOBS.c.state != "running")
    mine = mine.with_for_update(skip_locked=not wait)  # PostgreSQL shows only rows that we may change
    if connection.execute(mine).first() is None:
        return False
    account = Reader.within(connection).settled(job_id)
    connection.execute(update(JobRow).where(JobRow.id == job_id).values(account=account))
    return True


def settle(url: str, tell: Callable[[str], None] = lambda text: None) -> int:
    """All jobs of the ledger at `url` that are over, and that this database user may change; one transaction for each.
    How many were settled; of one whose rows cannot be reckoned with, `tell` is told. Raises LedgerError."""
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
                    tell(f"warning: job {job['uuid']}: its rows tell no cost: {error}; import it again")
    except (DBAPIError, OSError) as error:
        if getattr(getattr(error, "orig", None), "sqlstate", None) != _NO_PRIVILEGE:
            raise refusal(parsed, error) from error
    finally:
        engine.dispose()
    return number
