"""What is in the journal is in the ledger in the end: whatever kills the writer, and whatever its database does."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import resihp.db.engine
from resihp.db import migrate
from resihp.db.engine import file_of, make_engine, resolve
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import LedgerError
from resihp.record import journal, journal_file
from tests.db.conftest import Listener, everything, held, on_sqlite, write_journal
from tests.db.killed_writer import long_story, work
from tests.db.postgres import Server, missing

Opener = Callable[..., Ledger]
ITERATIONS = 300
LONG_S, DEADLINE_S = 60.0, 60.0


class Heard(Listener):
    """Sets `failed` at the first warning, `over` when the ledger is written again."""

    def __init__(self) -> None:
        super().__init__()
        self.failed, self.over = threading.Event(), threading.Event()

    def __call__(self, text: str) -> None:
        super().__call__(text)
        (self.over if "written again" in text else self.failed).set()

    def wait_for_failure(self, ledger: Ledger) -> None:
        """The writer is asked to write at once: after a slow batch it may gather the next one for 45 s."""
        assert not ledger.flush(0.1)
        assert self.failed.wait(30)


def whole(url: str, path: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    """The ledger of a writer that nobody disturbed."""
    write_journal(path, long_story(iterations))
    catch_up(url, path.parent, path)
    return rows(url)


def rows(url: str) -> dict[str, Any]:
    with Ledger.open(url, Path("/")) as ledger:
        found = everything(ledger)
    for name in ("id", "telemetry_dropped"):
        del found["job"][name]
    return found


# --- killed -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Any:
    """Processes that have imported everything when they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.db.killed_writer"])
    return context


def kill_at_random(processes: Any, url: str, folder: Path, seed: int, iterations: int) -> tuple[bool, int]:
    """Let the writer run and kill it; then the journal has what was told, the ledger a state between two records.

    Whether the story goes on, and how many records the ledger lacks that the journal has. One writer in ten dies while
    it opens, the others a few records or some time after their first record.
    """
    chance = random.Random(seed)
    told, telling = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(url, str(folder), iterations, telling))
    process.start()
    telling.close()
    kind = chance.choices(("opening", "records", "time"), (1, 5, 4))[0]
    enough = chance.randrange(1, 40) if kind == "records" else 10**9
    acknowledged = 0
    until = time.monotonic() + (chance.uniform(0.0, 0.5) if kind == "opening" else DEADLINE_S)
    with suppress(EOFError):
        while enough and (left := until - time.monotonic()) > 0:
            if told.poll(left):
                seq = told.recv()
                if kind == "time" and not acknowledged:
                    until = time.monotonic() + chance.uniform(0.0, 0.5)
                enough = 0 if seq == 0 else enough - 1
                acknowledged = max(acknowledged, seq)
    over = not process.is_alive()
    process.kill()
    process.join()
    with suppress(EOFError):
        while told.poll():
            acknowledged = max(acknowledged, told.recv())
    told.close()
    path = folder / "journal"
    known = journal_file.read(path) if path.exists() else []
    assert (known[-1].seq if known else 0) >= acknowledged
    applied = applied_between_two_records(url, known)
    return not over, (known[-1].seq if known else 0) - applied


def applied_between_two_records(url: str, known: list[journal.Record]) -> int:
    """The database opens, is sound, and has exactly the records up to `journal_seq`, which is returned."""
    file = file_of(resolve(url))
    if file is not None:
        if not file.exists():
            return 0
        connection = sqlite3.connect(file)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
    if migrate.current(url) is None:
        return 0
    with Reader.open(url) as reader:
        jobs = reader.jobs()
        if not jobs:
            return 0
        [job] = jobs
        applied = reader.applied(job["id"])
        assert applied <= known[-1].seq
        in_it = [record for record in known if record.seq <= applied]
        iterations = [r for r in in_it if isinstance(r.entry, journal.IterationCommitted)]
        assert [row["seq"] for row in reader.rows("events", job["id"])] == [
            record.seq for record in in_it if record not in iterations
        ]
        assert len(reader.rows("iterations", job["id"])) == len(iterations)
    return applied


def die_often(processes: Any, ledger_urls: Callable[[], str], folder: Path, moments: int, iterations: int) -> None:
    url = ledger_urls()
    lacking: list[int] = []
    for moment in range(moments):
        goes_on, lacks = kill_at_random(processes, url, folder, moment, iterations)
        assert goes_on, f"the story was over after {moment} of {moments} moments"
        lacking.append(lacks)
    assert any(lacking), "nobody was killed between the journal and the ledger"
    told, telling = processes.Pipe(duplex=False)
    last = processes.Process(target=work, args=(url, str(folder), iterations, telling))
    last.start()
    telling.close()
    with suppress(EOFError):
        while told.recv():
            pass
    last.join()
    (folder / "whole").mkdir()
    assert rows(url) == whole(ledger_urls(), folder / "whole" / "journal", iterations)


def test_killed_at_random_moments_it_loses_no_record(
    processes: Any, ledger_urls: Callable[[], str], tmp_path: Path
) -> None:
    die_often(processes, ledger_urls, tmp_path, 4, 2_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_200_random_moments_it_loses_no_record(
    processes: Any, ledger_urls: Callable[[], str], tmp_path: Path
) -> None:
    die_often(processes, ledger_urls, tmp_path, 200, 20_000)


# --- the server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    """One of the test's own, whose files are as safe as PostgreSQL makes them."""
    if why := missing():
        pytest.skip(why)
    with Server("-c fsync=on") as started:
        yield started


def test_postgresql_restarted_in_mid_run(server: Server, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    heard = Heard()
    ledger = Ledger.open(server.new_database(), tmp_path, say=heard)
    for record in records[:200]:
        ledger.submit(record)
    assert ledger.flush(30)
    server.stop(keep=True)
    for record in records[200:300]:
        ledger.submit(record)
    ledger.telemetry([(1, 1, rank, 0.5, 0.4) for rank in range(12)])
    heard.wait_for_failure(ledger)
    server.start()
    for record in records[300:]:
        ledger.submit(record)
    while not ledger.flush(0.5):  # each asks the writer to try at once
        assert not heard.over.is_set()
    assert ledger.close(30)
    assert heard.over.is_set()
    assert "***" not in heard.heard[0], "there is no password in this URL"
    assert rows(ledger.url) == whole(server.new_database(), tmp_path / "whole.journal")


def test_a_database_that_was_dropped_and_made_again(server: Server, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    url = server.new_database()
    ledger = Ledger.open(url, tmp_path, say=Heard(), journal_path=tmp_path / "journal")
    for record in records[:200]:
        ledger.submit(record)
    assert ledger.flush(30)
    engine = make_engine(resolve(url), write=True)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()
    for record in records[200:]:
        ledger.submit(record)
    assert ledger.close(30)
    assert rows(url) == whole(server.new_database(), tmp_path / "whole.journal")


# --- the file -----------------------------------------------------------------------------------------------------


@on_sqlite
@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("later", [True, False], ids=["and goes on", "and ends"])
def test_a_file_that_was_removed_is_made_anew(
    open_ledger: Opener, tmp_path: Path, ledger_urls: Callable[[], str], what: str, later: bool
) -> None:
    (tmp_path / "job").mkdir()
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    heard = Heard()
    url = f"sqlite:///{tmp_path / 'job' / 'ledger.db'}"
    ledger = open_ledger(url=url, say=heard, journal_path=tmp_path / "journal")
    for record in records[:200] if later else records:
        ledger.submit(record)
    assert ledger.flush(30)
    for file in (tmp_path / "job").iterdir():
        file.unlink()
    if what == "folder":
        (tmp_path / "job").rmdir()
    for record in records[200:]:
        ledger.submit(record)
    assert ledger.close(30)
    assert ["its file was removed" in text for text in heard.heard] == [True]
    assert rows(url) == whole(ledger_urls(), tmp_path / "whole.journal")


@on_sqlite
def test_a_file_that_was_put_back_from_a_backup_is_brought_forward(
    open_ledger: Opener, tmp_path: Path, ledger_url: str, ledger_urls: Callable[[], str]
) -> None:
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    with open_ledger() as before:
        for record in records[:100]:
            before.submit(record)
    backup = (tmp_path / "ledger.db").read_bytes()
    ledger = open_ledger(journal_path=tmp_path / "journal", say=Heard())
    ledger.submit(records[0])
    for record in records[100:200]:
        ledger.submit(record)
    assert ledger.flush(30)
    (tmp_path / "backup").write_bytes(backup)
    (tmp_path / "backup").replace(tmp_path / "ledger.db")
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (tmp_path / name).unlink()
    for record in records[200:]:
        ledger.submit(record)
    assert ledger.close(30)
    assert rows(ledger_url) == whole(ledger_urls(), tmp_path / "whole.journal")


@on_sqlite
def test_a_corrupt_file_is_refused_with_the_way_out(open_ledger: Opener, tmp_path: Path, ledger_url: str) -> None:
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    with open_ledger() as ledger:
        for record in records:
            ledger.submit(record)
    file = tmp_path / "ledger.db"
    content = bytearray(file.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    file.write_bytes(content)
    with pytest.raises(LedgerError, match=r"malformed; move the file away; resihp db import JOURNAL --ledger sqlite:"):
        catch_up(ledger_url, tmp_path, tmp_path / "journal")


# --- the disk -----------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own. Skips the test where it cannot be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "resihp-test", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up_and_make_room(url: str, disk: Path, folder: Path) -> dict[str, Any]:
    """While a ledger is written to, its disk is full for a time; what it has in the end."""
    records = write_journal(folder / "journal", long_story(ITERATIONS))
    heard = Heard()
    ledger = Ledger.open(url, disk, say=heard)
    for record in records[:100]:
        ledger.submit(record)
    assert ledger.flush(30)
    with (disk / "other").open("wb", buffering=0) as other:
        while shutil.disk_usage(disk).free:
            other.write(bytes(1 << 12))
    for record in records[100:]:
        ledger.submit(record)
    heard.wait_for_failure(ledger)
    assert any(words in heard.heard[0] for words in ("full", "I/O", "No space left")), heard.heard
    (disk / "other").unlink()
    assert ledger.close(30)
    assert heard.over.is_set()
    return rows(url)


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        found = fill_up_and_make_room(f"sqlite:///{disk / 'ledger.db'}", disk, tmp_path)
    assert found == whole(f"sqlite:///{tmp_path / 'whole.db'}", tmp_path / "whole.journal")


def test_a_full_disk_of_a_server(server: Server, tmp_path: Path) -> None:
    """Its tables' disk; a server whose write-ahead log has no room stops, and that is a restart."""
    with small_disk(server.folder / "disk", 32) as disk:
        found = fill_up_and_make_room(server.new_database(disk), disk, tmp_path)
    assert found == whole(f"sqlite:///{tmp_path / 'whole.db'}", tmp_path / "whole.journal")


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    """As with a quota: every write beyond a file's present size fails, for a while."""
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    heard = Heard()
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = Ledger.open(url, tmp_path, say=heard)
    for record in records[:100]:
        ledger.submit(record)
    assert ledger.flush(30)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "ledger.db-wal").stat().st_size, hard))
    try:
        for record in records[100:]:
            ledger.submit(record)
        heard.wait_for_failure(ledger)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ledger.close(30)
    assert rows(url) == whole(f"sqlite:///{tmp_path / 'whole.db'}", tmp_path / "whole.journal")


# --- locked -------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_locked_for_a_minute(open_ledger: Opener, ledger_urls: Callable[[], str], tmp_path: Path) -> None:
    """Nobody who hands over waits meanwhile."""
    records = write_journal(tmp_path / "journal", long_story(3 * ITERATIONS))
    heard = Heard()
    ledger = open_ledger(say=heard)
    for record in records[:100]:
        ledger.submit(record)
    assert ledger.flush(30)
    longest_s = 0.0
    with held(ledger.url):
        until = time.monotonic() + LONG_S
        for record in records[100:]:
            began = time.monotonic()
            ledger.submit(record)
            ledger.telemetry([(1, 1, rank, 0.5, 0.4) for rank in range(12)])
            longest_s = max(longest_s, time.monotonic() - began)
            time.sleep(LONG_S / len(records))
        time.sleep(max(until - time.monotonic(), 0.0))
        assert heard.failed.is_set()
    assert longest_s < 0.1
    assert ledger.close(60)
    assert rows(ledger.url) == whole(ledger_urls(), tmp_path / "whole.journal", 3 * ITERATIONS)


def test_a_server_that_waits_for_a_lock_says_so(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    heard = Heard()
    records = write_journal(tmp_path / "journal", long_story(30))
    with Ledger.open(postgres_url, tmp_path, say=heard) as ledger, held(postgres_url):
        ledger.submit(records[0])
        heard.wait_for_failure(ledger)
    assert "canceling statement due to lock timeout; retrying, the job continues" in heard.heard[0]
