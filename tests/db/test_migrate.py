"""Migrations: what they make is what the models say; what is newer or not ours is refused with a way out."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, inspect, text
from sqlalchemy.exc import IntegrityError

from resihp.db import engine, migrate
from resihp.db.engine import make_engine, resolve
from resihp.db.models import LedgerTable
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from resihp.record import journal, journal_file
from tests.db.conftest import BEGAN, started, story, write_journal
from tests.db.later_schema import LATER, add_later_schema, moved_to

OLD = Path(__file__).parent / "old"
"""Written by a development version with schema 0001: a job that lost ranks 5 and, on the way back, 0."""


NEWER = (
    f"UPDATE {migrate.VERSION_TABLE} SET version_num = '9999'",
    "UPDATE compatibility SET min_reader = '9998', min_writer = '9998'",
)
"""What makes of a ledger one that we may neither read nor write."""


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


def test_migrated_schema_equals_the_models(ledger_url: str) -> None:
    url = ledger_url
    assert migrate.current(url) is None
    assert migrate.upgrade(url) == migrate.head() == migrate.current(url)
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        options = {"version_table": migrate.VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        found = compare_metadata(context, LedgerTable.metadata)
        if engine.dialect.name == "sqlite":  # has no columns that are GENERATED ALWAYS, and numbers rows all the same
            numbered = {(one, table, column) for [(one, _, table, column, *_)] in found}
            assert numbered == {("modify_default", table, "id") for table in ("jobs", "maintenance", "probes")}
        else:
            assert found == []
        names = set(inspect(connection).get_table_names())
        checks = {
            (table, check["name"])
            for table in LedgerTable.metadata.tables
            for check in inspect(connection).get_check_constraints(table)
        }
    engine.dispose()
    assert names == {*LedgerTable.metadata.tables, migrate.VERSION_TABLE}
    # Alembic compares no check constraints.
    assert checks == {
        (table.name, str(check.name))
        for table in LedgerTable.metadata.tables.values()
        for check in table.constraints
        if type(check).__name__ == "CheckConstraint"
    }


def test_the_design_s_tables_are_there() -> None:
    assert set(LedgerTable.metadata.tables) == {
        *("jobs", "nodes", "workers", "iterations", "rank_reports", "failures", "probes", "plans"),
        *("reconfigurations", "drains", "replacements", "events", "suspicions", "scores"),
        *("memberships", "devices", "checkpoints", "maintenance", "compatibility", "rank_quantiles"),
        *("suspicion_kinds", "declined_changes"),
    }


def test_upgrading_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    migrate.upgrade(url_of(path))
    before = path.read_bytes()
    migrate.upgrade(url_of(path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("opener", ["writer", "reader", "upgrade"])
def test_newer_schema_is_refused(ledger_url: str, tmp_path: Path, opener: str) -> None:
    url = ledger_url
    migrate.upgrade(url)
    execute(url, *NEWER)
    with pytest.raises(LedgerError, match=rf"schema 9999 is newer than {migrate.head()}.*upgrade resihp"):
        {
            "writer": lambda: Ledger.open(url, tmp_path),
            "reader": lambda: Reader.open(url),
            "upgrade": lambda: migrate.upgrade(url),
        }[opener]()


def execute(url: str, *statements: str) -> None:
    engine = make_engine(resolve(url), write=True)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def development_ledger(path: Path) -> None:
    """Make the SQLite file `path` a ledger as a development version wrote it."""
    ledger = sqlite3.connect(path)
    ledger.executescript((OLD / "ledger-0001.sql").read_text())
    ledger.close()


def contents(url: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table, as column and value."""
    engine = make_engine(resolve(url), write=False)
    metadata = MetaData()
    with engine.connect() as connection:
        metadata.reflect(connection)
        rows = {
            table.name: [
                dict(row) for row in connection.execute(table.select().order_by(*table.primary_key)).mappings()
            ]
            for table in metadata.sorted_tables
        }
    engine.dispose()
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


def full_ledger(url: str, folder: Path) -> str:
    """Write a job's whole journal, and reports of its ranks, into the ledger at `url`."""
    with Ledger.open(url, folder) as ledger:
        for record in write_journal(folder / "journal", story()):
            ledger.submit(record)
        ledger.telemetry([(i, 1, rank, 0.5, None) for i in range(1, 4) for rank in range(12)])
        assert ledger.flush(30)
    return url


def without(column: str, tables: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {
        table: [{name: value for name, value in row.items() if name != column} for row in rows]
        for table, rows in tables.items()
        if table != migrate.VERSION_TABLE
    }


def test_an_upgrade_keeps_all_rows_and_goes_back(
    ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_ledger(ledger_url, tmp_path)
    first, rows = constraints(ledger_url), contents(ledger_url)
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    with pytest.raises(LedgerError, match=f"schema {known} is older than {LATER}; run resihp db upgrade"):
        Reader.open(ledger_url)
    assert migrate.upgrade(ledger_url) == LATER == migrate.current(ledger_url)
    upgraded = contents(ledger_url)
    assert {row["note"] for row in upgraded["failures"]} == {None}
    assert without("note", upgraded) == without("", rows)
    assert constraints(ledger_url) == first
    moved_to(ledger_url, known)
    assert contents(ledger_url) == rows
    assert constraints(ledger_url) == first


@pytest.mark.parametrize("opener", ["writer", "reader", "upgrade"])
def test_a_ledger_of_a_development_version_is_refused_and_left_as_it_is(tmp_path: Path, opener: str) -> None:
    path = tmp_path / "ledger.db"
    development_ledger(path)
    before = contents(url_of(path))
    with pytest.raises(LedgerError, match=r"schema 0001 was made by a development version .* resihp db import JOURNAL"):
        {
            "writer": lambda: Ledger.open("sqlite", tmp_path),
            "reader": lambda: Reader.open(url_of(path)),
            "upgrade": lambda: migrate.upgrade(url_of(path)),
        }[opener]()
    assert contents(url_of(path)) == before


def test_a_journal_of_a_development_version_is_read(ledger_url: str, tmp_path: Path) -> None:
    """It fills a new ledger where its own ledger is refused."""
    assert journal_file.read(OLD / "journal-0.1.0")[0].seq == 1
    catch_up(ledger_url, tmp_path, OLD / "journal-0.1.0")
    with Reader.open(ledger_url) as reader:
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
        assert [row["seconds_without_noticing"] for row in reader.rows("failures", job["id"])] == [1.0]


def test_impossible_values_are_refused(ledger_url: str, tmp_path: Path) -> None:
    full_ledger(ledger_url, tmp_path)
    with pytest.raises(IntegrityError, match="ck_plans_action"):
        execute(ledger_url, "UPDATE plans SET action = 'sideways'")
    with pytest.raises(IntegrityError, match="ck_reconfigurations_attempts"):
        execute(ledger_url, "UPDATE reconfigurations SET attempts = 0")


def steps() -> list[str]:
    script = ScriptDirectory.from_config(migrate._config())
    return [revision.revision for revision in script.walk_revisions()][::-1]


def test_jobs_that_begin_at_once_migrate_once(
    ledger_url: str, tmp_path: Path, records: list[journal.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, one of them may wait longer for the others than a job would.
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(engine, "MIGRATION_LOCK_S", 60.0)
    monkeypatch.setitem(engine.SQLITE_ARGUMENTS, "timeout", 60.0)
    begun = [journal.Record(1, BEGAN + n, started("shared", user)) for n, user in enumerate(("me", "you", "them"))]
    at_once = threading.Barrier(len(begun))
    wrong: list[BaseException] = []

    def job(first: journal.Record) -> None:
        try:
            at_once.wait(30)
            with Ledger.open(ledger_url, tmp_path) as ledger:
                for record in (first, *records[1:]):
                    ledger.submit(record)
                assert ledger.flush(60)
        except BaseException as error:  # noqa: BLE001 - a thread's error is the test's
            wrong.append(error)

    threads = [threading.Thread(target=job, args=(first,)) for first in begun]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    with Reader.open(ledger_url) as reader:
        assert [row["owner"] for row in reader.jobs()] == ["them", "you", "me"]
        assert [len(reader.rows("iterations", row["id"])) for row in reader.jobs()] == [20, 20, 20]


def test_a_ledger_that_contradicts_itself_is_not_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = full_ledger(url_of(tmp_path / "ledger.db"), tmp_path)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        connection.execute("DELETE FROM reconfigurations")  # without foreign keys: failures still name it
    connection.close()
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    with pytest.raises(LedgerError, match="table failures refers to rows of reconfigurations that are missing"):
        migrate.upgrade(url)
    assert migrate.current(url) == known


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
