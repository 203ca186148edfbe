"""Who stands by, and why: each reason from a situation in which it is the one."""

from __future__ import annotations

import msgspec
import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import Situation, decide
from resihp.scheduler.explained.explanation import explain
from resihp.scheduler.explained.idle import MAX_TRIES, Idle, reasons
from resihp.scheduler.layouts import groups
from resihp.scheduler.what_if import catalogue, question
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation


def plan_of(layout: Layout, micro_batches: int = 8) -> Plan:
    return Plan(epoch=2, layout=layout, assignment=spread(micro_batches, len(layout.replicas)))


def pipeline(groups: list[tuple[int, ...]], layers: int = 6) -> Replica:
    cut = [layers * s // len(groups) for s in range(len(groups) + 1)]
    return Replica(tuple(Stage(g, ((a, b - 1),)) for g, a, b in zip(groups, cut, cut[1:], strict=False)))


def told(layout: Layout, *, unfit: tuple[int, ...] = (), of: int = 8, **given: object) -> dict[tuple[int, ...], Idle]:
    case: Situation = situation(layout, nodes=on_nodes(16, of), lost=unfit, **given)  # type: ignore[arg-type]
    return {idle.ranks: idle for idle in reasons(plan_of(layout), case, unfit)}


def test_who_is_kept_out_and_who_stands_still_is_told_without_a_try() -> None:
    found = told(Layout((pipeline([(0,), (1,)]),), (2, 3)), tp=1, pp=2, unfit=(2,), speeds={3: 0.0})
    assert {ranks: idle.why for ranks, idle in found.items()} == {(2,): "unfit", (3,): "stopped"}


def test_a_slow_device_is_no_use_as_it_is_and_would_be_if_it_were_healthy() -> None:
    layout = Layout((pipeline([(0,), (1,)]),), (2,))
    (idle,) = told(layout, tp=1, pp=2, speeds={2: 0.05}, memory_bytes=10**9).values()
    assert idle.why == "too slow"
    assert idle.change is not None
    assert idle.change < -0.1


def test_a_stage_too_many_slows_a_pipeline_of_few_micro_batches() -> None:
    layout = Layout((pipeline([(0, 1), (2, 3)]),), (4,))
    case = situation(layout, nodes=on_nodes(5, 8), tp=2, pp=2, micro_batches=1, memory_bytes=10**9)
    (idle,) = reasons(plan_of(layout, 1), case)
    assert (idle.ranks, idle.why, idle.way) == ((4,), "slower", "stage")


def test_memory_that_is_too_small_for_anything_is_the_reason() -> None:
    """The stage that it would be at either end holds embedding or head, for which there is no room."""
    model = msgspec.structs.replace(MODEL, vocab=100_000)
    layout = Layout((pipeline([(0, 1), (2, 3)]),), (4,))
    case = situation(layout, nodes=on_nodes(5, 4), tp=2, pp=2, model=model, memory_bytes=60_000_000)
    (idle,) = reasons(plan_of(layout), case)
    assert (idle.ranks, idle.why) == ((4,), "memory")


def test_layers_may_be_too_few() -> None:
    layout = Layout((pipeline([(i,) for i in range(6)]),), (6,))
    (idle,) = reasons(plan_of(layout, 1), situation(layout, nodes=on_nodes(7, 4), tp=1, pp=6, micro_batches=1))
    assert idle.why == "layers"


def test_a_group_that_lacks_a_rank_cannot_take_one_of_another_node() -> None:
    model = msgspec.structs.replace(MODEL, layers=2)
    layout = Layout((pipeline([(0,), (1, 2)], layers=2),), (4,))
    case = situation(layout, nodes=on_nodes(5, 4), tp=2, pp=2, model=model, micro_batches=1)
    (idle,) = reasons(plan_of(layout, 1), case)
    assert (idle.why, idle.way) == ("node", "group")
    assert idle.change is not None
    assert idle.change < -0.2


def test_what_would_gain_is_not_passed_over() -> None:
    """A larger group of the same node: told as a gain, whatever the planner thought."""
    layout = Layout((pipeline([(0,), (1, 2)]),), (3,))
    (idle,) = told(layout, tp=2, pp=2).values()
    assert (idle.why, idle.way) == ("gain", "group")


def test_where_memory_is_not_known_a_further_stage_is_left_out_for_that() -> None:
    layout = Layout((pipeline([(0,), (1,), (2,)]),), (3,))
    (idle,) = told(layout, tp=1, pp=3).values()
    assert (idle.why, idle.way) == ("memory unknown", "stage")


@pytest.mark.parametrize("replicas", [8, 64])
def test_a_large_job_takes_no_more_tries_than_a_small_one(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def counted(case: Situation, pipe: groups.Pipe, replicas: int) -> Replica:
        tries.append(pipe)
        return groups.lay(case, pipe, replicas)

    monkeypatch.setattr("resihp.scheduler.explained.idle.lay", counted)
    asked = question.Question(
        model=catalogue.model("llama2-13b", 4096),
        hardware=catalogue.KNOWN_HARDWARE["a100"],
        tp=4,
        dp=replicas,
        pp=4,
        micro_batches=8,
        gpus_per_node=8,
        sequence_parallel=True,
        failed=tuple(range(5, 16 * replicas, 16)),
    )
    base = question.first_plan(asked)
    case = question.pose(asked, base)
    decision = decide(case)
    found = explain(decision.plan, decision.seconds, case)
    assert {rank for one in found.idle for rank in one.ranks} == set(decision.plan.layout.standby)
    assert len(tries) <= MAX_TRIES
