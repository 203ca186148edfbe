"""Whose rows are whose, where many users share one PostgreSQL: who wrote a job is the database's to say.

Everybody reads all; a role adds, changes and removes the rows of its own jobs alone. The owner of the tables may do
anything, as PostgreSQL has it: it should be an administrator's role. Of jobs that were there before, what is over
belongs to who migrates, and what is not, to its user, where there is a role of that name. SQLite's files have one user.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

OF_JOBS = (
    *("nodes", "workers", "plans", "iterations", "rank_reports", "reconfigurations", "failures", "probes", "drains"),
    *("replacements", "events"),
)


def upgrade() -> None:
    op.add_column("jobs", sa.Column("written_by", sa.Text(), nullable=True))
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute("UPDATE jobs SET written_by = CURRENT_USER")
    op.execute("UPDATE jobs SET written_by = owner WHERE ended_at IS NULL AND owner IN (SELECT rolname FROM pg_roles)")
    op.execute("ALTER TABLE jobs ALTER COLUMN written_by SET DEFAULT CURRENT_USER")
    _protect("jobs", "written_by = CURRENT_USER::text")
    for table in OF_JOBS:
        own = f"SELECT FROM jobs WHERE jobs.id = {table}.job_id AND jobs.written_by = CURRENT_USER::text"
        _protect(table, f"EXISTS ({own})")


def _protect(table: str, own: str) -> None:
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY all_read ON {table} FOR SELECT USING (true)")
    op.execute(f"CREATE POLICY own_written ON {table} USING ({own}) WITH CHECK ({own})")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table in ("jobs", *OF_JOBS):
            op.execute(f"DROP POLICY own_written ON {table}")
            op.execute(f"DROP POLICY all_read ON {table}")
            op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.drop_column("jobs", "written_by")
