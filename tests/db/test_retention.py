"""Old rows go, what a job is understood by stays."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from resihp.db.reading.queries import Reader
from resihp.db.retention import prune
from resihp.db.writer import Ledger
from resihp.errors import LedgerError, UsageError
from resihp.record import journal
from tests.db.conftest import BEGAN, on_sqlite, rank_reports, write_journal
from tests.db.killed_writer import long_story

Opener = Callable[..., Ledger]
LATER = datetime.fromtimestamp(BEGAN, UTC) + timedelta(days=90)
ITERATIONS = 300
STAYS = [1, 11, 12, 300]
"""The first, the one before the failure, the failure's, the last."""


@pytest.fixture
def url(open_ledger: Opener, tmp_path: Path) -> str:
    ledger = open_ledger()
    for record in write_journal(tmp_path / "journal", long_story(ITERATIONS)):
        ledger.submit(record)
    ledger.telemetry([(i, 1, rank, 0.5, 0.4) for i in range(1, ITERATIONS + 1) for rank in range(4)])
    for i in range(10, ITERATIONS + 1, 10):
        ledger.scores(i, [(rank, 1.0, 0.1) for rank in range(2)])
    assert ledger.close(30)
    return ledger.url


def iterations(url: str) -> list[int]:
    with Reader.open(url) as reader:
        return [row["iteration"] for row in reader.rows("iterations", reader.job()["id"])]


def account(url: str) -> str:
    with Reader.open(url) as reader:
        return reader.settled(reader.job()["id"])


def others(url: str) -> dict[str, object]:
    with Reader.open(url) as reader:
        job = reader.job()["id"]
        tables = ("failures", "plans", "reconfigurations", "events", "nodes", "workers")
        return {table: reader.rows(table, job) for table in tables}


def test_without_keeping_any_what_tells_a_story_stays(url: str) -> None:
    before, told = others(url), account(url)
    [removed] = prune(url, LATER)
    assert iterations(url) == STAYS
    assert rank_reports(url) == []
    assert (removed.job, removed.iterations, removed.rank_reports) == ("local-1", ITERATIONS - len(STAYS), 1260)
    assert others(url) == before
    assert account(url) == told
    assert prune(url, LATER) == []


def test_every_nth_stays_where_asked_for(url: str) -> None:
    [removed] = prune(url, LATER, 50)
    assert iterations(url) == [1, 11, 12, *range(50, 301, 50)]
    assert {row["iteration"] for row in rank_reports(url)} == set(range(50, 301, 50))
    assert removed.rank_reports == 1260 - 6 * (4 + 2)


def test_only_what_is_older(url: str) -> None:
    with Reader.open(url) as reader:
        cut = reader.rows("iterations", reader.job()["id"])[99]["finished_at"]
    prune(url, cut)
    assert iterations(url) == [1, 11, 12, *range(100, 301)]
    assert {row["iteration"] for row in rank_reports(url)} == set(range(100, 301))
    assert prune(url, datetime.fromtimestamp(BEGAN, UTC)) == []


def test_a_dry_run_says_the_same_and_removes_nothing(url: str) -> None:
    said = prune(url, LATER, 7, dry_run=True)
    assert len(iterations(url)) == ITERATIONS
    assert len(rank_reports(url)) == 1200
    assert prune(url, LATER, 7) == said


def test_the_journal_does_not_bring_back_what_went(url: str, open_ledger: Opener, tmp_path: Path) -> None:
    prune(url, LATER)
    again = open_ledger()
    again.catch_up(tmp_path / "journal")
    assert again.close(30)
    assert iterations(url) == STAYS


def test_a_job_that_goes_on_writes_on(open_ledger: Opener, tmp_path: Path) -> None:
    records = write_journal(tmp_path / "journal", long_story(ITERATIONS))
    ledger = open_ledger(journal_path=tmp_path / "journal")
    for record in records[:200]:
        ledger.submit(record)
    assert ledger.flush(30)
    prune(ledger.url, LATER)
    for record in records[200:]:
        ledger.submit(record)
    assert ledger.close(30)
    left = iterations(ledger.url)
    assert left[:3] == [1, 11, 12]
    assert left[-1] == ITERATIONS
    committed = [r.entry.outcome.iteration for r in records[200:] if isinstance(r.entry, journal.IterationCommitted)]
    assert left[4:] == committed


@on_sqlite
def test_the_file_shrinks(url: str) -> None:
    file = Path(url.removeprefix("sqlite:///"))
    before = file.stat().st_size
    prune(url, LATER)
    assert file.stat().st_size < before


@on_sqlite
def test_refusals(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--keep-every 0: at least 1"):
        prune(url, LATER, 0)
    with pytest.raises(LedgerError, match="no such file"):
        prune(f"sqlite:///{tmp_path}/none.db", LATER)
