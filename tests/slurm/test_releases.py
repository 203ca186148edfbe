"""What is known of releases, and of those that nobody has tried."""

from __future__ import annotations

import pytest

from slurm import releases


@pytest.mark.parametrize(
    ("version", "keeps_preemption", "expedites"),
    [
        ((20, 11, 9), False, False),
        ((22, 5, 8), False, False),
        ((24, 5, 0), True, False),
        ((24, 11, 5), True, False),
        ((25, 11, 0), True, True),
        ((26, 5, 5), False, True),
        ((31, 1, 0), False, True),
    ],
)
def test_facts(version: releases.Version, keeps_preemption: bool, expedites: bool) -> None:
    assert releases.of(version) == releases.Release(keeps_preemption=keeps_preemption, expedites=expedites)


@pytest.mark.parametrize("version", [(22, 5, 0), (23, 2, 7), (24, 11, 5), (26, 5, 9)])
def test_nothing_is_told_of_releases_between_those_tried(version: releases.Version) -> None:
    assert releases.untried(version) is None


def test_one_line_tells_of_others() -> None:
    assert releases.untried((20, 11, 9)) == (
        "Slurm 20.11.9 is older than those that resihp was tried with (22.05 to 26.05); going on"
    )
    assert releases.untried((27, 5, 0)) == (
        "Slurm 27.05.0 is newer than those that resihp was tried with (22.05 to 26.05); going on"
    )
