"""Adapted orders of a pipeline: never slower than the schedule's, within memory, and fast where links are slow."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipelines import (
    CAPS,
    DELAYS_MS,
    MEASURED_MS,
    MICRO_BATCHES,
    PUBLISHED_MS,
    STAGES,
    main,
    published_rule,
    slow_pipeline,
)
from resihp.errors import PlanError
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.checker import check
from resihp.scheduler.cost.prices import Priced, Prices, iteration_seconds
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.orders.warm_up import adapted, published_depths
from resihp.scheduler.situation import Situation


def test_the_published_rule() -> None:
    """Two more at each boundary, and before the slow link one more for each forward that its delay lasts."""
    priced = slow_pipeline(25.0)
    forward = priced.shape[0][0].f
    assert 2 * forward < 25.0 < 3 * forward
    assert published_depths(priced) == (18, 16, 14, 12, 10, 8, 6, 1)
    assert published_depths(priced, assumed=0.0) == (15, 13, 11, 9, 7, 5, 3, 1)


def test_the_timeline_has_the_measured_times_of_a_delayed_link() -> None:
    """Six figures from real hardware, after one constant was fitted to the seventh, that without delay."""
    for delay, measured in zip(DELAYS_MS, MEASURED_MS, strict=True):
        found = adapted(slow_pipeline(delay), range(MICRO_BATCHES), evaluations=0)
        assert found.seconds == found.plain_seconds == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("delay", [10, 60])
def test_a_delayed_link_costs_less_than_published(delay: int) -> None:
    """At the published system's memory (it keeps up to 24), and at twice 1F1B's."""
    published = PUBLISHED_MS[DELAYS_MS.index(delay)]
    assert published is not None
    for cap in CAPS[:2]:
        limits = () if cap is None else (cap,) * STAGES
        found = adapted(slow_pipeline(delay), range(MICRO_BATCHES), split=True, most_alive=limits, evaluations=40)
        assert found.seconds <= published
        assert max(found.alive) <= (cap or 24)


@pytest.mark.parametrize("delay", [20, 60])
def test_never_slower_than_the_published_rule_with_less_memory(delay: int) -> None:
    milliseconds, alive = published_rule(slow_pipeline(delay), delay)
    found = adapted(slow_pipeline(delay), range(MICRO_BATCHES), split=True)
    assert found.seconds <= milliseconds * (1 + 1e-9)
    assert max(found.alive) < alive


def test_the_benchmark_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["warm-up", "--evaluations", "2"])
    assert "largest error 2.9%, limit 3 %" in capsys.readouterr().out


def test_without_delay_there_is_nothing_to_gain_but_by_splitting() -> None:
    priced = slow_pipeline(0)
    whole = adapted(priced, range(MICRO_BATCHES), evaluations=30)
    assert whole.seconds == pytest.approx(MEASURED_MS[0])
    assert whole.alive == (8, 7, 6, 5, 4, 3, 2, 1)
    apart = adapted(priced, range(MICRO_BATCHES), split=True, most_alive=(8.0,) * STAGES, evaluations=30)
    assert apart.seconds < 0.9 * whole.seconds


@st.composite
def pipelines(draw: st.DrawFn) -> Priced:
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    seconds = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    shape = tuple(
        tuple(Times(draw(seconds), draw(seconds), draw(seconds)) for _ in range(chunks)) for _ in range(stages)
    )
    late = tuple(tuple(0.0 if a == b else draw(seconds) for b in range(stages)) for a in range(stages))
    layout = Layout.uniform(tp=1, pp=stages, dp=1, layers=stages * chunks + 1, chunks=chunks)
    return Priced(layout.replicas[0], shape, draw(st.sampled_from([(), late])))


@settings(max_examples=60)
@given(pipelines(), st.integers(1, 7), st.booleans(), st.sampled_from([(), 1.0, 2.0, 9.0]))
def test_orders_are_no_slower_keep_to_memory_and_can_be_carried_out(
    priced: Priced, count: int, split: bool, cap: float | tuple[()]
) -> None:
    stages = len(priced.replica.stages)
    share = tuple(range(count, 2 * count))
    limits = (cap,) * stages if isinstance(cap, float) else cap
    found = adapted(priced, share, split=split, most_alive=limits, evaluations=25)
    plain = adapted(priced, share, evaluations=0)
    if not limits or all(have <= most for have, most in zip(plain.alive, limits, strict=True)):
        assert found.seconds <= found.plain_seconds == plain.seconds
    assert all(have <= most + 1e-6 for have, most in zip(found.alive, limits, strict=False))
    if not split:
        assert not any(p.kind == "W" for order in found.orders for p in order)
    renamed = tuple(
        tuple(msgspec.structs.replace(p, micro_batch=p.micro_batch - count) for p in order) for order in found.orders
    )
    check(Plan(epoch=1, layout=Layout((priced.replica,)), assignment=(tuple(range(count)),), orders=(renamed,)))
    assert found == adapted(priced, share, split=split, most_alive=limits, evaluations=25)


def test_the_planners_price_of_a_plan_with_these_orders_is_the_same() -> None:
    model = ModelSpec(layers=4, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=256, sequence=64)
    layout = Layout.uniform(tp=1, pp=4, dp=1, layers=4)
    case = Situation(
        epoch=3,
        base=layout,
        available=(0, 1, 2, 3),
        nodes={0: "n1", 1: "n1", 2: "n2", 3: "n2"},
        model=model,
        micro_batches=12,
        tp=1,
        pp=4,
        profile=Profile(layers=(Times(1.0, 1.2, 0.8),) * 4, head=Times(0.2, 0.2, 0.2), transfer_s=0.1),
        links={("n1", "n2"): 0.05},
    )
    priced = Prices(case).priced(layout.replicas[0])
    plan = Plan(epoch=3, layout=layout, assignment=(tuple(range(12)),))
    for split in (False, True):
        found = adapted(priced, range(12), split=split, evaluations=30)
        ours = msgspec.structs.replace(plan, orders=(found.orders,))
        assert iteration_seconds(ours, case) == pytest.approx(found.seconds)
        assert iteration_seconds(plan, case) == pytest.approx(found.plain_seconds)
        assert found.seconds < 0.85 * found.plain_seconds


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(PlanError, match=r"stage 2: may keep 0\.5 alive, but one micro-batch takes 1"):
        adapted(slow_pipeline(10), range(4), most_alive=(1, 1, 0.5, 1, 1, 1, 1, 1))
    with pytest.raises(PlanError, match="2 limits of live micro-batches for 8 stages"):
        adapted(slow_pipeline(10), range(4), most_alive=(1, 1))
