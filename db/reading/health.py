"""Nodes that fail again and again, and the usual speeds of their devices, over all jobs of a ledger. Reads only;
`resihp.detector.lemons` and `resihp.detector.probes` judge.

Counted against a node are verdicts on it (its process, device or link, or the node itself, failed or was slow), and
devices that were found unfit before they had work, in jobs of trusted writers (`Reader.believed`). Not counted are
injected faults and everything after them in the job (`unprovoked`), failures of programs, and broken communication. The
certainty of a verdict depends on its component (`CERTAINTY`; a process may die for any reason) and, for slowness, on
the detector's confidence. A verdict on a device or node that is more likely true than not counts as a whole outage;
other verdicts only move a node up in the list. A node's service is the time that it spent in jobs, multiplied by its
devices. Devices with a known UUID keep their record when they move, and a repaired or replaced device starts with a
clean record (`resihp.db.reading.hardware`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, case, func, select

from resihp.db.models import EventRow, FailureRow, JobRow, LedgerTable, NodeRow, ProbeRow
from resihp.db.reading import hardware
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row
from resihp.detector.lemons import HALF_LIFE_S, HORIZON_S, NodeFailure, NodeHealth, node_health
from resihp.detector.moved import follow
from resihp.detector.probes import Former, Place
from resihp.detector.probes import usual_speeds as former_speeds
from resihp.detector.service_hours import Service
from resihp.protocol.messages import Speed

if TYPE_CHECKING:
    import pandas as pd

CERTAINTY: Mapping[str, float] = {"device": 0.9, "node": 0.9, "link": 0.5, "process": 0.3}
"""Probability that the node is responsible for a failure, by the component of the verdict."""
UNFIT_CERTAINTY = 0.7
JUDGED_PERIOD = timedelta(seconds=HORIZON_S)
"""Age from which on a record no longer counts against a node."""
MEMORY_PERIOD = timedelta(days=90)
"""Age from which on a measurement no longer counts for a node."""
MAX_VERDICTS_SHOWN = 3
"""Number of the latest verdicts that are shown as evidence."""


def nodes_by_health(
    reader: Reader,
    now: datetime | None = None,
    *,
    half_life: timedelta = timedelta(seconds=HALF_LIFE_S),
    afresh: bool = False,
    injected: bool = False,
) -> list[NodeHealth]:
    """Return all nodes that were in a job in the last 180 days: lemons first, then by expected failures, most first.

    `half_life`: of the weight of failures for this order; it does not affect which nodes are lemons. `afresh`: a node
    that Slurm uses again after a drain counts as repaired; off by default, because the node may merely have been
    undrained. `injected`: also count injected failures. Raises LedgerError if the ledger cannot be read, ValueError for
    a half-life that is not positive.
    """
    now = now or datetime.now(UTC)
    since = now - JUDGED_PERIOD
    counted = follow(
        verdicts(reader, since, injected),
        services(reader, since),
        hardware.placements(reader, since),
        hardware.renewals(reader, since, afresh=afresh),
        hardware.machines(reader, since),
    )
    return node_health(*counted, now.timestamp(), half_life_s=half_life.total_seconds())


def health_frame(reader: Reader, now: datetime | None = None, **options: Any) -> pd.DataFrame:
    """Return `nodes_by_health` as a pandas frame, one row per node, with the same options.

    Columns: `node`; `lemon`: the node as a whole, or one of its devices, is an outlier; `observed`: outages that count
    against its hardware, and `expected`: outages at the rate of all other nodes, both in the last `window_days` (30, 90
    or 180, whichever is most significant); `p`: probability of that many outages by chance; `q`: share of false
    positives among all nodes that are at least as conspicuous; `lemon_devices`: numbers of devices that are outliers,
    and `devices`: the evidence against them as text; `failures`: outages in 180 days; `unsure`: further failures
    without evidence against hardware, which do not count; `last`: time of the last verdict (UTC); `device_days` of
    service; `rate`: expected failures per 1000 device-days, with more weight on newer ones, by which nodes that are no
    lemons are ranked; `evidence`: the last verdicts as text, newest first.
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
    """Return the rows of `health_frame` as dictionaries."""
    return [
        {
            "node": node_health_of.node,
            **tally_row(node_health_of),
            "failures": node_health_of.failures,
            "unsure": node_health_of.unsure,
            "last": None if node_health_of.last is None else datetime.fromtimestamp(node_health_of.last, UTC),
            "device_days": node_health_of.device_hours / 24.0,
            "rate": node_health_of.rate * 24.0 * 1000.0,
            "evidence": "; ".join(
                _evidence_line(verdict) for verdict in node_health_of.verdicts[: -MAX_VERDICTS_SHOWN - 1 : -1]
            ),
        }
        for node_health_of in nodes_by_health(reader, now, **options)
    ]


def tally_row(health: NodeHealth) -> dict[str, Any]:
    """Return the evidence against a node and its devices, in columns of `health_frame`."""
    return {
        "lemon": health.lemon,
        "observed": health.tally.observed,
        "expected": health.tally.expected,
        "window_days": health.tally.window_days,
        "p": health.tally.p,
        "q": health.tally.q,
        "lemon_devices": ", ".join(str(device) for device in health.lemon_devices),
        "devices": "; ".join(f"device {device}: {health.devices[device].told}" for device in health.lemon_devices),
    }


def usual_speeds(
    reader: Reader, nodes: Sequence[str], now: datetime | None = None, cluster: str = ""
) -> dict[Place, Speed]:
    """Return the usual speeds of these nodes' devices, from measurements before they had work and in which they were
    found fit.

    Only measurements of the last `MEMORY_PERIOD` are used; with `cluster`, only those of the cluster's jobs, if the
    ledger has several clusters. Raises LedgerError if the ledger cannot be read.
    """
    query = (
        select(*_columns(ProbeRow, "job_id", "node", "hardware", "flops", "memory_bytes"), *_columns(NodeRow, "host"))
        .join(NodeRow, (NodeRow.job_id == ProbeRow.job_id) & (NodeRow.node == ProbeRow.node))
        .where(ProbeRow.kind == "device", ProbeRow.passed.is_(True), ProbeRow.occasion.in_(("start", "join")))
        .where(ProbeRow.node.in_(nodes), ProbeRow.flops > 0.0, ProbeRow.hardware.is_not(None))
        .where(ProbeRow.measured_at >= (now or datetime.now(UTC)) - MEMORY_PERIOD)
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


def _evidence_line(verdict: NodeFailure) -> str:
    at = datetime.fromtimestamp(verdict.at, UTC)
    return f"{at:%Y-%m-%d %H:%M} job {verdict.job}: {verdict.cause}"


def _columns(model: type[LedgerTable], *names: str) -> list[ColumnElement[Any]]:
    return [model.__table__.columns[name] for name in names]


_JOB: list[ColumnElement[Any]] = [JobRow.__table__.columns["name"].label("job")]


def verdicts(reader: Reader, since: datetime, injected: bool = False, *, with_jobs: bool = True) -> list[NodeFailure]:
    """Return the records against nodes in one ledger. Without `with_jobs`, job and cause are omitted, because they take
    longer to read."""
    return [*_failures(reader, since, injected, with_jobs), *_probes(reader, since, injected)]


def unprovoked(reader: Reader, rows: Sequence[Row], at: str) -> list[Row]:
    """Return rows of many jobs, with `job_id` and a time in column `at`, without the rows after a fault was injected
    into their job: they are no evidence about a node.

    Consequences of an injected fault cannot always be recognised: a slowed device on standby is measured again and
    again, a rank that waits for a slow link may be suspected, and a supervisor that takes over does not know the
    actions of the previous one. Hardware errors in logs (`code`) are kept in any case.
    """
    events, jobs = EventRow.__table__.c, sorted({row["job_id"] for row in rows})
    first: dict[int, float] = {}
    for i in range(0, len(jobs), hardware.NAMES_PER_QUERY):
        query = select(events.job_id, func.min(reader.seconds(events.at)).label("at")).group_by(events.job_id)
        query = query.where(events.job_id.in_(jobs[i : i + hardware.NAMES_PER_QUERY]), events.kind == "FaultInjected")
        first |= {row["job_id"]: row["at"] for row in reader.fetch(query)}

    def seconds(time: datetime | float) -> float:
        return time.timestamp() if isinstance(time, datetime) else time

    return [row for row in rows if row.get("code") is not None or seconds(row[at]) < first.get(row["job_id"], math.inf)]


def _failures(reader: Reader, since: datetime, injected: bool, with_jobs: bool) -> list[NodeFailure]:
    failures = FailureRow.__table__.c
    query = select(
        reader.node_name(failures.node, failures.job_id).label("node"),
        *_columns(FailureRow, "job_id", "device", "kind", "component", "confidence", "code"),
        failures.noticed_at if with_jobs else reader.seconds(failures.noticed_at).label("at"),
    ).where(failures.node.is_not(None), failures.noticed_at >= since)
    if with_jobs:
        query = query.add_columns(failures.cause, *_JOB).join(JobRow, JobRow.id == failures.job_id)
        query = query.order_by(failures.noticed_at, failures.job_id, failures.failure)
    if not injected:  # only injected faults have a time to detect
        query = query.where(failures.detect_seconds.is_(None))
    rows = reader.fetch(reader.believed(query, failures.job_id))
    rows = rows if injected else unprovoked(reader, rows, "noticed_at" if with_jobs else "at")
    return [
        NodeFailure(
            node=row["node"],
            at=row["noticed_at"].timestamp() if with_jobs else row["at"],
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
    """Return the devices that were found unfit at the start or on joining. Devices found unfit because of a suspicion
    have a verdict as well, and are not included."""
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
    """Return the service times of nodes: from joining until the node was lost or given back, or until the job's end or
    last entry. A node that never came has none."""
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
