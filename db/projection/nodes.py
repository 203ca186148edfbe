"""Rows of nodes, of their stays in a job and their devices, and of workers.

Decides how journal entries change these rows; never judges a node. Called by `applying`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import update
from sqlalchemy.orm import Session

from resihp.db import models
from resihp.db.projection.columns import moment, stored_text
from resihp.db.projection.statements import upsert
from resihp.record import journal


def join_node(session: Session, job: models.JobRow, entry: journal.NodeJoined, at: float) -> None:
    join_nodes(session, job, [(entry, at)])


def join_nodes(session: Session, job: models.JobRow, joined: Sequence[tuple[journal.NodeJoined, float]]) -> None:
    rows = [
        {
            "job_id": job.id,
            "node": stored_text(entry.node),
            "host": stored_text(entry.host),
            "devices": entry.devices,
            "joined_at": moment(at),
            "lost_at": None,
            "lost_reason": None,
            "replacement": None,
            "released_at": None,
        }
        for entry, at in joined
    ]
    upsert(session, models.NodeRow, rows, ("job_id", "node"))
    inventories = [entry.inventory or journal.NodeInventory() for entry, _ in joined]
    served = [_membership(row, inventory) for row, inventory in zip(rows, inventories, strict=True)]
    upsert(session, models.MembershipRow, served, ("job_id", "node", "joined_at"))
    devices = [
        {**{name: row[name] for name in ("job_id", "node", "joined_at")}, **_device_columns(device)}
        for row, inventory in zip(rows, inventories, strict=True)
        for device in {device_inventory.device: device_inventory for device_inventory in inventory.devices}.values()
    ]
    if devices:
        upsert(session, models.DeviceRow, devices, ("job_id", "node", "joined_at", "device"))


def _membership(node: Mapping[str, Any], inventory: journal.NodeInventory) -> dict[str, Any]:
    """Return the columns of the `MembershipRow` for a stay that begins."""
    return {
        **{name: node[name] for name in ("job_id", "node", "joined_at", "host", "devices", "lost_at", "lost_reason")},
        "how": None,
        **{name: stored_text(getattr(inventory, name)) for name in ("serial", "kernel", "image", "driver")},
        "nic_firmware": stored_text(json.dumps(dict(inventory.nic_firmware))),
    }


def _device_columns(device: journal.DeviceInventory) -> dict[str, Any]:
    words = {name: stored_text(getattr(device, name)) for name in ("name", "uuid", "serial", "board", "vbios", "bus")}
    return {"device": device.device, **words}


def lose_node(session: Session, job: models.JobRow, entry: journal.NodeLost, at: float) -> None:
    node = session.get(models.NodeRow, (job.id, stored_text(entry.node)))
    if node is None:  # the job began without it
        node = models.NodeRow(job_id=job.id, node=stored_text(entry.node), host="", devices=0, joined_at=moment(at))
        session.add(node)
    node.lost_at = moment(at)
    node.lost_reason = stored_text(entry.reason)
    served = models.MembershipRow.__table__.c
    session.execute(
        update(models.MembershipRow)
        .where(served.job_id == job.id, served.node == node.node, served.lost_at.is_(None))
        .values(lost_at=node.lost_at, lost_reason=node.lost_reason, how=entry.how or None)
    )


def start_worker(session: Session, job: models.JobRow, entry: journal.WorkerStarted, at: float) -> None:
    start_workers(session, job, [(entry, at)])


def start_workers(session: Session, job: models.JobRow, started: Sequence[tuple[journal.WorkerStarted, float]]) -> None:
    rows = [
        {
            "job_id": job.id,
            "rank": entry.rank,
            "node": stored_text(entry.node),
            "device": entry.device,
            "pid": entry.pid,
            "epoch_joined": entry.epoch,
            "epoch_left": None,
            "exit": None,
            "started_at": moment(at),
            "ended_at": None,
        }
        for entry, at in started
    ]
    upsert(session, models.WorkerRow, rows, ("job_id", "rank"))


def end_worker(session: Session, job: models.JobRow, entry: journal.WorkerEnded, at: float) -> None:
    worker = session.get(models.WorkerRow, (job.id, entry.rank))
    if worker is not None:
        worker.epoch_left = entry.epoch
        worker.exit = entry.exit
        worker.ended_at = moment(at)
