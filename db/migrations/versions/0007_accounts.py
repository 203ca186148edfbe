"""Where the time of a job went, kept once it is over: `resihp history cost --all` would have to read all iterations.
And indexes for the newest failures and plans of all jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("account", sa.Text(), nullable=True))
    op.create_index(op.f("ix_failures_noticed_at"), "failures", ["noticed_at"], unique=False)
    op.create_index(op.f("ix_plans_decided_at"), "plans", ["decided_at"], unique=False)


def downgrade() -> None:
    """Accounts are reckoned again when they are asked for."""
    op.drop_index(op.f("ix_plans_decided_at"), table_name="plans")
    op.drop_index(op.f("ix_failures_noticed_at"), table_name="failures")
    op.drop_column("jobs", "account")
