"""A job's status, assembled from rows of its ledger, as `status --json` prints it and `status --watch` redraws it.

Reads only. Called by `wrapper.commands.status.command` and `wrapper.commands.watch.command`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from db.layouts import from_json
from wrapper.output.answers import SCHEMA
from wrapper.output.idle_gpus import of_ledger
from wrapper.output.progress import RECENT_ITERATIONS, goal, progress
from wrapper.output.rank_health import RankHealth
from wrapper.output.shells import shells

if TYPE_CHECKING:
    from db.reading.queries import Reader

EVENTS_IN_JSON = 50
EVENT_KINDS = (
    *(
        "FailureFound",
        "FailureEnded",
        "ProbesTaken",
        "Reconfigured",
        "PlanDecided",
        "PlanRefused",
        "PlanWithdrawn",
        "JoinRefused",
        "NodeLost",
    ),
    *("Suspected", "SuspicionCleared", "CoverageChanged"),
    *("DrainDecided", "DrainAnswered", "NodeReleased", "ReplacementAsked", "ReplacementChanged", "SlurmSaw"),
    *("LeaderChosen", "JobSignalled", "FaultInjected", "CheckpointCommitted", "JobEnded"),
)


def job_status(
    reader: Reader, row: dict[str, Any], now: datetime | None = None, folder: str | None = None
) -> dict[str, Any]:
    """Return the content of `status --json`: `schema`, `job`, `state`, `iteration`, `loss`, `goodput`, `layout`, ...

    `folder`: the job's folder, if known.
    """
    now = now or datetime.now(UTC)
    figures = reader.summary(row["id"], now)
    iterations = reader.rows("iterations", row["id"], last=RECENT_ITERATIONS)
    checkpoints = reader.rows("checkpoints", row["id"], last=1)
    plans = reader.shown_plan(row["id"])
    layout = plans[0]["layout"] if plans else None
    places = from_json(json.dumps(layout)) if layout else None
    health = _health(reader, row["id"], running=figures["state"] == "running").by_rank(places)
    slurm_job = _slurm_job(row["name"]) if figures["state"] == "running" else None
    replacements = reader.rows("replacements", row["id"])
    idle = of_ledger(reader, row)
    return {
        "schema": SCHEMA,
        **figures,
        **progress(goal(row["model"]), iterations, now, running=row["state"] == "running"),
        "checkpoint": _where_it_is_now(checkpoints[-1], folder) if checkpoints else None,
        "folder": folder,
        "logs": None if folder is None else f"{folder}/logs",
        "output": None if folder is None else _output(reader, row, f"{folder}/logs"),
        "description": plans[0]["description"] if plans else None,
        "layout": layout,
        "detector": detector(row),
        "unwatched": json.loads(row["unwatched"] or "[]"),
        "health": {str(rank): state for rank, state in health.items()},
        "idle": [gpu._asdict() for gpu in idle.idle()],
        "idle_line": idle.line(),
        "drains": reader.rows("drains", row["id"]),
        "replacements": replacements,
        "shells": shells(slurm_job, reader.rows("nodes", row["id"]), replacements) if slurm_job else {},
        "events": reader.events(row["id"], EVENT_KINDS, EVENTS_IN_JSON),
    }


def _output(reader: Reader, row: dict[str, Any], logs: str) -> str | None:
    """Return the log that continues the job's output once its batch host is lost: the log of the leading agent.

    None while the first leader's node leads.
    """
    led = [event["node"] for event in reader.events(row["id"], ["LeaderChosen"], 1) if event["node"]]
    first = {node["node"] for node in reader.rows("nodes", row["id"]) if node["host"] == row["host"]}
    return f"{logs}/{led[-1]}.agent.log" if led and led[-1] not in first else None


def _where_it_is_now(checkpoint: dict[str, Any], folder: str | None) -> dict[str, Any]:
    from wrapper.job_folder import Job

    if folder is None:
        return checkpoint
    job = Job(Path(folder).name, Path(folder))
    return checkpoint | {"folder": str(job.now(Path(checkpoint["folder"])))}


def detector(row: dict[str, Any]) -> str:
    """Return the data that the job's detector judges by, as in `journal.CoverageChanged`; "off" if it is off."""
    try:
        configuration = json.loads(row["configuration"] or "{}")
    except ValueError:
        configuration = {}
    adapt = configuration.get("adapt") if isinstance(configuration, dict) else None
    off = isinstance(adapt, dict) and adapt.get("detect") is False
    return "off" if off else row["detector"] or "warming up"


def _health(reader: Reader, job: int, *, running: bool) -> RankHealth:
    """Return the health of a job's ranks: ended or not and, while the job runs, suspected or slow.

    A verdict ends a suspicion. In a finished job, only ranks named by a failure are dead: all others were asked to
    exit, some by a signal.
    """
    health = RankHealth()
    failures = reader.rows("failures", job)
    failed = {rank for failure in failures if failure["kind"] == "fail-stop" for rank in failure["ranks"]}
    for rank, worker in {worker["rank"]: worker for worker in reader.rows("workers", job)}.items():
        if worker["ended_at"] is None:
            health.running.add(rank)
        else:
            orderly = worker["exit"] == 0 or not (running or rank in failed)
            (health.left if orderly else health.dead).add(rank)
    if running:
        events = reader.events(job, ("Suspected", "SuspicionCleared", "FailureFound"), 1000)
        last = {event["rank"]: event["kind"] for event in events}
        health.suspected = {rank for rank, kind in last.items() if kind == "Suspected"}
        for failure in failures:
            of_ranks = failure["component"] in ("device", "link")
            if failure["kind"] == "fail-slow" and of_ranks and failure["ended_iteration"] is None:
                health.slow[failure["failure"]] = tuple(failure["ranks"])
    return health


def _slurm_job(name: str) -> str | None:
    """Return the Slurm job number of a run for srun, as Slurm 22.05 does not take array ids such as 12_3.

    None without Slurm.
    """
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
