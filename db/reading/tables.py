"""The tables of `resihp history`: their columns, order, and filter columns. Reads nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Float, FromClause, Select, case, exists, func, null, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import aliased

from resihp.db import models
from resihp.db.models import EventRow, FailureRow, IterationRow, PlanRow, ReconfigurationRow, WorkerRow
from resihp.errors import UsageError
from resihp.record.recovery import Moments, noticed_after, recovery

Row = dict[str, Any]

JOB_COLUMNS = (
    *("id", "name", "host", "owner", "state", "exit_code", "reason", "started_at", "ended_at", "last_entry_at"),
    *("restart_count", "nodes", "gpus_per_node", "tp", "pp", "schedule", "version", "telemetry_dropped"),
    *("uuid", "run", "cluster", "slurm_job", "array_job", "array_task", "submitted_at", "slurm_account", "partition"),
    *("qos", "torch", "megatron_core", "cuda", "nccl", "script_commit"),
)

OF_JOB = ("job", "job_uuid")
"""Additional columns of rows from all jobs. The uuid is needed because names repeat between folders and hosts."""

ACCOUNT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "iterations": ("iteration", "epoch", "seconds", "predicted_seconds", "tokens", "loss", "finished_at"),
    "failures": (
        *("failure", "kind", "node", "iteration", "failed_at", "noticed_at", "detect_seconds", "recovered_epoch"),
        *("ended_iteration", "speed", "component", "hardware", "epoch", "idle"),
    ),
    "reconfigurations": ("epoch", "action", "seconds", "finished_at"),
    "plans": (
        *("epoch", "active", "standby", "decided_at", "in_effect_at", "reason", "description"),
        *("predicted", "present", "unit", "unaffected_by"),
    ),
}
"""Columns of each table from which cost accounts are computed. Layouts are not included, because reading them would
take longer than all else."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend Python's garbage collection while many rows are created: it would scan all rows again and again without
    finding cycles, which doubles the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _columns(model: type[models.LedgerTable], *left_out: str) -> tuple[ColumnElement[Any], ...]:
    return tuple(column for column in model.__table__.columns if column.key not in ("job_id", *left_out))


@dataclass(frozen=True)
class Table:
    """One table of `resihp history`: its query, the table of the ledger, and the columns for order and time."""

    query: Select[Any]
    source: FromClause
    order: str
    time: str
    json_columns: tuple[str, ...] = ()


def _table(
    model: type[models.LedgerTable],
    order: str,
    time: str,
    json_columns: tuple[str, ...] = (),
    left_out: tuple[str, ...] = (),
) -> Table:
    return Table(select(*_columns(model, *left_out)), model.__table__, order, time, json_columns)


_recovery = FailureRow.__table__.outerjoin(
    ReconfigurationRow.__table__,
    (ReconfigurationRow.job_id == FailureRow.job_id) & (ReconfigurationRow.epoch == FailureRow.recovered_epoch),
)
_failure_columns = (
    *_columns(FailureRow, "recovered_epoch", "evidence"),
    *(
        sql_cast(null(), Float(53)).label(name)
        for name in ("seconds_to_recover", "noticed_after_seconds", "seconds_without_noticing")
    ),
    ReconfigurationRow.action.label("action"),
    FailureRow.recovered_epoch,
    FailureRow.evidence,
)
"""The three times are computed from `BACK_AT` (`with_times`)."""
BACK_AT = ReconfigurationRow.finished_at.label("back_at")

_node_columns_told = (
    *(
        case((models.NodeRow.host != "", column)).label("joined_at") if column.key == "joined_at" else column
        for column in _columns(models.NodeRow)
    ),
    select(func.max(models.ReplacementRow.node))
    .where(
        models.ReplacementRow.job_id == models.NodeRow.job_id,
        models.ReplacementRow.instead == models.NodeRow.node,
        models.ReplacementRow.joined_at.is_not(None),
    )
    .scalar_subquery()
    .label("replaced_by"),
)
"""`joined_at`: null for a node that never came. `replaced_by`: the node that joined in its place."""

_later = aliased(PlanRow)
_plan_columns = (
    *_columns(PlanRow),
    case(
        (PlanRow.in_effect_at.is_not(None), "in effect"),
        (PlanRow.refused_reason.is_not(None), "refused"),
        (PlanRow.withdrawn_reason.is_not(None), "withdrawn"),
        (exists().where(_later.job_id == PlanRow.job_id, _later.epoch > PlanRow.epoch), "superseded"),
        else_="pending",
    ).label("outcome"),
)
"""`outcome`: in effect (since `in_effect_at`); refused; withdrawn, because the job was to stop; superseded, if the next
plan was decided before this one took effect; or pending."""

_suspicion_kind = func.coalesce(
    models.SuspicionRow.kind,
    case((models.SuspicionRow.component == "device", "slow-compute"), else_="slow-" + models.SuspicionRow.component),
)
_suspicion_columns = (
    *(_suspicion_kind.label("kind") if column.key == "kind" else column for column in _columns(models.SuspicionRow)),
    select(models.SuspicionKindRow.meaning)
    .where(models.SuspicionKindRow.kind == _suspicion_kind)
    .scalar_subquery()
    .label("meaning"),
)
"""Older clients wrote only suspicions of slowness, without a kind."""

TABLES: Mapping[str, Table] = {
    "failures": Table(
        select(*_failure_columns).select_from(_recovery), FailureRow.__table__, "failure", "noticed_at", ("ranks",)
    ),
    "nodes": Table(select(*_node_columns_told), models.NodeRow.__table__, "node", "joined_at"),
    "memberships": _table(models.MembershipRow, "joined_at", "joined_at", ("nic_firmware",)),
    "devices": _table(models.DeviceRow, "device", "joined_at"),
    "checkpoints": _table(models.CheckpointRow, "iteration", "committed_at"),
    "workers": _table(WorkerRow, "rank", "started_at"),
    "iterations": _table(IterationRow, "iteration", "finished_at"),
    "plans": Table(
        select(*_plan_columns),
        PlanRow.__table__,
        "epoch",
        "decided_at",
        ("layout", "assignment", "basis", "considered", "unaffected_by"),
    ),
    "reconfigurations": _table(ReconfigurationRow, "epoch", "finished_at"),
    "drains": _table(models.DrainRow, "drain", "drained_at", ("answers",)),
    "declined_changes": _table(models.DeclinedChangeRow, "declined", "declined_at", ("failures", "considered")),
    "replacements": _table(models.ReplacementRow, "replacement", "asked_at", ("excluded",)),
    "probes": _table(models.ProbeRow, "id", "measured_at", left_out=("id",)),
    "suspicions": Table(
        select(*_suspicion_columns), models.SuspicionRow.__table__, "suspicion", "raised_at", ("ranks",)
    ),
    "scores": _table(models.RankScoreRow, "iteration", "iteration"),
    "events": _table(EventRow, "seq", "at"),
}


def node_columns(table: str) -> list[str]:
    """Return the columns that name nodes. Raises UsageError for a table that has none."""
    columns = [name for name in ("node", "instead") if name in TABLES[table].source.c]
    if not columns:
        raise UsageError(f"history {table}: has no nodes; leave --node out")
    return columns


def with_times(failure: Row) -> Row:
    """Replace `back_at` by the seconds from the failure to the first commit after it, and those before and after the
    failure was noticed. The times come from the clocks of the writers, which may be several hosts."""
    back_at, moments = failure.pop("back_at"), Moments.of_times(failure["failed_at"], failure["noticed_at"])
    failure["noticed_after_seconds"] = noticed_after(moments)
    if back_at is not None:
        mended = recovery(moments, back_at.timestamp())
        failure["seconds_to_recover"] = mended.seconds_to_recover
        failure["seconds_without_noticing"] = mended.seconds_without_noticing
    return failure


def object_in(content: str | None) -> dict[str, Any]:
    """Decode a JSON object in a cell. Imported rows may hold anything: all else counts as an empty object."""
    try:
        return msgspec.json.decode(content or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
