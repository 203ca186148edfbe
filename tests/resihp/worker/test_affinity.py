"""The CPUs near a GPU, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.worker import affinity

BUS = "0001:E3:00.0"


@pytest.mark.parametrize(
    ("listed", "allowed", "near"),
    [
        ("0-1,4-5\n", {0, 1, 2, 3}, (0, 1)),
        ("4-7", {0, 1, 2, 3}, ()),
        ("", {0, 1}, ()),
        ("none", {0, 1}, ()),
        (None, {0, 1}, ()),
    ],
    ids=["near and allowed", "bound elsewhere by the user", "empty", "no numbers", "no such file"],
)
def test_only_cpus_of_the_job_count(
    tmp_path: Path, listed: str | None, allowed: set[int], near: tuple[int, ...]
) -> None:
    if listed is not None:
        (tmp_path / BUS.lower()).mkdir()
        (tmp_path / BUS.lower() / "local_cpulist").write_text(listed)
    assert affinity.near(BUS, allowed, tmp_path) == near


@pytest.mark.parametrize("bus", ["", "../../../etc", "0000:1b:00.0"])
def test_an_unknown_gpu_has_no_cpus(bus: str, tmp_path: Path) -> None:
    assert affinity.near(bus, {0}, tmp_path) == ()


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((1, 0), "0-1"), ((0, 1, 2, 8, 10, 11), "0-2,8,10-11")]
)
def test_numbers_are_shown_as_the_kernel_shows_them(numbers: tuple[int, ...], text: str) -> None:
    assert affinity.ranges(numbers) == text
