"""Rank reports are known by job, iteration, rank and epoch: no number of their own, one index instead of two.

There are more of them than of everything else together; and a report that comes twice is one.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

COLUMNS = "job_id, iteration, rank, epoch, seconds, compute_seconds"
KEY = ("job_id", "iteration", "rank", "epoch")
INDEX = "ix_rank_reports_job_id_iteration_rank"


def _put_aside() -> None:
    """The table's and its key's names are free after this."""
    op.rename_table("rank_reports", "rank_reports_before")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX pk_rank_reports RENAME TO pk_rank_reports_before")


def _figures() -> tuple[sa.Column[float], sa.Column[float], sa.ForeignKeyConstraint]:
    return (
        sa.Column("seconds", sa.Float(precision=53), nullable=True),
        sa.Column("compute_seconds", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_reports_job_id"), ondelete="CASCADE"),
    )


def upgrade() -> None:
    """Of reports that came twice, the first is kept."""
    op.drop_index(op.f(INDEX), table_name="rank_reports")
    _put_aside()
    op.create_table(
        "rank_reports",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("rank", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        *_figures(),
        sa.PrimaryKeyConstraint(*KEY, name=op.f("pk_rank_reports")),
        sqlite_with_rowid=False,
    )
    op.execute(
        f"INSERT INTO rank_reports ({COLUMNS}) SELECT {COLUMNS} FROM rank_reports_before "
        f"WHERE id IN (SELECT min(id) FROM rank_reports_before GROUP BY {', '.join(KEY)})"
    )
    op.drop_table("rank_reports_before")


def downgrade() -> None:
    _put_aside()
    op.create_table(
        "rank_reports",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        *_figures(),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rank_reports")),
    )
    op.execute(
        f"INSERT INTO rank_reports ({COLUMNS}) SELECT {COLUMNS} FROM rank_reports_before ORDER BY {', '.join(KEY)}"
    )
    op.drop_table("rank_reports_before")
    op.create_index(op.f(INDEX), "rank_reports", ["job_id", "iteration", "rank"], unique=False)
