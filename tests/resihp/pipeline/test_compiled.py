"""Compiled orders: what `timeline.play` says, for any plan and any durations, and many of them at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Migration, Order, Plan, Primitive, Stop, spread
from resihp.pipeline.compiled import PRIMITIVE_KINDS, CompiledOrders, compile_orders
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders, Seconds, layer_units, needs, play, virtual_stages
from tests.resihp.pipeline.plans import random_plan

SEEDS = st.integers(0, 1_000_000_000)
PLAN = Plan(epoch=2, layout=Layout.uniform(tp=1, pp=2, dp=1, layers=2), assignment=((0, 1),))


def by_primitive(compiled: CompiledOrders, values: np.ndarray) -> Seconds:
    """The same durations as a function of stop and primitive."""
    found = {
        (compiled.stops[stop], Primitive(PRIMITIVE_KINDS[kind], m, compiled.stops[stop].chunk)): float(value)
        for stop, kind, m, value in zip(
            compiled.stop.tolist(), compiled.kind.tolist(), compiled.micro_batch.tolist(), values, strict=True
        )
    }
    return lambda stop, primitive: found[stop, primitive]


def flat(times: tuple[tuple[tuple[float, ...], ...], ...]) -> list[float]:
    return [value for replica in times for stage in replica for value in stage]


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_the_same_starts_and_ends_as_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    plan, _ = random_plan(rng)
    orders = orders_of(plan)
    compiled = compile_orders(plan, orders)
    values = np.random.default_rng(seed).uniform(0.0, 3.0, (3, compiled.size)) * (rng.random() < 0.9)
    transfer_s = rng.choice((0.0, 0.3, 5.0))
    starts, ends = compiled.play(values, transfer_s)
    for i, row in enumerate(values):
        expected = play(plan, orders, by_primitive(compiled, row), transfer_s)
        assert starts[i][compiled.in_order].tolist() == flat(expected.starts)
        assert ends[i][compiled.in_order].tolist() == flat(expected.ends)
        assert compiled.makespans(ends[i]).max(initial=0.0) == expected.makespan
    assert np.array_equal(compiled.ready(ends, transfer_s), starts)


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_each_transfer_may_take_its_own_time(seed: int) -> None:
    plan, _ = random_plan(random.Random(seed))
    orders = orders_of(plan)
    compiled = compile_orders(plan, orders)
    rng = np.random.default_rng(seed)
    transfers = rng.uniform(0.0, 3.0, (2, compiled.edges.shape[1]))
    values = rng.uniform(0.0, 3.0, (2, compiled.size))
    starts, ends = compiled.play(values, transfers)
    for i in (0, 1):
        spans = one_by_one(plan, orders, compiled, values[i], transfers[i])
        assert [spans[slot] for slot in range(compiled.size)] == list(zip(starts[i], ends[i], strict=True))
        assert np.array_equal(compiled.play(values[i], transfers[i])[1], ends[i])
    assert np.array_equal(compiled.play(values[0], transfers)[0][0], starts[0])  # broadcast over the candidates
    assert np.array_equal(compiled.play(values, transfers[0])[0][0], starts[0])


def one_by_one(
    plan: Plan, orders: Orders, compiled: CompiledOrders, values: np.ndarray, transfers: np.ndarray
) -> dict[int, tuple[float, float]]:
    """Start and end by slot, each primitive after what it needs, from the definition."""
    paths = plan.paths()
    at = virtual_stages(paths)
    delay = {(a, b): float(t) for a, b, t in zip(*compiled.edges.tolist(), transfers, strict=True)}
    slot, before, told = {}, {}, {}
    units = play(plan, orders, lambda *_: 1.0)
    for d, replica in enumerate(orders):
        for s, stage in enumerate(replica):
            for k, p in enumerate(stage):
                own = int(compiled.slots(d, s)[k])
                node = (p.kind, p.micro_batch, at[d, s, p.chunk, p.micro_batch])
                slot[node], told[own] = own, (units.starts[d][s][k], node)
                before[own] = int(compiled.slots(d, s)[k - 1]) if k else None
    spans: dict[int, tuple[float, float]] = {}
    for own in sorted(told, key=lambda i: told[i][0]):
        node = told[own][1]
        previous = before[own]
        start = 0.0 if previous is None else spans[previous][1]
        for need in needs(node, len(paths[node[1]]) - 1):
            start = max(start, spans[slot[need]][1] + delay.get((slot[need], own), 0.0))
        spans[own] = (start, start + float(values[own]))
    return spans


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_same_refusals(seed: int) -> None:
    rng = random.Random(seed)
    plan, _ = random_plan(rng)
    orders = spoilt(rng, orders_of(plan))
    units = layer_units(plan.layout)

    def compiled_ends() -> list[float]:
        compiled = compile_orders(plan, orders)
        values = [units(compiled.stops[stop], Primitive("F", 0)) for stop in compiled.stop]
        ends: list[float] = compiled.play(values)[1][compiled.in_order].tolist()
        return ends

    assert outcome(compiled_ends) == outcome(lambda: flat(play(plan, orders, units).ends))


def outcome(run: Callable[[], list[float]]) -> list[float] | str:
    try:
        return run()
    except PlanError as refusal:
        return str(refusal)


def spoilt(rng: random.Random, orders: Orders) -> Orders:
    """With one or two faults, most of which matter: something swapped, dropped, twice, elsewhere or unknown."""
    mutable = [[list(stage) for stage in replica] for replica in orders]
    for _ in range(rng.randint(1, 2)):
        stages = [stage for replica in mutable for stage in replica if stage]
        if not stages:
            break
        stage = rng.choice(stages)
        i, j = rng.randrange(len(stage)), rng.randrange(len(stage))
        fault = rng.choice(("swap", "drop", "twice", "elsewhere", "unknown", "more"))
        if fault == "swap":
            stage[i], stage[j] = stage[j], stage[i]
        elif fault == "drop":
            del stage[i]
        elif fault == "twice":
            stage.insert(j, stage[i])
        elif fault == "elsewhere":
            rng.choice(stages).insert(0, stage.pop(i))
        elif fault == "unknown":
            stage[i] = msgspec.structs.replace(stage[i], micro_batch=999)
        else:
            mutable.append([[stage[i]]])
    return tuple(tuple(tuple(stage) for stage in replica) for replica in mutable)


def test_slots_and_edges_by_hand() -> None:
    orders = orders_of(PLAN)  # F0 F1 B0 B1 | F0 B0 F1 B1
    compiled = compile_orders(PLAN, orders)
    assert compiled.size == 8
    assert compiled.stops == (Stop(0, 0, 0), Stop(0, 1, 0))
    names = [
        f"{PRIMITIVE_KINDS[k]}{m}.{s}"
        for k, m, s in zip(compiled.kind, compiled.micro_batch, compiled.stage, strict=True)
    ]
    assert [names[slot] for slot in compiled.slots(0, 0)] == ["F0.0", "F1.0", "B0.0", "B1.0"]
    assert [names[slot] for slot in compiled.slots(0, 1)] == ["F0.1", "B0.1", "F1.1", "B1.1"]
    assert compiled.position[compiled.slots(0, 1)].tolist() == [0, 1, 2, 3]
    source, target = compiled.edges
    assert {(names[a], names[b]) for a, b in zip(source, target, strict=True)} == {
        ("F0.0", "F0.1"),
        ("F1.0", "F1.1"),
        ("B0.1", "B0.0"),
        ("B1.1", "B1.0"),
    }
    assert np.all(np.diff(target) > 0)
    measured = np.empty(8)
    measured[compiled.in_order] = [1, 1, 2, 2, 1, 2, 1, 2]
    assert compiled.play(measured, 0.25)[0][compiled.in_order].tolist() == [0, 1, 4.5, 7.5, 1.25, 2.25, 4.25, 5.25]
    assert compiled.iteration_seconds(measured, 0.25, synchronisation_s=0.5, optimizer_s=[0.125]) == 10.125


def test_ready_names_the_moment_when_a_late_transfer_came() -> None:
    compiled = compile_orders(PLAN, orders_of(PLAN))
    ends = np.empty(8)
    ends[compiled.in_order] = [1, 2, 7, 9, 2, 4, 5, 7]
    assert compiled.ready(ends, 0.5)[compiled.in_order].tolist() == [0, 1, 4.5, 7.5, 1.5, 2, 4, 5]


def test_a_table_prices_all_slots_at_once() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=6, chunks=2)
    plan = Plan(epoch=1, layout=layout, assignment=((0, 1), (2, 3)), schedule="interleaved")
    compiled = compile_orders(plan, orders_of(plan))
    rows = [stop.stage == 1 for stop in compiled.stops]
    table = np.random.default_rng(1).random((5, 2, len(PRIMITIVE_KINDS), compiled.micro_batches))
    seconds = table.reshape(5, -1).take(compiled.index(rows), axis=-1)
    for slot in range(compiled.size):
        row, kind, m = rows[compiled.stop[slot]], compiled.kind[slot], compiled.micro_batch[slot]
        assert seconds[:, slot].tolist() == table[:, int(row), kind, m].tolist()


def test_the_slowest_replica_counts_and_then_the_longest_step() -> None:
    layout = Layout.uniform(tp=1, pp=1, dp=3, layers=1)
    plan = Plan(epoch=1, layout=layout, assignment=((0,), (1, 2), ()))
    compiled = compile_orders(plan, orders_of(plan))
    seconds = np.ones((2, 4, compiled.size)) * np.arange(1, 3)[:, None, None]
    _, ends = compiled.play(seconds)
    assert compiled.makespans(ends).tolist() == [[[2, 4, 0]] * 4, [[4, 8, 0]] * 4]
    assert compiled.iteration_seconds(seconds).tolist() == [[4] * 4, [8] * 4]
    step = np.array([[0.25, 0.5, 0.0], [0.0, 0.0, 0.75], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert compiled.iteration_seconds(seconds, optimizer_s=step)[0].tolist() == [4.5, 4.75, 4, 5]


def test_an_iteration_without_work_takes_no_time() -> None:
    plan = msgspec.structs.replace(PLAN, assignment=((),))
    for orders in (((), ()), orders_of(plan)):
        compiled = compile_orders(plan, orders)
        assert compiled.size == 0
        assert compiled.iteration_seconds(np.empty((3, 0)), 1.0, optimizer_s=2.0).tolist() == [2, 2, 2]
    assert float(compile_orders(plan, ()).iteration_seconds(())) == 0


def test_shapes_that_do_not_fit_are_refused() -> None:
    compiled = compile_orders(PLAN, orders_of(PLAN))
    with pytest.raises(ValueError, match=r"shape \(7,\).* orders of 8 primitives and 4 transfers take \(..., 8\)"):
        compiled.play(np.ones(7))
    with pytest.raises(ValueError, match=r"transfers of shape \(8,\)"):
        compiled.play(np.ones(8), np.ones(8))
    with pytest.raises(ValueError, match="broadcast"):
        compiled.play(np.ones((2, 8)), np.ones((3, 4)))


def test_any_number_of_candidates() -> None:
    compiled = compile_orders(PLAN, orders_of(PLAN))
    rng = np.random.default_rng(2)
    seconds, transfers = rng.random((2, 50_000, 8)), rng.random((50_000, 4))
    starts, ends = compiled.play(seconds, transfers)
    assert starts.shape == ends.shape == (2, 50_000, 8)
    for i in (0, 1, 32_767, 32_768, 49_999):
        expected = compiled.play(seconds[1, i], transfers[i])
        assert starts[1, i].tolist() == expected[0].tolist()
        assert ends[1, i].tolist() == expected[1].tolist()
    assert compiled.iteration_seconds(np.empty((0, 8))).shape == (0,)


def test_what_is_not_known_stays_unknown() -> None:
    compiled = compile_orders(PLAN, orders_of(PLAN))
    seconds = np.ones(8)
    seconds[compiled.slots(0, 1)[2]] = np.nan
    unknown = np.isnan(compiled.play(seconds)[1][compiled.in_order])
    assert unknown.tolist() == [False, False, False, True, False, False, True, True]


def test_replicas_alike_need_not_have_the_same_layers() -> None:
    """Structure is shared by order and chunks only; a replica of another depth, or that migrates, has its own."""
    even = Layout.uniform(tp=1, pp=2, dp=2, layers=4).replicas
    uneven = Replica((Stage((4,), ((0, 0),)), Stage((5,), ((1, 3),))))
    deep = Replica(tuple(Stage((6 + s,), ((s, s),)) for s in range(4)))
    layout = Layout((*even, uneven, deep, *Layout.uniform(tp=1, pp=2, dp=7, layers=4).replicas[5:]))
    plan = Plan(epoch=1, layout=layout, assignment=spread(20, 6), migrations=(Migration(1, 1, 5),))
    orders = orders_of(plan)
    compiled = compile_orders(plan, orders)
    values = np.random.default_rng(3).random(compiled.size)
    expected = play(plan, orders, by_primitive(compiled, values), 0.1)
    assert compiled.play(values, 0.1)[1][compiled.in_order].tolist() == flat(expected.ends)


def test_a_fault_in_one_of_many_alike_is_named() -> None:
    plan = Plan(epoch=2, layout=Layout.uniform(tp=1, pp=2, dp=3, layers=2), assignment=spread(6, 3))
    orders = orders_of(plan)
    swapped: Order = orders[2][1][::-1]
    with pytest.raises(PlanError, match="on replica 2 stage 1 waits for"):
        compile_orders(plan, (*orders[:2], (orders[2][0], swapped)))


def test_large_plans_are_compiled_once_and_played_fast() -> None:
    """Bounds far above what `benchmarks/prediction_cost.py` prints: for machines with other work to do."""
    plan = Plan(epoch=1, layout=Layout.uniform(tp=1, pp=16, dp=128, layers=16), assignment=spread(8192, 128))
    orders = orders_of(plan)
    began = time.process_time()
    compiled = compile_orders(plan, orders)
    assert time.process_time() - began < 5
    seconds = np.where(compiled.kind == 0, 1.0, 2.0)
    began = time.process_time()
    assert compiled.iteration_seconds(seconds) == (64 + 15) * 3
    assert time.process_time() - began < 0.1
