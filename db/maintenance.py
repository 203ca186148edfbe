"""Maintenance records: after its repair, a node or device starts with a clean history (`resihp.db.reading.hardware`).

Called by `resihp node repaired`, and by `resihp.db.exchange` with records of another ledger. A record is identified by
its whole content, so adding it twice changes nothing. The database user who imports a record becomes its writer,
whoever wrote it originally; therefore an export contains only records that count for the exporting user. Never changes
rows that jobs have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import DBAPIError

from resihp.db import migrate
from resihp.db.engine import make_engine, masked, refusal, resolve
from resihp.db.models import DeviceRow, JobRow, MaintenanceRow, NodeRow
from resihp.db.reading.hardware import maintenance_rows
from resihp.db.reading.naming import nearest
from resihp.db.reading.reader import Reader
from resihp.errors import LedgerError, UsageError

MAX_DEVICE_DIGITS = 9
"""Limit on the digits of a device number."""
RECORD_COLUMNS = ("cluster", "node", "device_uuid", "kind", "text", "at", "recorded_at")
"""Columns that describe the maintenance and identify a record; `recorded_at` is exact to the microsecond."""
MAX_TEXT_CHARACTERS = 4096
"""Limit on the characters of each text of an imported record."""
MAX_CLOCK_SKEW = timedelta(hours=1)
"""How far the time of an imported record may be ahead of this machine's clock."""
_LOCK_NUMBER = 0x7E52
"""Key of a PostgreSQL advisory lock: if two imports add the same records at once, the second one finds them present."""


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
    """Add a maintenance record; return its columns.

    `node`: the node's name, preceded by its cluster (`alpha/n7`) if the ledger has several clusters and `cluster` is
    empty. `device`: a UUID, or a device number, which is resolved to the UUID of the device that the node had at time
    `at`; if that is unknown, the number itself is stored. None for the whole node. Raises UsageError for an unknown
    node or device, for a name that several clusters have, and for a time in the future; LedgerError if the ledger
    cannot be written.
    """
    now = now or datetime.now(UTC)
    at = at or now
    if at > now:
        raise UsageError(
            f"time {at.isoformat()}: is in the future; record finished work only, for example --at 2h for two hours ago"
        )
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


# --- from one ledger to another -------------------------------------------------------------------------------------


def exportable(connection: Connection) -> list[dict[str, Any]]:
    """Return the records to export, oldest first: those that count for the current database user. An importer becomes
    the writer of all imported records, so records that were written without authority would begin to count if they were
    exported."""
    rows = maintenance_rows(Reader.within(connection))
    return [{name: row[name] for name in RECORD_COLUMNS} for row in rows if row["counts"]]


def check(rows: Iterable[dict[str, Any]], now: datetime | None = None) -> None:
    """Raise LedgerError for a record that `record` could not have written."""
    latest = (now or datetime.now(UTC)) + MAX_CLOCK_SKEW
    for row in rows:
        texts = [row[name] for name in RECORD_COLUMNS[:5] if name != "device_uuid" or row[name] is not None]
        times = [row["at"], row["recorded_at"]]
        if None in texts or None in times:
            raise LedgerError("maintenance: a record lacks its kind, node or time; nothing was imported")
        if any(len(words) > MAX_TEXT_CHARACTERS or not words.isprintable() for words in texts):
            raise LedgerError(f"maintenance of node {row['node'][:80]!a}: has invalid texts; nothing was imported")
        if not row["at"] <= row["recorded_at"] <= latest:
            raise LedgerError(
                f"maintenance of node {row['node'][:80]!a}: at {row['at'].isoformat()} is in the future, or was when "
                "it was recorded; nothing was imported"
            )


def add_missing(connection: Connection, rows: Sequence[dict[str, Any]]) -> int:
    """Add missing records within the caller's transaction; return their number. A record that is present but does not
    count for the caller, because of its writer, is treated as missing."""
    if not rows:
        return 0
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
    present = {tuple(row.values()) for row in exportable(connection)}
    new = {tuple(row[name] for name in RECORD_COLUMNS): row for row in rows}
    missing = [{name: row[name] for name in RECORD_COLUMNS} for identity, row in new.items() if identity not in present]
    if missing:
        connection.execute(insert(MaintenanceRow), missing)
    return len(missing)


# --- finding the node and the device --------------------------------------------------------------------------------


def _place(reader: Reader, cluster: str, node: str) -> tuple[str, str]:
    """Return a node's cluster, and its name there. Raises UsageError if several clusters have a node of this name."""
    clusters = reader.clusters()
    named, slash, name = node.partition("/")
    if slash and named in clusters:
        return named, name
    if len(clusters) < 2 or cluster:
        return cluster, node
    nodes = NodeRow.__table__.c
    query = select(JobRow.cluster).distinct().join(NodeRow, nodes.job_id == JobRow.id).where(nodes.node == node)
    clusters_with_node = sorted({row["cluster"] or "" for row in reader.fetch(query)})
    if len(clusters_with_node) > 1:
        choices = ", ".join(f"{candidate}/{node}" for candidate in clusters_with_node if candidate)
        raise UsageError(f"node {node[:80]!a}: several clusters have one; name it with its cluster's: {choices}")
    return clusters_with_node[0] if clusters_with_node else "", node


def _device(reader: Reader, cluster: str, node: str, device: str, at: datetime) -> str:
    """Return the identity to store for a device: its UUID, or its number if the UUID is unknown."""
    columns = DeviceRow.__table__.c
    if not device.isdecimal() or len(device) > MAX_DEVICE_DIGITS:
        if not reader.fetch(select(columns.uuid).where(columns.uuid == device).limit(1)):
            raise UsageError(
                f"device {device[:80]!a}: this ledger has never seen it; resihp history devices --all --node {node} "
                "lists those that it has"
            )
        return device
    number = int(device)
    name = f"{cluster}/{node}" if cluster and len(reader.clusters()) > 1 else node
    node_name = reader.node_name(columns.node, columns.job_id)
    here = select(columns.uuid).where(node_name == name, columns.uuid != "", columns.joined_at <= at)
    rows = reader.fetch(here.where(columns.device == number).order_by(columns.joined_at.desc()).limit(1))
    return str(rows[0]["uuid"]) if rows else str(number)
