"""What it took to decide, of a reconfiguration's plan phase.

Null where it was not measured, as in journals of before.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("reconfigurations", sa.Column("planning_seconds", sa.Float(precision=53)))


def downgrade() -> None:
    op.drop_column("reconfigurations", "planning_seconds")
