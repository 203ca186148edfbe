"""What a database user may do in a ledger that many share, as SQL for who owns its tables. Called by `resihp db grant`.

Says it, never does it. What the user had there before is taken first, so that a role can be made another. Row-level
security (`db.migrations`, 0009) sees to the rest: whatever is granted to a writer, it changes only jobs that it wrote
itself. Not so the owner of the tables, whom PostgreSQL lets do anything. That is not forced upon him (`FORCE ROW LEVEL
SECURITY`): he could lift it at any time, an upgrade would silently pass over rows that a policy hides, and pg_dump
refuses a table whose owner does not see all of it. So no job is to run as the owner.
"""

from __future__ import annotations

from typing import Literal, get_args

from db.migrate import VERSION_TABLE
from db.models import CompatibilityRow, LedgerTable
from db.reading.reader import TRUSTED
from resihp.errors import UsageError

Kind = Literal["owner", "writer", "reader"]
KINDS: tuple[str, ...] = get_args(Kind)
VIEWS = ("resihp_failures", "resihp_iterations_hourly", "resihp_jobs", "resihp_node_failures")
"""Made by `db.migrations`, 0016, for dashboards."""

IN_SCHEMA = "BEGIN EXECUTE format('GRANT USAGE, CREATE ON SCHEMA %I TO %I', current_schema(), {role}); END"


def statements(role: str, database: str, *, kind: str = "writer", trusted: bool = False) -> list[str]:
    """One a line, for psql, to be run in one transaction. `kind`: one of `KINDS`.

    `owner` owns the tables from then on, `writer` reads everything and writes its own rows, `reader` reads. Raises
    UsageError for what cannot be a role's name, for another kind, and for a reader whose jobs are to be trusted.
    """
    who = _quoted(role)
    if kind not in KINDS:
        raise UsageError(f"--as {kind}: not one of {', '.join(KINDS)}")
    if trusted and kind == "reader":
        raise UsageError("--as reader and --trusted exclude each other; a reader writes nothing that could be trusted")
    tables = sorted(LedgerTable.metadata.tables)
    every = ", ".join([*tables, VERSION_TABLE, *VIEWS])
    found = [f"GRANT CONNECT ON DATABASE {_quoted(database)} TO {who};"]
    if kind == "owner":
        found += [
            f"DO {_text(IN_SCHEMA.format(role=_text(role)))};",
            *(f"ALTER TABLE {table} OWNER TO {who};" for table in (*tables, VERSION_TABLE)),
            *(f"ALTER VIEW {view} OWNER TO {who};" for view in VIEWS),
        ]
    else:
        found += [
            f"REVOKE ALL ON {every} FROM {who};",
            f"REVOKE ALL ON SEQUENCE {', '.join(_sequences())} FROM {who};",
            f"GRANT SELECT ON {every} TO {who};",
        ]
    if kind == "writer":
        written = ", ".join(table for table in tables if table != CompatibilityRow.__tablename__)
        found += [
            f"GRANT INSERT, UPDATE, DELETE ON {written} TO {who};",
            f"GRANT SELECT ON SEQUENCE {', '.join(_sequences())} TO {who};",  # for a policy of 0022; numbers are given
        ]
    if trusted:
        found += [
            f"DO $$ BEGIN CREATE ROLE {TRUSTED} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;",
            f"GRANT {TRUSTED} TO {who};",
        ]
    return found


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
