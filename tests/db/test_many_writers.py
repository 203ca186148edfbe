"""Hundreds of jobs on one server: none holds a connection that it does not use, and who finds none free tries again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psycopg
import pytest
from sqlalchemy import text

import resihp.db.engine
import resihp.db.writing.pacing
from resihp.db import migrate
from resihp.db.engine import make_engine, resolve
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.db.writing.pacing import Pacing
from resihp.errors import LedgerError
from resihp.record import journal
from resihp.wrapper.commands import db as commands
from tests.db.conftest import Listener, held, rank_reports, story, write_journal
from tests.db.later_schema import LATER, add_later_schema, moved_to
from tests.db.postgres import FAST, Server, missing

WRITERS, CONNECTIONS = 40, 8


def connections(server: Server, url: str) -> int:
    """How many the database of `url` has."""
    name = resolve(url).database
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
    with psycopg.connect(server.conninfo()) as connection:
        row = connection.execute(query, (name,)).fetchone()
    assert row is not None
    return int(row[0])


def none_left(server: Server, url: str) -> bool:
    """A connection that was closed is seen for a moment longer."""
    deadline = time.monotonic() + 10
    while (left := connections(server, url)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left == 0


def of_job(name: str, folder: Path) -> list[journal.Record]:
    told = (
        (msgspec.structs.replace(entry, job=name) if isinstance(entry, journal.JobStarted) else entry, at)
        for entry, at in story()
    )
    return write_journal(folder / f"{name}.journal", told)


def test_between_batches_a_writer_has_no_connection(
    postgres_server: Server, postgres_url: str, tmp_path: Path, records: list[journal.Record]
) -> None:
    with Ledger.open(postgres_url, tmp_path) as ledger:
        for record in records[:30]:
            ledger.submit(record)
        assert ledger.flush(30)
        assert none_left(postgres_server, postgres_url)
        for record in records[30:]:
            ledger.submit(record)
    with Reader.open(postgres_url) as reader:
        assert len(reader.rows("iterations", reader.job()["id"])) == 20


def test_batches_to_a_server_gather_and_who_flushes_waits_for_none(
    postgres_url: str, tmp_path: Path, records: list[journal.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.db.writing.pacing, "SERVER_BATCH_S", (3600.0, 3600.0))
    began = time.monotonic()
    ledger = Ledger.open(postgres_url, tmp_path)
    for record in records[:30]:
        ledger.submit(record)
    assert ledger.flush(30)
    for record in records[30:]:
        ledger.submit(record)
    assert ledger.close(30)
    assert time.monotonic() - began < 60
    assert ledger.applied == records[-1].seq


def test_a_batch_does_not_gather_until_telemetry_is_dropped(
    postgres_url: str, tmp_path: Path, records: list[journal.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.db.writing.pacing, "SERVER_BATCH_S", (3600.0, 3600.0))
    with Ledger.open(postgres_url, tmp_path, telemetry_rows=1000) as ledger:
        ledger.submit(records[0])
        ledger.telemetry([(1, 1, rank, 0.5, 0.4) for rank in range(600)])
        deadline = time.monotonic() + 30
        while not ledger.applied:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert ledger.dropped == 0
    assert len(rank_reports(postgres_url)) == 600


def test_a_server_that_is_slow_is_asked_more_seldom() -> None:
    pacing = Pacing(is_server=True)
    assert all(2.0 <= pacing.gather_s() <= 5.0 for _ in range(100))
    pacing.took_s = 0.5
    waits_s = [pacing.gather_s() for _ in range(100)]
    assert 0.5 / (sum(waits_s) / 100) < 0.06
    assert max(waits_s) - min(waits_s) > 5.0, "hundreds do not come together"
    pacing.took_s = 3600.0
    assert max(pacing.gather_s() for _ in range(100)) <= 45.0


def test_more_writers_than_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing():
        pytest.skip(why)
    monkeypatch.setattr(resihp.db.writing.pacing, "SERVER_BATCH_S", (0.2, 0.5))
    with Server(
        f"{FAST} -c max_connections={CONNECTIONS} -c superuser_reserved_connections=0 -c max_wal_senders=0"
    ) as (server):
        url = server.new_database()
        migrate.upgrade(url)
        ledgers: list[Ledger] = []
        listener = Listener()
        while len(ledgers) < WRITERS:
            ledgers.append(Ledger.open(url, tmp_path, say=listener))
        told = [of_job(f"job-{number}", tmp_path) for number in range(WRITERS)]
        for part in range(5):
            for ledger, records in zip(ledgers, told, strict=True):
                for record in records[part * 15 : part * 15 + 15]:
                    ledger.submit(record)
            time.sleep(0.3)
        closing = [threading.Thread(target=ledger.close, args=(60.0,)) for ledger in ledgers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        assert [ledger.applied for ledger in ledgers] == [records[-1].seq for records in told]
        with Reader.open(url) as reader:
            jobs = reader.jobs()
            assert len(jobs) == WRITERS
            assert {len(reader.rows("iterations", job["id"])) for job in jobs} == {20}
        assert all("too many clients" in line or "written again" in line for line in listener.heard), listener.heard


def test_a_reader_that_finds_a_server_full_waits_for_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if why := missing():
        pytest.skip(why)
    with Server(f"{FAST} -c max_connections=3 -c superuser_reserved_connections=0 -c max_wal_senders=0") as server:
        url = server.new_database()
        migrate.upgrade(url)
        taken = [psycopg.connect(server.conninfo()) for _ in range(3)]
        monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.0)
        with pytest.raises(LedgerError, match=r"too many clients already; .* try again, or raise its max_connections"):
            Reader.open(url)
        monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 60.0)
        waited = threading.Event()

        def until_one_is_free(_: float) -> None:
            if not waited.is_set():
                taken.pop().close()
                waited.set()

        monkeypatch.setattr(
            resihp.db.engine, "time", SimpleNamespace(monotonic=time.monotonic, sleep=until_one_is_free)
        )
        Reader.open(url).close()
        assert waited.is_set()
        for connection in taken:
            connection.close()


def test_a_reader_has_a_connection_while_it_asks(
    postgres_server: Server, postgres_url: str, tmp_path: Path, records: list[journal.Record]
) -> None:
    with Ledger.open(postgres_url, tmp_path) as ledger:
        for record in records:
            ledger.submit(record)
    reader = Reader.open(postgres_url)
    assert none_left(postgres_server, postgres_url)
    assert len(reader.rows("iterations", reader.job()["id"])) == 20
    assert none_left(postgres_server, postgres_url), "a notebook that is left open"
    with reader:
        assert len(reader.jobs()) == 1
        assert connections(postgres_server, postgres_url) == 1, "many questions in a row"
    assert none_left(postgres_server, postgres_url)


# --- behind a pooler of transactions --------------------------------------------------------------------------------


def test_nothing_of_ours_stays_on_a_connection_that_others_get(postgres_url: str) -> None:
    """pgbouncer hands a server's connection to somebody else after each transaction, as it was left."""
    engine = make_engine(resolve(postgres_url), write=True)
    with engine.connect() as connection:
        for _ in range(10):
            with connection.begin():
                assert connection.execute(text("SHOW lock_timeout")).scalar_one() == "5s"
        bare = connection.connection.driver_connection
        assert bare is not None
        bare.autocommit = True
        assert bare.execute("SHOW lock_timeout").fetchone() == ("0",)
        assert bare.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        assert bare.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)
        bare.autocommit = False
    engine.dispose()


# --- one user's upgrade ---------------------------------------------------------------------------------------------


@contextmanager
def read_for_long(url: str) -> Iterator[None]:
    """Somebody's transaction, that looks at a table and does not end."""
    engine = make_engine(resolve(url), write=False)
    with engine.begin() as connection:
        connection.execute(text("SELECT count(*) FROM failures"))
        yield
    engine.dispose()


def test_an_upgrade_waits_in_turns_between_which_others_write(
    postgres_url: str, tmp_path: Path, records: list[journal.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resihp.db.engine.MIGRATION_LOCK_S", 0.2)
    monkeypatch.setattr(migrate, "ATTEMPT_PAUSE_S", 0.1)
    migrate.upgrade(postgres_url)
    add_later_schema(monkeypatch, tmp_path / "migrations")
    heard = Listener()
    wrong: list[BaseException] = []

    def upgrade() -> None:
        try:
            migrate.upgrade(postgres_url, heard)
        except BaseException as error:  # noqa: BLE001 - a thread's error is the test's
            wrong.append(error)

    thread = threading.Thread(target=upgrade)
    with read_for_long(postgres_url):
        thread.start()
        deadline = time.monotonic() + 30
        while not heard.heard:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        engine = make_engine(resolve(postgres_url), write=True)
        with engine.begin() as connection:  # raises after 5 s
            connection.execute(text("SELECT count(*) FROM failures"))
        engine.dispose()
    thread.join()
    assert wrong == []
    assert migrate.current(postgres_url) == migrate.head()
    assert "waiting for database user resihp (pid" in heard.heard[0]


def test_an_upgrade_that_is_never_its_turn_says_whom_it_waited_for(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resihp.db.engine.MIGRATION_LOCK_S", 0.1)
    monkeypatch.setattr(migrate, "ATTEMPT_PAUSE_S", 0.0)
    monkeypatch.setattr(migrate, "UPGRADE_ATTEMPTS", 3)
    migrate.upgrade(postgres_url)
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    with (
        read_for_long(postgres_url),
        pytest.raises(migrate.LedgerError, match=r"unchanged, .* locked by database user resihp \(pid \d+, idle in tr"),
    ):
        commands.upgrade(ledger=postgres_url)
    assert capsys.readouterr().err.count("waiting for database user resihp") == 1
    assert migrate.current(postgres_url) == known


def test_a_job_upgrades_no_server(
    postgres_url: str, tmp_path: Path, records: list[journal.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.upgrade(postgres_url)
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    words = f"schema {known} is older than {LATER}; run resihp db upgrade --ledger {resolve(postgres_url)}"
    for opener in (
        lambda: Ledger.open(postgres_url, tmp_path),
        lambda: catch_up(postgres_url, tmp_path, tmp_path / "journal"),
    ):
        with pytest.raises(migrate.LedgerError) as caught:
            opener()
        assert words in str(caught.value)
    assert migrate.current(postgres_url) == known


def test_a_job_that_finds_its_tables_older_in_mid_run_says_so_and_goes_on(
    postgres_url: str, tmp_path: Path, records: list[journal.Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")
    heard = Listener()
    with Ledger.open(postgres_url, tmp_path, say=heard, journal_path=tmp_path / "journal") as ledger:
        for record in records[:30]:
            ledger.submit(record)
        assert ledger.flush(30)
        moved_to(postgres_url, known)
        for record in records[30:]:
            ledger.submit(record)
        deadline = time.monotonic() + 30
        while not any("run resihp db upgrade" in line for line in heard.heard):
            ledger.flush(0.1)
            assert time.monotonic() < deadline, heard.heard
        migrate.upgrade(postgres_url)
        assert ledger.flush(30)
    assert "written again" in heard.heard[-1]
    with held(postgres_url):
        pass
