"""Devices and links that are slow, and the probes that tell so.

Nothing has ever filled the table of probes before, so it is made anew. SQLite cannot change a constraint: Alembic
copies the table, without its CHECK constraints, which are all made here.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from alembic.operations.base import BatchOperations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

KINDS = "kind IN ('fail-stop', 'fail-slow', 'communication', 'program')"
COMPONENTS = "component IN ('process', 'device', 'node', 'link', 'script')"


def _checks(batch: BatchOperations, kinds: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        batch.create_check_constraint(op.f("ck_failures_component"), COMPONENTS)
    else:
        batch.drop_constraint(op.f("ck_failures_kind"), type_="check")
    batch.create_check_constraint(op.f("ck_failures_kind"), kinds)


def upgrade() -> None:
    with op.batch_alter_table("failures") as batch:
        batch.add_column(sa.Column("speed", sa.Float(precision=53), nullable=True))
        batch.add_column(sa.Column("confidence", sa.Float(precision=53), nullable=True))
        batch.add_column(sa.Column("ended_iteration", sa.BigInteger(), nullable=True))
        batch.add_column(sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True))
        _checks(batch, KINDS)
        batch.create_check_constraint(op.f("ck_failures_speed"), "speed > 0 AND speed <= 1")
        batch.create_check_constraint(op.f("ck_failures_confidence"), "confidence >= 0 AND confidence <= 1")
    op.drop_table("probes")
    op.create_table(
        "probes",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("probe", sa.Integer(), nullable=False),
        sa.Column("occasion", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("device", sa.Integer(), nullable=True),
        sa.Column("peer", sa.Integer(), nullable=True),
        sa.Column("peer_node", sa.Text(), nullable=True),
        sa.Column("flops", sa.Float(precision=53), nullable=True),
        sa.Column("memory_bytes", sa.Float(precision=53), nullable=True),
        sa.Column("speed", sa.Float(precision=53), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("occasion IN ('start', 'join', 'suspicion', 'standby')", name=op.f("ck_probes_occasion")),
        sa.CheckConstraint("kind IN ('device', 'link')", name=op.f("ck_probes_kind")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_probes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_probes")),
    )
    op.create_index(op.f("ix_probes_job_id_node"), "probes", ["job_id", "node"], unique=False)


def downgrade() -> None:
    """What the probes told, and what was slow, is lost; the journal keeps it."""
    op.drop_table("probes")
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
    op.execute("DELETE FROM failures WHERE kind = 'fail-slow'")
    with op.batch_alter_table("failures") as batch:
        batch.drop_constraint(op.f("ck_failures_speed"), type_="check")
        batch.drop_constraint(op.f("ck_failures_confidence"), type_="check")
        for column in ("ended_at", "ended_iteration", "confidence", "speed"):
            batch.drop_column(column)
        _checks(batch, KINDS.replace("'fail-slow', ", ""))
