"""Checkpoint folders: the manifest is the commit, and nothing broken is ever resumed from."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from resihp.errors import CheckpointError
from resihp.worker import checkpoints


def part(folder: Path, name: str, content: bytes = b"x" * 100) -> tuple[str, int]:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("data/0", content)
    return name, (folder / name).stat().st_size


def checkpoint(root: Path, iteration: int, keep: int = 10) -> Path:
    folder = checkpoints.folder_of(root, iteration)
    parts = [part(folder, f"part-{rank}.pt") for rank in range(2)]
    checkpoints.write_manifest(folder, iteration, parts, "fingerprint", keep)
    return folder


def test_a_folder_counts_once_its_manifest_is_written(tmp_path: Path) -> None:
    assert checkpoints.newest_complete(tmp_path / "nowhere") is None
    folder = checkpoints.folder_of(tmp_path, 40)
    assert folder.name == "iteration-000040"
    parts = [part(folder, "part-0.pt")]
    assert checkpoints.newest_complete(tmp_path) is None
    checkpoints.write_manifest(folder, 40, parts, "abc")
    assert checkpoints.newest_complete(tmp_path) == folder
    assert checkpoints.read_manifest(folder) == (40, "abc", ("part-0.pt",))
    assert checkpoints.iteration_of(folder) == 40
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_missing_part_is_not_committed(tmp_path: Path) -> None:
    folder = checkpoints.folder_of(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"part part-1\.pt of 7 bytes is not there"):
        checkpoints.write_manifest(folder, 1, [part(folder, "part-0.pt"), ("part-1.pt", 7)])
    assert checkpoints.newest_complete(tmp_path) is None


@pytest.mark.parametrize("damage", ["manifest", "missing", "short", "flipped"])
def test_damaged_checkpoints_are_passed_over(tmp_path: Path, damage: str) -> None:
    older, newer = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    file = newer / "part-1.pt"
    content = bytearray(file.read_bytes())
    if damage == "manifest":
        (newer / "manifest.json").write_text('{"format": 1, "iter')
    elif damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(content[:-1])
    else:
        content[60] ^= 1
        file.write_bytes(content)
        assert checkpoints.newest_complete(tmp_path, verify=False) == newer
    assert checkpoints.newest_complete(tmp_path) == older


def test_pruning_keeps_the_newest_complete_ones_and_what_is_being_written(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        checkpoint(tmp_path, iteration)
    part(checkpoints.folder_of(tmp_path, 15), "part-0.pt")  # given up long ago
    part(checkpoints.folder_of(tmp_path, 50), "part-0.pt")  # being written
    checkpoint(tmp_path, 40, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iteration-000030",
        "iteration-000040",
        "iteration-000050",
    ]


def test_a_folder_of_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not named like"):
        checkpoints.iteration_of(tmp_path / "latest")


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (100, [5])])
def test_what_was_trained_for_is_saved_whatever_the_interval(every: int, due: list[int]) -> None:
    assert [iteration for iteration in range(1, 6) if checkpoints.is_due(every, iteration, 5)] == due
