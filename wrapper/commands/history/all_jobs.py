"""Reads the views of `resihp history` for all jobs, from one ledger or from every ledger of this home.

`db` computes the answers; this module puts the rows of several ledgers into one order. Decides nothing about options,
and prints nothing. Called by `command`, through the table in `views`. Slow imports are inside the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from resihp.errors import UsageError
from resihp.wrapper.commands.history.costs import list_costs
from resihp.wrapper.commands.history.one_job import SPARES_FOOTNOTE, stays_of_query
from resihp.wrapper.commands.history.query import DEFAULT_ROWS, HistoryQuery, Listing, Row
from resihp.wrapper.output.ledgers import attempts_here, from_all, opened

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader

ALL_JOBS_SUBJECT = "all jobs"
MIN_JOBS_WITH_SPARES = 100
"""Smallest number of jobs, the newest ones, for which the view `spares` is computed on a terminal."""


class AllJobs:
    """The ledgers of all jobs, with the names of nodes and clusters that were read from them."""

    def __init__(self, query: HistoryQuery, job: str | None, ledger: str | None, *, names_nodes: bool) -> None:
        """Prepare to read the ledger of `job`, or else the named `ledger`, or else every ledger of this home.

        `names_nodes`: whether the answer names nodes, so that equal names on different clusters must be distinguished.
        """
        self.ledger = ledger
        self.nodes: list[str] = []
        """Names of all nodes in the ledgers; read only for a query about one node."""
        self.clusters: list[str] = []
        """Names of the clusters in the ledgers; read only for a query about one node."""
        self._is_of_one_node = query.node is not None
        self._job = job
        self._other_clusters = _clusters_here(ledger) if job is None and names_nodes else set()

    def ask(self, question: Callable[[Reader], list[Any]]) -> list[Any]:
        """Call `question` with each ledger, and return all answers in one list."""

        def ask_ledger(reader: Reader) -> list[Any]:
            reader.other_clusters = self._other_clusters
            if self._is_of_one_node:
                self.nodes.extend(reader.nodes(None))
                self.clusters.extend(reader.clusters())
            return question(reader)

        if self._job is not None:
            with opened(self._job, self.ledger) as (reader, _):
                return ask_ledger(reader)
        return [row for rows in from_all(self.ledger, ask_ledger) for row in rows]

    def listing(self, columns: tuple[str, ...], rows: list[Row], total: int | None, closing: str = "") -> Listing:
        return Listing(columns, rows, ALL_JOBS_SUBJECT, total, self.nodes, closing, self.clusters)

    def is_node(self, query: HistoryQuery, row: Row) -> bool:
        """Return whether the row is about the node that the query names."""
        from resihp.db.reading.naming import is_node

        return is_node(query.node, row["node"], self.clusters)


def read_costs(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading.costs import fleet_costs

    others = attempts_here(jobs.ledger)
    asks: dict[str, Any] = {"user": query.user, **_period(query)}
    accounts = jobs.ask(lambda reader: fleet_costs.accounts(reader, **asks, period=query.period, others=others))
    newest_first = sorted(accounts, key=lambda pair: pair[0]["started_at"], reverse=True)
    return list_costs(query, newest_first, ALL_JOBS_SUBJECT, jobs.ledger)


def read_jobs(query: HistoryQuery, jobs: AllJobs) -> Listing:
    asks: dict[str, Any] = {"user": query.user, **_period(query), "last": query.limit}
    rows = jobs.ask(lambda reader: reader.jobs(**asks))
    return _ranking(query, jobs, sorted(rows, key=lambda row: row["started_at"], reverse=True))


def read_lemons(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading import fleet

    now = datetime.now(UTC)
    record = fleet.NodeRecord()

    def read(reader: Reader) -> list[Row]:
        record.read(reader, fleet.horizon(now), query.injected)
        return []

    jobs.ask(read)
    return _ranking(query, jobs, [row for row in fleet.lemons(record, now) if jobs.is_node(query, row)])


def read_repairs(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading import rates

    rows = rates.repairs_together(jobs.ask(lambda reader: rates.repairs(reader, query.since, query.until)))
    return _ranking(query, jobs, [row for row in rows if jobs.is_node(query, row)])


def read_rate(query: HistoryQuery, jobs: AllJobs) -> Listing:
    """Return the failure rate. Raises UsageError for an unknown trait."""
    from resihp.db.reading import rates

    days = query.days or rates.DEFAULT_DAYS
    if query.around is not None:
        around = query.around
        answers = jobs.ask(lambda reader: rates.rate_around(reader, around, days, query.user))
        return _ranking(query, jobs, rates.together(answers))
    trait, _, value = (query.having or "").partition("=")
    if trait not in rates.TRAITS or not value:
        traits = ", ".join(rates.TRAITS)
        raise UsageError(f"history rate: --having {query.having}: must be TRAIT=VALUE; traits are {traits}")
    now = datetime.now(UTC)
    answers = jobs.ask(lambda reader: rates.rate_with(reader, trait, value, days, now, query.user))
    return _ranking(query, jobs, rates.together(answers))


def read_promises(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading import queries
    from resihp.db.reading.plans import plan_rows
    from resihp.db.reading.tables import OF_JOB

    max_rows = query.limit or DEFAULT_ROWS
    rows = jobs.ask(lambda reader: plan_rows.promises_of_all(reader, max_rows, **_period(query)))
    rows.sort(key=lambda row: (row["started_at"], row["epoch"]), reverse=True)
    return jobs.listing((*OF_JOB, *queries.COLUMNS["promises"]), rows[: query.limit], len(rows))


def read_spares(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading.plans import plan_rows

    max_jobs = None if query.limit is None else max(query.limit, MIN_JOBS_WITH_SPARES)  # the planner decides for each
    rows = jobs.ask(lambda reader: plan_rows.spares_rows(reader, **_period(query), jobs=max_jobs))
    rows.sort(key=lambda row: (-row["saved_gpu_hours"], row["started_at"]))
    footnote = SPARES_FOOTNOTE
    if max_jobs is not None and len(rows) >= max_jobs:
        footnote += f"\nthe newest {max_jobs} jobs with a change of plan; more with --limit, all with --json"
    return _ranking(query, jobs, rows, footnote)


def read_failures(query: HistoryQuery, jobs: AllJobs) -> Listing:
    """Return the failures, or the number of failures in each group of --by."""
    if query.by is None:
        return read_table(query, jobs)
    from resihp.db.reading import fleet

    by: Any = query.by
    asks: dict[str, Any] = {"node": query.node, "user": query.user, **_period(query)}
    counts = jobs.ask(lambda reader: fleet.failures_by(reader, by, **asks))
    return _ranking(query, jobs, fleet.joined(by, counts))


def read_hosts(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading import hardware, queries

    stays = jobs.ask(lambda reader: hardware.stays(reader, node=query.node))
    rows = stays_of_query(query, stays, clusters=jobs.clusters)
    return jobs.listing(queries.COLUMNS["hosts"], query.last(rows), len(rows))


def read_placements(query: HistoryQuery, jobs: AllJobs) -> Listing:
    """Return each device's nodes, ordered by device; with a limit, only the placements that were seen last."""
    from resihp.db.reading import hardware, queries

    asks: dict[str, Any] = {"node": query.node, "user": query.user, **_period(query)}
    placements = hardware.placed(jobs.ask(lambda reader: reader.rows("devices", None, **asks)))
    newest = placements
    if query.limit is not None:
        newest = query.last(sorted(placements, key=lambda row: row["last_seen"]))
    rows = sorted(newest, key=lambda row: (row["uuid"], row["first_seen"], row["node"], row["device"]))
    return jobs.listing(queries.COLUMNS["placements"], rows, len(placements))


def read_iterations(query: HistoryQuery, jobs: AllJobs) -> Listing:
    from resihp.db.reading.iterations.newest import newest_iterations

    if query.node is not None:
        raise UsageError("history iterations: has no nodes; leave --node out")
    limit = query.limit or DEFAULT_ROWS
    rows = jobs.ask(lambda reader: newest_iterations(reader, limit, user=query.user, **_period(query)))
    return _newest_rows(query, jobs, rows)


def read_table(query: HistoryQuery, jobs: AllJobs) -> Listing:
    """Return the newest rows of a table from all ledgers."""
    asks: dict[str, Any] = {"node": query.node, "user": query.user, "kind": query.kind, **_period(query)}
    rows = jobs.ask(lambda reader: reader.rows(query.view, None, last=query.limit, **asks))
    return _newest_rows(query, jobs, rows)


def _ranking(query: HistoryQuery, jobs: AllJobs, rows: list[Row], closing: str = "") -> Listing:
    """Return a ranking: its first rows, at most as many as the limit."""
    from resihp.db.reading import queries

    return jobs.listing(queries.COLUMNS[query.shape], rows[: query.limit], len(rows), closing)


def _newest_rows(query: HistoryQuery, jobs: AllJobs, rows: list[Row]) -> Listing:
    """Return the newest rows of a table, oldest first, each with its job."""
    from resihp.db.reading import queries
    from resihp.db.reading.tables import OF_JOB, TABLES

    time = TABLES[query.view].time
    columns = (*OF_JOB, *queries.COLUMNS[query.view])
    return jobs.listing(columns, query.last(sorted(rows, key=lambda row: row[time])), None)


def _period(query: HistoryQuery) -> dict[str, Any]:
    """Return the times --since and --until as keyword arguments."""
    return {"since": query.since, "until": query.until}


def _clusters_here(ledger: str | None) -> set[str]:
    """Return the names of the clusters in all ledgers of this home; empty if a ledger was named."""
    if ledger not in (None, "sqlite"):
        return set()
    return {name for clusters in from_all(ledger, lambda reader: reader.clusters(), quiet=True) for name in clusters}
