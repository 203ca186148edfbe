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


@pytest.mark.parametrize(
    ("near", "allowed", "bound"),
    [
        (("0-3", "4-7"), 8, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}),
        (("0-3", "0-3"), 4, {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}),
        (("0-61", "62-63"), 64, {0: tuple(range(62))}),
        (("0-3", "0-3"), 8, {}),
        (("0-3", None), 8, {0: (0, 1, 2, 3)}),
    ],
    ids=["a half each", "all", "two of 64 CPUs", "a NUMA node of many", "one GPU of which nothing is known"],
)
def test_a_worker_is_bound_only_to_its_fair_share_of_cpus(
    tmp_path: Path, near: tuple[str | None, ...], allowed: int, bound: dict[int, tuple[int, ...]]
) -> None:
    for number, listed in enumerate(near):
        if listed is not None:
            (tmp_path / f"0000:0{number}:00.0").mkdir()
            (tmp_path / f"0000:0{number}:00.0" / "local_cpulist").write_text(listed)
    buses = {number: f"0000:0{number}:00.0" for number in range(len(near))}
    assert affinity.chosen(buses, set(range(allowed)), tmp_path) == bound


@pytest.mark.parametrize("bus", ["", "../../../etc", "0000:1b:00.0"])
def test_an_unknown_gpu_has_no_cpus(bus: str, tmp_path: Path) -> None:
    assert affinity.near(bus, {0}, tmp_path) == ()


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((1, 0), "0-1"), ((0, 1, 2, 8, 10, 11), "0-2,8,10-11")]
)
def test_numbers_are_shown_as_the_kernel_shows_them(numbers: tuple[int, ...], text: str) -> None:
    assert affinity.ranges(numbers) == text
