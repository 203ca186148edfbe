"""The views of `resihp history`, one row each: the options that it takes, and the functions that read it.

A view is a table of the ledger (`db.reading.tables.TABLES`) or computed from several ones. Also refuses options that a
view does not take. Reads nothing itself. Called by `command`; the columns of a view on a terminal are in `tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resihp.errors import UsageError
from wrapper.commands.history import all_jobs, one_job
from wrapper.commands.history.all_jobs import AllJobs
from wrapper.commands.history.one_job import OneJob
from wrapper.commands.history.query import COST_GROUPS, FAILURE_GROUPS, HistoryQuery, Listing

MAX_DAYS = 36_500
PERIOD = frozenset({"since", "until"})
USER = frozenset({"user"})
RATE_OPTIONS = ("around", "having", "days")


@dataclass(frozen=True, kw_only=True)
class HistoryView:
    """A view: the options that it takes, and the functions that read it."""

    of_job: Callable[[HistoryQuery, OneJob], Listing] | None
    """Reads it for one job. None: it always covers all jobs."""
    of_all: Callable[[HistoryQuery, AllJobs], Listing] | None
    """Reads it for all jobs. None: it shows one job at a time."""
    options: frozenset[str] = frozenset({"node", "kind"}) | PERIOD
    """Options that it takes, beside --limit."""
    with_all: frozenset[str] = USER
    """Options that it takes only for all jobs."""
    groups: tuple[str, ...] = ()
    """Groups that it takes for --by."""
    joins_nodes: bool = False
    """Whether it combines the records of a node from several ledgers."""
    is_ranking: bool = False
    """Whether --limit leaves its first rows, and not its newest ones."""

    def takes(self, option: str, query: HistoryQuery) -> bool:
        if option == "kind" and query.by is not None:
            return False
        return option in self.options or (query.all_jobs and option in self.with_all)


_TABLE = HistoryView(of_job=one_job.read_table, of_all=all_jobs.read_table)
VIEWS: Mapping[str, HistoryView] = {
    "jobs": HistoryView(of_job=None, of_all=all_jobs.read_jobs, options=PERIOD, is_ranking=True),
    "failures": HistoryView(
        of_job=one_job.read_failures,
        of_all=all_jobs.read_failures,
        options=_TABLE.options | {"by"},
        groups=FAILURE_GROUPS,
    ),
    "nodes": _TABLE,
    "hosts": HistoryView(
        of_job=one_job.read_hosts,
        of_all=all_jobs.read_hosts,
        options=PERIOD | {"node"},
        with_all=frozenset(),
        joins_nodes=True,
    ),
    "devices": HistoryView(
        of_job=one_job.read_table,
        of_all=all_jobs.read_placements,
        options=PERIOD | {"node"},
        joins_nodes=True,
    ),
    "workers": _TABLE,
    "iterations": HistoryView(of_job=one_job.read_table, of_all=all_jobs.read_iterations, options=PERIOD | {"node"}),
    "plans": HistoryView(of_job=one_job.read_plans, of_all=all_jobs.read_table),
    "decisions": HistoryView(of_job=one_job.read_decisions, of_all=None, options=PERIOD),
    "spares": HistoryView(
        of_job=one_job.read_spares,
        of_all=all_jobs.read_spares,
        options=frozenset(),
        with_all=PERIOD,
        is_ranking=True,
    ),
    "reconfigurations": _TABLE,
    "drains": _TABLE,
    "replacements": _TABLE,
    "probes": _TABLE,
    "suspicions": _TABLE,
    "scores": HistoryView(of_job=one_job.read_table, of_all=None, options=frozenset({"node", "kind", "rank"})),
    "checkpoints": _TABLE,
    "events": _TABLE,
    "cost": HistoryView(
        of_job=one_job.read_costs,
        of_all=all_jobs.read_costs,
        options=frozenset({"by", "price"}),
        with_all=USER | PERIOD,
        groups=COST_GROUPS,
        is_ranking=True,
    ),
    "promises": HistoryView(
        of_job=one_job.read_promises,
        of_all=all_jobs.read_promises,
        options=frozenset(),
        with_all=PERIOD,
    ),
    "lemons": HistoryView(
        of_job=None,
        of_all=all_jobs.read_lemons,
        options=frozenset({"node", "injected"}),
        with_all=frozenset(),
        joins_nodes=True,
        is_ranking=True,
    ),
    "repairs": HistoryView(
        of_job=None,
        of_all=all_jobs.read_repairs,
        options=PERIOD | {"node"},
        with_all=frozenset(),
        joins_nodes=True,
        is_ranking=True,
    ),
    "rate": HistoryView(
        of_job=None,
        of_all=all_jobs.read_rate,
        options=frozenset(RATE_OPTIONS),
        is_ranking=True,
    ),
}
"""Each view of `resihp history`, in the order of `History`."""


def names_nodes(query: HistoryQuery) -> bool:
    """Return whether the answer names nodes, so that equal names of different clusters must be distinguished."""
    if query.node is not None or query.by == "node" or VIEWS[query.view].joins_nodes:
        return True
    return query.having is not None and query.having.startswith("host=")


# --- options --------------------------------------------------------------------------------------------------------


def check(query: HistoryQuery) -> None:
    """Raise UsageError for options that the view does not have."""
    view = VIEWS[query.view]
    for refuse in _REFUSALS:
        refuse(query, view)


Refusal = Callable[[HistoryQuery, HistoryView], None]


def _unless_taken(*options: str, advice: str) -> Refusal:
    """Return a function that raises UsageError if one of the options was given and the view does not take it."""

    def refuse(query: HistoryQuery, view: HistoryView) -> None:
        if any(query.has(option) and not view.takes(option, query) for option in options):
            raise UsageError(f"history {query.view}: {advice}")

    return refuse


def _refuse_unknown_group(query: HistoryQuery, view: HistoryView) -> None:
    if query.by is not None and query.by not in view.groups:
        raise UsageError(f"history {query.view}: unknown --by {query.by}; choose one of {', '.join(view.groups)}")


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
"""In this order: of several wrong options the first one is named."""
