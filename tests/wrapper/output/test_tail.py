"""Ends of files that grow, shrink, go, and have no ends of lines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from resihp.wrapper.output import tail
from resihp.wrapper.output.tail import GrowingFiles, last_lines


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "n1.rank0.log"


@pytest.mark.parametrize(
    ("content", "wanted", "found"),
    [
        (b"", 5, []),
        (b"one", 5, ["one"]),
        (b"one\n", 5, ["one"]),
        (b"one\ntwo\nthree\n", 2, ["two", "three"]),
        (b"one\ntwo\nthr", 2, ["two", "thr"]),
        (b"one\n\n\n", 2, ["", ""]),
        (b"one\r\ntwo\r\n", 5, ["one", "two"]),
        (b"one\n\r0%\r50%\r100%\ntwo\n", 5, ["one", "100%", "two"]),
        (b"one\n 0%\r50%\r", 5, ["one", "50%"]),
        (b"one\xff\n", 5, ["one\ufffd"]),
        (b"a\x0bb\x1cc\n", 5, ["a\x0bb\x1cc"]),
        (b"one\n", 0, []),
    ],
)
def test_last_lines(log: Path, content: bytes, wanted: int, found: list[str]) -> None:
    log.write_bytes(content)
    assert last_lines(log, wanted) == (found, len(content))


def test_a_long_file_is_read_from_its_end(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "CHUNK_BYTES", 64)
    lines = [f"line {i} " + "x" * (i % 90) for i in range(5000)]
    log.write_text("\n".join(lines) + "\n")
    for wanted in (1, 2, 7, 100):
        assert last_lines(log, wanted)[0] == lines[-wanted:]
    assert last_lines(log, 10_000)[0] == lines


def test_lines_are_told_once_and_when_they_are_whole(log: Path) -> None:
    log.write_text("old\nhalf")
    follower = GrowingFiles()
    follower.begin(log, 4)
    assert log in follower
    assert [*follower.new()] == []
    with log.open("a") as file:
        file.write(" a line\nnext\nno e")
    assert [*follower.new()] == [(log, "half a line"), (log, "next")]
    assert [*follower.new()] == []
    with log.open("a") as file:
        file.write("nd")
    assert [*follower.new()] == []
    assert [*follower.rest()] == [(log, "no end")]


def test_a_file_that_begins_anew_is_read_from_its_beginning(log: Path) -> None:
    log.write_text("a long first line\nand ha")
    follower = GrowingFiles()
    follower.begin(log, 0)
    assert [*follower.new()] == [(log, "a long first line")]
    log.write_text("anew\n")
    assert [*follower.new()] == [(log, "anew")]


def test_a_file_that_is_gone_is_passed_over(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "n2.rank1.log"
    follower = GrowingFiles()
    for path in (log, other):
        path.write_text("")
        follower.begin(path, 0)
    log.unlink()
    other.write_text("still here\n")
    assert [*follower.new()] == [(other, "still here")]


def test_a_line_without_an_end_does_not_fill_the_memory(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "MAX_LINE_BYTES", 100)
    log.write_text("x" * 250)
    follower = GrowingFiles()
    follower.begin(log, 0)
    assert [*follower.new()] == [(log, "x" * 250)]
    assert [*follower.rest()] == []


def test_a_line_that_is_drawn_again_and_again_is_shown_now_and_then(log: Path) -> None:
    """A progress bar's line ends with its epoch, hours later."""
    now = 0.0
    follower = GrowingFiles(clock=lambda: now)
    log.write_text("")
    follower.begin(log, 0)
    told: list[tuple[float, str]] = []
    with log.open("a") as file:
        for step in range(101):
            now = step / 10
            print(f"\rstep {step}", end="", file=file, flush=True)
            told += [(now, line) for _, line in follower.new()]
        assert told == [(0.0, "step 0"), (5.0, "step 50"), (10.0, "step 100")]
        now = 60.0
        assert [*follower.new()] == [], "as it was shown"
        print("\rstep 101", end="", file=file, flush=True)
        assert [*follower.new()] == [(log, "step 101")]
        print("\nafterwards", file=file, flush=True)
        assert [*follower.new()] == [(log, "afterwards")]
        print("\n0%\r1%\r", end="", file=file, flush=True)
        assert [*follower.new()] == [(log, "")], "not five seconds after the last one"
        now = 65.0
        assert [*follower.new()] == [(log, "1%")], "nothing has come since, and it is due"
        print("2%\r", end="", file=file, flush=True)
        assert [*follower.new()] == []
    assert [*follower.rest()] == [(log, "2%")]


def test_a_line_with_both_ends_is_told_once_however_it_comes(log: Path) -> None:
    follower = GrowingFiles()
    log.write_bytes(b"one\r")
    follower.begin(log, 0)
    told = [line for _, line in follower.new()]
    with log.open("ab") as file:
        file.write(b"\ntwo\r\n")
    assert [*told, *(line for _, line in follower.new())] == ["one", "two"]


def test_the_end_of_a_line_of_many_megabytes_is_found_soon(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is looked at once or twice, not as often as there are chunks after it."""
    monkeypatch.setattr(tail, "CHUNK_BYTES", 64)
    log.write_bytes(b"\r100 %" * 200_000)
    began = time.process_time()
    assert last_lines(log, 50)[0] == ["100 %"]
    assert time.process_time() - began < 2.0
