"""Rows of committed iterations and of checkpoints.

Decides how journal entries change these rows; drops iterations only if training went back to a checkpoint before them.
Called by `applying`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from sqlalchemy import delete
from sqlalchemy.orm import Session

from resihp.db import models
from resihp.db.projection.columns import finite, moment, stored_text
from resihp.db.projection.statements import upsert
from resihp.record import journal
from resihp.record.packing import unpack


def commit_iteration(session: Session, job: models.JobRow, entry: journal.IterationCommitted, at: float) -> None:
    commit_iterations(session, job, [(entry, at)])


def commit_packed(session: Session, job: models.JobRow, entry: journal.IterationsPacked, at: float) -> None:
    rows = unpack([journal.Record(entry.count, at, entry)])
    commit_iterations(session, job, [(cast(journal.IterationCommitted, row.entry), row.at) for row in rows])


def commit_iterations(
    session: Session, job: models.JobRow, committed: Sequence[tuple[journal.IterationCommitted, float]]
) -> None:
    first = {entry.epoch: at for entry, at in reversed(committed)}
    for epoch, at in first.items():
        plan = session.get(models.PlanRow, (job.id, epoch))
        if plan is not None and plan.in_effect_at is None:  # a journal that does not record when a plan takes effect
            plan.in_effect_at = moment(at)
    rows = [
        {
            "job_id": job.id,
            "iteration": entry.outcome.iteration,
            "epoch": entry.epoch,
            "seconds": finite(entry.seconds),
            "predicted_seconds": finite(entry.predicted_seconds),
            "tokens": entry.outcome.tokens,
            "sum_squared_lengths": entry.outcome.sum_squared_lengths,
            "samples": entry.outcome.samples,
            "samples_digest": entry.outcome.samples_digest,
            "loss": finite(entry.outcome.loss),
            "finished_at": moment(at),
            "gradient_norm": finite(entry.outcome.gradient_norm),
            "learning_rate": finite(entry.outcome.learning_rate),
            "skipped": entry.outcome.skip,
        }
        for entry, at in committed
    ]
    upsert(session, models.IterationRow, rows, ("job_id", "iteration"))


def roll_back(session: Session, job: models.JobRow, entry: journal.RollbackDecided, at: float) -> None:
    """Drop the rows of iterations that are trained again, so that all rows are of one course of training, in order."""
    rows = models.IterationRow
    session.execute(delete(rows).where(rows.job_id == job.id, rows.iteration > entry.iteration))


def add_evaluation(session: Session, job: models.JobRow, entry: journal.EvaluationDone, at: float) -> None:
    """Add the validation loss to the iteration's row. The iteration from which the job resumed has no row; its loss is
    only in the event."""
    row = session.get(models.IterationRow, (job.id, entry.iteration))
    if row is not None:
        row.validation_loss = finite(entry.loss)


def add_checkpoint(session: Session, job: models.JobRow, entry: journal.CheckpointCommitted, at: float) -> None:
    session.merge(
        models.CheckpointRow(
            job_id=job.id,
            iteration=entry.iteration,
            folder=stored_text(entry.folder),
            bytes=entry.bytes,
            seconds=finite(entry.seconds) if entry.modified is None else None,  # how long a script took is not known
            committed_at=moment(at),
        )
    )
