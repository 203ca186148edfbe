"""The ledger's schema version: which one a database has, which one we know, and the way from one to the other.

Alembic without an alembic.ini. A new ledger is made by the same migrations that upgrade an old one. Used by the writer
when it opens a ledger, by `resihp db upgrade`, and by readers, which only check.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.exc import DBAPIError

from db.engine import make_engine, masked, prepare_folder, refusal, resolve
from db.models import LedgerTable
from resihp.errors import LedgerError

VERSION_TABLE = "resihp_version"
_LOCK_NUMBER = 0x7E51
"""PostgreSQL advisory lock: jobs that start together must not migrate at once."""


def _config() -> Config:
    config = Config()
    folder = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config


def head() -> str:
    """The newest schema that this version of resihp knows."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def current(url: str) -> str | None:
    """The schema of the ledger at `url`; None if there is no ledger in that database. Raises LedgerError."""
    parsed = resolve(url)
    engine = make_engine(parsed, write=False)
    try:
        with engine.connect() as connection:
            return version_of(connection)
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def upgrade(url: str) -> str:
    """Bring the ledger at `url` to the schema we know, making it if need be; returns that schema's version.

    One transaction: it happens as a whole or not at all. Raises LedgerError if it cannot be opened, belongs to
    another program, or is newer than we know.
    """
    parsed = resolve(url)
    prepare_folder(parsed)
    engine = make_engine(parsed, write=True, migrate=True)
    try:
        with engine.begin() as connection:
            upgrade_connection(connection, masked(parsed))
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()
    return head()


def version_of(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()


def upgrade_connection(connection: Connection, name: str) -> None:
    """Upgrade within the caller's transaction; `name` is the ledger's, for messages. Raises LedgerError."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})
    version = version_of(connection)
    if version == head():
        return
    if version is None:
        foreign = set(inspect(connection).get_table_names()) & set(LedgerTable.metadata.tables)
        if foreign:
            raise LedgerError(
                f"ledger {name}: holds tables of another program ({', '.join(sorted(foreign))}); "
                "name an empty database with --ledger"
            )
    else:
        check_known(version, name)
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        broken = connection.execute(text("PRAGMA foreign_key_check")).first()
        if broken is not None:
            raise LedgerError(
                f"ledger {name}: table {broken[0]} refers to rows of {broken[2]} that are not there; it was damaged "
                "before, and is left as it is: move the file away, or name another with --ledger"
            )


def check_known(version: str, name: str) -> None:
    """Raises LedgerError if `version` is none of ours: the ledger was written by a newer resihp."""
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if version not in known:
        raise LedgerError(
            f"ledger {name}: its schema {version} is newer than {head()}, the newest that this resihp knows; "
            "upgrade resihp, or name another ledger with --ledger"
        )


def check_plain(connection: Connection, name: str) -> None:
    """Raises LedgerError for a SQLite file in which something runs when it is read or written: none of ours."""
    if connection.dialect.name == "sqlite":
        query = text("SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')")
        if (found := connection.execute(query).first()) is not None:
            raise LedgerError(f"ledger {name}: has a {found.type}, {found.name!a}; it was not made by resihp")


def check_readable(connection: Connection, name: str) -> None:
    """Raises LedgerError unless the ledger has exactly the schema that we read."""
    check_plain(connection, name)
    version = version_of(connection)
    if version is None:
        raise LedgerError(f"ledger {name}: holds no ledger of resihp; name another with --ledger")
    if version != head():
        check_known(version, name)
        raise LedgerError(
            f"ledger {name}: its schema {version} is older than {head()}; run resihp db upgrade --ledger {name}"
        )
