"""A job's status, assembled from rows of its ledger, as `status --json` prints it and `status --watch` redraws it.

Reads only. Called by `resihp.wrapper.commands.status.command` and `resihp.wrapper.commands.watch.command`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resihp.db.reading import watched
from resihp.db.reading.costs.summary import summarise
from resihp.db.reading.tables import object_in
from resihp.wrapper.output.answers import SCHEMA
from resihp.wrapper.output.idle_gpus import IdleGpus
from resihp.wrapper.output.job_history import JobHistory, ranks_in
from resihp.wrapper.output.progress import RECENT_ITERATIONS, goal, progress
from resihp.wrapper.output.rank_health import rank_health
from resihp.wrapper.output.shells import shells

if TYPE_CHECKING:
    from resihp.db.reading.queries import Reader

Row = dict[str, Any]

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
    *("ReservationSeen", "LossNotFinite"),
    *("LeaderChosen", "JobSignalled", "FaultInjected", "CheckpointCommitted", "RollbackDecided", "JobEnded"),
)


def job_status(
    reader: Reader, row: dict[str, Any], now: datetime | None = None, folder: str | None = None
) -> dict[str, Any]:
    """Return the content of `status --json`: `schema`, `job`, `state`, `iteration`, `loss`, `goodput`, `layout`, ...

    `folder`: the job's folder, if known.
    """
    now = now or datetime.now(UTC)
    number, running = row["id"], row["state"] == "running"
    rows = watched.read(reader, row)
    history = JobHistory.of_ledger(reader, row, rows)
    iterations = reader.narrow("iterations", number)
    figures = {
        **summarise(row, iterations, rows.failures, rows.reconfigurations, rows.plans, now),
        **progress(goal(row["model"]), iterations[-RECENT_ITERATIONS:], now, running=running),
    }
    plan = history.shown_plan
    idle = IdleGpus(history)
    replacements = reader.rows("replacements", number)
    checkpoints = reader.rows("checkpoints", number, last=1)
    events, last_leader = _events(reader, number)
    slurm_job = _slurm_job(row["name"]) if running else None
    return {
        "schema": SCHEMA,
        **figures,
        **(_done_again(reader, row, figures) if running else {}),
        "epoch": None if plan is None else plan.epoch,
        "checkpoint": _where_it_is_now(checkpoints[-1], folder) if checkpoints else None,
        "folder": folder,
        "logs": None if folder is None else f"{folder}/logs",
        "output": None if folder is None else _output(row["host"], last_leader, rows.nodes, f"{folder}/logs"),
        "description": None if plan is None else plan.description,
        "layout": None if plan is None else reader.decoded(plan.layout_json, "layout"),
        "detector": detector(row),
        "unwatched": ranks_in(reader.decoded(row["unwatched"] or "[]", "unwatched"), "a job"),
        "health": {
            str(rank): state for rank, state in rank_health(history, None if plan is None else plan.layout).items()
        },
        "idle": [gpu._asdict() for gpu in idle.idle()],
        "idle_line": idle.line(),
        "drains": reader.rows("drains", number),
        "replacements": replacements,
        "shells": shells(slurm_job, rows.nodes, replacements) if slurm_job else {},
        "events": events,
    }


def _done_again(reader: Reader, row: Row, figures: Row) -> Row:
    """Return `redone`: the iteration that a script without `resihp.Trainer` does again after a restart; then it is not
    stuck, and has more left to do. Empty if it does nothing again."""
    last, of_script = figures["iteration"], object_in(row["model"])
    if not last or not of_script or "model" in of_script:
        return {}
    counter = next(iter(reader.events(row["id"], ("CounterSeen",), 1)), None)
    if counter is None or counter["iteration"] > last or counter["at"] <= figures["last_iteration_at"]:
        return {}
    pace_s, goal_iteration = figures["iteration_seconds"], of_script.get("iterations")
    eta_s = (goal_iteration - counter["iteration"]) * pace_s if goal_iteration and pace_s else None
    return {"redone": counter["iteration"], "stuck": False, "eta_seconds": eta_s}


def _events(reader: Reader, job: int) -> tuple[list[Row], str | None]:
    """Return the last events that `status` shows, and the node of the leader that was chosen last; None if none was
    chosen."""
    events = reader.events(job, EVENT_KINDS, EVENTS_IN_JSON, always_last="LeaderChosen")
    leaders = [event["node"] for event in events if event["kind"] == "LeaderChosen" and event["node"]]
    return events[-EVENTS_IN_JSON:], leaders[-1] if leaders else None


def _output(host: str, leader: str | None, nodes: Sequence[Row], logs: str) -> str | None:
    """Return the log in which the job's output continues after the loss of its batch host: the log of the agent that
    leads the job.

    None while the first leader's node leads the job.
    """
    first = {node["node"] for node in nodes if node["host"] == host}
    return f"{logs}/{leader}.agent.log" if leader is not None and leader not in first else None


def _where_it_is_now(checkpoint: dict[str, Any], folder: str | None) -> dict[str, Any]:
    from resihp.wrapper.job_folder import Job

    if folder is None:
        return checkpoint
    job = Job(Path(folder).name, Path(folder))
    return checkpoint | {"folder": str(job.now(Path(checkpoint["folder"])))}


def detector(row: dict[str, Any]) -> str:
    """Return the data by which the job's detector judges, as in `journal.CoverageChanged`; "off" if the detector is
    off."""
    adapt = object_in(row["configuration"]).get("adapt")
    off = isinstance(adapt, dict) and adapt.get("detect") is False
    return "off" if off else row["detector"] or "warming up"


def _slurm_job(name: str) -> str | None:
    """Return the number of a run's Slurm job for srun, because Slurm 22.05 does not accept ids of array tasks such as
    12_3.

    None for a run without Slurm.
    """
    from resihp.errors import UsageError
    from resihp.wrapper.config.run_spec import load
    from resihp.wrapper.job_folder import find_job, slurm_job_of

    named = slurm_job_of(name)
    if named is None or "_" not in named:
        return named
    try:
        request = load(find_job(name).run_file)
    except UsageError:
        return named  # a run in another home
    return request.slurm.number if request.slurm and request.slurm.number else named
