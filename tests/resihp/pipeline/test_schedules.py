"""Orders: written out by hand, their properties, their makespans, and that any plan at all gets one."""

from __future__ import annotations

import itertools
import random
from itertools import accumulate

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Migration, Order, Plan, Primitive, Stop, spread
from resihp.pipeline.checker import check
from resihp.pipeline.schedules import greedy, interleaved, one_forward_one_backward, orders_of, zero_bubble
from resihp.pipeline.timeline import Orders, Seconds, play
from tests.resihp.pipeline.plans import random_plan

SHAPES = [(stages, count) for stages in (1, 2, 3, 4, 8) for count in (1, 2, 3, 4, 7, 16)]
PLACES = [(stage, stages, count) for stages, count in SHAPES for stage in range(stages)]


def written(order: tuple[Primitive, ...]) -> str:
    return " ".join(f"{p.kind}{p.micro_batch}" for p in order)


def with_chunks(order: Order) -> str:
    return " ".join(f"{p.kind}{p.micro_batch}.{p.chunk}" for p in order)


def pipeline(stages: int, count: int, schedule: str = "1f1b", chunks: int = 1) -> Plan:
    layout = Layout.uniform(tp=1, pp=stages, dp=1, layers=stages * chunks, chunks=chunks)
    return Plan(epoch=1, layout=layout, assignment=(tuple(range(count)),), schedule=schedule)


def costs(forward: float, backward: float, weights: float) -> Seconds:
    return lambda _, p: {"F": forward, "B": backward, "W": weights}[p.kind]


def held(order: Order, until: str) -> int:
    """Most micro-batches (of a chunk each) at once between their F and their `until`."""
    return max(accumulate((p.kind == "F") - (p.kind == until) for p in order), default=0)


def test_four_stages_six_micro_batches_by_hand() -> None:
    """PipeDream-flush as in the figure of every paper that shows it."""
    orders = [written(one_forward_one_backward(stage, 4, tuple(range(1, 7)))) for stage in range(4)]
    assert orders == [
        "F1 F2 F3 F4 B1 F5 B2 F6 B3 B4 B5 B6",
        "F1 F2 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6",
        "F1 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 B6",
        "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6",
    ]


@pytest.mark.parametrize(("stage", "stages", "count"), PLACES)
def test_each_forward_and_backward_once_and_in_order(stage: int, stages: int, count: int) -> None:
    micro_batches = tuple(range(count))
    order = one_forward_one_backward(stage, stages, micro_batches)
    assert tuple(p.micro_batch for p in order if p.kind == "F") == micro_batches
    assert tuple(p.micro_batch for p in order if p.kind == "B") == micro_batches
    at = {p: i for i, p in enumerate(order)}
    assert len(at) == len(order) == 2 * count
    assert all(at[Primitive("F", m)] < at[Primitive("B", m)] for m in micro_batches)


@pytest.mark.parametrize(("stage", "stages", "count"), PLACES)
def test_activations_in_flight_are_bounded_by_the_stages_that_follow(stage: int, stages: int, count: int) -> None:
    order = one_forward_one_backward(stage, stages, tuple(range(count)))
    in_flight = list(accumulate(1 if p.kind == "F" else -1 for p in order))
    assert max(in_flight) == min(stages - stage, count)
    assert in_flight[-1] == 0


@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_all_stages_together_run_to_the_end(stages: int, count: int) -> None:
    """Played with transfers that arrive at once, no order waits for ever for another's."""
    orders = [list(one_forward_one_backward(stage, stages, tuple(range(count)))) for stage in range(stages)]
    done: set[tuple[int, str, int]] = set()

    def possible(stage: int, p: Primitive) -> bool:
        if p.kind == "F":
            return stage == 0 or (stage - 1, "F", p.micro_batch) in done
        return stage == stages - 1 or (stage + 1, "B", p.micro_batch) in done

    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            if order and possible(stage, order[0]):
                first = order.pop(0)
                done.add((stage, first.kind, first.micro_batch))
                moved = True
        assert moved, f"deadlock: next are {[written(tuple(order[:1])) for order in orders]}"


def test_micro_batches_keep_their_own_numbers() -> None:
    assert written(one_forward_one_backward(0, 2, (7, 3, 9))) == "F7 F3 B7 F9 B3 B9"


def test_a_replica_without_micro_batches_does_nothing() -> None:
    assert one_forward_one_backward(0, 4, ()) == ()


def test_interleaved_by_hand() -> None:
    """Megatron's schedule for 2 stages, 2 chunks each, 4 micro-batches: 4 warm-up forwards, and 2."""
    assert [with_chunks(interleaved(stage, 2, 2, (0, 1, 2, 3))) for stage in range(2)] == [
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0",
    ]


def test_zero_bubble_by_hand() -> None:
    """ZB-H1 for 3 stages, 5 micro-batches: stage s keeps W s micro-batches behind B."""
    assert [written(zero_bubble(stage, 3, (0, 1, 2, 3, 4))) for stage in range(3)] == [
        "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4",
    ]


def test_makespans_of_the_literature() -> None:
    plain, split = pipeline(4, 8), pipeline(4, 8, "zero-bubble")
    assert play(plain, orders_of(plain), costs(1, 2, 0)).makespan == 33
    assert play(split, orders_of(split), costs(1, 1, 1)).makespan == 27


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("over", [0, 1, 5])
@pytest.mark.parametrize("cost", [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (1.0, 1.0, 0.5)])
def test_bubbles_of_1f1b_and_zero_bubble(stages: int, over: int, cost: tuple[float, float, float]) -> None:
    """(p - 1)(F + B + W) and (p - 1)(F + B - W), from p micro-batches on."""
    f, b, w = cost
    count = 2 * stages + over
    plain, split = pipeline(stages, count), pipeline(stages, count, "zero-bubble")
    assert play(plain, orders_of(plain), costs(f, b + w, 0)).makespan == (count + stages - 1) * (f + b + w)
    bubble = play(split, orders_of(split), costs(f, b, w)).makespan - count * (f + b + w)
    assert bubble == pytest.approx((stages - 1) * (f + b - w))


@pytest.mark.parametrize(("stages", "chunks", "groups"), list(itertools.product((2, 4, 8), (2, 3, 4), (1, 2, 3))))
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, chunks: int, groups: int) -> None:
    count = stages * groups
    plain, virtual = pipeline(stages, count), pipeline(stages, count, "interleaved", chunks)
    work = count * 3
    bubble = play(plain, orders_of(plain), costs(1, 2, 0)).makespan - work
    smaller = play(virtual, orders_of(virtual), costs(1 / chunks, 2 / chunks, 0)).makespan - work
    assert smaller == pytest.approx(bubble / chunks)


@pytest.mark.parametrize(("stages", "chunks"), list(itertools.product(range(1, 7), (2, 3, 4))))
def test_interleaving_takes_any_number_of_micro_batches(stages: int, chunks: int) -> None:
    for count in range(3 * stages + 2):
        plan = pipeline(stages, count, "interleaved", chunks)
        check(plan)
        if count >= stages:
            makespan = play(plan, orders_of(plan), costs(1, 2, 0)).makespan
            assert makespan <= 3 * (count * chunks + stages - 1) + 3 * (count % stages > 0) * stages


@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_zero_bubble_holds_no_more_activations_than_1f1b(stages: int, count: int) -> None:
    """Between F and B on each stage; between F and W, never more than 1F1B on its first."""
    micro_batches = tuple(range(count))
    most = held(one_forward_one_backward(0, stages, micro_batches), "B")
    for stage in range(stages):
        order = zero_bubble(stage, stages, micro_batches)
        assert held(order, "B") <= held(one_forward_one_backward(stage, stages, micro_batches), "B")
        assert held(order, "W") <= most


@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_greedy_is_1f1b_where_1f1b_applies(stages: int, count: int) -> None:
    plan = pipeline(stages, count)
    assert greedy(plan, costs(1, 2, 0)) == orders_of(plan)


@pytest.mark.parametrize(("stages", "count"), SHAPES)
def test_greedy_with_weights_apart_is_near_zero_bubble(stages: int, count: int) -> None:
    plan = pipeline(stages, count, "zero-bubble")
    found = greedy(plan, costs(1, 1, 1), split=True)
    best = play(plan, orders_of(plan), costs(1, 1, 1)).makespan
    assert play(plan, found, costs(1, 1, 1)).makespan <= best + stages - 1
    assert max(held(order, "W") for order in found[0]) <= min(stages, count)


@pytest.mark.parametrize("split", [False, True])
def test_greedy_yields_an_order_for_any_plan_at_any_cost(split: bool) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        plan, _ = random_plan(rng)
        price: dict[tuple[Stop, str], float] = {}

        def seconds(
            stop: Stop, p: Primitive, price: dict[tuple[Stop, str], float] = price, rng: random.Random = rng
        ) -> float:
            return price.setdefault((stop, p.kind), rng.choice((0.0, 0.1, 1.0, 3.7)))

        orders = greedy(plan, seconds, rng.choice((0.0, 0.5)), split=split)
        check(msgspec.structs.replace(plan, orders=orders))


def test_migrated_micro_batches_stand_in_their_hosts_order() -> None:
    plan = Plan(
        epoch=1,
        layout=Layout.uniform(tp=1, pp=2, dp=3, layers=4),
        assignment=spread(9, 3),
        migrations=(Migration(2, 1, 1), Migration(0, 1, 1)),
    )
    orders = orders_of(plan)
    assert {p.micro_batch for p in orders[0][1]} == {1}
    assert {p.micro_batch for p in orders[1][1]} == {0, 2, 3, 4, 5}
    assert {p.micro_batch for p in orders[0][0]} == {0, 1, 2}
    assert orders[2] == orders_of(msgspec.structs.replace(plan, migrations=()))[2]


def test_migration_away_from_a_slow_stage_pays() -> None:
    layout = Layout.uniform(tp=1, pp=2, dp=2, layers=4)
    plan = Plan(epoch=1, layout=layout, assignment=spread(12, 2))
    helped = msgspec.structs.replace(plan, migrations=(Migration(2, 1, 1), Migration(5, 1, 1)))

    def seconds(stop: Stop, _: Primitive) -> float:
        return 2.0 if (stop.replica, stop.stage) == (0, 1) else 1.0

    assert play(helped, greedy(helped, seconds), seconds).makespan < play(plan, orders_of(plan), seconds).makespan


def test_replicas_of_any_shape_each_get_their_own_order() -> None:
    layout = Layout(
        (
            Replica((Stage((0, 1), ((0, 3),)), Stage((2,), ((4, 5),)))),
            Replica((Stage((3,), ((0, 1), (4, 5))), Stage((4,), ((2, 3),)))),
            Replica((Stage((5,), ((0, 5),)),)),
        )
    )
    plan = Plan(epoch=1, layout=layout, assignment=((0, 1, 2), (3, 4), ()))
    orders = orders_of(plan)
    assert [written(order) for order in orders[0]] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert {with_chunks((p,)) for p in orders[1][0]} == {f"{k}{m}.{c}" for k in "FB" for m in (3, 4) for c in (0, 1)}
    assert orders[2] == ((),)
    check(plan)


def test_orders_of_a_plan_are_taken_as_they_are() -> None:
    plan = pipeline(1, 2)
    own: Orders = (((Primitive("F", 1), Primitive("B", 1), Primitive("F", 0), Primitive("B", 0)),),)
    assert orders_of(msgspec.structs.replace(plan, orders=own)) == own


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(PlanError, match=r"unknown schedule gpipe; choose 1f1b, interleaved, zero-bubble"):
        orders_of(pipeline(2, 2, "gpipe"))
