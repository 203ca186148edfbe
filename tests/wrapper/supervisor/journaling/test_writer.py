"""The journal's writer: what is on disk, in memory, or fetched; a real file, on a disk that may refuse."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from resihp.errors import ProtocolError
from resihp.record import journal_file
from resihp.record.journal import Record, Suspected
from resihp.record.journal_file import MAX_APPENDED_BYTES, PACK_AFTER, Journal, Packed, read, read_packed
from resihp.record.journal_format import decode, encode
from resihp.wrapper.supervisor.journaling import writer as journal_writer
from resihp.wrapper.supervisor.journaling.writer import JournalWriter
from tests.resihp.record.test_packing import committed

OTHER = Suspected(rank=0, node="n1", evidence="x" * 50)


def play(folder: Path, scene: Callable[[JournalWriter], Awaitable[None]], *, before: int = 0) -> Path:
    """One writer's life; `before` records are in its journal already."""
    path = folder / "journal"

    async def main() -> None:
        journal = Journal(path, sync=False)
        journal.write([(record, encode(record)) for record in map(committed, range(1, before + 1))])
        told: list[int] = []
        writer = JournalWriter(journal, lambda: told.append(writer.written))
        async with asyncio.timeout(20):
            await scene(writer)
        assert await asyncio.to_thread(writer.close, 5.0)
        assert told == sorted(told)

    asyncio.run(main())
    return path


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_what_is_appended_is_on_disk_soon_and_in_order(tmp_path: Path) -> None:
    async def scene(writer: JournalWriter) -> None:
        for number in range(1, 101):
            assert writer.append(OTHER, 1.0).seq == number
        await until(lambda: writer.written == 100)
        assert (writer.behind_s, writer.trouble) == (0.0, "")

    assert [record.seq for record in read(play(tmp_path, scene))] == list(range(1, 101))


def test_what_the_disk_refuses_is_tried_again_and_told_to_nobody_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, works = os.pwrite, [True]

    def pwrite(descriptor: int, content: bytes, at: int) -> int:
        if not works[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content, at)

    monkeypatch.setattr(journal_file.os, "pwrite", pwrite)
    monkeypatch.setattr(journal_writer, "RETRY_S", 0.05)

    async def scene(writer: JournalWriter) -> None:
        writer.append(OTHER, 1.0)
        await until(lambda: writer.written == 1)
        works[0] = False
        writer.append(OTHER, 2.0)
        await until(lambda: writer.trouble)
        assert writer.trouble == "No space left on device"
        await until(lambda: writer.behind_s > 0.2)
        assert writer.recent(0, 1 << 20) == [(1, encode(Record(1, 1.0, OTHER)))], "no copy has what we lack"
        writer.append(OTHER, 3.0)
        works[0] = True
        await until(lambda: writer.written == 3)
        assert (writer.behind_s, writer.trouble) == (0.0, "")

    assert [record.at for record in read(play(tmp_path, scene))] == [1.0, 2.0, 3.0]


def test_what_is_too_large_is_as_if_it_never_came(tmp_path: Path) -> None:
    async def scene(writer: JournalWriter) -> None:
        with pytest.raises(ProtocolError, match="cannot be copied to agents"):
            writer.append(Suspected(rank=0, node="n1", evidence="x" * MAX_APPENDED_BYTES), 0.0)
        assert writer.append(OTHER, 1.0).seq == 1

    assert [record.entry for record in read(play(tmp_path, scene))] == [OTHER]


def test_old_records_leave_the_memory_and_are_fetched_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_writer, "MAX_RECENT_BYTES", 2000)

    async def scene(writer: JournalWriter) -> None:
        for _ in range(200):
            writer.append(OTHER, 1.0)
            await asyncio.sleep(0)
        await until(lambda: writer.written == 230)
        assert writer.recent(40, 100) is None
        recent = writer.recent(225, 1 << 20)
        assert recent is not None
        assert [seq for seq, _ in recent] == [226, 227, 228, 229, 230]
        assert writer.common(41) == 41
        assert writer.common(5000) == 230
        found: list[tuple[int, bytes]] = []
        while (last := found[-1][0] if found else 20) < 230:
            given: asyncio.Future[list[tuple[int, bytes]]] = asyncio.get_running_loop().create_future()
            writer.fetch(last, 500, given.set_result)
            found += await given
        assert [decode(body).seq for _, body in found] == list(range(21, 231))

    play(tmp_path, scene, before=30)


def test_it_is_packed_as_it_grows(tmp_path: Path) -> None:
    async def scene(writer: JournalWriter) -> None:
        for number in range(1, 3 * PACK_AFTER):
            writer.append(committed(number).entry, 1.0)
            if number % 500 == 0:
                await until(lambda number=number: writer.written == number)

    path = play(tmp_path, scene)
    assert len(read_packed(path)) < 2 * PACK_AFTER
    assert [record.seq for record in read(path)] == list(range(1, 3 * PACK_AFTER))


def test_a_disk_that_is_slow_to_take_a_packed_journal_holds_up_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    packed = Journal.packed
    began: list[Path] = []

    def slow(journal: Journal) -> Packed:
        found = packed(journal)
        began.append(journal.path)
        may_go_on.wait(20)
        return found

    monkeypatch.setattr(Journal, "packed", slow)

    async def scene(writer: JournalWriter) -> None:
        writer.append(OTHER, 1.0)
        await until(lambda: began)
        for number in range(100):
            seq = writer.append(OTHER, float(number)).seq
            await until(lambda seq=seq: writer.written == seq)
        assert writer.behind_s == 0.0
        size = writer.path.stat().st_size
        may_go_on.set()
        await until(lambda: writer.path.stat().st_size < size // 2)
        writer.append(OTHER, 100.0)

    path = play(tmp_path, scene, before=PACK_AFTER + 300)
    assert [record.seq for record in read(path)] == list(range(1, PACK_AFTER + 300 + 103))
    assert [file.name for file in tmp_path.iterdir()] == ["journal"], "nothing is left beside it"
