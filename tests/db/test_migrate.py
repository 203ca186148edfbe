"""Migrations: what they make is what the models say; what is newer or not ours is refused with a way out."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Boolean, DateTime, MetaData, inspect, text
from sqlalchemy.exc import IntegrityError

from db import migrate
from db.engine import file_of, make_engine, resolve
from db.models import LedgerTable
from db.reading.queries import Reader
from db.writer import Ledger, catch_up
from resihp.errors import LedgerError
from resihp.record import journal, journal_file
from tests.db.conftest import BEGAN, rank_reports, started, story, write_journal

OLD = Path(__file__).parent / "old"
"""Written by resihp 0.1.0 of schema 0001: a job that lost ranks 5 and, on the way back, 0."""


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


def moved_to(url: str, revision: str) -> None:
    """Up or down to a schema, as `migrate.upgrade` goes to the newest."""
    engine = make_engine(resolve(url), write=True, migrate=True)
    with engine.begin() as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        (command.upgrade if (migrate.version_of(connection) or "") < revision else command.downgrade)(config, revision)
    engine.dispose()


def old_ledger(url: str) -> str:
    """The ledger of 0.1.0 at `url`: on SQLite as it wrote it, on PostgreSQL the same rows in that time's schema."""
    file = file_of(resolve(url))
    dump = (OLD / "ledger-0001.sql").read_text()
    old = sqlite3.connect(":memory:" if file is None else file)
    old.executescript(dump)
    if file is None:
        moved_to(url, "0001")
        engine = make_engine(resolve(url), write=True)
        metadata = MetaData()
        with engine.begin() as connection:
            metadata.reflect(connection)
            for table in metadata.sorted_tables:
                names = [column.name for column in table.columns]
                rows = old.execute(f"SELECT {', '.join(names)} FROM {table.name}").fetchall()
                typed = [{c.name: as_type(v, c.type) for c, v in zip(table.columns, row, strict=True)} for row in rows]
                if typed and table.name != migrate.VERSION_TABLE:
                    connection.execute(table.insert(), typed)
        engine.dispose()
    old.close()
    return url


def as_type(value: Any, kind: object) -> Any:
    """What a column of that type takes, from what SQLite keeps."""
    if isinstance(kind, Boolean) and value is not None:
        return bool(value)
    if isinstance(kind, DateTime) and isinstance(value, str):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    return value


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


def test_old_ledger_is_upgraded_with_all_that_is_in_it(ledger_url: str) -> None:
    url = old_ledger(ledger_url)
    head = migrate.head()
    assert migrate.current(url) == "0001"
    with pytest.raises(LedgerError, match=f"schema 0001 is older than {head}; run resihp db upgrade"):
        Reader.open(url)
    before = contents(url)
    assert migrate.upgrade(url) == head
    after = contents(url)
    for table, rows in before.items():
        if table != migrate.VERSION_TABLE:
            assert [{name: row[name] for name in rows[0]} for row in after[table]] == rows, table
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
        assert [row["seconds_without_noticing"] for row in reader.rows("failures", job["id"])] == [1.0]


def test_old_journal_makes_the_same_ledger_as_an_upgraded_old_one(
    ledger_urls: Callable[[], str], tmp_path: Path
) -> None:
    upgraded, made = old_ledger(ledger_urls()), ledger_urls()
    migrate.upgrade(upgraded)
    catch_up(made, tmp_path, OLD / "journal-0.1.0")

    def rows(url: str) -> dict[str, list[dict[str, object]]]:
        with Reader.open(url) as reader:
            [job] = reader.jobs()
            found = {table: reader.rows(table, job["id"]) for table in ("plans", "failures", "workers", "events")}
            found["reconfigurations"] = reader.rows("reconfigurations", job["id"])
        for plan in found["plans"]:
            del plan["digest"]  # over fields that plans did not have then
        for event in found["events"]:  # which did not say from when on a recovery was timed
            if event["kind"] == "Reconfigured":
                event["text"] = str(event["text"]).replace(", 1.00 s after it was noticed", " in 1.00 s")
        return found

    assert rows(made) == rows(upgraded)
    assert journal_file.read(OLD / "journal-0.1.0")[0].seq == 1


def test_upgraded_schema_is_that_of_a_new_ledger_and_goes_back(ledger_urls: Callable[[], str]) -> None:
    new, old = ledger_urls(), old_ledger(ledger_urls())
    migrate.upgrade(new)
    first, before = constraints(old), contents(old)
    migrate.upgrade(old)
    assert constraints(old) == constraints(new)
    execute(
        old, "UPDATE plans SET action = 'between' WHERE epoch = 3", "UPDATE reconfigurations SET action = 'between'"
    )
    with pytest.raises(IntegrityError, match="ck_plans_action"):
        execute(old, "UPDATE plans SET action = 'sideways'")
    with pytest.raises(IntegrityError, match="ck_reconfigurations_attempts"):
        execute(old, "UPDATE reconfigurations SET attempts = 0")
    moved_to(old, "0001")
    assert migrate.current(old) == "0001"
    assert constraints(old) == first
    after = contents(old)
    for table in before:
        if table not in ("plans", "reconfigurations"):
            assert after[table] == before[table], table
    actions = [row["action"] for row in after["plans"]]
    assert actions == ["start", "redo", "commit"], "what was between two iterations counts"
    assert [row["action"] for row in after["reconfigurations"]] == ["commit"]
    assert migrate.upgrade(old) == migrate.head()


def steps() -> list[str]:
    script = ScriptDirectory.from_config(migrate._config())
    return [revision.revision for revision in script.walk_revisions()][::-1]


@pytest.mark.parametrize("revision", steps()[:-1])
def test_each_step_back_and_forth_keeps_the_rows(ledger_urls: Callable[[], str], tmp_path: Path, revision: str) -> None:
    """From a full ledger of today down to an earlier schema and back: the tables are as they were, the rows those that
    the earlier schema can hold."""
    url, new = ledger_urls(), ledger_urls()
    migrate.upgrade(new)
    told = write_journal(tmp_path / "journal", story())
    with Ledger.open(url, tmp_path) as ledger:
        for record in told:
            ledger.submit(record)
        ledger.telemetry([(i, 1, rank, 0.5, None) for i in range(1, 4) for rank in range(12)])
        assert ledger.flush(30)
    before = contents(url)
    moved_to(url, revision)
    assert migrate.upgrade(url) == migrate.head()
    assert constraints(url) == constraints(new)
    after = contents(url)
    for table in ("jobs", "nodes", "workers", "iterations", "rank_reports", "failures", "reconfigurations", "events"):
        lost = {"model", "account"} if table == "jobs" else {"bytes_moved", "extra_bytes", "failed_at", "idle"}
        kept = [{name: row[name] for name in row if name not in lost} for row in before[table]]
        assert [{name: row[name] for name in row if name not in lost} for row in after[table]] == kept, table
    assert [row["layout"] for row in after["plans"]] == [row["layout"] for row in before["plans"]]


def test_reports_that_came_twice_are_one_after_the_upgrade(ledger_url: str, tmp_path: Path) -> None:
    Ledger.open(ledger_url, tmp_path).close()
    with Ledger.open(ledger_url, tmp_path) as ledger:
        ledger.submit(journal.Record(1, BEGAN, started()))
        assert ledger.flush(30)
    moved_to(ledger_url, "0006")
    values = "(job_id, iteration, epoch, rank, seconds, compute_seconds) VALUES (1, 7, 1, {}, {}, NULL)"
    execute(ledger_url, *[f"INSERT INTO rank_reports {values.format(*row)}" for row in ((3, 0.5), (3, 0.75), (2, 1.0))])
    migrate.upgrade(ledger_url)
    assert [(row["rank"], row["seconds"]) for row in rank_reports(ledger_url)] == [(2, 1.0), (3, 0.5)]


def test_jobs_that_begin_at_once_migrate_once(ledger_url: str, tmp_path: Path, records: list[journal.Record]) -> None:
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


def test_a_ledger_that_contradicts_itself_is_not_migrated(tmp_path: Path) -> None:
    url = old_ledger(url_of(tmp_path / "ledger.db"))
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
