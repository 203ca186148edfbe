"""Rank 0's log, followed until the job says what it trains."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from resihp.record.journal import AnyEntry, ModelDeclared, Record, WorkerStarted
from resihp.wrapper.output import tail
from resihp.wrapper.output.first_rank import MAX_LINES, FirstRank
from tests.resihp.controller.direct import DECLARE
from tests.waiting import until

STARTED = WorkerStarted(rank=0, node="n1", device=0, pid=1, epoch=0)


def records(*entries: AnyEntry) -> list[Record]:
    return [Record(seq, 0.0, entry) for seq, entry in enumerate(entries, 1)]


def test_lines_are_handed_on_as_they_come_and_the_last_ones_at_the_end(tmp_path: Path) -> None:
    shown: list[str] = []
    first = FirstRank(tmp_path, lambda lines, left_out: shown.extend(lines))
    other = WorkerStarted(rank=1, node="n1", device=1, pid=2, epoch=0)
    for record in records(other, STARTED):
        first.submit(record)
    (tmp_path / "n1.rank1.log").write_text("not this\n")
    log = tmp_path / "n1.rank0.log"
    log.write_text("one\ntw")
    until(lambda: shown == ["one"])
    with log.open("a") as file:
        file.write("o\nthree")
    first.close(time.monotonic() + 5)
    assert shown == ["one", "two", "three"]


def test_nothing_more_is_handed_on_once_the_job_says_what_it_trains(tmp_path: Path) -> None:
    shown: list[str] = []
    first = FirstRank(tmp_path, lambda lines, left_out: shown.extend(lines))
    for record in records(STARTED, ModelDeclared(declare=DECLARE)):
        first.submit(record)
    (tmp_path / "n1.rank0.log").write_text("iteration 1\n")
    first.close(time.monotonic() + 5)
    assert shown == []


def test_of_a_progress_bar_how_far_it_is_is_handed_on_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one line for hours."""
    monkeypatch.setattr(tail, "REDRAWN_EVERY_S", 0.0)
    shown: list[str] = []
    first = FirstRank(tmp_path, lambda lines, left_out: shown.extend(lines))
    log = tmp_path / "n1.rank0.log"
    log.write_text("loading")
    for record in records(STARTED):
        first.submit(record)
    with log.open("a") as file:
        file.write("\r 10%\r 20%")
    until(lambda: shown == [" 20%"])
    with log.open("a") as file:
        file.write("\r 30%")
    until(lambda: shown == [" 20%", " 30%"])
    with log.open("a") as file:
        file.write("\r100%\nstep 1\n")
    first.close(time.monotonic() + 5)
    assert shown == [" 20%", " 30%", "100%", "step 1"]


def test_a_successor_goes_on_with_what_comes(tmp_path: Path) -> None:
    shown: list[str] = []
    log = tmp_path / "n1.rank0.log"
    log.write_text("before\n")
    first = FirstRank(tmp_path, lambda lines, left_out: shown.extend(lines), records(STARTED))
    until(lambda: first.follows)
    with log.open("a") as file:
        file.write("after\n")
    first.close(time.monotonic() + 5)
    assert shown == ["after"]


def test_of_very_many_lines_the_last_are_handed_on_and_the_others_counted(tmp_path: Path) -> None:
    shown: list[tuple[int, str, int]] = []
    (tmp_path / "n1.rank0.log").write_text("".join(f"{number}\n" for number in range(MAX_LINES + 5)))
    first = FirstRank(tmp_path, lambda lines, left_out: shown.append((len(lines), lines[0], left_out)))
    for record in records(STARTED):
        first.submit(record)
    first.close(time.monotonic() + 5)
    assert shown == [(MAX_LINES, "5", 5)]
