"""Make the whole schema: the first one, since no earlier one was released.

Its number is that of the last schema of the development versions, with which it is identical: their ledgers of schema
0022 are used as they are. Older ones are refused (`resihp.db.migrate.is_too_old`).

On PostgreSQL each row belongs to the user who wrote its job, the database numbers jobs, repairs and probes, and views
serve dashboards. SQLite has none of that: a file has one user, and nothing that runs when it is read belongs in it
(`resihp.db.migrate.check_plain`). Names of views and of their columns stay as they are; a later migration may add
columns at the end.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = None
branch_labels = None
depends_on = None

DASHBOARD_VIEWS = {
    "resihp_jobs": """
        SELECT id AS job_id, uuid, name, host, owner, written_by, run, cluster, slurm_job, slurm_account, partition,
            qos, nodes, gpus_per_node, state, exit_code, reason, started_at, ended_at, last_entry_at,
            extract(epoch FROM coalesce(ended_at, last_entry_at) - started_at)::double precision AS seconds,
            version, torch, cuda, nccl
        FROM jobs""",
    "resihp_failures": """
        SELECT failures.job_id, jobs.name AS job, jobs.owner, jobs.written_by, jobs.cluster, failure, kind, component,
            cause, node, device, iteration, failures.epoch, noticed_at, detect_seconds, reconfigurations.action,
            greatest(extract(epoch FROM reconfigurations.finished_at - coalesce(failed_at, noticed_at)),
                0)::double precision AS seconds_to_recover,
            speed, failures.ended_at, code, category, hardware, intermittent, failed_at,
            extract(epoch FROM noticed_at - failed_at)::double precision AS noticed_after_seconds
        FROM failures JOIN jobs ON jobs.id = failures.job_id
        LEFT JOIN reconfigurations ON reconfigurations.job_id = failures.job_id
            AND reconfigurations.epoch = failures.recovered_epoch""",
    "resihp_node_failures": """
        SELECT jobs.cluster, failures.node, date_trunc('day', noticed_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS day,
            count(*) AS failures, count(*) FILTER (WHERE kind = 'fail-slow') AS slow,
            count(*) FILTER (WHERE hardware) AS hardware, count(DISTINCT failures.job_id) AS jobs,
            max(noticed_at) AS last_at
        FROM failures JOIN jobs ON jobs.id = failures.job_id
        WHERE failures.node IS NOT NULL
        GROUP BY 1, 2, 3""",
    "resihp_iterations_hourly": """
        SELECT iterations.job_id, jobs.name AS job, jobs.owner,
            date_trunc('hour', finished_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS hour, count(*) AS iterations,
            min(iteration) AS first_iteration, max(iteration) AS last_iteration, sum(tokens)::bigint AS tokens,
            sum(iterations.seconds) AS seconds, avg(iterations.seconds) AS mean_seconds,
            max(iterations.seconds) AS max_seconds, avg(loss) AS mean_loss
        FROM iterations JOIN jobs ON jobs.id = iterations.job_id
        GROUP BY 1, 2, 3, 4""",
}

SUSPICION_KINDS = {
    "slow-compute": "a device's own work takes longer",
    "slow-link": "transfers between two ranks take longer",
    "slow-job": "whole iterations take longer, and nobody stands out",
    "slow-collective": "collectives of a tensor-parallel group take longer",
    "slow-reduction": "sums of gradients take longer",
    "slow-data": "the first micro-batch comes later",
    "silent": "a node's beats do not come",
    "stopped": "a process is stopped",
    "mute": "a process's interpreter does not answer",
    "unanswered": "a device does not answer",
    "stalled": "a rank makes no progress, and its peers wait for it",
}

NUMBERED_TABLES = ("jobs", "maintenance", "probes")
"""The database alone chooses `id`: a user who chose it could take the numbers that come next, and the inserts of
others would fail."""
TABLES_OF_A_JOB = (
    "checkpoints",
    "declined_changes",
    "devices",
    "drains",
    "events",
    "failures",
    "iterations",
    "memberships",
    "nodes",
    "plans",
    "probes",
    "rank_quantiles",
    "rank_reports",
    "reconfigurations",
    "replacements",
    "scores",
    "suspicions",
    "workers",
)
"""Their rows have a `job_id`."""

GRANT_READS_OF_NUMBERS = """
DO $$ DECLARE given record; BEGIN
  FOR given IN
    SELECT DISTINCT grantee FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = '{table}' AND grantee <> CURRENT_USER
      AND privilege_type = 'INSERT'
  LOOP
    EXECUTE format('GRANT SELECT ON SEQUENCE {table}_id_seq TO %s',
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""
"""Default privileges of a database may let others insert: the policy `numbered` then reads the sequence for them."""
KEEP_COMPATIBILITY = """
DO $$ DECLARE given record; BEGIN
  FOR given IN
    SELECT DISTINCT grantee FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = 'compatibility' AND grantee <> CURRENT_USER
  LOOP
    EXECUTE format('REVOKE INSERT, UPDATE, DELETE ON compatibility FROM %s',
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""
"""Only the owner of the ledger says which clients may use it."""


def upgrade() -> None:
    _create_tables()
    op.execute("INSERT INTO compatibility (id, min_reader, min_writer) VALUES (1, '0022', '0022')")
    kinds = sa.table("suspicion_kinds", sa.column("kind"), sa.column("meaning"))
    op.bulk_insert(kinds, [{"kind": kind, "meaning": meaning} for kind, meaning in SUSPICION_KINDS.items()])
    if op.get_bind().dialect.name == "postgresql":
        _protect_rows()
        _number_rows()
        _create_views()


def _create_tables() -> None:
    op.create_table(
        "compatibility",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("min_reader", sa.String(length=8), nullable=False),
        sa.Column("min_writer", sa.String(length=8), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_compatibility")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), autoincrement=True, nullable=False),
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
        sa.Column("exit_code", sa.Integer()),
        sa.Column("reason", sa.Text()),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("last_entry_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("journal_seq", sa.BigInteger(), nullable=False),
        sa.Column("telemetry_dropped", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text()),
        sa.Column("account", sa.Text()),
        sa.Column("detector", sa.Text()),
        sa.Column("unwatched", sa.Text()),
        sa.Column("written_by", sa.Text()),
        sa.Column("run", sa.String(length=36), server_default=sa.text("''"), nullable=False),
        sa.Column("cluster", sa.Text()),
        sa.Column("slurm_job", sa.BigInteger()),
        sa.Column("array_job", sa.BigInteger()),
        sa.Column("array_task", sa.BigInteger()),
        sa.Column("submitted_at", sa.DateTime(timezone=True)),
        sa.Column("slurm_account", sa.Text()),
        sa.Column("partition", sa.Text()),
        sa.Column("qos", sa.Text()),
        sa.Column("torch", sa.Text()),
        sa.Column("megatron_core", sa.Text()),
        sa.Column("cuda", sa.Text()),
        sa.Column("nccl", sa.Text()),
        sa.Column("script_commit", sa.Text()),
        sa.CheckConstraint(
            "state IN ('running', 'completed', 'failed', 'cancelled', 'abnormal')", name=op.f("ck_jobs_state")
        ),
        sa.CheckConstraint("journal_seq >= 0", name=op.f("ck_jobs_journal_seq")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("uuid", name=op.f("uq_jobs_uuid")),
    )
    op.create_index(op.f("ix_jobs_last_entry_at"), "jobs", ["last_entry_at"])
    op.create_index(op.f("ix_jobs_name_host"), "jobs", ["name", "host"])
    op.create_index(op.f("ix_jobs_owner_started_at"), "jobs", ["owner", "started_at"])
    op.create_index(op.f("ix_jobs_run"), "jobs", ["run"])
    op.create_index(op.f("ix_jobs_slurm_job"), "jobs", ["slurm_job"])
    op.create_index(op.f("ix_jobs_started_at"), "jobs", ["started_at"])
    op.create_table(
        "maintenance",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), autoincrement=True, nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device_uuid", sa.Text()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_maintenance")),
    )
    op.create_index(op.f("ix_maintenance_node_at"), "maintenance", ["node", "at"])
    op.create_table(
        "suspicion_kinds",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("meaning", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", name=op.f("pk_suspicion_kinds")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("folder", sa.Text()),
        sa.Column("bytes", sa.BigInteger()),
        sa.Column("seconds", sa.Float(precision=53)),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", name=op.f("pk_checkpoints")),
    )
    op.create_index(op.f("ix_checkpoints_job_id_committed_at"), "checkpoints", ["job_id", "committed_at"])
    op.create_table(
        "declined_changes",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("declined", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("about", sa.Text(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("failures", sa.Text(), nullable=False),
        sa.Column("description", sa.Text()),
        sa.Column("predicted", sa.Float(precision=53)),
        sa.Column("present", sa.Float(precision=53)),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("considered", sa.Text(), nullable=False),
        sa.Column("declined_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_declined_changes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "declined", name=op.f("pk_declined_changes")),
    )
    op.create_table(
        "drains",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("drain", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("failure", sa.Integer(), nullable=False),
        sa.Column("step", sa.String(length=16)),
        sa.Column("outcome", sa.String(length=16)),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("drained_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("undrained_at", sa.DateTime(timezone=True)),
        sa.Column("answers", sa.Text(), nullable=False),
        sa.CheckConstraint("outcome IN ('done', 'refused', 'unknown')", name=op.f("ck_drains_outcome")),
        sa.CheckConstraint("step IN ('slurm', 'spool', 'exclusion')", name=op.f("ck_drains_step")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_drains_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "drain", name=op.f("pk_drains")),
    )
    op.create_index(op.f("ix_drains_job_id_node"), "drains", ["job_id", "node"])
    op.create_index(op.f("ix_drains_node_drained_at"), "drains", ["node", "drained_at"])
    op.create_table(
        "events",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("iteration", sa.BigInteger()),
        sa.Column("epoch", sa.Integer()),
        sa.Column("rank", sa.Integer()),
        sa.Column("node", sa.Text()),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "seq", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_job_id_at"), "events", ["job_id", "at"])
    op.create_table(
        "iterations",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Float(precision=53)),
        sa.Column("predicted_seconds", sa.Float(precision=53)),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("sum_squared_lengths", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("samples_digest", sa.String(length=16), nullable=False),
        sa.Column("loss", sa.Float(precision=53)),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gradient_norm", sa.Float(precision=53)),
        sa.Column("learning_rate", sa.Float(precision=53)),
        sa.Column("skipped", sa.Boolean(), nullable=False),
        sa.Column("validation_loss", sa.Float(precision=53)),
        sa.CheckConstraint("iteration >= 1", name=op.f("ck_iterations_iteration")),
        sa.CheckConstraint("seconds >= 0", name=op.f("ck_iterations_seconds")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_iterations_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", name=op.f("pk_iterations")),
    )
    op.create_index(op.f("ix_iterations_job_id_finished_at"), "iterations", ["job_id", "finished_at"])
    op.create_table(
        "memberships",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("lost_at", sa.DateTime(timezone=True)),
        sa.Column("lost_reason", sa.Text()),
        sa.Column("how", sa.Text()),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("image", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("nic_firmware", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_memberships_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "node", "joined_at", name=op.f("pk_memberships")),
    )
    op.create_index(op.f("ix_memberships_host_joined_at"), "memberships", ["host", "joined_at"])
    op.create_index(op.f("ix_memberships_node_joined_at"), "memberships", ["node", "joined_at"])
    op.create_table(
        "nodes",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("lost_at", sa.DateTime(timezone=True)),
        sa.Column("lost_reason", sa.Text()),
        sa.Column("replacement", sa.Integer()),
        sa.Column("released_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_nodes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "node", name=op.f("pk_nodes")),
    )
    op.create_index(op.f("ix_nodes_node_joined_at"), "nodes", ["node", "joined_at"])
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
        sa.Column("bytes_planned", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("in_effect_at", sa.DateTime(timezone=True)),
        sa.Column("refused_reason", sa.Text()),
        sa.Column("refused_by", sa.Integer()),
        sa.Column("withdrawn_reason", sa.Text()),
        sa.Column("predicted", sa.Float(precision=53)),
        sa.Column("present", sa.Float(precision=53)),
        sa.Column("unit", sa.String(length=16), server_default="layer times", nullable=False),
        sa.Column("basis", sa.Text()),
        sa.Column("considered", sa.Text()),
        sa.Column("unaffected_by", sa.Text()),
        sa.CheckConstraint("action IN ('start', 'redo', 'commit', 'between')", name=op.f("ck_plans_action")),
        sa.CheckConstraint("unit IN ('s', 'layer times')", name=op.f("ck_plans_unit")),
        sa.CheckConstraint("predicted > 0", name=op.f("ck_plans_predicted")),
        sa.CheckConstraint("present > 0", name=op.f("ck_plans_present")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_plans_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_plans")),
    )
    op.create_index(op.f("ix_plans_decided_at"), "plans", ["decided_at"])
    op.create_table(
        "probes",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("probe", sa.Integer(), nullable=False),
        sa.Column("occasion", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Integer()),
        sa.Column("peer", sa.Integer()),
        sa.Column("peer_node", sa.Text()),
        sa.Column("flops", sa.Float(precision=53)),
        sa.Column("memory_bytes", sa.Float(precision=53)),
        sa.Column("speed", sa.Float(precision=53)),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("hardware", sa.Text()),
        sa.CheckConstraint("kind IN ('device', 'link')", name=op.f("ck_probes_kind")),
        sa.CheckConstraint("occasion IN ('start', 'join', 'suspicion', 'standby')", name=op.f("ck_probes_occasion")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_probes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probes")),
    )
    op.create_index(op.f("ix_probes_job_id_node"), "probes", ["job_id", "node"])
    op.create_index(op.f("ix_probes_node_measured_at"), "probes", ["node", "measured_at"])
    op.create_table(
        "rank_quantiles",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        sa.Column("seconds_min", sa.Float(precision=53)),
        sa.Column("seconds_p5", sa.Float(precision=53)),
        sa.Column("seconds_p50", sa.Float(precision=53)),
        sa.Column("seconds_p95", sa.Float(precision=53)),
        sa.Column("seconds_max", sa.Float(precision=53)),
        sa.Column("compute_seconds_min", sa.Float(precision=53)),
        sa.Column("compute_seconds_p5", sa.Float(precision=53)),
        sa.Column("compute_seconds_p50", sa.Float(precision=53)),
        sa.Column("compute_seconds_p95", sa.Float(precision=53)),
        sa.Column("compute_seconds_max", sa.Float(precision=53)),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_quantiles_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", "epoch", name=op.f("pk_rank_quantiles")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rank_reports",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("seconds", sa.Float(precision=53)),
        sa.Column("compute_seconds", sa.Float(precision=53)),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_reports_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", "rank", "epoch", name=op.f("pk_rank_reports")),
        sqlite_with_rowid=False,
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
        sa.Column("bytes_moved", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("extra_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("planning_seconds", sa.Float(precision=53)),
        sa.CheckConstraint("action IN ('redo', 'commit', 'between')", name=op.f("ck_reconfigurations_action")),
        sa.CheckConstraint("attempts >= 1", name=op.f("ck_reconfigurations_attempts")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_reconfigurations_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "epoch", name=op.f("pk_reconfigurations")),
    )
    op.create_table(
        "replacements",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("replacement", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("instead", sa.Text(), nullable=False),
        sa.Column("slurm_job", sa.Text()),
        sa.Column("node", sa.Text()),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True)),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("excluded", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('asked', 'pending', 'running', 'joined', 'refused', 'cancelled', 'ended')",
            name=op.f("ck_replacements_outcome"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_replacements_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "replacement", name=op.f("pk_replacements")),
    )
    op.create_index(op.f("ix_replacements_job_id_node"), "replacements", ["job_id", "node"])
    op.create_table(
        "scores",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("level", sa.Float(precision=53)),
        sa.Column("evidence", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_scores_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", "rank", name=op.f("pk_scores")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "suspicions",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("suspicion", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("component", sa.String(length=16), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("node", sa.Text()),
        sa.Column("device", sa.Integer()),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("detected", sa.BigInteger(), nullable=False),
        sa.Column("change", sa.Float(precision=53)),
        sa.Column("confidence", sa.Float(precision=53)),
        sa.Column("probe", sa.Integer()),
        sa.Column("outcome", sa.String(length=16)),
        sa.Column("failure", sa.Integer()),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("outcome_evidence", sa.Text()),
        sa.Column("raised_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("kind", sa.Text()),
        sa.Column("test", sa.Text()),
        sa.Column("statistic", sa.Float(precision=53)),
        sa.Column("threshold", sa.Float(precision=53)),
        sa.CheckConstraint("confidence >= 0 AND confidence <= 1", name=op.f("ck_suspicions_confidence")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_suspicions_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "suspicion", name=op.f("pk_suspicions")),
    )
    op.create_index(op.f("ix_suspicions_node_raised_at"), "suspicions", ["node", "raised_at"])
    op.create_table(
        "devices",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("device", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("serial", sa.Text(), nullable=False),
        sa.Column("board", sa.Text(), nullable=False),
        sa.Column("vbios", sa.Text(), nullable=False),
        sa.Column("bus", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "node", "joined_at"],
            ["memberships.job_id", "memberships.node", "memberships.joined_at"],
            name=op.f("fk_devices_job_id_node_joined_at"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_devices_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "node", "joined_at", "device", name=op.f("pk_devices")),
    )
    op.create_index(op.f("ix_devices_uuid_joined_at"), "devices", ["uuid", "joined_at"])
    op.create_table(
        "failures",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("failure", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("component", sa.String(length=16), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("node", sa.Text()),
        sa.Column("device", sa.Integer()),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("noticed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("detect_seconds", sa.Float(precision=53)),
        sa.Column("recovered_epoch", sa.Integer()),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("speed", sa.Float(precision=53)),
        sa.Column("confidence", sa.Float(precision=53)),
        sa.Column("ended_iteration", sa.BigInteger()),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("code", sa.Text()),
        sa.Column("category", sa.Text()),
        sa.Column("hardware", sa.Boolean()),
        sa.Column("intermittent", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("link_from", sa.Integer()),
        sa.Column("link_to", sa.Integer()),
        sa.Column("peer_node", sa.Text()),
        sa.Column("failed_at", sa.DateTime(timezone=True)),
        sa.Column("idle", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint("confidence >= 0 AND confidence <= 1", name=op.f("ck_failures_confidence")),
        sa.CheckConstraint("speed > 0 AND speed <= 1", name=op.f("ck_failures_speed")),
        sa.ForeignKeyConstraint(
            ["job_id", "recovered_epoch"],
            ["reconfigurations.job_id", "reconfigurations.epoch"],
            name=op.f("fk_failures_job_id_recovered_epoch"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_failures_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "failure", name=op.f("pk_failures")),
    )
    op.create_index(op.f("ix_failures_job_id_node"), "failures", ["job_id", "node"])
    op.create_index(op.f("ix_failures_node_noticed_at"), "failures", ["node", "noticed_at"])
    op.create_index(op.f("ix_failures_noticed_at"), "failures", ["noticed_at"])
    op.create_table(
        "workers",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Integer(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("epoch_joined", sa.Integer(), nullable=False),
        sa.Column("epoch_left", sa.Integer()),
        sa.Column("exit", sa.Integer()),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(
            ["job_id", "node"], ["nodes.job_id", "nodes.node"], name=op.f("fk_workers_job_id_node"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_workers_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "rank", name=op.f("pk_workers")),
    )
    op.create_index(op.f("ix_workers_job_id_node"), "workers", ["job_id", "node"])


def _protect_rows() -> None:
    """Let everybody who may read a table see all of it, and let each user change only rows of his own jobs."""
    written_by_user = "written_by = CURRENT_USER::text"
    for table in ("jobs", "maintenance"):
        op.execute(f"ALTER TABLE {table} ALTER COLUMN written_by SET DEFAULT CURRENT_USER")
        _add_policies(table, written_by_user)
    for table in TABLES_OF_A_JOB:
        _add_policies(table, f"EXISTS (SELECT FROM jobs WHERE jobs.id = {table}.job_id AND jobs.{written_by_user})")
    op.execute("ALTER TABLE suspicion_kinds ENABLE ROW LEVEL SECURITY")
    op.execute("CREATE POLICY all_read ON suspicion_kinds FOR SELECT USING (true)")
    op.execute("CREATE POLICY all_add ON suspicion_kinds FOR INSERT WITH CHECK (true)")
    op.execute(KEEP_COMPATIBILITY)


def _add_policies(table: str, own: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY all_read ON {table} FOR SELECT USING (true)")
    op.execute(f"CREATE POLICY own_written ON {table} USING ({own}) WITH CHECK ({own})")


def _number_rows() -> None:
    """Refuse a number that an INSERT with OVERRIDING SYSTEM VALUE brings along, but from the owner of the tables."""
    for table in NUMBERED_TABLES:
        op.execute(GRANT_READS_OF_NUMBERS.format(table=table))
        op.execute(
            f"CREATE POLICY numbered ON {table} AS RESTRICTIVE FOR INSERT "
            f"WITH CHECK (id = currval('{table}_id_seq'::regclass))"
        )


def _create_views() -> None:
    """Create the views of dashboards, with the rights of whoever reads them where PostgreSQL can (15 and later)."""
    version = op.get_bind().dialect.server_version_info or (0,)
    with_readers_rights = "WITH (security_invoker = true)" if version >= (15,) else ""
    for name, query in DASHBOARD_VIEWS.items():
        op.execute(f"CREATE VIEW {name} {with_readers_rights} AS {query}")
