"""The first schema of the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("uuid", sa.String(length=36), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("gpus_per_node", sa.Integer(), nullable=False),
        sa.Column("tp", sa.Integer(), nullable=False),
        sa.Column("pp", sa.Integer(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("restart_count", sa.Integer(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("configuration", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_entry_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("journal_seq", sa.BigInteger(), nullable=False),
        sa.Column("telemetry_dropped", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('running', 'completed', 'failed', 'cancelled', 'abnormal')", name=op.f("ck_jobs_state")
        ),
        sa.CheckConstraint("journal_seq >= 0", name=op.f("ck_jobs_journal_seq")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("uuid", name=op.f("uq_jobs_uuid")),
    )
    op.create_index(op.f("ix_jobs_name_host"), "jobs", ["name", "host"], unique=False)
    op.create_index(op.f("ix_jobs_started_at"), "jobs", ["started_at"], unique=False)
    op.create_table(
        "drains",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("drained_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("undrained_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_drains_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drains")),
    )
    op.create_index(op.f("ix_drains_job_id_node"), "drains", ["job_id", "node"], unique=False)
    op.create_table(
        "events",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_job_id_at"), "events", ["job_id", "at"], unique=False)
    op.create_table(
        "iterations",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=True),
        sa.Column("predicted_seconds", sa.Float(precision=53), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("sum_squared_lengths", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("samples_digest", sa.String(length=16), nullable=False),
        sa.Column("loss", sa.Float(precision=53), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gradient_norm", sa.Float(precision=53), nullable=True),
        sa.Column("learning_rate", sa.Float(precision=53), nullable=True),
        sa.Column("skipped", sa.Boolean(), nullable=False),
        sa.CheckConstraint("iteration >= 1", name=op.f("ck_iterations_iteration")),
        sa.CheckConstraint("seconds >= 0", name=op.f("ck_iterations_seconds")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_iterations_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", name=op.f("pk_iterations")),
    )
    op.create_index(op.f("ix_iterations_job_id_finished_at"), "iterations", ["job_id", "finished_at"], unique=False)
    op.create_table(
        "nodes",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lost_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lost_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_nodes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "node", name=op.f("pk_nodes")),
    )
    op.create_table(
        "plans",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("next_iteration", sa.BigInteger(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("replicas", sa.Integer(), nullable=False),
        sa.Column("active", sa.Integer(), nullable=False),
        sa.Column("standby", sa.Integer(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.CheckConstraint("action IN ('start', 'redo', 'commit')", name=op.f("ck_plans_action")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_plans_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_plans")),
    )
    op.create_table(
        "probes",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Integer(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("passed", sa.Boolean(), nullable=True),
        sa.Column("seconds", sa.Float(precision=53), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_probes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probes")),
    )
    op.create_index(op.f("ix_probes_job_id_node"), "probes", ["job_id", "node"], unique=False)
    op.create_table(
        "rank_reports",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=True),
        sa.Column("compute_seconds", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_reports_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rank_reports")),
    )
    op.create_index(
        op.f("ix_rank_reports_job_id_iteration_rank"), "rank_reports", ["job_id", "iteration", "rank"], unique=False
    )
    op.create_table(
        "reconfigurations",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53), nullable=False),
        sa.Column("park_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("plan_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("groups_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("state_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("first_iteration_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("action IN ('redo', 'commit')", name=op.f("ck_reconfigurations_action")),
        sa.CheckConstraint("attempts >= 1", name=op.f("ck_reconfigurations_attempts")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_reconfigurations_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_reconfigurations")),
    )
    op.create_table(
        "replacements",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("slurm_job", sa.Text(), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_replacements_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replacements")),
    )
    op.create_index(op.f("ix_replacements_job_id_node"), "replacements", ["job_id", "node"], unique=False)
    op.create_table(
        "failures",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("failure", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("component", sa.String(length=16), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("device", sa.Integer(), nullable=True),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("noticed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("detect_seconds", sa.Float(precision=53), nullable=True),
        sa.Column("recovered_epoch", sa.Integer(), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "component IN ('process', 'device', 'node', 'link', 'script')", name=op.f("ck_failures_component")
        ),
        sa.CheckConstraint("kind IN ('fail-stop', 'communication', 'program')", name=op.f("ck_failures_kind")),
        sa.ForeignKeyConstraint(
            ["job_id", "recovered_epoch"],
            ["reconfigurations.job_id", "reconfigurations.epoch"],
            name=op.f("fk_failures_job_id_recovered_epoch"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_failures_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "failure", name=op.f("pk_failures")),
    )
    op.create_index(op.f("ix_failures_job_id_node"), "failures", ["job_id", "node"], unique=False)
    op.create_table(
        "workers",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Integer(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("epoch_joined", sa.Integer(), nullable=False),
        sa.Column("epoch_left", sa.Integer(), nullable=True),
        sa.Column("exit", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id", "node"], ["nodes.job_id", "nodes.node"], name=op.f("fk_workers_job_id_node"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_workers_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "rank", name=op.f("pk_workers")),
    )
    op.create_index(op.f("ix_workers_job_id_node"), "workers", ["job_id", "node"], unique=False)
