"""SQL statements that set a database user's rights in a shared ledger. The owner of the ledger's tables runs them.
Called by `resihp db grant`.

Prints the statements, never runs them. They first revoke the user's previous rights, so that the kind of a role can be
changed. Row-level security (`resihp.db.migrations`) lets a writer change only jobs that it wrote itself. It does not
bind the owner of the tables, whom PostgreSQL permits everything, and is not forced on the owner (`FORCE ROW LEVEL
SECURITY`): the owner could disable it at any time, an upgrade would silently skip rows that a policy hides, and pg_dump
refuses a table of which the owner cannot see all rows. So no job should run as the owner.
"""

from __future__ import annotations

from typing import Literal, get_args

from resihp.db.migrate import VERSION_TABLE
from resihp.db.models import CompatibilityRow, LedgerTable
from resihp.db.reading.reader import TRUSTED_ROLE
from resihp.errors import UsageError

Kind = Literal["owner", "writer", "reader"]
KINDS: tuple[str, ...] = get_args(Kind)
DASHBOARD_VIEWS = ("resihp_failures", "resihp_iterations_hourly", "resihp_jobs", "resihp_node_failures")
"""Views for dashboards, created by `resihp.db.migrations`."""

GRANT_IN_SCHEMA = "BEGIN EXECUTE format('GRANT USAGE, CREATE ON SCHEMA %I TO %I', current_schema(), {role}); END"


def statements(role: str, database: str, *, kind: str = "writer", trusted: bool = False) -> list[str]:
    """Return the statements, one per line, to be run with psql in one transaction. `kind`: one of `KINDS`.

    An `owner` owns the tables from then on, a `writer` reads everything and writes its own rows, and a `reader` only
    reads. `trusted` also makes the role a member of `TRUSTED_ROLE`. Raises UsageError for an invalid role name, an
    unknown kind, or a trusted reader.
    """
    quoted_role = _quoted(role)
    if kind not in KINDS:
        raise UsageError(f"--as {kind}: not one of {', '.join(KINDS)}")
    if trusted and kind == "reader":
        raise UsageError("--as reader and --trusted exclude each other; a reader writes nothing that could be trusted")
    tables = sorted(LedgerTable.metadata.tables)
    readable = ", ".join([*tables, VERSION_TABLE, *DASHBOARD_VIEWS])
    lines = [f"GRANT CONNECT ON DATABASE {_quoted(database)} TO {quoted_role};"]
    if kind == "owner":
        lines += [
            f"DO {_text(GRANT_IN_SCHEMA.format(role=_text(role)))};",
            *(f"ALTER TABLE {table} OWNER TO {quoted_role};" for table in (*tables, VERSION_TABLE)),
            *(f"ALTER VIEW {view} OWNER TO {quoted_role};" for view in DASHBOARD_VIEWS),
        ]
    else:
        lines += [
            f"REVOKE ALL ON {readable} FROM {quoted_role};",
            f"REVOKE ALL ON SEQUENCE {', '.join(_sequences())} FROM {quoted_role};",
            f"GRANT SELECT ON {readable} TO {quoted_role};",
        ]
    if kind == "writer":
        written = ", ".join(table for table in tables if table != CompatibilityRow.__tablename__)
        lines += [
            f"GRANT INSERT, UPDATE, DELETE ON {written} TO {quoted_role};",
            f"GRANT SELECT ON SEQUENCE {', '.join(_sequences())} TO {quoted_role};",  # a row-level policy needs it
        ]
    if trusted:
        lines += [
            f"DO $$ BEGIN CREATE ROLE {TRUSTED_ROLE} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;",
            f"GRANT {TRUSTED_ROLE} TO {quoted_role};",
        ]
    return lines


def _sequences() -> list[str]:
    return [
        f"{table.name}_{column.name}_seq"
        for table in LedgerTable.metadata.sorted_tables
        for column in table.primary_key
        if column.autoincrement is True
    ]


def _quoted(name: str) -> str:
    if not name.isprintable() or not 0 < len(name.encode()) < 64:
        raise UsageError(f"role {name[:80]!a}: not a name of PostgreSQL's; give the database user as \\du shows it")
    return '"' + name.replace('"', '""') + '"'


def _text(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"
