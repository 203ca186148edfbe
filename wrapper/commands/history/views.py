"""The table of the views of `resihp history`: for each view its columns, its options, and the functions that read it.

A view is a table of the ledger (`resihp.db.reading.tables.TABLES`), or is computed from several tables. This module
also refuses options that a view does not take. Reads no ledger. Called by `command`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from resihp.errors import UsageError
from resihp.wrapper.commands.history import all_jobs, one_job, tables
from resihp.wrapper.commands.history.all_jobs import AllJobs
from resihp.wrapper.commands.history.one_job import OneJob
from resihp.wrapper.commands.history.query import HistoryQuery, Listing
from resihp.wrapper.commands.history.tables import ViewColumns

MAX_DAYS = 36_500
PERIOD_OPTIONS = frozenset({"since", "until"})
TABLE_OPTIONS = frozenset({"node", "kind"}) | PERIOD_OPTIONS
"""Options of a view that is a table of the ledger. A table without such a column refuses --node and --kind itself."""
USER_OPTION = frozenset({"user"})
RATE_OPTIONS = ("around", "having", "days")


@dataclass(frozen=True, kw_only=True)
class HistoryView:
    """A view: its columns, its options, and the functions that read it."""

    columns: ViewColumns
    """Columns of the view on a terminal."""
    of_job: Callable[[HistoryQuery, OneJob], Listing] | None
    """Function that reads the view for one job; None if the view always covers all jobs."""
    of_all: Callable[[HistoryQuery, AllJobs], Listing] | None
    """Function that reads the view for all jobs; None if the view covers one job at a time."""
    options: frozenset[str] = TABLE_OPTIONS
    """Options that the view takes, besides --limit."""
    with_all: frozenset[str] = USER_OPTION
    """Options that the view takes only for all jobs."""
    columns_of_all: ViewColumns | None = None
    """Columns for all jobs; None if they are the same as `columns`."""
    columns_by: Mapping[str, ViewColumns] = field(default_factory=dict)
    """Columns for each group of --by."""
    joins_nodes: bool = False
    """Whether the view combines the records of a node from several ledgers."""
    is_ranking: bool = False
    """Whether --limit keeps the first rows of the view, and not the newest ones."""

    def takes(self, option: str, query: HistoryQuery) -> bool:
        if option == "kind" and query.by is not None:
            return False
        return option in self.options or (query.all_jobs and option in self.with_all)

    def columns_of(self, query: HistoryQuery) -> ViewColumns:
        if query.by is not None:
            return self.columns_by[query.by]
        return self.columns_of_all if query.all_jobs and self.columns_of_all is not None else self.columns


def _table(columns: ViewColumns) -> HistoryView:
    """Return a view that is a table of the ledger, without computed columns."""
    return HistoryView(columns=columns, of_job=one_job.read_table, of_all=all_jobs.read_table)


HISTORY_VIEWS: Mapping[str, HistoryView] = {
    "jobs": HistoryView(
        columns=tables.JOBS_COLUMNS, of_job=None, of_all=all_jobs.read_jobs, options=PERIOD_OPTIONS, is_ranking=True
    ),
    "failures": HistoryView(
        columns=tables.FAILURES_COLUMNS,
        of_job=one_job.read_failures,
        of_all=all_jobs.read_failures,
        options=TABLE_OPTIONS | {"by"},
        columns_by=tables.FAILURES_BY,
    ),
    "nodes": _table(tables.NODES_COLUMNS),
    "hosts": HistoryView(
        columns=tables.HOSTS_COLUMNS,
        of_job=one_job.read_hosts,
        of_all=all_jobs.read_hosts,
        options=PERIOD_OPTIONS | {"node"},
        with_all=frozenset(),
        joins_nodes=True,
    ),
    "devices": HistoryView(
        columns=tables.DEVICES_COLUMNS,
        of_job=one_job.read_table,
        of_all=all_jobs.read_placements,
        columns_of_all=tables.PLACEMENTS_COLUMNS,
        options=PERIOD_OPTIONS | {"node"},
        joins_nodes=True,
    ),
    "workers": _table(tables.WORKERS_COLUMNS),
    "iterations": HistoryView(
        columns=tables.ITERATIONS_COLUMNS,
        of_job=one_job.read_table,
        of_all=all_jobs.read_iterations,
        options=PERIOD_OPTIONS | {"node"},
    ),
    "plans": HistoryView(columns=tables.PLANS_COLUMNS, of_job=one_job.read_plans, of_all=all_jobs.read_table),
    "decisions": HistoryView(
        columns=tables.DECISIONS_COLUMNS, of_job=one_job.read_decisions, of_all=None, options=PERIOD_OPTIONS
    ),
    "spares": HistoryView(
        columns=tables.SPARES_COLUMNS,
        of_job=one_job.read_spares,
        of_all=all_jobs.read_spares,
        options=frozenset(),
        with_all=PERIOD_OPTIONS,
        is_ranking=True,
    ),
    "reconfigurations": _table(tables.RECONFIGURATIONS_COLUMNS),
    "drains": _table(tables.DRAINS_COLUMNS),
    "replacements": _table(tables.REPLACEMENTS_COLUMNS),
    "probes": _table(tables.PROBES_COLUMNS),
    "suspicions": _table(tables.SUSPICIONS_COLUMNS),
    "scores": HistoryView(
        columns=tables.SCORES_COLUMNS,
        of_job=one_job.read_table,
        of_all=None,
        options=frozenset({"node", "kind", "rank"}),
    ),
    "checkpoints": _table(tables.CHECKPOINTS_COLUMNS),
    "events": _table(tables.EVENTS_COLUMNS),
    "cost": HistoryView(
        columns=tables.COST_COLUMNS,
        of_job=one_job.read_costs,
        of_all=all_jobs.read_costs,
        options=frozenset({"by", "price"}),
        with_all=USER_OPTION | PERIOD_OPTIONS,
        columns_by=tables.COST_BY,
        is_ranking=True,
    ),
    "promises": HistoryView(
        columns=tables.PROMISES_COLUMNS,
        of_job=one_job.read_promises,
        of_all=all_jobs.read_promises,
        options=frozenset(),
        with_all=PERIOD_OPTIONS,
    ),
    "lemons": HistoryView(
        columns=tables.LEMONS_COLUMNS,
        of_job=None,
        of_all=all_jobs.read_lemons,
        options=frozenset({"node", "injected"}),
        with_all=frozenset(),
        joins_nodes=True,
        is_ranking=True,
    ),
    "repairs": HistoryView(
        columns=tables.REPAIRS_COLUMNS,
        of_job=None,
        of_all=all_jobs.read_repairs,
        options=PERIOD_OPTIONS | {"node"},
        with_all=frozenset(),
        joins_nodes=True,
        is_ranking=True,
    ),
    "rate": HistoryView(
        columns=tables.RATE_COLUMNS,
        of_job=None,
        of_all=all_jobs.read_rate,
        options=frozenset(RATE_OPTIONS),
        is_ranking=True,
    ),
}
"""Each view of `resihp history`, in the order of `History`."""


def names_nodes(query: HistoryQuery) -> bool:
    """Return whether the answer names nodes, so that equal names of different clusters must be distinguished."""
    if query.node is not None or query.by == "node" or HISTORY_VIEWS[query.view].joins_nodes:
        return True
    return query.having is not None and query.having.startswith("host=")


# --- options --------------------------------------------------------------------------------------------------------


def check(query: HistoryQuery) -> None:
    """Raise UsageError for options that the query's view does not take."""
    view = HISTORY_VIEWS[query.view]
    for refuse in _REFUSALS:
        refuse(query, view)


Refusal = Callable[[HistoryQuery, HistoryView], None]


def _unless_taken(*options: str, advice: str) -> Refusal:
    """Return a function that raises UsageError if one of these options was given and the view does not take it."""

    def refuse(query: HistoryQuery, view: HistoryView) -> None:
        if any(query.has(option) and not view.takes(option, query) for option in options):
            raise UsageError(f"history {query.view}: {advice}")

    return refuse


def _refuse_unknown_group(query: HistoryQuery, view: HistoryView) -> None:
    if query.by is not None and query.by not in view.columns_by:
        raise UsageError(f"history {query.view}: unknown --by {query.by}; choose one of {', '.join(view.columns_by)}")


def _refuse_incomplete_rate(query: HistoryQuery, view: HistoryView) -> None:
    if query.view != "rate":
        return
    if (query.around is None) == (query.having is None):
        raise UsageError("history rate: needs --around TIME or --having TRAIT=VALUE")
    if query.days is not None and not 0.0 < query.days <= MAX_DAYS:
        raise UsageError(f"history rate: --days {query.days:g}: at most {MAX_DAYS:,}")


def _refuse_all_jobs(query: HistoryQuery, view: HistoryView) -> None:
    if query.all_jobs and view.of_all is None:
        raise UsageError(f"history {query.view}: shows one job at a time; name it instead of --all")


def _refuse_all_iterations(query: HistoryQuery, view: HistoryView) -> None:
    if query.view == "iterations" and query.all_jobs and query.limit is None:
        raise UsageError("history iterations --all: may be millions of rows; set --limit")


_REFUSALS: tuple[Refusal, ...] = (
    _unless_taken("by", advice="--by is for failures and cost; leave it out"),
    _refuse_unknown_group,
    _unless_taken("price", advice="--price is for cost; leave it out"),
    _refuse_incomplete_rate,
    _unless_taken(*RATE_OPTIONS, advice="--around, --having and --days are for rate; leave them out"),
    _unless_taken("user", advice="--user needs a view of many jobs; use it with --all, or leave it out"),
    _unless_taken("kind", advice="has no kinds; leave --kind out"),
    _unless_taken("node", advice="has no nodes; leave --node out"),
    _unless_taken("rank", advice="--rank is for scores; leave it out"),
    _refuse_all_jobs,
    _unless_taken("since", "until", advice="covers all the time; leave --since and --until out"),
    _unless_taken("injected", advice="--injected is for lemons; leave it out"),
    _refuse_all_iterations,
)
"""Checks of the options, in this order: of several wrong options, the first is reported."""
