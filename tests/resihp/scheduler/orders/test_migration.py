"""Progress-aware migration: the paper's Algorithm 1."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Migration, Plan, spread
from resihp.pipeline.checker import check
from resihp.pipeline.schedules import one_forward_one_backward, orders_of
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.orders.migration import advance, migrate
from resihp.scheduler.situation import Situation
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation

PLAIN = ModelSpec(layers=4, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=1, sequence=64)
"""Its head weighs next to nothing."""


def case(
    *,
    tp: int = 1,
    pp: int = 4,
    dp: int = 2,
    micro_batches: int = 4,
    model: ModelSpec = PLAIN,
    vacant: tuple[int, int] | None = None,
    speeds: dict[int, float] | None = None,
    schedule: str = "1f1b",
    memory_bytes: int | None = None,
    tokens: int = 0,
) -> tuple[Plan, Situation]:
    """Megatron's grid, `micro_batches` a replica; `vacant` is a (replica, stage) without ranks."""
    layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=model.layers)
    found = situation(
        layout,
        nodes=on_nodes(tp * pp * dp, 8),
        tp=tp,
        pp=pp,
        model=model,
        micro_batches=micro_batches * dp,
        speeds=speeds,
        schedule=schedule,
        memory_bytes=memory_bytes,
        tokens=tokens,
    )
    if vacant is not None:
        replicas = [list(replica.stages) for replica in layout.replicas]
        replicas[vacant[0]][vacant[1]] = Stage((), replicas[vacant[0]][vacant[1]].chunks)
        layout = Layout(tuple(Replica(tuple(stages)) for stages in replicas))
    return Plan(epoch=2, layout=layout, assignment=spread(micro_batches * dp, dp), schedule=schedule), found


def moved(plan: Plan, situation: Situation, delta: int) -> Plan:
    """Whatever Algorithm 1 says, better or not."""
    moves, orders = advance(plan, situation, delta=delta)
    return msgspec.structs.replace(plan, migrations=tuple(move.migration for move in moves), orders=orders)


# --- the rule -----------------------------------------------------------------------------------------------------


def test_worked_example_of_the_paper() -> None:
    """3 DP groups, 4 stages, micro-batches 0-3, 4-7, 8-11, group 1 at half speed at stage 0.

    At the second slot stage 0 has P = (2, 1, 2), so F_5 of group 1 moves to group 0 or 2, which are equally far.
    """
    plan, slow = case(dp=3, speeds={4: 0.5})
    assert plan.assignment == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    first = advance(plan, slow, delta=0)[0][0]
    assert (first.at_s, first.progress) == (2.0, (2, 1, 2))
    assert first.migration == Migration(micro_batch=5, virtual_stage=0, replica=0)


def test_delta_is_how_far_others_may_be_ahead() -> None:
    plan, slow = case(dp=3, speeds={4: 0.5}, micro_batches=8)
    for delta in range(4):
        moves, _ = advance(plan, slow, delta=delta)
        leads = [max(move.progress) - move.progress[1] for move in moves if move.migration.micro_batch in range(8, 16)]
        assert leads
        assert min(leads) == delta + 1


def test_forward_and_backward_of_a_migrated_stage_go_together() -> None:
    plan, slow = case(dp=2, speeds={1: 0.4}, micro_batches=8, schedule="zero-bubble")
    found = moved(plan, slow, 1)
    assert found.migrations
    for move in found.migrations:
        host = orders_of(found)[move.replica][move.virtual_stage]
        assert [p.kind for p in host if p.micro_batch == move.micro_batch] == ["F", "B", "W"]


def test_slow_stage_is_relieved() -> None:
    plan, slow = case(pp=4, dp=4, micro_batches=16, speeds={5: 0.3})
    found = migrate(plan, slow)
    assert iteration_seconds(found, slow) < 0.6 * iteration_seconds(plan, slow)
    assert any(move.virtual_stage == 1 and move.micro_batch in plan.assignment[1] for move in found.migrations)
    check(found)


def test_nothing_moves_where_nobody_falls_behind() -> None:
    plan, healthy = case(speeds=dict.fromkeys(range(8), 0.7), micro_batches=8)
    assert migrate(plan, healthy, delta=0) == plan


def test_migrations_that_do_not_help_are_left_out() -> None:
    """Of one micro-batch each, none can be taken over without being later."""
    plan, slow = case(micro_batches=1, speeds={0: 0.9})
    assert migrate(plan, slow, delta=0) == plan


def test_replicas_that_neither_give_nor_take_keep_their_orders() -> None:
    plan, _ = case(dp=4, micro_batches=6)
    other = Replica((Stage((16,), ((0, 3),)),))
    layout = Layout((*plan.layout.replicas[:3], other))
    mixed = msgspec.structs.replace(plan, layout=layout)
    slow = situation(layout, nodes=on_nodes(24, 8), tp=1, pp=4, model=PLAIN, micro_batches=24, speeds={0: 0.3})
    found = moved(mixed, slow, 1)
    assert found.migrations
    for move in found.migrations:
        assert move.replica < 3, "the last one holds these layers in other chunks"
        assert move.micro_batch < 18
    assert found.orders[3] == (one_forward_one_backward(0, 1, found.assignment[3]),)
    check(found)


# --- stages that have stopped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stage_without_ranks_gives_all_its_work_away(stage: int, schedule: str) -> None:
    plan, left = case(dp=3, micro_batches=8, vacant=(1, stage), schedule=schedule)
    found = migrate(plan, left)
    there = [move for move in found.migrations if move.virtual_stage == stage and 8 <= move.micro_batch < 16]
    assert sorted(move.micro_batch for move in there) == list(range(8, 16))
    assert {move.replica for move in there} == {0, 2}, "both peers help"
    assert found.orders[1][stage] == ()
    check(found)
    whole, healthy = case(dp=3, micro_batches=8, schedule=schedule)
    ratio = iteration_seconds(found, left) / iteration_seconds(whole, healthy)
    assert ratio < 2.0, "peers do half as much again (ReCycle: M D / (D - f)), not all of it"


def test_stage_of_speed_zero_is_as_good_as_none() -> None:
    plan, left = case(dp=2, speeds={5: 0.0})
    found = migrate(plan, left)
    assert sorted(move.micro_batch for move in found.migrations if move.virtual_stage == 1) == [4, 5, 6, 7]
    assert found.orders[1][1] == ()


def test_stopped_stage_that_nobody_else_holds_is_refused() -> None:
    plan, left = case(dp=1, vacant=(0, 1))
    with pytest.raises(PlanError, match=r"replica 0 stage 1: it has stopped, and no other replica holds layers 1 to 1"):
        migrate(plan, left)


def test_negative_delta_is_refused() -> None:
    with pytest.raises(PlanError, match="delta is -1"):
        migrate(*case(speeds={0: 0.5}), delta=-1)


# --- memory -------------------------------------------------------------------------------------------------------


def test_hosts_take_no_more_than_they_have_memory_for() -> None:
    """Room for exactly what 1F1B holds at the first stage of four: guests only once something has left."""
    plan, _ = case(dp=2, micro_batches=8, vacant=(1, 0), tokens=64)
    whole = case(dp=2, micro_batches=8)[0]
    enough = max(memory.needed_bytes(whole, rank, PLAIN, 64) for rank in range(8))
    _, tight = case(dp=2, micro_batches=8, memory_bytes=enough, tokens=64)
    found = migrate(plan, tight)
    assert max(memory.needed_bytes(found, rank, PLAIN, 64) for rank in (0, 1, 2, 3, 5, 6, 7)) <= enough
    ample = migrate(plan, case(dp=2, micro_batches=8, memory_bytes=100 * enough, tokens=64)[1])
    assert memory.needed_bytes(ample, 0, PLAIN, 64) > enough, "the limit mattered"


def test_work_of_a_stopped_stage_that_fits_nowhere_is_refused() -> None:
    plan, _ = case(dp=2, vacant=(1, 0))
    _, tiny = case(dp=2, memory_bytes=1000, tokens=64)
    with pytest.raises(PlanError, match=r"needs .* GB under the plan of epoch 2, .*fits nowhere"):
        migrate(plan, tiny)


# --- always -------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.data())
def test_every_micro_batch_passes_every_layer_once_in_orders_that_end(data: st.DataObject) -> None:
    pp, dp, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4)), data.draw(st.sampled_from([1, 1, 2]))
    model = msgspec.structs.replace(MODEL, layers=8)
    layout = Layout.uniform(tp=1, pp=pp, dp=dp, layers=8, chunks=chunks)
    speeds = data.draw(st.dictionaries(st.sampled_from(layout.active), st.sampled_from([0.1, 0.4, 0.9]), max_size=4))
    micro_batches = dp * data.draw(st.integers(1, 8))
    schedule = data.draw(st.sampled_from(["1f1b", "zero-bubble"]))
    slow = situation(
        layout,
        nodes=on_nodes(pp * dp, 4),
        tp=1,
        pp=pp,
        chunks=chunks,
        model=model,
        micro_batches=micro_batches,
        schedule=schedule,
        speeds=speeds,
    )
    stopped = data.draw(st.sampled_from([None, *layout.active]))
    if stopped is not None:
        slow = msgspec.structs.replace(slow, speeds={**speeds, stopped: 0.0})
    plan = Plan(epoch=2, layout=layout, assignment=spread(micro_batches, dp), schedule=schedule)
    delta = data.draw(st.integers(0, 3))
    found = moved(plan, slow, delta)
    check(found)
    for path in found.paths().values():
        passed = [layout.replicas[stop.replica].stages[stop.stage].chunks[stop.chunk] for stop in path]
        assert [layer for first, last in passed for layer in range(first, last + 1)] == list(range(8))
    chosen = migrate(plan, slow, delta=delta)
    assert iteration_seconds(chosen, slow) <= iteration_seconds(plan, slow)
    assert migrate(plan, slow, delta=delta) == chosen
