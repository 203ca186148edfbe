"""Migrations: what they make is what the models say; what is newer or not ours is refused with a way out."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from db import migrate
from db.engine import make_engine, resolve
from db.models import Base
from db.queries import Reader
from db.writer import Ledger
from resihp.errors import LedgerError


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def test_migrated_schema_equals_the_models(tmp_path: Path) -> None:
    url = url_of(tmp_path / "ledger.db")
    assert migrate.current(url) is None
    assert migrate.upgrade(url) == migrate.head() == migrate.current(url)
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        options = {"version_table": migrate.VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, Base.metadata) == []
        names = set(inspect(connection).get_table_names())
        checks = {
            (table, check["name"])
            for table in Base.metadata.tables
            for check in inspect(connection).get_check_constraints(table)
        }
    engine.dispose()
    assert names == {*Base.metadata.tables, migrate.VERSION_TABLE}
    # Alembic compares no check constraints.
    assert checks == {
        (table.name, str(check.name))
        for table in Base.metadata.tables.values()
        for check in table.constraints
        if type(check).__name__ == "CheckConstraint"
    }


def test_the_design_s_tables_are_there() -> None:
    assert set(Base.metadata.tables) == {
        *("jobs", "nodes", "workers", "iterations", "rank_reports", "failures", "probes", "plans"),
        *("reconfigurations", "drains", "replacements", "events"),
    }


def test_upgrading_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    migrate.upgrade(url_of(path))
    before = path.read_bytes()
    migrate.upgrade(url_of(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("opener", ["writer", "reader", "upgrade"])
def test_newer_schema_is_refused(tmp_path: Path, opener: str) -> None:
    url = url_of(tmp_path / "ledger.db")
    migrate.upgrade(url)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute(f"UPDATE {migrate.VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    with pytest.raises(LedgerError, match=r"schema 9999 is newer than 0001.*upgrade resihp"):
        {
            "writer": lambda: Ledger.open(url, tmp_path),
            "reader": lambda: Reader.open(url),
            "upgrade": lambda: migrate.upgrade(url),
        }[opener]()


def test_tables_of_another_program_are_not_touched(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "theirs.db") as connection:
        connection.execute("CREATE TABLE jobs (id INTEGER)")
    connection.close()
    with pytest.raises(LedgerError, match=r"holds tables of another program \(jobs\)"):
        Ledger.open(url_of(tmp_path / "theirs.db"), tmp_path)
    with sqlite3.connect(tmp_path / "theirs.db") as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("jobs",)]
    connection.close()


def test_odd_folder_names_do_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "100 % [red] it's"
    folder.mkdir()
    Ledger.open("sqlite", folder).close()
    assert (folder / "ledger.db").exists()
