"""Costs of many jobs: how much of their time each cause took, by job, owner, account, partition, cluster or period.

Decides which part of a job's time belongs to a period; `cost_accounts` defines the causes. Reads only. Called by
`history`, `report` and `resihp.db.reading.queries`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

from sqlalchemy import or_, select

from resihp.db.models import JobRow
from resihp.db.reading.costs.cost_accounts import OF_FAILURES, Account, added, between
from resihp.db.reading.costs.stored_accounts import stored_account_with
from resihp.db.reading.costs.timeline import CAUSES, SHARES, Again, HeldTime, committed_again
from resihp.db.reading.fleet import NO_NAME
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import JOB_COLUMNS, Row

CostBy = Literal["job", "owner", "account", "partition", "cluster", "week", "month"]
Period = Literal["week", "month"]
COST_BY: tuple[str, ...] = get_args(CostBy)
MAX_CLOCK_SETBACK = timedelta(days=1)
"""Largest time by which a clock may have been set back during a job, so that the job ended later than the time of its
last entry."""


def accounts(
    reader: Reader,
    *,
    user: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    now: datetime | None = None,
    period: Period | None = None,
    others: Sequence[Row] = (),
) -> list[tuple[Row, Account]]:
    """Return the jobs of a ledger, or of a `user`, that held devices in the period from `since` on and before `until`,
    newest first, each with the account of its time in this period.

    With `period`, a job is returned once for each week or month that overlaps it, with the name of the week or month in
    its row. Weeks begin on Mondays; all times are UTC. `others`: attempts in other ledgers, as from `Reader.attempts`.
    """
    now = now or datetime.now(UTC)
    columns = JobRow.__table__.c
    query = select(*(reader.owner() if name == "owner" else columns[name] for name in (*JOB_COLUMNS, "account")))
    query = query.order_by(columns.started_at.desc(), columns.id.desc())
    if user is not None:
        query = query.where(reader.is_of(user))
    if since is not None:
        query = query.where(or_(columns.last_entry_at >= since - MAX_CLOCK_SETBACK, columns.state == "running"))
    if until is not None:
        query = query.where(columns.started_at < until)
    again = committed_again(reader.attempts(None, others))
    return _costs(reader, reader.fetch(query), again, now, _Cut(since, until, period))


def costs_of(
    reader: Reader,
    job: Row,
    *,
    now: datetime | None = None,
    period: Period | None = None,
    others: Sequence[Row] = (),
) -> list[tuple[Row, Account]]:
    """Return the account of one job over its whole time, in the form of `accounts`; `job` is its row."""
    again = {job["uuid"]: reader.committed_again(job, others)}
    return _costs(reader, [job], again, now or datetime.now(UTC), _Cut(None, None, period))


@dataclass(frozen=True)
class _Cut:
    """The time for which costs are requested: from `since` on, before `until` (None for no limit), and by `period` if
    set."""

    since: datetime | None
    until: datetime | None
    period: Period | None

    def whole(self, job: Row, account: Account) -> list[tuple[str | None, Account]] | None:
        """Return a job's cost from its stored account if one part contains the whole job; an empty list if the job
        ended before `since`; None if the job must be cut into parts."""
        began: datetime = job["started_at"]
        end = began + timedelta(seconds=account.held_s)
        if self.since is not None and end < self.since:
            return []
        for name, first, last in self._windows(began, end):
            return [(name, account)] if first <= began and end < last else None
        return []

    def parts(self, job: Row, timeline: HeldTime) -> list[tuple[str | None, Account]]:
        """Return the costs of a job by part: (name of the period, account)."""
        began: datetime = job["started_at"]
        if self.since is None and self.until is None and self.period is None:
            return [(None, between(timeline))]
        named_parts = []
        for name, first, last in self._windows(began, began + timedelta(seconds=timeline.held_s)):
            part = between(timeline, (first - began).total_seconds(), (last - began).total_seconds())
            if part.held_s > 0.0 or part.failures:
                named_parts.append((name, part))
        return named_parts

    def _windows(self, began: datetime, end: datetime) -> Iterator[tuple[str | None, datetime, datetime]]:
        """Yield the parts of the requested time that may overlap a job: (name, since, until)."""
        first, last = self.since or began, self.until or end + timedelta(seconds=1)
        if self.period is None:
            yield None, first, last
            return
        at = max(first, began)
        at = at.replace(hour=0, minute=0, second=0, microsecond=0)
        at = at.replace(day=1) if self.period == "month" else at - timedelta(days=at.weekday())
        while at < last and at <= end:
            week = self.period == "week"
            following = at + timedelta(days=7) if week else (at + timedelta(days=32)).replace(day=1)
            yield f"{at:%Y-%m-%d}" if week else f"{at:%Y-%m}", max(at, first), min(following, last)
            at = following


def _costs(
    reader: Reader, jobs: Sequence[Row], again: Mapping[str, Again], now: datetime, cut: _Cut
) -> list[tuple[Row, Account]]:
    """Return the costs of jobs by part, from the stored account if one part contains the whole job. The rows of other
    jobs are read once, one job at a time, however many parts there are."""
    kept = [stored_account_with(job, again.get(job["uuid"], ())) for job in jobs]
    whole = [None if account is None else cut.whole(job, account) for job, account in zip(jobs, kept, strict=True)]
    timelines = reader.timelines(
        [job for job, parts_of_job in zip(jobs, whole, strict=True) if parts_of_job is None], now
    )
    costs: list[tuple[Row, Account]] = []
    for job, parts_of_job in zip(jobs, whole, strict=True):
        parts = cut.parts(job, next(timelines)(again.get(job["uuid"], ()))) if parts_of_job is None else parts_of_job
        costs += [(job if name is None else {**job, str(cut.period): name}, part) for name, part in parts]
    return costs


def cost_rows(job_accounts: Sequence[Account], price: float | None = None) -> list[Row]:
    """Return one row for each cause, `useful` first, with sums over the accounts: `cause`, `seconds`, `share` of the
    time held, `gpu_hours`, `of_failures` (whether the cause is attributed to failures). With the `price` of a GPU-hour,
    also `money`."""
    total = added(job_accounts)
    seconds = {"useful": total.useful_s, **total.lost_s}
    hours = {"useful": total.useful_gpu_hours, **total.lost_gpu_hours}
    return [
        {
            "cause": cause,
            "seconds": seconds[cause],
            "share": seconds[cause] / total.held_s if total.held_s > 0 else None,
            "gpu_hours": hours[cause],
            "of_failures": cause in OF_FAILURES,
            **({} if price is None else {"money": hours[cause] * price}),
        }
        for cause in SHARES
    ]


JOB_KEYS = ("uuid", "host", "state", "started_at")
"""Columns that identify a job in addition to its name, because jobs of other folders or hosts may have the same
name."""


def cost_by_job(job_accounts: Iterable[tuple[Row, Account]], price: float | None = None) -> list[Row]:
    """Return one row per job: `job`, `uuid`, `host`, `state`, `started_at`, and the columns of `figures`."""
    return [
        {"job": job["name"], **{name: job[name] for name in JOB_KEYS}, **figures(account, price)}
        for job, account in job_accounts
    ]


def cost_by(by: CostBy, job_accounts: Iterable[tuple[Row, Account]], price: float | None = None) -> list[Row]:
    """Return one row for each owner, (Slurm) account, partition, cluster, week or month: its name, the number of
    `jobs`, and the columns of `figures`. Groups with most GPU-hours come first; weeks and months are in order of time.
    For weeks and months, `job_accounts` must come from `accounts` with the same `period`."""
    if by == "job":
        return cost_by_job(job_accounts, price)
    groups: dict[str, list[tuple[Row, Account]]] = {}
    for job, account in job_accounts:
        groups.setdefault(job["slurm_account" if by == "account" else by] or NO_NAME, []).append((job, account))
    rows = [
        {
            by: name,
            "jobs": len({job["uuid"] for job, _ in members}),
            **figures(added(account for _, account in members), price),
        }
        for name, members in groups.items()
    ]
    if by in ("week", "month"):
        return sorted(rows, key=lambda row: str(row[by]))
    return sorted(rows, key=lambda row: (-row["gpu_hours"], row[by]))


def figures(account: Account, price: float | None = None) -> Row:
    """Return an account as columns `FIGURE_COLUMNS`; with the `price` of a GPU-hour, also `money` and
    `failure_money`."""
    row = {
        "wall_seconds": account.wall_s,
        "goodput": account.goodput,
        "ettr": account.ettr,
        "failures": account.failures,
        "mtbf_seconds": account.mtbf_s,
        "mttr_seconds": account.mttr_s,
        "gpu_hours": account.gpu_hours,
        "failure_gpu_hours": account.failure_gpu_hours,
        "useful_seconds": account.useful_s,
        **{f"{cause}_seconds": account.lost_s[cause] for cause in CAUSES},
        "held_seconds": account.held_s,
        "useful_share": account.useful_share,
        "hardware_failures": account.hardware_failures,
        "hardware_mtbf_seconds": account.hardware_mtbf_s,
        "failure_rate": account.failure_rate,
        "hardware_failure_rate": account.hardware_failure_rate,
        "useful_gpu_hours": account.useful_gpu_hours,
        **{f"{cause}_gpu_hours": account.lost_gpu_hours[cause] for cause in CAUSES},
    }
    money = (
        {}
        if price is None
        else {"money": account.gpu_hours * price, "failure_money": account.failure_gpu_hours * price}
    )
    return {**row, **money}


FIGURE_COLUMNS = (
    *("wall_seconds", "goodput", "ettr", "failures", "mtbf_seconds", "mttr_seconds", "gpu_hours", "failure_gpu_hours"),
    *("useful_seconds", *(f"{cause}_seconds" for cause in CAUSES), "held_seconds", "useful_share"),
    *("hardware_failures", "hardware_mtbf_seconds", "failure_rate", "hardware_failure_rate"),
    *("useful_gpu_hours", *(f"{cause}_gpu_hours" for cause in CAUSES)),
)
"""`failure_rate` and `hardware_failure_rate` are per 1,000 GPU-days; the other columns are as in `Account`."""
