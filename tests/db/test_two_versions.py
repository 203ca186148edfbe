"""A ledger that a newer resihp has upgraded: an older one goes on with it as far as the ledger lets it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import inspect

from resihp.db import maintenance, migrate
from resihp.db.engine import make_engine, resolve
from resihp.db.exchange import export, import_from
from resihp.db.reading.queries import Reader
from resihp.db.retention import prune
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from resihp.record import journal
from resihp.wrapper.commands import db as commands
from resihp.wrapper.sinks.deferred_ledger import DeferredLedger
from tests.db.conftest import BEGAN, Listener, story, write_journal
from tests.db.exports import files_of, sealed
from tests.db.later_schema import add_later_schema, moved_to
from tests.db.test_migrate import contents, execute, steps

NEWER = "0099"
Urls = Callable[[], str]


def newer(url: str, *, min_reader: str = "0015", min_writer: str = "0015") -> str:
    """The ledger at `url` as a later version's migration leaves it: a column and a table more."""
    migrate.upgrade(url)
    execute(
        url,
        "ALTER TABLE iterations ADD COLUMN joules FLOAT",
        "ALTER TABLE jobs ADD COLUMN region VARCHAR(8) DEFAULT 'north' NOT NULL",
        "CREATE TABLE racks (job_id INTEGER REFERENCES jobs (id) ON DELETE CASCADE, rack TEXT)",
        f"UPDATE {migrate.VERSION_TABLE} SET version_num = '{NEWER}'",
        f"UPDATE compatibility SET min_reader = '{min_reader}', min_writer = '{min_writer}'",
    )
    return url


def job_in(url: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_journal(folder / "journal", story())
    catch_up(url, folder, folder / "journal")


def iterations(url: str) -> int:
    with Reader.open(url) as reader:
        return len(reader.rows("iterations", reader.job()["id"]))


def upgraded(url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `resihp db upgrade` says."""
    capsys.readouterr()
    commands.upgrade(ledger=url)
    return capsys.readouterr().err


def test_one_that_only_added_is_read_and_written(
    ledger_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = newer(ledger_url)
    job_in(url, tmp_path)
    assert iterations(url) == 20
    assert [row["region"] for row in contents(url)["jobs"]] == ["north"]
    assert prune(url, datetime.fromtimestamp(BEGAN + 86400, UTC)) != []
    assert f"schema {NEWER}, up to date, newer than this resihp\n" in upgraded(url, capsys)
    assert migrate.current(url) == NEWER


def test_one_that_may_only_be_read(ledger_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_in(ledger_url, tmp_path)
    url = newer(ledger_url, min_writer="0098")
    before = contents(url)
    assert iterations(url) == 20
    words = rf"schema {NEWER} is newer than {migrate.head()}.*clients of 0098 and later write it.*upgrade resihp"
    after = datetime.fromtimestamp(BEGAN + 86400, UTC)
    for write in (
        lambda: Ledger.open(url, tmp_path),
        lambda: prune(url, after),
        lambda: maintenance.record(url, "n1"),
        lambda: import_from(str(tmp_path / "journal"), newer(f"sqlite:///{tmp_path / 'other.db'}", min_writer="0098")),
    ):
        with pytest.raises(LedgerError, match=words):
            write()
    assert prune(url, after, dry_run=True) != []
    assert "newer than this resihp, which may only read it" in upgraded(url, capsys)
    assert contents(url) == before


def test_one_that_may_not_even_be_read_is_refused_by_name(ledger_url: str, tmp_path: Path) -> None:
    url = newer(ledger_url, min_reader="0098", min_writer="0098")
    for use in (
        lambda: Reader.open(url),
        lambda: Ledger.open(url, tmp_path),
        lambda: migrate.upgrade(url),
        lambda: export(url, tmp_path / "out"),
    ):
        with pytest.raises(LedgerError, match=rf"schema {NEWER} is newer than {migrate.head()}.*upgrade resihp"):
            use()


@pytest.mark.parametrize("statement", ["DELETE FROM compatibility", "DROP TABLE compatibility"])
def test_one_that_does_not_say_is_refused(ledger_url: str, statement: str) -> None:
    url = newer(ledger_url)
    execute(url, statement)
    with pytest.raises(LedgerError, match="upgrade resihp"):
        Reader.open(url)


# --- a job that runs meanwhile --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_reader", "min_writer"), [("0015", "0015"), ("0015", "0098"), ("0098", "0098")], ids=["adds", "reads", "none"]
)
def test_a_job_that_runs_while_the_ledger_is_upgraded_goes_on(
    ledger_url: str, tmp_path: Path, records: list[journal.Record], min_reader: str, min_writer: str
) -> None:
    """It writes on, or says once why it does not, and all of it is there once it may."""
    heard = Listener()
    with Ledger.open(ledger_url, tmp_path, say=heard, journal_path=tmp_path / "journal") as ledger:
        for record in records[:30]:
            ledger.submit(record)
        assert ledger.flush(30)
        newer(ledger_url, min_reader=min_reader, min_writer=min_writer)
        before = contents(ledger_url)
        for record in records[30:]:
            ledger.submit(record)
        ledger.telemetry([(1, 1, 0, 0.5, 0.4)])
        if min_writer == "0098":
            for _ in range(3):
                assert not ledger.flush(0.5)
            assert contents(ledger_url) == before, "not a row is written that the newer clients do not expect"
            assert len(heard.heard) == 1
            assert f"schema {NEWER} is newer than" in heard.heard[0]
            assert "retrying, the job continues" in heard.heard[0]
            execute(ledger_url, "UPDATE compatibility SET min_reader = '0015', min_writer = '0015'")
        assert ledger.flush(30)
    assert iterations(ledger_url) == 20


@pytest.mark.parametrize("min_reader", ["0015", "0098"])
def test_a_job_that_begins_on_one_that_it_may_not_write(
    ledger_url: str, tmp_path: Path, records: list[journal.Record], min_reader: str
) -> None:
    """It trains, says once what is wrong, and its journal has everything."""
    url = newer(ledger_url, min_reader=min_reader, min_writer="0098")
    heard = Listener()
    tried: list[int] = []

    def opened() -> Ledger:
        tried.append(1)
        return Ledger.open(url, tmp_path, say=heard, journal_path=tmp_path / "journal")

    ledger = DeferredLedger(opened, tmp_path / "journal", heard, pause_s=0.0)
    for record in records:
        ledger.submit(record)
        ledger.telemetry([(1, 1, 0, 0.5, 0.4)])
    deadline = time.monotonic() + 30
    while len(tried) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not ledger.close()
    assert len([line for line in heard.heard if f"schema {NEWER} is newer" in line]) == 1, heard.heard
    execute(url, "UPDATE compatibility SET min_reader = '0015', min_writer = '0015'")
    catch_up(url, tmp_path, tmp_path / "journal")
    assert iterations(url) == 20


# --- out of it, and into it -----------------------------------------------------------------------------------------


def test_an_export_leaves_out_what_is_not_known_and_says_so(ledger_urls: Urls, tmp_path: Path) -> None:
    url, other = newer(ledger_urls()), ledger_urls()
    job_in(url, tmp_path)
    manifest = export(url, tmp_path / "out").manifest
    assert (manifest.schema, manifest.left_out) == (migrate.head(), ("iterations.joules", "jobs.region", "racks"))
    assert "joules" not in pd.read_parquet(tmp_path / "out" / "iterations").columns
    [merged] = import_from(str(tmp_path / "out"), other)
    assert (merged.outcome, merged.note) == ("new", "")
    assert iterations(other) == 20


def exported_by_a_newer(folder: Path, min_reader: str) -> None:
    """Makes of our export what a client of the newer schema would have written."""
    manifest = folder / "manifest.json"
    text = manifest.read_text().replace(f'"schema": "{migrate.head()}"', f'"schema": "{NEWER}"')
    ours = f'"min_reader": "{migrate.head()}"'
    assert NEWER in text
    assert ours in text
    manifest.write_text(text.replace(ours, f'"min_reader": "{min_reader}"'))
    for path in files_of(folder, "iterations"):
        table = pq.read_table(path, partitioning=None)
        pq.write_table(table.append_column("joules", pa.array([1.0] * len(table))), path)
    pq.write_table(pa.table({"job_uuid": ["x"]}), folder / "racks.parquet")
    sealed(folder)


def test_an_export_of_a_newer_version_is_brought_in_without_what_is_not_known(
    ledger_urls: Urls, tmp_path: Path
) -> None:
    source, target = ledger_urls(), ledger_urls()
    job_in(source, tmp_path / "job")
    export(source, tmp_path / "out")
    exported_by_a_newer(tmp_path / "out", "0015")
    [merged] = import_from(str(tmp_path / "out"), target)
    assert merged.note == "left out, newer than this resihp: iterations.joules, racks"
    assert iterations(target) == 20


def test_an_export_of_a_newer_version_that_may_not_be_read(ledger_urls: Urls, tmp_path: Path) -> None:
    source, target = ledger_urls(), ledger_urls()
    job_in(source, tmp_path / "job")
    export(source, tmp_path / "out")
    exported_by_a_newer(tmp_path / "out", "0098")
    with pytest.raises(LedgerError, match=rf"schema {NEWER} is newer than .*upgrade resihp"):
        import_from(str(tmp_path / "out"), target)


def test_a_newer_ledger_is_brought_into_one_of_ours(ledger_urls: Urls, tmp_path: Path) -> None:
    source, target = newer(f"sqlite:///{tmp_path / 'source.db'}"), ledger_urls()
    job_in(source, tmp_path / "job")
    [merged] = import_from(str(tmp_path / "source.db"), target)
    assert merged.note == "left out, newer than this resihp: iterations.joules, jobs.region, racks"
    assert iterations(target) == 20


# --- what a migration owes to older clients -------------------------------------------------------------------------


def columns(url: str) -> dict[str, dict[str, bool]]:
    """Of each table, whether a row can be put in without a column."""
    engine = make_engine(resolve(url), write=False)
    with engine.connect() as connection:
        inspector = inspect(connection)
        found = {
            table: {
                each["name"]: each["nullable"] or each["default"] is not None or bool(each.get("autoincrement") is True)
                for each in inspector.get_columns(table)
            }
            for table in inspector.get_table_names()
        }
    engine.dispose()
    return found


def oldest_writer(url: str) -> str:
    return str(contents(url)["compatibility"][0]["min_writer"])


def test_a_migration_adds_no_column_that_older_writers_would_have_to_fill(
    ledger_urls: Urls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it shuts them out: then it raises `min_writer` to its own number."""
    add_later_schema(monkeypatch, tmp_path / "migrations")
    schemas = steps()
    for earlier, revision in pairwise(schemas):
        url = ledger_urls()
        moved_to(url, earlier)
        before = columns(url)
        moved_to(url, revision)
        if oldest_writer(url) == revision:
            continue
        after = columns(url)
        assert set(before) <= set(after), "no table goes"
        for table, known in before.items():
            assert set(known) <= set(after[table]), f"{table}: no column goes"
            wanting = [name for name, may_lack in after[table].items() if name not in known and not may_lack]
            assert wanting == [], f"{table}: make them nullable, give them a server default, or raise min_writer"
