"""A supervisor that takes over does not wait for its ledger, and nothing of the journal is missing in it later."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

import resihp.db.engine
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.record import journal_file, journal_format
from resihp.wrapper.sinks import deferred_ledger
from resihp.wrapper.sinks.deferred_ledger import DeferredLedger
from tests.db.conftest import Listener, story, write_journal


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(deferred_ledger, "FIRST_TRY_S", 0.0)
    monkeypatch.setattr(deferred_ledger, "RETRY_S", 0.05)


class Opening:
    """Opens the ledger in a folder; `refused` is set when that was in vain."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused = threading.Event()

    def __call__(self) -> Ledger:
        try:
            return Ledger.open("sqlite", self.folder, journal_path=self.folder / "journal")
        except Exception:
            self.refused.set()
            raise


def locked(folder: Path) -> sqlite3.Connection:
    """Somebody writes, and does not end: a supervisor that was stopped in the middle of it."""
    Ledger.open("sqlite", folder).close()
    other = sqlite3.connect(folder / "ledger.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def iterations(folder: Path) -> list[int]:
    with Reader.open(f"sqlite:///{folder / 'ledger.db'}") as reader:
        return [row["iteration"] for row in reader.rows("iterations", reader.job()["id"])]


def test_what_happens_before_it_is_open_is_in_it_afterwards(tmp_path: Path) -> None:
    other = locked(tmp_path)
    records = write_journal(tmp_path / "journal", story())
    (tmp_path / "journal").unlink()
    writer = journal_file.Journal(tmp_path / "journal", sync=False)
    opening, listener = Opening(tmp_path), Listener()
    ledger = DeferredLedger(opening, tmp_path / "journal", listener)
    for record in records[:30]:
        writer.copy(journal_format.encode(record))
        ledger.submit(record)
    ledger.telemetry([(1, 1, 0, 0.5, 0.4)])
    assert opening.refused.wait(20)
    other.execute("ROLLBACK")
    other.close()
    for record in records[30:]:
        writer.copy(journal_format.encode(record))
        ledger.submit(record)
    writer.close()
    assert ledger.close()
    assert iterations(tmp_path) == list(range(1, 21))
    assert len(listener.heard) == 1
    assert "tried again while the job runs" in listener.heard[0]


def test_one_that_never_opens_holds_nothing_up(tmp_path: Path) -> None:
    other = locked(tmp_path)
    records = write_journal(tmp_path / "journal", story())
    opening, listener = Opening(tmp_path), Listener()
    ledger = DeferredLedger(opening, tmp_path / "journal", listener)
    for record in records:
        ledger.submit(record)
    assert not ledger.close()
    assert "the next resihp status adds the missing records" in listener.heard[-1]
    other.execute("ROLLBACK")
    other.close()


def test_one_that_is_there_at_once_is_like_any_other(tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", story())
    ledger = DeferredLedger(Opening(tmp_path), tmp_path / "journal", Listener())
    for record in records[-3:]:
        ledger.submit(record)
    assert ledger.close()
    assert iterations(tmp_path) == list(range(1, 21))
