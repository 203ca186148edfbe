"""`resihp status`, `resihp history` and `resihp db upgrade`: what the ledger tells, on a terminal or as data.

Data goes to stdout, messages to stderr. Only reads, but for two things: a job whose supervisor is gone is marked so
first (`wrapper.jobs.finish_dead_job`), and a ledger that lags behind the journal of a job that is over is brought up
to it. Everything that takes time to import is imported in the functions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import LedgerError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from db.queries import Reader
    from wrapper.jobs import Job
    from wrapper.render import Health

SCHEMA = 1
EVENTS_IN_JSON = 50
WATCH_S = 1.0
EVENT_KINDS = (
    *(
        "FailureFound",
        "FailureEnded",
        "ProbesTaken",
        "Reconfigured",
        "PlanDecided",
        "PlanRefused",
        "JoinRefused",
        "NodeLost",
    ),
    *("Suspected", "SuspicionCleared"),
    *("DrainDecided", "DrainAnswered", "NodeReleased", "ReplacementAsked", "ReplacementChanged", "SlurmSaw"),
    *("LeaderChosen", "JobSignalled", "FaultInjected", "CheckpointCommitted", "JobEnded"),
)


class History(str, Enum):  # noqa: UP042 - StrEnum's help text shows differently in older Typer
    """Tables of `resihp history`."""

    failures = "failures"
    nodes = "nodes"
    workers = "workers"
    iterations = "iterations"
    plans = "plans"
    reconfigurations = "reconfigurations"
    drains = "drains"
    replacements = "replacements"
    probes = "probes"


JobArgument = Annotated[str | None, typer.Argument(metavar="[JOB]", help="The job; the newest if left out.")]
LedgerOption = Annotated[str | None, typer.Option("--ledger", help="Another ledger's URL.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def register(app: typer.Typer) -> None:
    """Add the ledger's commands to the command line."""
    app.command()(status)
    app.command()(history)
    ledger = typer.Typer(help="The ledger's schema.", no_args_is_help=True)
    ledger.command()(upgrade)
    # A group with one command would become that command; it is to stay `db upgrade`.
    ledger.callback()(lambda: None)
    app.add_typer(ledger, name="db")


# --- commands -------------------------------------------------------------------------------------------------------


def status(
    job: JobArgument = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until the job ends.")] = False,
    ledger: LedgerOption = None,
) -> None:
    """Show a job: its iteration, layout with health of each rank, goodput, last events."""
    if watch:
        _watch(job, ledger, as_json)
        return
    with opened(job, ledger) as (reader, row):
        state = job_status(reader, row)
    if as_json:
        print(to_json(state))
    else:
        from wrapper.tables import render_status

        console = _console()
        console.print(render_status(state, console.width))


def history(
    table: Annotated[History, typer.Argument(help="What to list.")],
    job: JobArgument = None,
    job_option: Annotated[str | None, typer.Option("--job", help="The same as JOB.", show_default=False)] = None,
    node: Annotated[str | None, typer.Option(help="Only this node's.", show_default=False)] = None,
    since: Annotated[str | None, typer.Option(help="Time (ISO, UTC) or age (30m, 2h, 1d).", show_default=False)] = None,
    until: Annotated[str | None, typer.Option(help="The same, as the end.", show_default=False)] = None,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    parquet: Annotated[Path | None, typer.Option(help="Write a Parquet file.", show_default=False)] = None,
    ledger: LedgerOption = None,
) -> None:
    """List what the ledger holds of a job.

    Example: resihp history failures local-3 --json
    """
    if as_json + as_csv + (parquet is not None) > 1:
        raise UsageError("history: --json, --csv and --parquet exclude each other; choose one")
    if job is not None and job_option is not None and job != job_option:
        raise UsageError(f"history: JOB {job} and --job {job_option} differ; name one")
    name = table.value
    filters: dict[str, Any] = {"node": node, "since": moment(since), "until": moment(until)}
    with opened(job or job_option, ledger) as (reader, row):
        if parquet is not None:
            _write_parquet(reader, name, row, filters, parquet)
            return
        rows = reader.rows(name, row["id"], **filters)
    if as_json:
        print(to_json({"schema": SCHEMA, "rows": rows}))
    elif as_csv:
        _write_csv(name, rows)
    elif not rows:
        _message(f"job {row['name']}: no {name}")
    else:
        from wrapper.tables import history_table

        _console().print(history_table(name, rows))


def upgrade(job: JobArgument = None, ledger: LedgerOption = None) -> None:
    """Bring a ledger to this version's schema; makes it if it is not there."""
    from db import migrate
    from db.engine import masked, resolve

    if ledger is None or ledger == "sqlite":
        from wrapper.jobs import find_job

        found = find_job(job)
        ledger = _url_of(found) if ledger is None else str(resolve("sqlite", found.folder))
    before = migrate.current(ledger) if _exists(ledger) else None
    after = migrate.upgrade(ledger)
    what = "is up to date" if before == after else "made" if before is None else f"upgraded from {before}"
    _message(f"ledger {masked(ledger)}: schema {after}, {what}")


def summary_text(job: str | None = None, ledger: str | None = None, width: int = 80) -> str:
    """What died, when it was noticed, seconds until the next committed iteration, and the goodput: plain text."""
    from rich.console import Console

    from wrapper.tables import goodput_line, history_table

    with opened(job, ledger) as (reader, row):
        rows = reader.rows("failures", row["id"])
        figures = reader.summary(row["id"])
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        if rows:
            console.print(history_table("failures", rows))
        console.print(goodput_line(figures))
    return capture.get()


# --- finding the ledger ---------------------------------------------------------------------------------------------


@contextmanager
def opened(job: str | None, ledger: str | None) -> Iterator[tuple[Reader, dict[str, Any]]]:
    """The ledger to read, and the job's row in it.

    Without `ledger`, or with `sqlite`, the job is looked up in this home and its own ledger is read.
    """
    from db.queries import Reader

    if ledger is not None and ledger != "sqlite":
        with Reader.open(ledger) as reader:
            yield reader, reader.job(job)
        return
    from wrapper.jobs import find_job, finish_dead_job

    found = find_job(job)
    finish_dead_job(found)
    url = _url_of(found) if ledger is None else _own_url(found)
    _bring_up_to_date(found, url)
    if not _exists(url):
        raise LedgerError(f"job {found.name}: its ledger is not there yet; has it begun? logs are in {found.logs}")
    file = found.read()
    with Reader.open(url) as reader:
        yield reader, reader.job(found.name, host=file.host, started=datetime.fromtimestamp(file.created_at, UTC))


def _own_url(job: Job) -> str:
    from db.engine import default_url

    return default_url(job.folder)


def _url_of(job: Job) -> str:
    from db.engine import resolve

    return resolve(job.read().ledger or "sqlite", job.folder).render_as_string(hide_password=False)


def _exists(url: str) -> bool:
    from db.engine import file_of, resolve

    file = file_of(resolve(url))
    return file is None or file.exists()


def _bring_up_to_date(job: Job, url: str) -> None:
    """Bring in what the journal of a job that is over has and its ledger lacks."""
    from db.queries import Reader
    from resihp.errors import JobNotFoundError

    path = next((path for path in (job.journal_file, job.journal_copy) if path.exists()), None)
    if path is None or not _is_over(job):
        return
    records = job.records()
    if not records:
        return
    if _exists(url):
        file = job.read()
        with Reader.open(url) as reader:
            try:
                row = reader.job(job.name, host=file.host, started=datetime.fromtimestamp(file.created_at, UTC))
                if reader.applied(row["id"]) >= records[-1].seq:
                    return
            except JobNotFoundError:
                pass
    from db.writer import catch_up

    catch_up(url, job.folder, path)


def _is_over(job: Job) -> bool:
    return job.exit_code_file.exists() and job.supervisor() is None


# --- data -----------------------------------------------------------------------------------------------------------


def job_status(reader: Reader, row: dict[str, Any], now: datetime | None = None) -> dict[str, Any]:
    """What `status --json` prints: `schema`, `job`, `state`, `iteration`, `loss`, `goodput`, `layout`, `events`, ..."""
    import json

    from db.layouts import from_json
    from wrapper.render import placed

    figures = reader.summary(row["id"], now)
    plans = reader.shown_plan(row["id"])
    layout = plans[0]["layout"] if plans else None
    places = from_json(json.dumps(layout)) if layout else None
    health: dict[int, Health] = {}
    for worker in reader.rows("workers", row["id"]):
        rank = worker["rank"]
        state: Health = "active" if places is None else placed("active", rank, places)
        if worker["ended_at"] is not None and worker["exit"] != 0:
            health[rank] = "dead"
        elif worker["ended_at"] is None or state != "starting":  # not one that left before it was given a place
            health[rank] = state
    if figures["state"] == "running":
        suspicions = {e["rank"]: e["kind"] for e in reader.events(row["id"], ("Suspected", "SuspicionCleared"), 1000)}
        for rank, kind in suspicions.items():
            if kind == "Suspected" and health.get(rank, "dead") != "dead":
                health[rank] = "suspected"
    return {
        "schema": SCHEMA,
        **figures,
        "description": plans[0]["description"] if plans else None,
        "layout": layout,
        "health": {str(rank): health[rank] for rank in sorted(health)},
        "drains": reader.rows("drains", row["id"]),
        "replacements": reader.rows("replacements", row["id"]),
        "events": reader.events(row["id"], EVENT_KINDS, EVENTS_IN_JSON),
    }


def plain(value: Any) -> Any:
    """`value` as JSON has it: NaN and infinities null, times ISO 8601 in UTC."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def to_json(value: Any) -> str:
    import json

    return json.dumps(plain(value), allow_nan=False)


def moment(text: str | None, now: datetime | None = None) -> datetime | None:
    """`2026-01-31`, `2026-01-31T12:00`, or an age: `90s`, `30m`, `2h`, `1d`. Raises UsageError."""
    if text is None:
        return None
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    try:
        if seconds is not None:
            return (now or datetime.now(UTC)) - timedelta(seconds=float(text[:-1]) * seconds)
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise UsageError(f"time {text!r}: not a time; examples: 2026-01-31T12:00, 30m, 2h, 1d") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def _write_csv(table: str, rows: list[dict[str, Any]]) -> None:
    import csv
    import json

    from db.queries import TABLES

    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [column.key for column in TABLES[table].query.selected_columns]
    writer.writerow(columns)
    for row in rows:
        cells = [plain(row[str(column)]) for column in columns]
        writer.writerow(json.dumps(cell) if isinstance(cell, dict | list) else cell for cell in cells)


def _write_parquet(reader: Reader, table: str, row: dict[str, Any], filters: dict[str, Any], path: Path) -> None:
    from db.queries import frame

    found = frame(reader, table, row["id"], **filters)
    try:
        found.to_parquet(path, index=False)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}; name another file") from error
    _message(f"job {row['name']}: {len(found)} {table} written to {path}")


# --- terminal -------------------------------------------------------------------------------------------------------


def _message(text: str) -> None:
    print(f"resihp: {text}", file=sys.stderr)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _watch(job: str | None, ledger: str | None, as_json: bool) -> None:
    """Show the status again and again until the job ends; without a terminal, only when it has changed."""
    from rich.live import Live

    from wrapper.tables import render_status

    console = _console()
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    shown = ""
    if live is not None:
        live.start()
    try:
        while True:
            with opened(job, ledger) as (reader, row):
                state = job_status(reader, row)
            job = job or state["job"]  # the newest may be another one in a second
            text = to_json(state)
            if live is not None:
                live.update(render_status(state, console.width), refresh=True)
            elif as_json:
                print(text, flush=True)
            elif shown != (shown := f"{state['iteration']} {len(state['events'])} {state['state']}"):
                console.print(render_status(state, console.width))
            if state["state"] != "running":
                return
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        return
    finally:
        if live is not None:
            live.stop()
