"""Hardware of nodes over time: where devices were seen, repairs, and other changes. Reads only.

Used by `health` and `fleet`, which judge nodes and devices: only records by trusted writers count (`Reader.believed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import Select, String, and_, cast, func, or_, select

from resihp.db.models import DeviceRow, DrainRow, JobRow, LedgerTable, MaintenanceRow, MembershipRow
from resihp.db.reading.reader import Reader
from resihp.db.reading.tables import Row, no_collection
from resihp.detector.lemons import HORIZON_S
from resihp.detector.moved import Machine, Renewal, SeenDevice

LOOK_BACK = timedelta(seconds=HORIZON_S)
"""Additional time before the judged period in which devices are searched for, because a device that never moved was
seen only then."""
NAMES_PER_QUERY = 500
"""Limit on the names in one query."""


def placements(reader: Reader, since: datetime) -> list[SeenDevice]:
    """Return when each device was first seen in its place, from records slightly older than `since` on.

    Devices that several ranks, or virtual nodes, of one job share are omitted: their places mean nothing.
    """
    devices = DeviceRow.__table__.c
    records = reader.believed(
        select().where(devices.uuid != "", devices.joined_at >= since - LOOK_BACK), devices.job_id
    )
    rows = reader.fetch(_changes(reader, records, DeviceRow, ("node", "device"), "uuid", "bus"))
    slots: dict[str, set[tuple[str, int]]] = {}
    for row in rows:
        slots.setdefault(row["uuid"], set()).add((row["node"], row["device"]))
    several = sorted(uuid for uuid, places in slots.items() if len(places) > 1)
    shared: set[str] = set()
    place = devices.node + "#" + cast(devices.device, String)
    for i in range(0, len(several), NAMES_PER_QUERY):
        common = records.add_columns(devices.uuid).where(devices.uuid.in_(several[i : i + NAMES_PER_QUERY]))
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
    """Return when each machine, by its serial number, was first seen under a node's name."""
    stays = MembershipRow.__table__.c
    records = reader.believed(select().where(stays.serial != "", stays.joined_at >= since - LOOK_BACK), stays.job_id)
    return [
        Machine(node=row["node"], serial=row["serial"], since=row["at"].timestamp())
        for row in reader.fetch(_changes(reader, records, MembershipRow, ("node",), "serial"))
    ]


def renewals(reader: Reader, since: datetime, *, afresh: bool = False) -> list[Renewal]:
    """Return the recorded repairs and replacements since `since`.

    `afresh`: also return nodes that Slurm uses again after a drain.
    """
    renewals_found = []
    several = len(reader.clusters()) > 1
    for row in maintenance_rows(reader, since=since):
        if not row["counts"]:
            continue
        device, kind = row["device_uuid"], row["kind"]
        number = int(device) if device is not None and device.isdecimal() else None
        renewals_found.append(
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
        renewals_found += [Renewal(node=row["node"], since=row["undrained_at"].timestamp()) for row in rows]
    return renewals_found


def named(row: Row, several: bool) -> str:
    """Return the name of a repaired node as `Reader.node_name` does: with its cluster if the ledger has several
    clusters."""
    return f"{row['cluster']}/{row['node']}" if several and row["cluster"] else str(row["node"])


def _changes(
    reader: Reader, records: Select[Any], model: type[LedgerTable], key_names: Sequence[str], column: str, *further: str
) -> Select[Any]:
    """Select those of `records` in which `column` differs from the previous record with the same keys."""
    columns = model.__table__.c
    keys = [
        reader.node_name(columns.node, columns.job_id).label("node") if name == "node" else columns[name]
        for name in key_names
    ]
    before = func.lag(columns[column]).over(partition_by=keys, order_by=(columns.joined_at, columns.job_id))
    others = [columns[name] for name in (column, *further)]
    row = records.add_columns(*keys, *others, columns.joined_at.label("at"), before.label("before")).subquery().c
    changed = or_(row.before.is_(None), row.before != row[column])
    return select(*row).where(changed).order_by(row.at, *(row[name] for name in key_names))


def maintenance_rows(reader: Reader, node: str | None = None, since: datetime | None = None) -> list[Row]:
    """Return maintenance records, oldest first: the columns of `MaintenanceRow`, and `counts`, whether the record
    counts (`Reader.is_believed`)."""
    columns = MaintenanceRow.__table__.c
    query = select(*columns, reader.is_believed(columns.written_by).label("counts")).order_by(columns.at, columns.id)
    if node is not None:
        query = query.where(columns.node == node)
    if since is not None:
        query = query.where(columns.at >= since)
    return [{**row, "counts": bool(row["counts"])} for row in reader.fetch(query)]


# --- views ----------------------------------------------------------------------------------------------------------

FACT_NAMES = {"serial": "serial number", "kernel": "kernel", "image": "image", "driver": "driver"}
"""Columns of a stay that are compared with the previous stay, and their names in messages."""
STAY_COLUMNS = (
    *("job", "node", "host", "devices", "joined_at", "lost_at", "how", "serial", "kernel", "image", "driver"),
    "nic_firmware",
)
PLACEMENT_COLUMNS = (
    *("uuid", "name", "node", "device", "bus", "serial", "board", "vbios", "first_seen", "last_seen", "jobs"),
)
OF_STAY = ("job_id", "node", "joined_at")
UUID_SHOWN = 12
"""Number of characters of a UUID that are shown; they suffice to distinguish devices."""


def placed(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each stay of a device in a slot, over all jobs, sorted by UUID and then by time.

    `rows`: rows of the table `devices` of all jobs. Columns: `uuid` (empty for an unidentified device in the slot),
    `name`, `node`, `device`, `bus`, `serial`, `board`, `vbios`, `first_seen`, `last_seen` (times at which jobs joined)
    and `jobs`.
    """
    places: list[tuple[tuple[Any, ...], list[Any]]] = []
    of_device: dict[object, tuple[tuple[Any, ...], list[Any]]] = {}
    same_of, order = itemgetter(*PLACEMENT_COLUMNS[:8]), itemgetter("joined_at", "node", "device")
    with no_collection():
        for row in sorted(rows, key=order):
            key = row["uuid"] or (row["node"], row["device"])
            same, at = same_of(row), row["joined_at"]
            last = of_device.get(key)
            if last is None or last[0] != same:
                last = of_device[key] = (same, [at, at, 0])
                places.append(last)
            times = last[1]
            times[1] = at
            times[2] += 1
        stays = [dict(zip(PLACEMENT_COLUMNS, (*same, *times), strict=True)) for same, times in places]
        return sorted(stays, key=itemgetter("uuid", "first_seen", "node", "device"))


def stays(reader: Reader, job_id: int | None = None, node: str | None = None) -> list[Row]:
    """Return stays for `told_changes`: all stays on the hosts of a job, on the hosts of a node name, or all stays. With
    `job_id`, nodes and hosts have the job's own names; otherwise they have names as in `Reader.node_name`. Column
    `host_name` always has a name as in `Reader.node_name`."""
    served, jobs, devices = MembershipRow.__table__.c, JobRow.__table__.c, DeviceRow.__table__.c
    host_name = reader.node_name(served.host, served.job_id)
    query = select(jobs.name.label("job"), *served, host_name.label("host_name")).join(JobRow, jobs.id == served.job_id)
    node_name = reader.node_name(served.node, served.job_id)
    if job_id is None:
        query = query.add_columns(node_name.label("node_name"))
    parts = select(devices.job_id, devices.node, devices.joined_at, devices.device, devices.uuid, devices.vbios)
    if job_id is not None or node is not None:
        of_job = served.job_id == job_id
        is_selected = (
            of_job if node is None or job_id is not None else reader.is_asked(node, served.node, served.job_id)
        )
        selected_hosts = select(host_name).where(is_selected)
        query = query.where(host_name.in_(selected_hosts))
        parts = parts.join(MembershipRow, and_(*(devices[name] == served[name] for name in OF_STAY)))
        parts = parts.where(host_name.in_(selected_hosts))
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
    """Return the stays of one ledger or several, in order of time, each with the changes on its host since the previous
    stay. Columns: `job_id`, `STAY_COLUMNS`, `vbios` of the devices, and `changed`, the changes as text, empty if there
    were none or if unknown."""
    changed_stays = []
    last_facts: dict[str, dict[str, str]] = {}
    with no_collection():
        for row in sorted(rows, key=lambda row: (row["joined_at"], row["host_name"], row["node"])):
            facts = {words: row[name] for name, words in FACT_NAMES.items()}
            facts |= {f"firmware of {name}": version for name, version in row["nic_firmware"].items()}
            for number, part in sorted(row["made_of"].items()):
                facts |= {f"device {number}": part["uuid"][:UUID_SHOWN], f"VBIOS of device {number}": part["vbios"]}
            before = last_facts.setdefault(row["host_name"], {})
            changed = [
                f"{words} {before[words]} -> {value}"
                for words, value in facts.items()
                if value and before.get(words, value) != value
            ]
            before.update({words: value for words, value in facts.items() if value})
            vbios = ", ".join(sorted({part["vbios"] for part in row["made_of"].values()} - {""}))
            stay = {name: row[name] for name in ("job_id", *STAY_COLUMNS)}
            stay["nic_firmware"] = ", ".join(" ".join(adapter) for adapter in row["nic_firmware"].items())
            changed_stays.append({**stay, "vbios": vbios, "changed": "; ".join(changed)})
    return changed_stays


def _firmware(content: str) -> dict[str, str]:
    """Decode the firmware versions. Imported rows may be malformed; malformed values count as empty."""
    try:
        return msgspec.json.decode(content, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
