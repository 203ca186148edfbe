"""`resihp history` and `resihp why`: list the ledger's records, of one job or of all jobs, on a terminal or as data.

Takes the options and prints the answer. For `history`, it never reads a ledger itself: `views` has the functions that
read each view, and `db` computes the answers. Slow imports are inside the functions. Called by `resihp.wrapper.cli`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from resihp.errors import UsageError
from resihp.words import count_of
from resihp.wrapper.commands.history.all_jobs import AllJobs
from resihp.wrapper.commands.history.one_job import OneJob, explanation_as_json
from resihp.wrapper.commands.history.query import DEFAULT_ROWS, By, History, HistoryQuery, Listing
from resihp.wrapper.commands.history.views import HISTORY_VIEWS, check, names_nodes
from resihp.wrapper.commands.options import command_of
from resihp.wrapper.output.answers import (
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
from resihp.wrapper.output.ledgers import opened


def register(app: typer.Typer) -> None:
    """Add `resihp history` and `resihp why` to the command line."""
    app.command()(command_of(history, HistoryOptions))
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
    job = _job_of(options)
    query = _query_of(options, on_terminal=not outputs)
    check(query)
    answer = _answer(query, job, options.ledger)
    if options.node is not None and not answer.rows and not answer.knows(options.node):
        from resihp.db.reading.naming import nearest

        raise UsageError(f"node {options.node}: not in {answer.subject}{nearest(options.node, answer.nodes)}")
    _write(options, query, answer)


def _job_of(options: HistoryOptions) -> str | None:
    """Return the job that the command line names; None if it names none. Raises UsageError if it names two, or one
    beside --all."""
    job, job_option = options.job, options.job_option
    if job is not None and job_option is not None and job != job_option:
        raise UsageError(f"history: JOB {job} and --job {job_option} differ; name one")
    job = job or job_option
    if options.all_jobs and job is not None:
        raise UsageError(f"history: JOB {job} and --all exclude each other; leave one out")
    return job


def _query_of(options: HistoryOptions, *, on_terminal: bool) -> HistoryQuery:
    view = options.view.value
    return HistoryQuery(
        view=view,
        by=None if options.by is None else options.by.value,
        node=options.node,
        rank=options.rank,
        since=moment(options.since),
        until=moment(options.until),
        limit=DEFAULT_ROWS if options.limit is None and on_terminal else options.limit,
        injected=options.injected,
        user=options.user,
        kind=options.kind,
        around=moment(options.around),
        having=options.having,
        days=options.days,
        all_jobs=options.all_jobs or HISTORY_VIEWS[view].of_job is None,
        price=options.price,
        flat=options.as_csv or options.parquet is not None,
    )


def _answer(query: HistoryQuery, job: str | None, ledger: str | None) -> Listing:
    """Return the answer to a query, for one job or for all jobs."""
    view = HISTORY_VIEWS[query.view]
    if query.all_jobs:
        assert view.of_all is not None, "checked"
        return view.of_all(query, AllJobs(query, job, ledger, names_nodes=names_nodes(query)))
    assert view.of_job is not None, "such a view covers all jobs"
    with opened(job, ledger) as (reader, row):
        return view.of_job(query, OneJob(reader, row, ledger))


def _write(options: HistoryOptions, query: HistoryQuery, answer: Listing) -> None:
    if options.parquet is not None:
        from resihp.db.reading.queries import as_frame
        from resihp.db.reading.tables import TABLES

        table = query.shape if query.shape in TABLES else None
        frame = as_frame(answer.rows, answer.columns, table)
        write_parquet(frame, options.parquet, f"{answer.subject}: {count_of(len(answer.rows), 'row')}")
    elif options.as_json:
        print(to_json({"schema": SCHEMA, "rows": answer.rows}))
    elif options.as_csv:
        write_csv(answer.columns, answer.rows)
    elif not answer.rows:
        message(f"{answer.subject}: no {'node in use lately' if query.view == 'lemons' else query.view}")
    else:
        _show(query, answer)


def _show(query: HistoryQuery, answer: Listing) -> None:
    from resihp.wrapper.commands.history.tables import history_table
    from resihp.wrapper.output.render import literal
    from resihp.wrapper.output.tables import show

    screen = console()
    show(screen, *history_table(HISTORY_VIEWS[query.view].columns_of(query), answer.rows))
    if answer.closing:
        screen.print(literal(answer.closing))
    if query.limit is not None and len(answer.rows) == query.limit and answer.total != len(answer.rows):
        is_ranking = query.by is not None or HISTORY_VIEWS[query.view].is_ranking
        order = "first" if is_ranking else "newest"
        total = "" if answer.total is None else f" of {answer.total:,}"
        message(f"{answer.subject}: the {order} {query.limit}{total} {query.view}; more with --limit, all with --json")


def why(
    iteration: Annotated[int, typer.Argument(help="A committed iteration.")],
    job: JobArgument = None,
    as_json: JsonOption = False,
    ledger: LedgerOption = None,
) -> None:
    """Explain why an iteration took as long as it did.

    Example: resihp why 37 local-3
    """
    from resihp.db.reading import queries
    from resihp.db.reading.plans import plan_rows

    with opened(job, ledger) as (reader, row):
        reasons = queries.why(reader, row, iteration)
        plans = plan_rows.plans_until(reader, row["id"], reasons.epoch)
        explained = reader.explanations(row["id"], plans).get(reasons.epoch)
    if as_json:
        import msgspec

        content = {"schema": SCHEMA, "job": row["name"], **msgspec.structs.asdict(reasons)}
        print(to_json(content | {"explanation": explanation_as_json(explained)}))
    else:
        from rich.text import Text

        from resihp.wrapper.output.render import literal

        screen = console()
        for number, sentence in enumerate(reasons.verdict):
            screen.print(Text(literal(sentence if number == 0 else f"- {sentence}")), soft_wrap=False)
        if explained is not None:
            from resihp.wrapper.output.explanations import sentences

            screen.print(Text(f"its plan, of epoch {reasons.epoch}:"), soft_wrap=False)
            for about, words in sentences(explained):
                screen.print(Text(literal(f"- {about}: {words}")), soft_wrap=False)
