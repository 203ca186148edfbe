"""A SQLite file of somebody else's is read from a copy: of one moment, whole, and with nothing left behind."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import text

import db.foreign.files
from db import migrate
from db.engine import make_engine, resolve
from db.foreign.files import is_ours, private_copy
from resihp.errors import LedgerError


@pytest.fixture
def open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that everybody may write, as a project's may be; temporary files are beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(db.foreign.files, "COPY_PATIENCE_S", 0.1)
    (tmp_path / "temporary").mkdir()
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def rows(ledger: Path) -> list[int]:
    engine = make_engine(resolve(f"sqlite:///{ledger}"), write=False)
    try:
        with engine.connect() as connection:
            return [row[0] for row in connection.execute(text("SELECT n FROM numbers ORDER BY n"))]
    finally:
        engine.dispose()


def writer(ledger: Path, mode: str = "WAL") -> sqlite3.Connection:
    connection = sqlite3.connect(ledger, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE IF NOT EXISTS numbers (n INTEGER)")
    return connection


def test_what_its_writer_has_only_in_the_wal_is_read_and_nothing_is_made_beside_it(open_folder: Path) -> None:
    ledger = open_folder / "ledger.db"
    assert not is_ours(ledger)
    connection = writer(ledger)
    connection.execute("INSERT INTO numbers VALUES (1), (2)")
    before = {path.name: path.read_bytes() for path in open_folder.iterdir()}
    assert rows(ledger) == [1, 2]
    assert {path.name: path.read_bytes() for path in open_folder.iterdir()} == before
    assert list(Path(tempfile.gettempdir()).iterdir()) == [], "the copy goes with the reader"
    connection.close()
    assert rows(ledger) == [1, 2]


def test_a_lock_of_its_writers_is_not_waited_for(open_folder: Path) -> None:
    ledger = open_folder / "ledger.db"
    connection = writer(ledger, "DELETE")
    connection.execute("INSERT INTO numbers VALUES (1)")
    connection.execute("BEGIN EXCLUSIVE")
    assert rows(ledger) == [1]
    connection.close()


def test_a_file_that_is_half_written_is_refused(open_folder: Path) -> None:
    ledger = open_folder / "ledger.db"
    connection = writer(ledger, "DELETE")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO numbers VALUES (1)")
    assert (open_folder / "ledger.db-journal").stat().st_size
    with pytest.raises(LedgerError, match="in the middle of a change, or died there"):
        rows(ledger)
    connection.execute("ROLLBACK")
    assert rows(ledger) == []
    connection.close()


def test_links_pipes_and_giants_are_not_copied(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = open_folder / "ledger.db"
    connection = writer(ledger)
    linked, pipe, text_file = open_folder / "linked.db", open_folder / "pipe.db", open_folder / "text.db"
    linked.symlink_to(ledger)
    os.mkfifo(pipe)
    text_file.write_text("no database at all")
    for path, words in ((linked, "symbolic link"), (pipe, "no plain file"), (text_file, "not a database")):
        with pytest.raises(LedgerError, match=words):
            private_copy(path, "x")
    (open_folder / "ledger.db-wal").rename(open_folder / "kept")
    (open_folder / "ledger.db-wal").symlink_to(open_folder / "kept")
    with pytest.raises(LedgerError, match="symbolic link"):
        private_copy(ledger, "x")
    (open_folder / "ledger.db-wal").unlink()
    monkeypatch.setattr(db.foreign.files, "MAX_COPY_BYTES", 100)
    with pytest.raises(LedgerError, match="ask its owner for resihp db export"):
        private_copy(ledger, "x")
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    connection.close()


def test_a_ledger_of_ours_is_ours_only_while_nobody_else_can_write_beside_it(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    migrate.upgrade(f"sqlite:///{ledger}")
    assert is_ours(ledger)
    for mode in (0o770, 0o1777):  # a sticky folder is closed to those who take away, not to those who add
        tmp_path.chmod(mode)
        assert not is_ours(ledger), oct(mode)
    tmp_path.chmod(0o700)
    ledger.chmod(0o660)
    assert not is_ours(ledger)


def test_somebody_elses_journal_beside_a_ledger_of_ours_keeps_it_from_being_written(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    ledger, beside = tmp_path / "ledger.db", tmp_path / "ledger.db-journal"
    migrate.upgrade(f"sqlite:///{ledger}")
    beside.write_bytes(b"x" * 600)
    os.chown(beside, 54321, -1)
    with pytest.raises(LedgerError, match="put there by somebody else"):
        make_engine(resolve(f"sqlite:///{ledger}"), write=True)
