"""The data types of `resihp history`: its views, groups, a query, and the listing that answers a query.

Contains values only. `views` lists the options of each view, and `one_job` and `all_jobs` read the answers. Never
imports the ledger. Used by all modules of this folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Literal

Row = dict[str, Any]

DEFAULT_ROWS = 50
"""Number of rows on a terminal without --limit."""


class History(str, Enum):  # noqa: UP042 - StrEnum's help text shows differently in older Typer
    """Views of `resihp history`."""

    jobs = "jobs"
    failures = "failures"
    nodes = "nodes"
    hosts = "hosts"
    devices = "devices"
    workers = "workers"
    iterations = "iterations"
    plans = "plans"
    decisions = "decisions"
    spares = "spares"
    reconfigurations = "reconfigurations"
    drains = "drains"
    replacements = "replacements"
    probes = "probes"
    suspicions = "suspicions"
    scores = "scores"
    checkpoints = "checkpoints"
    events = "events"
    cost = "cost"
    promises = "promises"
    lemons = "lemons"
    repairs = "repairs"
    rate = "rate"


class By(str, Enum):  # noqa: UP042 - as above
    """Groups for --by."""

    node = "node"
    component = "component"
    cause = "cause"
    kind = "kind"
    job = "job"
    owner = "owner"
    account = "account"
    of_partition = "partition"  # str has a method of that name
    cluster = "cluster"
    version = "version"
    torch = "torch"
    hardware = "hardware"
    week = "week"
    month = "month"


FAILURE_GROUPS = tuple(group.value for group in By)
"""Groups for failures. They are copied from `resihp.db.reading.fleet.GROUPS`, which is slow to import."""
COST_GROUPS = ("job", "owner", "account", "partition", "cluster", "week", "month")
"""Groups for costs. They are copied from `resihp.db.reading.costs.fleet_costs.COST_BY`, which is slow to import."""


@dataclass(frozen=True)
class HistoryQuery:
    """The options of a query, with times in UTC."""

    view: str
    by: str | None
    node: str | None
    rank: int | None
    since: datetime | None
    until: datetime | None
    limit: int | None
    """Most rows of the answer: the newest ones or, of a ranking, the first ones; None for all rows."""
    injected: bool
    user: str | None = None
    kind: str | None = None
    around: datetime | None = None
    having: str | None = None
    """A trait such as `driver=580.65.06`. The view `rate` compares the failure rate with this trait to the rate without
    it."""
    days: float | None = None
    all_jobs: bool = False
    """Whether the query is about all jobs."""
    price: float | None = None
    """Price of a GPU-hour, in any currency; None if not given."""
    flat: bool = False
    """Whether the answer has only the ledger's own columns, and no computed ones."""

    def has(self, option: str) -> bool:
        """Return whether the option was given."""
        value = getattr(self, option)
        return value is not None and value is not False

    @property
    def period(self) -> Literal["week", "month"] | None:
        """The unit of time by which rows are grouped; None for another group or no group."""
        if self.by == "week":
            return "week"
        if self.by == "month":
            return "month"
        return None

    def last(self, rows: list[Row]) -> list[Row]:
        """Return the last rows, at most `limit` of them."""
        return rows if self.limit is None else rows[-self.limit :]

    @property
    def shape(self) -> str:
        """Key of the columns on a terminal: the view, or the view with its group as `failures by node`, or
        `placements`.

        `placements` is the view of the devices of all jobs.
        """
        if self.view == "devices" and self.all_jobs:
            return "placements"
        return self.view if self.by is None else f"{self.view} by {self.by}"


@dataclass(frozen=True)
class Listing:
    """The answer to a query: its rows, their subject, and a footnote for the terminal."""

    columns: tuple[str, ...]
    rows: list[Row]
    subject: str
    total: int | None = None
    """Number of all rows, if only some were read; None if all were."""
    nodes: list[str] = field(default_factory=list)
    """Names of all known nodes; empty unless the query is about one node."""
    closing: str = ""
    clusters: list[str] = field(default_factory=list)
    """Names of the clusters by which names of nodes may be qualified."""

    def knows(self, node: str) -> bool:
        """Return whether the ledger contains this node."""
        from resihp.db.reading.naming import is_node

        return any(is_node(node, name, self.clusters) for name in self.nodes)
