"""The row of a job: finds or creates it by the first record of the job's journal, and can delete all rows of the job.

Decides how journal entries change the job's row; never writes another job's row, except for the cost accounts of
earlier attempts (`resihp.db.settling`). Called by `applying`, `resihp.db.writer`, `resihp.db.writing.transactions` and
`resihp.db.exchange`.
"""

from __future__ import annotations

import json

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from resihp.db import models, settling
from resihp.db.projection.columns import moment, stored_text
from resihp.db.reading import reader
from resihp.errors import LedgerError
from resihp.record import journal
from resihp.record.job_uuid import job_uuid

RUN_LENGTH = 36
TELEMETRY_TABLES = tuple(
    row.__tablename__ for row in (models.RankReportRow, models.RankQuantilesRow, models.RankScoreRow)
)
"""Telemetry tables: their rows do not follow from the journal."""


def job_of(session: Session, first: journal.Record) -> models.JobRow:
    """Return the row of the job with a journal that begins with `first`; create it if missing. The row is locked if the
    database has row locks.

    Raises LedgerError if the job belongs to another database user.
    """
    key = job_uuid(first)
    assert isinstance(first.entry, journal.JobStarted)
    job = own_job(session, key, first.entry.job)
    if job is None:
        job = models.JobRow(uuid=key, started_at=moment(first.at), journal_seq=0, telemetry_dropped=0)
        _describe_job(job, first.entry, first.at)
        session.add(job)
        session.flush()
    return job


def last_written_seq(session: Session, first: journal.Record) -> int:
    """Return the number of the last applied record of the journal that begins with `first`; 0 if none was applied."""
    return session.scalar(select(models.JobRow.journal_seq).where(models.JobRow.uuid == job_uuid(first))) or 0


def own_job(session: Session, key: str, name: str) -> models.JobRow | None:
    """Return the row of the job with uuid `key`, locked if the database has row locks; None if there is none. `name` is
    for messages.

    Raises LedgerError if another database user wrote the job: PostgreSQL locks rows only for users who may change them,
    but shows them to all users.
    """
    query = select(models.JobRow).where(models.JobRow.uuid == key)
    job = session.scalars(query.with_for_update()).one_or_none()
    if job is None and (writer := session.scalars(query.with_only_columns(models.JobRow.written_by)).first()):
        raise LedgerError(
            f"job {name}: is in the ledger already, and database user {writer} wrote it; only {writer} and the owner "
            "of the tables can replace it. Name another with --ledger"
        )
    return job


def forget(session: Session, job: models.JobRow) -> None:
    """Delete all rows of the job that follow from its journal, so that the journal can be applied again."""
    for table in reversed(models.LedgerTable.metadata.sorted_tables):
        if "job_id" in table.c and table.name not in TELEMETRY_TABLES:
            session.execute(delete(table).where(table.c.job_id == job.id))
    session.expire_all()
    job.journal_seq = 0


def _describe_job(job: models.JobRow, entry: journal.JobStarted, at: float) -> None:
    job.name = stored_text(entry.job)
    job.host = stored_text(entry.host)
    job.owner = stored_text(entry.user)
    job.command = stored_text(json.dumps(list(entry.command)))
    job.nodes = entry.nodes
    job.gpus_per_node = entry.gpus_per_node
    job.tp = entry.tp
    job.pp = entry.pp
    job.schedule = stored_text(entry.schedule)
    job.restart_count = entry.restart_count
    job.version = stored_text(entry.version)
    job.configuration = json.dumps(entry.configuration, default=str)
    job.state = "running"
    job.exit_code = job.reason = job.ended_at = job.account = job.detector = job.unwatched = None
    job.last_entry_at = moment(at)
    job.run = stored_text(entry.run)[:RUN_LENGTH] or job.uuid
    job.torch = job.megatron_core = job.cuda = job.nccl = job.script_commit = None
    slurm = entry.slurm
    job.cluster = None if slurm is None else stored_text(slurm.cluster)
    job.slurm_job = None if slurm is None else slurm.job
    job.array_job = None if slurm is None else slurm.array_job
    job.array_task = None if slurm is None else slurm.array_task
    job.submitted_at = None if slurm is None or slurm.submitted_at is None else moment(slurm.submitted_at)
    job.slurm_account = None if slurm is None else stored_text(slurm.account)
    job.partition = None if slurm is None else stored_text(slurm.partition)
    job.qos = None if slurm is None else stored_text(slurm.qos)


def start_job(session: Session, job: models.JobRow, entry: journal.JobStarted, at: float) -> None:
    _describe_job(job, entry, at)


def declare_model(session: Session, job: models.JobRow, entry: journal.ModelDeclared, at: float) -> None:
    if job.model is not None:  # the script had printed iterations of something else before
        of_job = models.IterationRow.job_id == job.id
        session.execute(delete(models.IterationRow).where(of_job, models.IterationRow.tokens == 0))
    job.model = msgspec.json.encode(entry.declare).decode()
    if entry.software is not None:
        for name, version in msgspec.structs.asdict(entry.software).items():
            setattr(job, name, stored_text(version) or None)


def see_counter(session: Session, job: models.JobRow, entry: journal.CounterSeen, at: float) -> None:
    job.model = json.dumps({"iterations": entry.goal})


def change_coverage(session: Session, job: models.JobRow, entry: journal.CoverageChanged, at: float) -> None:
    job.detector = None if entry.detector == "warming up" else entry.detector
    job.unwatched = json.dumps(entry.unwatched) if entry.unwatched else None


def resume_job(session: Session, job: models.JobRow, entry: journal.LeaderChosen, at: float) -> None:
    """Mark the job as running again: a reader that had recorded its end did not know of this leader."""
    job.state = "running"
    job.exit_code = job.reason = job.ended_at = job.account = None


def end_job(session: Session, job: models.JobRow, entry: journal.JobEnded, at: float) -> None:
    job.state = entry.state
    job.exit_code = entry.exit_code
    job.reason = stored_text(entry.reason)
    job.ended_at = moment(at)
    job.account = None
    session.flush()
    job.account = reader.Reader.within(session.connection()).settled(job.id)
    settling.settle_earlier(session.connection(), job.id)
