"""The model of time: hand-checked starts and ends, transfers, and what can never finish."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Migration, Order, Plan, Primitive, Stop, spread
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import layer_units, needs, play
from tests.resihp.pipeline.plans import random_plan

PLAN = Plan(epoch=2, layout=Layout.uniform(tp=1, pp=2, dp=1, layers=2), assignment=((0, 1),))


def order(text: str) -> Order:
    kinds = {"F": Primitive("F", 0), "B": Primitive("B", 0), "W": Primitive("W", 0)}
    return tuple(msgspec.structs.replace(kinds[word[0]], micro_batch=int(word[1:])) for word in text.split())


def seconds(_: Stop, primitive: Primitive) -> float:
    return {"F": 1.0, "B": 2.0, "W": 0.5}[primitive.kind]


def test_starts_and_ends_by_hand() -> None:
    found = play(PLAN, (((order("F0 F1 B0 B1")), order("F0 B0 W0 F1 B1 W1")),), seconds)
    assert found.starts == (((0.0, 1.0, 4.0, 7.5), (1.0, 2.0, 4.0, 4.5, 5.5, 7.5)),)
    assert found.ends == (((1.0, 2.0, 6.0, 9.5), (2.0, 4.0, 4.5, 5.5, 7.5, 8.0)),)
    assert found.makespan == 9.5


def test_transfers_delay_what_comes_from_another_stage_only() -> None:
    orders = ((order("F0 F1 B0 B1"), order("F0 B0 F1 B1")),)
    assert play(PLAN, orders, seconds).makespan == 9
    found = play(PLAN, orders, seconds, transfer_s=0.25)
    assert found.starts == (((0.0, 1.0, 4.5, 7.5), (1.25, 2.25, 4.25, 5.25)),)
    virtual = Plan(epoch=1, layout=Layout.uniform(tp=1, pp=1, dp=1, layers=2, chunks=2), assignment=((0, 1),))
    assert play(virtual, orders_of(virtual), seconds, transfer_s=100.0).makespan == 12


def test_costs_are_asked_for_where_a_micro_batch_passes() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=3)
    plan = Plan(epoch=1, layout=layout, assignment=((0,), (1,)), migrations=(Migration(0, 1, 1),))
    asked: list[tuple[Stop, str]] = []

    def ask(stop: Stop, primitive: Primitive) -> float:
        asked.append((stop, f"{primitive.kind}{primitive.micro_batch}"))
        return layer_units(layout)(stop, primitive)

    assert play(plan, orders_of(plan), ask).makespan > 0
    assert (Stop(1, 1, 0), "F0") in asked
    assert all(stop != Stop(0, 1, 0) for stop, _ in asked)
    assert {layer_units(layout)(stop, Primitive("F", 0)) for stop, _ in asked if stop.stage == 0} == {2.0}


def test_everything_begins_after_what_it_needs() -> None:
    for seed in range(100):
        plan, _ = random_plan(random.Random(seed))
        orders, paths = orders_of(plan), plan.paths()
        found = play(plan, orders, layer_units(plan.layout), transfer_s=0.5)
        spans = {}
        for d, replica in enumerate(orders):
            for s, stage in enumerate(replica):
                for k, p in enumerate(stage):
                    v = paths[p.micro_batch].index(Stop(d, s, p.chunk))
                    spans[p.kind, p.micro_batch, v] = (found.starts[d][s][k], found.ends[d][s][k], (d, s))
                    assert k == 0 or found.starts[d][s][k] >= found.ends[d][s][k - 1]
        for node, (start, _, place) in spans.items():
            for need in needs(node, len(paths[node[1]]) - 1):
                assert start >= spans[need][1] + 0.5 * (spans[need][2] != place)


def test_an_iteration_without_work_takes_no_time() -> None:
    plan = msgspec.structs.replace(PLAN, assignment=((),))
    assert play(plan, ((), ()), seconds).makespan == 0
    assert play(plan, orders_of(plan), seconds).makespan == 0


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (
            "F0 B0 F1 B1",
            "F1 B1 F0 B0",
            "plan of epoch 2: its orders can never finish: B of micro-batch 0 on replica 0 stage 0 waits for "
            "B of micro-batch 0 on replica 0 stage 1, behind which F of micro-batch 1 on replica 0 stage 1 waits for "
            "F of micro-batch 1 on replica 0 stage 0, which comes after the first of these",
        ),
        ("F0 F1 B0 B1", "F0 B0 B1", "B of micro-batch 1 on replica 0 stage 1 waits for F .*stage 1 never carries out"),
        ("F0 B0 F1 B1", "B0 F0 F1 B1", "waits for F of micro-batch 0 on replica 0 stage 1"),
        ("F0 F1 B0 B1", "F0 F1 B0", "waits for B of micro-batch 1 on replica 0 stage 1, which stage 1 never"),
        ("F0 F1 B0 B1 B1", "F0 F1 B0 B1", "replica 0 stage 0 has B of micro-batch 1 twice"),
        ("F0 F1 B0 B1", "F0 F2 B0 B1", "replica 0 stage 1 has F of micro-batch 2, which does not pass there"),
    ],
)
def test_what_can_never_finish_is_named(first: str, second: str, fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        play(PLAN, ((order(first), order(second)),), seconds)


def test_time_grows_with_the_number_of_primitives_only() -> None:
    """No recursion and nothing quadratic: 8 stages, 4,000 micro-batches."""
    plan = Plan(epoch=1, layout=Layout.uniform(tp=1, pp=8, dp=1, layers=8), assignment=spread(4000, 1))
    orders = orders_of(plan)
    began = time.process_time()
    assert play(plan, orders, seconds).makespan == 4007 * 3
    assert time.process_time() - began < 5
