"""The bound: below every plan that anybody makes, and near what the best pipeline takes where that is known."""

from __future__ import annotations

import math
import random
from contextlib import suppress

import msgspec
import pytest

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.scheduler import Situation, decide
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.explained.bound import least_seconds
from resihp.scheduler.layouts import first_layout
from resihp.scheduler.planner import first_plan
from resihp.scheduler.what_if import catalogue
from tests.resihp.scheduler.cases import MODEL, on_nodes, situation

LAYERS = Profile(layers=(Times(1.0, 1.0, 1.0),) * 6)


def drawn(rng: random.Random) -> Situation:
    tp, dp, pp = rng.choice((1, 2, 4)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    ranks = tp * dp * pp
    profile = Profile(
        layers=tuple(Times(*(rng.uniform(0.5, 2.0) for _ in "fbw")) for _ in range(MODEL.layers)),
        head=Times(*(rng.uniform(0.0, 4.0) for _ in "fbw")),
        transfer_s=rng.choice((0.0, 0.1)),
        gradient_s=rng.choice((0.0, 0.2)),
        step_s=rng.choice((0.0, 1.0)),
    )
    case = situation(
        Layout.uniform(tp=tp, pp=pp, dp=dp, layers=MODEL.layers),
        nodes=on_nodes(ranks, 8),
        tp=tp,
        pp=pp,
        lost=rng.sample(range(ranks), min(ranks - 1, rng.randrange(3))),
        micro_batches=rng.choice((4, 8, 12)),
        schedule=rng.choice(("1f1b", "zero-bubble")),
        speeds={rank: rng.choice((0.3, 0.7, 1.0)) for rank in rng.sample(range(ranks), min(ranks, 2))},
        memory_bytes=rng.choice((None, 16_000_000)),
        tokens=64,
    )
    return msgspec.structs.replace(case, profile=profile)


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_below_the_bound(seed: int) -> None:
    case = drawn(random.Random(seed))
    with suppress(PlanError):
        assert decide(case).seconds >= least_seconds(case) * (1 - 1e-9)


@pytest.mark.parametrize("chunks", [1, 4])
def test_no_tuned_pipeline_is_below_the_bound(chunks: int) -> None:
    """Orders of their own fill a pipeline with the gradients of weights: the bound counts no more than must be."""
    model = msgspec.structs.replace(MODEL, layers=16)
    for pp, micro_batches in ((2, 2), (4, 4), (8, 16)):
        plan = first_plan(model=model, nodes=on_nodes(pp, 8), tp=1, pp=pp, micro_batches=micro_batches)
        case = situation(plan.layout, nodes=on_nodes(pp, 8), tp=1, pp=pp, model=model, micro_batches=micro_batches)
        found = first_layout.tuned(plan, case, most_chunks=chunks, evaluations=150)
        assert found.seconds >= least_seconds(case) * (1 - 1e-9)


def test_one_device_is_as_fast_as_the_bound() -> None:
    alone = situation(Layout.uniform(tp=1, pp=1, dp=1, layers=6), nodes={0: "n1"}, tp=1, pp=1)
    assert least_seconds(msgspec.structs.replace(alone, profile=LAYERS)) == 8 * 18.0


def test_stages_that_must_be_there_for_memory_are_waited_for() -> None:
    """Where a replica has to be as large as the job, each stage but the first waits for a layer of those before it."""
    pipe = situation(Layout.uniform(tp=1, pp=3, dp=1, layers=6), nodes=on_nodes(3, 8), tp=1, pp=3)
    pipe = msgspec.structs.replace(pipe, profile=LAYERS)
    whole = 8 * 18.0 / 3
    assert least_seconds(pipe) == whole  # a replica may be one device
    least = 16 * MODEL.parameters
    tight = msgspec.structs.replace(pipe, memory_bytes=least // 3 + 1)
    assert least_seconds(tight) == whole + (1 + 2) / 3


def test_nobody_who_can_work_is_as_slow_as_can_be() -> None:
    stopped = situation(Layout.uniform(tp=1, pp=1, dp=1, layers=6), nodes={0: "n1"}, tp=1, pp=1, speeds={0: 0.0})
    assert math.isinf(least_seconds(stopped))


def test_a_pipeline_waits_more_than_the_bound_says_and_less_than_twice_that() -> None:
    """The largest jobs, too: what a grid of a known model takes is not far from it."""
    model = catalogue.model("llama3-405b", 4096)
    nodes = on_nodes(16384, 8)
    layout = Layout.uniform(tp=8, pp=16, dp=128, layers=126)
    case = situation(layout, nodes=nodes, tp=8, pp=16, model=model, micro_batches=128 * 64)
    assert 1 < decide(case).seconds / least_seconds(case) < 1.4
