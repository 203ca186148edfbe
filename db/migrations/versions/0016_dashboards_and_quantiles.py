"""Quantiles of rank reports; views for dashboards, and who may write what was repaired.

Views on PostgreSQL alone: nothing that runs when it is read belongs in a SQLite file (`db.migrate.check_plain`). Names
of views and of their columns stay as they are; a later migration may add columns at the end.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

SHARES = ("min", "p5", "p50", "p95", "max")
VIEWS = {
    "resihp_jobs": """
        SELECT id AS job_id, uuid, name, host, owner, written_by, run, cluster, slurm_job, slurm_account, partition,
            qos, nodes, gpus_per_node, state, exit_code, reason, started_at, ended_at, last_entry_at,
            extract(epoch FROM coalesce(ended_at, last_entry_at) - started_at)::double precision AS seconds,
            version, torch, cuda, nccl
        FROM jobs""",
    "resihp_failures": """
        SELECT failures.job_id, jobs.name AS job, jobs.owner, jobs.written_by, jobs.cluster, failure, kind, component,
            cause, node, device, iteration, failures.epoch, noticed_at, detect_seconds, reconfigurations.action,
            reconfigurations.seconds AS seconds_to_recover, speed, failures.ended_at, code, category, hardware,
            intermittent
        FROM failures JOIN jobs ON jobs.id = failures.job_id
        LEFT JOIN reconfigurations ON reconfigurations.job_id = failures.job_id
            AND reconfigurations.epoch = failures.recovered_epoch""",
    "resihp_node_failures": """
        SELECT jobs.cluster, failures.node, date_trunc('day', noticed_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS day,
            count(*) AS failures, count(*) FILTER (WHERE kind = 'fail-slow') AS slow,
            count(*) FILTER (WHERE hardware) AS hardware, count(DISTINCT failures.job_id) AS jobs,
            max(noticed_at) AS last_at
        FROM failures JOIN jobs ON jobs.id = failures.job_id
        WHERE failures.node IS NOT NULL
        GROUP BY 1, 2, 3""",
    "resihp_iterations_hourly": """
        SELECT iterations.job_id, jobs.name AS job, jobs.owner,
            date_trunc('hour', finished_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC' AS hour, count(*) AS iterations,
            min(iteration) AS first_iteration, max(iteration) AS last_iteration, sum(tokens)::bigint AS tokens,
            sum(iterations.seconds) AS seconds, avg(iterations.seconds) AS mean_seconds,
            max(iterations.seconds) AS max_seconds, avg(loss) AS mean_loss
        FROM iterations JOIN jobs ON jobs.id = iterations.job_id
        GROUP BY 1, 2, 3, 4""",
}

GRANTS = """
DO $$ DECLARE given record; whom text; BEGIN
  FOR given IN
    SELECT grantee, string_agg(privilege_type, ', ') AS privileges, bool_or(privilege_type = 'INSERT') AS writes
    FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = 'events' AND grantee <> CURRENT_USER
      AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    GROUP BY grantee
  LOOP
    whom := CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END;
    EXECUTE format('GRANT %s ON rank_quantiles TO %s', given.privileges, whom);
    EXECUTE format('GRANT SELECT ON %s TO %s', '{views}', whom);
    EXECUTE format('REVOKE INSERT, UPDATE, DELETE ON compatibility FROM %s', whom);
    IF given.writes THEN
      EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON maintenance TO %s', whom);
      EXECUTE format('GRANT USAGE ON SEQUENCE maintenance_id_seq TO %s', whom);
    END IF;
  END LOOP;
END $$
"""
"""Who may use the tables of events may use these, as in 0012; what was repaired, each writes in his own name."""


def upgrade() -> None:
    figures = [f"{name}_{share}" for name in ("seconds", "compute_seconds") for share in SHARES]
    op.create_table(
        "rank_quantiles",
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("iteration", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ranks", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Float(precision=53), nullable=True) for name in figures),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_rank_quantiles_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "iteration", "epoch", name=op.f("pk_rank_quantiles")),
        sqlite_with_rowid=False,
    )
    if op.get_bind().dialect.name != "postgresql":
        return
    own = "EXISTS (SELECT FROM jobs WHERE jobs.id = rank_quantiles.job_id AND jobs.written_by = CURRENT_USER::text)"
    op.execute("ALTER TABLE rank_quantiles ENABLE ROW LEVEL SECURITY")  # as 0009 does it
    op.execute("CREATE POLICY all_read ON rank_quantiles FOR SELECT USING (true)")
    op.execute(f"CREATE POLICY own_written ON rank_quantiles USING ({own}) WITH CHECK ({own})")
    # With the rights of who asks, so that a view never shows more than its tables would; PostgreSQL 15 and later.
    version = op.get_bind().dialect.server_version_info or (0,)
    as_asked = "WITH (security_invoker = true)" if version >= (15,) else ""
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} {as_asked} AS {query}")
    op.execute(GRANTS.format(views=", ".join(VIEWS)))


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for name in VIEWS:
            op.execute(f"DROP VIEW {name}")
    op.drop_table("rank_quantiles")
