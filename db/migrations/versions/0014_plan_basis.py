"""What a plan was decided from, so that it can be explained afterwards."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("plans", sa.Column("basis", sa.Text(), nullable=True))


def downgrade() -> None:
    """What plans were decided from is lost; the journal keeps it."""
    op.drop_column("plans", "basis")
