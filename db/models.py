"""The ledger's tables (interface.md, "Ledger"). Declares; decides nothing. `db.migrations` creates what stands here.

Every row belongs to a job by its surrogate id, because several jobs may share one PostgreSQL. A job is recognised by
its uuid, which follows from the first record of its journal: `local-1` of two users are two jobs. Times are UTC.
Where many users share one, PostgreSQL says who wrote a job, and lets nobody else change it (`db.migrations`, 0009).
Layouts, assignments and lists of ranks are JSON text (layouts in the form of interface.md's LAYOUT). What kinds of
failures, components and outcomes there are is the journal's to say: a new one needs no migration.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    FetchedValue,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time: aware in Python, UTC in every database (SQLite keeps no zone, so it is put back here)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time {value} has no time zone")
        return value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None]:
        """In one step: a third of what reading many rows took was this."""
        if dialect.name == "sqlite":
            return lambda text: None if text is None else datetime.fromisoformat(f"{text}+00:00")
        return lambda value: None if value is None else value.astimezone(UTC)


class LedgerTable(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime, float: Float(53)}  # noqa: RUF012 - as SQLAlchemy wants it


def _of_job(*, primary_key: bool = False) -> Mapped[int]:
    return mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=primary_key)


class JobRow(LedgerTable):
    """`journal_seq`: the last journal record whose rows are here; written in the same transaction as they are."""

    __tablename__ = "jobs"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'completed', 'failed', 'cancelled', 'abnormal')", name="state"),
        CheckConstraint("journal_seq >= 0", name="journal_seq"),
        Index(None, "name", "host"),
        Index(None, "started_at"),
        Index(None, "last_entry_at"),
        Index(None, "owner", "started_at"),
        Index(None, "slurm_job"),
        Index(None, "run"),
    )

    id: Mapped[int] = mapped_column(Integer, Identity(always=True), primary_key=True, autoincrement=True)
    uuid: Mapped[str] = mapped_column(String(36), unique=True)
    name: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    owner: Mapped[str] = mapped_column(Text)
    command: Mapped[str] = mapped_column(Text)
    nodes: Mapped[int] = mapped_column(Integer)
    gpus_per_node: Mapped[int] = mapped_column(Integer)
    tp: Mapped[int] = mapped_column(Integer)
    pp: Mapped[int] = mapped_column(Integer)
    schedule: Mapped[str] = mapped_column(Text)
    restart_count: Mapped[int] = mapped_column(Integer)
    version: Mapped[str] = mapped_column(Text)
    configuration: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    exit_code: Mapped[int | None] = mapped_column(Integer)
    reason: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    last_entry_at: Mapped[datetime]
    """Time of the last record that the job itself wrote; what a reader adds to a dead job does not count."""
    journal_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    telemetry_dropped: Mapped[int] = mapped_column(BigInteger, default=0)
    model: Mapped[str | None] = mapped_column(Text)
    """What it trains, as the script declared it, in JSON; null until then."""
    account: Mapped[str | None] = mapped_column(Text)
    """Where its time went (`db.reading.costs.cost_accounts.Account` in JSON), once it is over; null until then, and in
    older ledgers."""
    detector: Mapped[str | None] = mapped_column(Text)
    """What the detector judged by last, as in `journal.CoverageChanged`; null while it warms up or is off."""
    unwatched: Mapped[str | None] = mapped_column(Text)
    """Ranks, in JSON, with work of which it had not been told anything for long."""
    written_by: Mapped[str | None] = mapped_column(Text, FetchedValue())
    """The database role whose job it is, which PostgreSQL sets and we never do; null in SQLite. (`owner` is whom the
    job itself says it belongs to.)"""
    run: Mapped[str] = mapped_column(String(36), server_default=text("''"))
    """What attempts have in common that go on from each other's checkpoints, or that Slurm requeued: the uuid of the
    first, where that is known. Of one that stands alone its own."""
    cluster: Mapped[str | None] = mapped_column(Text)
    """This and the next seven as Slurm has them, null outside of it. `slurm_job` is sacct's JobIDRaw, which is used
    again some day: with `cluster` and `submitted_at` it is unique."""
    slurm_job: Mapped[int | None] = mapped_column(BigInteger)
    array_job: Mapped[int | None] = mapped_column(BigInteger)
    array_task: Mapped[int | None] = mapped_column(BigInteger)
    submitted_at: Mapped[datetime | None]
    slurm_account: Mapped[str | None] = mapped_column(Text)
    partition: Mapped[str | None] = mapped_column(Text)
    qos: Mapped[str | None] = mapped_column(Text)
    torch: Mapped[str | None] = mapped_column(Text)
    """This and the next four: versions of what trained, as rank 0 said; null until then."""
    megatron_core: Mapped[str | None] = mapped_column(Text)
    cuda: Mapped[str | None] = mapped_column(Text)
    nccl: Mapped[str | None] = mapped_column(Text)
    script_commit: Mapped[str | None] = mapped_column(Text)


class NodeRow(LedgerTable):
    """`replacement`: of the request that it answered, null for a node of the job's own allocation. `released_at`: when
    Slurm took it back. One that was waited for and never came has no host, no devices, and `joined_at` is when it was
    given up."""

    __tablename__ = "nodes"
    __table_args__ = (Index(None, "node", "joined_at"),)

    job_id: Mapped[int] = _of_job(primary_key=True)
    node: Mapped[str] = mapped_column(Text, primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    devices: Mapped[int] = mapped_column(Integer)
    joined_at: Mapped[datetime]
    lost_at: Mapped[datetime | None]
    lost_reason: Mapped[str | None] = mapped_column(Text)
    replacement: Mapped[int | None] = mapped_column(Integer)
    released_at: Mapped[datetime | None]


class MembershipRow(LedgerTable):
    """A node's time in a job, from one joining to the loss that ended it; a node that came back has several.

    `how` it was lost: as in `journal.NodeLost`. What it was meanwhile, empty where that was not told: the `serial` of
    the machine, its `kernel`, `image` (the operating system's name and version), GPU `driver`, and `nic_firmware`, by
    adapter, as JSON.
    """

    __tablename__ = "memberships"
    __table_args__ = (
        Index(None, "node", "joined_at"),
        Index(None, "host", "joined_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    node: Mapped[str] = mapped_column(Text, primary_key=True)
    joined_at: Mapped[datetime] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    devices: Mapped[int] = mapped_column(Integer)
    lost_at: Mapped[datetime | None]
    lost_reason: Mapped[str | None] = mapped_column(Text)
    how: Mapped[str | None] = mapped_column(Text)
    serial: Mapped[str] = mapped_column(Text)
    kernel: Mapped[str] = mapped_column(Text)
    image: Mapped[str] = mapped_column(Text)
    driver: Mapped[str] = mapped_column(Text)
    nic_firmware: Mapped[str] = mapped_column(Text)


class DeviceRow(LedgerTable):
    """What was in a slot of a node while it was in a job. `device`: its number there; `serial`, `board`: of the device
    and of what it is mounted on. Empty where nobody could tell."""

    __tablename__ = "devices"
    __table_args__ = (
        ForeignKeyConstraint(
            ["job_id", "node", "joined_at"],
            ["memberships.job_id", "memberships.node", "memberships.joined_at"],
            ondelete="CASCADE",
        ),
        Index(None, "uuid", "joined_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    node: Mapped[str] = mapped_column(Text, primary_key=True)
    joined_at: Mapped[datetime] = mapped_column(primary_key=True)
    device: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(Text)
    uuid: Mapped[str] = mapped_column(Text)
    serial: Mapped[str] = mapped_column(Text)
    board: Mapped[str] = mapped_column(Text)
    vbios: Mapped[str] = mapped_column(Text)
    bus: Mapped[str] = mapped_column(Text)


class CheckpointRow(LedgerTable):
    """One that is complete. Null where only the event was kept, in ledgers of before."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "job_id", "committed_at"),)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    folder: Mapped[str | None] = mapped_column(Text)
    bytes: Mapped[int | None] = mapped_column(BigInteger)
    seconds: Mapped[float | None]
    committed_at: Mapped[datetime]


class MaintenanceRow(LedgerTable):
    """What somebody did to a node, or to a device of it: what had failed before says nothing of it any more.

    `device_uuid`: null where it was the node as a whole. `kind`: `repaired`, `replaced`, `firmware`, or whatever a site
    calls it. `written_by`: as in `jobs`.
    """

    __tablename__ = "maintenance"
    __table_args__ = (Index(None, "node", "at"),)

    id: Mapped[int] = mapped_column(Integer, Identity(always=True), primary_key=True, autoincrement=True)
    cluster: Mapped[str] = mapped_column(Text)
    node: Mapped[str] = mapped_column(Text)
    device_uuid: Mapped[str | None] = mapped_column(Text)
    kind: Mapped[str] = mapped_column(Text)
    text: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime]
    recorded_at: Mapped[datetime]
    written_by: Mapped[str | None] = mapped_column(Text, FetchedValue())


class CompatibilityRow(LedgerTable):
    """One row: the oldest schemas whose clients may still read this ledger, and write it."""

    __tablename__ = "compatibility"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    min_reader: Mapped[str] = mapped_column(String(8))
    min_writer: Mapped[str] = mapped_column(String(8))


class WorkerRow(LedgerTable):
    """One process. `exit`: negative for a signal, null while it runs or when it died with its node, unseen."""

    __tablename__ = "workers"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "node"], ["nodes.job_id", "nodes.node"], ondelete="CASCADE"),
        Index(None, "job_id", "node"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    node: Mapped[str] = mapped_column(Text)
    device: Mapped[int] = mapped_column(Integer)
    pid: Mapped[int] = mapped_column(Integer)
    epoch_joined: Mapped[int] = mapped_column(Integer)
    epoch_left: Mapped[int | None] = mapped_column(Integer)
    exit: Mapped[int | None] = mapped_column(Integer)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class PlanRow(LedgerTable):
    """`layout` and `assignment` as JSON; `digest` is the one that all ranks confirmed.

    `predicted`: time of an iteration under it, `present`: the same of the plan that was in effect, as things were then,
    both in `unit` (`s`, or `layer times`, of which only ratios tell). Null where nobody could tell, and `present` where
    no plan was in effect, or one that could not run any more. `basis`: what it was decided from, as JSON
    (`resihp.record.journal.PlanBasis`), by which it is explained when somebody asks; null where the journal has none.

    `in_effect_at`: when every rank had acknowledged its state; in journals that do not tell, when the first iteration
    under the plan was committed. Null for one that never took effect: refused (by a rank, or by our own check),
    withdrawn as the job was to stop, or overtaken by the next one.
    """

    __tablename__ = "plans"
    __table_args__ = (
        CheckConstraint("action IN ('start', 'redo', 'commit', 'between')", name="action"),
        CheckConstraint("unit IN ('s', 'layer times')", name="unit"),
        CheckConstraint("predicted > 0", name="predicted"),
        CheckConstraint("present > 0", name="present"),
        Index(None, "decided_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    action: Mapped[str] = mapped_column(String(16))
    next_iteration: Mapped[int] = mapped_column(BigInteger)
    description: Mapped[str] = mapped_column(Text)
    replicas: Mapped[int] = mapped_column(Integer)
    active: Mapped[int] = mapped_column(Integer)
    """Ranks that compute micro-batches."""
    standby: Mapped[int] = mapped_column(Integer)
    """Ranks that compute none: those on standby, and those of mirrors."""
    schedule: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    decided_at: Mapped[datetime]
    layout: Mapped[str] = mapped_column(Text)
    assignment: Mapped[str] = mapped_column(Text)
    digest: Mapped[str] = mapped_column(String(64))
    bytes_planned: Mapped[int] = mapped_column(BigInteger, server_default="0")
    in_effect_at: Mapped[datetime | None]
    refused_reason: Mapped[str | None] = mapped_column(Text)
    refused_by: Mapped[int | None] = mapped_column(Integer)
    withdrawn_reason: Mapped[str | None] = mapped_column(Text)
    predicted: Mapped[float | None]
    present: Mapped[float | None]
    unit: Mapped[str] = mapped_column(String(16), server_default="layer times")
    basis: Mapped[str | None] = mapped_column(Text)
    considered: Mapped[str | None] = mapped_column(Text)
    """What else was possible, as JSON (`resihp.record.journal.OtherPlan`), in `unit`; null where that was not told."""
    unaffected_by: Mapped[str | None] = mapped_column(Text)
    """Failures that lasted and did not slow it, as what is slow had no work under it, as JSON; null where there were
    none, and in rows of before."""


class DeclinedChangeRow(LedgerTable):
    """Another plan, or another node, that was thought of, and nothing was changed (`journal.ChangeDeclined`).

    `about`: `plan` or `node`. `failures`, `considered`: as JSON. `description`, `predicted` and `present` of what was
    thought of, as in `plans`; null where there was no other.
    """

    __tablename__ = "declined_changes"

    job_id: Mapped[int] = _of_job(primary_key=True)
    declined: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    about: Mapped[str] = mapped_column(Text)
    iteration: Mapped[int] = mapped_column(BigInteger)
    reason: Mapped[str] = mapped_column(Text)
    why: Mapped[str] = mapped_column(Text)
    failures: Mapped[str] = mapped_column(Text)
    description: Mapped[str | None] = mapped_column(Text)
    predicted: Mapped[float | None]
    present: Mapped[float | None]
    unit: Mapped[str] = mapped_column(Text)
    considered: Mapped[str] = mapped_column(Text)
    declined_at: Mapped[datetime]


class IterationRow(LedgerTable):
    """One committed iteration. `seconds` is null when no rank lived to report it."""

    __tablename__ = "iterations"
    __table_args__ = (
        CheckConstraint("iteration >= 1", name="iteration"),
        CheckConstraint("seconds >= 0", name="seconds"),
        Index(None, "job_id", "finished_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[float | None]
    predicted_seconds: Mapped[float | None]
    tokens: Mapped[int] = mapped_column(BigInteger)
    sum_squared_lengths: Mapped[int] = mapped_column(BigInteger)
    samples: Mapped[int] = mapped_column(BigInteger)
    samples_digest: Mapped[str] = mapped_column(String(16))
    loss: Mapped[float | None]
    finished_at: Mapped[datetime]
    gradient_norm: Mapped[float | None]
    learning_rate: Mapped[float | None]
    skipped: Mapped[bool]
    validation_loss: Mapped[float | None]
    """Of the weights after it, where they were evaluated."""


class RankReportRow(LedgerTable):
    """Telemetry: thinned or lost without harm; of more than 1,024 ranks not every row is kept
    (`db.telemetry.condensed`). Many: its key is all that is indexed, and on SQLite the table itself."""

    __tablename__ = "rank_reports"
    __table_args__ = ({"sqlite_with_rowid": False},)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    seconds: Mapped[float | None]
    compute_seconds: Mapped[float | None]


class RankQuantilesRow(LedgerTable):
    """How the ranks of an iteration did together, in a job of so many that not each one's report is kept
    (`db.telemetry.condensed`). `ranks`: how many reported. Telemetry as `rank_reports`, over the same two figures."""

    __tablename__ = "rank_quantiles"
    __table_args__ = ({"sqlite_with_rowid": False},)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    ranks: Mapped[int] = mapped_column(Integer)
    seconds_min: Mapped[float | None]
    seconds_p5: Mapped[float | None]
    seconds_p50: Mapped[float | None]
    seconds_p95: Mapped[float | None]
    seconds_max: Mapped[float | None]
    compute_seconds_min: Mapped[float | None]
    compute_seconds_p5: Mapped[float | None]
    compute_seconds_p50: Mapped[float | None]
    compute_seconds_p95: Mapped[float | None]
    compute_seconds_max: Mapped[float | None]


class RankScoreRow(LedgerTable):
    """How a rank stood with the detector after an iteration: its own work's time over what is healthy for it, and the
    evidence against it over what makes a finding. Telemetry, thinned by the controller (`fail_slow.standings`)."""

    __tablename__ = "scores"
    __table_args__ = ({"sqlite_with_rowid": False},)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    level: Mapped[float | None]
    evidence: Mapped[float]


class ReconfigurationRow(LedgerTable):
    """One transition, from the failure's detection to the first committed iteration after it.

    `planning_seconds`: of `plan_seconds`, what it took to decide, null where that was not measured.
    `bytes_moved`: what ranks received in all; `extra_bytes`: the most that one held beside its state meanwhile.
    """

    __tablename__ = "reconfigurations"
    __table_args__ = (
        CheckConstraint("action IN ('redo', 'commit', 'between')", name="action"),
        CheckConstraint("attempts >= 1", name="attempts"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    action: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int] = mapped_column(Integer)
    seconds: Mapped[float]
    park_seconds: Mapped[float]
    plan_seconds: Mapped[float]
    groups_seconds: Mapped[float]
    state_seconds: Mapped[float]
    first_iteration_seconds: Mapped[float]
    finished_at: Mapped[datetime]
    bytes_moved: Mapped[int] = mapped_column(BigInteger, server_default="0")
    extra_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    planning_seconds: Mapped[float | None]


class FailureRow(LedgerTable):
    """One root cause. `failed_at`: as well as that can be known (`resihp.controller.fail_stop.onsets`), null where
    nothing tells and in older ledgers; `recovered_epoch`: the reconfiguration that ended it, null until then.

    Of what is slow (`fail-slow`): `iteration` is the first slow one, `speed` the share of a healthy one's that is left,
    `confidence` the detector's; `ended_iteration` and `ended_at` when it was as fast as before, null while it is slow.
    """

    __tablename__ = "failures"
    __table_args__ = (
        CheckConstraint("speed > 0 AND speed <= 1", name="speed"),
        CheckConstraint("confidence >= 0 AND confidence <= 1", name="confidence"),
        ForeignKeyConstraint(["job_id", "recovered_epoch"], ["reconfigurations.job_id", "reconfigurations.epoch"]),
        Index(None, "job_id", "node"),
        Index(None, "node", "noticed_at"),
        Index(None, "noticed_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    failure: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(16))
    component: Mapped[str] = mapped_column(String(16))
    cause: Mapped[str] = mapped_column(Text)
    ranks: Mapped[str] = mapped_column(Text)
    node: Mapped[str | None] = mapped_column(Text)
    device: Mapped[int | None] = mapped_column(Integer)
    iteration: Mapped[int] = mapped_column(BigInteger)
    epoch: Mapped[int] = mapped_column(Integer)
    noticed_at: Mapped[datetime]
    detect_seconds: Mapped[float | None]
    recovered_epoch: Mapped[int | None] = mapped_column(Integer)
    evidence: Mapped[str] = mapped_column(Text)
    speed: Mapped[float | None]
    confidence: Mapped[float | None]
    ended_iteration: Mapped[int | None] = mapped_column(BigInteger)
    ended_at: Mapped[datetime | None]
    code: Mapped[str | None] = mapped_column(Text)
    """What the logs say of it (`journal.Diagnosed`), an Xid as `xid 79`; null where they say nothing."""
    category: Mapped[str | None] = mapped_column(Text)
    hardware: Mapped[bool | None]
    """Whether it says something of hardware; null in journals that do not tell."""
    intermittent: Mapped[bool] = mapped_column(server_default=text("false"))
    link_from: Mapped[int | None] = mapped_column(Integer)
    """Ranks at the ends of a link, and the other one's node (`node` is the first's); null of other components."""
    link_to: Mapped[int | None] = mapped_column(Integer)
    peer_node: Mapped[str | None] = mapped_column(Text)
    failed_at: Mapped[datetime | None]
    idle: Mapped[bool] = mapped_column(server_default=text("false"))
    """Of what is slow: it had no work then, as far as that was told."""


class SuspicionKindRow(LedgerTable):
    """A kind of suspicion, and what it means. One that a newer client writes of is added by it."""

    __tablename__ = "suspicion_kinds"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    meaning: Mapped[str] = mapped_column(Text)


class SuspicionRow(LedgerTable):
    """One suspicion that something is slow or silent, whatever became of it.

    `iteration`: the first slow one, `detected`: the one it was raised in; `change`: time over healthy, less 1. `probe`:
    the measurement taken for it. `outcome`: as in `journal.Suspected`, null while it is open, or where the job ended
    first; `failure`: the first verdict that it led to, or the loss. `kind`: as `journal.Suspected.sort` and
    `suspicion_kinds` have it, null where an older client wrote. `test`: what was tested when it was raised, and its
    unit, which came to `statistic` and takes `threshold`; null in journals of before. Of silence `change` and
    `confidence` are null.
    """

    __tablename__ = "suspicions"
    __table_args__ = (
        CheckConstraint("confidence >= 0 AND confidence <= 1", name="confidence"),
        Index(None, "node", "raised_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    suspicion: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    component: Mapped[str] = mapped_column(String(16))
    ranks: Mapped[str] = mapped_column(Text)
    node: Mapped[str | None] = mapped_column(Text)
    device: Mapped[int | None] = mapped_column(Integer)
    iteration: Mapped[int] = mapped_column(BigInteger)
    detected: Mapped[int] = mapped_column(BigInteger)
    change: Mapped[float | None]
    confidence: Mapped[float | None]
    probe: Mapped[int | None] = mapped_column(Integer)
    outcome: Mapped[str | None] = mapped_column(String(16))
    failure: Mapped[int | None] = mapped_column(Integer)
    evidence: Mapped[str] = mapped_column(Text)
    outcome_evidence: Mapped[str | None] = mapped_column(Text)
    raised_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    kind: Mapped[str | None] = mapped_column(Text)
    test: Mapped[str | None] = mapped_column(Text)
    statistic: Mapped[float | None]
    threshold: Mapped[float | None]


class ProbeRow(LedgerTable):
    """A measurement of a device, or of the link between two ranks (`peer`, on `peer_node`).

    `speed`: share of what its peers reach, null where there was nothing to compare with. `flops` and `memory_bytes`
    are a device's own figures, per second, and `hardware` is what it is, by its maker's name.
    """

    __tablename__ = "probes"
    __table_args__ = (
        CheckConstraint("occasion IN ('start', 'join', 'suspicion', 'standby')", name="occasion"),
        CheckConstraint("kind IN ('device', 'link')", name="kind"),
        Index(None, "job_id", "node"),
        Index(None, "node", "measured_at"),
    )

    id: Mapped[int] = mapped_column(Integer, Identity(always=True), primary_key=True, autoincrement=True)
    job_id: Mapped[int] = _of_job()
    probe: Mapped[int] = mapped_column(Integer)
    occasion: Mapped[str] = mapped_column(String(16))
    kind: Mapped[str] = mapped_column(String(16))
    rank: Mapped[int] = mapped_column(Integer)
    node: Mapped[str] = mapped_column(Text)
    device: Mapped[int | None] = mapped_column(Integer)
    peer: Mapped[int | None] = mapped_column(Integer)
    peer_node: Mapped[str | None] = mapped_column(Text)
    flops: Mapped[float | None]
    memory_bytes: Mapped[float | None]
    speed: Mapped[float | None]
    passed: Mapped[bool]
    evidence: Mapped[str] = mapped_column(Text)
    measured_at: Mapped[datetime]
    hardware: Mapped[str | None] = mapped_column(Text)


class DrainRow(LedgerTable):
    """A node with a verdict, and what was done to keep Slurm from giving it to the next job, or only to the user's.

    `failure` is the verdict's. `step`: the rung of the ladder that holds, the first one that worked (`slurm`, `spool`,
    `exclusion`), or the last one tried; `outcome` is that rung's, null until one has answered. `answers`: all rungs'
    as JSON. `drained_at`: when it was decided; `undrained_at`: when Slurm was first seen to use the node again.
    """

    __tablename__ = "drains"
    __table_args__ = (
        CheckConstraint("step IN ('slurm', 'spool', 'exclusion')", name="step"),
        CheckConstraint("outcome IN ('done', 'refused', 'unknown')", name="outcome"),
        Index(None, "job_id", "node"),
        Index(None, "node", "drained_at"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    drain: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    node: Mapped[str] = mapped_column(Text)
    failure: Mapped[int] = mapped_column(Integer)
    step: Mapped[str | None] = mapped_column(String(16))
    outcome: Mapped[str | None] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    drained_at: Mapped[datetime]
    undrained_at: Mapped[datetime | None]
    answers: Mapped[str] = mapped_column(Text)


class ReplacementRow(LedgerTable):
    """A node asked for in place of `instead`. `node`: what came, or is about to. `text`: what was said of it last."""

    __tablename__ = "replacements"
    __table_args__ = (
        CheckConstraint(
            "outcome IN ('asked', 'pending', 'running', 'joined', 'refused', 'cancelled', 'ended')", name="outcome"
        ),
        Index(None, "job_id", "node"),
    )

    job_id: Mapped[int] = _of_job(primary_key=True)
    replacement: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    instead: Mapped[str] = mapped_column(Text)
    slurm_job: Mapped[str | None] = mapped_column(Text)
    node: Mapped[str | None] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    text: Mapped[str] = mapped_column(Text)
    asked_at: Mapped[datetime]
    joined_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    excluded: Mapped[str] = mapped_column(Text)


class EventRow(LedgerTable):
    """What happened, in words: every journal record but committed iterations. `seq` is the record's number, `kind`
    the name of its entry (`SuspicionCleared` for a `Suspected` that has ended)."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "job_id", "at"),)

    job_id: Mapped[int] = _of_job(primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(Text)
    text: Mapped[str] = mapped_column(Text)
    iteration: Mapped[int | None] = mapped_column(BigInteger)
    epoch: Mapped[int | None] = mapped_column(Integer)
    rank: Mapped[int | None] = mapped_column(Integer)
    node: Mapped[str | None] = mapped_column(Text)
