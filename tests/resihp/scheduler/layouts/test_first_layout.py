"""The first layout, tuned: faster than the grid where layers differ, within memory, and a plan that can be run."""

from __future__ import annotations

import msgspec
import pytest

from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline import checker
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts.first_layout import tuned
from resihp.scheduler.planner import first_plan
from resihp.scheduler.situation import Situation

HEAVY_HEAD = ModelSpec(layers=16, hidden=512, heads=8, kv_groups=8, ffn_hidden=2048, vocab=24000, sequence=512)
"""Whose head costs about four layers."""
EVEN = msgspec.structs.replace(HEAVY_HEAD, vocab=128)


def grid(model: ModelSpec = HEAVY_HEAD, pp: int = 4, dp: int = 2, micro_batches: int = 16) -> Plan:
    return first_plan(
        model=model, nodes={rank: f"n{rank // 4}" for rank in range(pp * dp)}, tp=1, pp=pp, micro_batches=micro_batches
    )


def situation(plan: Plan, model: ModelSpec = HEAVY_HEAD, **changes: object) -> Situation:
    given = Situation(
        epoch=1,
        base=plan.layout,
        available=plan.layout.ranks,
        nodes={rank: f"n{rank // 4}" for rank in plan.layout.ranks},
        model=model,
        micro_batches=plan.micro_batches,
        tokens=512,
        tp=1,
        pp=len(plan.layout.replicas[0].stages),
    )
    return msgspec.structs.replace(given, **changes)


def test_a_heavy_head_has_fewer_layers_beside_it() -> None:
    plan = grid()
    asked = situation(plan)
    found = tuned(plan, asked)
    assert found.seconds < 0.85 * iteration_seconds(plan, asked)
    assert found.seconds == pytest.approx(iteration_seconds(found.plan, asked))
    first, *_, last = found.plan.layout.replicas[0].stages
    assert len(last.layers) < 4 <= len(first.layers)
    assert {len(stage.chunks) for replica in found.plan.layout.replicas for stage in replica.stages} == {1}
    assert {tuple(stage.ranks for stage in replica.stages) for replica in found.plan.layout.replicas} == {
        tuple(stage.ranks for stage in replica.stages) for replica in plan.layout.replicas
    }
    assert found.alternatives == (("Megatron's grid", iteration_seconds(plan, asked)),)
    checker.check(found.plan)


def test_equal_questions_have_equal_answers() -> None:
    plan = grid()
    assert tuned(plan, situation(plan)) == tuned(plan, situation(plan))


def test_no_stage_keeps_more_than_the_grids_fullest_where_memory_is_not_known() -> None:
    plan = grid()
    found = tuned(plan, situation(plan)).plan

    def most(of: Plan) -> int:
        bytes_needed = [memory.needed_bytes(of, rank, EVEN, 512, state_bytes=0) for rank in of.layout.active]
        return max(bytes_needed)

    assert most(found) <= 1.05 * most(plan)


def test_what_does_not_fit_is_no_answer() -> None:
    plan = grid()
    needs = max(memory.needed_bytes(plan, rank, HEAVY_HEAD, 512) for rank in plan.layout.active)
    tight = situation(plan, memory_bytes=needs)
    found = tuned(plan, tight)
    assert memory.obstacle(found.plan, HEAVY_HEAD, needs, 512) is None
    assert found.seconds <= iteration_seconds(plan, tight)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (grid(pp=1), "one stage: nothing to tune"),
        (grid(micro_batches=15), "replicas with unequal shares of the batch: nothing to tune"),
    ],
)
def test_what_cannot_be_tuned_stays(plan: Plan, why: str) -> None:
    found = tuned(plan, situation(plan))
    assert (found.plan, found.alternatives) == (plan, ())
    assert found.reason.endswith(why)


def test_virtual_stages_are_used_where_they_may_be() -> None:
    plan = grid(model=EVEN, dp=1, micro_batches=4)
    asked = situation(plan, EVEN)
    assert tuned(plan, asked, most_chunks=4).seconds < tuned(plan, asked).seconds
    assert spread(4, 1) == plan.assignment
