"""1F1B with deeper warm-ups: the time that is told is what its orders take, within the memory that there is."""

from __future__ import annotations

import random

import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import one_forward_one_backward
from resihp.pipeline.timeline import play
from resihp.scheduler.cost.prices import Priced
from resihp.scheduler.cost.profile import Times
from resihp.scheduler.orders.warm_up_depths import deepened, order


def drawn(rng: random.Random) -> Priced:
    stages = rng.randint(1, 6)
    shape = tuple((Times(*(rng.uniform(0.5, 2.0) for _ in range(3))),) for _ in range(stages))
    late = tuple(tuple(0.1 * abs(a - b) for b in range(stages)) for a in range(stages))
    return Priced(Replica(tuple(Stage((s,), ((s, s),)) for s in range(stages))), shape, late)


@pytest.mark.parametrize("micro_batches", [1, 2, 7, 16])
def test_as_fast_as_is_said_within_the_memory(micro_batches: int) -> None:
    rng, gained = random.Random(micro_batches), 0.0
    for _ in range(20):
        priced = drawn(rng)
        stages = len(priced.shape)
        share = tuple(range(3, 3 + micro_batches))
        room = [rng.randint(min(stages - s, micro_batches), micro_batches) for s in range(stages)]
        plan = Plan(epoch=1, layout=Layout((priced.replica,)), assignment=(share,))

        def seconds(orders: tuple[tuple[object, ...], ...], priced: Priced = priced, plan: Plan = plan) -> float:
            return play(
                plan,
                (orders,),  # type: ignore[arg-type]
                lambda stop, p: (
                    priced.shape[stop.stage][0].f
                    if p.kind == "F"
                    else priced.shape[stop.stage][0].b + priced.shape[stop.stage][0].w
                ),
                lambda a, b: priced.late[a.stage][b.stage],
            ).makespan

        depths, told = deepened(priced, micro_batches, room)
        assert all(min(depth + 1, micro_batches) <= most for depth, most in zip(depths, room, strict=True))
        assert told == pytest.approx(seconds(tuple(order(depth, share) for depth in depths)), rel=1e-12)
        plain = seconds(tuple(one_forward_one_backward(s, stages, share) for s in range(stages)))
        assert told <= plain * (1 + 1e-12)
        gained = max(gained, plain / told - 1)
    assert gained > 0.05 or micro_batches < 7
