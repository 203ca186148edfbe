"""Which failures did not slow a plan, as what is slow had no work under it: in rows of before nobody said so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("plans", sa.Column("unaffected_by", sa.Text(), nullable=True))
    op.add_column("failures", sa.Column("idle", sa.Boolean(), nullable=False, server_default=sa.text("false")))


def downgrade() -> None:
    op.drop_column("failures", "idle")
    op.drop_column("plans", "unaffected_by")
