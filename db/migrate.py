"""Schema versions of a ledger: the version that a database has, the version that this resihp knows, and migrations.

Uses Alembic without an alembic.ini. Alembic is imported only to change a schema: readers of a ledger do not need it.
The migrations that upgrade an old ledger also create a new one. Called by the writer when it opens a ledger, by `resihp
db upgrade`, and by readers, which only check the version. A ledger on a server belongs to many users: only `resihp db
upgrade` changes its schema, in attempts that wait only briefly for other users' locks. A ledger with a newer schema
states whether older clients may still use it (table `compatibility`); a migration that only adds tables or columns does
not change that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import URL, Connection, Engine, inspect, select, text
from sqlalchemy.exc import DBAPIError

from resihp.db.engine import file_of, make_engine, masked, prepare_folder, refusal, resolve
from resihp.db.models import CompatibilityRow, LedgerTable
from resihp.errors import LedgerError

if TYPE_CHECKING:
    from alembic.config import Config

VERSION_TABLE = "resihp_version"
MIGRATIONS_FOLDER = Path(__file__).parent / "migrations"
Purpose = Literal["read", "write"]
_LOCK_NUMBER = 0x7E51
"""Key of a PostgreSQL advisory lock: jobs that start together must not migrate at once."""
UPGRADE_ATTEMPTS = 20
"""Number of attempts to change a server's schema while other clients have locked its tables."""
ATTEMPT_PAUSE_S = 2.0
"""Seconds between two attempts, in which clients that waited for the attempt can write."""


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS_FOLDER).replace("%", "%%"))
    return config


@cache
def _revisions() -> tuple[str, ...]:
    """Return all known schema versions, newest first: the numbers at the start of the migrations' file names."""
    files = (MIGRATIONS_FOLDER / "versions").glob("[0-9][0-9][0-9][0-9]_*.py")
    return tuple(sorted((file.name.partition("_")[0] for file in files), reverse=True))


def head() -> str:
    """Return the newest schema version that this resihp knows."""
    return _revisions()[0]


def current(url: str) -> str | None:
    """Return the schema version of the ledger at `url`; None if that database contains no ledger. Raises
    LedgerError."""
    parsed = resolve(url)
    if (file := file_of(parsed)) is not None and not os.path.exists(file):
        return None
    engine = make_engine(parsed, write=False)
    try:
        with engine.connect() as connection:
            return version_of(connection)
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def upgrade(url: str, say: Callable[[str], None] = lambda text: None) -> str:
    """Upgrade the ledger at `url` to the newest known schema, creating it if missing; return the resulting version.

    The upgrade is one transaction, which succeeds as a whole or changes nothing. On a server, several attempts are made
    to lock the tables; between them, other clients can write. `say` is told which database users hold locks. A newer
    ledger that this resihp may read is left unchanged. Raises LedgerError if the ledger cannot be opened, belongs to
    another program, or is too new, or if its tables could not be locked.
    """
    return _upgrade(url, say, "read")


def _upgrade(url: str, say: Callable[[str], None], purpose: Purpose) -> str:
    parsed = resolve(url)
    prepare_folder(parsed)
    engine = make_engine(parsed, write=True, migrate=True)
    try:
        return _upgrade_in_turns(engine, parsed, say, purpose)
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def _upgrade_in_turns(engine: Engine, url: URL, say: Callable[[str], None], purpose: Purpose) -> str:
    known_pids: list[int] = []
    for turn in range(UPGRADE_ATTEMPTS):
        try:
            with engine.begin() as connection:
                return upgrade_connection(connection, masked(url), purpose)
        except DBAPIError as error:
            if not _is_locked(error):
                raise
        pids, waits = _lock_holders(engine)
        if pids != known_pids or turn == 0:
            known_pids = pids
            say(f"ledger {masked(url)}: waiting for {waits}")
        if turn < UPGRADE_ATTEMPTS - 1:
            time.sleep(ATTEMPT_PAUSE_S)
    raise LedgerError(
        f"ledger {masked(url)}: unchanged, its tables are locked by {waits}; retry when that has ended, or end it "
        "with SELECT pg_terminate_backend(PID)"
    )


def _is_locked(error: DBAPIError) -> bool:
    """Decide whether a later attempt may succeed: the error is PostgreSQL's lock_not_available, or a deadlock that
    PostgreSQL ended."""
    state: Any = getattr(error.orig, "sqlstate", None)
    return state in ("55P03", "40P01")


def _lock_holders(engine: Engine) -> tuple[list[int], str]:
    """Return the process ids of the likeliest holders of the lock, and a text about them: the database users with the
    oldest transactions that hold locks on tables of this database or on its schema change."""
    query = text(
        "SELECT activity.pid, activity.usename, activity.state, "
        "round(extract(epoch FROM now() - activity.xact_start)) AS seconds FROM pg_stat_activity activity "
        "WHERE activity.datname = current_database() AND activity.pid <> pg_backend_pid() AND EXISTS "
        "(SELECT 1 FROM pg_locks held WHERE held.pid = activity.pid AND held.granted "
        "AND (held.relation >= 16384 OR held.locktype = 'advisory')) AND NOT EXISTS "
        "(SELECT 1 FROM pg_locks wanted WHERE wanted.pid = activity.pid AND NOT wanted.granted) "
        "ORDER BY activity.xact_start NULLS LAST LIMIT 3"
    )
    with engine.connect() as connection:
        rows = connection.execute(query).all()
    holders = [f"database user {row.usename} (pid {row.pid}, {row.state} for {row.seconds or 0} s)" for row in rows]
    return [row.pid for row in rows], " and ".join(holders) or "other writers"


def make_ready(url: str) -> None:
    """Prepare the ledger at `url` for writing: create or upgrade a file, or create the tables in an empty database.

    Raises LedgerError as `upgrade` does, and also for a newer ledger that this resihp may only read, and for a server's
    ledger of an older schema, which is left unchanged.
    """
    parsed = resolve(url)
    if file_of(parsed) is not None:
        _upgrade(url, lambda text: None, "write")
        return
    engine = make_engine(parsed, write=True)
    try:
        with engine.begin() as connection:
            if version_of(connection) is None:
                _lock(connection)
            version = version_of(connection)
            if version is None:
                upgrade_connection(connection, masked(parsed), "write")
            else:
                check_schema(connection, version, masked(parsed), "write")
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def version_of(connection: Connection) -> str | None:
    """Return the ledger's schema version; None if there is no ledger."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    version: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return version


def _lock(connection: Connection) -> None:
    """Keep other clients from changing a server's schema until the transaction ends. May be called twice."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _LOCK_NUMBER})


def upgrade_connection(connection: Connection, name: str, purpose: Purpose = "read") -> str:
    """Upgrade the ledger within the caller's transaction; return the resulting version. `name`: the ledger's name in
    messages. Raises LedgerError, also for a newer ledger that may not be used for `purpose`."""
    _lock(connection)
    version = version_of(connection)
    if version is not None and not is_older(version):
        check_schema(connection, version, name, purpose)
        return version
    if version is None:
        foreign = set(inspect(connection).get_table_names()) & set(LedgerTable.metadata.tables)
        if foreign:
            raise LedgerError(
                f"ledger {name}: holds tables of another program ({', '.join(sorted(foreign))}); "
                "name an empty database with --ledger"
            )
        _check_encoding(connection, name)
    from alembic import command

    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        broken = connection.execute(text("PRAGMA foreign_key_check")).first()
        if broken is not None:
            raise LedgerError(
                f"ledger {name}: table {broken[0]} refers to rows of {broken[2]} that are missing; it was damaged "
                "before, and was not changed: move the file away, or name another with --ledger"
            )
    return head()


def _check_encoding(connection: Connection, name: str) -> None:
    """Raise LedgerError, before a ledger is created, for a PostgreSQL database with an encoding that cannot represent
    every text."""
    if connection.dialect.name != "postgresql":
        return
    encoding = str(connection.execute(text("SHOW server_encoding")).scalar_one())
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise LedgerError(
            f"ledger {name}: has encoding {encoding}; resihp needs UTF8. Create a database with "
            "CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
        )


def is_older(version: str) -> bool:
    """Decide whether this schema version is older than the newest one and can be upgraded to it."""
    return version in _revisions()[1:]


def is_too_old(version: str) -> bool:
    """Decide whether this schema version was made by a development version of resihp, before the first migration."""
    return len(version) == len(head()) and version.isdecimal() and version < _revisions()[-1]


def refuse_too_old(version: str, subject: str) -> None:
    """Raise LedgerError if a development version of resihp made the schema of `subject`, a ledger or an export."""
    if is_too_old(version):
        raise LedgerError(
            f"{subject}: its schema {version} was made by a development version before 0.1.0 and cannot be upgraded; "
            "name another ledger with --ledger, and fill it from the jobs' journals: resihp db import JOURNAL"
        )


def is_newer(version: str) -> bool:
    """Decide whether this schema version is unknown, so that a newer resihp must have created it."""
    return version not in _revisions() and not is_too_old(version)


def check_compatible(version: str, oldest: str | None, name: str, purpose: Purpose) -> None:
    """Raise LedgerError unless this resihp may use a ledger of the newer schema `version`. `oldest`: oldest schema
    version of clients that may use the ledger, None if it is not recorded. Versions are numbers of four digits."""
    if oldest is not None and oldest <= head() < version:
        return
    to_use = "upgrade resihp, or name another ledger with --ledger"
    if purpose == "write" and oldest is not None and version > head():
        to_use = f"clients of {oldest} and later write it, older ones at most read it; {to_use}"
    raise LedgerError(
        f"ledger {name}: its schema {version} is newer than {head()}, the newest that this resihp knows; {to_use}"
    )


def oldest_client(connection: Connection, purpose: Purpose) -> str | None:
    """Return the oldest schema version of clients that may read, or write, this ledger; None if the ledger does not
    state it."""
    if not inspect(connection).has_table(CompatibilityRow.__tablename__):
        return None
    column = CompatibilityRow.min_reader if purpose == "read" else CompatibilityRow.min_writer
    return connection.execute(select(column).where(CompatibilityRow.id == 1)).scalar()


def check_plain(connection: Connection, name: str) -> None:
    """Raise LedgerError for a SQLite file with a view or a trigger, which would run on access: ledgers of resihp have
    none."""
    if connection.dialect.name == "sqlite":
        query = text("SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')")
        if (match := connection.execute(query).first()) is not None:
            raise LedgerError(f"ledger {name}: has a {match.type}, {match.name!a}; it was not made by resihp")


def check_readable(connection: Connection, name: str) -> None:
    """Raise LedgerError unless the ledger has the newest known schema, or a newer one that this resihp may read."""
    check_plain(connection, name)
    version = version_of(connection)
    if version is None:
        raise LedgerError(f"ledger {name}: holds no ledger of resihp; name another with --ledger")
    check_schema(connection, version, name, "read")


def check_writable(connection: Connection, name: str, accepted: str | None = None) -> str | None:
    """Return the ledger's schema version, which may have changed since the ledger was opened. The version `accepted` is
    not checked again.

    Runs one short query. Raises LedgerError for a schema that this resihp may not write, and SQLAlchemy's error if
    there is no ledger.
    """
    version: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    if version is not None and version != accepted:
        check_schema(connection, version, name, "write")
    return version


def only_readable(url: str) -> str:
    """Return the reason why the ledger at `url`, with a newer schema, may be read but not written; empty if it may be
    written, or if its schema is not newer.

    Raises LedgerError for a ledger that may not be read either.
    """
    parsed = resolve(url)
    engine = make_engine(parsed, write=False)
    try:
        with engine.connect() as connection:
            version = version_of(connection)
            if version is None or not is_newer(version):
                return ""
            check_schema(connection, version, masked(parsed), "read")
            try:
                check_schema(connection, version, masked(parsed), "write")
            except LedgerError as error:
                return str(error)
            return ""
    except (DBAPIError, OSError) as error:
        raise refusal(parsed, error) from error
    finally:
        engine.dispose()


def check_schema(connection: Connection, version: str, name: str, purpose: Purpose) -> None:
    """Raise LedgerError unless `version` is the newest known schema, or a newer one that permits this use."""
    refuse_too_old(version, f"ledger {name}")
    if is_older(version):
        others = ", or resihp db upgrade --all for those of all jobs of a folder" if name.startswith("sqlite") else ""
        text = f"its schema {version} is older than {head()}; run resihp db upgrade --ledger {name}{others}"
        raise LedgerError(f"ledger {name}: {text}")
    if is_newer(version):
        check_compatible(version, oldest_client(connection, purpose), name, purpose)


def unknown_parts(connection: Connection) -> list[str]:
    """Return the unknown tables and columns of a newer ledger, sorted. Copies made by this resihp lack them."""
    version = version_of(connection)
    if version is None or not is_newer(version):
        return []
    inspector = inspect(connection)
    our_tables = LedgerTable.metadata.tables
    unknown = [table for table in inspector.get_table_names() if table not in our_tables and table != VERSION_TABLE]
    for name, table in our_tables.items():
        unknown += [
            f"{name}.{column['name']}" for column in inspector.get_columns(name) if column["name"] not in table.c
        ]
    return sorted(unknown)
