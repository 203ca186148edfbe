"""A journal that somebody else writes: each record is read once, also when its file is packed or replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.errors import ProtocolError
from resihp.record import journal, journal_format
from resihp.record.journal_file import LEFT_UNPACKED, Journal
from resihp.record.reading_on import ReadingOn
from tests.db.conftest import outcome


def committed(number: int) -> journal.IterationCommitted:
    return journal.IterationCommitted(epoch=1, outcome=outcome(number), seconds=1.0, predicted_seconds=None)


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Journal(tmp_path / "journal", sync=False)
    decoded: list[int] = []
    real = journal_format.decode
    monkeypatch.setattr(journal_format, "decode", lambda body: (decoded.append(len(body)), real(body))[1])
    reading = ReadingOn(writer.path)
    assert reading.new() == []
    for number in range(1, 6):
        writer.append(committed(number), float(number))
        assert [record.seq for record in reading.new()] == [number]
        assert reading.new() == []
    assert len(decoded) == 5


def test_a_file_that_was_packed_meanwhile_is_looked_through_once(tmp_path: Path) -> None:
    writer = Journal(tmp_path / "journal", sync=False)
    for number in range(1, LEFT_UNPACKED + 50):
        writer.append(committed(number), float(number))
    reading = ReadingOn(writer.path)
    assert len(reading.new()) == LEFT_UNPACKED + 49
    writer.pack()
    assert reading.new() == []
    writer.append(journal.JobEnded(exit_code=0, state="completed", reason="done"), 999.0)
    assert [type(record.entry) for record in reading.new()] == [journal.JobEnded]


def test_a_torn_tail_is_left_for_the_next_look(tmp_path: Path) -> None:
    writer = Journal(tmp_path / "journal", sync=False)
    for number in (1, 2):
        writer.append(committed(number), float(number))
    whole = writer.path.read_bytes()
    copy = tmp_path / "copy"
    copy.write_bytes(whole[:-5])
    reading = ReadingOn(copy)
    assert [record.seq for record in reading.new()] == [1]
    assert reading.new() == []
    with copy.open("ab") as file:
        file.write(whole[-5:])
    assert [record.seq for record in reading.new()] == [2]


def test_what_is_no_journal_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="no plain file"):
        ReadingOn(tmp_path).new()
    (tmp_path / "other").write_bytes(b"something else, long enough")
    with pytest.raises(ProtocolError, match="not a resihp journal"):
        ReadingOn(tmp_path / "other").new()


def test_those_before_a_number_are_not_told(tmp_path: Path) -> None:
    writer = Journal(tmp_path / "journal", sync=False)
    for number in range(1, 6):
        writer.append(committed(number), float(number))
    assert [record.seq for record in ReadingOn(writer.path, seen=3).new()] == [4, 5]
