"""What nodes are made of, over time: where devices were seen, what was repaired, and what else changed. Reads only.

For `health` and `fleet`, who judge nodes and devices: only what those say of whom we believe (`Reader.believed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import Select, String, and_, cast, func, or_, select

from db.models import DeviceRow, DrainRow, JobRow, LedgerTable, MaintenanceRow, MembershipRow
from db.reading.reader import Reader
from db.reading.tables import Row, no_collection
from resihp.detector.lemons import HORIZON_S
from resihp.detector.moved import Machine, Renewal, SeenDevice

BEFORE = timedelta(seconds=HORIZON_S)
"""How much longer ago than what is judged devices are looked for: who has been in place all the time was seen then."""
MANY = 500
"""Names asked for at a time."""


def placements(reader: Reader, since: datetime) -> list[SeenDevice]:
    """When devices were first seen where they are, of what has been seen since a bit before.

    Left out are devices that several ranks, or virtual nodes, of one job have in common: their places tell nothing.
    """
    devices = DeviceRow.__table__.c
    known = reader.believed(select().where(devices.uuid != "", devices.joined_at >= since - BEFORE), devices.job_id)
    rows = reader.fetch(_changes(reader, known, DeviceRow, ("node", "device"), "uuid", "bus"))
    slots: dict[str, set[tuple[str, int]]] = {}
    for row in rows:
        slots.setdefault(row["uuid"], set()).add((row["node"], row["device"]))
    several = sorted(uuid for uuid, places in slots.items() if len(places) > 1)
    shared: set[str] = set()
    place = devices.node + "#" + cast(devices.device, String)
    for i in range(0, len(several), MANY):
        common = known.add_columns(devices.uuid).where(devices.uuid.in_(several[i : i + MANY]))
        common = common.group_by(devices.uuid, devices.job_id).having(func.count(place.distinct()) > 1)
        shared |= {row["uuid"] for row in reader.fetch(common)}
    return [
        SeenDevice(
            node=row["node"], device=row["device"], uuid=row["uuid"], bus=row["bus"], since=row["at"].timestamp()
        )
        for row in rows
        if row["uuid"] not in shared
    ]


def machines(reader: Reader, since: datetime) -> list[Machine]:
    """When machines were first seen under a node's name, by their serial numbers."""
    stays = MembershipRow.__table__.c
    known = reader.believed(select().where(stays.serial != "", stays.joined_at >= since - BEFORE), stays.job_id)
    return [
        Machine(node=row["node"], serial=row["serial"], since=row["at"].timestamp())
        for row in reader.fetch(_changes(reader, known, MembershipRow, ("node",), "serial"))
    ]


def renewals(reader: Reader, since: datetime, *, afresh: bool = False) -> list[Renewal]:
    """What was repaired or replaced since then, as somebody wrote down.

    `afresh`: and nodes that Slurm uses again after a drain.
    """
    found = []
    several = len(reader.clusters()) > 1
    for row in maintenance_rows(reader, since=since):
        if not row["counts"]:
            continue
        device, kind = row["device_uuid"], row["kind"]
        number = int(device) if device is not None and device.isdecimal() else None
        found.append(
            Renewal(
                node=named(row, several),
                since=row["at"].timestamp(),
                uuid=device if number is None else None,
                device=number,
                kind="replaced" if kind == "replaced" else "mended",
            )
        )
    if afresh:
        drains = DrainRow.__table__.c
        name = reader.node_name(drains.node, drains.job_id).label("node")
        undrained = select(name, drains.undrained_at).where(drains.undrained_at.is_not(None))
        rows = reader.fetch(reader.believed(undrained, drains.job_id))
        found += [Renewal(node=row["node"], since=row["undrained_at"].timestamp()) for row in rows]
    return found


def named(row: Row, several: bool) -> str:
    """What a node that somebody wrote of is called, as `Reader.node_name` has it: among nodes of several clusters."""
    return f"{row['cluster']}/{row['node']}" if several and row["cluster"] else str(row["node"])


def _changes(
    reader: Reader, known: Select[Any], model: type[LedgerTable], of: Sequence[str], what: str, *told: str
) -> Select[Any]:
    """Of rows that are known, those where `what` is another than at the last joining."""
    columns = model.__table__.c
    keys = [
        reader.node_name(columns.node, columns.job_id).label("node") if name == "node" else columns[name] for name in of
    ]
    before = func.lag(columns[what]).over(partition_by=keys, order_by=(columns.joined_at, columns.job_id))
    others = [columns[name] for name in (what, *told)]
    seen = known.add_columns(*keys, *others, columns.joined_at.label("at"), before.label("before")).subquery().c
    changed = or_(seen.before.is_(None), seen.before != seen[what])
    return select(*seen).where(changed).order_by(seen.at, *(seen[name] for name in of))


def maintenance_rows(reader: Reader, node: str | None = None, since: datetime | None = None) -> list[Row]:
    """What somebody did to nodes, oldest first: columns of `MaintenanceRow`, and whether it `counts` (`believed`)."""
    columns = MaintenanceRow.__table__.c
    query = select(*columns, reader.is_believed(columns.written_by).label("counts")).order_by(columns.at, columns.id)
    if node is not None:
        query = query.where(columns.node == node)
    if since is not None:
        query = query.where(columns.at >= since)
    return [{**row, "counts": bool(row["counts"])} for row in reader.fetch(query)]


# --- views ----------------------------------------------------------------------------------------------------------

FACTS = {"serial": "serial number", "kernel": "kernel", "image": "image", "driver": "driver"}
"""Columns of a stay that are compared with the one before, in words."""
STAY = (
    *("job", "node", "host", "devices", "joined_at", "lost_at", "how", "serial", "kernel", "image", "driver"),
    "nic_firmware",
)
PLACED = (*("uuid", "name", "node", "device", "bus", "serial", "board", "vbios", "first_seen", "last_seen", "jobs"),)
OF_STAY = ("job_id", "node", "joined_at")
UUID_SHOWN = 12
"""Characters of a UUID that tell it from others well enough."""


def placed(rows: Iterable[Row]) -> list[Row]:
    """Where devices were, one row for each stay of a device in a slot, over all jobs: by UUID, then by time.

    `rows` of the table `devices` of all jobs. Columns: `uuid` (empty: of whatever was in that slot while nobody could
    tell), `name`, `node`, `device`, `bus`, `serial`, `board`, `vbios`, `first_seen`, `last_seen` (when jobs joined) and
    `jobs`.
    """
    found: list[tuple[tuple[Any, ...], list[Any]]] = []
    of_device: dict[object, tuple[tuple[Any, ...], list[Any]]] = {}
    same_of, order = itemgetter(*PLACED[:8]), itemgetter("joined_at", "node", "device")
    with no_collection():
        for row in sorted(rows, key=order):
            key = row["uuid"] or (row["node"], row["device"])
            same, at = same_of(row), row["joined_at"]
            last = of_device.get(key)
            if last is None or last[0] != same:
                last = of_device[key] = (same, [at, at, 0])
                found.append(last)
            seen = last[1]
            seen[1] = at
            seen[2] += 1
        stays = [dict(zip(PLACED, (*same, *seen), strict=True)) for same, seen in found]
        return sorted(stays, key=itemgetter("uuid", "first_seen", "node", "device"))


def stays(reader: Reader, job_id: int | None = None, node: str | None = None) -> list[Row]:
    """All stays on the hosts of a job, or that bore a node's name, or on all: for `told_changes`. Those of a job with
    its own names of nodes and hosts, others as `Reader.node_name` has them, which is `host_name` of all."""
    served, jobs, devices = MembershipRow.__table__.c, JobRow.__table__.c, DeviceRow.__table__.c
    host_name = reader.node_name(served.host, served.job_id)
    query = select(jobs.name.label("job"), *served, host_name.label("host_name")).join(JobRow, jobs.id == served.job_id)
    node_name = reader.node_name(served.node, served.job_id)
    if job_id is None:
        query = query.add_columns(node_name.label("node_name"))
    parts = select(devices.job_id, devices.node, devices.joined_at, devices.device, devices.uuid, devices.vbios)
    if job_id is not None or node is not None:
        of_job = served.job_id == job_id
        asked = of_job if node is None or job_id is not None else reader.is_asked(node, served.node, served.job_id)
        there = select(host_name).where(asked)
        query = query.where(host_name.in_(there))
        parts = parts.join(MembershipRow, and_(*(devices[name] == served[name] for name in OF_STAY)))
        parts = parts.where(host_name.in_(there))
    with no_collection():
        made: dict[object, dict[int, Row]] = {}
        for row in reader.fetch(parts):
            made.setdefault(tuple(row[name] for name in OF_STAY), {})[row["device"]] = row
        rows = reader.fetch(query)
        for row in rows:
            row["nic_firmware"] = _firmware(row["nic_firmware"])
            row["made_of"] = made.get(tuple(row[name] for name in OF_STAY), {})
            if job_id is None:
                row["node"], row["host"] = row.pop("node_name"), row["host_name"]
        return rows


def told_changes(rows: Iterable[Row]) -> list[Row]:
    """Stays in order of time, of one ledger or several, with what `changed` on the host since it was last told, in
    words; empty where nothing did, or nobody knows. Columns: `job_id`, `STAY`, `vbios` of its devices, `changed`."""
    found = []
    known: dict[str, dict[str, str]] = {}
    with no_collection():
        for row in sorted(rows, key=lambda row: (row["joined_at"], row["host_name"], row["node"])):
            facts = {words: row[name] for name, words in FACTS.items()}
            facts |= {f"firmware of {name}": version for name, version in row["nic_firmware"].items()}
            for number, part in sorted(row["made_of"].items()):
                facts |= {f"device {number}": part["uuid"][:UUID_SHOWN], f"VBIOS of device {number}": part["vbios"]}
            before = known.setdefault(row["host_name"], {})
            changed = [
                f"{words} {before[words]} -> {value}"
                for words, value in facts.items()
                if value and before.get(words, value) != value
            ]
            before.update({words: value for words, value in facts.items() if value})
            vbios = ", ".join(sorted({part["vbios"] for part in row["made_of"].values()} - {""}))
            stay = {name: row[name] for name in ("job_id", *STAY)}
            stay["nic_firmware"] = ", ".join(" ".join(each) for each in row["nic_firmware"].items())
            found.append({**stay, "vbios": vbios, "changed": "; ".join(changed)})
    return found


def _firmware(content: str) -> dict[str, str]:
    """What was imported may hold anything."""
    try:
        return msgspec.json.decode(content, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
