"""A running job shares its summary while it runs, and nobody waits for the folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resihp.record import journal
from resihp.wrapper.sinks import shared_summary
from resihp.wrapper.sinks.shared_summary import SharedSummary
from resihp.wrapper.site_folders import folder as site_folder
from resihp.wrapper.site_folders.summaries import JobSummary, read
from tests.db.conftest import BEGAN, story, write_journal
from tests.waiting import until

END = journal.Record(999, BEGAN + 999, journal.JobEnded(exit_code=0, state="completed", reason=""))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(site_folder, "ADMINISTRATOR_UID", os.geteuid())
    monkeypatch.setattr(shared_summary, "PUBLISH_EVERY_S", 0.01)
    made = tmp_path / "site"
    made.mkdir()
    made.chmod(0o1733)
    return made


def running(tmp_path: Path) -> list[journal.Record]:
    records = write_journal(tmp_path / "journal", story())
    return [record for record in records if not isinstance(record.entry, journal.JobEnded)]


def wait_for(site: Path, condition: Callable[[JobSummary], bool]) -> JobSummary:
    until(lambda: any(map(condition, read(site).jobs)))
    return read(site).jobs[0]


def test_it_is_there_from_the_first_record_to_the_end(site: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first, *rest = running(tmp_path)
    listener = SharedSummary(site, "vc", "17", say=said.append)
    listener.submit(first)
    summary = wait_for(site, lambda summary: bool(summary.progress.nodes))
    assert (summary.job, summary.cluster, summary.uid) == ("17", "vc", os.geteuid())
    for record in rest:
        listener.submit(record)
    iterations = [record.entry.outcome for record in rest if isinstance(record.entry, journal.IterationCommitted)]
    summary = wait_for(site, lambda summary: len(summary.progress.recent) == min(len(iterations), 20))
    assert summary.progress.recent[-1].iteration == iterations[-1].iteration
    assert summary.event
    listener.submit(END)
    listener.close(time.monotonic() + 20)
    assert list(site.iterdir()) == []
    assert said == []


def test_a_leader_that_steps_back_leaves_it_to_its_successor(site: Path, tmp_path: Path) -> None:
    records = running(tmp_path)
    listener = SharedSummary(site, "vc", "17", say=lambda text: None, past=records)
    wait_for(site, lambda summary: True)
    listener.close(time.monotonic() + 20)
    assert len(read(site).jobs) == 1


def test_a_missing_folder_is_said_once_and_that_it_works_again(site: Path, tmp_path: Path) -> None:
    said: list[str] = []
    site.rename(tmp_path / "away")
    listener = SharedSummary(site, "vc", "17", say=said.append, past=running(tmp_path))
    until(lambda: bool(said))
    time.sleep(0.1)
    (tmp_path / "away").rename(site)
    until(lambda: len(said) > 1)
    listener.close(time.monotonic() + 20)
    assert len(said) == 2
    assert "[site] share" in said[0]
    assert said[1] == "the summary for operators is written again"
