"""What is known of releases, and of those that nobody has tried."""

from __future__ import annotations

import msgspec
import pytest

from resihp.slurm import releases


@pytest.mark.parametrize(
    ("version", "facts"),
    [
        ((20, 11, 9), {"forgets_gpus"}),
        ((22, 5, 8), {"forgets_gpus"}),
        ((24, 5, 0), {"forgets_gpus", "keeps_preemption"}),
        ((24, 11, 5), {"keeps_preemption"}),
        ((25, 11, 0), {"keeps_preemption", "expedites"}),
        ((26, 5, 5), {"expedites"}),
        ((31, 1, 0), {"expedites"}),
    ],
)
def test_facts(version: releases.Version, facts: set[str]) -> None:
    assert {name for name, holds in msgspec.structs.asdict(releases.of(version)).items() if holds} == facts


@pytest.mark.parametrize("version", [(22, 5, 0), (23, 2, 7), (24, 11, 5), (26, 5, 9)])
def test_nothing_is_told_of_releases_between_those_tried(version: releases.Version) -> None:
    assert releases.untried(version) is None


def test_one_line_tells_of_others() -> None:
    assert releases.untried((20, 11, 9)) == (
        "Slurm 20.11.9 is older than the releases that resihp was tested with (22.05 to 26.05); continuing"
    )
    assert releases.untried((27, 5, 0)) == (
        "Slurm 27.05.0 is newer than the releases that resihp was tested with (22.05 to 26.05); continuing"
    )
