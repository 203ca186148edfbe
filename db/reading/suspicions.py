"""Devices that were suspected of being slow in earlier jobs, over all jobs of a ledger. Reads only.

A suspicion that no probe confirmed is not a failure: alone it is no evidence against a node, and does not make it a
lemon (`resihp.db.reading.health`). But a device that is suspected in one job after another deserves attention.
Suspicions count only for the same hardware (`resihp.detector.probes.Place`): node, host, and device model where it was
measured. Suspicions that others explain ("dropped") do not count, nor do those that were raised after a fault was
injected into the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from datetime import UTC, datetime

import msgspec
from sqlalchemy import func, select

from resihp.db.models import FailureRow, NodeRow, ProbeRow, SuspicionRow, WorkerRow
from resihp.db.reading.health import MEMORY_PERIOD, unprovoked
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row
from resihp.detector.probes import Place

JobDevice = tuple[int, str, int]
"""(job id, node, number of a device on the node)."""


class FormerSuspicions(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one node. `jobs`: number of jobs in which it served; `suspected`: number of these in which one of its
    devices was suspected and not declared slow; `by_device`: number of jobs in which each device was suspected, whether
    or not it was declared slow."""

    place: Place
    jobs: int
    suspected: int
    by_device: dict[int, int]


def former_suspicions(
    reader: Reader, nodes: Collection[str] | None = None, now: datetime | None = None, before: Row | None = None
) -> list[FormerSuspicions]:
    """Return the records of these nodes, or of all nodes, by place; from trusted jobs (`Reader.believed`) of the last
    `MEMORY_PERIOD`.

    `before`: use only jobs that began before this job. Raises LedgerError if the ledger cannot be read.
    """
    since = (now or datetime.now(UTC)) - MEMORY_PERIOD
    places = _places(reader, nodes, since)
    if before is not None:
        earlier = {job["id"] for job in reader.jobs() if job["started_at"] < before["started_at"]}
        places = {key: place for key, place in places.items() if key[0] in earlier}
    served = Counter(places.values())
    declared_slow = _declared_slow(reader, since)
    suspected: dict[Place, set[int]] = defaultdict(set)
    by_device: dict[Place, Counter[int]] = defaultdict(Counter)
    for job_id, node, device in sorted(_suspects(reader, since)):
        if (place := places.get((job_id, node))) is not None:
            by_device[place][device] += 1
            if (job_id, node, device) not in declared_slow:
                suspected[place].add(job_id)
    return [
        FormerSuspicions(place=place, jobs=jobs, suspected=len(suspected[place]), by_device=dict(by_device[place]))
        for place, jobs in sorted(served.items())
    ]


def by_node(reader: Reader, now: datetime | None = None) -> dict[str, dict[str, int]]:
    """Return, by node, the number of `jobs` in which it served, and of `suspected_jobs`, in which one of its devices
    was suspected and not declared slow."""
    by_name: dict[str, dict[str, int]] = {}
    for record in former_suspicions(reader, now=now):
        node = by_name.setdefault(record.place[0], {"jobs": 0, "suspected_jobs": 0})
        node["jobs"] += record.jobs
        node["suspected_jobs"] += record.suspected
    return by_name


def of_device(records: Iterable[FormerSuspicions], place: Place, device: int) -> tuple[int, int]:
    """Return the number of earlier jobs in which a device was suspected, and the number in which its node served.

    If the device's model was not measured (an empty name), only node and host are compared.
    """
    same = [
        record
        for record in records
        if record.place[:2] == place[:2] and (record.place[2] == place[2] or "" in (record.place[2], place[2]))
    ]
    return sum(record.by_device.get(device, 0) for record in same), sum(record.jobs for record in same)


def place_of(reader: Reader, job_id: int, node: str) -> Place:
    """Return the place of a job's node; without a host if the node never came."""
    since = datetime.fromtimestamp(0.0, UTC)
    return _places(reader, (node,), since).get((job_id, node), (node, "", ""))


def _places(reader: Reader, nodes: Collection[str] | None, since: datetime) -> dict[tuple[int, str], Place]:
    """Return places by job id and node."""
    columns, probes = NodeRow.__table__.c, ProbeRow.__table__.c
    hardware = (
        select(func.max(probes.hardware))
        .where(probes.job_id == columns.job_id, probes.node == columns.node, probes.kind == "device")
        .scalar_subquery()
    )
    name = reader.node_name(columns.node, columns.job_id)
    query = select(columns.job_id, columns.node, name.label("name"), columns.host, hardware.label("hardware"))
    query = query.where(columns.host != "", columns.joined_at >= since)
    if nodes is not None:
        query = query.where(columns.node.in_(nodes))
    rows = reader.fetch(reader.believed(query, columns.job_id))
    return {(row["job_id"], row["node"]): (row["name"], row["host"], row["hardware"] or "") for row in rows}


def _suspects(reader: Reader, since: datetime) -> set[JobDevice]:
    """Return the devices of the suspected ranks."""
    columns = SuspicionRow.__table__.c
    query = select(columns.job_id, columns.ranks, columns.outcome, columns.raised_at).where(
        columns.component == "device", columns.raised_at >= since
    )
    rows = unprovoked(reader, reader.fetch(reader.believed(query, columns.job_id)), "raised_at")
    suspects = {(row["job_id"], rank) for row in rows if row["outcome"] != "dropped" for rank in _ranks(row["ranks"])}
    workers = WorkerRow.__table__.c
    seats = select(workers.job_id, workers.rank, workers.node, workers.device).where(
        workers.job_id.in_({job_id for job_id, _ in suspects}), workers.rank.in_({rank for _, rank in suspects})
    )
    return {
        (row["job_id"], row["node"], row["device"])
        for row in reader.fetch(seats)
        if (row["job_id"], row["rank"]) in suspects
    }


def _ranks(content: str) -> list[int]:
    """Decode a list of ranks. Imported rows may be malformed; malformed values count as empty."""
    try:
        return msgspec.json.decode(content, type=list[int])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []


def _declared_slow(reader: Reader, since: datetime) -> set[JobDevice]:
    columns = FailureRow.__table__.c
    query = select(columns.job_id, columns.node, columns.device).where(
        columns.kind == "fail-slow", columns.component == "device", columns.noticed_at >= since
    )
    return {(row["job_id"], row["node"], row["device"]) for row in reader.fetch(query)}
