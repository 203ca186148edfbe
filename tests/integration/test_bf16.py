"""Training in bf16 follows fp32, and failures do not show in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from tests.integration.jobs import Job, jobs

BF16 = ("--bf16",)
SOAK = pytest.mark.soak
LONG, SHORT = 300, 12
LIMIT_S = 1000.0
EIGHT = {"nodes": 2, "gpus": 4, "tp": 2, "pp": 2}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    yield from jobs(tmp_path)


def losses(job: Job, iterations: int) -> list[float]:
    assert job.status == 0, job.stderr
    found = job.losses()
    assert list(found) == list(range(1, iterations + 1))
    return list(found.values())


def smoothed(curve: list[float]) -> list[float]:
    """Exponential moving average over some 20 iterations."""
    return list(accumulate(curve, lambda mean, loss: 0.95 * mean + 0.05 * loss))


@SOAK
@pytest.mark.timeout(2 * LIMIT_S)
def test_300_iterations_follow_fp32(make: Callable[[str], Job]) -> None:
    alone = {"nodes": 1, "gpus": 1, "tp": 1, "pp": 1}
    half = losses(make("bf16").train(script=BF16, iterations=LONG, **alone).wait(LIMIT_S), LONG)
    full = losses(make("fp32").train(iterations=LONG, **alone).wait(LIMIT_S), LONG)
    assert half != full
    assert smoothed(half) == pytest.approx(smoothed(full), rel=0.01)
    assert smoothed(half)[-1] < 0.75 * half[0], "something was learned"


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("iterations", [SHORT, pytest.param(LONG, marks=SOAK)])
def test_three_failures_and_a_come_back_do_not_show(make: Callable[[str], Job], iterations: int) -> None:
    faults = (
        "kill:rank=1@iteration=3,phase=backward",
        "crash:rank=6@iteration=5,phase=forward",
        "kill:rank=4@iteration=8,phase=reduce",
    )
    options = tuple(word for fault in faults for word in ("--fault", fault))
    disturbed = make("disturbed").train(*options, script=BF16, iterations=iterations, **EIGHT).wait(LIMIT_S)
    calm = make("undisturbed").train(script=BF16, iterations=iterations, **EIGHT).wait(LIMIT_S)
    undisturbed = losses(calm, iterations)
    found = losses(disturbed, iterations)
    assert found[:2] == undisturbed[:2], "reproducible to the bit, on the same layout"
    assert found[:50] == pytest.approx(undisturbed[:50], rel=1e-3)
    assert smoothed(found) == pytest.approx(smoothed(undisturbed), rel=1e-3)
    assert len(disturbed.history("failures")) == 3
    assert max(row["rank"] for row in disturbed.history("workers")) >= 8, "somebody came back"
