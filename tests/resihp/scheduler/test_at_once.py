"""The instant answer: searched for within milliseconds, from what is known to run."""

from __future__ import annotations

import msgspec
import pytest

from resihp.parallelism.layout import Layout, validate
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import Situation, anytime, decide
from resihp.scheduler.candidates import TIE_TOLERANCE, PricedPlan, best_of
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question, first_plan, pose


def asked(*failed: int, slow: dict[int, float] | None = None, schedule: str = "1f1b") -> Situation:
    question = Question(
        model=catalogue.model("llama2-13b", 4096),
        hardware=catalogue.hardware("a100"),
        tp=4,
        dp=2,
        pp=4,
        micro_batches=8,
        gpus_per_node=8,
        sequence_parallel=True,
        schedule=schedule,
        failed=failed,
        slow=slow or {},
    )
    return pose(question, first_plan(question))


CASES = (asked(5, 22), asked(16, 28), asked(1, 6, 9, 14), asked(15, slow={11: 0.5}, schedule="zero-bubble"))


@pytest.mark.parametrize("case", CASES)
def test_legal_as_fast_as_is_said_and_asked_again_no_slower(case: Situation) -> None:
    decision = decide(case)
    plan = decision.plan
    validate(plan.layout, case.model)
    assert plan.layout.ranks == tuple(sorted(case.available))
    assert case.memory_bytes is not None
    told = memory.obstacle(
        plan, case.model, case.memory_bytes, case.tokens, state_bytes=case.state_bytes_of(2), overhead=case.overhead
    )
    assert told is None
    assert iteration_seconds(plan, case) == pytest.approx(decision.seconds, rel=1e-9)
    again = decide(msgspec.structs.replace(case, base=plan.layout))
    assert again.seconds <= decision.seconds
    if again.seconds >= decision.seconds * (1 - TIE_TOLERANCE):
        assert again.plan.layout == plan.layout
    assert decide(case) == decision


@pytest.mark.parametrize("case", CASES[:2])
def test_replicas_that_are_alike_damaged_are_mended_both(case: Situation) -> None:
    """One of them alone gains nothing, for the other one is last."""
    decision = decide(case)
    damaged = dict(decision.alternatives)["progressive"]
    assert decision.seconds < 0.97 * damaged
    assert len(decision.plan.layout.standby) < 6, "what the progressive planner leaves idle"


def test_ranks_are_dealt_out_anew_where_nothing_else_is_there() -> None:
    case = asked(5, 22)
    found = anytime.at_once(case, [])
    assert found is not None
    validate(found.plan.layout, case.model)
    assert found.plan.layout.ranks == tuple(sorted(case.available))
    assert found.seconds == pytest.approx(iteration_seconds(found.plan, case))


def test_without_what_a_search_would_find_the_plan_is_the_one_made_without_searching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that can run is found with room on the way to it until single changes are looked for."""
    question = Question(
        model=catalogue.model("llama2-30b", 2048),
        hardware=msgspec.structs.replace(catalogue.hardware("h100"), memory_bytes=52_500_000_000),
        tp=4,
        pp=5,
        dp=2,
        micro_batches=16,
        gpus_per_node=8,
        sequence_parallel=True,
        failed=(1, 11, 23, 32),
        slow={17: 0.7},
    )
    case = pose(question, first_plan(question))
    monkeypatch.setattr(anytime, "at_once", lambda *_: None)
    assert decide(case) == decide(case, search=False)


def test_where_memory_is_not_known_layouts_change_as_little_as_they_can() -> None:
    case = msgspec.structs.replace(asked(5, 22), memory_bytes=None)
    assert anytime.at_once(case, []) is None
    assert decide(case).reason.startswith("progressive: predicted")


def test_no_more_pipelines_than_there_are_micro_batches() -> None:
    """Three devices, each of which could be a replica, and two micro-batches."""
    grid = Layout.uniform(tp=1, pp=1, dp=2, layers=8)
    model = ModelSpec(layers=8, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=64, sequence=9)
    nodes = {rank: f"n{rank}" for rank in range(3)}
    case = Situation(
        epoch=2,
        base=grid,
        available=(0, 1, 2),
        nodes=nodes,
        model=model,
        micro_batches=2,
        tp=1,
        pp=1,
        memory_bytes=10**9,
    )
    assert decide(case).plan.layout.replicas == grid.replicas


def test_of_equally_fast_plans_the_one_whose_state_has_two_holders() -> None:
    """Although what is there is one long pipeline, so that two short ones move bytes."""
    long, short = Layout.uniform(tp=1, pp=4, dp=1, layers=8), Layout.uniform(tp=1, pp=2, dp=2, layers=8)
    model = ModelSpec(layers=8, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=64, sequence=9)
    case = Situation(
        epoch=2,
        base=long,
        available=(0, 1, 2, 3),
        nodes={rank: "n1" for rank in range(4)},
        model=model,
        micro_batches=2,
        tp=1,
        pp=4,
    )
    plans = [
        PricedPlan(name, Plan(epoch=2, layout=layout, assignment=spread(2, len(layout.replicas))), seconds)
        for name, layout, seconds in (("long", long, 1.0), ("short", short, 1.0 + TIE_TOLERANCE / 2))
    ]
    assert best_of(case, plans).name == "short"
    slower = msgspec.structs.replace(plans[1], seconds=1.0 + 2 * TIE_TOLERANCE)
    assert best_of(case, [plans[0], slower]).name == "long"
