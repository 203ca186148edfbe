"""Rows of suspicions, and their links to the failures that they led to.

Decides which suspicions a failure settles; never raises a suspicion. Called by `applying` and `failures`.
"""

from __future__ import annotations

import json

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from resihp.db import models
from resihp.db.projection.columns import finite, moment, stored_text
from resihp.db.projection.statements import add_if_missing
from resihp.record import journal


def record_suspicion(session: Session, job: models.JobRow, entry: journal.Suspected, at: float) -> None:
    """Record a suspicion. Suspicions without a number are stored as events only: older journals do not number
    suspicions of silence."""
    if entry.suspicion == 0:
        return
    slow = entry.kind == "slow"
    row = session.get(models.SuspicionRow, (job.id, entry.suspicion))
    if row is None:
        worker = None if entry.rank is None else session.get(models.WorkerRow, (job.id, entry.rank))
        row = models.SuspicionRow(
            job_id=job.id,
            suspicion=entry.suspicion,
            component=entry.component,
            ranks=json.dumps(entry.ranks),
            node=None if entry.node is None else stored_text(entry.node),
            device=None if worker is None else worker.device,
            iteration=entry.iteration,
            detected=entry.detected,
            evidence=stored_text(entry.evidence),
            raised_at=moment(at),
            kind=_ensured_kind(session, entry),
            test=stored_text(entry.test) or None,
            statistic=finite(entry.statistic),
            threshold=finite(entry.threshold),
        )
        session.add(row)
    row.probe = entry.probe or None
    row.change, row.confidence = (finite(entry.change), finite(entry.confidence)) if slow else (None, None)
    if entry.cleared:
        row.ranks = json.dumps(entry.ranks)  # some may have joined it
        row.outcome = entry.outcome or None
        row.outcome_evidence = stored_text(entry.evidence)
        row.ended_at = moment(at)
        if entry.outcome != "slow":
            row.failure = None


def _ensured_kind(session: Session, entry: journal.Suspected) -> str:
    """Return a suspicion's kind, after adding it to the table of kinds if it is missing there."""
    kind = stored_text(entry.sort)
    if session.get(models.SuspicionKindRow, kind) is None:
        add_if_missing(session, models.SuspicionKindRow, {"kind": kind, "meaning": kind.replace("-", " ")})
    return kind


def confirm_suspicions(session: Session, job: models.JobRow, entry: journal.FailureFound, at: float) -> None:
    """After a verdict that a component is slow, settle the matching suspicions that are open or that ended with a
    verdict."""
    matching = select(models.SuspicionRow).where(
        models.SuspicionRow.job_id == job.id,
        models.SuspicionRow.failure.is_(None),
        or_(models.SuspicionRow.outcome.is_(None), models.SuspicionRow.outcome == "slow"),
    )
    for row in session.scalars(matching):
        if entry.confirms(row.component, tuple(json.loads(row.ranks))):
            row.outcome, row.failure = "slow", entry.failure
            row.ended_at = row.ended_at or moment(at)


def link_to_loss(session: Session, job: models.JobRow, entry: journal.FailureFound) -> None:
    """Link suspicions of silence that ended in a loss to the failure with the same ranks or node."""
    matching = select(models.SuspicionRow).where(
        models.SuspicionRow.job_id == job.id,
        models.SuspicionRow.failure.is_(None),
        models.SuspicionRow.outcome == "lost",
    )
    for row in session.scalars(matching):
        if set(json.loads(row.ranks)) & set(entry.ranks) or (
            row.component == entry.component == "node"
            and entry.node is not None
            and row.node == stored_text(entry.node)
        ):
            row.failure = entry.failure
