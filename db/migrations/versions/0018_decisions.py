"""What else was possible when a plan was decided, and what was thought of and not done.

Everything here only adds.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

GRANTS = """
DO $$ DECLARE given record; BEGIN
  FOR given IN
    SELECT grantee, string_agg(privilege_type, ', ') AS privileges FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = 'events' AND grantee <> CURRENT_USER
      AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    GROUP BY grantee
  LOOP
    EXECUTE format('GRANT %s ON declined_changes TO %s', given.privileges,
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""
"""Who may use the tables of events may use this, as in 0012."""


def upgrade() -> None:
    op.add_column("plans", sa.Column("considered", sa.Text(), nullable=True))
    op.create_table(
        "declined_changes",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("declined", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("about", sa.Text(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("failures", sa.Text(), nullable=False),
        sa.Column("description", sa.Text(), nullable=True),
        sa.Column("predicted", sa.Float(precision=53), nullable=True),
        sa.Column("present", sa.Float(precision=53), nullable=True),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("considered", sa.Text(), nullable=False),
        sa.Column("declined_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_declined_changes_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "declined", name=op.f("pk_declined_changes")),
    )
    if op.get_bind().dialect.name == "postgresql":
        own = (
            "EXISTS (SELECT FROM jobs WHERE jobs.id = declined_changes.job_id AND jobs.written_by = CURRENT_USER::text)"
        )
        op.execute("ALTER TABLE declined_changes ENABLE ROW LEVEL SECURITY")  # as 0009 does it
        op.execute("CREATE POLICY all_read ON declined_changes FOR SELECT USING (true)")
        op.execute(f"CREATE POLICY own_written ON declined_changes USING ({own}) WITH CHECK ({own})")
        op.execute(GRANTS)


def downgrade() -> None:
    op.drop_table("declined_changes")
    op.drop_column("plans", "considered")
