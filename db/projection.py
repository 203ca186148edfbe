"""Projection of journal records to rows of the ledger, one function per type of entry.

Called by `db.writer` inside its transaction. Applying a record advances `jobs.journal_seq`, so that the rows and the
number of the last applied record always agree; applying a record twice changes nothing. Reads no file and no clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, cast

import msgspec
from sqlalchemy import Table, delete, func, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from db import layouts, models, settling
from db.reading import reader
from resihp.errors import LedgerError
from resihp.record import journal
from resihp.record.describe import explain
from resihp.record.job_uuid import job_uuid
from resihp.record.packing import unpack
from resihp.record.recovery import Moments, RecoveryTimes, first_of, recovery

MAX_TEXT = 8192
RUN_LENGTH = 36


def moment(at: float) -> datetime:
    """Convert seconds since 1970 to a time. Raises ValueError for a value that is not a time."""
    try:
        return datetime.fromtimestamp(at, UTC)
    except (OverflowError, OSError) as error:
        raise ValueError(f"{at!r} is not a time: {error}") from error


def job_of(session: Session, first: journal.Record) -> models.JobRow:
    """Return the row of the job whose journal begins with `first`, created if missing; locked where locks exist.

    Raises LedgerError if it belongs to another database user.
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
    """Return the number of the last applied record of the job whose journal begins with `first`; 0 if there is none."""
    return session.scalar(select(models.JobRow.journal_seq).where(models.JobRow.uuid == job_uuid(first))) or 0


def own_job(session: Session, key: str, name: str) -> models.JobRow | None:
    """Return the job of that uuid, locked where locks exist; None if there is none. `name` is for messages.

    Raises LedgerError if another database user has written it: PostgreSQL locks rows only for users who may change
    them, but shows them to everybody.
    """
    query = select(models.JobRow).where(models.JobRow.uuid == key)
    job = session.scalars(query.with_for_update()).one_or_none()
    if job is None and (writer := session.scalars(query.with_only_columns(models.JobRow.written_by)).first()):
        raise LedgerError(
            f"job {name}: is in the ledger already, and database user {writer} wrote it; only {writer} and the owner "
            "of the tables can replace it. Name another with --ledger"
        )
    return job


def follows(record: journal.Record, seq: int) -> bool:
    """Decide whether no record is missing between record `seq` and this one: numbers are consecutive within a term."""
    entry = record.entry
    return record.seq <= seq + 1 or (isinstance(entry, journal.LeaderChosen) and entry.after <= seq)


def overtakes(record: journal.Record, seq: int) -> bool:
    """Decide whether a leader begins here without all applied records: those later than `after` were never decided."""
    entry = record.entry
    return isinstance(entry, journal.LeaderChosen) and entry.after < seq < record.seq


def forget(session: Session, job: models.JobRow) -> None:
    """Delete all rows that came from the journal, so that it can be applied again."""
    for table in reversed(models.LedgerTable.metadata.sorted_tables):
        if "job_id" in table.c and table.name not in TELEMETRY_TABLES:
            session.execute(delete(table).where(table.c.job_id == job.id))
    session.expire_all()
    job.journal_seq = 0


TELEMETRY_TABLES = tuple(
    row.__tablename__ for row in (models.RankReportRow, models.RankQuantilesRow, models.RankScoreRow)
)
"""Tables that do not follow from the journal."""


def apply(session: Session, job: models.JobRow, record: journal.Record) -> None:
    """Apply one record unless it was applied before. Records come in order of `seq`."""
    if record.seq <= job.journal_seq:
        return
    entry = record.entry
    _APPLY[type(entry)](session, job, entry, record.at)
    if not isinstance(entry, journal.IterationCommitted | journal.IterationsPacked):
        cleared = isinstance(entry, journal.Suspected) and entry.cleared
        kind = "SuspicionCleared" if cleared else type(entry).__name__
        mended = _recovery_times(session, job, entry, record.at) if isinstance(entry, journal.Reconfigured) else None
        session.add(models.EventRow(**_event(job, record, kind, explain(entry, mended))))
    if not (isinstance(entry, journal.JobEnded) and entry.state == "abnormal"):
        job.last_entry_at = moment(record.at)
    job.journal_seq = record.seq


def apply_all(session: Session, job: models.JobRow, records: Iterable[journal.Record]) -> None:
    """Apply records as `apply` does, but consecutive ones of a frequent type in one statement."""
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
    """Keep a record that fits no table as an event that says so, so that it does not hold up later records.

    The event holds text only: one of the record's figures does not fit, and we do not know which.
    """
    if record.seq <= job.journal_seq:
        return
    kind = type(record.entry).__name__
    text = _text(f"record {record.seq}: {kind} does not fit the ledger: {error}")
    with suppress(ValueError):  # not a time: it happened after the record before it
        job.last_entry_at = moment(record.at)
    session.add(
        models.EventRow(job_id=job.id, seq=record.seq, at=job.last_entry_at, kind=f"Unprojected{kind}", text=text)
    )
    job.journal_seq = record.seq


def _event(job: models.JobRow, record: journal.Record, kind: str, text: str) -> dict[str, Any]:
    """Return the columns of an `EventRow`."""
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
        "text": _text(text),
        "iteration": getattr(entry, "iteration", getattr(entry, "next_iteration", None)),
        "epoch": plan.epoch if plan is not None else getattr(entry, "epoch", None),
        "rank": rank if rank is not None else ranks[0] if len(ranks) == 1 else None,
        "node": None if node is None else _text(node),
    }


def _text(text: str) -> str:
    """Return text that every database accepts: PostgreSQL rejects NUL, UTF-8 lone surrogates."""
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def _number(value: float | None) -> float | None:
    """Return the number, None if it is not finite: SQLite would store NULL, PostgreSQL NaN."""
    return None if value is None or not math.isfinite(value) else value


def _describe_job(job: models.JobRow, entry: journal.JobStarted, at: float) -> None:
    job.name = _text(entry.job)
    job.host = _text(entry.host)
    job.owner = _text(entry.user)
    job.command = _text(json.dumps(list(entry.command)))
    job.nodes = entry.nodes
    job.gpus_per_node = entry.gpus_per_node
    job.tp = entry.tp
    job.pp = entry.pp
    job.schedule = _text(entry.schedule)
    job.restart_count = entry.restart_count
    job.version = _text(entry.version)
    job.configuration = json.dumps(entry.configuration, default=str)
    job.state = "running"
    job.exit_code = job.reason = job.ended_at = job.account = job.detector = job.unwatched = None
    job.last_entry_at = moment(at)
    job.run = _text(entry.run)[:RUN_LENGTH] or job.uuid
    job.torch = job.megatron_core = job.cuda = job.nccl = job.script_commit = None
    slurm = entry.slurm
    job.cluster = None if slurm is None else _text(slurm.cluster)
    job.slurm_job = None if slurm is None else slurm.job
    job.array_job = None if slurm is None else slurm.array_job
    job.array_task = None if slurm is None else slurm.array_task
    job.submitted_at = None if slurm is None or slurm.submitted_at is None else moment(slurm.submitted_at)
    job.slurm_account = None if slurm is None else _text(slurm.account)
    job.partition = None if slurm is None else _text(slurm.partition)
    job.qos = None if slurm is None else _text(slurm.qos)


def _job_started(session: Session, job: models.JobRow, entry: journal.JobStarted, at: float) -> None:
    _describe_job(job, entry, at)


def _node_joined(session: Session, job: models.JobRow, entry: journal.NodeJoined, at: float) -> None:
    _join_nodes(session, job, [(entry, at)])


def _join_nodes(session: Session, job: models.JobRow, joined: Sequence[tuple[journal.NodeJoined, float]]) -> None:
    rows = [
        {
            "job_id": job.id,
            "node": _text(entry.node),
            "host": _text(entry.host),
            "devices": entry.devices,
            "joined_at": moment(at),
            "lost_at": None,
            "lost_reason": None,
            "replacement": None,
            "released_at": None,
        }
        for entry, at in joined
    ]
    _upsert(session, models.NodeRow, rows, ("job_id", "node"))
    inventories = [entry.inventory or journal.NodeInventory() for entry, _ in joined]
    served = [_membership(row, inventory) for row, inventory in zip(rows, inventories, strict=True)]
    _upsert(session, models.MembershipRow, served, ("job_id", "node", "joined_at"))
    devices = [
        {**{name: row[name] for name in ("job_id", "node", "joined_at")}, **_device_columns(device)}
        for row, inventory in zip(rows, inventories, strict=True)
        for device in {device_inventory.device: device_inventory for device_inventory in inventory.devices}.values()
    ]
    if devices:
        _upsert(session, models.DeviceRow, devices, ("job_id", "node", "joined_at", "device"))


def _membership(node: Mapping[str, Any], inventory: journal.NodeInventory) -> dict[str, Any]:
    """Return the columns of a `MembershipRow` that begins."""
    return {
        **{name: node[name] for name in ("job_id", "node", "joined_at", "host", "devices", "lost_at", "lost_reason")},
        "how": None,
        **{name: _text(getattr(inventory, name)) for name in ("serial", "kernel", "image", "driver")},
        "nic_firmware": _text(json.dumps(dict(inventory.nic_firmware))),
    }


def _device_columns(device: journal.DeviceInventory) -> dict[str, Any]:
    words = {name: _text(getattr(device, name)) for name in ("name", "uuid", "serial", "board", "vbios", "bus")}
    return {"device": device.device, **words}


def _node_lost(session: Session, job: models.JobRow, entry: journal.NodeLost, at: float) -> None:
    node = session.get(models.NodeRow, (job.id, _text(entry.node)))
    if node is None:  # the job began without it
        node = models.NodeRow(job_id=job.id, node=_text(entry.node), host="", devices=0, joined_at=moment(at))
        session.add(node)
    node.lost_at = moment(at)
    node.lost_reason = _text(entry.reason)
    served = models.MembershipRow.__table__.c
    session.execute(
        update(models.MembershipRow)
        .where(served.job_id == job.id, served.node == node.node, served.lost_at.is_(None))
        .values(lost_at=node.lost_at, lost_reason=node.lost_reason, how=entry.how or None)
    )


def _worker_started(session: Session, job: models.JobRow, entry: journal.WorkerStarted, at: float) -> None:
    _start_workers(session, job, [(entry, at)])


def _start_workers(
    session: Session, job: models.JobRow, started: Sequence[tuple[journal.WorkerStarted, float]]
) -> None:
    rows = [
        {
            "job_id": job.id,
            "rank": entry.rank,
            "node": _text(entry.node),
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
    _upsert(session, models.WorkerRow, rows, ("job_id", "rank"))


def _worker_ended(session: Session, job: models.JobRow, entry: journal.WorkerEnded, at: float) -> None:
    worker = session.get(models.WorkerRow, (job.id, entry.rank))
    if worker is not None:
        worker.epoch_left = entry.epoch
        worker.exit = entry.exit
        worker.ended_at = moment(at)


def _plan_in_effect(session: Session, job: models.JobRow, entry: journal.PlanInEffect, at: float) -> None:
    plan = session.get(models.PlanRow, (job.id, entry.epoch))
    if plan is not None:
        plan.in_effect_at = moment(at)


def _plan_refused(session: Session, job: models.JobRow, entry: journal.PlanRefused, at: float) -> None:
    """Record the refusal. Our own check may refuse a plan before it is journaled; then only the event remains."""
    plan = session.get(models.PlanRow, (job.id, entry.epoch))
    if plan is not None:
        plan.refused_reason = _text(entry.reason)
        plan.refused_by = entry.rank


def _plan_withdrawn(session: Session, job: models.JobRow, entry: journal.PlanWithdrawn, at: float) -> None:
    plan = session.get(models.PlanRow, (job.id, entry.epoch))
    if plan is not None:
        plan.withdrawn_reason = _text(entry.reason)


def _join_refused(session: Session, job: models.JobRow, entry: journal.JoinRefused, at: float) -> None:
    """Event only: the process has its row, if it ever started."""


def _plan_decided(session: Session, job: models.JobRow, entry: journal.PlanDecided, at: float) -> None:
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
            schedule=_text(plan.schedule),
            reason=_text(entry.reason),
            decided_at=moment(at),
            layout=layouts.to_json(plan.layout, plan.mirrors),
            assignment=json.dumps(plan.assignment, separators=(",", ":")),
            digest=plan.digest,
            bytes_planned=entry.bytes_planned,
            in_effect_at=None,
            refused_reason=None,
            refused_by=None,
            withdrawn_reason=None,
            predicted=_number(entry.predicted),
            present=_number(entry.present),
            unit=entry.unit,
            basis=None if entry.basis is None else msgspec.json.encode(entry.basis).decode(),
            considered=_candidates(entry.considered) if entry.considered else None,
            unaffected_by=json.dumps(entry.unaffected_by) if entry.unaffected_by else None,
        )
    )


def _candidates(considered: Sequence[journal.OtherPlan]) -> str:
    return msgspec.json.encode([candidate for candidate in considered if math.isfinite(candidate.predicted)]).decode()


def _change_declined(session: Session, job: models.JobRow, entry: journal.ChangeDeclined, at: float) -> None:
    declined_table = models.DeclinedChangeRow
    session.flush()
    last = session.scalar(select(func.max(declined_table.declined)).where(declined_table.job_id == job.id)) or 0
    session.add(
        declined_table(
            job_id=job.id,
            declined=last + 1,
            about=entry.about,
            iteration=entry.iteration,
            reason=_text(entry.reason),
            why=_text(entry.why),
            failures=json.dumps(entry.failures),
            description=_text(entry.layout) or None,
            predicted=_number(entry.predicted),
            present=_number(entry.present),
            unit=entry.unit,
            considered=_candidates(entry.considered),
            declined_at=moment(at),
        )
    )


def _model_declared(session: Session, job: models.JobRow, entry: journal.ModelDeclared, at: float) -> None:
    job.model = msgspec.json.encode(entry.declare).decode()
    if entry.software is not None:
        for name, version in msgspec.structs.asdict(entry.software).items():
            setattr(job, name, _text(version) or None)


def _iteration_committed(session: Session, job: models.JobRow, entry: journal.IterationCommitted, at: float) -> None:
    _commit_iterations(session, job, [(entry, at)])


def _iterations_packed(session: Session, job: models.JobRow, entry: journal.IterationsPacked, at: float) -> None:
    rows = unpack([journal.Record(entry.count, at, entry)])
    _commit_iterations(session, job, [(cast(journal.IterationCommitted, row.entry), row.at) for row in rows])


def _commit_iterations(
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
            "seconds": _number(entry.seconds),
            "predicted_seconds": _number(entry.predicted_seconds),
            "tokens": entry.outcome.tokens,
            "sum_squared_lengths": entry.outcome.sum_squared_lengths,
            "samples": entry.outcome.samples,
            "samples_digest": entry.outcome.samples_digest,
            "loss": _number(entry.outcome.loss),
            "finished_at": moment(at),
            "gradient_norm": _number(entry.outcome.gradient_norm),
            "learning_rate": _number(entry.outcome.learning_rate),
            "skipped": entry.outcome.skip,
        }
        for entry, at in committed
    ]
    _upsert(session, models.IterationRow, rows, ("job_id", "iteration"))


def _upsert(
    session: Session, row: type[models.LedgerTable], rows: Sequence[Mapping[str, Any]], key: tuple[str, ...]
) -> None:
    """Write many rows in one statement, replacing rows that have the same keys."""
    session.flush()
    for instance in session:
        if isinstance(instance, row):
            session.expire(instance)  # a statement changes rows behind the session's back
    connection = session.connection()
    table = row.__table__
    assert isinstance(table, Table)
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
    changed = {name: insert.excluded[name] for name in table.c.keys() if name not in key}  # noqa: SIM118 - no mapping
    connection.execute(insert.on_conflict_do_update(index_elements=key, set_=changed), rows)


def _evaluation_done(session: Session, job: models.JobRow, entry: journal.EvaluationDone, at: float) -> None:
    """Add the loss to the iteration's row. The iteration that the job resumed from has no row; then only the event
    remains."""
    row = session.get(models.IterationRow, (job.id, entry.iteration))
    if row is not None:
        row.validation_loss = _number(entry.loss)


def _suspected(session: Session, job: models.JobRow, entry: journal.Suspected, at: float) -> None:
    """Record a suspicion. Unnumbered ones become events only: older journals do not number those of silence."""
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
            node=None if entry.node is None else _text(entry.node),
            device=None if worker is None else worker.device,
            iteration=entry.iteration,
            detected=entry.detected,
            evidence=_text(entry.evidence),
            raised_at=moment(at),
            kind=_ensured_kind(session, entry),
            test=_text(entry.test) or None,
            statistic=_number(entry.statistic),
            threshold=_number(entry.threshold),
        )
        session.add(row)
    row.probe = entry.probe or None
    row.change, row.confidence = (_number(entry.change), _number(entry.confidence)) if slow else (None, None)
    if entry.cleared:
        row.ranks = json.dumps(entry.ranks)  # some may have joined it
        row.outcome, row.outcome_evidence, row.ended_at = entry.outcome or None, _text(entry.evidence), moment(at)
        if entry.outcome != "slow":
            row.failure = None


def _ensured_kind(session: Session, entry: journal.Suspected) -> str:
    """Return a suspicion's kind, after adding it to the table of kinds if it is missing."""
    kind = _text(entry.sort)
    if session.get(models.SuspicionKindRow, kind) is None:
        _add_if_missing(session, models.SuspicionKindRow, {"kind": kind, "meaning": kind.replace("-", " ")})
    return kind


def _add_if_missing(session: Session, row: type[models.LedgerTable], values: Mapping[str, Any]) -> None:
    """Insert one row that another client may insert at the same time."""
    connection = session.connection()
    table = row.__table__
    assert isinstance(table, Table)
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
    connection.execute(insert.values(values).on_conflict_do_nothing())


def _coverage_changed(session: Session, job: models.JobRow, entry: journal.CoverageChanged, at: float) -> None:
    job.detector = None if entry.detector == "warming up" else entry.detector
    job.unwatched = json.dumps(entry.unwatched) if entry.unwatched else None


def _suspicion_confirmed(session: Session, job: models.JobRow, entry: journal.FailureFound, at: float) -> None:
    """Settle suspicions after a verdict that something is slow: the matching ones that are open or ended with a
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


def _loss_explained(session: Session, job: models.JobRow, entry: journal.FailureFound) -> None:
    """Link suspicions of silence that ended in a loss to the failure that names their ranks or node."""
    matching = select(models.SuspicionRow).where(
        models.SuspicionRow.job_id == job.id,
        models.SuspicionRow.failure.is_(None),
        models.SuspicionRow.outcome == "lost",
    )
    for row in session.scalars(matching):
        if set(json.loads(row.ranks)) & set(entry.ranks) or (
            row.component == entry.component == "node" and entry.node is not None and row.node == _text(entry.node)
        ):
            row.failure = entry.failure


def _failure_found(session: Session, job: models.JobRow, entry: journal.FailureFound, at: float) -> None:
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
            cause=_text(entry.cause),
            ranks=json.dumps(entry.ranks),
            node=None if entry.node is None else _text(entry.node),
            device=entry.device,
            iteration=entry.iteration,
            epoch=entry.epoch,
            failed_at=None if failed_at is None else moment(failed_at),
            noticed_at=noticed_at,
            detect_seconds=_number(entry.detect_s),
            recovered_epoch=None,
            evidence=_text(entry.evidence),
            speed=_number(entry.speed),
            confidence=_number(entry.confidence),
            code=None if entry.diagnosed is None else _text(entry.diagnosed.code),
            category=None if entry.diagnosed is None else _text(entry.diagnosed.category),
            hardware=entry.hardware,
            intermittent=entry.intermittent,
            idle=entry.idle,
            link_from=None if entry.link is None else entry.link[0],
            link_to=None if entry.link is None else entry.link[1],
            peer_node=None if entry.link is None else _node_of(session, job, entry.link, entry.node),
        )
    )
    if entry.kind == "fail-slow":
        _suspicion_confirmed(session, job, entry, at)
    else:
        _loss_explained(session, job, entry)


def _node_of(session: Session, job: models.JobRow, link: tuple[int, int], node: str | None) -> str | None:
    """Return the node at the other end of a link; the same node for a link inside a node."""
    ends = [session.get(models.WorkerRow, (job.id, rank)) for rank in link]
    nodes = [end.node for end in ends if end is not None]
    others = [candidate for candidate in nodes if candidate != node]
    return next(iter((*others, *nodes)), None)


def _failure_ended(session: Session, job: models.JobRow, entry: journal.FailureEnded, at: float) -> None:
    failure = session.get(models.FailureRow, (job.id, entry.failure))
    if failure is not None:
        failure.ended_iteration, failure.ended_at = entry.iteration, moment(at)


def _probes_taken(session: Session, job: models.JobRow, entry: journal.ProbesTaken, at: float) -> None:
    def row(**figures: Any) -> models.ProbeRow:
        return models.ProbeRow(
            job_id=job.id, probe=entry.probe, occasion=entry.occasion, measured_at=moment(at), **figures
        )

    for device in entry.devices:
        session.add(
            row(
                kind="device",
                rank=device.rank,
                node=_text(device.node),
                device=device.device,
                flops=_number(device.flops),
                memory_bytes=_number(device.memory_bytes),
                speed=_number(device.speed),
                passed=device.fit,
                evidence=_text(device.evidence),
                hardware=_text(device.hardware) or None,
            )
        )
    for link in entry.links:
        session.add(
            row(
                kind="link",
                rank=link.ranks[0],
                node=_text(link.nodes[0]),
                peer=link.ranks[1],
                peer_node=_text(link.nodes[1]),
                speed=_number(link.speed),
                passed=link.fit,
                evidence=f"{_against_peers(link.speed)}, {link.seconds * 1e3:.3g} ms",
            )
        )


def _against_peers(speed: float | None) -> str:
    return "nothing to compare it with" if speed is None else f"at {speed:.0%} of its peers"


def _reconfigured(session: Session, job: models.JobRow, entry: journal.Reconfigured, at: float) -> None:
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


def _recovery_times(
    session: Session, job: models.JobRow, entry: journal.Reconfigured, at: float
) -> RecoveryTimes | None:
    """Return the recovery times of all failures that a change of plan ended, taken together; None if nothing had
    failed."""
    failures = [session.get(models.FailureRow, (job.id, failure)) for failure in entry.failures]
    moments = [Moments.of_times(row.failed_at, row.noticed_at) for row in failures if row is not None]
    return recovery(first_of(moments), at) if moments else None


def _fault_injected(session: Session, job: models.JobRow, entry: journal.FaultInjected, at: float) -> None:
    """Event only."""


def _checkpoint_committed(session: Session, job: models.JobRow, entry: journal.CheckpointCommitted, at: float) -> None:
    session.merge(
        models.CheckpointRow(
            job_id=job.id,
            iteration=entry.iteration,
            folder=_text(entry.folder),
            bytes=entry.bytes,
            seconds=_number(entry.seconds),
            committed_at=moment(at),
        )
    )


DRAIN_STEPS = ("slurm", "spool", "exclusion")
"""Steps of the drain ladder, the most effective first."""


def _drain_decided(session: Session, job: models.JobRow, entry: journal.DrainDecided, at: float) -> None:
    session.merge(
        models.DrainRow(
            job_id=job.id,
            drain=entry.drain,
            node=_text(entry.node),
            failure=entry.failure,
            step=None,
            outcome=None,
            reason=_text(entry.reason),
            drained_at=moment(at),
            undrained_at=None,
            answers="[]",
        )
    )


def _drain_answered(session: Session, job: models.JobRow, entry: journal.DrainAnswered, at: float) -> None:
    drain = session.get(models.DrainRow, (job.id, entry.drain))
    if drain is None:
        return
    answer = {"step": entry.step, "outcome": entry.outcome, "text": _text(entry.text)}
    answers = [step for step in json.loads(drain.answers) if step["step"] != entry.step] + [answer]
    worked = [step for step in answers if step["outcome"] == "done"]
    holds = min(worked, key=lambda step: DRAIN_STEPS.index(step["step"])) if worked else answer
    drain.answers = json.dumps(answers)
    drain.step, drain.outcome = holds["step"], holds["outcome"]


def _node_released(session: Session, job: models.JobRow, entry: journal.NodeReleased, at: float) -> None:
    node = session.get(models.NodeRow, (job.id, _text(entry.node)))
    if node is not None and entry.outcome == "done":
        node.released_at = moment(at)


def _replacement_asked(session: Session, job: models.JobRow, entry: journal.ReplacementAsked, at: float) -> None:
    session.merge(
        models.ReplacementRow(
            job_id=job.id,
            replacement=entry.replacement,
            instead=_text(entry.node),
            slurm_job=None,
            node=None,
            outcome="asked",
            reason=_text(entry.reason),
            text="",
            asked_at=moment(at),
            joined_at=None,
            ended_at=None,
            excluded=json.dumps(entry.excluded),
        )
    )


def _replacement_changed(session: Session, job: models.JobRow, entry: journal.ReplacementChanged, at: float) -> None:
    request = session.get(models.ReplacementRow, (job.id, entry.replacement))
    if request is None:
        return
    request.outcome = entry.state
    request.slurm_job = entry.slurm_job
    request.node = None if entry.node is None else _text(entry.node)
    request.text = _text(entry.text)
    if entry.state == "joined":
        request.joined_at = request.joined_at or moment(at)
        node = session.get(models.NodeRow, (job.id, request.node or ""))
        if node is not None:
            node.replacement = entry.replacement
    elif entry.state in ("refused", "cancelled", "ended"):
        request.ended_at = moment(at)


def _slurm_saw(session: Session, job: models.JobRow, entry: journal.SlurmSaw, at: float) -> None:
    """Record that somebody undrained a node: we had drained it, and Slurm uses it again."""
    base, *flags = entry.state.split("+")
    if base not in ("idle", "allocated", "mixed") or "drain" in flags:
        return
    drains = select(models.DrainRow).where(models.DrainRow.job_id == job.id, models.DrainRow.node == _text(entry.node))
    for drain in session.scalars(drains):
        if (drain.step, drain.outcome) == ("slurm", "done"):
            drain.undrained_at = drain.undrained_at or moment(at)


def _event_only(session: Session, job: models.JobRow, entry: journal.AnyEntry, at: float) -> None:
    """Event only: nothing but its text is kept."""


def _leader_chosen(session: Session, job: models.JobRow, entry: journal.LeaderChosen, at: float) -> None:
    """Mark the job as running: a reader that had declared it ended did not know of this leader."""
    job.state = "running"
    job.exit_code = job.reason = job.ended_at = job.account = None


def _job_ended(session: Session, job: models.JobRow, entry: journal.JobEnded, at: float) -> None:
    job.state = entry.state
    job.exit_code = entry.exit_code
    job.reason = _text(entry.reason)
    job.ended_at = moment(at)
    job.account = None
    session.flush()
    job.account = reader.Reader.within(session.connection()).settled(job.id)
    settling.settle_earlier(session.connection(), job.id)


_APPLY_MANY: dict[type, Callable[[Session, models.JobRow, Sequence[Any]], None]] = {
    journal.IterationCommitted: _commit_iterations,
    journal.NodeJoined: _join_nodes,
    journal.WorkerStarted: _start_workers,
}

_APPLY: dict[type, Callable[[Session, models.JobRow, Any, float], None]] = {
    journal.JobStarted: _job_started,
    journal.NodeJoined: _node_joined,
    journal.NodeLost: _node_lost,
    journal.WorkerStarted: _worker_started,
    journal.WorkerEnded: _worker_ended,
    journal.PlanDecided: _plan_decided,
    journal.IterationCommitted: _iteration_committed,
    journal.IterationsPacked: _iterations_packed,
    journal.EvaluationDone: _evaluation_done,
    journal.Suspected: _suspected,
    journal.CoverageChanged: _coverage_changed,
    journal.FailureFound: _failure_found,
    journal.FailureEnded: _failure_ended,
    journal.ProbesTaken: _probes_taken,
    journal.Reconfigured: _reconfigured,
    journal.PlanInEffect: _plan_in_effect,
    journal.PlanRefused: _plan_refused,
    journal.JoinRefused: _join_refused,
    journal.ModelDeclared: _model_declared,
    journal.LeaderChosen: _leader_chosen,
    journal.JobSignalled: _event_only,
    journal.WorkersOrdered: _event_only,
    journal.PlanWithdrawn: _plan_withdrawn,
    journal.ChangeDecided: _event_only,
    journal.ChangeDeclined: _change_declined,
    journal.IterationsUnreported: _event_only,
    journal.DrainWaived: _event_only,
    journal.DrainDecided: _drain_decided,
    journal.DrainAnswered: _drain_answered,
    journal.NodeReleased: _node_released,
    journal.ReplacementAsked: _replacement_asked,
    journal.ReplacementChanged: _replacement_changed,
    journal.SlurmSaw: _slurm_saw,
    journal.FaultInjected: _fault_injected,
    journal.CheckpointCommitted: _checkpoint_committed,
    journal.JobEnded: _job_ended,
}
