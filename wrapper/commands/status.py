"""`resihp status` and `resihp db upgrade`; and the place where the ledger's other commands are registered.

Data goes to stdout, messages to stderr. Only reads, but for what `wrapper.output.ledgers` does first. Everything that
takes time to import is imported in the functions.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wrapper.commands import exchange
from wrapper.commands.history import command
from wrapper.commands.history.command import History
from wrapper.output.answers import (
    SCHEMA,
    JobArgument,
    JsonOption,
    LedgerOption,
    console,
    message,
    moment,
    plain,
    to_json,
)
from wrapper.output.ledgers import exists, opened, url_of

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from wrapper.output.render import Health

__all__ = ["History", "job_status", "moment", "opened", "plain", "register", "summary_text", "to_json"]

EVENTS_IN_JSON = 50
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


def register(app: typer.Typer) -> None:
    """Add the ledger's commands to the command line."""
    app.command()(status)
    app.command()(command.history)
    app.command()(command.why)
    ledger = typer.Typer(help="The ledger: its schema, and jobs in and out of it.", no_args_is_help=True)
    ledger.command()(upgrade)
    exchange.register(ledger)
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
        from wrapper.commands.watch.command import watch as follow

        follow(job, ledger, as_json)
        return
    with opened(job, ledger) as (reader, row):
        state = job_status(reader, row)
    if as_json:
        print(to_json(state))
    else:
        from wrapper.output.tables import render_status

        screen = console()
        screen.print(render_status(state, screen.width))


def upgrade(job: JobArgument = None, ledger: LedgerOption = None) -> None:
    """Bring a ledger to this version's schema; makes it if it is not there."""
    from db import migrate
    from db.engine import masked, resolve

    if ledger is None or ledger == "sqlite":
        from wrapper.job_folder import find_job

        found = find_job(job)
        ledger = url_of(found) if ledger is None else str(resolve("sqlite", found.folder))
    before = migrate.current(ledger) if exists(ledger) else None
    after = migrate.upgrade(ledger)
    what = "is up to date" if before == after else "made" if before is None else f"upgraded from {before}"
    message(f"ledger {masked(ledger)}: schema {after}, {what}")


def summary_text(job: str | None = None, ledger: str | None = None, width: int = 80) -> str:
    """What died, when it was noticed, seconds until the next committed iteration, and the goodput: plain text."""
    from rich.console import Console

    from wrapper.output.tables import goodput_line, history_table

    with opened(job, ledger) as (reader, row):
        rows = reader.rows("failures", row["id"])
        figures = reader.summary(row["id"])
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False, markup=False)
    with console.capture() as capture:
        if rows:
            console.print(history_table("failures", rows))
        console.print(goodput_line(figures))
    return capture.get()


# --- data -----------------------------------------------------------------------------------------------------------


def job_status(reader: Reader, row: dict[str, Any], now: datetime | None = None) -> dict[str, Any]:
    """What `status --json` prints: `schema`, `job`, `state`, `iteration`, `loss`, `goodput`, `layout`, `events`, ..."""
    import json

    from db.layouts import from_json
    from wrapper.output.render import placed
    from wrapper.output.shells import shells

    figures = reader.summary(row["id"], now)
    plans = reader.shown_plan(row["id"])
    layout = plans[0]["layout"] if plans else None
    places = from_json(json.dumps(layout)) if layout else None
    workers = reader.rows("workers", row["id"])
    health: dict[int, Health] = {
        worker["rank"]: "dead" if worker["ended_at"] is not None and worker["exit"] != 0 else "active"
        for worker in workers
    }
    if places is not None:
        health = placed(health, places)
        for worker in workers:
            if worker["ended_at"] is not None and health[worker["rank"]] == "starting":
                del health[worker["rank"]]  # it left before it was given a place
    if figures["state"] == "running":
        kinds = ("Suspected", "SuspicionCleared", "FailureFound")  # a verdict is the end of a suspicion
        last = {event["rank"]: event["kind"] for event in reader.events(row["id"], kinds, 1000)}
        for rank, kind in last.items():
            if kind == "Suspected" and health.get(rank, "dead") != "dead":
                health[rank] = "suspected"
        for failure in reader.rows("failures", row["id"]):
            if failure["kind"] == "fail-slow" and failure["ended_iteration"] is None:
                health |= {rank: "slow" for rank in failure["ranks"] if health.get(rank, "dead") != "dead"}
    slurm_job = _slurm_job(row["name"]) if figures["state"] == "running" else None
    replacements = reader.rows("replacements", row["id"])
    return {
        "schema": SCHEMA,
        **figures,
        "description": plans[0]["description"] if plans else None,
        "layout": layout,
        "health": {str(rank): health[rank] for rank in sorted(health)},
        "drains": reader.rows("drains", row["id"]),
        "replacements": replacements,
        "shells": shells(slurm_job, reader.rows("nodes", row["id"]), replacements) if slurm_job else {},
        "events": reader.events(row["id"], EVENT_KINDS, EVENTS_IN_JSON),
    }


def _slurm_job(name: str) -> str | None:
    """The number of a run's Slurm job for srun: 22.05 takes no 12_3 of an array. None without Slurm."""
    from resihp.errors import UsageError
    from wrapper.config.run_spec import load
    from wrapper.job_folder import find_job, slurm_job_of

    named = slurm_job_of(name)
    if named is None or "_" not in named:
        return named
    try:
        request = load(find_job(name).run_file)
    except UsageError:
        return named  # a run of another home
    return request.slurm.number if request.slurm and request.slurm.number else named


# --- terminal -------------------------------------------------------------------------------------------------------
