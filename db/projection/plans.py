"""Rows of plans, of declined changes, and of reconfigurations.

Decides how journal entries change these rows; never evaluates a plan. Called by `applying`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from resihp.db import layouts, models
from resihp.db.projection.columns import finite, moment, stored_text
from resihp.record import journal
from resihp.record.recovery import Moments, RecoveryTimes, first_of, recovery


def decide_plan(session: Session, job: models.JobRow, entry: journal.PlanDecided, at: float) -> None:
    plan = entry.plan
    session.merge(
        models.PlanRow(
            job_id=job.id,
            epoch=plan.epoch,
            action=entry.action,
            next_iteration=entry.next_iteration,
            description=plan.describe(),
            replicas=len(plan.layout.replicas),
            active=len(plan.computing),
            standby=len(plan.layout.standby) + len(plan.mirroring),
            schedule=stored_text(plan.schedule),
            reason=stored_text(entry.reason),
            decided_at=moment(at),
            layout=layouts.to_json(plan.layout, plan.mirrors),
            assignment=json.dumps(plan.assignment, separators=(",", ":")),
            digest=plan.digest,
            bytes_planned=entry.bytes_planned,
            in_effect_at=None,
            refused_reason=None,
            refused_by=None,
            withdrawn_reason=None,
            predicted=finite(entry.predicted),
            present=finite(entry.present),
            unit=entry.unit,
            basis=None if entry.basis is None else msgspec.json.encode(entry.basis).decode(),
            considered=_candidates(entry.considered) if entry.considered else None,
            unaffected_by=json.dumps(entry.unaffected_by) if entry.unaffected_by else None,
        )
    )


def put_in_effect(session: Session, job: models.JobRow, entry: journal.PlanInEffect, at: float) -> None:
    plan = session.get(models.PlanRow, (job.id, entry.epoch))
    if plan is not None:
        plan.in_effect_at = moment(at)


def refuse_plan(session: Session, job: models.JobRow, entry: journal.PlanRefused, at: float) -> None:
    """Record that a plan was refused. If the controller's own check refused it before it was journaled, the plan has no
    row, and only the event is stored."""
    plan = session.get(models.PlanRow, (job.id, entry.epoch))
    if plan is not None:
        plan.refused_reason = stored_text(entry.reason)
        plan.refused_by = entry.rank


def withdraw_plan(session: Session, job: models.JobRow, entry: journal.PlanWithdrawn, at: float) -> None:
    plan = session.get(models.PlanRow, (job.id, entry.epoch))
    if plan is not None:
        plan.withdrawn_reason = stored_text(entry.reason)


def _candidates(considered: Sequence[journal.OtherPlan]) -> str:
    return msgspec.json.encode([candidate for candidate in considered if math.isfinite(candidate.predicted)]).decode()


def decline_change(session: Session, job: models.JobRow, entry: journal.ChangeDeclined, at: float) -> None:
    declined_table = models.DeclinedChangeRow
    session.flush()
    last = session.scalar(select(func.max(declined_table.declined)).where(declined_table.job_id == job.id)) or 0
    session.add(
        declined_table(
            job_id=job.id,
            declined=last + 1,
            about=entry.about,
            iteration=entry.iteration,
            reason=stored_text(entry.reason),
            why=stored_text(entry.why),
            failures=json.dumps(entry.failures),
            description=stored_text(entry.layout) or None,
            predicted=finite(entry.predicted),
            present=finite(entry.present),
            unit=entry.unit,
            considered=_candidates(entry.considered),
            declined_at=moment(at),
        )
    )


def end_reconfiguration(session: Session, job: models.JobRow, entry: journal.Reconfigured, at: float) -> None:
    session.merge(
        models.ReconfigurationRow(
            job_id=job.id,
            epoch=entry.epoch,
            action=entry.action,
            attempts=entry.attempts,
            seconds=entry.seconds,
            park_seconds=entry.park_s,
            plan_seconds=entry.plan_s,
            planning_seconds=entry.planning_s,
            groups_seconds=entry.groups_s,
            state_seconds=entry.state_s,
            first_iteration_seconds=entry.first_iteration_s,
            finished_at=moment(at),
            bytes_moved=entry.bytes_moved,
            extra_bytes=entry.extra_bytes,
        )
    )
    session.flush()
    session.execute(
        update(models.FailureRow)
        .where(models.FailureRow.job_id == job.id, models.FailureRow.failure.in_(entry.failures))
        .values(recovered_epoch=entry.epoch)
    )


def recovery_times(
    session: Session, job: models.JobRow, entry: journal.Reconfigured, at: float
) -> RecoveryTimes | None:
    """Return the recovery times of all failures that a reconfiguration ended, taken together; None if there were
    none."""
    failures = [session.get(models.FailureRow, (job.id, failure)) for failure in entry.failures]
    moments = [Moments.of_times(row.failed_at, row.noticed_at) for row in failures if row is not None]
    return recovery(first_of(moments), at) if moments else None
