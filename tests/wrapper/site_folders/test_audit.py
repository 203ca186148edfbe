"""The site's audit: whole lines in a file of the user, and nothing of anybody else is touched."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from resihp.wrapper.site_folders import audit
from resihp.wrapper.site_folders import folder as site_folder
from resihp.wrapper.site_folders.audit import MAX_LINE_BYTES, Decision, append, line
from resihp.wrapper.site_folders.folder import SiteFolderError, check_writable
from tests.wrapper.site_folders.conftest import put_impostor

DECISION = Decision(
    id="vc:17:3", at=1_800_000_000.0, cluster="vc", job="17", decision="drain", outcome="done", node="n3", reason="Xid"
)


def name() -> str:
    return f"{os.geteuid()}-{datetime.now(UTC):%Y-%m}.jsonl"


def test_a_line_says_who_did_what_to_which_node(site: Path) -> None:
    append(site, line(DECISION))
    append(site, line(DECISION))
    (path,) = site.iterdir()
    assert path.name == name()
    assert path.stat().st_mode & 0o777 == 0o644
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == second
    assert first.pop("user")
    assert first == {
        "schema": 1,
        "id": "vc:17:3",
        "time": "2027-01-15T08:00:00Z",
        "cluster": "vc",
        "job": "17",
        "uid": os.geteuid(),
        "node": "n3",
        "decision": "drain",
        "outcome": "done",
        "reason": "Xid",
    }


def test_the_umask_hides_no_file_from_operators(site: Path) -> None:
    before = os.umask(0o077)
    try:
        append(site, line(DECISION))
    finally:
        os.umask(before)
    assert (site / name()).stat().st_mode & 0o777 == 0o644
    (site / name()).chmod(0o640)
    append(site, line(DECISION))
    assert (site / name()).stat().st_mode & 0o777 == 0o640, "what the site made of it stays"


def test_in_a_setgid_folder_only_its_group_reads(site: Path) -> None:
    site.chmod(0o3773)
    append(site, line(DECISION))
    assert (site / name()).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("letter", ["\x1b[2J\n\0", "\U0001f600", '"\\', "\udc80", "é"])
def test_a_line_is_one_line_and_bounded_whatever_it_quotes(letter: str) -> None:
    text = letter * 5000
    made = line(Decision(id=text, at=0.0, cluster=text, job=text, decision="end", outcome="failed", reason=text))
    assert len(made) <= MAX_LINE_BYTES
    assert made.count(b"\n") == 1
    assert made.endswith(b"\n")
    assert all(value.isprintable() for value in json.loads(made).values() if isinstance(value, str))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "second name", "group may write"])
def test_what_is_no_file_of_ours_alone_is_left_as_it_is(kind: str, site: Path, tmp_path: Path) -> None:
    target, path = tmp_path / "target", site / name()
    target.write_text("before")
    if kind != "group may write":
        put_impostor(kind, path, target)
    else:
        path.write_text("before")
        path.chmod(0o664)
    with pytest.raises(SiteFolderError, match=name()):
        append(site, line(DECISION))
    assert target.read_text() == "before"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_a_file_that_somebody_else_made_first_is_named(site: Path) -> None:
    (site / name()).touch()
    os.chown(site / name(), 1, 1)
    with pytest.raises(SiteFolderError, match=r"belongs to|permission denied"):
        append(site, line(DECISION))
    assert (site / name()).read_text() == ""


def test_a_folder_that_is_not_the_sites_is_not_written(site: Path, tmp_path: Path, monkeypatch: object) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(SiteFolderError) as caught:
            append(folder, line(DECISION))
        return str(caught.value)

    assert "no such file or directory; ask the administrator for it (install -d" in refused(tmp_path / "none")
    (tmp_path / "link").symlink_to(site)
    assert "is a link" in refused(tmp_path / "link")
    site.chmod(0o777)
    assert "others may write there and it is not sticky" in refused(site)
    site.chmod(0o1733)
    site_folder.ADMINISTRATOR_UID += 1  # put back by the fixture
    assert "and not to root" in refused(site)
    assert list(site.iterdir()) == []


def test_the_check_before_a_job_writes_nothing(site: Path, tmp_path: Path) -> None:
    audit.check(site)
    assert list(site.iterdir()) == []
    (site / name()).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SiteFolderError, match="no plain file"):
        audit.check(site)
    with pytest.raises(SiteFolderError, match=r"\[site\] audit"):
        audit.check(tmp_path / "none")


def test_a_full_disk_is_seen_before_a_job_waits(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 0, 0, 0, 255))
    monkeypatch.setattr(site_folder.os, "statvfs", lambda path: full)
    with pytest.raises(SiteFolderError, match="no space left there"):
        check_writable(site, "share")


def test_a_full_disk_leaves_no_half_line(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(site, line(DECISION))
    whole, write = (site / name()).read_bytes(), os.write
    monkeypatch.setattr(audit.os, "write", lambda descriptor, content: write(descriptor, content[:20]))
    with pytest.raises(SiteFolderError, match="no space left"):
        append(site, line(DECISION))
    monkeypatch.undo()
    assert (site / name()).read_bytes() == whole


def test_a_half_line_that_could_not_be_removed_spoils_no_other(site: Path) -> None:
    append(site, line(DECISION))
    with (site / name()).open("ab") as file:
        file.write(b'{"schema":1,"id"')
    append(site, line(DECISION))
    first, half, last = (site / name()).read_text().splitlines()
    assert (json.loads(first), half) == (json.loads(last), '{"schema":1,"id"')


def test_who_holds_the_lock_for_ever_keeps_no_line_out(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read a file may lock it."""
    monkeypatch.setattr(audit, "LOCK_PATIENCE_S", 0.05)
    append(site, line(DECISION))
    with (site / name()).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        append(site, line(DECISION))
    assert len((site / name()).read_text().splitlines()) == 2


def test_many_writers_lose_nothing(site: Path) -> None:
    threads = [threading.Thread(target=lambda: [append(site, line(DECISION)) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (site / name()).read_text().splitlines()
    assert len(lines) == 200
    assert all(json.loads(each)["job"] == "17" for each in lines)
