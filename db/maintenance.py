"""Writes down what somebody did to a node or a device of it: from then on it starts anew (`db.reading.hardware`).

Called by `resihp node repaired`. Never changes what jobs have said.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.exc import DBAPIError

from db import migrate
from db.engine import make_engine, masked, refusal, resolve
from db.models import DeviceRow, JobRow, MaintenanceRow, NodeRow
from db.reading.reader import Reader, nearest
from resihp.errors import UsageError

DIGITS = 9
"""Of a device's number, at most."""


def record(
    url: str,
    node: str,
    *,
    device: str | None = None,
    at: datetime | None = None,
    kind: str = "repaired",
    note: str = "",
    cluster: str = "",
    now: datetime | None = None,
) -> dict[str, Any]:
    """Add a row; its columns.

    `node`: its name, with its cluster's (`alpha/n7`) where the ledger has several clusters, unless `cluster` tells.
    `device`: its UUID, or its number, by which the ledger knows what was there `at` that time:
    where it does not, the number is kept instead of a UUID. Raises UsageError for a node or device that the ledger has
    never seen, for a name that several clusters have and for what is to come, LedgerError if it cannot be written.
    """
    now = now or datetime.now(UTC)
    at = at or now
    if at > now:
        raise UsageError(f"time {at.isoformat()}: is yet to come; write down what is done, --at 2h for two hours ago")
    with Reader.open(url) as reader:
        columns = NodeRow.__table__.c
        cluster, node = _place(reader, cluster, node)
        if not reader.fetch(select(columns.node).where(columns.node == node).limit(1)):
            words = nearest(node, reader.nodes(None))
            raise UsageError(f"node {node[:80]!a}: not in ledger {masked(resolve(url))}{words}")
        uuid = None if device is None else _device(reader, cluster, node, device, at)
    row = {
        "cluster": cluster,
        "node": node,
        "device_uuid": uuid,
        "kind": kind,
        "text": note,
        "at": at,
        "recorded_at": now,
    }
    parsed = resolve(url)
    engine = make_engine(parsed, write=True)
    try:
        with engine.begin() as connection:
            migrate.check_writable(connection, masked(parsed))
            connection.execute(insert(MaintenanceRow.__table__).values(row))  # type: ignore[arg-type]
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()
    return row


def _place(reader: Reader, cluster: str, node: str) -> tuple[str, str]:
    """The cluster and the name there of a node. Raises UsageError where it may be one of several."""
    clusters = reader.clusters()
    named, slash, name = node.partition("/")
    if slash and named in clusters:
        return named, name
    if len(clusters) < 2 or cluster:
        return cluster, node
    nodes = NodeRow.__table__.c
    query = select(JobRow.cluster).distinct().join(NodeRow, nodes.job_id == JobRow.id).where(nodes.node == node)
    found = sorted({row["cluster"] or "" for row in reader.fetch(query)})
    if len(found) > 1:
        choices = ", ".join(f"{each}/{node}" for each in found if each)
        raise UsageError(f"node {node[:80]!a}: several clusters have one; name it with its cluster's: {choices}")
    return found[0] if found else "", node


def _device(reader: Reader, cluster: str, node: str, device: str, at: datetime) -> str:
    """What is written down of a device: its UUID, or its number where nobody can tell more."""
    columns = DeviceRow.__table__.c
    if not device.isdecimal() or len(device) > DIGITS:
        if not reader.fetch(select(columns.uuid).where(columns.uuid == device).limit(1)):
            raise UsageError(
                f"device {device[:80]!a}: this ledger has never seen it; resihp history devices --all --node {node} "
                "lists those that it has"
            )
        return device
    number = int(device)
    name = f"{cluster}/{node}" if cluster and len(reader.clusters()) > 1 else node
    there = reader.node_name(columns.node, columns.job_id)
    here = select(columns.uuid).where(there == name, columns.uuid != "", columns.joined_at <= at)
    found = reader.fetch(here.where(columns.device == number).order_by(columns.joined_at.desc()).limit(1))
    return str(found[0]["uuid"]) if found else str(number)
