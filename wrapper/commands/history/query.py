"""What a call of `resihp history` asks for, and what it gets: views, groups, a query, and the listing that answers it.

Holds values only: `views` has what each view takes, and `one_job` and `all_jobs` read the answers. Never imports the
ledger. Used by all modules of this folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Literal

Row = dict[str, Any]

DEFAULT_ROWS = 50
"""Rows on a terminal without --limit."""


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
"""Groups of failures: a copy of `db.reading.fleet.GROUPS`, which is slow to import."""
COST_GROUPS = ("job", "owner", "account", "partition", "cluster", "week", "month")
"""Groups of costs: a copy of `db.reading.costs.fleet_costs.COST_BY`."""


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
    """Most rows: the newest ones, or the first ones of a ranking."""
    injected: bool
    user: str | None = None
    kind: str | None = None
    around: datetime | None = None
    having: str | None = None
    """A trait such as `driver=580.65.06`; its failure rate is compared with that of all others."""
    days: float | None = None
    all_jobs: bool = False
    """Whether all jobs are queried."""
    price: float | None = None
    """Price of a GPU-hour, in any currency."""
    flat: bool = False
    """Only the ledger's own columns, without computed ones."""

    def has(self, option: str) -> bool:
        """Return whether the option was given."""
        value = getattr(self, option)
        return value is not None and value is not False

    @property
    def period(self) -> Literal["week", "month"] | None:
        """Unit of time that rows are grouped by."""
        if self.by == "week":
            return "week"
        if self.by == "month":
            return "month"
        return None

    def last(self, rows: list[Row]) -> list[Row]:
        """Return the last rows, at most as many as the limit."""
        return rows if self.limit is None else rows[-self.limit :]

    @property
    def shape(self) -> str:
        """Key of its columns: the view, a view with its group such as `failures by node`, or `placements`.

        `placements` are the devices of all jobs.
        """
        if self.view == "devices" and self.all_jobs:
            return "placements"
        return self.view if self.by is None else f"{self.view} by {self.by}"


@dataclass(frozen=True)
class Listing:
    """Rows of an answer, their subject, and a footnote for the terminal."""

    columns: tuple[str, ...]
    rows: list[Row]
    subject: str
    total: int | None = None
    """Number of all rows, if fewer were queried."""
    nodes: list[str] = field(default_factory=list)
    """Names of known nodes, for a query about one node."""
    closing: str = ""
    clusters: list[str] = field(default_factory=list)
    """Clusters that qualify names of nodes."""

    def knows(self, node: str) -> bool:
        """Return whether the ledger has this node."""
        from db.reading.naming import is_node

        return any(is_node(node, name, self.clusters) for name in self.nodes)
