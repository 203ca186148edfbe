"""Drains and replacements as the journal tells of them, and where nodes came from and went.

Nothing has ever filled the two tables before, so they are made anew.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("replacement", sa.Integer(), nullable=True))
    op.add_column("nodes", sa.Column("released_at", sa.DateTime(timezone=True), nullable=True))
    op.drop_table("drains")
    op.drop_table("replacements")
    op.create_table(
        "drains",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("drain", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("failure", sa.Integer(), nullable=False),
        sa.Column("step", sa.String(length=16), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("drained_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("undrained_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("answers", sa.Text(), nullable=False),
        sa.CheckConstraint("step IN ('slurm', 'spool', 'exclusion')", name=op.f("ck_drains_step")),
        sa.CheckConstraint("outcome IN ('done', 'refused', 'unknown')", name=op.f("ck_drains_outcome")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_drains_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "drain", name=op.f("pk_drains")),
    )
    op.create_index(op.f("ix_drains_job_id_node"), "drains", ["job_id", "node"], unique=False)
    op.create_table(
        "replacements",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("replacement", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("instead", sa.Text(), nullable=False),
        sa.Column("slurm_job", sa.Text(), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("asked_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("joined_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("excluded", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('asked', 'pending', 'running', 'joined', 'refused', 'cancelled', 'ended')",
            name=op.f("ck_replacements_outcome"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_replacements_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "replacement", name=op.f("pk_replacements")),
    )
    op.create_index(op.f("ix_replacements_job_id_node"), "replacements", ["job_id", "node"], unique=False)


def downgrade() -> None:
    """What the two tables hold is lost; the journal keeps it."""
    op.drop_table("drains")
    op.drop_table("replacements")
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
    with op.batch_alter_table("nodes") as batch:
        batch.drop_column("released_at")
        batch.drop_column("replacement")
