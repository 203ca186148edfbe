"""Exclusions outlive the job that made them, expire, and are shared by jobs that write at the same time."""

from __future__ import annotations

import fcntl
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.slurm.client import NodeView
from resihp.slurm.drains import exclusions as module
from resihp.slurm.drains.exclusions import ExclusionError, Exclusions, clusters
from tests.slurm.fake_slurm import FakeSlurm

NOW = 1_800_000_000.0


def names(exclusions: Exclusions, now: float = NOW) -> list[str]:
    return [item.node for item in exclusions.current(now)]


def test_what_one_job_excludes_the_next_one_reads(tmp_path: Path) -> None:
    Exclusions(tmp_path, "vc").add("n3", "Xid 79", NOW + 60, job_id="17")
    Exclusions(tmp_path, "vc").add("n1", "slow", NOW + 60)
    (first, second) = Exclusions(tmp_path, "vc").current(NOW)
    assert (first.node, second.node) == ("n1", "n3")
    assert (second.reason, second.expires_at, second.job_id) == ("Xid 79", NOW + 60, "17")


def test_an_exclusion_expires_and_stays_known(tmp_path: Path) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.add("n3", "slow", NOW + 60)
    assert names(exclusions, NOW + 59) == ["n3"]
    assert names(exclusions, NOW + 60) == []
    assert [item.node for item in exclusions.known()] == ["n3"]


def test_the_longer_exclusion_counts(tmp_path: Path) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.add("n3", "first", NOW + 100)
    exclusions.add("n3", "second", NOW + 10)
    assert names(exclusions, NOW + 50) == ["n3"]
    exclusions.add("n3", "third", NOW + 200)
    assert names(exclusions, NOW + 150) == ["n3"]


def test_what_a_job_found_of_a_cloud_node_ends_with_the_instance(tmp_path: Path) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    for node in ("c1", "c2", "c3", "c4", "gone"):
        exclusions.add(node, "silent", NOW + 60, job_id="17")
    exclusions.add("c5", "by hand", NOW + 60)
    down = frozenset({"cloud", "powered_down"})
    flags = {"c1": frozenset({"cloud"}), "c2": down, "c3": frozenset({"cloud", "powering_up", "not_responding"})}
    flags |= {"c4": frozenset({"powered_down"}), "c5": down}  # c4 stands in a rack, and sleeps
    slurm = FakeSlurm([NodeView(name=name, state="idle", flags=flags[name]) for name in flags])
    assert exclusions.to_avoid(slurm, NOW) == ("c1", "c4", "c5")
    assert exclusions.to_avoid(slurm, NOW + 60) == ()


def test_removed_is_used_again(tmp_path: Path) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.add("n3", "slow", NOW + 60)
    assert exclusions.remove("n3") is True
    assert exclusions.remove("n3") is False
    assert exclusions.remove("n4") is False
    assert names(exclusions) == []
    exclusions.add("n3", "again", NOW + 10)
    assert names(exclusions) == ["n3"]


def test_clusters_do_not_share_nodes(tmp_path: Path) -> None:
    Exclusions(tmp_path, "one").add("n3", "slow", NOW + 60)
    assert names(Exclusions(tmp_path, "two")) == []
    assert clusters(tmp_path) == ("one",)


@pytest.mark.parametrize("cluster", ["../../etc", "a/b", ".hidden", "", "..", "x\n"])
def test_a_clusters_name_is_no_path(tmp_path: Path, cluster: str) -> None:
    exclusions = Exclusions(tmp_path / "home", cluster)
    exclusions.add("n3", "slow", NOW + 60)
    assert exclusions.path.parent == tmp_path / "home" / "exclusions"
    assert names(exclusions) == ["n3"]
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"version":2,"cluster":"vc","nodes":[]}',
        b'{"version":1,"cluster":"vc","nodes":[{}]}',
    ],
)
def test_a_broken_file_is_told_and_kept(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.path.parent.mkdir()
    exclusions.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert names(exclusions) == []
    assert str(exclusions.path) in caplog.text
    assert exclusions.path.read_bytes() == content
    exclusions.add("n3", "slow", NOW + 60)
    assert names(exclusions) == ["n3"]
    (kept,) = exclusions.path.parent.glob("*.broken-*")
    assert kept.read_bytes() == content


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from resihp.slurm.drains.exclusions import Exclusions\n"
        "for i in range(10): Exclusions(Path(sys.argv[1]), 'vc').add(f'{sys.argv[2]}{i}', 'x', 9e9)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in "abcd"]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert len(names(Exclusions(tmp_path, "vc"))) == 40


def test_a_lock_that_is_not_given_back_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_S", 0.1)
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.add("n3", "slow", NOW + 60)
    with (exclusions.path.parent / ".vc.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExclusionError, match="another process has held its lock"):
            exclusions.add("n4", "slow", NOW + 60)
        assert names(exclusions) == ["n3"]  # readers do not wait


def test_a_full_file_system_keeps_the_old_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.add("n3", "slow", NOW + 60)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(ExclusionError, match="No space left on device"):
        exclusions.add("n4", "slow", NOW + 60)
    assert names(exclusions) == ["n3"]


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(ExclusionError, match="cluster vc"):
        Exclusions(tmp_path / "home", "vc").add("n3", "slow", NOW + 60)
    assert names(Exclusions(tmp_path / "home", "vc")) == []


def test_the_file_is_for_people_too(tmp_path: Path) -> None:
    exclusions = Exclusions(tmp_path, "vc")
    exclusions.add("n3", "slow", NOW + 60)
    assert json.loads(exclusions.path.read_text())["nodes"][0]["node"] == "n3"
    assert exclusions.path.read_text().count("\n") > 5
