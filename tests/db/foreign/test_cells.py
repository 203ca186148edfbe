"""Cells of a ledger that somebody else wrote are of their columns' types, or the ledger is refused."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from resihp.db.engine import make_engine, resolve
from resihp.db.foreign.cells import check_cells
from resihp.db.reading.reader import Reader
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from tests.db.conftest import story, write_journal


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    write_journal(folder / "journal", story())
    catch_up(f"sqlite:///{folder}/ledger.db", folder, folder / "journal")
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
    return folder / "ledger.db"


def check(file: Path) -> None:
    engine = make_engine(resolve(f"sqlite:///{file}"), write=False)
    try:
        with engine.connect() as connection:
            check_cells(connection, "foreign")
    finally:
        engine.dispose()


def test_ledger_that_resihp_wrote_passes(sound: Path) -> None:
    check(sound)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("jobs.telemetry_dropped", "[]"),
        ("jobs.started_at", "-1e308"),
        ("jobs.started_at", "2026-02-31 00:00:00.000000"),
        ("jobs.started_at", "9999-99-99 00:00:00.000000"),
        ("jobs.name", b"\xff\xfe"),
        ("iterations.loss", "much"),
        ("iterations.skipped", 7),
        ("plans.layout", b"{}"),
    ],
)
def test_cell_of_another_type_is_refused_by_its_name(sound: Path, tmp_path: Path, column: str, value: object) -> None:
    file = shutil.copy(sound, tmp_path / "ledger.db")
    table, _, name = column.partition(".")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        connection.execute(f"UPDATE {table} SET {name} = ?", (value,))
        connection.commit()
    with pytest.raises(LedgerError, match=rf"{table}\.{name} has values of the wrong type"):
        check(file)


def test_column_that_is_reckoned_when_it_is_read_is_refused(sound: Path, tmp_path: Path) -> None:
    """It can take as long, and as much memory, as its author wants."""
    file = shutil.copy(sound, tmp_path / "ledger.db")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("ALTER TABLE jobs DROP COLUMN reason")
        connection.execute("ALTER TABLE jobs ADD COLUMN reason TEXT AS (hex(zeroblob(900000000))) VIRTUAL")
    with pytest.raises(LedgerError, match=r"jobs\.'reason' is a generated column"):
        check(file)


def test_schema_that_is_no_text_is_a_damaged_file(sound: Path, tmp_path: Path) -> None:
    content = sound.read_bytes()
    assert b"CREATE INDEX" in content
    (tmp_path / "ledger.db").write_bytes(content.replace(b"CREATE INDEX", b"CREATE \xacNDEX", 1))
    with pytest.raises(LedgerError, match=r"malformed|not made by resihp|no ledger"):
        Reader.open(f"sqlite:///{tmp_path}/ledger.db")


def test_cells_of_a_table_are_checked_before_the_first_question_that_names_it(sound: Path, tmp_path: Path) -> None:
    """Most of a large ledger is in tables that few questions read."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    file = shutil.copy(sound, folder / "ledger.db")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE iterations SET loss = 'much'")
        connection.commit()
    with Reader.open(f"sqlite:///{file}") as reader:
        job = reader.job()["id"]
        for _ in range(2):
            with pytest.raises(LedgerError, match=r"iterations\.loss has values of the wrong type in 20 rows"):
                reader.rows("iterations", job)
        assert reader.rows("plans", job)
