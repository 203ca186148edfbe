"""Logs that are written on local disk and copied: completely, once, and without anybody waiting for a hung folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from resihp.wrapper.agent.logs import log_mirror
from resihp.wrapper.agent.logs.log_mirror import LogMirror
from tests.waiting import until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_mirror, "COPY_EVERY_S", 0.01)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "there").mkdir()
    return tmp_path / "here", tmp_path / "there"


def test_what_is_written_is_appended_in_the_other_folder(folders: tuple[Path, Path]) -> None:
    here, there = folders
    (there / "n1.agent.log").write_text("from before\n")
    mirror = LogMirror("n1", here, there)
    with (here / "n1.agent.log").open("a") as log:
        log.write("one\n")
        log.flush()
        until(lambda: (there / "n1.agent.log").read_text() == "from before\none\n")
        log.write("two\n")
    (here / "n1.rank0.log").write_text("rank\n")
    (here / "n10.agent.log").write_text("another node's\n")
    mirror.close()
    assert (there / "n1.agent.log").read_text() == "from before\none\ntwo\n"
    assert (there / "n1.rank0.log").read_text() == "rank\n"
    assert not (there / "n10.agent.log").exists()


def test_logs_of_an_earlier_agent_are_not_copied_again(folders: tuple[Path, Path]) -> None:
    here, there = folders
    here.mkdir()
    (here / "n1.agent.log").write_text("old\n")
    (here / "n2.agent.log").write_text("of another node on this machine\n")
    LogMirror("n1", here, there).close()
    assert list(there.iterdir()) == []
    assert [path.name for path in here.iterdir()] == ["n2.agent.log"]


def test_local_blocks_are_freed_once_they_are_copied(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_mirror, "FREE_BYTES", 1 << 20)
    here, there = folders
    mirror = LogMirror("n1", here, there)
    content = os.urandom(3 << 20)
    descriptor = os.open(here / "n1.rank0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, content)
    until(lambda: (there / "n1.rank0.log").exists() and (there / "n1.rank0.log").read_bytes() == content)
    os.write(descriptor, b"more")
    mirror.close()
    os.close(descriptor)
    assert (there / "n1.rank0.log").read_bytes() == content + b"more"
    assert (here / "n1.rank0.log").stat().st_blocks * 512 < 1 << 20


def test_folder_that_hangs_stops_the_copying_and_nothing_else(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_mirror, "CLOSE_TIMEOUT_S", 0.05)
    here, there = folders
    os.mkfifo(there / "n1.rank0.log")  # opening it blocks until somebody reads
    mirror = LogMirror("n1", here, there)
    (here / "n1.rank0.log").write_text("printed\n")
    begun = time.monotonic()
    mirror.close()
    assert time.monotonic() - begun < 2
    assert (there / "n1.rank0.log").read_text() == "printed\n", "it goes on when the folder is back"


def test_folder_that_cannot_be_written_is_told_once(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = folders
    (there / "n1.rank0.log").mkdir()
    mirror = LogMirror("n1", here, there)
    (here / "n1.rank0.log").write_text("printed\n")
    until(lambda: "Is a directory" in capsys.readouterr().out)
    (there / "n1.rank0.log").rmdir()
    until(lambda: (there / "n1.rank0.log").exists())
    mirror.close()
    assert (there / "n1.rank0.log").read_text() == "printed\n"
    assert "directory" not in capsys.readouterr().out


def test_folder_that_hangs_does_not_fill_the_local_disk(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is on that disk, and a worker may print for hours. The copy says what is missing, and where."""
    most, chunk = 4 << 20, 64 << 10
    for name, value in (("MAX_UNCOPIED_BYTES", most), ("CHUNK_BYTES", chunk), ("LOOK_EVERY_S", 0.01)):
        monkeypatch.setattr(log_mirror, name, value)
    here, there = folders
    os.mkfifo(there / "n1.rank0.log")  # opening it blocks until somebody reads
    mirror = LogMirror("n1", here, there)
    path = here / "n1.rank0.log"
    printed = b"".join(b"%09d\n" % number for number in range(4 << 20))  # 40 MB
    with path.open("ab", buffering=0) as log:
        for start in range(0, len(printed), most):
            log.write(printed[start : start + most])
            until(lambda: path.stat().st_blocks * 512 <= most + 3 * chunk)
        assert path.stat().st_size == len(printed)
        with (there / "n1.rank0.log").open("rb", buffering=0) as pipe:
            found = b""
            while not found.endswith(printed[-10:]):
                found += pipe.read(1 << 20)
    mirror.close()
    assert len(found) < 2 * most
    head, told, tail = found.partition(b"\nresihp: ")
    missing, _, tail = tail.partition(b" bytes are missing here: ")
    tail = tail.partition(b"\n")[2]
    assert told
    assert b"\0" not in found
    assert printed.startswith(head)
    assert printed.endswith(tail)
    assert len(head) + int(missing) + len(tail) == len(printed)


def test_log_that_is_copied_in_time_is_never_cut(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1 << 20
    for name, value in (("MAX_UNCOPIED_BYTES", most), ("CHUNK_BYTES", 64 << 10), ("LOOK_EVERY_S", 0.001)):
        monkeypatch.setattr(log_mirror, name, value)
    here, there = folders
    mirror, _copy = LogMirror("n1", here, there), there / "n1.rank0.log"
    content = os.urandom(8 << 20)
    with (here / "n1.rank0.log").open("ab", buffering=0) as log:
        for start in range(0, len(content), most // 2):
            log.write(content[start : start + most // 2])
            done = min(start + most // 2, len(content))
            until(
                lambda done=done: (there / "n1.rank0.log").exists() and (there / "n1.rank0.log").stat().st_size == done
            )
    mirror.close()
    assert (there / "n1.rank0.log").read_bytes() == content
