"""The loss of an evaluation, beside the iteration whose weights were evaluated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("iterations", sa.Column("validation_loss", sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    op.drop_column("iterations", "validation_loss")
