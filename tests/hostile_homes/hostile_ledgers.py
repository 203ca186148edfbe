"""Mutations of a job's `ledger.db`: bytes, rows, schema, and the files that SQLite looks for beside it."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hostile_homes import values
from tests.hostile_homes.places import remove

if TYPE_CHECKING:
    from tests.hostile_homes.mutations import Target

SUPER_JOURNAL_PAGE = 0x40000000
"""Byte of the file whose page holds no data, and whose number marks a super-journal's name (SQLite, PENDING_BYTE)."""
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def flipped(target: Target) -> str:
    """Pages with other bits, zeros or none."""
    path = _ledger(target)
    content = bytearray(path.read_bytes())
    how = target.rng.choice(("header", "pages", "cut", "grown"))
    if how == "header":
        for _ in range(target.rng.choice((1, 4))):
            content[target.rng.randrange(16, 100)] = target.rng.randrange(256)
    elif how == "pages":
        for _ in range(target.rng.choice((1, 20, 400))):
            content[target.rng.randrange(100, len(content))] = target.rng.randrange(256)
    elif how == "cut":
        del content[target.rng.choice((1, 50, 100, 4096, 4097, len(content) // 2, len(content) - 1)) :]
    else:
        content += target.rng.randbytes(8192)
    path.write_bytes(content)
    return f"ledger.db: {how}"


def rows(target: Target) -> str:
    """Cells of any table with hostile values."""
    words = []
    with closing(sqlite3.connect(_ledger(target))) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("PRAGMA ignore_check_constraints=ON")
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        filled = [name for name in tables if connection.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone()]
        for _ in range(target.rng.choice((1, 4, 12))):
            table = target.rng.choice((*filled, "jobs", "failures", "plans"))
            columns = [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
            column, value = target.rng.choice(columns), _cell(target)
            try:
                connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
            except sqlite3.Error:
                continue  # a key that must be another in each row
            words.append(f"{table}.{column}={str(value)[:30]!r}")
        connection.commit()
    return f"ledger.db: {', '.join(words)}"


def schema(target: Target) -> str:
    """Another version, a table less, a trigger, a view without an end, another encoding."""
    statements = {
        "version": "UPDATE resihp_schema SET version_num = '9999'",
        "table less": "DROP TABLE failures",
        "column less": "ALTER TABLE iterations DROP COLUMN loss",
        "trigger": "CREATE TRIGGER t AFTER UPDATE ON jobs BEGIN DELETE FROM failures; END",
        "view": "ALTER TABLE jobs RENAME TO old; CREATE VIEW jobs AS "
        "WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id FROM c",
        "slow index": "CREATE INDEX slow ON jobs (hex(zeroblob(100000000)))",
        "virtual": "CREATE VIRTUAL TABLE v USING fts5(a); DROP TABLE plans",
        "user_version": "PRAGMA user_version = -1; PRAGMA application_id = 7",
        "newest reader": "UPDATE compatibility SET min_reader = '9999'",
        "oldest": "DELETE FROM compatibility",
    }
    name = target.rng.choice(sorted(statements))
    with closing(sqlite3.connect(_ledger(target))) as connection:
        version = next(
            (n for (n,) in connection.execute("SELECT name FROM sqlite_master") if "version" in n or "alembic" in n), ""
        )
        connection.execute("PRAGMA journal_mode=DELETE")
        try:
            connection.executescript(statements[name].replace("resihp_schema", version or "resihp_schema"))
        except sqlite3.Error as error:
            return f"ledger.db: {name}: {error}"
    return f"ledger.db: {name}"


def wal(target: Target) -> str:
    """A write-ahead log beside it, of a writer that died, with its shared memory or without, or damaged."""
    path = _ledger(target)
    copy = path.with_name("copy.db")
    shutil.copy(path, copy)
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("UPDATE jobs SET reason = 'from the log'")
        connection.commit()
        for suffix in ("", "-wal", "-shm"):
            shutil.copy(f"{copy}{suffix}", f"{path}{suffix}")
    for suffix in ("", "-wal", "-shm"):
        remove(Path(f"{copy}{suffix}"))
    how = target.rng.choice(("as it is", "no shm", "spoiled", "giant"))
    log = Path(f"{path}-wal")
    if how == "no shm":
        remove(Path(f"{path}-shm"))
    elif how == "spoiled":
        log.write_bytes(log.read_bytes()[:-100] + target.rng.randbytes(5000))
    elif how == "giant":
        os.truncate(log, 1 << 36)
    return f"ledger.db-wal: {how}, {_open_to_all(target, path)}"


def hot_journal(target: Target) -> str:
    """A rollback journal of a writer that died, which names a super-journal: a file of the reader's or root's."""
    path = _ledger(target)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
    person = target.rng.choice(target.world.readers)
    victim = person.folder / target.rng.choice((".ssh/authorized_keys", ".profile", "home/jobs/local-1/journal"))
    Path(f"{path}-journal").write_bytes(_journal_naming(str(victim).encode(), page_bytes, target.rng))
    return f"ledger.db-journal names {victim}, {_open_to_all(target, path)}"


def links_beside(target: Target) -> str:
    """What SQLite makes beside a ledger is there, and leads to the reader's or root's."""
    path = _ledger(target)
    person = target.rng.choice(target.world.readers)
    suffix = target.rng.choice(("-wal", "-shm", "-journal"))
    to = target.rng.choice(
        (person.folder / ".ssh" / "authorized_keys2", person.folder / "notes.txt", Path("/dev/zero"))
    )
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    for name in ("-wal", "-shm", "-journal"):
        remove(Path(f"{path}{name}"))
    beside = Path(f"{path}{suffix}")
    if target.rng.random() < 0.2:
        os.mkfifo(beside, 0o666)
        return f"ledger.db{suffix} is a pipe, {_open_to_all(target, path)}"
    beside.symlink_to(to)
    return f"ledger.db{suffix} leads to {to}, {_open_to_all(target, path)}"


def _ledger(target: Target) -> Path:
    """Raises ValueError where an earlier mutation has left a journal, which SQLite would play back for us, as root."""
    path = target.folder / "ledger.db"
    if os.path.lexists(f"{path}-journal"):
        raise ValueError("a journal is beside the ledger")
    return path


def _open_to_all(target: Target, path: Path) -> str:
    """Often the attacker lets everybody write the ledger and its folder: SQLite then does what its journal asks."""
    if target.rng.random() < 0.3:
        return "not for others to write"
    path.parent.chmod(0o777)
    for file in path.parent.glob(f"{path.name}*"):
        if not file.is_symlink():
            file.chmod(0o666)
    return "for everybody to write"


def _journal_naming(name: bytes, page_bytes: int, rng: random.Random) -> bytes:
    """A journal of no pages, hot for SQLite, whose end names the super-journal (sqlite.org/fileformat.html, 3.1)."""
    sector_bytes = 512
    pages = 0xFFFFFFFF if rng.random() < 0.2 else 0
    header = JOURNAL_MAGIC + struct.pack(">IIIII", pages, 0, 1, sector_bytes, page_bytes)
    page = SUPER_JOURNAL_PAGE // page_bytes + 1
    checksum = sum(name) & 0xFFFFFFFF
    return (
        header.ljust(sector_bytes, b"\0")
        + struct.pack(">I", page)
        + name
        + struct.pack(">II", len(name), checksum)
        + JOURNAL_MAGIC
    )


def _cell(target: Target) -> str | int | float | bytes | None:
    rng = target.rng
    value = rng.choice(
        [
            *values.texts(),
            *(-1, 0, 2**31, 2**63 - 1, -(2**63), 1e308, -1e308, float("inf"), 1e15, None, b"\xff\xfe", "[" * 100_000),
            *('{"a": 1}', "[]", "null", "9999-99-99", "0001-01-01 00:00:00.000000", "x" * 1_000_000),
            *values.urls(target.world)[:3],
        ]
    )
    return value  # type: ignore[no-any-return]
