"""Pipelines timed by recurrence: the times of the orders that would be played, for few and for many micro-batches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import play
from resihp.scheduler.cost.steady_state import many_seconds, seconds

Stages = list[float]


def played(f: Stages, b: Stages, w: Stages | None, late: Stages, micro_batches: int) -> float:
    plan = Plan(
        epoch=1,
        layout=Layout((Replica(tuple(Stage((s,), ((s, s),)) for s in range(len(f)))),)),
        assignment=(tuple(range(micro_batches)),),
        schedule="1f1b" if w is None else "zero-bubble",
    )
    cost = {"F": f, "B": b, "W": w or []}
    return play(
        plan,
        orders_of(plan),
        lambda stop, primitive: cost[primitive.kind][stop.stage],
        lambda a, b: late[min(a.stage, b.stage)],
    ).makespan


def drawn(rng: random.Random) -> tuple[Stages, Stages, Stages | None, Stages]:
    """Equal stages, some slow ones, or all different; links without delay or with."""
    stages = rng.randint(1, 7)
    among = rng.choice([(1.0,), (1.0, 1.0, 2.5), ()])
    f = [rng.choice(among) if among else rng.uniform(0.5, 2.0) for _ in range(stages)]
    b = [2 * x if among else rng.uniform(0.5, 3.0) for x in f]
    w = [x if among else rng.uniform(0.2, 2.0) for x in f] if rng.random() < 0.5 else None
    delay = rng.choice([0.0, 0.05, 1.0])
    return f, b, w, [delay * rng.choice([1.0, rng.random()]) for _ in range(stages - 1)]


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 21, 64])
def test_as_if_it_had_been_played(micro_batches: int) -> None:
    rng = random.Random(micro_batches)
    for _ in range(25):
        f, b, w, late = drawn(rng)
        expected = played(f, b, w, late, micro_batches)
        assert seconds(f, b, w, late, micro_batches) == pytest.approx(expected, rel=1e-11)
        slower = [1.25 * x for x in f]
        forward = np.array([f, slower]).T
        backward, weights = (None if x is None else np.array([x, x]).T for x in (b, w))
        assert backward is not None
        found = many_seconds(forward, backward, weights, np.array(late).reshape(-1, 1), micro_batches)
        assert found.tolist() == pytest.approx([expected, played(slower, b, w, late, micro_batches)], rel=1e-11)
