"""Which devices were suspected of being slow in former jobs, over all jobs of a ledger. Reads only.

A suspicion that no probe confirmed is no failure: it says nothing about a node by itself, and does not make it a lemon
(`db.reading.health`). That the same device is suspected in one job after the other does say something to whoever looks.
What stands there must be the same (`resihp.detector.probes.Place`): node, host, and hardware where it was measured.
Of suspicions that others explain ("dropped") none counts, nor of those that were raised after something was broken or
slowed on purpose in the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from datetime import UTC, datetime

import msgspec
from sqlalchemy import func, select

from db.models import FailureRow, NodeRow, ProbeRow, SuspicionRow, WorkerRow
from db.reading.health import MEMORY, unprovoked
from db.reading.reader import Reader
from db.reading.tables import Row
from resihp.detector.probes import Place

JobDevice = tuple[int, str, int]
"""The number of a job, a node, a device of it."""


class FormerSuspicions(msgspec.Struct, frozen=True, kw_only=True):
    """Of one node: in how many jobs it served, and in how many of them a device of it was suspected and not convicted;
    by device, in how many it was suspected, convicted or not."""

    place: Place
    jobs: int
    suspected: int
    by_device: dict[int, int]


def former_suspicions(
    reader: Reader, nodes: Collection[str] | None = None, now: datetime | None = None, before: Row | None = None
) -> list[FormerSuspicions]:
    """Of these nodes, or of all, by place; of jobs that we believe (`Reader.believed`), in the last `MEMORY`.

    `before`: only of jobs that began before this one. Raises LedgerError when the ledger cannot be read.
    """
    since = (now or datetime.now(UTC)) - MEMORY
    places = _places(reader, nodes, since)
    if before is not None:
        earlier = {job["id"] for job in reader.jobs() if job["started_at"] < before["started_at"]}
        places = {key: place for key, place in places.items() if key[0] in earlier}
    served = Counter(places.values())
    convicted = _convicted(reader, since)
    suspected: dict[Place, set[int]] = defaultdict(set)
    by_device: dict[Place, Counter[int]] = defaultdict(Counter)
    for job_id, node, device in sorted(_suspects(reader, since)):
        if (place := places.get((job_id, node))) is not None:
            by_device[place][device] += 1
            if (job_id, node, device) not in convicted:
                suspected[place].add(job_id)
    return [
        FormerSuspicions(place=place, jobs=jobs, suspected=len(suspected[place]), by_device=dict(by_device[place]))
        for place, jobs in sorted(served.items())
    ]


def by_node(reader: Reader, now: datetime | None = None) -> dict[str, dict[str, int]]:
    """`jobs` in which each node served, and `suspected_jobs`, where a device of it was suspected and not convicted."""
    found: dict[str, dict[str, int]] = {}
    for one in former_suspicions(reader, now=now):
        node = found.setdefault(one.place[0], {"jobs": 0, "suspected_jobs": 0})
        node["jobs"] += one.jobs
        node["suspected_jobs"] += one.suspected
    return found


def of_device(found: Iterable[FormerSuspicions], place: Place, device: int) -> tuple[int, int]:
    """In how many former jobs a device was suspected, and in how many its node served.

    Where hardware was not measured (an empty name), node and host alone tell.
    """
    same = [
        one
        for one in found
        if one.place[:2] == place[:2] and (one.place[2] == place[2] or "" in (one.place[2], place[2]))
    ]
    return sum(one.by_device.get(device, 0) for one in same), sum(one.jobs for one in same)


def place_of(reader: Reader, job_id: int, node: str) -> Place:
    """What a node of a job is; without a host where it never came."""
    since = datetime.fromtimestamp(0.0, UTC)
    return _places(reader, (node,), since).get((job_id, node), (node, "", ""))


def _places(reader: Reader, nodes: Collection[str] | None, since: datetime) -> dict[tuple[int, str], Place]:
    """By job and node."""
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
    """Devices that were suspected, by the ranks that they had."""
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
    """What was imported may hold anything."""
    try:
        return msgspec.json.decode(content, type=list[int])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []


def _convicted(reader: Reader, since: datetime) -> set[JobDevice]:
    columns = FailureRow.__table__.c
    query = select(columns.job_id, columns.node, columns.device).where(
        columns.kind == "fail-slow", columns.component == "device", columns.noticed_at >= since
    )
    return {(row["job_id"], row["node"], row["device"]) for row in reader.fetch(query)}
