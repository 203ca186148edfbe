"""Plans that take effect or are refused, transitions between two iterations, and what both of them move.

SQLite cannot change a constraint: Alembic copies the table, without its CHECK constraints, which are all made here.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from alembic.operations.base import BatchOperations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NEW = "action IN ('start', 'redo', 'commit', 'between')"
OLD = "action IN ('start', 'redo', 'commit')"


def _replace_check(batch: BatchOperations, name: str, condition: str) -> None:
    if op.get_bind().dialect.name != "sqlite":
        batch.drop_constraint(op.f(name), type_="check")
    batch.create_check_constraint(op.f(name), condition)


def _keep_check(batch: BatchOperations, name: str, condition: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        batch.create_check_constraint(op.f(name), condition)


def upgrade() -> None:
    with op.batch_alter_table("plans") as batch:
        batch.add_column(sa.Column("bytes_planned", sa.BigInteger(), server_default="0", nullable=False))
        batch.add_column(sa.Column("in_effect_at", sa.DateTime(timezone=True), nullable=True))
        batch.add_column(sa.Column("refused_reason", sa.Text(), nullable=True))
        batch.add_column(sa.Column("refused_by", sa.Integer(), nullable=True))
        _replace_check(batch, "ck_plans_action", NEW)
    with op.batch_alter_table("reconfigurations") as batch:
        batch.add_column(sa.Column("bytes_moved", sa.BigInteger(), server_default="0", nullable=False))
        batch.add_column(sa.Column("extra_bytes", sa.BigInteger(), server_default="0", nullable=False))
        _replace_check(batch, "ck_reconfigurations_action", NEW.replace("'start', ", ""))
        _keep_check(batch, "ck_reconfigurations_attempts", "attempts >= 1")
    # Nothing told of this before: a plan under which an iteration was committed was in effect by then.
    op.execute(
        "UPDATE plans SET in_effect_at = (SELECT min(iterations.finished_at) FROM iterations "
        "WHERE iterations.job_id = plans.job_id AND iterations.epoch = plans.epoch)"
    )


def downgrade() -> None:
    for table in ("plans", "reconfigurations"):
        op.execute(f"UPDATE {table} SET action = 'commit' WHERE action = 'between'")
    with op.batch_alter_table("reconfigurations") as batch:
        for column in ("extra_bytes", "bytes_moved"):
            batch.drop_column(column)
        _replace_check(batch, "ck_reconfigurations_action", OLD.replace("'start', ", ""))
        _keep_check(batch, "ck_reconfigurations_attempts", "attempts >= 1")
    with op.batch_alter_table("plans") as batch:
        for column in ("refused_by", "refused_reason", "in_effect_at", "bytes_planned"):
            batch.drop_column(column)
        _replace_check(batch, "ck_plans_action", OLD)
