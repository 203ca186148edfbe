"""Rows of failures, and of measurements of devices and links.

Decides how journal entries change these rows; never looks for a cause. Called by `applying`.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from resihp.db import models
from resihp.db.projection import suspicions
from resihp.db.projection.columns import finite, moment, stored_text
from resihp.record import journal


def add_failure(session: Session, job: models.JobRow, entry: journal.FailureFound, at: float) -> None:
    failed_at = entry.failed_at(at)
    noticed_at = moment(entry.noticed_at(at))
    if entry.noticed_s is None:  # older journals: a death was noticed when the process was seen to end
        worker = models.WorkerRow.__table__.c
        ended = select(func.min(worker.ended_at)).where(worker.job_id == job.id, worker.rank.in_(entry.ranks))
        noticed_at = min(noticed_at, session.scalar(ended) or noticed_at)
    session.merge(
        models.FailureRow(
            job_id=job.id,
            failure=entry.failure,
            kind=entry.kind,
            component=entry.component,
            cause=stored_text(entry.cause),
            ranks=json.dumps(entry.ranks),
            node=None if entry.node is None else stored_text(entry.node),
            device=entry.device,
            iteration=entry.iteration,
            epoch=entry.epoch,
            failed_at=None if failed_at is None else moment(failed_at),
            noticed_at=noticed_at,
            detect_seconds=finite(entry.detect_s),
            recovered_epoch=None,
            evidence=stored_text(entry.evidence),
            speed=finite(entry.speed),
            confidence=finite(entry.confidence),
            code=None if entry.diagnosed is None else stored_text(entry.diagnosed.code),
            category=None if entry.diagnosed is None else stored_text(entry.diagnosed.category),
            hardware=entry.hardware,
            intermittent=entry.intermittent,
            idle=entry.idle,
            link_from=None if entry.link is None else entry.link[0],
            link_to=None if entry.link is None else entry.link[1],
            peer_node=None if entry.link is None else _node_of(session, job, entry.link, entry.node),
        )
    )
    if entry.kind == "fail-slow":
        suspicions.confirm_suspicions(session, job, entry, at)
    else:
        suspicions.link_to_loss(session, job, entry)


def _node_of(session: Session, job: models.JobRow, link: tuple[int, int], node: str | None) -> str | None:
    """Return the node at the other end of a link; `node` itself for a link inside one node."""
    ends = [session.get(models.WorkerRow, (job.id, rank)) for rank in link]
    nodes = [end.node for end in ends if end is not None]
    others = [candidate for candidate in nodes if candidate != node]
    return next(iter((*others, *nodes)), None)


def end_failure(session: Session, job: models.JobRow, entry: journal.FailureEnded, at: float) -> None:
    failure = session.get(models.FailureRow, (job.id, entry.failure))
    if failure is not None:
        failure.ended_iteration, failure.ended_at = entry.iteration, moment(at)


def add_probes(session: Session, job: models.JobRow, entry: journal.ProbesTaken, at: float) -> None:
    def row(**figures: Any) -> models.ProbeRow:
        return models.ProbeRow(
            job_id=job.id, probe=entry.probe, occasion=entry.occasion, measured_at=moment(at), **figures
        )

    for device in entry.devices:
        session.add(
            row(
                kind="device",
                rank=device.rank,
                node=stored_text(device.node),
                device=device.device,
                flops=finite(device.flops),
                memory_bytes=finite(device.memory_bytes),
                speed=finite(device.speed),
                passed=device.fit,
                evidence=stored_text(device.evidence),
                hardware=stored_text(device.hardware) or None,
            )
        )
    for link in entry.links:
        session.add(
            row(
                kind="link",
                rank=link.ranks[0],
                node=stored_text(link.nodes[0]),
                peer=link.ranks[1],
                peer_node=stored_text(link.nodes[1]),
                speed=finite(link.speed),
                passed=link.fit,
                evidence=f"{_against_peers(link.speed)}, {link.seconds * 1e3:.3g} ms",
            )
        )


def _against_peers(speed: float | None) -> str:
    return "nothing to compare it with" if speed is None else f"at {speed:.0%} of its peers"
