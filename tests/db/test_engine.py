"""Ledger URLs: which are understood, and what is said about the others."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.exc import OperationalError

from resihp.db import migrate
from resihp.db.engine import default_url, masked, refusal, resolve
from resihp.db.file_systems import file_system
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.errors import LedgerError

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/fast tmpfs rw 0 0
lfs /scratch\\040of\\040us lustre rw 0 0
garbage
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/tmp/x", "ext4"),
        ("/home/me/.resihp", "nfs4"),
        ("/home/me/fast/jobs", "tmpfs"),
        ("/homeless", "ext4"),
        ("/scratch of us/a", "lustre"),
    ],
)
def test_file_system_is_that_of_the_longest_mount_point(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_sqlite_alone_is_the_job_s_own(tmp_path: Path) -> None:
    assert resolve("sqlite", tmp_path).database == str(tmp_path / "ledger.db")
    assert default_url(tmp_path) == f"sqlite:///{tmp_path}/ledger.db"


def test_postgresql_means_psycopg() -> None:
    assert resolve("postgresql://me@host/x").drivername == "postgresql+psycopg"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "not a database's URL; use sqlite:///PATH"),
        ("mysql://me:secret@host/x", "driver mysql is not known here"),
        ("postgresql+nodriver://me:secret@host/x", "driver postgresql+nodriver is not known here"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("postgresql://me:secret@host:port/x", "not a database's URL"),
        ("mysql://host/x?password=secret", "driver mysql is not known"),
        ("mysql://me:se@cret@host/x", "driver mysql is not known"),
    ],
)
def test_refusals_say_why_and_hide_passwords(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(LedgerError) as caught:
        Ledger.open(url, tmp_path)
    text = str(caught.value)
    assert words in text
    assert "cret" not in text
    assert "\n" not in text


def test_masked_leaves_urls_without_password_alone() -> None:
    assert masked("postgresql+psycopg://me@host/x?sslmode=require") == "postgresql+psycopg://me@host/x?sslmode=require"


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"ledger sqlite:.*file.*choose another folder"):
        Ledger.open(f"sqlite:///{tmp_path}/file/ledger.db", tmp_path)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(LedgerError, match="is no plain file; name another with --ledger"):
        Ledger.open(f"sqlite:///{tmp_path}/folder.db", tmp_path)


def test_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_text("garbage " * 1000)
    for opener in (lambda: Ledger.open("sqlite", tmp_path), lambda: Reader.open(default_url(tmp_path))):
        with pytest.raises(LedgerError, match="file is not a database; move the file away"):
            opener()


def test_reader_makes_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no such file"):
        Reader.open(default_url(tmp_path))
    (tmp_path / "ledger.db").touch()
    with pytest.raises(LedgerError, match="holds no ledger of resihp"):
        Reader.open(default_url(tmp_path))


def test_new_folder_is_the_owner_s_alone(tmp_path: Path) -> None:
    Ledger.open(f"sqlite:///{tmp_path}/new/ledger.db", tmp_path).close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_file_that_another_job_writes_is_waited_for_when_it_is_first_opened(tmp_path: Path) -> None:
    """SQLite refuses at once to change the mode of a file that somebody writes: two jobs that make one ledger."""
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    done = threading.Timer(0.3, other.execute, ("COMMIT",))
    done.start()
    migrate.make_ready(f"sqlite:///{tmp_path / 'ledger.db'}")
    done.join()
    other.close()
    assert migrate.current(f"sqlite:///{tmp_path / 'ledger.db'}") == migrate.head()


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite calls it an I/O error where it cannot make the file that readers share."""
    url = resolve(f"sqlite:///{tmp_path / 'ledger.db'}")
    error = OperationalError("", None, sqlite3.OperationalError("disk I/O error"))
    assert "is its folder writable?" in str(refusal(url, error))
    full = SimpleNamespace(f_bavail=0)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    assert str(refusal(url, error)).endswith(f"disk I/O error; its disk is full: df -h {tmp_path}; make room there")


@pytest.mark.parametrize(("mode", "expected"), [(0o700, 0o600), (0o2770, 0o640)], ids=["own folder", "shared folder"])
def test_a_ledger_in_a_folder_of_ones_own_is_ones_own(tmp_path: Path, mode: int, expected: int) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    before = os.umask(0o027)
    try:
        ledger = Ledger.open(f"sqlite:///{folder}/ledger.db", tmp_path)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        ledger.close()
    finally:
        os.umask(before)
    assert set(modes.values()) == {expected}, modes
