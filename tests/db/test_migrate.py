"""Migrations: what they make is what the models say; what is newer or not ours is refused with a way out."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from db import migrate
from db.engine import make_engine, resolve
from db.models import Base
from db.queries import Reader
from db.writer import Ledger, catch_up
from resihp import journal
from resihp.errors import LedgerError

OLD = Path(__file__).parent / "old"
"""Written by resihp 0.1.0 of schema 0001: a job that lost ranks 5 and, on the way back, 0."""


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
    with pytest.raises(LedgerError, match=r"schema 9999 is newer than 0006.*upgrade resihp"):
        {
            "writer": lambda: Ledger.open(url, tmp_path),
            "reader": lambda: Reader.open(url),
            "upgrade": lambda: migrate.upgrade(url),
        }[opener]()


def old_ledger(folder: Path) -> str:
    with sqlite3.connect(folder / "ledger.db") as connection:
        connection.executescript((OLD / "ledger-0001.sql").read_text())
    connection.close()
    return url_of(folder / "ledger.db")


def contents(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Rows of every table."""
    with sqlite3.connect(path) as connection:
        made = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        rows = {
            name: connection.execute(f"SELECT * FROM {name}").fetchall() for kind, name, _ in made if kind == "table"
        }
    connection.close()
    return rows


def constraints(url: str) -> set[tuple[str, str, str]]:
    engine = make_engine(resolve(url), write=False)
    found = set()
    with engine.connect() as connection:
        inspector = inspect(connection)
        for table in inspector.get_table_names():
            if table == migrate.VERSION_TABLE:
                continue
            found |= {(table, str(c["name"]), c["sqltext"]) for c in inspector.get_check_constraints(table)}
            found |= {(table, str(f["name"]), str(f["options"])) for f in inspector.get_foreign_keys(table)}
            found |= {(table, str(i["name"]), str(i["column_names"])) for i in inspector.get_indexes(table)}
            found |= {(table, str(u["name"]), str(u["column_names"])) for u in inspector.get_unique_constraints(table)}
            key = inspector.get_pk_constraint(table)
            found |= {(table, str(key["name"]), str(key["constrained_columns"]))}
    engine.dispose()
    return found


def downgrade(url: str, revision: str) -> None:
    engine = make_engine(resolve(url), write=True, migrate=True)
    with engine.begin() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    engine.dispose()


def test_old_ledger_is_upgraded_with_all_that_is_in_it(tmp_path: Path) -> None:
    url = old_ledger(tmp_path)
    assert migrate.current(url) == "0001"
    with pytest.raises(LedgerError, match="schema 0001 is older than 0006; run resihp db upgrade"):
        Reader.open(url)
    before = contents(tmp_path / "ledger.db")
    assert migrate.upgrade(url) == "0006"
    after = contents(tmp_path / "ledger.db")
    for table, rows in before.items():
        if table != migrate.VERSION_TABLE:
            assert [row[: len(rows[0])] for row in after[table]] == rows, table
    with Reader.open(url) as reader:
        [job] = reader.jobs()
        plans = reader.rows("plans", job["id"])
        iterations = reader.rows("iterations", job["id"])
        assert [row["outcome"] for row in plans] == ["in effect", "superseded", "in effect"]
        assert [row["in_effect_at"] for row in plans] == [
            iterations[0]["finished_at"],
            None,
            iterations[2]["finished_at"],
        ]
        assert [row["bytes_moved"] for row in reader.rows("reconfigurations", job["id"])] == [0]
        assert [row["seconds_to_recover"] for row in reader.rows("failures", job["id"])] == [1.0]


def test_old_journal_makes_the_same_ledger_as_an_upgraded_old_one(tmp_path: Path) -> None:
    (tmp_path / "upgraded").mkdir()
    (tmp_path / "made").mkdir()
    upgraded = old_ledger(tmp_path / "upgraded")
    migrate.upgrade(upgraded)
    catch_up("sqlite", tmp_path / "made", OLD / "journal-0.1.0")

    def rows(url: str) -> dict[str, list[dict[str, object]]]:
        with Reader.open(url) as reader:
            [job] = reader.jobs()
            found = {table: reader.rows(table, job["id"]) for table in ("plans", "failures", "workers", "events")}
            found["reconfigurations"] = reader.rows("reconfigurations", job["id"])
        for plan in found["plans"]:
            del plan["digest"]  # over fields that plans did not have then
        return found

    assert rows(url_of(tmp_path / "made" / "ledger.db")) == rows(upgraded)
    assert journal.read(OLD / "journal-0.1.0")[0].seq == 1


def test_upgraded_schema_is_that_of_a_new_ledger_and_goes_back(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    new = url_of(tmp_path / "new" / "ledger.db")
    migrate.upgrade(new)
    old = old_ledger(tmp_path)
    first = constraints(old)
    migrate.upgrade(old)
    assert constraints(old) == constraints(new)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("UPDATE plans SET action = 'between' WHERE epoch = 3")
        connection.execute("UPDATE reconfigurations SET action = 'between'")
        with pytest.raises(sqlite3.IntegrityError, match="ck_plans_action"):
            connection.execute("UPDATE plans SET action = 'sideways'")
        with pytest.raises(sqlite3.IntegrityError, match="ck_reconfigurations_attempts"):
            connection.execute("UPDATE reconfigurations SET attempts = 0")
    connection.close()
    downgrade(old, "0001")
    assert migrate.current(old) == "0001"
    assert constraints(old) == first
    (tmp_path / "first").mkdir()
    old_ledger(tmp_path / "first")
    before, after = contents(tmp_path / "first" / "ledger.db"), contents(tmp_path / "ledger.db")
    for table in before:
        if table not in ("plans", "reconfigurations"):
            assert after[table] == before[table], table
    assert [row[2] for row in after["plans"]] == ["start", "redo", "commit"], "what was between two iterations counts"
    assert [row[2] for row in after["reconfigurations"]] == ["commit"]
    assert migrate.upgrade(old) == "0006"


def test_a_ledger_that_contradicts_itself_is_not_migrated(tmp_path: Path) -> None:
    url = old_ledger(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("DELETE FROM reconfigurations")  # without foreign keys: failures still name it
    connection.close()
    with pytest.raises(LedgerError, match="table failures refers to rows of reconfigurations that are not there"):
        migrate.upgrade(url)
    assert migrate.current(url) == "0001"


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
