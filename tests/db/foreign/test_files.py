"""A SQLite file of somebody else's is read from a copy: of one moment, whole, and with nothing left behind."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import text

import resihp.db.foreign.files
from resihp.db import migrate
from resihp.db.engine import make_engine, resolve
from resihp.db.foreign.files import is_ours, is_read_in_place, private_copy
from resihp.errors import LedgerError
from tests.db.foreign.half_way import half_way


@pytest.fixture
def open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that everybody may write, as a project's may be; temporary files are beside it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(resihp.db.foreign.files, "COPY_PATIENCE_S", 0.1)
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
    with pytest.raises(LedgerError, match="was killed while writing"):
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
    monkeypatch.setattr(resihp.db.foreign.files, "MAX_COPY_BYTES", 100)
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
    with pytest.raises(LedgerError, match="belongs to user 54321; the ledger is not opened"):
        make_engine(resolve(f"sqlite:///{ledger}"), write=True)


# --- a ledger of one's own in a project's folder, which a group may write ---------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the modes of a project's, as umask 002 leaves them; nothing in it is ever copied."""
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o2775)
    monkeypatch.setattr(resihp.db.foreign.files, "MAX_COPY_BYTES", 0)
    return folder


def own_ledger(project: Path, mode: str) -> tuple[Path, sqlite3.Connection]:
    ledger = project / "ledger.db"
    ledger.touch()
    ledger.chmod(0o664)
    return ledger, writer(ledger, mode)


def left_half_way(ledger: Path, connection: sqlite3.Connection) -> None:
    """Leave what a writer leaves that is killed in the middle of a change: a changed file and its journal."""
    content, rolled = half_way(ledger, connection)
    ledger.write_bytes(content)
    beside = Path(f"{ledger}-journal")
    beside.write_bytes(rolled)
    beside.chmod(0o664)


def test_a_second_job_writes_while_the_first_is_in_a_transaction(project: Path) -> None:
    ledger, connection = own_ledger(project, "DELETE")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO numbers VALUES (1)")
    assert Path(f"{ledger}-journal").stat().st_mode & 0o020, "SQLite gives the journal its ledger's permissions"
    make_engine(resolve(f"sqlite:///{ledger}"), write=True).dispose()
    connection.execute("COMMIT")
    connection.close()


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_a_large_ledger_of_ours_is_read_where_it_lies_while_its_job_writes(project: Path, mode: str) -> None:
    ledger, connection = own_ledger(project, mode)
    connection.execute("INSERT INTO numbers VALUES (1)")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO numbers VALUES (2)")
    assert rows(ledger) == [1]
    connection.execute("COMMIT")
    assert rows(ledger) == [1, 2]
    connection.close()
    before = sorted(project.iterdir())
    assert rows(ledger) == [1, 2]
    assert sorted(project.iterdir()) == before, "whoever reads leaves no file"


def test_what_our_killed_writer_left_half_done_is_undone_in_a_copy(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # a copy may be made
    ledger, connection = own_ledger(project, "DELETE")
    connection.execute("INSERT INTO numbers VALUES (1)")
    left_half_way(ledger, connection)
    before = {path.name: path.read_bytes() for path in project.iterdir()}
    assert rows(ledger) == [1]
    assert {path.name: path.read_bytes() for path in project.iterdir()} == before
    make_engine(resolve(f"sqlite:///{ledger}"), write=True).dispose()  # and a writer is let in, which mends the file


def test_a_journal_that_is_planted_after_the_check_is_not_played_back(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the group may put one there at any moment."""
    ledger, connection = own_ledger(project, "DELETE")
    connection.execute("INSERT INTO numbers VALUES (1)")
    kept = project / "kept.db"
    shutil.copy(ledger, kept)
    left_half_way(ledger, connection)
    monkeypatch.setattr("resihp.db.engine.check_rollback_journal", lambda *_: None)
    if os.geteuid() == 0:
        os.chown(f"{ledger}-journal", 54321, -1)
    before = ledger.read_bytes()
    with pytest.raises(LedgerError, match=r"belongs to user 54321|are copied"):
        rows(ledger)
    assert ledger.read_bytes() == before


def test_a_ledger_that_others_than_a_group_may_write_is_not_read_in_place(project: Path, tmp_path: Path) -> None:
    ledger, connection = own_ledger(project, "DELETE")
    connection.close()
    assert is_read_in_place(ledger)
    assert not is_ours(ledger)
    for path, mode, usual in ((project, 0o777, 0o2775), (project, 0o1777, 0o2775), (ledger, 0o666, 0o664)):
        path.chmod(mode)
        assert not is_read_in_place(ledger), (path, oct(mode))
        path.chmod(usual)
    linked = tmp_path / "project" / "linked.db"
    linked.symlink_to(ledger)
    assert not is_read_in_place(linked)
    if os.geteuid() == 0:
        for path in (Path(f"{ledger}-wal"), ledger):
            path.touch()
            os.chown(path, 54321, -1)
            assert not is_read_in_place(ledger), path
            os.chown(path, 0, -1)


def test_a_large_ledger_of_another_is_copied_between_two_changes(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer waits while it is copied, as it does for everybody who reads with SQLite."""
    ledger = open_folder / "ledger.db"
    connection = writer(ledger, "DELETE")
    connection.execute("INSERT INTO numbers VALUES (1)")
    connection.execute("PRAGMA busy_timeout=0")
    copy = resihp.db.foreign.files._copy
    refused = []

    def change_meanwhile(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        try:
            connection.execute("INSERT INTO numbers VALUES (2)")
        except sqlite3.OperationalError as error:
            refused.append(str(error))

    monkeypatch.setattr(resihp.db.foreign.files, "_copy", change_meanwhile)
    assert rows(ledger) == [1]
    assert refused == ["database is locked"]
    connection.execute("INSERT INTO numbers VALUES (2)")
    connection.close()
