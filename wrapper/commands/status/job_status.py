"""A job's status as `status --json` prints it and `status --watch` redraws it: rows of its ledger, put together.

Reads only. Called by `wrapper.commands.status.command` and `wrapper.commands.watch.command`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from db.layouts import from_json
from wrapper.output.answers import SCHEMA
from wrapper.output.render import placed
from wrapper.output.shells import shells

if TYPE_CHECKING:
    from db.reading.queries import Reader
    from wrapper.output.render import Health

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


def job_status(reader: Reader, row: dict[str, Any], now: datetime | None = None) -> dict[str, Any]:
    """What `status --json` prints: `schema`, `job`, `state`, `iteration`, `loss`, `goodput`, `layout`, `events`, ..."""
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
