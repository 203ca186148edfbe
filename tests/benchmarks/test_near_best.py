"""The reference planner, which ours is measured against: what it says of a plan is what the product says."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from benchmarks.near_best import Measured, measured, read, run
from benchmarks.random_jobs import random_job, random_question
from benchmarks.reference_planner import ReferencePlanner, legal_seconds


def test_random_jobs_are_the_same_for_the_same_seed_and_fit() -> None:
    assert random_question(5) == random_question(5)
    for seed in range(20):
        case = random_job(seed)
        assert case.memory_bytes is not None
        assert len(case.base.active) in range(16, 65)


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_references_model_says_what_the_products_says(seed: int) -> None:
    """1F1B and zero-bubble, slow ranks and links, gradient synchronisation; the plan is legal and fits."""
    case = random_job(seed)
    found = ReferencePlanner(case, seed=seed).search(0.2)
    assert found is not None
    assert abs(found.model_off) < 1e-9
    assert math.isclose(legal_seconds(found.plan, case), found.seconds)


def test_a_run_that_was_cut_goes_on_and_keeps_what_was_known(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    one = measured(1, 0.2)
    out.write_bytes(msgspec.json.encode(one) + b"\n" + msgspec.json.encode(one)[:100])
    assert [found.seed for found in read(out)] == [1]
    assert run([1], 0.0, out=out) == [one], "it is not measured again"
    again = measured(1, 0.0, known=one.known)
    assert again.reference_s is None
    assert again.known_s is not None
    assert math.isclose(again.best_s, one.best_s)


def test_a_refused_job_that_has_a_plan_is_a_miss() -> None:
    case = dict(seed=1, large=False, job="", kinds=(), instant_ms=1.0)
    refused = Measured(**case, instant_s=None, anytime_s=None, reference_s=2.0)
    assert math.isinf(refused.gap("instant"))
    assert Measured(**case, instant_s=None, anytime_s=None, reference_s=None).gap("anytime") == 0.0
    assert math.isclose(Measured(**case, instant_s=2.2, anytime_s=2.0, reference_s=2.0).gap("instant"), 0.1)
