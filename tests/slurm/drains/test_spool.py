"""A request is there whole or not at all, under a name that nobody can foresee, for a hook that trusts none of it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from resihp.slurm.client import PREFIX
from resihp.slurm.drains.spool import MAX_BYTES, SpoolError, asked_by, folder_of, put

NOW = 1_800_000_000.0


def test_a_request_says_what_is_wanted_and_is_readable_by_the_hook(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = put(tmp_path, "drain", "n3", job_id="17", reason=f"{PREFIX}rank 3 died\nof Xid 79", now=NOW)
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == [path.name]
    assert json.loads(path.read_bytes()) == {
        "version": 1,
        "id": path.stem,
        "kind": "drain",
        "node": "n3",
        "job": "17",
        "reason": "rank 3 died of Xid 79",
        "time": NOW,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.stat().st_size < MAX_BYTES


def test_a_lax_umask_does_not_let_others_write_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = put(tmp_path, "drain", "n3", job_id="17", reason="x", now=NOW)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_names_differ(tmp_path: Path) -> None:
    paths = {put(tmp_path, "drain", "n3", job_id="17", reason="x", now=NOW) for _ in range(50)}
    assert len(paths) == len(os.listdir(tmp_path)) == 50


def test_needs_no_right_to_list_the_spool(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    spool.chmod(0o333)
    path = put(spool, "undrain", "n3", job_id="17", reason="x", now=NOW)
    assert json.loads(path.read_bytes())["kind"] == "undrain"


def test_a_long_reason_is_cut_off(tmp_path: Path) -> None:
    path = put(tmp_path, "drain", "n3", job_id="17", reason="x" * 100_000, now=NOW)
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("what", ["missing", "file", "too large"])
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, what: str) -> None:
    spool = tmp_path / "spool"
    if what == "file":
        spool.touch()
    elif what == "too large":
        spool.mkdir()
    with pytest.raises(SpoolError, match=r"^(spool /.*|request for node n*: .* bytes)"):
        put(spool, "drain", "n" * 5000 if what == "too large" else "n3", job_id="17", reason="x", now=NOW)
    assert what != "too large" or os.listdir(spool) == []


def test_a_full_file_system_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("resihp.slurm.drains.spool.os.fsync", full)
    with pytest.raises(SpoolError, match="No space left on device"):
        put(tmp_path, "drain", "n3", job_id="17", reason="x", now=NOW)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("reason", "uid"),
    [
        (f"{PREFIX}rank 3 died (asked by uid 1000, job 17)", 1000),
        (f"{PREFIX}x (asked by uid 1, job 2) (asked by uid 1000, job 17)", 1000),
        (f"{PREFIX}rank 3 died", None),
        ("bad disk (asked by uid 1000, job 17)", None),
        (f"{PREFIX}x (asked by uid 1000, job 17) and more", None),
        ("", None),
    ],
)
def test_for_whom_the_hook_drained(reason: str, uid: int | None) -> None:
    assert asked_by(reason) == uid


def test_the_usual_folder_counts_only_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resihp.slurm.drains.spool.DEFAULT_FOLDER", tmp_path / "requests")
    assert folder_of("") is None
    (tmp_path / "requests").mkdir()
    assert folder_of("") == tmp_path / "requests"
    assert folder_of("/elsewhere") == Path("/elsewhere")
