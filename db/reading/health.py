"""Which nodes fail again and again, and what their devices usually give, over all jobs of a ledger. Reads only;
`resihp.detector.lemons` and `resihp.detector.probes` judge.

What is held against a node: verdicts that name it (a process, device, node or link of it failed or was slow), and
devices found unfit before they were given work, in jobs of whom we believe (`Reader.believed`); not what was injected
on purpose, nor what came after that in the job (`unprovoked`), nor programs' failures or broken communication. How sure
a verdict is depends on its component (`CERTAINTY`; a process may die of anything) and, of what was slow, on the
detector's confidence. Those on devices and nodes that are more likely true than not make whole outages that count; the
others only move a node up in the list. A node's service is the time that it spent in jobs, times its devices. Devices
that are known by their UUID take their record along when they move, and what was repaired or replaced starts anew
(`db.reading.hardware`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, case, func, select

from db.models import EventRow, FailureRow, JobRow, LedgerTable, NodeRow, ProbeRow
from db.reading import hardware
from db.reading.reader import Reader
from db.reading.tables import Row
from resihp.detector.lemons import HALF_LIFE_S, HORIZON_S, NodeFailure, NodeHealth, Service, node_health
from resihp.detector.moved import follow
from resihp.detector.probes import Former, Place
from resihp.detector.probes import usual_speeds as former_speeds
from resihp.protocol.messages import Speed

if TYPE_CHECKING:
    import pandas as pd

CERTAINTY: Mapping[str, float] = {"device": 0.9, "node": 0.9, "link": 0.5, "process": 0.3}
"""That a verdict on such a component is the node's fault."""
UNFIT_CERTAINTY = 0.7
HORIZON = timedelta(seconds=HORIZON_S)
"""After it nothing says anything of a node any more."""
MEMORY = timedelta(days=90)
"""Older measurements say nothing of a node any more."""
SHOWN = 3
"""Verdicts told as evidence, the last ones."""


def nodes_by_health(
    reader: Reader,
    now: datetime | None = None,
    *,
    half_life: timedelta = timedelta(seconds=HALF_LIFE_S),
    afresh: bool = False,
    injected: bool = False,
) -> list[NodeHealth]:
    """All nodes that were in a job in the last 180 days: lemons first, then whoever is expected to fail most.

    `half_life`: for that order; it does not decide who is a lemon. `afresh`: a node that Slurm uses again after a drain
    counts as mended. It may merely have been undrained, so not by default. `injected`: count failures that were
    injected, too. Raises LedgerError when the ledger cannot be read,
    ValueError for a half-life that is not positive.
    """
    now = now or datetime.now(UTC)
    since = now - HORIZON
    counted = follow(
        verdicts(reader, since, injected),
        services(reader, since),
        hardware.placements(reader, since),
        hardware.renewals(reader, since, afresh=afresh),
        hardware.machines(reader, since),
    )
    return node_health(*counted, now.timestamp(), half_life_s=half_life.total_seconds())


def health_frame(reader: Reader, now: datetime | None = None, **options: Any) -> pd.DataFrame:
    """`nodes_by_health` as a pandas frame, one row for each node; options as there.

    Columns: `node`; `lemon`: the node as a whole stands out, or a device of it; `observed` outages against hardware of
    it where `expected` were, by the rate of all others, in the last `window_days` (30, 90 or 180, whichever tells
    most); `p`: how probable so many are by chance; `q`: the share of false ones among all that stand out at least as
    much; `lemon_devices` by number, and `devices`: the same of them in words; `failures`: outages in 180 days,
    `unsure`: more, of which there is no evidence against hardware, so that they do not count; `last` verdict (UTC);
    `device_days` of service; `rate`: failures per 1000 device-days to be expected, newer ones weighing more, by which
    the others are ranked; `evidence`: the last verdicts in words, newest first.
    """
    import pandas as pd

    rows = health_rows(reader, now, **options)
    types = {
        "node": "string",
        "lemon": "boolean",
        "observed": "Int64",
        "expected": "float64",
        "window_days": "Int64",
        "p": "float64",
        "q": "float64",
        "lemon_devices": "string",
        "devices": "string",
        "failures": "Int64",
        "unsure": "Int64",
        "last": "datetime64[ns, UTC]",
        "device_days": "float64",
        "rate": "float64",
        "evidence": "string",
    }
    return pd.DataFrame(rows, columns=list(types)).astype(types)


def health_rows(reader: Reader, now: datetime | None = None, **options: Any) -> list[dict[str, Any]]:
    """The same as plain rows."""
    return [
        {
            "node": one.node,
            **tally_row(one),
            "failures": one.failures,
            "unsure": one.unsure,
            "last": None if one.last is None else datetime.fromtimestamp(one.last, UTC),
            "device_days": one.device_hours / 24.0,
            "rate": one.rate * 24.0 * 1000.0,
            "evidence": "; ".join(_told(verdict) for verdict in one.verdicts[: -SHOWN - 1 : -1]),
        }
        for one in nodes_by_health(reader, now, **options)
    ]


def tally_row(one: NodeHealth) -> dict[str, Any]:
    """How a node and its devices stand, as columns of `health_frame`."""
    return {
        "lemon": one.lemon,
        "observed": one.tally.observed,
        "expected": one.tally.expected,
        "window_days": one.tally.window_days,
        "p": one.tally.p,
        "q": one.tally.q,
        "lemon_devices": ", ".join(str(device) for device in one.lemon_devices),
        "devices": "; ".join(f"device {device}: {one.devices[device].told}" for device in one.lemon_devices),
    }


def usual_speeds(
    reader: Reader, nodes: Sequence[str], now: datetime | None = None, cluster: str = ""
) -> dict[Place, Speed]:
    """What the devices of these nodes usually gave before they were given work, while they were found fit.

    Measurements of the last `MEMORY`; with `cluster`, of its jobs alone, where the ledger has several. Raises
    LedgerError when the ledger cannot be read.
    """
    query = (
        select(*_columns(ProbeRow, "job_id", "node", "hardware", "flops", "memory_bytes"), *_columns(NodeRow, "host"))
        .join(NodeRow, (NodeRow.job_id == ProbeRow.job_id) & (NodeRow.node == ProbeRow.node))
        .where(ProbeRow.kind == "device", ProbeRow.passed.is_(True), ProbeRow.occasion.in_(("start", "join")))
        .where(ProbeRow.node.in_(nodes), ProbeRow.flops > 0.0, ProbeRow.hardware.is_not(None))
        .where(ProbeRow.measured_at >= (now or datetime.now(UTC)) - MEMORY)
        .order_by(ProbeRow.measured_at.desc(), ProbeRow.id.desc())
    )
    query = reader.believed(query, ProbeRow.__table__.c.job_id)
    if cluster and len(reader.clusters()) > 1:
        query = query.where(ProbeRow.__table__.c.job_id.in_(select(JobRow.id).where(JobRow.cluster == cluster)))
    former = (
        Former(
            place=(row["node"], row["host"], row["hardware"]),
            job=row["job_id"],
            flops=row["flops"],
            memory_bytes=row["memory_bytes"] or 0.0,
        )
        for row in reader.fetch(query)
    )
    return former_speeds(former)


def _told(verdict: NodeFailure) -> str:
    at = datetime.fromtimestamp(verdict.at, UTC)
    return f"{at:%Y-%m-%d %H:%M} job {verdict.job}: {verdict.cause}"


def _columns(model: type[LedgerTable], *names: str) -> list[ColumnElement[Any]]:
    return [model.__table__.columns[name] for name in names]


_JOB: list[ColumnElement[Any]] = [JobRow.__table__.columns["name"].label("job")]


def verdicts(reader: Reader, since: datetime, injected: bool = False, *, told: bool = True) -> list[NodeFailure]:
    """What counts against nodes, of one ledger; without `told`, not what happened in which job, which takes longer."""
    return [*_failures(reader, since, injected, told), *_probes(reader, since, injected)]


def unprovoked(reader: Reader, rows: Sequence[Row], at: str) -> list[Row]:
    """Rows of many jobs, with `job_id` and a time `at`, without what happened in a job once something had been broken
    or slowed on purpose in it: that says nothing of a node.

    Not everything that follows from such a fault is known by itself: what stands by because it was slowed is measured
    again and again, whoever waits for a slow link may be taken for slow, and a supervisor that takes over does not know
    what the last one did. What a log tells of hardware (`code`) counts all the same.
    """
    events, jobs = EventRow.__table__.c, sorted({row["job_id"] for row in rows})
    first: dict[int, float] = {}
    for i in range(0, len(jobs), hardware.MANY):
        query = select(events.job_id, func.min(reader.seconds(events.at)).label("at")).group_by(events.job_id)
        query = query.where(events.job_id.in_(jobs[i : i + hardware.MANY]), events.kind == "FaultInjected")
        first |= {row["job_id"]: row["at"] for row in reader.fetch(query)}

    def seconds(time: datetime | float) -> float:
        return time.timestamp() if isinstance(time, datetime) else time

    return [row for row in rows if row.get("code") is not None or seconds(row[at]) < first.get(row["job_id"], math.inf)]


def _failures(reader: Reader, since: datetime, injected: bool, told: bool) -> list[NodeFailure]:
    failures = FailureRow.__table__.c
    query = select(
        reader.node_name(failures.node, failures.job_id).label("node"),
        *_columns(FailureRow, "job_id", "device", "kind", "component", "confidence", "code"),
        failures.noticed_at if told else reader.seconds(failures.noticed_at).label("at"),
    ).where(failures.node.is_not(None), failures.noticed_at >= since)
    if told:
        query = query.add_columns(failures.cause, *_JOB).join(JobRow, JobRow.id == failures.job_id)
        query = query.order_by(failures.noticed_at, failures.job_id, failures.failure)
    if not injected:  # only of what was injected is it known how long it took to notice
        query = query.where(failures.detect_seconds.is_(None))
    rows = reader.fetch(reader.believed(query, failures.job_id))
    rows = rows if injected else unprovoked(reader, rows, "noticed_at" if told else "at")
    return [
        NodeFailure(
            node=row["node"],
            at=row["noticed_at"].timestamp() if told else row["at"],
            kind=row["kind"],
            component=row["component"],
            device=row["device"],
            certainty=CERTAINTY.get(row["component"], 0.0) * (1.0 if row["confidence"] is None else row["confidence"]),
            job=row.get("job", ""),
            cause=row.get("cause", ""),
        )
        for row in rows
    ]


def _probes(reader: Reader, since: datetime, injected: bool) -> list[NodeFailure]:
    """Devices found unfit at the start or on joining; on a suspicion there is a verdict, too."""
    query = (
        select(
            reader.node_name(ProbeRow.__table__.c.node, ProbeRow.__table__.c.job_id).label("node"),
            *_columns(ProbeRow, "job_id", "device", "measured_at", "evidence"),
            *_JOB,
        )
        .join(JobRow, JobRow.id == ProbeRow.job_id)
        .where(ProbeRow.passed.is_(False), ProbeRow.kind == "device", ProbeRow.occasion != "suspicion")
        .where(ProbeRow.measured_at >= since)
        .order_by(ProbeRow.measured_at, ProbeRow.id)
    )
    rows = reader.fetch(reader.believed(query, ProbeRow.__table__.c.job_id))
    return [
        NodeFailure(
            node=row["node"],
            at=row["measured_at"].timestamp(),
            kind="fail-slow",
            component="device",
            device=row["device"],
            certainty=UNFIT_CERTAINTY,
            job=row["job"],
            cause=f"device {row['device']} found unfit, {row['evidence']}",
        )
        for row in (rows if injected else unprovoked(reader, rows, "measured_at"))
    ]


def services(reader: Reader, since: datetime) -> list[Service]:
    """From joining to being lost or given back, or to the job's end or its last sign of life; who never came did not
    serve."""
    seconds = reader.seconds
    nodes, jobs = NodeRow.__table__.c, JobRow.__table__.c
    over = case((jobs.ended_at.is_(None) | (jobs.state == "abnormal"), jobs.last_entry_at), else_=jobs.ended_at)
    times = {"joined": nodes.joined_at, "lost": nodes.lost_at, "released": nodes.released_at, "over": over}
    query = (
        select(
            reader.node_name(nodes.node, nodes.job_id).label("node"),
            nodes.devices,
            *(seconds(time).label(name) for name, time in times.items()),
        )
        .join(JobRow, jobs.id == nodes.job_id)
        .where(jobs.last_entry_at >= since, nodes.host != "")
        .order_by(nodes.job_id, nodes.node)
    )
    return [
        Service(
            node=row["node"],
            since=row["joined"],
            until=min(at for at in (row["lost"], row["released"], row["over"]) if at is not None),
            devices=row["devices"],
        )
        for row in reader.fetch(reader.believed(query, nodes.job_id))
    ]
