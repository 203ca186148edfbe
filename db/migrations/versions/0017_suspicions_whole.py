"""Every suspicion as a row, of silence too: what kind it is, and what was tested when it was raised.

Kinds are rows of a table: whoever writes of one that is new adds it. Everything here only adds.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    "kind": sa.Text(),
    "test": sa.Text(),
    "statistic": sa.Float(precision=53),
    "threshold": sa.Float(53),
}
KINDS = {
    "slow-compute": "a device's own work takes longer",
    "slow-link": "transfers between two ranks take longer",
    "slow-job": "whole iterations take longer, and nobody stands out",
    "slow-collective": "collectives of a tensor-parallel group take longer",
    "slow-reduction": "sums of gradients take longer",
    "slow-data": "the first micro-batch comes later",
    "silent": "a node's beats do not come",
    "stopped": "a process is stopped",
    "mute": "a process's interpreter does not answer",
    "unanswered": "a device does not answer",
    "stalled": "a rank makes no progress, and its peers wait for it",
}

GRANTS = """
DO $$ DECLARE given record; whom text; BEGIN
  FOR given IN
    SELECT grantee, bool_or(privilege_type = 'INSERT') AS writes FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = 'events' AND grantee <> CURRENT_USER
      AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    GROUP BY grantee
  LOOP
    whom := CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END;
    EXECUTE format('GRANT SELECT ON suspicion_kinds TO %s', whom);
    IF given.writes THEN
      EXECUTE format('GRANT INSERT ON suspicion_kinds TO %s', whom);
    END IF;
  END LOOP;
END $$
"""
"""Who may use the tables of events may use this, as in 0012; a kind that is there stays as it is."""


def upgrade() -> None:
    kinds = op.create_table(
        "suspicion_kinds",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("meaning", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("kind", name=op.f("pk_suspicion_kinds")),
    )
    op.bulk_insert(kinds, [{"kind": kind, "meaning": meaning} for kind, meaning in KINDS.items()])
    for name, kind in COLUMNS.items():
        op.add_column("suspicions", sa.Column(name, kind, nullable=True))
    op.execute(
        "UPDATE suspicions SET kind = CASE component WHEN 'device' THEN 'slow-compute' ELSE 'slow-' || component END"
    )
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("ALTER TABLE suspicion_kinds ENABLE ROW LEVEL SECURITY")
    op.execute("CREATE POLICY all_read ON suspicion_kinds FOR SELECT USING (true)")
    op.execute("CREATE POLICY all_add ON suspicion_kinds FOR INSERT WITH CHECK (true)")
    op.execute(GRANTS)


def downgrade() -> None:
    op.execute("DELETE FROM suspicions WHERE component IN ('process', 'node')")  # which were events alone
    for name in COLUMNS:
        op.drop_column("suspicions", name)
    op.drop_table("suspicion_kinds")
