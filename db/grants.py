"""What a database user may do in a ledger that many share, as SQL for who owns its tables. Called by `resihp db grant`.

Says it, never does it. Row-level security (`db.migrations`, 0009) sees to the rest: whatever is granted here, a role
changes only jobs that it wrote itself.
"""

from __future__ import annotations

from db.migrate import VERSION_TABLE
from db.models import LedgerTable
from db.reading.reader import TRUSTED
from resihp.errors import UsageError


def statements(role: str, database: str, *, trusted: bool = False) -> list[str]:
    """One a line, for psql. Raises UsageError for what cannot be a role's name."""
    who = _quoted(role)
    tables = ", ".join(sorted(LedgerTable.metadata.tables))
    counted = [
        f"{table.name}_{column.name}_seq"
        for table in LedgerTable.metadata.sorted_tables
        for column in table.primary_key
        if column.autoincrement is True
    ]
    found = [
        f"GRANT CONNECT ON DATABASE {_quoted(database)} TO {who};",
        f"GRANT SELECT ON {VERSION_TABLE} TO {who};",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {who};",
        f"GRANT USAGE ON SEQUENCE {', '.join(counted)} TO {who};",
    ]
    if trusted:
        found += [
            f"DO $$ BEGIN CREATE ROLE {TRUSTED} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;",
            f"GRANT {TRUSTED} TO {who};",
        ]
    return found


def _quoted(name: str) -> str:
    if not name.isprintable() or not 0 < len(name.encode()) < 64:
        raise UsageError(f"role {name[:80]!a}: not a name of PostgreSQL's; give the database user as \\du shows it")
    return '"' + name.replace('"', '""') + '"'
