"""Summaries of jobs for operators: whole files of their users, read without trust in anything but their owners."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.wrapper.job_files.contents import LastIteration, ProgressFile
from resihp.wrapper.site_folders import summaries
from resihp.wrapper.site_folders.folder import SiteFolderError
from resihp.wrapper.site_folders.summaries import MAX_SUMMARY_BYTES, JobSummary, publish, read, withdraw
from tests.wrapper.site_folders.conftest import put_impostor

NOW = 1_800_000_000.0
UID = os.geteuid()
LAST = LastIteration(iteration=7, loss=2.5, tokens=100, seconds=1.0, finished_at=NOW)
PROGRESS = ProgressFile(
    began_at=0.0, written_at=NOW, nodes=4, gpus_per_node=8, layout="2 replicas", target=60, recent=(LAST,)
)
SUMMARY = JobSummary(
    uid=UID,
    job="17-r1",
    cluster="vc",
    host="n1",
    written_at=NOW,
    progress=PROGRESS,
    event="node n3: lost",
    event_at=NOW,
)
FILE = f"vc-17-{UID}.json"


def test_what_is_published_is_read(site: Path) -> None:
    before = os.umask(0o077)
    try:
        publish(site, SUMMARY)
    finally:
        os.umask(before)
    (path,) = site.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == (FILE, 0o644), "operators read it, whatever the umask"
    assert read(site) == ([SUMMARY], 0)
    again = msgspec.structs.replace(SUMMARY, job="17-r2", written_at=NOW + 30)
    site.chmod(0o3773)
    publish(site, again)
    assert path.stat().st_mode & 0o777 == 0o640, "by the folder's group only"
    assert read(site) == ([again], 0), "the next run replaces the file of the one before"
    withdraw(site, "vc", "17-r2")
    withdraw(site, "vc", "17-r2")
    assert list(site.iterdir()) == []


def test_long_and_odd_texts_are_cut(site: Path) -> None:
    odd = "\x1b[2J\n" * 10_000
    progress = msgspec.structs.replace(PROGRESS, layout=odd, recent=(LAST,) * 20)
    publish(site, msgspec.structs.replace(SUMMARY, event=odd, progress=progress, cluster="x/../y"))
    (path,) = site.iterdir()
    assert path.parent == site
    assert path.stat().st_size < MAX_SUMMARY_BYTES
    (summary,) = read(site).jobs
    assert summary.event.isprintable()
    assert summary.progress.layout.isprintable()


def encoded(**changes: Any) -> bytes:
    return json.dumps({**msgspec.to_builtins(SUMMARY), **changes}).encode()


HOSTILE = {
    "another user's": encoded(uid=UID + 1),
    "too large": encoded(event="x" * MAX_SUMMARY_BYTES),
    "no JSON": b"{" * 5000,
    "deep": b"[" * 10_000 + b"]" * 10_000,
    "no job's name": encoded(job="../../etc/passwd"),
    "a long name": encoded(job="1" * 200),
    "an impossible time": encoded(written_at=1e300),
    "a time before all jobs": encoded(written_at=-1e11),
    "an event before all jobs": encoded(event_at=-1e11),
    "an infinite time": encoded().replace(str(NOW).encode(), b"1e999"),
    "another type": encoded(progress=[1, 2]),
    "nothing": b"",
    "NUL": b"\0" * 100,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_hide_no_other(content: bytes, site: Path) -> None:
    publish(site, SUMMARY)
    (site / f"vc-18-{UID}.json").write_bytes(content)
    assert read(site) == ([SUMMARY], 1)


def test_odd_texts_in_a_file_are_only_texts(site: Path) -> None:
    content = encoded(host="\x1b]0;x\x07", event="\n\x1b[31mresihp: all is well", cluster="a\nb", later_field={"x": 1})
    (site / FILE).write_bytes(content)
    (summary,) = read(site).jobs
    assert all(text.isprintable() for text in (summary.host, summary.event, summary.cluster))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "second name", "socket"])
def test_what_is_no_plain_file_is_not_opened(
    kind: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(site, SUMMARY)
    target, path = tmp_path / "target", site / f"vc-18-{UID}.json"
    target.write_bytes(encoded())
    if kind != "socket":
        put_impostor(kind, path, target)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            monkeypatch.chdir(site)
            listener.bind(path.name)
    assert read(site) == ([SUMMARY], 1)


def test_other_names_are_not_opened(site: Path) -> None:
    for name in (".resihp-0123", "notes.txt", "vc-17-.json", f"-17-{UID}.json", f"vc 17-{UID}.json"):
        (site / name).write_bytes(encoded())
    assert read(site) == ([], 0)


@pytest.mark.skipif(UID != 0, reason="only root makes files of other users")
def test_a_file_that_another_user_made_in_our_name_is_not_ours(site: Path) -> None:
    (site / FILE).write_bytes(encoded())
    os.chown(site / FILE, 1, 1)
    assert read(site) == ([], 1)


def test_one_user_hides_nobody(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "MAX_OF_USER", 3)
    for number in range(9):
        (site / f"vc-{number}-{UID}.json").write_bytes(encoded(job=str(number)))
    assert len(read(site).jobs) == 3


def test_a_folder_that_cannot_be_used_is_named(site: Path, tmp_path: Path) -> None:
    with pytest.raises(SiteFolderError, match=r"\[site\] share .*none: no such file"):
        read(tmp_path / "none")
    with pytest.raises(SiteFolderError, match="no such file"):
        publish(tmp_path / "none", SUMMARY)
    (site / FILE).mkdir()
    with pytest.raises(SiteFolderError, match="is a directory"):
        publish(site, SUMMARY)
    assert [path.name for path in site.iterdir()] == [FILE], "nothing half-done is left"
