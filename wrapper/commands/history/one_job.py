"""Reads the views of `resihp history` for one job from its ledger, with one function for each computed view.

`db` computes the answers. Decides nothing about options, and prints nothing. Called by `command`, through the table in
`views`. Slow imports are inside the functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resihp.wrapper.commands.history.costs import list_costs
from resihp.wrapper.commands.history.query import HistoryQuery, Listing, Row
from resihp.wrapper.output.ledgers import attempts_here

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader
    from resihp.scheduler.explained.explanation import Explanation

SPARES_FOOTNOTE = (
    "assumptions: one more healthy spare node at each change of plan, the same losses and times of changes; savings as "
    "predicted by the planner, never faster than the healthy first plan; jobs that ended for lack of nodes do not count"
)
"""Footnote of the view `spares`."""


@dataclass(frozen=True)
class OneJob:
    """The ledger of a job, and the job's row in it."""

    reader: Reader
    row: Row
    ledger: str | None
    """The value of the option --ledger; None if it was not given."""

    @property
    def id(self) -> int:
        return int(self.row["id"])

    @property
    def subject(self) -> str:
        return f"job {self.row['name']}"

    def nodes(self, query: HistoryQuery) -> list[str]:
        """Return the names of the job's nodes, for a query about one node; empty for other queries."""
        return self.reader.nodes(self.id) if query.node is not None else []


def read_costs(query: HistoryQuery, job: OneJob) -> Listing:
    from resihp.db.reading.costs import fleet_costs
    from resihp.wrapper.output.idle_gpus import IdleGpus
    from resihp.wrapper.output.job_history import JobHistory

    others = attempts_here(job.ledger, job.row["run"])
    accounts = fleet_costs.costs_of(job.reader, job.row, period=query.period, others=others)
    idle = IdleGpus(JobHistory.of_ledger(job.reader, job.row)).line()
    return list_costs(query, accounts, job.subject, job.ledger, idle)


def read_promises(query: HistoryQuery, job: OneJob) -> Listing:
    from resihp.db.reading import queries
    from resihp.db.reading.plans import plan_rows

    rows = plan_rows.promises_rows(job.reader, job.id)
    return Listing(queries.COLUMNS["promises"], query.last(rows), job.subject, len(rows))


def read_spares(query: HistoryQuery, job: OneJob) -> Listing:
    from resihp.db.reading import queries
    from resihp.db.reading.plans import plan_rows

    rows = plan_rows.spares_rows(job.reader, job.row)
    return Listing(queries.COLUMNS["spares"], rows, job.subject, 1, closing=SPARES_FOOTNOTE)


def read_decisions(query: HistoryQuery, job: OneJob) -> Listing:
    from resihp.db.reading import queries
    from resihp.db.reading.plans import plan_rows

    rows = plan_rows.decisions_rows(job.reader, job.id, since=query.since, until=query.until)
    return Listing(queries.COLUMNS["decisions"], query.last(rows), job.subject, len(rows))


def read_failures(query: HistoryQuery, job: OneJob) -> Listing:
    """Return the job's failures, or the number of failures in each group of --by."""
    if query.by is None:
        return read_table(query, job)
    from resihp.db.reading import fleet, queries

    by: Any = query.by
    nodes = job.nodes(query)
    counts = fleet.failures_by(job.reader, by, job.id, node=query.node, since=query.since, until=query.until)
    rows = fleet.joined(by, counts)
    return Listing(queries.COLUMNS[query.shape], rows[: query.limit], job.subject, len(rows), nodes)


def read_hosts(query: HistoryQuery, job: OneJob) -> Listing:
    from resihp.db.reading import hardware, queries

    nodes = job.nodes(query)
    rows = stays_of_query(query, hardware.stays(job.reader, job.id), job.id)
    return Listing(queries.COLUMNS["hosts"], query.last(rows), job.subject, len(rows), nodes)


def read_plans(query: HistoryQuery, job: OneJob) -> Listing:
    """Return the job's plans, each with an explanation if there is room for it."""
    plans = read_table(query, job)
    if query.flat:
        return plans
    explained = job.reader.explanations(job.id, plans.rows)
    rows = [row | {"explanation": explanation_as_json(explained.get(row["epoch"]))} for row in plans.rows]
    return replace(plans, rows=rows)


def read_table(query: HistoryQuery, job: OneJob) -> Listing:
    """Return the job's rows in a table of the ledger."""
    from resihp.db.reading import queries

    period: dict[str, Any] = {"since": query.since, "until": query.until}
    nodes = job.nodes(query)
    rows = job.reader.rows(
        query.view, job.id, node=query.node, rank=query.rank, kind=query.kind, last=query.limit, **period
    )
    total = None
    is_filtered = query.node is not None or query.rank is not None or query.kind is not None
    if not is_filtered and len(rows) == query.limit:
        total = job.reader.count(query.view, job.id, **period)
    return Listing(queries.COLUMNS[query.view], rows, job.subject, total, nodes)


def stays_of_query(
    query: HistoryQuery, rows: list[Row], job_id: int | None = None, clusters: Sequence[str] = ()
) -> list[Row]:
    """Return the queried stays of nodes in jobs, each with the changes since the node's previous stay. The previous
    stay need not be part of the query."""
    from resihp.db.reading import hardware
    from resihp.db.reading.naming import is_node

    changes = hardware.told_changes(rows)
    if job_id is not None:
        changes = [row for row in changes if row["job_id"] == job_id]
    since, until = query.since or datetime.min.replace(tzinfo=UTC), query.until or datetime.max.replace(tzinfo=UTC)
    return [
        {name: value for name, value in row.items() if name != "job_id"}
        for row in changes
        if since <= row["joined_at"] < until and is_node(query.node, row["node"], clusters)
    ]


def explanation_as_json(explained: Explanation | None) -> Row | None:
    """Return a plan's explanation as the value of a row's field; None without an explanation."""
    if explained is None:
        return None
    from resihp.scheduler.explained.explanation import as_json

    return as_json(explained)
