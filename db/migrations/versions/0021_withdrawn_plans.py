"""Why a plan that was decided was withdrawn: before, only an event told so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

FROM_EVENTS = """
    UPDATE plans SET withdrawn_reason = 'the job is to stop'
    WHERE EXISTS (
        SELECT 1 FROM events
        WHERE events.job_id = plans.job_id AND events.kind = 'PlanWithdrawn' AND events.epoch = plans.epoch
    )"""
"""Plans were only ever withdrawn for this reason."""


def upgrade() -> None:
    op.add_column("plans", sa.Column("withdrawn_reason", sa.Text(), nullable=True))
    op.execute(FROM_EVENTS)


def downgrade() -> None:
    op.drop_column("plans", "withdrawn_reason")
