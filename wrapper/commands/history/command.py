"""`resihp history` and `resihp why`: what the ledger holds, of one job or of all, on a terminal or as data.

A *view* is a table of the ledger (`db.reading.tables.TABLES`) or something reckoned from several: `cost`, `promises`,
`lemons`, and failures counted `--by` something. Only asks and shows; `db` knows the answers. Everything that takes time
to import is imported in the functions.
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
MOST_DAYS = 36_500
MOST_NAMED = 5
"""Jobs in a warning."""
SHOWN = 50
"""Rows on a terminal, if no --limit says otherwise."""


SPARES_OF = 100
"""Jobs at least whose spares are reckoned for a terminal, the newest."""
SPARES = (
    "assumed: one healthy spare node more at each change of plan, the same losses and times of changes; the planner's "
    "share of measured seconds, never faster than the first plan when all is well; jobs that ended for want of nodes "
    "are not counted"
)


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


OF_ALL = frozenset({History.jobs, History.lemons, History.repairs, History.rate})
"""Views that are of many jobs by themselves."""
RECKONED = frozenset(
    {"jobs", "cost", "decisions", "spares", "promises", "lemons", "repairs", "rate", "hosts", "placements"}
)
"""Those that are no table of the ledger's."""


OF_NODES = frozenset({"lemons", "repairs", "hosts", "devices"})
"""Views that join what several ledgers tell of a node."""


class By(str, Enum):  # noqa: UP042 - as above
    """What failures are counted by (up to `job`), and what costs are told by (from there on)."""

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
class Asked:
    """What was asked for, its times in UTC."""

    view: str
    by: str | None
    node: str | None
    rank: int | None
    since: datetime | None
    until: datetime | None
    limit: int | None
    """Rows at most: the newest, or the first of those that are ranked."""
    injected: bool
    user: str | None = None
    kind: str | None = None
    around: datetime | None = None
    having: str | None = None
    """`driver=580.65.06`, whose rate is asked for against all others'."""
    days: float | None = None
    every: bool = False
    """Of all jobs."""
    price: float | None = None
    """Of a GPU-hour, in whatever money."""
    flat: bool = False
    """As a table of the ledger's columns alone, with nothing worked out."""

    @property
    def is_table(self) -> bool:
        return self.by is None and self.shape not in RECKONED

    @property
    def shape(self) -> str:
        """The name of its columns: of a table's rows, or `failures by node`; `placements` of devices of all jobs."""
        if self.view == "devices" and self.every:
            return "placements"
        return self.view if self.by is None else f"{self.view} by {self.by}"


@dataclass(frozen=True)
class Listing:
    """Rows, whose they are, and a line beneath them for a terminal."""

    columns: tuple[str, ...]
    rows: list[Row]
    whose: str
    total: int | None = None
    """Rows that there are, where not all were asked for."""
    nodes: list[str] = field(default_factory=list)
    """Known ones, where one was asked for of which there is nothing."""
    closing: str = ""
    clusters: list[str] = field(default_factory=list)
    """By which nodes are named."""

    def knows(self, node: str) -> bool:
        from db.reading.naming import is_node

        return any(is_node(node, name, self.clusters) for name in self.nodes)


def register(app: typer.Typer) -> None:
    """Add `resihp history` and `resihp why` to the command line."""
    app.command()(command_of(HistoryOptions, history))
    app.command()(why)


@dataclass(frozen=True, kw_only=True)
class HistoryOptions:
    """What the command line said."""

    view: Annotated[History, typer.Argument(help="What to list.", metavar="VIEW")]
    job: JobArgument = None
    job_option: Annotated[str | None, typer.Option("--job", help="The same as JOB.", show_default=False)] = None
    every: Annotated[bool, typer.Option("--all", help="Of all jobs: of --ledger, or of every job here.")] = False
    by: Annotated[
        By | None,
        typer.Option(
            help="Count failures by node, component, cause, kind, job; cost by job, owner, (Slurm) account, "
            "partition, cluster, week, month.",
            show_default=False,
        ),
    ] = None
    node: Annotated[str | None, typer.Option(help="Only this node's.", show_default=False)] = None
    rank: Annotated[int | None, typer.Option(help="Of scores, only this rank's.", show_default=False)] = None
    since: Annotated[str | None, typer.Option(help="Time (ISO, UTC) or age (30m, 2h, 1d).", show_default=False)] = None
    until: Annotated[str | None, typer.Option(help="The same, as the end (exclusive).", show_default=False)] = None
    limit: Annotated[
        int | None, typer.Option(help="Rows at most, the newest.", show_default="50 on a terminal", min=1)
    ] = None
    user: Annotated[str | None, typer.Option(help="With --all: only this user's jobs.", show_default=False)] = None
    kind: Annotated[
        str | None, typer.Option(help="Events, failures or suspicions of this kind.", show_default=False)
    ] = None
    around: Annotated[str | None, typer.Option(help="Rate: before and after this time.", show_default=False)] = None
    having: Annotated[
        str | None, typer.Option(help="Rate: with TRAIT=VALUE and without, as driver=580.65.06.", show_default=False)
    ] = None
    days: Annotated[float | None, typer.Option(help="Rate: days looked at.", show_default="30", min=0.01)] = None
    injected: Annotated[bool, typer.Option("--injected", help="Lemons: count faults on purpose, too.")] = False
    price: Annotated[
        float | None, typer.Option(help="Cost: of a GPU-hour, for a column of money.", show_default=False, min=0.0)
    ] = None
    as_json: JsonOption = False
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False
    parquet: Annotated[Path | None, typer.Option(help="Write a Parquet file.", show_default=False)] = None
    ledger: LedgerOption = None


def history(options: HistoryOptions) -> None:
    """List what the ledger holds of a job, or of all.

    VIEW: jobs, failures, nodes, hosts (what nodes were made of, and what changed
    on them), devices (with --all: where each one was), workers, iterations,
    plans, reconfigurations, drains, replacements, probes, suspicions (of slowness
    and silence, also those that came to nothing), scores (each rank's time over its
    healthy time, and the evidence against it, now and then), checkpoints, events;
    decisions (what called for each, what was possible, what came of it); spares
    (what one more spare node would have saved, by the planner);
    cost (where the time went, in GPU-hours), promises (what plans promised and
    kept), lemons (nodes that fail more than others), repairs (what failed this
    week and was not mended since), rate (failures in 1,000 GPU-days, --around a
    date or --having something).

    Example: resihp history failures --all --by node --since 30d
    """
    outputs = options.as_json + options.as_csv + (options.parquet is not None)
    if outputs > 1:
        raise UsageError("history: --json, --csv and --parquet exclude each other; choose one")
    job, job_option = options.job, options.job_option
    if job is not None and job_option is not None and job != job_option:
        raise UsageError(f"history: JOB {job} and --job {job_option} differ; name one")
    job = job or job_option
    if options.every and job is not None:
        raise UsageError(f"history: JOB {job} and --all exclude each other; leave one out")
    asked = Asked(
        view=options.view.value,
        by=None if options.by is None else options.by.value,
        node=options.node,
        rank=options.rank,
        since=moment(options.since),
        until=moment(options.until),
        limit=SHOWN if options.limit is None and not outputs else options.limit,
        injected=options.injected,
        user=options.user,
        kind=options.kind,
        around=moment(options.around),
        having=options.having,
        days=options.days,
        every=options.every,
        price=options.price,
        flat=options.as_csv or options.parquet is not None,
    )
    every = options.every or options.view in OF_ALL
    _check(asked, every)
    if every:
        answer = _of_all(asked, job, options.ledger)
    else:
        with opened(job, options.ledger) as (reader, row):
            others = attempts_here(options.ledger, row["run"]) if asked.view == "cost" else []
            answer = _of_one(asked, reader, row, others, options.ledger)
    if options.node is not None and not answer.rows and not answer.knows(options.node):
        from db.reading.naming import nearest

        raise UsageError(f"node {options.node}: not in {answer.whose}{nearest(options.node, answer.nodes)}")
    _write(options, asked, answer)


def _write(options: HistoryOptions, asked: Asked, answer: Listing) -> None:
    if options.parquet is not None:
        from db.reading.queries import as_frame

        found = as_frame(answer.rows, answer.columns, asked.view if asked.is_table else None)
        write_parquet(found, options.parquet, f"{answer.whose}: {count_of(len(answer.rows), 'row')}")
    elif options.as_json:
        print(to_json({"schema": SCHEMA, "rows": answer.rows}))
    elif options.as_csv:
        write_csv(answer.columns, answer.rows)
    elif not answer.rows:
        message(f"{answer.whose}: no {'node served lately' if asked.view == 'lemons' else asked.view}")
    else:
        _show(asked, answer)


def why(
    iteration: Annotated[int, typer.Argument(help="Of the iterations committed.")],
    job: JobArgument = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Tell why an iteration took as long as it did.

    Example: resihp why 37 local-3
    """
    from db.reading import queries

    with opened(job, ledger) as (reader, row):
        told = queries.why(reader, row, iteration)
        explained = reader.explanations(row["id"], queries.plans_until(reader, row["id"], told.epoch)).get(told.epoch)
    if as_json:
        import msgspec

        content = {"schema": SCHEMA, "job": row["name"], **msgspec.structs.asdict(told)}
        print(to_json(content | {"explanation": _explanation(explained)}))
    else:
        from rich.text import Text

        from wrapper.output.render import literal

        screen = console()
        for number, sentence in enumerate(told.verdict):
            screen.print(Text(literal(sentence if number == 0 else f"- {sentence}")), soft_wrap=False)
        if explained is not None:
            from wrapper.output.explanations import sentences

            screen.print(Text(f"its plan, of epoch {told.epoch}:"), soft_wrap=False)
            for about, words in sentences(explained):
                screen.print(Text(literal(f"- {about}: {words}")), soft_wrap=False)


# --- what was asked for ---------------------------------------------------------------------------------------------


def _check(asked: Asked, every: bool) -> None:
    """Raises UsageError for what the view cannot tell."""
    view = asked.view
    if asked.by is not None:
        if view not in ("failures", "cost"):
            raise UsageError(f"history {view}: --by is for failures and cost; leave it out")
        if view == "cost" and asked.by not in COST_BY:
            raise UsageError(f"history {view}: --by {asked.by}: has no such; give one of {', '.join(COST_BY)}")
    if asked.price is not None and view != "cost":
        raise UsageError(f"history {view}: --price is for cost; leave it out")
    if view == "rate" and (asked.around is None) == (asked.having is None):
        raise UsageError("history rate: give --around TIME, or --having TRAIT=VALUE")
    if view != "rate" and (asked.around, asked.having, asked.days) != (None, None, None):
        raise UsageError(f"history {view}: --around, --having and --days are for rate; leave them out")
    if asked.days is not None and not 0.0 < asked.days <= MOST_DAYS:
        raise UsageError(f"history rate: --days {asked.days:g}: at most {MOST_DAYS:,}")
    if asked.user is not None and (not every or view in ("lemons", "repairs", "promises", "spares", "hosts")):
        raise UsageError(f"history {view}: --user is for what is of many jobs; give it with --all, or leave it out")
    if asked.kind is not None and (not asked.is_table or asked.by is not None or view == "iterations"):
        raise UsageError(f"history {view}: has no kinds; leave --kind out")
    if view in ("jobs", "cost", "decisions", "spares", "promises", "rate") and asked.node is not None:
        raise UsageError(f"history {view}: has no nodes; leave --node out")
    if asked.rank is not None and view != "scores":
        raise UsageError(f"history {view}: --rank is for scores; leave it out")
    if view in ("scores", "decisions") and every:
        raise UsageError(f"history {view}: of one job at a time; name it instead of --all")
    timed = asked.since is not None or asked.until is not None
    if timed and (view in ("lemons", "scores", "rate") or (view in ("promises", "cost", "spares") and not every)):
        raise UsageError(f"history {view}: is of all the time; leave --since and --until out")
    if asked.injected and view != "lemons":
        raise UsageError(f"history {view}: --injected is for lemons; leave it out")
    if view == "iterations" and every and asked.limit is None:
        raise UsageError("history iterations --all: may be millions; say how many with --limit")


def _period(asked: Asked) -> Any:
    return asked.by if asked.by in ("week", "month") else None


def _costs(asked: Asked, found: Sequence[tuple[Row, Any]], whose: str, ledger: str | None, idle: str = "") -> Listing:
    """Costs by cause, or by whatever was asked for; what they came to in all beneath, and which GPUs were idle. Who has
    a kept figure that is none is named on stderr."""
    from db.reading import fleet, queries
    from db.reading.costs.cost_accounts import is_malformed

    odd = list(dict.fromkeys(job["name"] for job, _ in found if is_malformed(job)))
    if odd:
        from db.engine import masked

        where = "" if ledger is None or ledger == "sqlite" else f" --ledger {masked(ledger)}"
        mends = f"resihp db upgrade{where}" if where else f"resihp db upgrade {odd[0]}"
        names = f"{', '.join(odd[:MOST_NAMED])}{', ...' if len(odd) > MOST_NAMED else ''}"
        message(
            f"warning: job{'s' * (len(odd) > 1)} {names}: what was kept of the cost is no account; left out, and "
            f"reckoned from the rows; {mends} keeps it anew"
        )
    sums = [account for _, account in found]
    by: Any = asked.by
    rows = fleet.cost_rows(sums, asked.price) if by is None else fleet.cost_by(by, found, asked.price)
    columns, closing = queries.priced(asked.shape, asked.price), _cost_lines(sums, asked.price)
    closing += f"\n{line}" if (line := idle or _idle_jobs(found)) else ""
    return Listing(columns, rows[: asked.limit], whose, len(rows), closing=closing)


def _idle_jobs(found: Sequence[tuple[Row, Any]]) -> str:
    """Jobs that had GPUs which stood by, those that paid most for it first; empty for none."""
    from wrapper.commands.history.tables import amount

    hours: dict[tuple[str, str], float] = {}
    for job, account in found:  # of one that was cut, part by part
        which = job["name"], job["uuid"]
        hours[which] = hours.get(which, 0.0) + account.lost_gpu_hours["idle"]
    paid = sorted(((each, *which) for which, each in hours.items() if each > 0.0), reverse=True)
    if not paid:
        return ""
    alike = Counter(name for name, _ in hours)
    told = [
        f"{name if alike[name] == 1 else f'{name}, id {uuid[:8]}'} ({amount(each)} GPU-hours)"
        for each, name, uuid in paid[:MOST_NAMED]
    ]
    more = ", ..." if len(paid) > MOST_NAMED else ""
    return f"GPUs stood by in {len(paid)} of {len(hours)} jobs: {', '.join(told)}{more}"


def _of_one(asked: Asked, reader: Reader, job: Row, others: Sequence[Row], ledger: str | None) -> Listing:
    from db.reading import fleet, hardware, queries

    whose = f"job {job['name']}"
    times: dict[str, Any] = {"since": asked.since, "until": asked.until}
    known = reader.nodes(job["id"]) if asked.node is not None else []
    if asked.view == "cost":
        from wrapper.output.idle_gpus import of_ledger

        found = fleet.costs_of(reader, job, period=_period(asked), others=others)
        return _costs(asked, found, whose, ledger, of_ledger(reader, job).line())
    if asked.view == "promises":
        rows = queries.promises_rows(reader, job["id"])
        return Listing(queries.COLUMNS["promises"], rows[-asked.limit :] if asked.limit else rows, whose, len(rows))
    if asked.view == "spares":
        return Listing(queries.COLUMNS["spares"], queries.spares_rows(reader, job), whose, 1, closing=SPARES)
    if asked.view == "decisions":
        rows = queries.decisions_rows(reader, job["id"], **times)
        return Listing(queries.COLUMNS["decisions"], rows[-asked.limit :] if asked.limit else rows, whose, len(rows))
    if asked.by is not None:
        counted = fleet.failures_by(reader, asked.by, job["id"], node=asked.node, **times)  # type: ignore[arg-type]
        rows = fleet.joined(asked.by, counted)  # type: ignore[arg-type]
        return Listing(queries.COLUMNS[asked.shape], rows[: asked.limit], whose, len(rows), known)
    if asked.view == "hosts":
        rows = _stays(asked, hardware.stays(reader, job["id"]), job["id"])
        return Listing(queries.COLUMNS["hosts"], rows[-asked.limit :] if asked.limit else rows, whose, len(rows), known)
    rows = reader.rows(
        asked.view, job["id"], node=asked.node, rank=asked.rank, kind=asked.kind, last=asked.limit, **times
    )
    if asked.view == "plans" and not asked.flat:
        explained = reader.explanations(job["id"], rows)
        rows = [row | {"explanation": _explanation(explained.get(row["epoch"]))} for row in rows]
    total = None
    if asked.node is None and asked.rank is None and asked.kind is None and len(rows) == asked.limit:
        total = reader.count(asked.view, job["id"], **times)
    return Listing(queries.COLUMNS[asked.view], rows, whose, total, known)


def _stays(asked: Asked, rows: list[Row], job_id: int | None = None, clusters: Sequence[str] = ()) -> list[Row]:
    """Those asked for, with what changed since the stay before, whether that was asked for or not."""
    from db.reading import hardware
    from db.reading.naming import is_node

    found = hardware.told_changes(rows)
    if job_id is not None:
        found = [row for row in found if row["job_id"] == job_id]
    since, until = asked.since or datetime.min.replace(tzinfo=UTC), asked.until or datetime.max.replace(tzinfo=UTC)
    return [
        {name: value for name, value in row.items() if name != "job_id"}
        for row in found
        if since <= row["joined_at"] < until and is_node(asked.node, row["node"], clusters)
    ]


def _explanation(found: Explanation | None) -> Row | None:
    if found is None:
        return None
    from resihp.scheduler.explained.explanation import as_json

    return as_json(found)


def _of_all(asked: Asked, job: str | None, ledger: str | None) -> Listing:
    """Of all jobs of the ledger named, or of that of `job`, or of every ledger here."""
    from db.reading import fleet, hardware, queries
    from db.reading.tables import OF_JOB, TABLES

    times: dict[str, Any] = {"since": asked.since, "until": asked.until}
    names: list[str] = []
    clusters: list[str] = []
    elsewhere = _clusters_here(ledger) if job is None and _tells_nodes(asked) else set()

    def ask(of: Callable[[Reader], list[Any]]) -> list[Any]:
        """What all ledgers answer."""

        def one(reader: Reader) -> list[Any]:
            reader.other_clusters = elsewhere
            if asked.node is not None:
                names.extend(reader.nodes(None))
                clusters.extend(reader.clusters())
            return of(reader)

        if job is not None:
            with opened(job, ledger) as (reader, _):
                return one(reader)
        return [row for rows in from_all(ledger, one) for row in rows]

    whose = "all jobs"
    if asked.view == "cost":
        others = attempts_here(ledger)
        found = ask(
            lambda reader: fleet.accounts(reader, user=asked.user, **times, period=_period(asked), others=others)
        )
        return _costs(asked, sorted(found, key=lambda pair: pair[0]["started_at"], reverse=True), whose, ledger)
    if asked.view in ("jobs", "lemons", "repairs", "rate", "promises", "spares"):
        rows = _reckoned(asked, ask, clusters)
        closing = _which_spares(asked, len(rows)) if asked.view == "spares" else ""
        columns = (*(OF_JOB if asked.view == "promises" else ()), *queries.COLUMNS[asked.view])
        return Listing(columns, rows[: asked.limit], whose, len(rows), names, closing, clusters)
    if asked.by is not None:
        by: Any = asked.by
        asks = {"node": asked.node, "user": asked.user, **times}
        rows = fleet.joined(by, ask(lambda reader: fleet.failures_by(reader, by, **asks)))
        return Listing(queries.COLUMNS[asked.shape], rows[: asked.limit], whose, len(rows), names, "", clusters)
    if asked.view == "hosts":
        rows = _stays(asked, ask(lambda reader: hardware.stays(reader, node=asked.node)), clusters=clusters)
        return Listing(
            queries.COLUMNS["hosts"], rows[-(asked.limit or len(rows)) :], whose, len(rows), names, "", clusters
        )
    if asked.view == "devices":
        seen = ask(lambda reader: reader.rows("devices", None, node=asked.node, user=asked.user, **times))
        rows = hardware.placed(seen)
        return Listing(queries.COLUMNS["placements"], _newest(rows, asked.limit), whose, len(rows), names, "", clusters)
    rows = _newest_of_all(asked, ask)
    time = TABLES[asked.view].time
    rows = sorted(rows, key=lambda row: row[time])
    return Listing(
        (*OF_JOB, *queries.COLUMNS[asked.view]), rows[-(asked.limit or len(rows)) :], whose, None, names, "", clusters
    )


def _newest_of_all(asked: Asked, ask: Callable[[Callable[[Reader], list[Any]]], list[Any]]) -> list[Any]:
    """Of each ledger the newest rows, so many as may be shown."""
    from db.reading import fleet

    times: dict[str, Any] = {"since": asked.since, "until": asked.until}
    if asked.view == "iterations":
        if asked.node is not None:
            raise UsageError("history iterations: has no nodes; leave --node out")
        limit = asked.limit or SHOWN
        return ask(lambda reader: fleet.newest_iterations(reader, limit, user=asked.user, **times))
    asks = {"node": asked.node, "user": asked.user, "kind": asked.kind, **times}
    return ask(lambda reader: reader.rows(asked.view, None, last=asked.limit, **asks))


def _clusters_here(ledger: str | None) -> set[str]:
    """Of all ledgers of this home; none where one was named."""
    if ledger not in (None, "sqlite"):
        return set()
    return {name for found in from_all(ledger, lambda reader: reader.clusters(), quiet=True) for name in found}


def _newest(placements: list[Any], limit: int | None) -> list[Any]:
    """Of devices in nodes, those seen last, in order of the device."""
    newest = sorted(placements, key=lambda row: row["last_seen"])[-limit:] if limit else placements
    return sorted(newest, key=lambda row: (row["uuid"], row["first_seen"], row["node"], row["device"]))


def _which_spares(asked: Asked, found: int) -> str:
    """What the figures are, and of which jobs where not of all."""
    most = _jobs_with_spares(asked)
    if most is None or found < most:
        return SPARES
    return f"{SPARES}\nthe newest {most} jobs whose plan was changed; more with --limit, all with --json"


def _tells_nodes(asked: Asked) -> bool:
    """Whether nodes of several ledgers may have the same name, and are not the same."""
    by_host = asked.having is not None and asked.having.startswith("host=")
    return asked.node is not None or asked.by == "node" or by_host or asked.view in OF_NODES


def _jobs_with_spares(asked: Asked) -> int | None:
    """Of how many jobs: of each the planner decides anew."""
    return None if asked.limit is None else max(asked.limit, SPARES_OF)


def _reckoned(
    asked: Asked, ask: Callable[[Callable[[Reader], list[Any]]], list[Any]], clusters: Sequence[str]
) -> list[Row]:
    """What is reckoned of many jobs; `clusters` are those of the ledgers that were asked. Raises UsageError for a trait
    that there is not."""
    from db.reading import fleet, queries, rates
    from db.reading.naming import is_node

    if asked.view == "lemons":
        now = datetime.now(UTC)
        record = fleet.NodeRecord()

        def read(reader: Reader) -> list[Row]:
            record.read(reader, fleet.horizon(now), asked.injected)
            return []

        ask(read)
        return [row for row in fleet.lemons(record, now) if is_node(asked.node, row["node"], clusters)]
    if asked.view == "promises":
        most = asked.limit or SHOWN
        rows = ask(lambda reader: queries.promises_of_all(reader, most, since=asked.since, until=asked.until))
        return sorted(rows, key=lambda row: (row["started_at"], row["epoch"]), reverse=True)
    if asked.view == "spares":
        found = ask(
            lambda reader: queries.spares_rows(
                reader, since=asked.since, until=asked.until, jobs=_jobs_with_spares(asked)
            )
        )
        return sorted(found, key=lambda row: (-row["saved_gpu_hours"], row["started_at"]))
    if asked.view == "jobs":
        limits: dict[str, Any] = {"user": asked.user, "since": asked.since, "until": asked.until, "last": asked.limit}
        return sorted(ask(lambda reader: reader.jobs(**limits)), key=lambda row: row["started_at"], reverse=True)
    if asked.view == "repairs":
        found = rates.repairs_together(ask(lambda reader: rates.repairs(reader, asked.since, asked.until)))
        return [row for row in found if is_node(asked.node, row["node"], clusters)]
    days = asked.days or rates.DEFAULT_DAYS
    if asked.around is not None:
        around = asked.around
        return rates.together(ask(lambda reader: rates.rate_around(reader, around, days, asked.user)))
    trait, _, value = (asked.having or "").partition("=")
    if trait not in rates.TRAITS or not value:
        known = ", ".join(rates.TRAITS)
        raise UsageError(f"history rate: --having {asked.having}: give TRAIT=VALUE; traits are {known}")
    now = datetime.now(UTC)
    return rates.together(ask(lambda reader: rates.rate_with(reader, trait, value, days, now, asked.user)))


# --- terminal -------------------------------------------------------------------------------------------------------


def _show(asked: Asked, answer: Listing) -> None:
    from wrapper.commands.history.tables import history_table
    from wrapper.output.render import literal
    from wrapper.output.tables import show

    screen = console()
    show(screen, *history_table(asked.shape, answer.rows))
    if answer.closing:
        screen.print(literal(answer.closing))
    if asked.limit is not None and len(answer.rows) == asked.limit and answer.total != len(answer.rows):
        which = "newest" if asked.is_table or asked.view in ("decisions", "promises", "hosts", "devices") else "first"
        of = "" if answer.total is None else f" of {answer.total:,}"
        message(f"{answer.whose}: the {which} {asked.limit}{of} {asked.view}; more with --limit, all with --json")


def _cost_lines(found: Sequence[Any], price: float | None) -> str:
    """What failures cost, of how much; shares of the time; how often something failed, and of that, hardware."""
    from db.reading.costs.cost_accounts import added
    from wrapper.commands.history.tables import amount
    from wrapper.output.render import duration, percent

    one = added(found)
    share = percent(one.failure_gpu_hours / one.gpu_hours) if one.gpu_hours > 0 else "-"
    line = f"failures cost {amount(one.failure_gpu_hours)} of {amount(one.gpu_hours)} GPU-hours ({share})"
    if price is not None:
        line += f", {amount(one.failure_gpu_hours * price)} of {amount(one.gpu_hours * price)} in money"
    if (idle := one.lost_gpu_hours["idle"]) > 0:
        line += f"\nof that, GPUs that stood by {amount(idle)} ({percent(idle / one.gpu_hours)})"
    if one.goodput is None:
        line += "\nno iteration was committed: where the time of a script without resihp.Trainer went is not known"
    line += f"\ngoodput {percent(one.goodput)}, useful share {percent(one.useful_share)}"
    if one.mttr_s is not None:
        line += f", MTTR {duration(one.mttr_s)} (noticing included)"
    for what, failures, mtbf_s, rate in (
        ("failures", one.failures, one.mtbf_s, one.failure_rate),
        ("of hardware", one.hardware_failures, one.hardware_mtbf_s, one.hardware_failure_rate),
    ):
        if one.failures:
            each = (
                f": MTBF {duration(mtbf_s)}, {amount(rate)} in 1,000 GPU-days" if failures and rate is not None else ""
            )
            line += f"\n{what} {failures:,}{each}"
    if one.in_proportion:
        line += f"\ncut in proportion, as their rows had been thinned: parts of {one.in_proportion:,} jobs"
    return line
