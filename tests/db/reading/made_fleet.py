"""Rows of jobs that last for days and overlap weeks, written without a journal, and a simple program that reckons their
cost from these rows alone: it shares nothing with `resihp.db.reading`."""

from __future__ import annotations

import random
import statistics
import uuid
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from sqlalchemy import Connection, insert, select

from resihp.db import models
from resihp.db.engine import make_engine, resolve
from resihp.db.migrate import upgrade

Row = dict[str, Any]
MONDAY = datetime(2026, 3, 2, tzinfo=UTC)
HOUR = 3600.0
GPUS = 8


def write_fleet(url: str, jobs: int, seed: int = 1) -> None:
    """Jobs of half an hour's iterations: some never start, some lose nodes, get others, are slow, end by a failure, or
    still run."""
    upgrade(url)
    engine = make_engine(resolve(url), write=True)
    chance = random.Random(seed)
    with engine.begin() as connection:
        for number in range(1, jobs + 1):
            _write_job(connection, number, chance)
    engine.dispose()


def _write_job(connection: Connection, number: int, chance: random.Random) -> None:
    began = MONDAY + timedelta(seconds=chance.uniform(0, 28 * 24 * HOUR))
    nodes, start_s = chance.randint(2, 4), chance.uniform(0.1, 2.0) * HOUR
    tables: dict[type[models.LedgerTable], list[Row]] = {}

    def at(seconds: float) -> datetime:
        return began + timedelta(seconds=seconds)

    def add(model: type[models.LedgerTable], **columns: Any) -> None:
        tables.setdefault(model, []).append({"job_id": number, **columns})

    idle = 2 if number % 3 == 0 else 0

    def plan(epoch: int, active: int, now: float, action: str, following: int) -> None:
        of = {"description": "", "replicas": 1, "standby": idle, "schedule": "", "reason": "", "layout": "{}"}
        of |= {"assignment": "{}", "digest": "", "decided_at": at(now), "in_effect_at": at(now + 1)}
        add(models.PlanRow, epoch=epoch, active=active - idle, action=action, next_iteration=following, **of)

    def failure(count: int, kind: str, component: str, iteration: int, now: float, **more: Any) -> None:
        of = {"detect_seconds": None, "recovered_epoch": None, "ended_iteration": None, "hardware": None, "speed": None}
        of |= {"cause": "it broke", "ranks": "[0]", "node": "n1", "epoch": 1, "evidence": "", "failed_at": None} | more
        add(models.FailureRow, failure=count, kind=kind, component=component, iteration=iteration,
            noticed_at=at(now), **of)  # fmt: skip

    def transition(epoch: int, action: str, seconds: float, now: float) -> None:
        of = dict.fromkeys(("park", "plan", "groups", "state", "first_iteration"), 1.0)
        of = {f"{name}_seconds": each for name, each in of.items()}
        add(
            models.ReconfigurationRow,
            epoch=epoch,
            action=action,
            attempts=1,
            seconds=seconds,
            finished_at=at(now),
            **of,
        )

    replaced: list[Row] = []
    now, state = start_s, chance.choice(["completed", "completed", "failed", "cancelled", "running"])
    if number % 8 == 0:  # never started
        state = "failed"
        failure(1, "fail-stop", "node", 1, now - 60.0)
    else:
        iterations = chance.randint(100, 400)
        breaks, slow_from = chance.randint(20, 60), chance.randint(61, 80)
        mends, slow_until = breaks + 10, slow_from + chance.randint(5, 15)
        plan(1, nodes * GPUS, start_s - 10.0, "start", 1)
        epoch, active = 1, nodes * GPUS
        for i in range(1, iterations + 1):
            if i == breaks or (i == mends and number % 3):
                epoch, active = (2, active - GPUS) if i == breaks else (3, active + GPUS)
            healthy = 0.5 * HOUR * nodes * GPUS / active
            seconds = healthy * (1.5 if slow_from <= i < slow_until else 1.0)
            if i == 1:
                pass
            elif i == breaks:
                known = number % 2 == 0  # when it broke
                worked, unnoticed, mending = chance.uniform(0.1, 0.4) * HOUR, chance.uniform(60, 600), HOUR
                if not known:
                    worked = 0.5 * HOUR  # as long as an iteration usually took
                noticed = now + worked + unnoticed
                now = noticed + mending
                failure(1, "fail-stop", "node", i, noticed, detect_seconds=unnoticed if known else None,
                        failed_at=at(noticed - unnoticed), recovered_epoch=2, node=f"n{nodes}")  # fmt: skip
                transition(2, "redo", mending + seconds, now + seconds)
                plan(2, active, noticed + 10.0, "redo", i)
                replaced.append({"lost": noticed, "released": noticed + 600.0, "joined": None})
            elif i == mends and number % 3:
                replaced[0]["joined"] = now + 300.0
                transition(3, "between", 900.0 + seconds, now + 900.0 + seconds)
                plan(3, active, now + 10.0, "between", i)
                now += 900.0
            else:
                now += chance.uniform(5.0, 30.0)
                if (i - 1) % 10 == 0 and i - 1 not in (breaks, mends):
                    now += chance.uniform(200.0, 400.0)  # for the checkpoint
            now += seconds
            add(models.IterationRow, iteration=i, epoch=epoch, seconds=seconds, predicted_seconds=healthy, tokens=1000,
                sum_squared_lengths=1, samples=1, samples_digest="", finished_at=at(now), skipped=False)  # fmt: skip
            if i % 10 == 0:
                add(models.CheckpointRow, iteration=i, committed_at=at(now + 5.0))
        failure(2, "fail-slow", "device", slow_from, start_s + HOUR * slow_from, ended_iteration=slow_until, speed=0.6)
        if state == "failed":
            failure(3, "program", "program", iterations + 1, now + 300.0, failed_at=at(now + 260.0))
        now += chance.uniform(0.2, 20.0) * HOUR
    end = None if state == "running" else at(now)
    own = {"host": "h", "devices": GPUS, "lost_at": None, "released_at": None, "replacement": None}
    for n in range(1, nodes + 1):
        add(models.NodeRow, node=f"n{n}", joined_at=at(20.0 + n), **own)
    for one in replaced:
        tables[models.NodeRow][-1] |= {"lost_at": at(one["lost"]), "released_at": at(one["released"])}
        if one["joined"] is not None:
            add(models.NodeRow, node="n9", joined_at=at(one["joined"]), **own | {"replacement": 1})
            of = {"outcome": "joined", "reason": "", "text": "", "excluded": "[]", "asked_at": at(one["lost"])}
            add(models.ReplacementRow, replacement=1, instead=f"n{nodes}", node="n9", joined_at=at(one["joined"]), **of)
    run = str(uuid.UUID(int=number))
    words = dict.fromkeys(("host", "command", "schedule", "version"), "") | {"configuration": "{}"}
    job = {
        **words, "id": number, "uuid": run, "run": run, "name": f"j{number}", "owner": f"user{number % 3}",
        "nodes": nodes, "gpus_per_node": GPUS, "tp": 1, "pp": 1, "restart_count": 0, "state": state,
        "started_at": began, "ended_at": end, "last_entry_at": at(now), "cluster": "c",
        "slurm_account": f"lab{number % 2}" if number % 5 else None, "partition": "gpu",
    }  # fmt: skip
    connection.execute(insert(models.JobRow), [{name: value for name, value in job.items() if name != "id"}])
    for model in (models.PlanRow, models.ReconfigurationRow, *tables):
        if rows := tables.pop(model, []):
            connection.execute(insert(model), rows)


def raw(url: str, job_id: int) -> dict[str, list[Row]]:
    """All rows of a job, by table."""
    engine = make_engine(resolve(url), write=False)
    tables = {name: table for name, table in models.LedgerTable.metadata.tables.items() if "job_id" in table.c}
    tables["jobs"] = models.LedgerTable.metadata.tables["jobs"]
    with engine.connect() as connection:
        found = {
            name: [
                dict(row)
                for row in connection.execute(
                    select(table).where((table.c.id if name == "jobs" else table.c.job_id) == job_id)
                ).mappings()
            ]
            for name, table in tables.items()
        }
    engine.dispose()
    return found


def reckoned(rows: dict[str, list[Row]], now: datetime, again: range = range(0)) -> dict[str, float]:
    """Seconds and GPU-hours (`h:...`) by cause, and other figures of `history cost --by job`, from the rows alone."""
    [job] = rows["jobs"]
    zero: datetime = job["started_at"]
    silent = job["last_entry_at"] + timedelta(days=1)
    end = min(now, silent) if job["state"] == "running" else job["ended_at"]

    def at(moment: datetime) -> float:
        return (moment - zero).total_seconds()

    iterations = sorted(rows["iterations"], key=lambda row: row["iteration"])
    moved = {row["epoch"]: row for row in rows["reconfigurations"]}
    mended = {row["recovered_epoch"]: row for row in rows["failures"] if row["recovered_epoch"]}
    slow = [row for row in rows["failures"] if row["kind"] == "fail-slow"]
    asked = job["nodes"] * job["gpus_per_node"]
    active = {row["epoch"]: row["active"] for row in rows["plans"]}
    standby = {row["epoch"]: row["standby"] for row in rows["plans"]}
    saved = {row["iteration"] for row in rows["checkpoints"]}
    nodes = [
        (at(row["joined_at"]) if row["replacement"] else 0.0, at(row["released_at"] or end), row["devices"])
        for row in rows["nodes"]
    ]
    pieces: list[tuple[float, float, dict[str, float], dict[str, float]]] = []

    def piece(begin: float, end: float, cause: str) -> None:
        pieces.append((begin, end, {cause: end - begin}, {cause: end - begin}))

    pauses = [
        at(row["finished_at"]) - row["seconds"] - at(before["finished_at"])
        for before, row in pairwise(iterations)
        if before["epoch"] == row["epoch"] and before["iteration"] not in saved
    ]
    noticing: dict[int, float] = {}
    usual_pause = statistics.median(pauses) if pauses else 0.0
    last = 0.0
    for place, row in enumerate(iterations):
        began, done = at(row["finished_at"]) - row["seconds"], at(row["finished_at"])
        former = iterations[place - 1] if place else None
        if former is None:
            piece(0.0, began, "start")
        elif row["epoch"] != former["epoch"]:
            noticed = done - moved[row["epoch"]]["seconds"]
            failure = mended.get(row["epoch"])
            fault = noticed if failure is None else at(failure["failed_at"])
            noticing[row["epoch"]] = noticed - fault
            piece(last, fault, "redo")
            piece(fault, noticed, "detect")
            piece(noticed, began, "reconfigure")
        else:
            extra = max(began - last - usual_pause, 0.0) if former["iteration"] in saved else 0.0
            between = {"checkpoint": extra, "other": began - last - extra}
            pieces.append((last, began, between, between))
        held = sum(devices * max(min(done, b) - max(began, a), 0.0) for a, b, devices in nodes) / row["seconds"]
        suffers = any(each["iteration"] <= row["iteration"] < each["ended_iteration"] for each in slow)
        late = row["seconds"] - row["predicted_seconds"] if suffers else 0.0
        useful = "rollback" if row["iteration"] in again else "useful"
        shared: list[dict[str, float]] = []
        for full in (asked, min(asked, held)):  # of seconds, and of GPU-hours
            working = min(active[row["epoch"]] / full, 1.0)
            idle = min(standby[row["epoch"]] / full, 1.0 - working)
            told = {"slow": late * working, "idle": idle * row["seconds"]}
            told["capacity"] = (1.0 - working - idle) * row["seconds"]
            shared.append({**told, useful: row["seconds"] * working - told["slow"]})
        pieces.append((began, done, shared[0], shared[1]))
        last = done
    fatal = [row for row in rows["failures"] if row["kind"] == "program"]
    if not iterations:
        piece(0.0, at(end), "start")
    elif fatal and job["state"] == "failed":
        fault, noticed = at(fatal[0]["failed_at"]), at(fatal[0]["noticed_at"])
        piece(last, fault, "redo")
        piece(fault, noticed, "detect")
        piece(noticed, at(end), "reconfigure")
    else:
        piece(last, at(end), "other")
    found: dict[str, float] = {}
    for begin, done, causes, of_devices in pieces:
        device_s = sum(devices * max(min(done, b) - max(begin, a), 0.0) for a, b, devices in nodes)
        for cause, seconds in causes.items():
            found[cause] = found.get(cause, 0.0) + seconds
        for cause, seconds in of_devices.items():
            hours = seconds / (done - begin) * device_s / HOUR if done > begin else 0.0
            found[f"h:{cause}"] = found.get(f"h:{cause}", 0.0) + hours
    hours = sum(devices * (b - a) for a, b, devices in nodes) / HOUR
    worked = sum(row["seconds"] for row in iterations) - found.get("idle", 0.0) - found.get("capacity", 0.0)
    wall = (last if job["state"] == "completed" else at(end)) - found["start"] if iterations else 0.0
    hardware = [
        row
        for row in rows["failures"]
        if row["detect_seconds"] is None and row["component"] in ("device", "node", "link", "process")
    ]
    repairs = [noticing[epoch] + moved[epoch]["seconds"] for epoch in mended]
    return found | {
        "held_seconds": at(end),
        "gpu_hours": hours,
        "useful_share": found.get("h:useful", 0.0) / hours,
        "failures": len(rows["failures"]),
        "mtbf_seconds": at(end) / len(rows["failures"]),
        "hardware_failures": len(hardware),
        "failure_rate": 1000 * len(rows["failures"]) / (hours / 24),
        "hardware_failure_rate": 1000 * len(hardware) / (hours / 24),
        **({"hardware_mtbf_seconds": at(end) / len(hardware)} if hardware else {}),
        **({"mttr_seconds": statistics.mean(repairs)} if repairs else {}),
        **({"wall_seconds": wall, "goodput": worked / wall, "ettr": worked / at(end)} if iterations else {}),
        "failure_gpu_hours": sum(
            found.get(f"h:{cause}", 0.0)
            for cause in ("detect", "redo", "reconfigure", "rollback", "slow", "idle", "capacity")
        ),
    }
