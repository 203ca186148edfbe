"""Sums of gradients beside the last backward: what is left of them after it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler.cost.gradient_sync import BUCKET_BYTES, GRADIENT_BYTES, exposed_s
from resihp.scheduler.cost.prices import after_backward_s, iteration_seconds
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.situation import Situation
from tests.resihp.scheduler.cases import on_nodes, situation

LARGE = ModelSpec(layers=16, hidden=4096, heads=32, kv_groups=32, ffn_hidden=16384, vocab=512, sequence=64)
"""Whose layers fill a bucket each, and more."""
assert GRADIENT_BYTES * LARGE.parameters_per_layer > 8 * BUCKET_BYTES


def case_of(pp: int, dp: int, gradient_s: float, schedule: str = "1f1b", model: ModelSpec = LARGE) -> Situation:
    """Layers of 3 s each: F, B and W take the same."""
    layout = Layout.uniform(tp=1, pp=pp, dp=dp, layers=model.layers)
    plain = situation(layout, nodes=on_nodes(pp * dp, 1), tp=1, pp=pp, model=model, schedule=schedule)
    profile = Profile(layers=(Times(1.0, 1.0, 1.0),) * model.layers, gradient_s=gradient_s, step_s=0.25)
    return msgspec.structs.replace(plain, profile=profile)


def simulated(layers: int, sum_s: float, work_s: float) -> float:
    """One sum after the other, each begun when its part of the work is through; what is left after all of the work."""
    parts = layers // -(-layers // 8)
    done = 0.0
    for part in range(1, parts + 1):
        done = max(done, part * work_s / parts) + layers * sum_s / parts
    return done - work_s


@given(st.integers(1, 16), st.floats(0.0, 4.0))
def test_what_is_left_is_what_one_sum_after_the_other_leaves(layers: int, gradient_s: float) -> None:
    model = msgspec.structs.replace(LARGE, layers=layers)
    case = case_of(1, 2, gradient_s, model=model)
    found = exposed_s(case.base.replicas[0], (1.0,), case)
    assert found == pytest.approx(simulated(layers, gradient_s, 2.0 * layers))


def test_it_comes_on_top_of_the_pipelines() -> None:
    """Sums of a layer take half as long as its backward: all but those of the last eighth hide behind it."""
    with_sums, without = case_of(1, 2, 1.0), case_of(1, 2, 0.0)
    plan = Plan(epoch=2, layout=with_sums.base, assignment=spread(8, 2))
    assert iteration_seconds(plan, with_sums) - iteration_seconds(plan, without) == pytest.approx(16 / 8)
    alone = case_of(1, 1, 1.0)
    assert after_backward_s(alone.base.replicas, alone) == 0.25


def test_later_stages_have_the_time_that_the_earlier_ones_still_work() -> None:
    """Stage 1 is through 16 s before stage 0, and nothing of its sums is left by then, unless W comes at the end."""
    case = case_of(2, 2, 1.0)
    (first, second), replica = case.base.replicas[0].stages, case.base.replicas[0]
    assert first.layers
    assert second.layers
    long = exposed_s(replica, (1.0, 0.25), case)
    assert long == pytest.approx(1.0), "only stage 0's last part"
    apart = case_of(2, 2, 3.0, "zero-bubble")
    assert exposed_s(replica, (1.0, 1.0), apart) == pytest.approx(24 - 8 * 7 / 8)


def test_what_fits_into_one_bucket_is_summed_after_all_of_the_work() -> None:
    small = msgspec.structs.replace(LARGE, hidden=64, ffn_hidden=256)
    case = case_of(1, 2, 0.5, model=small)
    assert exposed_s(case.base.replicas[0], (1.0,), case) == pytest.approx(16 * 0.5)


@given(st.floats(0.1, 2.0), st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_a_slower_device_never_makes_an_iteration_faster(gradient_s: float, one: float, other: float) -> None:
    slow, fast = sorted((one, other))
    case = case_of(2, 2, gradient_s)
    plan = Plan(epoch=2, layout=case.base, assignment=spread(8, 2))
    times = [
        iteration_seconds(plan, msgspec.structs.replace(case, speeds=dict.fromkeys((0, 2), speed)))
        for speed in (slow, fast)
    ]
    assert times[0] >= times[1] * (1 - 1e-9)
