"""What a plan promises, and what the job trains."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("model", sa.Text(), nullable=True))
    with op.batch_alter_table("plans") as batch:
        batch.add_column(sa.Column("predicted", sa.Float(precision=53), nullable=True))
        batch.add_column(sa.Column("present", sa.Float(precision=53), nullable=True))
        batch.add_column(sa.Column("unit", sa.String(length=16), nullable=False, server_default="layer times"))
        if op.get_bind().dialect.name == "sqlite":  # whose tables Alembic copies without their CHECK constraints
            batch.create_check_constraint(op.f("ck_plans_action"), "action IN ('start', 'redo', 'commit', 'between')")
        batch.create_check_constraint(op.f("ck_plans_unit"), "unit IN ('s', 'layer times')")
        batch.create_check_constraint(op.f("ck_plans_predicted"), "predicted > 0")
        batch.create_check_constraint(op.f("ck_plans_present"), "present > 0")


def downgrade() -> None:
    """Promises are lost; the journal keeps them."""
    reflected = sa.Table("plans", sa.MetaData(), autoload_with=op.get_bind()).constraints
    seen = {str(one.name) for one in reflected if isinstance(one, sa.CheckConstraint)}  # SQLAlchemy 2.0 sees none
    with op.batch_alter_table("plans") as batch:
        if op.get_bind().dialect.name == "sqlite":
            batch.create_check_constraint(op.f("ck_plans_action"), "action IN ('start', 'redo', 'commit', 'between')")
        for name in ("unit", "present", "predicted"):
            if f"ck_plans_{name}" in seen:
                batch.drop_constraint(op.f(f"ck_plans_{name}"), type_="check")
            batch.drop_column(name)
    op.drop_column("jobs", "model")
