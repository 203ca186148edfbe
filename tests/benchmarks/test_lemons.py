"""Lemons in drawn fleets: found, and nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lemons import KINDS, bound, by_hand, judged

FLEETS = 40


@pytest.mark.parametrize(
    ("kind", "least"), [("10 times, even", 30), ("20 times, even", 38), ("10 times, one board", 30)]
)
def test_lemons_are_found_in_half_a_year(kind: str, least: int) -> None:
    """Of 40, and one of 2,000 other nodes with them: what it comes to in 40 fleets, within two standard errors."""
    found, false = np.array([judged(KINDS[kind], (3, seed)) for seed in range(FLEETS)]).sum(axis=0)
    of_40, of_2000 = found * 40 / (FLEETS * 10), false * 2000 / (FLEETS * 500)
    assert of_40 >= least
    assert of_2000 <= 1.0 + 2.0 / np.sqrt(FLEETS / 4)
    assert of_40 <= 40


def test_a_fleet_without_lemons_has_none() -> None:
    false = sum(judged(KINDS["no lemons"], (3, seed))[1] for seed in range(FLEETS))
    assert false * 2000 / (FLEETS * 500) <= 0.5


def test_what_can_be_found_at_all() -> None:
    assert bound(10.0) == pytest.approx(31.0, abs=0.1)
    assert bound(20.0) == pytest.approx(39.9, abs=0.1)


def test_what_fleet_managers_bring_along() -> None:
    said = dict(by_hand())
    lemons = {
        "8 failures of different devices, 9 days apart",
        "the same, of device 3 alone",
        "the same, and 6 more failures after the repair",
        "6 failures of device 3 a week, for 5 weeks",
    }
    assert {words for words, told in said.items() if ": lemon" in told} == lemons
