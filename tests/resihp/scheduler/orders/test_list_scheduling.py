"""List scheduling: whatever the rules, orders that can be carried out, within memory."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, Stop
from resihp.pipeline.checker import check
from resihp.pipeline.timeline import play
from resihp.scheduler.cost.profile import Times
from resihp.scheduler.orders.list_scheduling import ListScheduler, Shapes, StageRules
from tests.resihp.pipeline.plans import random_plan


def any_lists(rng: random.Random) -> ListScheduler:
    """A random plan, migrations included, at random costs, some of them 0."""
    plan = msgspec.structs.replace(random_plan(rng)[0], orders=())
    replicas = plan.layout.replicas

    def seconds() -> float:
        return rng.choice([0.0, 1.0, rng.random()])

    shapes = tuple(
        tuple(tuple(Times(seconds(), seconds(), seconds()) for _ in stage.chunks) for stage in replica.stages)
        for replica in replicas
    )
    late = [rng.random() * 3 for _ in range(7)]

    def transfer_s(a: Stop, b: Stop) -> float:
        return late[(3 * a.replica + 5 * a.stage + b.replica + 2 * b.stage) % 7]

    sizes = [[rng.random() + 0.1 for _ in stage.chunks] for replica in replicas for stage in replica.stages]
    return ListScheduler(plan, shapes, transfer_s, sizes)


def any_rules(rng: random.Random, lists: ListScheduler) -> StageRules:
    return StageRules(
        split=rng.random() < 0.5,
        limits=tuple(rng.randint(1, 4) for _ in lists.lanes) if rng.random() < 0.5 else (),
        caps=tuple(sum(row) * rng.choice([1.0, 1.5, 3.0]) for row in lists.sizes) if rng.random() < 0.7 else (),
        patience=rng.choice([0.0, 0.5, 1.0]),
        forward_patience=rng.choice([0.0, 0.5, 1.0]),
        group=rng.randint(0, 5),
    )


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_orders_can_be_carried_out_and_keep_to_memory(seed: int) -> None:
    rng = random.Random(seed)
    lists = any_lists(rng)
    rules = any_rules(rng, lists)
    urgency = [rng.random() for _ in range(3 * lists.passages)] if rng.random() < 0.3 else None
    orders = lists.run(rules, urgency)
    check(msgspec.structs.replace(lists.plan, orders=orders))
    assert any(p.kind == "W" for replica in orders for order in replica for p in order) == rules.split
    for alive, cap in zip(lists.alive(orders), rules.caps, strict=False):
        assert alive <= cap * (1 + 1e-6)
    assert orders == lists.run(rules, urgency)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_nothing_begins_after_its_latest_start_and_something_has_no_slack(seed: int) -> None:
    rng = random.Random(seed)
    lists = any_lists(rng)
    orders = lists.run(any_rules(rng, lists))
    latest = sorted(lists.latest_starts(orders))
    timeline = lists.play(orders)
    starts = sorted(start for replica in timeline.starts for stage in replica for start in stage)
    latest = latest[: len(starts)]  # the rest are of kinds that these orders have not
    assert all(start <= due + 1e-9 for start, due in zip(starts, latest, strict=True))
    assert latest[0] == pytest.approx(0.0, abs=1e-9)


def uniform(stages: int, micro_batches: int, chunks: int = 1) -> tuple[Plan, Shapes]:
    layout = Layout.uniform(tp=1, pp=stages, dp=1, layers=stages * chunks, chunks=chunks)
    plan = Plan(epoch=1, layout=layout, assignment=(tuple(range(micro_batches)),))
    return plan, ((((Times(1.0, 1.0, 1.0),) * chunks,) * stages),)


def test_depths_of_1f1b_give_the_time_of_1f1b_and_twice_its_memory_no_bubble_but_the_filling() -> None:
    """Zero bubble's two ends: (m + p - 1) (f + b + w), and m (f + b + w) + (p - 1) f."""
    plan, shapes = uniform(4, 8)
    lists = ListScheduler(plan, shapes)
    whole = lists.run(StageRules(limits=(4, 3, 2, 1)))
    assert lists.play(whole).makespan == pytest.approx((8 + 3) * 3)
    assert lists.alive(whole) == (4, 3, 2, 1)
    apart = lists.run(StageRules(split=True, caps=(8,) * 4))
    assert lists.play(apart).makespan == pytest.approx(8 * 3 + 3)


def test_patience_waits_for_a_backward_that_is_about_to_come() -> None:
    """Two stages of one micro-batch more than they hold at once; a W of 10 would hold up the B that comes after 1."""
    layout = Layout.uniform(tp=1, pp=2, dp=1, layers=2)
    plan = Plan(epoch=1, layout=layout, assignment=((0, 1),))
    shapes = (((Times(1.0, 1.0, 10.0),), (Times(1.0, 1.0, 0.0),)),)
    lists = ListScheduler(plan, shapes, 0.0)
    eager = [p.kind for p in lists.run(StageRules(split=True, limits=(2, 1)))[0][0]]
    patient = [p.kind for p in lists.run(StageRules(split=True, limits=(2, 1), patience=0.5))[0][0]]
    assert eager == ["F", "F", "B", "W", "B", "W"]
    assert patient == ["F", "F", "B", "B", "W", "W"]


def test_what_cannot_be_is_refused() -> None:
    plan, shapes = uniform(2, 2, chunks=2)
    with pytest.raises(PlanError, match="replica 0 stage 1: may keep 1 alive, but one micro-batch takes 2"):
        ListScheduler(plan, shapes).run(StageRules(caps=(2.0, 1.0)))
    for bad in (math.inf, math.nan, -1.0):
        with pytest.raises(PlanError, match="some time of its stages is negative or not finite"):
            ListScheduler(plan, ((((Times(bad, 1.0, 1.0),) * 2,) * 2),))


def test_its_prices_are_the_timelines() -> None:
    plan, shapes = uniform(3, 5)
    lists = ListScheduler(plan, shapes, 0.25)
    for split in (False, True):
        orders = lists.run(StageRules(split=split))
        cost = {"F": 1.0, "B": 1.0 if split else 2.0, "W": 1.0}
        expected = play(plan, orders, lambda _, p, cost=cost: cost[p.kind], 0.25)  # type: ignore[misc]
        assert lists.play(orders) == expected
