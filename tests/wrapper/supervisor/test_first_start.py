"""A first start: whatever is the matter with a server's ledger, training begins, and the ledger has all of it later."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import resihp.db.engine
from resihp.db import migrate
from resihp.db.engine import resolve
from resihp.db.reading.queries import Reader
from resihp.errors import LedgerError
from resihp.record import journal_file
from resihp.wrapper.job_folder import Job, create_local_job
from resihp.wrapper.sinks import deferred_ledger
from resihp.wrapper.supervisor import process
from tests.db.conftest import story
from tests.db.later_schema import add_later_schema
from tests.db.postgres import Server, missing
from tests.db.test_migrate import NEWER, execute
from tests.wrapper.run_requests import run_request

SOON_S = 5.0
"""How long a supervisor may take to begin, imports included."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    with Server() as started:
        yield started


@pytest.fixture
def job(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(deferred_ledger, "MAX_RETRY_S", 0.2)
    monkeypatch.setattr(deferred_ledger, "RETRY_S", 0.1)
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.2)
    return create_local_job()


class Begun:
    """Stands for `supervise_with`: a job that journals its story, and waits for what the test does in mid-run."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile = meanwhile
        self.began_s = 0.0
        self.complete = False

    async def __call__(self, request: Any, controller: Any, ledger: Any, view: Any, **others: Any) -> int:
        self.began_s = time.monotonic() - self.since
        writer = journal_file.Journal(others["journal"], sync=False)
        for number, (entry, at) in enumerate(story()):
            ledger.submit(writer.append(entry, at))
            if number == 20:
                await asyncio.to_thread(self.meanwhile)
        writer.close()
        self.complete = await asyncio.to_thread(ledger.close)
        return 0

    def run(self, job: Job, url: str, monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(process, "supervise_with", self)
        self.since = time.monotonic()
        request = run_request(job.name, job.folder, ledger_url=url)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return asyncio.run(process.supervise(request, listener, None, job.journal_file))


def until(heard: Callable[[], bool]) -> Callable[[], None]:
    """Waits for it."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not heard():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait


class Screen:
    """Stands for the terminal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.told: list[str] = []
        SCREENS.append(self)

    def say(self, kind: str, text: str) -> None:
        self.told.append(text)


SCREENS: list[Screen] = []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """What the user was told."""
    SCREENS.clear()
    monkeypatch.setattr("resihp.wrapper.sinks.terminal.LiveView", Screen)
    return lambda: "\n".join(SCREENS[-1].told) if SCREENS else ""


def iterations(url: str) -> list[int]:
    with Reader.open(url) as reader:
        return [row["iteration"] for row in reader.rows("iterations", reader.job()["id"])]


def test_a_server_that_is_down_and_comes_up(job: Job, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing():
        pytest.skip(why)
    server = Server()
    url = server.url("postgres")
    begun = Begun(lambda: (until(lambda: "tried again" in told())(), server.start()))  # type: ignore[arg-type]
    try:
        assert begun.run(job, url, monkeypatch) == 0
        assert job.read().ledger == resolve(url).render_as_string(hide_password=False)
        assert begun.began_s < SOON_S
        assert "is the server up" in told()
        assert begun.complete
        assert iterations(url) == list(range(1, 21))
    finally:
        server.stop()


def test_an_empty_database_is_made(job: Job, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.new_database()
    begun = Begun(lambda: None)
    assert begun.run(job, url, monkeypatch) == 0
    assert begun.complete
    assert iterations(url) == list(range(1, 21))


def test_a_schema_that_is_older_waits_for_its_administrator(
    job: Job, server: Server, told: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.new_database()
    migrate.upgrade(url)
    known = migrate.head()
    add_later_schema(monkeypatch, tmp_path / "migrations")

    def operator() -> None:
        until(lambda: f"run resihp db upgrade --ledger {resolve(url)}" in told())()
        assert migrate.current(url) == known, "a job does not change everybody's ledger"
        migrate.upgrade(url)

    begun = Begun(operator)
    assert begun.run(job, url, monkeypatch) == 0
    assert begun.began_s < SOON_S
    assert told().count("tried again") == 1
    assert begun.complete
    assert iterations(url) == list(range(1, 21))


def test_a_schema_that_is_newer_ends_no_job(
    job: Job, server: Server, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.new_database()
    migrate.upgrade(url)
    execute(url, *NEWER)
    begun = Begun(until(lambda: "schema 9999 is newer" in told()))
    assert begun.run(job, url, monkeypatch) == 0
    assert not begun.complete
    assert "the next resihp status adds the missing records" in told()
    assert len(journal_file.read(job.journal_file)) > 20


def test_a_server_that_is_full(job: Job, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    if why := missing():
        pytest.skip(why)
    with Server("-c max_connections=5 -c superuser_reserved_connections=0 -c max_wal_senders=0") as full:
        url = full.new_database()
        others = [psycopg.connect(full.conninfo()) for _ in range(5)]

        def leave() -> None:
            until(lambda: "too many clients" in told())()
            for other in others:
                other.close()

        begun = Begun(leave)
        assert begun.run(job, url, monkeypatch) == 0
        assert begun.began_s < SOON_S
        assert "all its connections are in use" in told()
        assert begun.complete
        assert iterations(url) == list(range(1, 21))


def test_a_server_that_hangs(job: Job, told: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(deferred_ledger, "CLOSE_TIMEOUT_S", 0.2)
    came = threading.Event()
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(folder / ".s.PGSQL.5432"))
        mute.listen()

        def accept() -> None:
            connection, _ = mute.accept()
            came.set()
            over.wait(30)
            connection.close()

        begun, over = Begun(lambda: None), threading.Event()
        listening = threading.Thread(target=accept, daemon=True)
        listening.start()
        assert begun.run(job, f"postgresql://me@/x?host={folder}", monkeypatch) == 0
        assert begun.began_s < SOON_S
        assert came.wait(10)
        over.set()
        listening.join()
    shutil.rmtree(folder)
    assert not begun.complete


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://me:secret@host/x", "driver mysql is not known here"),
        ("nonsense", "not a database's URL"),
        ("postgresql://me:secret@host/x?sslmodus=on", 'invalid connection option "sslmodus"'),
    ],
)
def test_a_url_that_can_never_work_is_refused_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch, url: str, words: str
) -> None:
    pytest.importorskip("psycopg")
    begun = Begun(lambda: None)
    with pytest.raises(LedgerError) as caught:
        begun.run(job, url, monkeypatch)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert begun.began_s == 0, "nothing was started"


def test_without_the_driver_it_is_refused_at_once(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'")

    monkeypatch.setattr(resihp.db.engine, "create_engine", without)
    with pytest.raises(LedgerError, match="psycopg is not installed; pip install"):
        Begun(lambda: None).run(job, "postgresql://me@host/x", monkeypatch)


def test_sqlite_is_opened_before_training(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{job.folder / 'ledger.db'}"
    begun = Begun(lambda: None)
    assert begun.run(job, "sqlite", monkeypatch) == 0
    assert job.read().ledger == url
    assert begun.complete
    assert iterations(url) == list(range(1, 21))
