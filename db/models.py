"""The ledger's tables (interface.md, "Ledger"). Declares the tables; `resihp.db.migrations` creates them. Decides
nothing.

Every row belongs to a job by the job's surrogate id, because several jobs may share one PostgreSQL database. A job is
identified by its uuid, which is derived from the first record of its journal: `local-1` of two users are two jobs.
Times are UTC. In a database that many users share, PostgreSQL records the writer of each job and prevents other users
from changing it (`resihp.db.migrations`). Layouts, assignments and lists of ranks are JSON text (layouts in the form
LAYOUT of interface.md). The journal defines the kinds of failures, components and outcomes, so a new kind needs no
migration.
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
    """A point in time: with a time zone in Python, in UTC in every database. SQLite stores no time zone, so it is added
    on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time {value} has no time zone")
        return value.astimezone(UTC)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None]:
        """Return a converter that works in one step, because conversion took a third of the time of reading many
        rows."""
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
    """A job. `journal_seq`: number of the last journal record that is in the rows; written in the same transaction as
    these rows."""

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
    """Time of the last record that the job itself wrote. Records that a reader adds to a dead job do not count."""
    journal_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    telemetry_dropped: Mapped[int] = mapped_column(BigInteger, default=0)
    model: Mapped[str | None] = mapped_column(Text)
    """The trained model as the script declared it, as JSON; null until it is declared. For a script that does not
    report to resihp, `iterations` alone: the last iteration as the script printed it, or null."""
    account: Mapped[str | None] = mapped_column(Text)
    """How the job's time was spent (`resihp.db.reading.costs.cost_accounts.Account` as JSON); null until the job is
    over, and in older ledgers."""
    detector: Mapped[str | None] = mapped_column(Text)
    """The detector's latest mode, as in `journal.CoverageChanged`; null while the detector warms up or is off."""
    unwatched: Mapped[str | None] = mapped_column(Text)
    """Ranks with work whose reports have long been missing at the detector, as JSON; null if there are none."""
    written_by: Mapped[str | None] = mapped_column(Text, FetchedValue())
    """The database role that wrote the job. PostgreSQL sets it, resihp never does; null in SQLite. (`owner` is the user
    that the job itself names.)"""
    run: Mapped[str] = mapped_column(String(36), server_default=text("''"))
    """Common id of attempts that resume from each other's checkpoints, or that Slurm requeued: the uuid of the first
    attempt, where known. A single attempt has its own uuid."""
    cluster: Mapped[str | None] = mapped_column(Text)
    """This column and the next seven come from Slurm, and are null outside of Slurm. `slurm_job` is sacct's JobIDRaw,
    which Slurm reuses eventually; together with `cluster` and `submitted_at` it is unique."""
    slurm_job: Mapped[int | None] = mapped_column(BigInteger)
    array_job: Mapped[int | None] = mapped_column(BigInteger)
    array_task: Mapped[int | None] = mapped_column(BigInteger)
    submitted_at: Mapped[datetime | None]
    slurm_account: Mapped[str | None] = mapped_column(Text)
    partition: Mapped[str | None] = mapped_column(Text)
    qos: Mapped[str | None] = mapped_column(Text)
    torch: Mapped[str | None] = mapped_column(Text)
    """This column and the next four: versions of the training software, as rank 0 reported them; null until
    reported."""
    megatron_core: Mapped[str | None] = mapped_column(Text)
    cuda: Mapped[str | None] = mapped_column(Text)
    nccl: Mapped[str | None] = mapped_column(Text)
    script_commit: Mapped[str | None] = mapped_column(Text)


class NodeRow(LedgerTable):
    """A node of a job. `replacement`: number of the request that the node answered, null for a node of the job's own
    allocation. `released_at`: time when it was given back to Slurm. A node that the job waited for in vain has an empty
    host and no devices; its `joined_at` is then the end of the wait."""

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
    """One stay of a node in a job, from its joining until its loss; a node that returned has several rows.

    `how`: how the node was lost, as in `journal.NodeLost`. The other columns describe the machine during the stay,
    empty where not reported: `serial`, `kernel`, `image` (name and version of the operating system), GPU `driver`, and
    `nic_firmware`, which is JSON by network adapter.
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
    """The device in one slot of a node during one stay of the node in a job. `device`: its number on the node. `serial`
    and `board`: serial numbers of the device and of its board. Texts are empty where unknown."""

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
    """A complete checkpoint. `folder`, `bytes` and `seconds` are null in older ledgers, which recorded only the
    event."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "job_id", "committed_at"),)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    folder: Mapped[str | None] = mapped_column(Text)
    bytes: Mapped[int | None] = mapped_column(BigInteger)
    seconds: Mapped[float | None]
    committed_at: Mapped[datetime]


class MaintenanceRow(LedgerTable):
    """Maintenance of a node or of one of its devices: failures before it no longer count against the node or device.

    `device_uuid`: null for the node as a whole. `kind`: `repaired`, `replaced`, `firmware`, or a site's own word.
    `written_by`: as in `jobs`.
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
    """The only row contains the oldest schema versions of clients that may still read, or write, this ledger."""

    __tablename__ = "compatibility"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    min_reader: Mapped[str] = mapped_column(String(8))
    min_writer: Mapped[str] = mapped_column(String(8))


class WorkerRow(LedgerTable):
    """One worker process. `exit`: exit status, negative for a signal; null while it runs, or if it died unseen with its
    node."""

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
    """A plan. `layout` and `assignment` are JSON; `digest` is the digest that all ranks confirmed.

    `predicted`: predicted time of an iteration under this plan. `present`: predicted time, under the same conditions,
    of the plan that was in effect; also null if no plan was in effect, or if that plan could no longer run. The unit of
    both is `unit` (`s`, or `layer times`, which are meaningful only as ratios); null where unknown. `basis`: the inputs
    of the decision, as JSON (`resihp.record.journal.PlanBasis`), from which it is explained on request; null where the
    journal has none.

    `in_effect_at`: time when every rank had acknowledged its state; for journals that do not record it, when the first
    iteration under the plan was committed. Null for a plan that never took effect: it was refused (by a rank, or by the
    controller's own check), withdrawn because the job was to stop, or superseded by the next plan.
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
    """Ranks that compute no micro-batches: ranks on standby, and ranks of mirrors."""
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
    """The alternatives to the plan, as JSON (`resihp.record.journal.OtherPlan`), in `unit`; null where not recorded."""
    unaffected_by: Mapped[str | None] = mapped_column(Text)
    """Numbers of lasting failures that did not slow this plan, because the slow parts had no work under it, as JSON;
    null if there were none, and in rows of older versions."""


class DeclinedChangeRow(LedgerTable):
    """A change of plan, or a request for a node, that the controller considered and declined
    (`journal.ChangeDeclined`).

    `about`: `plan` or `node`. `failures` and `considered` are JSON. `description`, `predicted` and `present` describe
    the considered plan, as in `plans`; null if there was none.
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
    """One committed iteration. `seconds`: null if no rank survived to report it."""

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
    """Loss of the weights after the iteration; null if they were not evaluated."""


class RankReportRow(LedgerTable):
    """Telemetry of one rank in one iteration. It may be thinned or lost without harm; with more than 1,024 ranks not
    every report is stored (`resihp.db.telemetry.condensed`). Because there are many rows, only the primary key is
    indexed; on SQLite the table is stored in this index."""

    __tablename__ = "rank_reports"
    __table_args__ = ({"sqlite_with_rowid": False},)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    seconds: Mapped[float | None]
    compute_seconds: Mapped[float | None]


class RankQuantilesRow(LedgerTable):
    """Quantiles over the ranks in one iteration, for jobs with so many ranks that not every report is stored
    (`resihp.db.telemetry.condensed`). `ranks`: number of ranks that reported. The quantiles are of the same two figures
    as in `rank_reports`, and are telemetry, too."""

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
    """The detector's scores of a rank after an iteration. `level`: time of the rank's own work over its healthy time;
    `evidence`: evidence against the rank over the amount that leads to a verdict. Telemetry, thinned by the controller
    (`fail_slow.standings`)."""

    __tablename__ = "scores"
    __table_args__ = ({"sqlite_with_rowid": False},)

    job_id: Mapped[int] = _of_job(primary_key=True)
    iteration: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    level: Mapped[float | None]
    evidence: Mapped[float]


class ReconfigurationRow(LedgerTable):
    """One transition to a new plan, from the detection of the failure to the first committed iteration.

    `planning_seconds`: the part of `plan_seconds` spent on the decision, null where not measured. `bytes_moved`: bytes
    that all ranks received in total. `extra_bytes`: most bytes that any rank held in addition to its state during the
    transition.
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
    """One root cause of failure. `failed_at`: best estimate of its time (`resihp.controller.fail_stop.onsets`), null
    without evidence and in older ledgers. `recovered_epoch`: epoch of the reconfiguration that ended the failure, null
    until then.

    For a slow component (`fail-slow`): `iteration` is the first slow iteration, `speed` the share of a healthy
    component's speed, `confidence` the detector's confidence. `ended_iteration` and `ended_at` say when the component
    was as fast as before, null while it is slow.
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
    """Code of the finding in the logs (`journal.Diagnosed`), such as `xid 79` for an Xid; null if the logs contain
    none."""
    category: Mapped[str | None] = mapped_column(Text)
    hardware: Mapped[bool | None]
    """Whether the finding in the logs indicates a hardware fault; null in journals that do not record it."""
    intermittent: Mapped[bool] = mapped_column(server_default=text("false"))
    link_from: Mapped[int | None] = mapped_column(Integer)
    """`link_from` and `link_to`: ranks at the ends of a link. `peer_node`: node of the second rank (`node` is the first
    rank's). Null for other components."""
    link_to: Mapped[int | None] = mapped_column(Integer)
    peer_node: Mapped[str | None] = mapped_column(Text)
    failed_at: Mapped[datetime | None]
    idle: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether a slow component had no work at that time, as far as reported."""


class SuspicionKindRow(LedgerTable):
    """A kind of suspicion, and its meaning. Clients of newer versions add rows for new kinds."""

    __tablename__ = "suspicion_kinds"

    kind: Mapped[str] = mapped_column(Text, primary_key=True)
    meaning: Mapped[str] = mapped_column(Text)


class SuspicionRow(LedgerTable):
    """One suspicion that a component is slow or silent, whatever its outcome.

    `iteration`: the first slow iteration; `detected`: the iteration in which the suspicion was raised. `change`: time
    over healthy time, minus 1. `probe`: number of the measurement taken because of it. `outcome`: as in
    `journal.Suspected`; null while the suspicion is open, or if the job ended first. `failure`: number of the first
    verdict, or loss, that it led to. `kind`: as in `journal.Suspected.sort` and `suspicion_kinds`; null if an older
    client wrote the row. `test`: the tested quantity and its unit, `statistic`: its value, `threshold`: its limit; null
    in journals of older versions. `change` and `confidence` are null for silence.
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
    """A measurement of the device of `rank` on `node`, or of the link between this rank and the rank `peer` on
    `peer_node`.

    `speed`: share of the speed of comparable devices or links, null if there was nothing to compare with. `flops` and
    `memory_bytes`: measured figures of the device, per second. `hardware`: the maker's name of the device.
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
    """A node with a verdict, and the steps that keep Slurm from giving the node to the next job, or at least to the
    user's own jobs.

    `failure`: number of the verdict's failure. `step`: the first step of the drain ladder that succeeded (`slurm`,
    `spool`, `exclusion`), else the last step tried. `outcome`: outcome of that step, null until a step has one.
    `answers`: outcomes of all steps, as JSON. `drained_at`: when the drain was decided. `undrained_at`: when Slurm was
    first seen to use the node again.
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
    """A request for a node in place of the node `instead`. `node`: the node that came, or is about to come. `text`: the
    latest report about the request."""

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
    """One journal record as text; every record has one except committed iterations. `seq`: number of the record.
    `kind`: name of its entry type (`SuspicionCleared` for a `Suspected` entry that ends a suspicion)."""

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
