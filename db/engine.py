"""SQLAlchemy engines for ledger URLs: decides which databases are supported, and how each one is opened.

Used by the writer, the migrations and the queries. Every failure is a LedgerError of one line that contains the URL,
with its password masked, and the next step.
"""

from __future__ import annotations

import os
import random
import shlex
import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine import Connection, Dialect, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from resihp.db import url_passwords
from resihp.db.file_systems import NETWORK_FILE_SYSTEMS, file_system
from resihp.db.foreign.files import (
    check_rollback_journal,
    is_ours,
    is_quiet_wal,
    is_read_in_place,
    is_shared_with_group,
    private_copy,
)
from resihp.errors import LedgerError

LEDGER_FILE = "ledger.db"
BUSY_TIMEOUT_S = 5.0
FULL_PAUSE_S = 0.1
"""Seconds between attempts to connect to a server that has no free connection. Short, because there are few readers and
a free connection is soon taken."""
SERVER_SILENCE_S = 30.0
MIGRATION_LOCK_S = 3.0
"""Seconds for which one attempt to change the schema waits for a server's table lock. Later queries of the table wait
behind this attempt."""
URL_EXAMPLES = "use sqlite:///PATH or postgresql+psycopg://USER@HOST/DATABASE"


def default_url(job_folder: Path) -> str:
    """Return the ledger's URL for a job that configures none: SQLite in the job's folder."""
    return f"sqlite:///{job_folder.absolute() / LEDGER_FILE}"


def masked(url: str | URL) -> str:
    """Return `url` for messages: with its password masked, wherever in the URL the password is."""
    return url_passwords.masked(url if isinstance(url, str) else url.render_as_string(hide_password=True))


PARAMETERS_IN_FILES = frozenset(
    """
    application_name channel_binding client_encoding connect_timeout fallback_application_name gssencmode host
    keepalives keepalives_count keepalives_idle keepalives_interval krbsrvname load_balance_hosts port require_auth
    requirepeer sslcert sslcertmode sslcrl sslmode sslrootcert ssl_max_protocol_version ssl_min_protocol_version
    sslnegotiation sslsni target_session_attrs tcp_user_timeout user
    """.split()  # noqa: SIM905 - one word per line would fill a page
)
"""Connection parameters that a URL stored in a file may set, by libpq's names. Excluded are `hostaddr`, `passfile` and
`service`, which can send a password to another host than intended, as well as `options` and `sslkey`."""


def check_stored(url: str, source: Path) -> str:
    """Return `url`, a ledger URL that was read from the file `source`. Raises LedgerError if it sets a connection
    parameter that is accepted only on the command line."""
    parsed = resolve(url)
    allowed: frozenset[str] = frozenset() if file_of(parsed) is not None else PARAMETERS_IN_FILES
    for name in parsed.query:
        if name not in allowed:
            raise LedgerError(
                f"ledger {masked(parsed)}: {source} gives the connection parameter {name[:40]!a}, which is only "
                "accepted on the command line: --ledger URL"
            )
    return url


def resolve(url: str, job_folder: Path | None = None) -> URL:
    """Return `url` as a complete, absolute URL; `sqlite` alone means the ledger in the job's folder. Raises LedgerError
    for an unsupported database."""
    if url == "sqlite":
        if job_folder is None:
            raise LedgerError(f"ledger sqlite: names no file; {URL_EXAMPLES}")
        url = default_url(job_folder)
    try:
        parsed = make_url(url_passwords.with_quoted_query(url))
    except (ArgumentError, ValueError):
        raise LedgerError(f"ledger {masked(url)}: not a database's URL; {URL_EXAMPLES}") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
        raise LedgerError(f"ledger {masked(url)}: driver {parsed.drivername} is not known here; {URL_EXAMPLES}")
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
            raise LedgerError(f"ledger {masked(url)}: names no file; {URL_EXAMPLES}")
        try:
            parsed = parsed.set(database=str(Path(parsed.database).expanduser().absolute()))
        except RuntimeError:
            raise LedgerError(
                f"ledger {masked(url)}: ~ cannot be expanded: the user has no home directory on this host"
            ) from None
    return parsed


def file_of(url: URL) -> Path | None:
    """Return the file of a SQLite URL; None for a server."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def is_on_network(url: URL) -> bool:
    file = file_of(url)
    return file is not None and file_system(file.parent) in NETWORK_FILE_SYSTEMS


def make_engine(url: URL, *, write: bool, migrate: bool = False) -> Engine:
    """Return an engine with transactions that begin at once, also on SQLite, where pysqlite's own transactions begin
    too late for migrations.

    Opens nothing yet. Writers acquire SQLite's lock when a transaction begins, so that the transaction cannot fail
    half-way. Writers wait up to `BUSY_TIMEOUT_S` for a lock, and readers as long for a connection to a full server;
    migrations of PostgreSQL wait up to `MIGRATION_LOCK_S` for a lock. A connection to a server is closed after each
    use, because a server has about a hundred connections for hundreds of jobs. With `migrate`, SQLite does not enforce
    foreign keys, so that tables can be recreated (sqlite.org, "Making Other Kinds Of Table Schema Changes"); the
    migration checks the foreign keys before it commits. A connection to a server that vanishes silently fails after
    `SERVER_SILENCE_S`. Raises LedgerError if the database's driver is not installed.
    """
    if url.get_backend_name() == "sqlite":
        file = file_of(url)
        assert file is not None
        if file.exists() and not file.is_file():
            raise LedgerError(f"ledger {masked(url)}: is no plain file; name another with --ledger")
        if write or is_read_in_place(file):
            check_rollback_journal(file, masked(url))
        engine = create_engine(url, connect_args=SQLITE_ARGUMENTS) if write else _reading_engine(url, file)
        wal = write and not is_on_network(url)

        def connected(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
            connection.isolation_level = None
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute(f"PRAGMA foreign_keys={'OFF' if migrate else 'ON'}")
            if write:
                _set_journal_mode(connection, "WAL" if wal else "DELETE")
                connection.execute(f"PRAGMA synchronous={'NORMAL' if wal else 'FULL'}")

        def begun(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

        event.listen(engine, "connect", connected)
        event.listen(engine, "begin", begun)
        return engine
    try:
        engine = create_engine(url, connect_args=_connect_arguments(url), poolclass=NullPool)
    except (ModuleNotFoundError, NoSuchModuleError):
        raise LedgerError(
            f"ledger {masked(url)}: Python package psycopg is not installed; pip install 'psycopg[binary]', "
            "or use sqlite"
        ) from None
    if not write:
        event.listen(engine, "do_connect", _connect_with_retries)
    else:
        wait_ms = round((MIGRATION_LOCK_S if migrate else BUSY_TIMEOUT_S) * 1000)

        def limited(connection: Connection) -> None:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {wait_ms}")

        event.listen(engine, "begin", limited)
    return engine


class _SqliteCursor(sqlite3.Cursor):
    """Cursor that reports an undecodable schema as SQLite reports other damage of a file."""

    def execute(self, *arguments: Any) -> _SqliteCursor:
        try:
            return super().execute(*arguments)
        except UnicodeDecodeError as error:
            raise sqlite3.DatabaseError(f"database disk image is malformed: {error}") from error


class _SqliteConnection(sqlite3.Connection):
    def cursor(self, factory: Any = _SqliteCursor) -> Any:
        return super().cursor(factory)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        return self.cursor().execute(*arguments)  # type: ignore[no-any-return]


SQLITE_ARGUMENTS: dict[str, Any] = {"timeout": BUSY_TIMEOUT_S, "factory": _SqliteConnection}


def _reading_engine(url: URL, file: Path) -> Engine:
    """Return an engine that reads a SQLite file; it creates no file and rolls back no journal.

    A file that another user may have written, or may have put a file beside, is read from a private copy, which is made
    when the engine first connects. A file of this user that a group may write is opened read-only in place.
    """
    if is_ours(file):
        return create_engine(url, creator=lambda: _connect_file(file, _read_mode(file)))
    is_shared = is_shared_with_group(file)
    copies: list[TemporaryDirectory[str]] = []

    def connect_copy() -> sqlite3.Connection:
        if is_shared and not copies and (connection := _connect_read_only(file)) is not None:
            return connection
        if not copies:
            copies.append(private_copy(file, masked(url), with_journal=is_shared))
        return _connect_file(Path(copies[0].name, LEDGER_FILE), "mode=rw")  # its WAL is played into the copy

    def forget(_: Engine) -> None:
        while copies:
            copies.pop().cleanup()

    engine = create_engine(url, creator=connect_copy)
    event.listen(engine, "engine_disposed", forget)
    return engine


def _connect_file(file: Path, how: str) -> sqlite3.Connection:
    name = f"file:{quote(str(file))}?{how}"
    connection = sqlite3.connect(
        name, timeout=BUSY_TIMEOUT_S, uri=True, check_same_thread=False, factory=_SqliteConnection
    )
    connection.execute("PRAGMA query_only=ON")
    return connection


def _connect_read_only(file: Path) -> sqlite3.Connection | None:
    """Connect to a file of this user that a group may write. Return None if its writer died in the middle of a change.

    On a read-only connection, SQLite never rolls back a journal, whoever owns it; it reports that a rollback is needed.
    """
    connection = _connect_file(file, "mode=ro&immutable=1" if is_quiet_wal(file) else "mode=ro")
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        return None
    return connection


def _read_mode(file: Path) -> str:
    """Return SQLite's open mode for an existing file of this user.

    SQLite rolls back a change that its writer left unfinished. In WAL mode, it also creates files beside the ledger and
    removes them again. If the folder is read-only, as in a snapshot, SQLite must be told that no process writes the
    file, which is certain only if there is no WAL.
    """
    if os.access(file.parent, os.W_OK):
        return "mode=rw"
    return "mode=ro" if Path(f"{file}-wal").exists() else "mode=ro&immutable=1"


def _set_journal_mode(connection: sqlite3.Connection, mode: str) -> None:
    """Set the journal mode; wait up to `BUSY_TIMEOUT_S` for other writers, because SQLite itself does not wait when it
    changes the mode of a file."""
    end = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode={mode}")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(0.01)


def _connect_arguments(url: URL) -> dict[str, Any]:
    """Return the connection arguments for a server, except for those that its URL sets. They work with pgbouncer:
    `options` would be refused or kept for its next client, and prepared statements have names that belong to one
    connection. The encoding is always UTF-8: a database with encoding SQL_ASCII, as created by initdb in locale C,
    would otherwise return bytes instead of text."""
    usual = {"connect_timeout": 5, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4}
    usual["tcp_user_timeout"] = round(SERVER_SILENCE_S * 1000)
    chosen = {name: value for name, value in usual.items() if name not in url.query}
    return {"prepare_threshold": None, "client_encoding": "utf8", **chosen}


def _connect_with_retries(
    dialect: Dialect, _: ConnectionPoolEntry, arguments: list[Any], named: dict[str, Any]
) -> DBAPIConnection:
    """Connect, and retry for `BUSY_TIMEOUT_S` while the server has no free connection. One is soon free, because each
    client connects only for one batch. Writers retry by themselves, with pauses (`resihp.db.writer`), because refusing
    a connection costs a server as much as accepting one."""
    until = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return dialect.connect(*arguments, **named)
        except dialect.loaded_dbapi.Error as error:
            if not _is_server_full(str(error)) or time.monotonic() > until:
                raise
        time.sleep(random.uniform(0.5, 1.0) * FULL_PAUSE_S)


def _is_server_full(words: str) -> bool:
    return any(phrase in words for phrase in ("too many c", "remaining connection slots", "temporarily unavailable"))


def check(url: URL) -> None:
    """Raise LedgerError for a URL that can never be opened, as far as this is known without connecting."""
    engine = make_engine(url, write=True)
    if file_of(url) is None:
        from psycopg import Error
        from psycopg.conninfo import make_conninfo

        _, arguments = engine.dialect.create_connect_args(url)
        arguments.pop("context", None)  # SQLAlchemy's, for psycopg alone
        try:
            make_conninfo(**arguments)
        except (Error, UnicodeError) as error:
            words = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LedgerError(f"ledger {masked(url)}: {words}; {URL_EXAMPLES}") from None
    engine.dispose()


def refusal(url: URL, error: DBAPIError | OSError) -> LedgerError:
    """Return the error for the user if the database at `url` cannot be opened or used."""
    name = masked(url)
    if isinstance(error, OSError):
        return LedgerError(
            f"ledger {name}: {error.strerror or error}; choose another folder with --ledger sqlite:///PATH"
        )
    words = (str(error.orig).strip().splitlines() or ["no answer"])[0].strip()
    if "not a database" in words or "malformed" in words:
        advice = (
            f"move the file away; resihp db import JOURNAL --ledger {name} recreates it from the job's journal, and "
            "--ledger names another"
        )
    elif "locked" in words:
        advice = "another process holds it: try again when it is done, or name another with --ledger"
    elif "permission denied" in words or "must be owner" in words:
        advice = f"the owner of its tables must run resihp db upgrade, and resihp db grant ROLE, with --ledger {name}"
    elif "constraint" in words:
        advice = "the imported rows contradict each other and none were imported; recreate them from the job's journal"
    elif "row-level security" in words:
        advice = "rows of a job that another database user wrote are not changed; name another with --ledger"
    elif (file := file_of(url)) is not None and _is_full(file.parent):
        advice = f"its disk is full: df -h {shlex.quote(str(file.parent))}; make room there"
    elif file is not None:
        advice = "is its folder writable? name another with --ledger sqlite:///PATH"
    elif _is_server_full(words):
        advice = "all its connections are in use: try again, or raise its max_connections, or use a pooler"
    elif "no password supplied" in words or "password authentication failed" in words:
        advice = (
            "put the password into ~/.pgpass (chmod 600), a line HOST:PORT:DATABASE:USER:PASSWORD, or the whole URL "
            "into url of [ledger] in a configuration file that only you can read"
        )
    else:
        advice = "is the server up, and may this user connect? name another with --ledger"
    return LedgerError(f"ledger {name}: {words}; {advice}")


def _is_full(folder: Path) -> bool:
    with suppress(OSError):
        return os.statvfs(folder).f_bavail == 0
    return False


def prepare_folder(url: URL) -> None:
    """Create a SQLite ledger's file, and its folder, accessible only to its owner. Raises LedgerError.

    SQLite would leave the file's permissions to the umask, and gives its journals the file's permissions. In a folder
    that only its owner may enter, such as a job's folder, only the owner may read the file; in a shared folder, the
    umask decides.
    """
    file = file_of(url)
    if file is None:
        return
    try:
        with suppress(FileExistsError):
            file.parent.mkdir(mode=0o700, parents=True)
        if not file.parent.is_dir():
            raise NotADirectoryError(20, f"{file.parent} is not a folder")
        shared = stat.S_IMODE(file.parent.stat().st_mode) & 0o077
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileExistsError):
            os.close(os.open(file, flags, 0o666 if shared else 0o600))
    except OSError as error:
        raise refusal(url, error) from error
