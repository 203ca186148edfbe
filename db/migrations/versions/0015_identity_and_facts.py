"""Whose job it is to Slurm, and which attempts belong together; what nodes were made of and when they were there;
checkpoints, links and diagnoses as columns; what was repaired; which schemas' clients may go on.

What kinds there are is no longer constrained: a new one needs no migration.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

JOBS = {
    **dict.fromkeys(("cluster", "slurm_account", "partition", "qos"), sa.Text),
    **dict.fromkeys(("slurm_job", "array_job", "array_task"), sa.BigInteger),
    **dict.fromkeys(("torch", "megatron_core", "cuda", "nccl", "script_commit"), sa.Text),
}
FAILURES = {
    **dict.fromkeys(("code", "category", "peer_node"), sa.Text),
    **dict.fromkeys(("link_from", "link_to"), sa.Integer),
    "hardware": sa.Boolean,
}
INDEXES = (
    *(("jobs", names) for names in (["last_entry_at"], ["owner", "started_at"], ["slurm_job"], ["run"])),
    ("nodes", ["node", "joined_at"]),
    ("failures", ["node", "noticed_at"]),
    ("drains", ["node", "drained_at"]),
)
KINDS = {
    "failures": {
        "kind": "kind IN ('fail-stop', 'fail-slow', 'communication', 'program')",
        "component": "component IN ('process', 'device', 'node', 'link', 'script', 'job', 'collective', 'reduction', "
        "'data')",
    },
    "suspicions": {
        "component": "component IN ('process', 'device', 'node', 'link', 'script', 'job', 'collective', 'reduction', "
        "'data')",
        "outcome": "outcome IN ('slow', 'fine', 'unconfirmed', 'passed', 'dropped')",
    },
}

GRANTS = """
DO $$ DECLARE given record; BEGIN
  FOR given IN
    SELECT grantee, string_agg(privilege_type, ', ') AS privileges FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = 'events' AND grantee <> CURRENT_USER
      AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    GROUP BY grantee
  LOOP
    EXECUTE format('GRANT %s ON memberships, devices, checkpoints TO %s', given.privileges,
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
    EXECUTE format('GRANT SELECT ON maintenance, compatibility TO %s',
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""
"""Who may use the tables of events may use these, as in 0012."""


def upgrade() -> None:
    postgresql = op.get_bind().dialect.name == "postgresql"
    _new_tables()
    _filled()  # looks through all events: before anything is locked that readers need
    _unconstrained()
    for name, kind in JOBS.items():
        op.add_column("jobs", sa.Column(name, kind()))
    op.add_column("jobs", sa.Column("submitted_at", sa.DateTime(timezone=True)))
    op.add_column("jobs", sa.Column("run", sa.String(length=36), nullable=False, server_default=sa.text("''")))
    op.execute("UPDATE jobs SET run = uuid")
    for name, kind in FAILURES.items():
        op.add_column("failures", sa.Column(name, kind()))
    op.add_column("failures", sa.Column("intermittent", sa.Boolean(), nullable=False, server_default=sa.text("false")))
    for table, columns in INDEXES:
        op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, columns)
    if postgresql:
        for table in ("memberships", "devices", "checkpoints"):  # as 0009 does it
            _protect(
                table,
                f"EXISTS (SELECT FROM jobs WHERE jobs.id = {table}.job_id AND jobs.written_by = CURRENT_USER::text)",
            )
        op.execute("ALTER TABLE maintenance ALTER COLUMN written_by SET DEFAULT CURRENT_USER")
        _protect("maintenance", "written_by = CURRENT_USER::text")
        op.execute(GRANTS)


def _place() -> tuple[sa.Column[Any], ...]:
    return (
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=False),
    )


def _new_tables() -> None:
    op.create_table(
        "memberships",
        *_place(),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("lost_at", sa.DateTime(timezone=True)),
        sa.Column("lost_reason", sa.Text()),
        sa.Column("how", sa.Text()),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("serial", "kernel", "image", "driver")),
        sa.Column("nic_firmware", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_memberships_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "node", "joined_at", name=op.f("pk_memberships")),
    )
    op.create_index(op.f("ix_memberships_node_joined_at"), "memberships", ["node", "joined_at"])
    op.create_index(op.f("ix_memberships_host_joined_at"), "memberships", ["host", "joined_at"])
    op.create_table(
        "devices",
        *_place(),
        sa.Column("device", sa.Integer(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("name", "uuid", "serial", "board", "vbios", "bus")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_devices_job_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["job_id", "node", "joined_at"],
            ["memberships.job_id", "memberships.node", "memberships.joined_at"],
            name=op.f("fk_devices_job_id_node_joined_at"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "node", "joined_at", "device", name=op.f("pk_devices")),
    )
    op.create_index(op.f("ix_devices_uuid_joined_at"), "devices", ["uuid", "joined_at"])
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
        "maintenance",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
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
        "compatibility",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("min_reader", sa.String(length=8), nullable=False),
        sa.Column("min_writer", sa.String(length=8), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_compatibility")),
    )


def _filled() -> None:
    """What is known of before: one membership of each node that came, and when there were checkpoints."""
    op.execute("INSERT INTO compatibility (id, min_reader, min_writer) VALUES (1, '0015', '0015')")
    op.execute(
        "INSERT INTO memberships (job_id, node, joined_at, host, devices, lost_at, lost_reason, serial, kernel, image, "
        "driver, nic_firmware) SELECT job_id, node, joined_at, host, devices, lost_at, lost_reason, '', '', '', '', "
        "'{}' FROM nodes WHERE host <> ''"
    )
    op.execute(
        "INSERT INTO checkpoints (job_id, iteration, committed_at) SELECT job_id, iteration, max(at) FROM events "
        "WHERE kind = 'CheckpointCommitted' AND iteration IS NOT NULL GROUP BY job_id, iteration"
    )


def _unconstrained() -> None:
    for table, checks in KINDS.items():
        with op.batch_alter_table(table) as batch:
            for name in checks:
                batch.drop_constraint(op.f(f"ck_{table}_{name}"), type_="check")


def _protect(table: str, own: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY all_read ON {table} FOR SELECT USING (true)")
    op.execute(f"CREATE POLICY own_written ON {table} USING ({own}) WITH CHECK ({own})")


def downgrade() -> None:
    for table, columns in INDEXES:
        op.drop_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table_name=table)
    for table in ("devices", "memberships", "checkpoints", "maintenance", "compatibility"):
        op.drop_table(table)
    for name in ("intermittent", *FAILURES):
        op.drop_column("failures", name)
    for name in ("run", "submitted_at", *JOBS):
        op.drop_column("jobs", name)
    for table, checks in KINDS.items():
        with op.batch_alter_table(table) as batch:
            for name, condition in checks.items():
                batch.create_check_constraint(op.f(f"ck_{table}_{name}"), condition)
