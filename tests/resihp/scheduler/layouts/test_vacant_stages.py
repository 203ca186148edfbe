"""Stages without ranks among the plans that the planner compares: where memory leaves little else."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, validate
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.checker import check
from resihp.scheduler import Situation, decide
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts import vacant_stages
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation

LARGE = msgspec.structs.replace(MODEL, layers=24)
WIDE = Layout.uniform(tp=4, pp=2, dp=2, layers=24)


def without(lost: list[int], room: float) -> Situation:
    """Two pipelines of two nodes, each of which is a stage, with `room` times the memory that is needed at first."""
    plan = Plan(epoch=1, layout=WIDE, assignment=spread(32, 2))
    need = max(memory.needed_bytes(plan, rank, LARGE, 64) for rank in WIDE.active)
    return situation(
        WIDE,
        nodes=on_nodes(16, 4),
        tp=4,
        pp=2,
        lost=lost,
        model=LARGE,
        micro_batches=32,
        memory_bytes=int(need * room),
        tokens=64,
    )


def test_where_half_a_pipeline_has_no_room_for_the_model_it_does_its_part() -> None:
    """The node that is left would stand by; as first stage of both pipelines it may hold more of the layers. (A search
    finds two pipelines that are faster by a fiftieth.)"""
    case = without([4, 5, 6, 7], 1.35)
    decision = decide(case, search=False)
    plan = decision.plan
    assert plan.layout.vacant == ((0, 1),), decision.reason
    assert "lost stages passed elsewhere" in decision.reason
    validate(plan.layout, case.model)
    check(plan)
    assert case.memory_bytes is not None
    assert memory.obstacle(plan, case.model, case.memory_bytes, case.tokens) is None
    assert decision.seconds == pytest.approx(iteration_seconds(plan, case))
    assert decision.seconds * 1.4 < dict(decision.alternatives)["without lost replicas"]
    assert decide(case).seconds <= decision.seconds
    after = decide(msgspec.structs.replace(case, base=plan.layout), search=False)
    assert after.plan.layout == plan.layout, "asked again, it stays"


def test_with_less_room_one_longer_pipeline_of_all_ranks_is_better_still() -> None:
    decision = decide(without([4, 5, 6, 7], 1.2))
    others = dict(decision.alternatives)
    assert others["lost stages passed elsewhere"] * 1.15 < others["without lost replicas"]
    assert decision.seconds * 1.2 < others["lost stages passed elsewhere"]
    assert not decision.plan.layout.vacant


@pytest.mark.parametrize("room", [1.05, 2.0])
def test_else_ranks_are_put_together_anew_or_stand_by(room: float) -> None:
    assert not decide(without([4, 5, 6, 7], room)).plan.layout.vacant


def test_slow_links_beside_it_are_no_matter() -> None:
    case = msgspec.structs.replace(without([4, 5, 6, 7], 1.35), links={("n1", "n3"): 0.3})
    assert decide(case, search=False).plan.layout.vacant == ((0, 1),)


def test_it_is_looked_for_where_it_may_be_the_best() -> None:
    case = without([4, 5, 6, 7], 1.35)
    assert vacant_stages.may_help(case)
    assert not vacant_stages.may_help(without([], 1.35)), "nobody is lost"
    assert not vacant_stages.may_help(msgspec.structs.replace(case, memory_bytes=None)), "guests need room"
    with pytest.raises(PlanError, match="no plan is faster"):
        vacant_stages.best(case, below=1.0)


def test_nobody_left_and_a_stage_that_nobody_could_hold_are_errors() -> None:
    with pytest.raises(PlanError, match="nothing can run on 0 ranks"):
        decide(without(list(range(16)), 1.2))
    with pytest.raises(PlanError, match="nothing can run on 4 ranks"):
        decide(without(list(range(4, 16)), 1.05))
