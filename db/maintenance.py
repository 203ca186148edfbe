"""Writes down what somebody did to a node or a device of it: from then on it starts anew (`db.reading.hardware`).

Called by `resihp node repaired`, and by `db.exchange` with records of another ledger. A record is known by all that it
says: one that is in already changes nothing. Who brings one in has written it, whoever did so elsewhere; so nobody
takes along what does not count for himself. Never changes what jobs have said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import DBAPIError

from db import migrate
from db.engine import make_engine, masked, refusal, resolve
from db.models import DeviceRow, JobRow, MaintenanceRow, NodeRow
from db.reading.hardware import maintenance_rows
from db.reading.naming import nearest
from db.reading.reader import Reader
from resihp.errors import LedgerError, UsageError

DIGITS = 9
"""Of a device's number, at most."""
TOLD = ("cluster", "node", "device_uuid", "kind", "text", "at", "recorded_at")
"""Columns that say what was done, by which a record is known; in `recorded_at` to the microsecond."""
LONGEST = 4096
"""Characters of a text that is brought in."""
CLOCKS_APART = timedelta(hours=1)
"""By how much a record may be of the future where it is brought in."""
_LOCK_NUMBER = 0x7E52
"""PostgreSQL advisory lock: of two who bring in the same records at once, one finds them there."""


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


# --- from one ledger to another -------------------------------------------------------------------------------------


def carried(connection: Connection) -> list[dict[str, Any]]:
    """Records that go along with a ledger's jobs, oldest first: those that count for who asks. Whoever brings them in
    does so in his own name, so that what others have written of their own accord would count for the first time."""
    rows = maintenance_rows(Reader.within(connection))
    return [{name: row[name] for name in TOLD} for row in rows if row["counts"]]


def check(rows: Iterable[dict[str, Any]], now: datetime | None = None) -> None:
    """Raises LedgerError for a record that `record` would not have made."""
    latest = (now or datetime.now(UTC)) + CLOCKS_APART
    for row in rows:
        texts = [row[name] for name in TOLD[:5] if name != "device_uuid" or row[name] is not None]
        times = [row["at"], row["recorded_at"]]
        if None in texts or None in times:
            raise LedgerError("maintenance: a record lacks what was done, or where, or when; nothing is brought in")
        if any(len(each) > LONGEST or not each.isprintable() for each in texts):
            raise LedgerError(
                f"maintenance of node {row['node'][:80]!a}: has texts that no record has; nothing is brought in"
            )
        if not row["at"] <= row["recorded_at"] <= latest:
            raise LedgerError(
                f"maintenance of node {row['node'][:80]!a}: at {row['at'].isoformat()} is yet to come, or was when it "
                "was written down; nothing is brought in"
            )


def bring_in(connection: Connection, rows: Sequence[dict[str, Any]]) -> int:
    """Add records that are not there, within the caller's transaction; how many. One that is there and does not count
    for the caller, as somebody else's, is as good as not there."""
    if not rows:
        return 0
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
    there = {tuple(row.values()) for row in carried(connection)}
    new = {tuple(row[name] for name in TOLD): row for row in rows}
    missing = [{name: row[name] for name in TOLD} for known, row in new.items() if known not in there]
    if missing:
        connection.execute(insert(MaintenanceRow), missing)
    return len(missing)


# --- who and where --------------------------------------------------------------------------------------------------


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
