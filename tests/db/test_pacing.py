"""When rows reach a ledger: statistics in a file wait for some seconds, everything else takes them along at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import resihp.db.engine
import resihp.db.writing.pacing
from resihp.db.writer import Ledger
from resihp.record import journal
from tests.db.conftest import BEGAN, Listener, everything, held, outcome, rank_reports, started

LOST_NODE = journal.NodeLost(node="n1", reason="gone")
NEVER_S = 3600.0
LONG_S = 0.7
"""Longer than any batch of a file gathers."""


@pytest.fixture
def ledger_urls(tmp_path: Path) -> Callable[[], str]:
    """Files only: a server's batches gather for seconds in any case (`test_many_writers`)."""
    return lambda: f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def ledger(open_ledger: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger with the start of a job, where statistics wait for as long as nothing else happens."""
    monkeypatch.setattr(resihp.db.writing.pacing, "STATISTICS_S", NEVER_S)
    monkeypatch.setattr(resihp.db.engine, "BUSY_TIMEOUT_S", 0.05)
    ledger = open_ledger(say=Listener(), telemetry_rows=1000)
    ledger.submit(journal.Record(1, BEGAN, started()))
    ledger.submit(journal.Record(2, BEGAN, journal.NodeJoined(node="n1", host="here", devices=4)))
    reaches(ledger, 2)
    return ledger


def reaches(ledger: Ledger, seq: int) -> None:
    """Wait for a record without asking the writer to hurry."""
    deadline = time.monotonic() + 30
    while ledger.applied < seq:
        assert time.monotonic() < deadline, f"record {ledger.applied} is the last, not {seq}"
        time.sleep(0.01)


def commit(ledger: Ledger, *numbers: int) -> None:
    for seq in numbers:
        entry = journal.IterationCommitted(epoch=1, outcome=outcome(seq), seconds=0.5, predicted_seconds=None)
        ledger.submit(journal.Record(seq, BEGAN + seq, entry))
        ledger.telemetry([(seq, 1, 0, 0.5, 0.4)])


def test_any_other_record_takes_waiting_statistics_along(ledger: Ledger) -> None:
    commit(ledger, 3, 4, 5)
    time.sleep(LONG_S)
    assert (ledger.applied, ledger.behind) == (2, 3)
    ledger.submit(journal.Record(6, BEGAN + 6, LOST_NODE))
    commit(ledger, 7)
    reaches(ledger, 6)
    found = everything(ledger)
    assert [row["iteration"] for row in found["iterations"]][:3] == [3, 4, 5]
    assert [(row["kind"], row["seq"]) for row in found["events"]] == [
        ("JobStarted", 1),
        ("NodeJoined", 2),
        ("NodeLost", 6),
    ]
    assert [row["iteration"] for row in rank_reports(ledger.url)][:3] == [3, 4, 5]


def test_statistics_alone_wait_for_a_limited_time(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resihp.db.writing.pacing, "STATISTICS_S", LONG_S)
    began = time.monotonic()
    commit(ledger, 3)
    while time.monotonic() < began + LONG_S / 2:
        commit(ledger, *range(ledger._records.last_submitted + 1, ledger._records.last_submitted + 3))
        time.sleep(0.05)
    assert ledger.applied == 2
    reaches(ledger, 3)
    assert time.monotonic() - began >= LONG_S
    assert ledger.applied == ledger._records.last_submitted, "one batch"


@pytest.mark.parametrize("end", [Ledger.flush, Ledger.close])
def test_who_flushes_or_closes_does_not_wait_for_statistics(ledger: Ledger, end: Callable[[Ledger], bool]) -> None:
    commit(ledger, 3, 4, 5)
    assert end(ledger)
    assert len(everything(ledger)["iterations"]) == len(rank_reports(ledger.url)) == 3


def test_a_queue_that_is_half_full_waits_for_nothing(ledger: Ledger) -> None:
    commit(ledger, 3)
    ledger.telemetry([(4, 1, rank, 0.5, 0.4) for rank in range(600)])
    reaches(ledger, 3)
    assert ledger.dropped == 0


def test_statistics_are_written_once_the_database_is_back(ledger: Ledger) -> None:
    commit(ledger, 3, 4)
    with held(ledger.url):
        ledger.submit(journal.Record(5, BEGAN + 5, LOST_NODE))
        time.sleep(LONG_S)
        commit(ledger, 6, 7)
        assert ledger.applied == 2
    reaches(ledger, 7)
    assert [row["iteration"] for row in everything(ledger)["iterations"]] == [3, 4, 6, 7]
