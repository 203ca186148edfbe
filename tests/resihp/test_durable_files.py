from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from resihp import durable_files
from resihp.durable_files import replacing, write_durably


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Somebody's file, to which links lead."""
    file = tmp_path / "victim"
    file.write_text("precious")
    return file


def test_a_file_takes_its_place_whole_with_the_permissions_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    before = os.umask(0o027)
    try:
        with replacing(path) as file:
            file.write(b"new")
            file.flush()
            assert path.read_text() == "old"
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(bytes(1 // 0))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_not_written_through(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files.secrets, "token_hex", lambda _: "guessed")
    path = tmp_path / "report.html"
    path.symlink_to(victim)
    planted = tmp_path / ".resihp-guessed"
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError), replacing(path) as file:
        file.write(b"new")
    planted.unlink()
    write_durably(path, b"new")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("precious", "new", False)


def test_a_device_is_written_and_not_replaced() -> None:
    with replacing(Path("/dev/null")) as file:
        file.write(b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("name", ["\u6f22" * 80, "n" * 255])
def test_a_name_may_be_as_long_as_names_can_be(tmp_path: Path, name: str) -> None:
    with replacing(tmp_path / name) as file:
        file.write(b"x")
    assert (tmp_path / name).read_bytes() == b"x"


def test_the_users_own_link_is_followed_where_he_named_it(tmp_path: Path, victim: Path) -> None:
    path, second = tmp_path / "report.html", tmp_path / "second"
    path.symlink_to("second")
    second.symlink_to(victim)
    with replacing(path, named_by_user=True) as file:
        file.write(b"new")
    assert (victim.read_text(), path.is_symlink(), second.is_symlink()) == ("new", True, True)


def test_a_link_or_pipe_of_another_is_replaced_although_the_user_named_it(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pipe = tmp_path / "report.html", tmp_path / "pipe"
    path.symlink_to(victim)
    os.mkfifo(pipe)
    if os.geteuid() == 0:
        for file in (path, pipe):
            os.chown(file, 54321, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(durable_files, "own_users", lambda: (54321,))
    for file in (path, pipe):
        with replacing(file, named_by_user=True) as opened:
            opened.write(b"new")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("precious", "new", False)
    assert pipe.is_file()


def test_the_users_own_pipe_is_written_where_he_named_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(pipe, named_by_user=True) as file:
            file.write(b"x")
        assert os.read(reader, 10) == b"x"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_open_file_is_written_by_its_number(tmp_path: Path) -> None:
    """As of `-o /dev/stdout` with a pipe behind it, which is root's link to a link of the user's."""
    reader, writer = os.pipe()
    link = tmp_path / "stdout"
    link.symlink_to(f"/proc/self/fd/{writer}")
    try:
        for path in (Path(f"/dev/fd/{writer}"), Path(f"/proc/self/fd/{writer}"), link):
            with replacing(path, named_by_user=True) as file:
                file.write(b"x")
        assert os.read(reader, 10) == b"xxx"
    finally:
        os.close(reader)
        os.close(writer)
