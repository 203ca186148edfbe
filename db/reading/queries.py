"""Queries of a ledger: pandas frames for notebooks, and the rows that commands print. Reads only.

    from resihp.ledger import queries

    ledger = queries.Reader.open("postgresql+psycopg://cluster/resihp")     # or sqlite:////home/me/.../ledger.db
    job = ledger.job("1234")["id"]                                          # the newest job without a name

    queries.failures(ledger, job)               # root causes: detect_seconds, seconds_to_recover, node, cause, ...
    queries.failures_by(ledger, "node")         # over all jobs; or component, cause, kind, job; node=, since=, until=
    queries.cost(ledger, job)                   # where the time went, by cause: seconds, GPU-hours; also of all jobs
    queries.cost_by(ledger, "week")             # of all jobs; or job, owner, account, partition, cluster, month
    queries.reliability(ledger)                 # one row per job: goodput, ETTR, MTBF, MTTR, seconds lost by cause
    queries.lemons(ledger)                      # nodes to distrust: outages observed and expected, and outliers
    queries.predictions(ledger, job)            # iteration times: observed, predicted, their ratio
    queries.promises(ledger, job)               # predicted and measured gain of each plan
    queries.hosts(ledger, job)                  # hardware and software of hosts, and changes; also of all jobs
    queries.frame(ledger, "plans", job)         # any table of `resihp history`; filters as for `Reader.rows`

    by_node = queries.failures_by(ledger, "node", since=datetime.now(UTC) - timedelta(days=30))
    by_node.head(3)[["node", "failures", "recover_seconds"]]                # nodes with most failures this month
    queries.cost(ledger).set_index("cause")["gpu_hours"]                    # total cost by cause

Integers that may be missing are `Int64`, times are UTC, JSON columns (ranks, layouts) are lists and dicts. The figures
are defined in `resihp.db.reading.costs.cost_accounts`, `resihp.db.reading.plans.promises` and
`resihp.db.reading.fleet`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Boolean, Float, Integer, String, func, select

from resihp.db import models
from resihp.db.models import EventRow, IterationRow, JobRow
from resihp.db.reading import comparison, fleet, hardware, rates
from resihp.db.reading.costs import fleet_costs
from resihp.db.reading.costs.fleet_costs import FIGURE_COLUMNS, CostBy
from resihp.db.reading.costs.summary import summarise
from resihp.db.reading.fleet import By
from resihp.db.reading.iterations.excess import NEAR_ITERATIONS, last_unaffected
from resihp.db.reading.iterations.why import Why
from resihp.db.reading.iterations.why import why as explain_iteration
from resihp.db.reading.plans import decisions as taken
from resihp.db.reading.plans import plan_rows
from resihp.db.reading.plans import spares as spares_saved
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import JOB_COLUMNS, OF_JOB, TABLES, Row, Table
from resihp.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["JOB_COLUMNS", "TABLES", "Reader", "Row", "Table", "frame", "summarise"]

_COUNTS = ("failures", *(kind.replace("-", "_") for kind in fleet.FAILURE_KINDS))
COLUMNS: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(str(column.key) for column in table.query.selected_columns) for name, table in TABLES.items()},
    **{
        f"failures by {by}": (
            *(("job", "uuid") if by == "job" else (by,)),
            *(*_COUNTS, "jobs", *fleet.MEAN_COLUMNS, "last"),
        )
        for by in fleet.GROUPS
    },
    "jobs": JOB_COLUMNS,
    "repairs": ("node", "device", "uuid", "failures", "codes", "last", "cause", "drained", "maintained_at"),
    "rate": ("when", "which", "failures", "device_days", "rate", "ratio", "p"),
    "compare": ("what", "first", "second", "difference"),
    "cost": ("cause", "seconds", "share", "gpu_hours", "of_failures"),
    "cost by job": ("job", *fleet_costs.JOB_KEYS, *FIGURE_COLUMNS),
    **{f"cost by {by}": (by, "jobs", *FIGURE_COLUMNS) for by in fleet_costs.COST_BY if by != "job"},
    "placements": hardware.PLACEMENT_COLUMNS,
    "hosts": (*hardware.STAY_COLUMNS, "vbios", "changed"),
    "promises": (
        *("epoch", "reason", "promised", "kept", "verdict", "before", "after", "predicted", "present", "unit"),
    ),
    "decisions": taken.COLUMNS,
    "spares": spares_saved.COLUMNS,
    "lemons": (
        *("node", "jobs", "device_hours", *_COUNTS, "drains", "mtbf_hours"),
        *("lemon", "observed", "expected", "window_days", "p", "q", "lemon_devices", "devices", "last"),
    ),
}
"""Columns of every view of `resihp history`."""


def spares(
    reader: Reader, job: Row | None = None, since: datetime | None = None, until: datetime | None = None
) -> pd.DataFrame:
    """Return the time that one more spare node would have saved; columns as in
    `resihp.db.reading.plans.spares.saved`."""
    return as_frame(plan_rows.spares_rows(reader, job, since=since, until=until), COLUMNS["spares"])


def decisions(
    reader: Reader, job_id: int, since: datetime | None = None, until: datetime | None = None
) -> pd.DataFrame:
    """Return every decision of a job, one row each; columns as in `resihp.db.reading.plans.decisions.decisions`."""
    import pandas as pd

    rows = as_frame(plan_rows.decisions_rows(reader, job_id, since=since, until=until), COLUMNS["decisions"])
    rows["at"] = pd.to_datetime(rows["at"], utc=True)
    for name in ("epoch", "iteration"):
        rows[name] = rows[name].astype("Int64")
    for name in ("predicted", "present", "promised", "kept", "measured"):
        rows[name] = rows[name].astype("float64")
    return rows


def why(reader: Reader, job: Row, iteration: int) -> Why:
    """Explain the time of an iteration of a job; `job` is its row. Raises UsageError if the iteration is not
    committed."""
    columns, columns_query = IterationRow.__table__.c, TABLES["iterations"].query
    near, number = columns_query.where(columns.job_id == job["id"]), columns.iteration
    rows = reader.fetch(near.where(number <= iteration).order_by(number.desc()).limit(NEAR_ITERATIONS + 1))[::-1]
    if not rows or rows[-1]["iteration"] != iteration:
        # a script may print only every tenth iteration, which then stands for those before it
        following = reader.fetch(near.where(number > iteration, columns.tokens == 0).order_by(number).limit(1))
        if following:
            return why(reader, job, following[0]["iteration"])
        extremes = select(func.min(columns.iteration).label("first"), func.max(columns.iteration).label("last"))
        [extremes_of_job] = reader.fetch(extremes.where(columns.job_id == job["id"]))
        if extremes_of_job["last"] is None and job["model"] is None:
            raise UsageError(
                f"iteration {iteration}: no iteration of job {job['name']} is known: its script does not report to "
                "resihp, and prints none that resihp reads; [progress] pattern reads others"
            )
        committed = (
            "none" if extremes_of_job["last"] is None else f"{extremes_of_job['first']} to {extremes_of_job['last']}"
        )
        raise UsageError(f"iteration {iteration}: not committed in job {job['name']}; committed: {committed}")
    events = EventRow.__table__.c
    touching = TABLES["events"].query.where(
        events.job_id == job["id"], events.kind.in_(("CheckpointCommitted", "FaultInjected"))
    )
    lately = (events.kind == "FaultInjected") | (events.iteration >= iteration - NEAR_ITERATIONS)
    failures = reader.rows("failures", job["id"])
    if (well := last_unaffected(iteration, failures)) < iteration:
        before = near.where(number <= well, number < rows[0]["iteration"])
        rows = [*reader.fetch(before.order_by(number.desc()).limit(NEAR_ITERATIONS))[::-1], *rows]
    rows += reader.fetch(near.where(number > iteration).order_by(number).limit(NEAR_ITERATIONS))
    return explain_iteration(
        iteration,
        job,
        rows,
        failures,
        reader.narrow("reconfigurations", job["id"]),
        reader.narrow("plans", job["id"]),
        reader.fetch(touching.where(events.iteration <= iteration, lately).order_by(events.seq)),
    )


def jobs(
    reader: Reader, user: str | None = None, since: datetime | None = None, until: datetime | None = None
) -> pd.DataFrame:
    """Return one row per job, newest first; only jobs of `user`, and jobs that were alive in the period, if given."""
    return as_frame(reader.jobs(user=user, since=since, until=until), JOB_COLUMNS)


def rate_around(
    reader: Reader, at: datetime, days: float = rates.DEFAULT_DAYS, user: str | None = None
) -> pd.DataFrame:
    """Return failures per 1,000 device-days before and after a time; columns as in
    `resihp.db.reading.rates.rate_around`."""
    return as_frame(rates.rate_around(reader, at, days, user), COLUMNS["rate"])


def rate_with(reader: Reader, trait: str, value: str, now: datetime, days: float = rates.DEFAULT_DAYS) -> pd.DataFrame:
    """Compare failure rates of stays that have `value` of a trait (`driver`, `vbios`, `torch`, ...) with those of all
    other stays; columns as in `resihp.db.reading.rates.rate_around`."""
    return as_frame(rates.rate_with(reader, trait, value, days, now), COLUMNS["rate"])


def repairs(reader: Reader, since: datetime | None = None, until: datetime | None = None) -> pd.DataFrame:
    """Return nodes and devices with failures of the last week, or since `since`, that await repair; columns as in
    `resihp.db.reading.rates.repairs`."""
    return as_frame(rates.repairs(reader, since, until), COLUMNS["repairs"])


def compare(reader: Reader, first: str, second: str) -> pd.DataFrame:
    """Return the differences between two jobs, and the times of their iterations at equal work; columns as in
    `resihp.db.reading.comparison.compare`."""
    return as_frame(comparison.compare(reader, reader.job(first), reader, reader.job(second)), COLUMNS["compare"])


# --- frames ---------------------------------------------------------------------------------------------------------


def as_frame(rows: Sequence[Row], columns: Sequence[str], table: str | None = None) -> pd.DataFrame:
    """Return rows as a frame. For a table of the ledger, columns get the table's types, also if values are missing."""
    import pandas as pd

    rows_frame = pd.DataFrame(list(rows), columns=list(columns))
    for column in TABLES[table].query.selected_columns if table is not None else ():
        if table is None or column.key in TABLES[table].json_columns:
            continue
        if isinstance(column.type, Integer | BigInteger):
            rows_frame[column.key] = rows_frame[column.key].astype("Int64")
        elif isinstance(column.type, Boolean):
            rows_frame[column.key] = rows_frame[column.key].astype("boolean")
        elif isinstance(column.type, Float):
            rows_frame[column.key] = rows_frame[column.key].astype("float64")
        elif isinstance(column.type, models.UtcDateTime):
            rows_frame[column.key] = pd.to_datetime(rows_frame[column.key], utc=True)
        elif isinstance(column.type, String):
            rows_frame[column.key] = rows_frame[column.key].astype("string")
    return rows_frame


def frame(reader: Reader, table: str, job_id: int | None = None, **filters: Any) -> pd.DataFrame:
    """Return one of `TABLES`, of a job or of all jobs (with a column `job`); filters as for `Reader.rows`."""
    columns = COLUMNS[table] if job_id is not None else (*OF_JOB, *COLUMNS[table])
    return as_frame(reader.rows(table, job_id, **filters), columns, table)


def iterations(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return one row per committed iteration."""
    return frame(reader, "iterations", job_id)


def predictions(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return observed and predicted iteration times: `iteration`, `epoch`, `seconds`, `predicted_seconds`, `ratio`."""
    times = frame(reader, "iterations", job_id)[["iteration", "epoch", "seconds", "predicted_seconds"]]
    return times.assign(ratio=times["seconds"] / times["predicted_seconds"])


def workers(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return one row per worker process."""
    return frame(reader, "workers", job_id)


def failures(reader: Reader, job_id: int | None = None) -> pd.DataFrame:
    """Return one row per root cause. `seconds_to_recover`: from the failure to the first iteration committed after it;
    `noticed_after_seconds`: from the failure to its notice; `seconds_without_noticing`: from the notice to that
    iteration."""
    return frame(reader, "failures", job_id)


def failures_by(reader: Reader, by: By, job_id: int | None = None, **filters: datetime | str | None) -> pd.DataFrame:
    """Return the numbers of failures by node, component, cause, kind or job, most first, with mean times to detect and
    to recover.

    Filters: `node`, `since`, `until`. Columns as in `resihp.db.reading.fleet.joined`.
    """
    rows = fleet.joined(by, fleet.failures_by(reader, by, job_id, **filters))  # type: ignore[arg-type]
    return as_frame(rows, COLUMNS[f"failures by {by}"])


def priced(view: str, price: float | None) -> tuple[str, ...]:
    """Return the columns of a view of costs; if the price of a GPU-hour is given, including the columns with money."""
    money = ("money",) if view == "cost" else ("money", "failure_money")
    return COLUMNS[view] if price is None else (*COLUMNS[view], *money)


def cost(
    reader: Reader,
    job_id: int | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    price: float | None = None,
) -> pd.DataFrame:
    """Return how the time of a job, or of all jobs, was spent: seconds, share and GPU-hours by cause, as defined in
    `resihp.db.reading.costs.cost_accounts`. For all jobs, only the time between `since` and `until` counts; for one
    job, the whole job counts. `price`: of a GPU-hour."""
    if job_id is None:
        job_accounts = [account for _, account in fleet_costs.accounts(reader, since=since, until=until)]
    elif since is not None or until is not None:
        raise UsageError(f"cost of job {job_id}: always covers the whole job; leave since and until out")
    else:
        jobs = JobRow.__table__
        job_accounts = [reader.account(job) for job in reader.fetch(select(*jobs.columns).where(jobs.c.id == job_id))]
    return as_frame(fleet_costs.cost_rows(job_accounts, price), priced("cost", price))


def cost_by(
    reader: Reader,
    by: CostBy,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    price: float | None = None,
) -> pd.DataFrame:
    """Return the cost of all jobs by job, owner, (Slurm) account, partition, cluster, week or month; columns as in
    `resihp.db.reading.costs.fleet_costs.cost_by`. Only the time between `since` and `until` counts. `price`: of a
    GPU-hour."""
    period = by if by in ("week", "month") else None
    job_accounts = fleet_costs.accounts(reader, since=since, until=until, period=period)
    return as_frame(fleet_costs.cost_by(by, job_accounts, price), priced(f"cost by {by}", price))


def reliability(reader: Reader) -> pd.DataFrame:
    """Return one row per job: goodput, ETTR, MTBF (also of hardware), MTTR, GPU-hours, and the lost seconds by
    cause."""
    return cost_by(reader, "job")


def lemons(readers: Reader | Iterable[Reader], now: datetime | None = None, *, injected: bool = False) -> pd.DataFrame:
    """Return nodes of one ledger, or of several, least trustworthy first; columns as in
    `resihp.db.reading.fleet.lemons`."""
    record = fleet.NodeRecord()
    for reader in (readers,) if isinstance(readers, Reader) else readers:
        record.read(reader, fleet.horizon(now), injected)
    return as_frame(fleet.lemons(record, now), COLUMNS["lemons"])


def hosts(reader: Reader, job_id: int | None = None) -> pd.DataFrame:
    """Return one row per stay of a node in a job, with the changes on its host since the previous stay."""
    rows = hardware.told_changes(hardware.stays(reader, job_id))
    if job_id is not None:
        rows = [row for row in rows if row["job_id"] == job_id]
    return as_frame(rows, COLUMNS["hosts"])


def promises(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return the promise of each plan that took effect and whether it was kept; columns as in
    `resihp.db.reading.plans.promises.promises`."""
    return as_frame(plan_rows.promises_rows(reader, job_id), COLUMNS["promises"])


def plans(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return one row per plan; `layout` has the form LAYOUT of interface.md."""
    return frame(reader, "plans", job_id)


def nodes(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return one row per node that joined."""
    return frame(reader, "nodes", job_id)


def reconfigurations(reader: Reader, job_id: int) -> pd.DataFrame:
    """Return one row per completed transition to a new plan, with its phases."""
    return frame(reader, "reconfigurations", job_id)
