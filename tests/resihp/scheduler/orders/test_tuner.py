"""The tuner: pipelines that can be carried out, within memory, faster than Megatron's, and near to what is possible."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipelines import PROFILES, least_seconds, main, profiles
from resihp.errors import LayoutError, PlanError
from resihp.parallelism.layout import validate
from resihp.parallelism.model import ModelSpec
from resihp.pipeline.checker import check
from resihp.scheduler.cost.profile import Profile, Times
from resihp.scheduler.orders.placements import Loads, chunks_of, routes
from resihp.scheduler.orders.tuner import Task, megatron, tune


def uneven(layers: int, seed: int = 0, head: float = 2.0) -> Profile:
    rng = random.Random(seed)
    kinds = [Times(1.0, 1.1, 0.9), Times(2.0, 2.2, 1.8), Times(0.5, 0.75, 0.25)]
    return Profile(
        layers=tuple(rng.choice(kinds) for _ in range(layers)),
        embedding=Times(0.1, 0.0, 0.1),
        head=Times(head, head, head),
    )


def even(layers: int, head: float) -> Profile:
    return Profile(layers=(Times(1.0, 1.0, 1.0),) * layers, head=Times(head, head, head))


def test_a_heavy_head_makes_room_for_itself() -> None:
    """Eight layers and a head as heavy as two, on two stages: five each, and next to no bubble."""
    task = Task(profile=even(8, 2.0), stages=2, micro_batches=8, most_chunks=1)
    found = tune(task, evaluations=40)
    assert found.slowest_s == pytest.approx(15.0)
    assert sorted(sum(b - a + 1 for a, b in spans) for spans in found.chunks) == [3, 5]
    assert least_seconds(task.profile, (1.0, 1.0), 8) <= found.seconds <= 8 * 15.0 * 1.05
    assert megatron(task).seconds > 8 * 18.0


def test_a_slow_stage_gets_less() -> None:
    task = Task(profile=even(12, 0.0), stages=3, micro_batches=6, speeds=(1.0, 0.4, 1.0), most_chunks=1)
    found = tune(task, evaluations=30)
    assert [sum(b - a + 1 for a, b in spans) for spans in found.chunks] == [5, 2, 5]


@settings(max_examples=40)
@given(
    st.integers(0, 99),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([None, 1.0, 1.3, 2.0]),
    st.booleans(),
)
def test_what_is_tuned_can_be_carried_out_keeps_to_memory_and_beats_megatron(
    seed: int, stages: int, more: int, micro_batches: int, split: bool, memory: float | None, slow: bool
) -> None:
    layers = stages + more
    late = tuple(tuple(0.3 * abs(a - b) for b in range(stages)) for a in range(stages)) if slow else ()
    task = Task(
        profile=uneven(layers, seed),
        stages=stages,
        micro_batches=micro_batches,
        speeds=tuple(1.0 if s else 0.7 for s in range(stages)) if slow else (),
        late=late,
        layer_bytes=tuple(1.0 + i % 3 for i in range(layers)),
        split=split,
        most_chunks=3,
    )
    base = megatron(task)
    if memory is not None:
        task = msgspec.structs.replace(task, most_alive=(max(base.alive) * memory,) * stages)
    found = tune(task, evaluations=40, seed=seed)
    assert found.seconds <= base.seconds
    assert all(have <= most * (1 + 1e-6) for have, most in zip(found.alive, task.most_alive, strict=False))
    assert found.seconds >= least_seconds(task.profile, task.speeds or (1.0,) * stages, micro_batches) * (1 - 1e-9)
    assert found.seconds >= found.slowest_s * micro_batches * (1 - 1e-9)
    assert split or not any(p.kind == "W" for order in found.orders for p in order)
    plan = found.plan(epoch=1)
    validate(plan.layout, ModelSpec(layers=layers, hidden=8, heads=1, kv_groups=1, ffn_hidden=8, vocab=8, sequence=8))
    check(plan)
    assert found == tune(task, evaluations=40, seed=seed)


def test_orders_for_other_micro_batches() -> None:
    found = tune(Task(profile=even(4, 1.0), stages=2, micro_batches=3), evaluations=10)
    other = found.orders_for((5, 7, 9))
    assert [[p.kind for p in order] for order in other] == [[p.kind for p in order] for order in found.orders]
    assert {p.micro_batch for order in other for p in order} == {5, 7, 9}
    assert found.replica([(4, 5), (6, 7)]).ranks == (4, 5, 6, 7)


@pytest.mark.parametrize("seed", range(6))
def test_one_chunk_a_stage_is_cut_as_well_as_can_be(seed: int) -> None:
    profile, speeds = uneven(8, seed), (1.0, 0.5, 2.0)
    loads = Loads(profile, speeds)
    cuts = [(a, b - a, 8 - b) for a, b in itertools.combinations(range(1, 8), 2)]
    for route in ((0, 1, 2), (2, 0, 1)):
        found = loads.slowest(route, loads.balanced(route))
        assert found == pytest.approx(min(loads.slowest(route, cut) for cut in cuts))


def test_routes_give_each_stage_work_and_each_layer_a_place() -> None:
    for stages, layers in ((1, 3), (2, 7), (4, 9)):
        found = list(routes(stages, layers, 4))
        assert len(set(found)) == len(found)
        for route in found:
            cut = Loads(even(layers, 1.0), (1.0,) * stages).balanced(route)
            held = sorted(span for spans in chunks_of(route, cut, stages) for span in spans)
            assert [x for a, b in held for x in range(a, b + 1)] == list(range(layers))
            assert set(route) == set(range(stages))
    assert {(0, 1), (0, 1, 0, 1), (1, 0, 0, 1)} <= set(routes(2, 4, 2))


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_below_every_way_to_spread_the_layers(seed: int) -> None:
    profile, stages = uneven(7, seed), 3
    items = [profile.span(i, i).total for i in range(7)]
    best = min(
        max(sum(x for x, s in zip(items, where, strict=True) if s == k) for k in range(stages))
        for where in itertools.product(range(stages), repeat=7)
    )
    step = min(profile.span(i, i).f for i in range(7))
    bound = least_seconds(profile, (1.0,) * stages, 100)
    assert 100 * best * (1 - 1e-5) <= bound <= 100 * best + stages * step


@pytest.mark.skipif(not PROFILES.exists(), reason=f"no profiles of uneven models at {PROFILES}")
@pytest.mark.parametrize("model", ["gemma-like", "deepseek-like", "nemotron-h-like"])
def test_uneven_models_gain_over_interleaved_1f1b(model: str) -> None:
    """Eight stages, against virtual degree 2 and with no more memory than it takes: more than nine tenths of all."""
    task = Task(profile=profiles(PROFILES)[model], stages=8, micro_batches=16)
    base = megatron(task, 2)
    found = tune(msgspec.structs.replace(task, most_alive=(max(base.alive),) * 8), evaluations=60)
    assert max(found.alive) <= max(base.alive)
    assert base.seconds / found.seconds > 1.37
    assert found.seconds * 0.85 < least_seconds(task.profile, (1.0,) * 8, 16) <= found.seconds
    check(found.plan(epoch=1))


def test_the_benchmark_says_when_it_has_no_profiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["tuner", "--profiles", str(tmp_path / "none.json")])
    assert "none.json is not there: nothing to tune" in capsys.readouterr().out.replace("\n", "")


def test_what_makes_no_sense_is_refused() -> None:
    task = Task(profile=even(4, 1.0), stages=2, micro_batches=2)
    for change, message in (
        ({"stages": 5}, "4 layers are too few for 5 stages"),
        ({"stages": 0}, "0 stages, 2 micro-batches: at least one of each"),
        ({"micro_batches": 0}, "2 stages, 0 micro-batches: at least one of each"),
        ({"speeds": (1.0, 0.0)}, "of 2 stages: one for each, above 0 and finite"),
        ({"speeds": (1.0, math.nan)}, "of 2 stages: one for each, above 0 and finite"),
        ({"speeds": (1.0,)}, "of 2 stages: one for each, above 0 and finite"),
        ({"most_alive": (9.0,)}, "1 limits of live activations for 2 stages"),
        ({"most_alive": (1.0, 1.0)}, "2 stages may keep at most 1 alive: too little for one micro-batch"),
        ({"layer_bytes": (1.0,)}, "activations of 1 layers, the profile has 4"),
        ({"profile": even(4, math.inf)}, "some time of its stages is negative or not finite"),
    ):
        with pytest.raises(PlanError, match=message):
            tune(msgspec.structs.replace(task, **change), evaluations=10)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="the model has only 4 layers"):
        megatron(task, 3)
