"""`resihp history` and `resihp why`: list the ledger's records, of one job or of all, on a terminal or as data.

A *view* is a table of the ledger (`db.reading.tables.TABLES`) or computed from several tables: `cost`, `promises`,
`lemons`, and failures counted `--by` something. Only queries and prints; `db` computes the answers. Slow imports are
inside the functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import UsageError
from resihp.words import count_of
from wrapper.commands.options import command_of
from wrapper.output.answers import (
    SCHEMA,
    JobArgument,
    JsonOption,
    LedgerOption,
    console,
    message,
    moment,
    to_json,
    write_csv,
    write_parquet,
)
from wrapper.output.ledgers import attempts_here, from_all, opened

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from resihp.scheduler.explained.explanation import Explanation

Row = dict[str, Any]

COST_BY = ("job", "owner", "account", "partition", "cluster", "week", "month")
MAX_DAYS = 36_500
MAX_JOBS_NAMED = 5
"""Most jobs named in a message."""
DEFAULT_ROWS = 50
"""Rows on a terminal without --limit."""


MIN_JOBS_WITH_SPARES = 100
"""Fewest jobs, the newest ones, for which the view `spares` is computed on a terminal."""
SPARES_FOOTNOTE = (
    "assumptions: one more healthy spare node at each change of plan, the same losses and times of changes; savings as "
    "predicted by the planner, never faster than the healthy first plan; jobs that ended for lack of nodes do not count"
)
"""Footnote of the view `spares`."""


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


VIEWS_OF_ALL_JOBS = frozenset({History.jobs, History.lemons, History.repairs, History.rate})
"""Views that always cover all jobs."""
COMPUTED_VIEWS = frozenset(
    {"jobs", "cost", "decisions", "spares", "promises", "lemons", "repairs", "rate", "hosts", "placements"}
)
"""Views that are computed and not a table of the ledger."""


VIEWS_OF_NODES = frozenset({"lemons", "repairs", "hosts", "devices"})
"""Views that combine the records of a node from several ledgers."""


class By(str, Enum):  # noqa: UP042 - as above
    """Groups for --by: of failures up to `job`, of costs from `job` on."""

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

    @property
    def is_table(self) -> bool:
        return self.by is None and self.shape not in COMPUTED_VIEWS

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


def register(app: typer.Typer) -> None:
    """Add `resihp history` and `resihp why` to the command line."""
    app.command()(command_of(HistoryOptions, history))
    app.command()(why)


@dataclass(frozen=True, kw_only=True)
class HistoryOptions:
    """Options given on the command line."""

    view: Annotated[History, typer.Argument(help="View to list.", metavar="VIEW")]
    job: JobArgument = None
    job_option: Annotated[str | None, typer.Option("--job", help="Same as JOB.", show_default=False)] = None
    all_jobs: Annotated[bool, typer.Option("--all", help="All jobs of --ledger, or of this home.")] = False
    by: Annotated[
        By | None,
        typer.Option(
            help="Count failures by node, component, cause, kind, job; cost by job, owner, (Slurm) account, "
            "partition, cluster, week, month.",
            show_default=False,
        ),
    ] = None
    node: Annotated[str | None, typer.Option(help="Only this node.", show_default=False)] = None
    rank: Annotated[int | None, typer.Option(help="Scores: only this rank.", show_default=False)] = None
    since: Annotated[str | None, typer.Option(help="Time (ISO, UTC) or age (30m, 2h, 1d).", show_default=False)] = None
    until: Annotated[str | None, typer.Option(help="Likewise, the end (exclusive).", show_default=False)] = None
    limit: Annotated[
        int | None, typer.Option(help="Most rows, the newest.", show_default="50 on a terminal", min=1)
    ] = None
    user: Annotated[str | None, typer.Option(help="With --all: only jobs of this user.", show_default=False)] = None
    kind: Annotated[
        str | None, typer.Option(help="Events, failures or suspicions of this kind.", show_default=False)
    ] = None
    around: Annotated[str | None, typer.Option(help="Rate: before and after this time.", show_default=False)] = None
    having: Annotated[
        str | None, typer.Option(help="Rate: with TRAIT=VALUE and without, as driver=580.65.06.", show_default=False)
    ] = None
    days: Annotated[float | None, typer.Option(help="Rate: days to cover.", show_default="30", min=0.01)] = None
    injected: Annotated[bool, typer.Option("--injected", help="Lemons: count injected faults, too.")] = False
    price: Annotated[
        float | None, typer.Option(help="Cost: price of a GPU-hour, for a money column.", show_default=False, min=0.0)
    ] = None
    as_json: JsonOption = False
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False
    parquet: Annotated[Path | None, typer.Option(help="Write a Parquet file.", show_default=False)] = None
    ledger: LedgerOption = None


def history(options: HistoryOptions) -> None:
    """List the ledger's records of a job, or of all jobs.

    VIEW: jobs, failures, nodes, hosts (hardware and software of nodes, with
    changes), devices (with --all: nodes that each one was in), workers,
    iterations, plans, reconfigurations, drains, replacements, probes, suspicions
    (of slowness and silence, with outcomes), scores (samples of each rank's time
    over its healthy time, and of the evidence that it is slow), checkpoints,
    events; decisions (cause, candidates and outcome of each); spares (savings of
    one more spare node, by the planner); cost (use of time, in GPU-hours),
    promises (gains that plans promised, and kept), lemons (nodes that fail more
    than others), repairs (parts that failed this week and were not repaired
    since), rate (failures per 1,000 GPU-days, --around a date or --having a
    trait).

    Example: resihp history failures --all --by node --since 30d
    """
    outputs = options.as_json + options.as_csv + (options.parquet is not None)
    if outputs > 1:
        raise UsageError("history: --json, --csv and --parquet exclude each other; choose one")
    job, job_option = options.job, options.job_option
    if job is not None and job_option is not None and job != job_option:
        raise UsageError(f"history: JOB {job} and --job {job_option} differ; name one")
    job = job or job_option
    if options.all_jobs and job is not None:
        raise UsageError(f"history: JOB {job} and --all exclude each other; leave one out")
    query = HistoryQuery(
        view=options.view.value,
        by=None if options.by is None else options.by.value,
        node=options.node,
        rank=options.rank,
        since=moment(options.since),
        until=moment(options.until),
        limit=DEFAULT_ROWS if options.limit is None and not outputs else options.limit,
        injected=options.injected,
        user=options.user,
        kind=options.kind,
        around=moment(options.around),
        having=options.having,
        days=options.days,
        all_jobs=options.all_jobs,
        price=options.price,
        flat=options.as_csv or options.parquet is not None,
    )
    all_jobs = options.all_jobs or options.view in VIEWS_OF_ALL_JOBS
    _check(query, all_jobs)
    if all_jobs:
        answer = _of_all(query, job, options.ledger)
    else:
        with opened(job, options.ledger) as (reader, row):
            others = attempts_here(options.ledger, row["run"]) if query.view == "cost" else []
            answer = _of_one(query, reader, row, others, options.ledger)
    if options.node is not None and not answer.rows and not answer.knows(options.node):
        from db.reading.naming import nearest

        raise UsageError(f"node {options.node}: not in {answer.subject}{nearest(options.node, answer.nodes)}")
    _write(options, query, answer)


def _write(options: HistoryOptions, query: HistoryQuery, answer: Listing) -> None:
    if options.parquet is not None:
        from db.reading.queries import as_frame

        frame = as_frame(answer.rows, answer.columns, query.view if query.is_table else None)
        write_parquet(frame, options.parquet, f"{answer.subject}: {count_of(len(answer.rows), 'row')}")
    elif options.as_json:
        print(to_json({"schema": SCHEMA, "rows": answer.rows}))
    elif options.as_csv:
        write_csv(answer.columns, answer.rows)
    elif not answer.rows:
        message(f"{answer.subject}: no {'node in use lately' if query.view == 'lemons' else query.view}")
    else:
        _show(query, answer)


def why(
    iteration: Annotated[int, typer.Argument(help="A committed iteration.")],
    job: JobArgument = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Explain why an iteration took as long as it did.

    Example: resihp why 37 local-3
    """
    from db.reading import queries
    from db.reading.plans import plan_rows

    with opened(job, ledger) as (reader, row):
        reasons = queries.why(reader, row, iteration)
        plans = plan_rows.plans_until(reader, row["id"], reasons.epoch)
        explained = reader.explanations(row["id"], plans).get(reasons.epoch)
    if as_json:
        import msgspec

        content = {"schema": SCHEMA, "job": row["name"], **msgspec.structs.asdict(reasons)}
        print(to_json(content | {"explanation": _explanation(explained)}))
    else:
        from rich.text import Text

        from wrapper.output.render import literal

        screen = console()
        for number, sentence in enumerate(reasons.verdict):
            screen.print(Text(literal(sentence if number == 0 else f"- {sentence}")), soft_wrap=False)
        if explained is not None:
            from wrapper.output.explanations import sentences

            screen.print(Text(f"its plan, of epoch {reasons.epoch}:"), soft_wrap=False)
            for about, words in sentences(explained):
                screen.print(Text(literal(f"- {about}: {words}")), soft_wrap=False)


# --- queries --------------------------------------------------------------------------------------------------------


def _check(query: HistoryQuery, all_jobs: bool) -> None:
    """Raise UsageError for options that the view does not have."""
    view = query.view
    if query.by is not None:
        if view not in ("failures", "cost"):
            raise UsageError(f"history {view}: --by is for failures and cost; leave it out")
        if view == "cost" and query.by not in COST_BY:
            raise UsageError(f"history {view}: unknown --by {query.by}; choose one of {', '.join(COST_BY)}")
    if query.price is not None and view != "cost":
        raise UsageError(f"history {view}: --price is for cost; leave it out")
    if view == "rate" and (query.around is None) == (query.having is None):
        raise UsageError("history rate: needs --around TIME or --having TRAIT=VALUE")
    if view != "rate" and (query.around, query.having, query.days) != (None, None, None):
        raise UsageError(f"history {view}: --around, --having and --days are for rate; leave them out")
    if query.days is not None and not 0.0 < query.days <= MAX_DAYS:
        raise UsageError(f"history rate: --days {query.days:g}: at most {MAX_DAYS:,}")
    if query.user is not None and (not all_jobs or view in ("lemons", "repairs", "promises", "spares", "hosts")):
        raise UsageError(f"history {view}: --user needs a view of many jobs; use it with --all, or leave it out")
    if query.kind is not None and (not query.is_table or query.by is not None or view == "iterations"):
        raise UsageError(f"history {view}: has no kinds; leave --kind out")
    if view in ("jobs", "cost", "decisions", "spares", "promises", "rate") and query.node is not None:
        raise UsageError(f"history {view}: has no nodes; leave --node out")
    if query.rank is not None and view != "scores":
        raise UsageError(f"history {view}: --rank is for scores; leave it out")
    if view in ("scores", "decisions") and all_jobs:
        raise UsageError(f"history {view}: shows one job at a time; name it instead of --all")
    has_period = query.since is not None or query.until is not None
    if has_period and (
        view in ("lemons", "scores", "rate") or (view in ("promises", "cost", "spares") and not all_jobs)
    ):
        raise UsageError(f"history {view}: covers all the time; leave --since and --until out")
    if query.injected and view != "lemons":
        raise UsageError(f"history {view}: --injected is for lemons; leave it out")
    if view == "iterations" and all_jobs and query.limit is None:
        raise UsageError("history iterations --all: may be millions of rows; set --limit")


def _period(query: HistoryQuery) -> Any:
    return query.by if query.by in ("week", "month") else None


def _costs(
    query: HistoryQuery, accounts: Sequence[tuple[Row, Any]], subject: str, ledger: str | None, idle: str = ""
) -> Listing:
    """Return costs by cause or by group, with totals and idle GPUs in the footnote.

    Jobs whose stored costs are malformed are named on stderr.
    """
    from db.reading import queries
    from db.reading.costs import fleet_costs
    from db.reading.costs.stored_accounts import is_malformed

    malformed = list(dict.fromkeys(job["name"] for job, _ in accounts if is_malformed(job)))
    if malformed:
        from db.engine import masked

        where = "" if ledger is None or ledger == "sqlite" else f" --ledger {masked(ledger)}"
        repair = f"resihp db upgrade{where}" if where else f"resihp db upgrade {malformed[0]}"
        names = f"{', '.join(malformed[:MAX_JOBS_NAMED])}{', ...' if len(malformed) > MAX_JOBS_NAMED else ''}"
        message(
            f"warning: job{'s' * (len(malformed) > 1)} {names}: stored costs are malformed; "
            f"computed from the rows instead; {repair} stores them again"
        )
    sums = [account for _, account in accounts]
    by: Any = query.by
    rows = fleet_costs.cost_rows(sums, query.price) if by is None else fleet_costs.cost_by(by, accounts, query.price)
    columns, closing = queries.priced(query.shape, query.price), _cost_lines(sums, query.price)
    closing += f"\n{line}" if (line := idle or _idle_jobs(accounts)) else ""
    return Listing(columns, rows[: query.limit], subject, len(rows), closing=closing)


def _idle_jobs(accounts: Sequence[tuple[Row, Any]]) -> str:
    """Return a line naming the jobs with idle GPUs, the costliest first; empty for none."""
    from wrapper.commands.history.tables import amount

    hours: dict[tuple[str, str], float] = {}
    for job, account in accounts:  # a job cut into periods has several accounts
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


def _of_one(query: HistoryQuery, reader: Reader, job: Row, others: Sequence[Row], ledger: str | None) -> Listing:
    from db.reading import fleet, hardware, queries
    from db.reading.costs import fleet_costs
    from db.reading.plans import plan_rows

    subject = f"job {job['name']}"
    times: dict[str, Any] = {"since": query.since, "until": query.until}
    node_names = reader.nodes(job["id"]) if query.node is not None else []
    if query.view == "cost":
        from wrapper.output.idle_gpus import IdleGpus
        from wrapper.output.job_history import JobHistory

        accounts = fleet_costs.costs_of(reader, job, period=_period(query), others=others)
        return _costs(query, accounts, subject, ledger, IdleGpus(JobHistory.of_ledger(reader, job)).line())
    if query.view == "promises":
        rows = plan_rows.promises_rows(reader, job["id"])
        return Listing(queries.COLUMNS["promises"], rows[-query.limit :] if query.limit else rows, subject, len(rows))
    if query.view == "spares":
        rows = plan_rows.spares_rows(reader, job)
        return Listing(queries.COLUMNS["spares"], rows, subject, 1, closing=SPARES_FOOTNOTE)
    if query.view == "decisions":
        rows = plan_rows.decisions_rows(reader, job["id"], **times)
        return Listing(queries.COLUMNS["decisions"], rows[-query.limit :] if query.limit else rows, subject, len(rows))
    if query.by is not None:
        counted = fleet.failures_by(reader, query.by, job["id"], node=query.node, **times)  # type: ignore[arg-type]
        rows = fleet.joined(query.by, counted)  # type: ignore[arg-type]
        return Listing(queries.COLUMNS[query.shape], rows[: query.limit], subject, len(rows), node_names)
    if query.view == "hosts":
        rows = _stays(query, hardware.stays(reader, job["id"]), job["id"])
        return Listing(
            queries.COLUMNS["hosts"], rows[-query.limit :] if query.limit else rows, subject, len(rows), node_names
        )
    rows = reader.rows(
        query.view, job["id"], node=query.node, rank=query.rank, kind=query.kind, last=query.limit, **times
    )
    if query.view == "plans" and not query.flat:
        explained = reader.explanations(job["id"], rows)
        rows = [row | {"explanation": _explanation(explained.get(row["epoch"]))} for row in rows]
    total = None
    if query.node is None and query.rank is None and query.kind is None and len(rows) == query.limit:
        total = reader.count(query.view, job["id"], **times)
    return Listing(queries.COLUMNS[query.view], rows, subject, total, node_names)


def _stays(query: HistoryQuery, rows: list[Row], job_id: int | None = None, clusters: Sequence[str] = ()) -> list[Row]:
    """Return the queried stays, each with its changes since the previous stay, even if that one was not queried."""
    from db.reading import hardware
    from db.reading.naming import is_node

    changes = hardware.told_changes(rows)
    if job_id is not None:
        changes = [row for row in changes if row["job_id"] == job_id]
    since, until = query.since or datetime.min.replace(tzinfo=UTC), query.until or datetime.max.replace(tzinfo=UTC)
    return [
        {name: value for name, value in row.items() if name != "job_id"}
        for row in changes
        if since <= row["joined_at"] < until and is_node(query.node, row["node"], clusters)
    ]


def _explanation(explained: Explanation | None) -> Row | None:
    if explained is None:
        return None
    from resihp.scheduler.explained.explanation import as_json

    return as_json(explained)


def _of_all(query: HistoryQuery, job: str | None, ledger: str | None) -> Listing:
    """Answer a query about all jobs: of the named ledger, of the ledger of `job`, or of every ledger of this home."""
    from db.reading import fleet, hardware, queries
    from db.reading.costs import fleet_costs
    from db.reading.tables import OF_JOB, TABLES

    times: dict[str, Any] = {"since": query.since, "until": query.until}
    node_names: list[str] = []
    clusters: list[str] = []
    elsewhere = _clusters_here(ledger) if job is None and _names_nodes(query) else set()

    def ask(question: Callable[[Reader], list[Any]]) -> list[Any]:
        """Return the answers of all ledgers."""

        def ask_ledger(reader: Reader) -> list[Any]:
            reader.other_clusters = elsewhere
            if query.node is not None:
                node_names.extend(reader.nodes(None))
                clusters.extend(reader.clusters())
            return question(reader)

        if job is not None:
            with opened(job, ledger) as (reader, _):
                return ask_ledger(reader)
        return [row for rows in from_all(ledger, ask_ledger) for row in rows]

    subject = "all jobs"
    if query.view == "cost":
        others = attempts_here(ledger)
        accounts = ask(
            lambda reader: fleet_costs.accounts(reader, user=query.user, **times, period=_period(query), others=others)
        )
        return _costs(query, sorted(accounts, key=lambda pair: pair[0]["started_at"], reverse=True), subject, ledger)
    if query.view in ("jobs", "lemons", "repairs", "rate", "promises", "spares"):
        rows = _computed(query, ask, clusters)
        closing = _which_spares(query, len(rows)) if query.view == "spares" else ""
        columns = (*(OF_JOB if query.view == "promises" else ()), *queries.COLUMNS[query.view])
        return Listing(columns, rows[: query.limit], subject, len(rows), node_names, closing, clusters)
    if query.by is not None:
        by: Any = query.by
        asks = {"node": query.node, "user": query.user, **times}
        rows = fleet.joined(by, ask(lambda reader: fleet.failures_by(reader, by, **asks)))
        return Listing(queries.COLUMNS[query.shape], rows[: query.limit], subject, len(rows), node_names, "", clusters)
    if query.view == "hosts":
        rows = _stays(query, ask(lambda reader: hardware.stays(reader, node=query.node)), clusters=clusters)
        return Listing(
            queries.COLUMNS["hosts"], rows[-(query.limit or len(rows)) :], subject, len(rows), node_names, "", clusters
        )
    if query.view == "devices":
        device_rows = ask(lambda reader: reader.rows("devices", None, node=query.node, user=query.user, **times))
        rows = hardware.placed(device_rows)
        return Listing(
            queries.COLUMNS["placements"], _newest(rows, query.limit), subject, len(rows), node_names, "", clusters
        )
    time = TABLES[query.view].time
    rows = sorted(_newest_of_all(query, ask), key=lambda row: row[time])
    columns = (*OF_JOB, *queries.COLUMNS[query.view])
    return Listing(columns, rows[-(query.limit or len(rows)) :], subject, None, node_names, "", clusters)


def _newest_of_all(query: HistoryQuery, ask: Callable[[Callable[[Reader], list[Any]]], list[Any]]) -> list[Any]:
    """Return the newest rows of each ledger, at most as many as are shown."""
    from db.reading.iterations.newest import newest_iterations

    times: dict[str, Any] = {"since": query.since, "until": query.until}
    if query.view == "iterations":
        if query.node is not None:
            raise UsageError("history iterations: has no nodes; leave --node out")
        limit = query.limit or DEFAULT_ROWS
        return ask(lambda reader: newest_iterations(reader, limit, user=query.user, **times))
    asks = {"node": query.node, "user": query.user, "kind": query.kind, **times}
    return ask(lambda reader: reader.rows(query.view, None, last=query.limit, **asks))


def _clusters_here(ledger: str | None) -> set[str]:
    """Return the clusters of all ledgers of this home; none if a ledger was named."""
    if ledger not in (None, "sqlite"):
        return set()
    return {name for clusters in from_all(ledger, lambda reader: reader.clusters(), quiet=True) for name in clusters}


def _newest(placements: list[Any], limit: int | None) -> list[Any]:
    """Return the placements of devices that were seen last, ordered by device."""
    newest = sorted(placements, key=lambda row: row["last_seen"])[-limit:] if limit else placements
    return sorted(newest, key=lambda row: (row["uuid"], row["first_seen"], row["node"], row["device"]))


def _which_spares(query: HistoryQuery, jobs_found: int) -> str:
    """Return the footnote on the figures of spares, and on the jobs that they cover."""
    max_jobs = _jobs_with_spares(query)
    if max_jobs is None or jobs_found < max_jobs:
        return SPARES_FOOTNOTE
    return f"{SPARES_FOOTNOTE}\nthe newest {max_jobs} jobs with a change of plan; more with --limit, all with --json"


def _names_nodes(query: HistoryQuery) -> bool:
    """Return whether the answer names nodes, so that equal names of different clusters must be distinguished."""
    by_host = query.having is not None and query.having.startswith("host=")
    return query.node is not None or query.by == "node" or by_host or query.view in VIEWS_OF_NODES


def _jobs_with_spares(query: HistoryQuery) -> int | None:
    """Return for how many jobs spares are computed, as the planner decides again for each; None for all."""
    return None if query.limit is None else max(query.limit, MIN_JOBS_WITH_SPARES)


def _computed(
    query: HistoryQuery, ask: Callable[[Callable[[Reader], list[Any]]], list[Any]], clusters: Sequence[str]
) -> list[Row]:
    """Return the rows of a view computed over many jobs. Raises UsageError for an unknown trait.

    `clusters`: those of the ledgers that were queried.
    """
    from db.reading import fleet, rates
    from db.reading.naming import is_node
    from db.reading.plans import plan_rows

    if query.view == "lemons":
        now = datetime.now(UTC)
        record = fleet.NodeRecord()

        def read(reader: Reader) -> list[Row]:
            record.read(reader, fleet.horizon(now), query.injected)
            return []

        ask(read)
        return [row for row in fleet.lemons(record, now) if is_node(query.node, row["node"], clusters)]
    if query.view == "promises":
        max_rows = query.limit or DEFAULT_ROWS
        rows = ask(lambda reader: plan_rows.promises_of_all(reader, max_rows, since=query.since, until=query.until))
        return sorted(rows, key=lambda row: (row["started_at"], row["epoch"]), reverse=True)
    if query.view == "spares":
        rows = ask(
            lambda reader: plan_rows.spares_rows(
                reader, since=query.since, until=query.until, jobs=_jobs_with_spares(query)
            )
        )
        return sorted(rows, key=lambda row: (-row["saved_gpu_hours"], row["started_at"]))
    if query.view == "jobs":
        limits: dict[str, Any] = {"user": query.user, "since": query.since, "until": query.until, "last": query.limit}
        return sorted(ask(lambda reader: reader.jobs(**limits)), key=lambda row: row["started_at"], reverse=True)
    if query.view == "repairs":
        rows = rates.repairs_together(ask(lambda reader: rates.repairs(reader, query.since, query.until)))
        return [row for row in rows if is_node(query.node, row["node"], clusters)]
    days = query.days or rates.DEFAULT_DAYS
    if query.around is not None:
        around = query.around
        return rates.together(ask(lambda reader: rates.rate_around(reader, around, days, query.user)))
    trait, _, value = (query.having or "").partition("=")
    if trait not in rates.TRAITS or not value:
        traits = ", ".join(rates.TRAITS)
        raise UsageError(f"history rate: --having {query.having}: must be TRAIT=VALUE; traits are {traits}")
    now = datetime.now(UTC)
    return rates.together(ask(lambda reader: rates.rate_with(reader, trait, value, days, now, query.user)))


# --- terminal -------------------------------------------------------------------------------------------------------


def _show(query: HistoryQuery, answer: Listing) -> None:
    from wrapper.commands.history.tables import history_table
    from wrapper.output.render import literal
    from wrapper.output.tables import show

    screen = console()
    show(screen, *history_table(query.shape, answer.rows))
    if answer.closing:
        screen.print(literal(answer.closing))
    if query.limit is not None and len(answer.rows) == query.limit and answer.total != len(answer.rows):
        order = "newest" if query.is_table or query.view in ("decisions", "promises", "hosts", "devices") else "first"
        total = "" if answer.total is None else f" of {answer.total:,}"
        message(f"{answer.subject}: the {order} {query.limit}{total} {query.view}; more with --limit, all with --json")


def _cost_lines(accounts: Sequence[Any], price: float | None) -> str:
    """Return the footnote of costs: losses by failures, goodput, and rates of failures, also of hardware alone."""
    from db.reading.costs.cost_accounts import added
    from wrapper.commands.history.tables import amount
    from wrapper.output.render import duration, percent

    total = added(accounts)
    share = percent(total.failure_gpu_hours / total.gpu_hours) if total.gpu_hours > 0 else "-"
    line = f"failures cost {amount(total.failure_gpu_hours)} of {amount(total.gpu_hours)} GPU-hours ({share})"
    if price is not None:
        line += f", {amount(total.failure_gpu_hours * price)} of {amount(total.gpu_hours * price)} in money"
    if (idle := total.lost_gpu_hours["idle"]) > 0:
        line += f"\nof that, idle GPUs {amount(idle)} ({percent(idle / total.gpu_hours)})"
    if total.goodput is None:
        line += "\nno iteration was committed: the use of time is unknown for a script without resihp.Trainer"
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
