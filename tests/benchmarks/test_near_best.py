"""The reference planner, which ours is measured against: what it says of a plan is what the product says."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from benchmarks.fail_stop import SETTINGS, Setting, asked, least_seconds
from benchmarks.near_best import Measured, read, run
from benchmarks.random_jobs import random_job, random_question
from benchmarks.reference_kernel import NOW, pipe_seconds
from benchmarks.reference_planner import ReferencePlanner, legal_seconds
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import decide
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.what_if.question import first_plan, pose


def test_random_jobs_are_the_same_for_the_same_seed_and_fit() -> None:
    assert random_question(5) == random_question(5)
    for seed in range(20):
        case = random_job(seed)
        assert case.memory_bytes is not None
        assert len(case.base.active) in range(16, 65)


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_references_pipelines_take_what_the_products_do(seed: int) -> None:
    """1F1B and zero-bubble, slow ranks, links between nodes; one replica for any number of micro-batches."""
    case = random_job(seed)
    case = msgspec.structs.replace(case, available=case.base.ranks)
    replica = max(case.base.replicas, key=lambda one: len(case.speeds.keys() & set(one.ranks)))
    planner = ReferencePlanner(case)
    planner.write(planner.pipes([replica]))
    for count in (1, 3, case.micro_batches):
        plan = Plan(epoch=2, layout=Layout((replica,)), assignment=spread(count, 1), schedule=case.schedule)
        ours = pipe_seconds.py_func(planner.job, planner.state, NOW, 0, count) + case.times.step_s
        assert math.isclose(ours, iteration_seconds(plan, case), rel_tol=1e-12)


@pytest.mark.soak  # its search takes half a minute to compile
@pytest.mark.parametrize("seed", range(1, 5))
def test_the_reference_finds_legal_plans_and_knows_what_they_take(seed: int) -> None:
    case = random_job(seed)
    found = ReferencePlanner(case, seed=seed).search(1.0)
    assert found is not None
    assert abs(found.model_off) < 1e-9
    assert math.isclose(legal_seconds(found.plan, case), found.seconds)


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    one = Measured(
        seed=1, large=False, job="", kinds=(), instant_ms=1.0, instant_s=2.0, anytime_s=None, reference_s=None
    )
    out.write_bytes(msgspec.json.encode(one) + b"\n" + msgspec.json.encode(one)[:20])
    assert read(out) == [one]
    assert run([1], 0.0, out=out) == [one], "it is not measured again"


def test_a_refused_job_that_has_a_plan_is_a_miss() -> None:
    case = dict(seed=1, large=False, job="", kinds=(), instant_ms=1.0)
    refused = Measured(**case, instant_s=None, anytime_s=None, reference_s=2.0)
    assert math.isinf(refused.gap("instant"))
    assert Measured(**case, instant_s=None, anytime_s=None, reference_s=None).gap("anytime") == 0.0
    assert math.isclose(Measured(**case, instant_s=2.2, anytime_s=2.0, reference_s=2.0).gap("instant"), 0.1)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.model)
def test_nothing_is_faster_than_the_bound_of_failing_gpus(setting: Setting) -> None:
    """The layout it was started with is not, nor is what the planner makes of an eighth fewer GPUs."""
    question = asked(setting)
    start = first_plan(question)
    case = pose(question, start)
    assert least_seconds(case, question.world) <= iteration_seconds(start, case)
    left = case.available[: -question.world // 8]
    damaged = msgspec.structs.replace(case, available=left)
    assert least_seconds(case, len(left)) <= decide(damaged).seconds


def test_a_search_comes_to_layouts_that_no_way_of_single_changes_leads_to() -> None:
    """Tight memory, ZeRO-1: two replicas of many stages are best, and what is between them and three has no room."""
    decision = decide(random_job(7011))
    assert min(seconds for _, seconds in decision.alternatives) > 5.6
    assert decision.seconds < 4.9


def test_where_the_best_candidate_leaves_a_stage_to_others_the_search_begins_with_whole_replicas() -> None:
    decision = decide(random_job(9006))
    others = dict(decision.alternatives)
    assert min(others, key=others.__getitem__) == "lost stages passed elsewhere"
    assert not decision.plan.layout.vacant
    assert decision.seconds < 0.95 * others["lost stages passed elsewhere"]
