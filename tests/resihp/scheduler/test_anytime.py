"""Plans that are made better for as long as there is time: never worse, always legal, the same for the same trials."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline import checker
from resihp.scheduler import decide
from resihp.scheduler.anytime import Anytime
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.search.annealing import EXTRA_STAGES
from resihp.scheduler.situation import Decision, Situation
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question, first_plan, pose
from tests.resihp.scheduler import cases

ROOM = 100_000_000


def asked(
    tp: int, dp: int, pp: int, failed: tuple[int, ...], model: str = "llama2-13b", sequence: int = 4096, **more: Any
) -> Situation:
    given: dict[str, Any] = {"micro_batches": 8, "gpus_per_node": 8, "sequence_parallel": True, "failed": failed}
    question = Question(
        model=catalogue.model(model, sequence),
        hardware=catalogue.hardware("a100"),
        tp=tp,
        dp=dp,
        pp=pp,
        **given | more,
    )
    return pose(question, first_plan(question))


def searched(case: Situation, trials: int, seed: int = 0) -> tuple[Decision, Decision]:
    """At once, and after so many trials."""
    instant = decide(case)
    anytime = Anytime(case, instant, seed)
    anytime.run(trials)
    return instant, anytime.decision()


@pytest.mark.parametrize(
    ("case", "trials", "best"),
    [
        (asked(4, 2, 2, (15,), slow={11: 0.5}), 15000, 2.472),
        (asked(4, 2, 4, (1, 6, 9, 14)), 15000, 1.453),
        (asked(4, 2, 4, (5, 22)), 15000, 1.436),
        (asked(4, 2, 4, (5, 22), model="llama2-30b", sequence=8192, micro_batches=3), 15000, 4.065),
        (asked(4, 1, 4, (5,), model="llama2-30b", sequence=12288, micro_batches=2), 5000, 5.41),
    ],
    ids=["one dead, one slow", "four dead", "two dead", "little memory", "little memory, two micro-batches"],
)
def test_what_long_searches_found_is_found_within_two_percent(case: Situation, trials: int, best: float) -> None:
    instant, found = searched(case, trials)
    assert found.seconds <= instant.seconds
    assert found.seconds < 1.02 * best
    if found != instant:
        assert found.alternatives[0] == ("at once", instant.seconds)


@settings(max_examples=40, deadline=None)
@given(cases.cases(), st.sampled_from([None, ROOM, 2_000_000, 700_000]))
def test_what_is_found_is_legal_and_as_fast_as_is_said(case: Situation, memory_bytes: int | None) -> None:
    case = msgspec.structs.replace(case, memory_bytes=memory_bytes)
    try:
        instant, found = searched(case, 60)
    except PlanError:
        return  # nothing fits
    assert found.seconds <= instant.seconds
    if found is not instant:
        cases.check(msgspec.structs.replace(case, pp=case.pp + EXTRA_STAGES), found)
        assert found.seconds == pytest.approx(iteration_seconds(found.plan, case))
        assert case.room_bytes is not None
        assert memory.obstacle(found.plan, case.model, case.room_bytes, case.tokens) is None


def test_what_is_found_can_be_carried_out_also_with_orders_of_its_own() -> None:
    case = asked(4, 2, 4, (1, 6, 9, 14), schedule="zero-bubble")
    instant, found = searched(case, 1000)
    assert instant.plan.orders
    assert found.plan.orders
    assert found.seconds <= instant.seconds < 0.95 * dict(instant.alternatives)["progressive"]
    checker.check(found.plan)
    assert found.seconds == pytest.approx(iteration_seconds(found.plan, case))


def test_under_zero_1_a_layout_is_held_to_the_memory_that_its_number_of_replicas_leaves() -> None:
    case = asked(4, 2, 2, (1,), model="llama2-30b", sequence=8192, zero_1=True)
    instant, found = searched(case, 1000)
    assert found.seconds <= instant.seconds
    replicas = len(found.plan.layout.replicas)
    obstacle = memory.obstacle(
        found.plan,
        case.model,
        case.memory_bytes or 0,
        case.tokens,
        state_bytes=case.state_bytes_of(replicas),
        overhead=case.overhead,
    )
    assert obstacle is None


def test_more_devices_than_a_search_gets_round_to_are_told() -> None:
    base = Layout.uniform(tp=4, pp=6, dp=100, layers=6)
    nodes = cases.on_nodes(2400, 8)
    case = cases.situation(base, nodes=nodes, tp=4, pp=6, memory_bytes=ROOM, micro_batches=100)
    instant = Decision(plan=Plan(epoch=1, layout=base, assignment=spread(100, 100)), seconds=1.0, reason="")
    assert Anytime(case, instant).obstacle == "2400 devices are too many for a search"


def test_the_same_seed_and_trials_find_the_same() -> None:
    case = asked(4, 2, 2, (15,), slow={11: 0.5})
    one, other = (searched(case, 400, seed=3)[1] for _ in range(2))
    assert one == other
    instant = decide(case)
    stepwise = Anytime(case, instant, 3)
    for _ in range(20):
        stepwise.run(20)
    assert stepwise.decision() == one


def test_where_memory_is_not_known_or_stages_have_several_chunks_the_instant_plan_stays_and_it_says_why() -> None:
    nodes = cases.on_nodes(16, 4)
    unknown = cases.situation(Layout.uniform(tp=4, pp=2, dp=2, layers=6), nodes=nodes, tp=4, pp=2, lost=[1])
    base = Layout.uniform(tp=4, pp=2, dp=2, layers=8, chunks=2)
    model = msgspec.structs.replace(cases.MODEL, layers=8)
    chunks = cases.situation(base, nodes=nodes, tp=4, pp=2, lost=[1], chunks=2, model=model, memory_bytes=ROOM)
    for case, why in ((unknown, "memory is unknown"), (chunks, "several chunks")):
        instant = decide(case)
        anytime = Anytime(case, instant)
        assert anytime.obstacle is not None
        assert why in anytime.obstacle
        assert not anytime.run(200)
        assert anytime.decision() == instant


def test_a_job_of_one_device_has_nothing_to_search() -> None:
    case = cases.situation(Layout.uniform(tp=1, pp=1, dp=1, layers=6), nodes={0: "n1"}, tp=1, pp=1, memory_bytes=ROOM)
    instant, found = searched(case, 100)
    assert found == instant
