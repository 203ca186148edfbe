"""What was suspected to be slow, how sure that was, and what became of it; how ranks stand with the detector over
time, and what it does not see."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COMPONENTS = "component IN ('process', 'device', 'node', 'link', 'script', 'job', 'collective', 'reduction', 'data')"

GRANTS = """
DO $$ DECLARE given record; BEGIN
  FOR given IN
    SELECT grantee, string_agg(privilege_type, ', ') AS privileges FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = 'events' AND grantee <> CURRENT_USER
      AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    GROUP BY grantee
  LOOP
    EXECUTE format('GRANT %s ON suspicions, scores TO %s', given.privileges,
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""
"""Who may use the tables of events may use these (`resihp db grant` grants table by table)."""


def upgrade() -> None:
    op.create_table(
        "suspicions",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("suspicion", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("component", sa.String(length=16), nullable=False),
        sa.Column("ranks", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("device", sa.Integer(), nullable=True),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("detected", sa.BigInteger(), nullable=False),
        sa.Column("change", sa.Float(precision=53), nullable=True),
        sa.Column("confidence", sa.Float(precision=53), nullable=True),
        sa.Column("probe", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("failure", sa.Integer(), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.Column("outcome_evidence", sa.Text(), nullable=True),
        sa.Column("raised_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(COMPONENTS, name=op.f("ck_suspicions_component")),
        sa.CheckConstraint(
            "outcome IN ('slow', 'fine', 'unconfirmed', 'passed', 'dropped')", name=op.f("ck_suspicions_outcome")
        ),
        sa.CheckConstraint("confidence >= 0 AND confidence <= 1", name=op.f("ck_suspicions_confidence")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_suspicions_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "suspicion", name=op.f("pk_suspicions")),
    )
    op.create_index(op.f("ix_suspicions_node_raised_at"), "suspicions", ["node", "raised_at"], unique=False)
    op.add_column("jobs", sa.Column("detector", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("unwatched", sa.Text(), nullable=True))
    op.create_table(
        "scores",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("level", sa.Float(precision=53), nullable=True),
        sa.Column("evidence", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_scores_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", "rank", name=op.f("pk_scores")),
        sqlite_with_rowid=False,
    )
    if op.get_bind().dialect.name == "postgresql":
        for table in ("suspicions", "scores"):  # as 0009 does it
            own = f"EXISTS (SELECT FROM jobs WHERE jobs.id = {table}.job_id AND jobs.written_by = CURRENT_USER::text)"
            op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
            op.execute(f"CREATE POLICY all_read ON {table} FOR SELECT USING (true)")
            op.execute(f"CREATE POLICY own_written ON {table} USING ({own}) WITH CHECK ({own})")
        op.execute(GRANTS)


def downgrade() -> None:
    op.drop_table("scores")
    op.drop_column("jobs", "unwatched")
    op.drop_column("jobs", "detector")
    op.drop_table("suspicions")
