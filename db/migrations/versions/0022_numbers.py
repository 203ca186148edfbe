"""The database numbers jobs, repairs and probes, and no writer does.

Where many users share one PostgreSQL, a writer that chose `jobs.id` could take the numbers that come next, and the
others' inserts would fail. GENERATED ALWAYS lets nobody change a number. An INSERT with OVERRIDING SYSTEM VALUE could
still bring its own: that is refused by a policy, for all but the owner of the tables. SQLite's files have one user, and
stay as they are.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

NUMBERED = ("jobs", "maintenance", "probes")

BY_THE_DATABASE = """
DO $$ DECLARE next bigint; last bigint; given record; BEGIN
  EXECUTE format('SELECT CASE WHEN is_called THEN last_value + 1 ELSE last_value END FROM %s',
    pg_get_serial_sequence('{table}', 'id')) INTO next;
  SELECT coalesce(max(id), 0) FROM {table} INTO last;
  IF last < 1073741824 THEN next := greatest(next, last + 1); END IF;
  EXECUTE 'ALTER TABLE {table} ALTER COLUMN id DROP DEFAULT';
  EXECUTE format('DROP SEQUENCE %s', pg_get_serial_sequence('{table}', 'id'));
  EXECUTE format('ALTER TABLE {table} ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY '
    '(SEQUENCE NAME {table}_id_seq START WITH %s)', next);
  FOR given IN
    SELECT DISTINCT grantee FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = '{table}' AND grantee <> CURRENT_USER
      AND privilege_type = 'INSERT'
  LOOP
    EXECUTE format('GRANT SELECT ON SEQUENCE {table}_id_seq TO %s',
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""
"""Numbers go on where they were, behind all that are taken, unless somebody took one so high that few would be left.
Who may insert may see the sequence, which the policy asks, and cannot move it but by inserting."""

BY_A_SEQUENCE = """
DO $$ DECLARE next bigint; given record; BEGIN
  EXECUTE format('SELECT CASE WHEN is_called THEN last_value + 1 ELSE last_value END FROM %s',
    pg_get_serial_sequence('{table}', 'id')) INTO next;
  EXECUTE 'ALTER TABLE {table} ALTER COLUMN id DROP IDENTITY';
  EXECUTE format('CREATE SEQUENCE {table}_id_seq AS integer START WITH %s OWNED BY {table}.id', next);
  EXECUTE 'ALTER TABLE {table} ALTER COLUMN id SET DEFAULT nextval(''{table}_id_seq'')';
  FOR given IN
    SELECT DISTINCT grantee FROM information_schema.role_table_grants
    WHERE table_schema = current_schema() AND table_name = '{table}' AND grantee <> CURRENT_USER
      AND privilege_type = 'INSERT'
  LOOP
    EXECUTE format('GRANT USAGE ON SEQUENCE {table}_id_seq TO %s',
      CASE given.grantee WHEN 'PUBLIC' THEN 'PUBLIC' ELSE quote_ident(given.grantee) END);
  END LOOP;
END $$
"""


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in NUMBERED:
        op.execute(BY_THE_DATABASE.format(table=table))
        op.execute(
            f"CREATE POLICY numbered ON {table} AS RESTRICTIVE FOR INSERT "
            f"WITH CHECK (id = currval('{table}_id_seq'::regclass))"
        )


def downgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in NUMBERED:
        op.execute(f"DROP POLICY numbered ON {table}")
        op.execute(BY_A_SEQUENCE.format(table=table))
