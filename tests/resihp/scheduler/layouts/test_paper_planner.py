"""The paper's planner: exclusion, repartition, migration, one after the other."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import Layout, validate
from resihp.parallelism.plan import Migration, Plan, spread
from resihp.pipeline.checker import check as check_programs
from resihp.scheduler import Situation
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.layouts.paper_planner import STEP_NAMES, progressive, proportional
from tests.resihp.scheduler.cases import MODEL, cases, on_nodes, situation

TWELVE = msgspec.structs.replace(MODEL, layers=12, vocab=4)


def ranks(layout: Layout) -> list[list[tuple[int, ...]]]:
    return [[stage.ranks for stage in replica.stages] for replica in layout.replicas]


def layers(layout: Layout) -> list[list[int]]:
    return [[len(stage.layers) for stage in replica.stages] for replica in layout.replicas]


# --- TP: Eq. 3-4 --------------------------------------------------------------------------------------------------

WIDE = Layout.uniform(tp=4, pp=2, dp=2, layers=12)


@pytest.mark.parametrize(("x", "size"), [(0.9, 4), (0.51, 4), (0.5, 4), (0.49, 2), (0.1, 2)])
def test_group_of_four_keeps_a_slow_rank_of_half_the_speed_or_more(x: float, size: int) -> None:
    """4 x > 2 exactly when x > 0.5; a tie keeps the larger group."""
    case = situation(WIDE, nodes=on_nodes(16, 4), tp=4, pp=2, model=TWELVE, speeds={3: x})
    layout = progressive(case, STEP_NAMES[:1]).plan.layout
    group = layout.replicas[0].stages[0].ranks
    assert len(group) == size
    assert (3 in group) == (size == 4)
    assert layout.standby == tuple(sorted({0, 1, 2, 3}.difference(group)))
    assert ranks(layout)[1] == ranks(WIDE)[1]


def test_group_that_lost_a_rank_goes_on_as_two_and_next_takes_whom_it_left_over() -> None:
    case = situation(WIDE, nodes=on_nodes(16, 4), tp=4, pp=2, model=TWELVE, lost=[1])
    once = progressive(case).plan.layout
    assert (ranks(once)[0][0], once.standby) == ((0, 2), (3,))
    again = situation(once, nodes=on_nodes(16, 4), tp=4, pp=2, model=TWELVE, lost=[2])
    assert ranks(progressive(again).plan.layout)[0][0] == (0, 3), "G' still has two"


def test_standby_serves_its_own_node_only() -> None:
    once = progressive(situation(WIDE, nodes=on_nodes(16, 4), tp=4, pp=2, model=TWELVE, lost=[1])).plan.layout
    case = situation(once, nodes=on_nodes(16, 4), tp=4, pp=2, model=TWELVE, lost=[5, 6, 7])
    layout = progressive(case).plan.layout
    assert (ranks(layout)[0], layout.standby) == ([(0, 2), (4,)], (3,))


def test_smallest_degree_follows_from_memory() -> None:
    """Where one rank cannot hold a layer, a group that is down to one is lost."""
    model = msgspec.structs.replace(TWELVE, layers=2)
    post = memory.StageSetup(stage=0, stages=2, tp=4, micro_batches=8)
    pair = next(n for n in range(0, 10**7, 10**4) if memory.smallest_degree(model, post, n, 64) == 2)
    base = Layout.uniform(tp=4, pp=2, dp=2, layers=2)
    case = situation(base, nodes=on_nodes(16, 4), tp=4, pp=2, model=model, lost=[0, 1, 2], memory_bytes=pair, tokens=64)
    layout = progressive(case).plan.layout
    assert (layout.vacant, layout.standby) == (((0, 0),), (3,))
    assert not progressive(msgspec.structs.replace(case, memory_bytes=None)).plan.layout.vacant


# --- PP: one partition for all ------------------------------------------------------------------------------------


def test_four_four_four_becomes_five_two_five() -> None:
    assert proportional(12, (1, 0.4, 1)) == (5, 2, 5)
    base = Layout.uniform(tp=1, pp=3, dp=2, layers=12)
    case = situation(base, nodes=on_nodes(6, 3), tp=1, pp=3, model=TWELVE, speeds={1: 0.4})
    assert layers(progressive(case, STEP_NAMES[:2]).plan.layout) == [[5, 2, 5]] * 2, "the healthy replica, too"
    assert layers(progressive(case, STEP_NAMES[:1]).plan.layout) == [[4, 4, 4]] * 2


def test_slowest_replica_at_each_stage_decides() -> None:
    base = Layout.uniform(tp=1, pp=3, dp=2, layers=12)
    case = situation(base, nodes=on_nodes(6, 3), tp=1, pp=3, model=TWELVE, speeds={0: 0.5, 4: 0.5})
    assert layers(progressive(case, STEP_NAMES[:2]).plan.layout) == [[3, 3, 6]] * 2


@given(st.lists(st.sampled_from([0.1, 0.3, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=8), st.integers(8, 80))
def test_layers_are_within_one_of_their_share_or_at_a_limit(speeds: list[float], total: int) -> None:
    counts = proportional(total, speeds)
    assert sum(counts) == total
    assert min(counts) >= 1
    due = [total * speed / sum(speeds) for speed in speeds]
    if all(share >= 1 for share in due):
        assert all(abs(count - share) < 1 + 1e-9 for count, share in zip(counts, due, strict=True))
    for (a, n), (b, k) in zip(zip(speeds, counts, strict=True), zip(speeds[1:], counts[1:], strict=True), strict=False):
        assert n >= k or a < b or (a == b and n + 1 == k), "no slower stage has more"


def test_layers_respect_memory() -> None:
    assert proportional(12, (1, 0.4, 1), limits=(4, 12, 12)) == (4, 3, 5)
    with pytest.raises(
        PlanError, match=r"12 layers do not fit the memory of 3 stages, which have room for \[4, 4, 3\]"
    ):
        proportional(12, (1, 1, 1), limits=(4, 4, 3))
    with pytest.raises(PlanError, match="3 layers are too few for 2 stages of at least 2; lower --pp"):
        proportional(3, (1, 1), least=2)


# --- DP: lost stages ----------------------------------------------------------------------------------------------

NARROW = Layout.uniform(tp=2, pp=3, dp=3, layers=12)


def lost_stage(steps: tuple[str, ...] = STEP_NAMES) -> tuple[Situation, Plan, str]:
    case = situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE, lost=[8, 9], micro_batches=24)
    decision = progressive(case, steps)
    assert decision.seconds == iteration_seconds(decision.plan, case)
    return case, decision.plan, decision.reason


def test_micro_batches_of_a_lost_stage_all_go_to_other_replicas() -> None:
    _, plan, reason = lost_stage()
    assert plan.layout.vacant == ((1, 1),)
    gone = [move for move in plan.migrations if move.virtual_stage == 1 and move.micro_batch in plan.assignment[1]]
    assert sorted(move.micro_batch for move in gone) == list(plan.assignment[1])
    assert {move.replica for move in gone} == {0, 2}
    assert plan.orders[1][1] == ()
    assert "without ranks, so that their work migrates: replica 1 stage 1" in reason
    check_programs(plan)


def test_without_migration_a_replica_that_lost_a_stage_is_given_up() -> None:
    _, plan, _ = lost_stage(STEP_NAMES[:2])
    assert plan.layout.replicas == (NARROW.replicas[0], NARROW.replicas[2])
    assert plan.layout.standby == (6, 7, 10, 11)


def test_lost_stage_stays_lost_until_ranks_come() -> None:
    case, plan, _ = lost_stage()
    after = msgspec.structs.replace(case, base=plan.layout)
    assert progressive(after).plan.layout == plan.layout
    nodes = {**case.nodes, 20: "n20", 21: "n20"}
    back = msgspec.structs.replace(after, available=(*after.available, 20, 21), nodes=nodes)
    whole = progressive(back).plan
    assert whole.layout.replicas[1].stages[1].ranks == (20, 21)
    assert not whole.migrations


def test_stage_that_no_replica_holds_any_more_is_refused() -> None:
    for steps in (STEP_NAMES[:1], STEP_NAMES[:2], STEP_NAMES):
        case = situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE, lost=[2, 3, 8, 9, 14, 15])
        with pytest.raises(
            PlanError, match=r"stage 1 of 3: no replica holds it any more \(12 ranks are left.*--tp or --pp"
        ):
            progressive(case, steps)


def test_every_replica_broken_at_another_stage_goes_on_by_migration_only() -> None:
    case = situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE, lost=[0, 1, 8, 9, 16, 17])
    plan = progressive(case).plan
    assert plan.layout.vacant == ((0, 0), (1, 1), (2, 2))
    check_programs(plan)
    with pytest.raises(PlanError, match="every replica has lost a stage, and micro-batches may not migrate"):
        progressive(case, STEP_NAMES[:2])


def test_ranks_that_lost_their_state_stand_by() -> None:
    case = situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE, stale=(8,))
    layout = progressive(case).plan.layout
    assert (ranks(layout)[1][1], layout.standby) == ((9,), (8,))


def test_work_on_a_stage_without_ranks_is_refused() -> None:
    _, plan, _ = lost_stage()
    check_programs(plan)
    fewer = msgspec.structs.replace(plan, migrations=tuple(move for move in plan.migrations if move.micro_batch != 9))
    with pytest.raises(
        PlanError, match="micro-batch 9 passes replica 1 stage 1, which has no rank; it must migrate there"
    ):
        check_programs(fewer)


# --- all three ----------------------------------------------------------------------------------------------------


def test_later_steps_take_up_what_earlier_ones_cannot() -> None:
    base = Layout.uniform(tp=2, pp=2, dp=4, layers=5)
    model = msgspec.structs.replace(TWELVE, layers=5)
    case = situation(base, nodes=on_nodes(16, 4), tp=2, pp=2, model=model, speeds={4: 0.6}, micro_batches=64)
    seconds = [progressive(case, STEP_NAMES[:n]).seconds for n in (1, 2, 3)]
    assert seconds[0] > seconds[1] > seconds[2]
    full = progressive(case)
    assert full.alternatives == (("exclude", seconds[0]), ("exclude, repartition", seconds[1]))
    assert full.plan.migrations


def test_worked_example_of_algorithm_1_within_the_planner() -> None:
    base = Layout.uniform(tp=1, pp=4, dp=3, layers=4)
    model = msgspec.structs.replace(TWELVE, layers=4)
    case = situation(base, nodes=on_nodes(12, 4), tp=1, pp=4, model=model, speeds={4: 0.5}, micro_batches=12)
    assert progressive(case, delta=0).plan.migrations[0] == Migration(micro_batch=5, virtual_stage=0, replica=0)


def test_nothing_is_done_where_nothing_happened() -> None:
    decision = progressive(situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE))
    assert decision.plan == Plan(epoch=2, layout=NARROW, assignment=spread(8, 3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speeds": {3: math.nan}}, "rank 3: its speed is nan; speeds are above 0 and finite"),
        ({"speeds": {3: 0.0}}, "rank 3: its speed is 0.0; .* a rank that has stopped is lost"),
        ({"speeds": {3: -1.0}}, "rank 3: its speed is -1.0"),
        ({"speeds": {3: math.inf}}, "rank 3: its speed is inf"),
        ({"speeds": {99: 0.5}}, "rank 99: its speed is given, but the job has no such rank"),
        ({"available": (0, 1, 99)}, "rank 99: it is available, but on no known node"),
        ({"micro_batches": 0}, "0 micro-batches an iteration; at least 1"),
        ({"micro_batches": 2}, "2 micro-batches an iteration cannot feed 3 replicas"),
        ({"memory_bytes": 1000}, "fit the memory|K of Eq. 3 is empty"),
    ],
)
def test_bad_input_is_refused_by_name(changes: dict[str, object], reason: str) -> None:
    case = situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE)
    with pytest.raises(LayoutError, match=reason):
        progressive(msgspec.structs.replace(case, **changes))


def test_steps_out_of_order_are_refused() -> None:
    case = situation(NARROW, nodes=on_nodes(18, 2), tp=2, pp=3, model=TWELVE)
    for steps in ((), ("migrate",), ("repartition", "exclude")):
        with pytest.raises(PlanError, match="choose the first one, two or all of exclude, repartition, migrate"):
            progressive(case, steps)


@settings(max_examples=150)
@given(cases(), st.data())
def test_plans_are_whole_fit_memory_and_do_not_change_when_asked_again(case: Situation, data: st.DataObject) -> None:
    enough = 4 * 4 * case.model.parameters // case.model.layers
    tight = data.draw(st.sampled_from([None, 1, 2, 8]))
    stale = data.draw(st.sets(st.sampled_from(case.available), max_size=1))
    case = msgspec.structs.replace(
        case, memory_bytes=tight and enough * tight, tokens=data.draw(st.sampled_from([0, 9])), stale=tuple(stale)
    )
    steps = STEP_NAMES[: data.draw(st.integers(1, 3))]
    try:
        decision = progressive(case, steps, delta=data.draw(st.integers(0, 2)))
    except LayoutError:
        assume(False)
        return
    plan = decision.plan
    validate(plan.layout, case.model)
    check_programs(plan)
    assert plan.layout.ranks == case.available
    assert not stale.intersection(plan.layout.active)
    assert plan.micro_batches == case.micro_batches
    assert math.isfinite(decision.seconds)
    for path in plan.paths().values():
        stages = [(plan.layout.replicas[stop.replica].stages[stop.stage], stop.chunk) for stop in path]
        assert all(stage.ranks for stage, _ in stages)
        spans = [stage.chunks[chunk] for stage, chunk in stages]
        assert [layer for first, last in spans for layer in range(first, last + 1)] == list(range(case.model.layers))
    if case.memory_bytes is not None:
        needs = [memory.needed_bytes(plan, rank, case.model, case.tokens) for rank in plan.layout.active]
        assert max(needs) <= case.memory_bytes
    assert progressive(case, steps, delta=1).plan.layout == plan.layout
    after = msgspec.structs.replace(case, base=plan.layout)
    if not plan.layout.vacant and len(plan.layout.replicas) == len(case.base.replicas):
        assert progressive(after, steps).plan.layout == plan.layout
