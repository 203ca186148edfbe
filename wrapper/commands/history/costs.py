"""The view `cost` of `resihp history`: rows by cause or by group, and a footnote with totals.

`db` computes the accounts of cost; this module adds them up for a listing. It never reads a ledger; `one_job` and
`all_jobs` do, and call it. Jobs whose stored costs are malformed are named on stderr.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from resihp.wrapper.commands.history.query import HistoryQuery, Listing, Row
from resihp.wrapper.output.answers import message
from resihp.wrapper.output.progress import NO_ITERATION_KNOWN

MAX_JOBS_NAMED = 5
"""Most jobs named in a message."""


def list_costs(
    query: HistoryQuery, accounts: Sequence[tuple[Row, Any]], subject: str, ledger: str | None, idle: str = ""
) -> Listing:
    """Return costs by cause or by group. The footnote has totals and idle GPUs.

    Jobs whose stored costs are malformed are named on stderr.
    """
    from resihp.db.reading import queries
    from resihp.db.reading.costs import fleet_costs

    _warn_of_malformed_costs([job for job, _ in accounts], ledger)
    sums = [account for _, account in accounts]
    by: Any = query.by
    rows = fleet_costs.cost_rows(sums, query.price) if by is None else fleet_costs.cost_by(by, accounts, query.price)
    columns, closing = queries.priced(query.shape, query.price), _cost_lines(sums, query.price)
    closing += f"\n{line}" if (line := idle or _idle_jobs(accounts)) else ""
    return Listing(columns, rows[: query.limit], subject, len(rows), closing=closing)


def _warn_of_malformed_costs(jobs: Sequence[Row], ledger: str | None) -> None:
    from resihp.db.reading.costs.stored_accounts import is_malformed

    malformed = list(dict.fromkeys(job["name"] for job in jobs if is_malformed(job)))
    if not malformed:
        return
    from resihp.db.engine import masked

    if ledger is None or ledger == "sqlite":
        repair = f"resihp db upgrade {malformed[0]}"
    else:
        repair = f"resihp db upgrade --ledger {masked(ledger)}"
    names = f"{', '.join(malformed[:MAX_JOBS_NAMED])}{', ...' if len(malformed) > MAX_JOBS_NAMED else ''}"
    message(
        f"warning: job{'s' * (len(malformed) > 1)} {names}: stored costs are malformed; "
        f"computed from the rows instead; {repair} stores them again"
    )


def _idle_jobs(accounts: Sequence[tuple[Row, Any]]) -> str:
    """Return a line that names the jobs with idle GPUs, the costliest first; empty if there are none."""
    from resihp.wrapper.commands.history.cells import amount

    hours: dict[tuple[str, str], float] = {}
    for job, account in accounts:  # a job that is divided into periods has several accounts
        key = job["name"], job["uuid"]
        hours[key] = hours.get(key, 0.0) + account.lost_gpu_hours["idle"]
    idle_jobs = sorted(((idle_hours, *key) for key, idle_hours in hours.items() if idle_hours > 0.0), reverse=True)
    if not idle_jobs:
        return ""
    jobs_of_name = Counter(name for name, _ in hours)
    labels = [
        f"{name if jobs_of_name[name] == 1 else f'{name}, id {uuid[:8]}'} ({amount(idle_hours)} GPU-hours)"
        for idle_hours, name, uuid in idle_jobs[:MAX_JOBS_NAMED]
    ]
    more = ", ..." if len(idle_jobs) > MAX_JOBS_NAMED else ""
    return f"idle GPUs in {len(idle_jobs)} of {len(hours)} jobs: {', '.join(labels)}{more}"


def _cost_lines(accounts: Sequence[Any], price: float | None) -> str:
    """Return the footnote on costs: losses by failures, goodput, and failure rates, also for hardware failures
    alone."""
    from resihp.db.reading.costs.cost_accounts import added
    from resihp.wrapper.commands.history.cells import amount
    from resihp.wrapper.output.render import duration, percent

    total = added(accounts)
    share = percent(total.failure_gpu_hours / total.gpu_hours) if total.gpu_hours > 0 else "-"
    line = f"failures cost {amount(total.failure_gpu_hours)} of {amount(total.gpu_hours)} GPU-hours ({share})"
    if price is not None:
        line += f", {amount(total.failure_gpu_hours * price)} of {amount(total.gpu_hours * price)} in money"
    if (idle := total.lost_gpu_hours["idle"]) > 0:
        line += f"\nof that, idle GPUs {amount(idle)} ({percent(idle / total.gpu_hours)})"
    if total.goodput is None:
        line += f"\n{NO_ITERATION_KNOWN}: the use of time is unknown"
    line += f"\ngoodput {percent(total.goodput)}, useful share {percent(total.useful_share)}"
    if total.mttr_s is not None:
        line += f", MTTR {duration(total.mttr_s)} (detection included)"
    for label, failures, mtbf_s, rate in (
        ("failures", total.failures, total.mtbf_s, total.failure_rate),
        ("of hardware", total.hardware_failures, total.hardware_mtbf_s, total.hardware_failure_rate),
    ):
        if total.failures:
            rates = (
                f": MTBF {duration(mtbf_s)}, {amount(rate)} per 1,000 GPU-days" if failures and rate is not None else ""
            )
            line += f"\n{label} {failures:,}{rates}"
    if total.in_proportion:
        line += f"\nsplit in proportion to time, as their rows were thinned: parts of {total.in_proportion:,} jobs"
    return line
