"""Rows about a job's requests to Slurm: drained nodes, and nodes requested in place of lost ones.

Decides how Slurm's answers change these rows; never calls Slurm. Called by `applying`.
"""

from __future__ import annotations

import json

from sqlalchemy import select
from sqlalchemy.orm import Session

from resihp.db import models
from resihp.db.projection.columns import moment, stored_text
from resihp.record import journal

DRAIN_STEPS = ("slurm", "spool", "exclusion")
"""Steps of the drain ladder, most effective first."""


def decide_drain(session: Session, job: models.JobRow, entry: journal.DrainDecided, at: float) -> None:
    session.merge(
        models.DrainRow(
            job_id=job.id,
            drain=entry.drain,
            node=stored_text(entry.node),
            failure=entry.failure,
            step=None,
            outcome=None,
            reason=stored_text(entry.reason),
            drained_at=moment(at),
            undrained_at=None,
            answers="[]",
        )
    )


def record_answer(session: Session, job: models.JobRow, entry: journal.DrainAnswered, at: float) -> None:
    drain = session.get(models.DrainRow, (job.id, entry.drain))
    if drain is None:
        return
    answer = {"step": entry.step, "outcome": entry.outcome, "text": stored_text(entry.text)}
    answers = [step for step in json.loads(drain.answers) if step["step"] != entry.step] + [answer]
    worked = [step for step in answers if step["outcome"] == "done"]
    holds = min(worked, key=lambda step: DRAIN_STEPS.index(step["step"])) if worked else answer
    drain.answers = json.dumps(answers)
    drain.step, drain.outcome = holds["step"], holds["outcome"]


def release_node(session: Session, job: models.JobRow, entry: journal.NodeReleased, at: float) -> None:
    node = session.get(models.NodeRow, (job.id, stored_text(entry.node)))
    if node is not None and entry.outcome == "done":
        node.released_at = moment(at)


def ask_replacement(session: Session, job: models.JobRow, entry: journal.ReplacementAsked, at: float) -> None:
    session.merge(
        models.ReplacementRow(
            job_id=job.id,
            replacement=entry.replacement,
            instead=stored_text(entry.node),
            slurm_job=None,
            node=None,
            outcome="asked",
            reason=stored_text(entry.reason),
            text="",
            asked_at=moment(at),
            joined_at=None,
            ended_at=None,
            excluded=json.dumps(entry.excluded),
        )
    )


def change_replacement(session: Session, job: models.JobRow, entry: journal.ReplacementChanged, at: float) -> None:
    request = session.get(models.ReplacementRow, (job.id, entry.replacement))
    if request is None:
        return
    request.outcome = "cancelled" if entry.state == "withdrawn" else entry.state  # `text` says who cancelled it
    request.slurm_job = entry.slurm_job
    request.node = None if entry.node is None else stored_text(entry.node)
    request.text = stored_text(entry.text)
    if entry.state == "joined":
        request.joined_at = request.joined_at or moment(at)
        node = session.get(models.NodeRow, (job.id, request.node or ""))
        if node is not None:
            node.replacement = entry.replacement
    elif entry.state in ("refused", "cancelled", "ended", "withdrawn"):
        request.ended_at = moment(at)


def note_undrained(session: Session, job: models.JobRow, entry: journal.SlurmSaw, at: float) -> None:
    """Record that Slurm uses a node again that the job had drained through Slurm."""
    base, *flags = entry.state.split("+")
    if base not in ("idle", "allocated", "mixed") or "drain" in flags:
        return
    drains = select(models.DrainRow).where(
        models.DrainRow.job_id == job.id, models.DrainRow.node == stored_text(entry.node)
    )
    for drain in session.scalars(drains):
        if (drain.step, drain.outcome) == ("slurm", "done"):
            drain.undrained_at = drain.undrained_at or moment(at)
