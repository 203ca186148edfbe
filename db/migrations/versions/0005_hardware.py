"""What a probed device is, by its maker's name; and an index by which a node's probes in former jobs are found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("probes", sa.Column("hardware", sa.Text(), nullable=True))
    op.create_index(op.f("ix_probes_node_measured_at"), "probes", ["node", "measured_at"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_probes_node_measured_at"), table_name="probes")
    op.drop_column("probes", "hardware")
