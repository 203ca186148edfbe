"""Applies journal records to the rows of a ledger in order, with one function for each type of entry.

Applying a record advances `jobs.journal_seq`, so that the rows always agree with the number of the last applied record;
applying a record twice changes nothing. Reads no file and no clock. Called by `resihp.db.writing.transactions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from sqlalchemy import insert
from sqlalchemy.orm import Session

from resihp.db import models
from resihp.db.projection import drains, failures, iterations, jobs, nodes, plans, suspicions
from resihp.db.projection.columns import moment, stored_text
from resihp.record import journal
from resihp.record.describe import explain


def follows(record: journal.Record, seq: int) -> bool:
    """Decide whether `record` may directly follow record `seq`, without a missing record between them. Numbers are
    consecutive within a term."""
    entry = record.entry
    return record.seq <= seq + 1 or (isinstance(entry, journal.LeaderChosen) and entry.after <= seq)


def overtakes(record: journal.Record, seq: int) -> bool:
    """Decide whether `record` starts a leader that lacks some of the applied records. Records later than its `after`
    were never decided."""
    entry = record.entry
    return isinstance(entry, journal.LeaderChosen) and entry.after < seq < record.seq


def apply(session: Session, job: models.JobRow, record: journal.Record) -> None:
    """Apply one record, unless it was applied before. Records must come in order of `seq`."""
    if record.seq <= job.journal_seq:
        return
    entry = record.entry
    _APPLY[type(entry)](session, job, entry, record.at)
    if not isinstance(entry, journal.IterationCommitted | journal.IterationsPacked):
        cleared = isinstance(entry, journal.Suspected) and entry.cleared
        kind = "SuspicionCleared" if cleared else type(entry).__name__
        mended = None
        if isinstance(entry, journal.Reconfigured):
            mended = plans.recovery_times(session, job, entry, record.at)
        session.add(models.EventRow(**_event(job, record, kind, explain(entry, mended))))
    if not (isinstance(entry, journal.JobEnded) and entry.state == "abnormal"):
        job.last_entry_at = moment(record.at)
    job.journal_seq = record.seq


def apply_all(session: Session, job: models.JobRow, records: Iterable[journal.Record]) -> None:
    """Apply records as `apply` does, but write consecutive records of a frequent type in one statement."""
    for kind, group in groupby(records, lambda record: type(record.entry)):
        if kind not in _APPLY_MANY:
            for record in group:
                apply(session, job, record)
            continue
        fresh = [record for record in group if record.seq > job.journal_seq]
        if not fresh:
            continue
        entries: list[Any] = [(record.entry, record.at) for record in fresh]
        _APPLY_MANY[kind](session, job, entries)
        if kind is not journal.IterationCommitted:
            events = [_event(job, record, kind.__name__, explain(record.entry)) for record in fresh]
            session.execute(insert(models.EventRow), events)
        job.last_entry_at = moment(fresh[-1].at)
        job.journal_seq = fresh[-1].seq


def apply_as_event(session: Session, job: models.JobRow, record: journal.Record, error: str) -> None:
    """Store a record that fits no table as an event with the error, so that it does not block later records.

    The event has only a text: one of the record's figures does not fit, and it is unknown which.
    """
    if record.seq <= job.journal_seq:
        return
    kind = type(record.entry).__name__
    text = stored_text(f"record {record.seq}: {kind} does not fit the ledger: {error}")
    with suppress(ValueError):  # not a time; last_entry_at then stays that of the previous record
        job.last_entry_at = moment(record.at)
    session.add(
        models.EventRow(job_id=job.id, seq=record.seq, at=job.last_entry_at, kind=f"Unprojected{kind}", text=text)
    )
    job.journal_seq = record.seq


def _event(job: models.JobRow, record: journal.Record, kind: str, text: str) -> dict[str, Any]:
    """Return the columns of the `EventRow` for a record."""
    entry: Any = record.entry
    plan = getattr(entry, "plan", None)
    ranks: tuple[int, ...] = getattr(entry, "ranks", ())
    rank = getattr(entry, "rank", None)
    node = getattr(entry, "node", None)
    return {
        "job_id": job.id,
        "seq": record.seq,
        "at": moment(record.at),
        "kind": kind,
        "text": stored_text(text),
        "iteration": getattr(entry, "iteration", getattr(entry, "next_iteration", None)),
        "epoch": plan.epoch if plan is not None else getattr(entry, "epoch", None),
        "rank": rank if rank is not None else ranks[0] if len(ranks) == 1 else None,
        "node": None if node is None else stored_text(node),
    }


def _event_only(session: Session, job: models.JobRow, entry: journal.AnyEntry, at: float) -> None:
    """Change no row: only the text of the event is stored."""


_APPLY_MANY: dict[type, Callable[[Session, models.JobRow, Sequence[Any]], None]] = {
    journal.IterationCommitted: iterations.commit_iterations,
    journal.NodeJoined: nodes.join_nodes,
    journal.WorkerStarted: nodes.start_workers,
}

_APPLY: dict[type, Callable[[Session, models.JobRow, Any, float], None]] = {
    journal.JobStarted: jobs.start_job,
    journal.NodeJoined: nodes.join_node,
    journal.NodeLost: nodes.lose_node,
    journal.WorkerStarted: nodes.start_worker,
    journal.WorkerEnded: nodes.end_worker,
    journal.PlanDecided: plans.decide_plan,
    journal.IterationCommitted: iterations.commit_iteration,
    journal.IterationsPacked: iterations.commit_packed,
    journal.EvaluationDone: iterations.add_evaluation,
    journal.Suspected: suspicions.record_suspicion,
    journal.CoverageChanged: jobs.change_coverage,
    journal.FailureFound: failures.add_failure,
    journal.FailureEnded: failures.end_failure,
    journal.ProbesTaken: failures.add_probes,
    journal.Reconfigured: plans.end_reconfiguration,
    journal.PlanInEffect: plans.put_in_effect,
    journal.PlanRefused: plans.refuse_plan,
    journal.JoinRefused: _event_only,  # the process has its row, if it ever started
    journal.ModelDeclared: jobs.declare_model,
    journal.LeaderChosen: jobs.resume_job,
    journal.JobSignalled: _event_only,
    journal.WorkersOrdered: _event_only,
    journal.RestartDecided: _event_only,
    journal.RollbackDecided: iterations.roll_back,
    journal.CheckpointDistrusted: _event_only,
    journal.PlanWithdrawn: plans.withdraw_plan,
    journal.ChangeDecided: _event_only,
    journal.ChangeDeclined: plans.decline_change,
    journal.IterationsUnreported: _event_only,
    journal.CounterSeen: jobs.see_counter,
    journal.LossNotFinite: _event_only,
    journal.DrainWaived: _event_only,
    journal.DrainDecided: drains.decide_drain,
    journal.DrainAnswered: drains.record_answer,
    journal.NodeReleased: drains.release_node,
    journal.ReplacementAsked: drains.ask_replacement,
    journal.ReplacementChanged: drains.change_replacement,
    journal.SlurmSaw: drains.note_undrained,
    journal.ReservationSeen: _event_only,
    journal.FaultInjected: _event_only,
    journal.CheckpointCommitted: iterations.add_checkpoint,
    journal.JobEnded: jobs.end_job,
}
