"""A SQLite ledger whose writer was killed in the middle of a change."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def half_way(ledger: Path, connection: sqlite3.Connection) -> tuple[bytes, bytes]:
    """Return the ledger and its rollback journal as a change has left them that is half written; then roll it back.

    `connection` is in journal mode DELETE, and is closed.
    """
    connection.execute("PRAGMA cache_size=1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE half_way (content TEXT)")
    for _ in range(200):
        connection.execute("INSERT INTO half_way VALUES (?)", ("x" * 500,))
    content, rolled = ledger.read_bytes(), Path(f"{ledger}-journal").read_bytes()
    connection.execute("ROLLBACK")
    connection.close()
    return content, rolled
