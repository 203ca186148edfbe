"""When what failed did fail, and times to recover in the views from then on.

Null in rows of before: their times count from the notice, as they did.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

VIEW = """
    SELECT failures.job_id, jobs.name AS job, jobs.owner, jobs.written_by, jobs.cluster, failure, kind, component,
        cause, node, device, iteration, failures.epoch, noticed_at, detect_seconds, reconfigurations.action,
        {seconds_to_recover} AS seconds_to_recover, speed, failures.ended_at, code, category, hardware,
        intermittent{more}
    FROM failures JOIN jobs ON jobs.id = failures.job_id
    LEFT JOIN reconfigurations ON reconfigurations.job_id = failures.job_id
        AND reconfigurations.epoch = failures.recovered_epoch"""
BEFORE = VIEW.format(seconds_to_recover="reconfigurations.seconds", more="")
FROM_THE_FAILURE = VIEW.format(
    seconds_to_recover="greatest(extract(epoch FROM reconfigurations.finished_at - coalesce(failed_at, noticed_at)), 0)"
    "::double precision",
    more=", failed_at, extract(epoch FROM noticed_at - failed_at)::double precision AS noticed_after_seconds",
)


def upgrade() -> None:
    op.add_column("failures", sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True))
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"CREATE OR REPLACE VIEW resihp_failures {_as_asked()} AS {FROM_THE_FAILURE}")


def downgrade() -> None:
    """Who may read the view has to be told again (`resihp db grant`)."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP VIEW resihp_failures")
        op.execute(f"CREATE VIEW resihp_failures {_as_asked()} AS {BEFORE}")
    op.drop_column("failures", "failed_at")


def _as_asked() -> str:
    """As in 0016."""
    version = op.get_bind().dialect.server_version_info or (0,)
    return "WITH (security_invoker = true)" if version >= (15,) else ""
