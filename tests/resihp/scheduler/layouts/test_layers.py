"""Layer repartition: as fast as can be, and no more unrest than that takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import PlanError
from resihp.parallelism.layout import Layout, Replica, Stage, validate
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost.profile import layer_units
from resihp.scheduler.layouts.layers import Chunks, Ends, ends_of, fitting, partition, slowest

EVEN: tuple[Chunks, ...] = (((0, 3),), ((4, 7),), ((8, 11),))


def counts(spans: tuple[Chunks, ...]) -> tuple[int, ...]:
    return tuple(sum(last - first + 1 for first, last in held) for held in spans)


def test_the_papers_example() -> None:
    assert counts(partition(12, (1.0, 0.4, 1.0), before=EVEN)) == (5, 2, 5)


def test_equal_stages_get_megatrons_grid() -> None:
    for layers, stages, chunks in itertools.product((6, 7, 8, 11), (1, 2, 3), (1, 2)):
        grid = Layout.uniform(tp=1, pp=stages, dp=1, layers=layers, chunks=chunks).replicas[0]
        found = partition(layers, (1.0,) * stages, chunks=chunks)
        assert found == tuple(stage.chunks for stage in grid.stages)


def test_the_head_counts() -> None:
    assert counts(partition(12, (1.0, 1.0), ends=Ends(head=2.0))) == (7, 5)
    assert counts(partition(12, (1.0, 1.0), ends=Ends(embedding=3.0, head=1.0))) == (5, 7)


def test_the_head_takes_time_in_proportion_to_its_weights() -> None:
    model = ModelSpec(layers=8, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=768, sequence=64)
    assert ends_of(layer_units(model)) == Ends(embedding=0.0, head=1.0)


def test_of_equally_good_partitions_the_present_one_stays() -> None:
    present: tuple[Chunks, ...] = (((0, 1),), ((2, 4),), ((5, 7),))
    assert partition(8, (1.0, 1.0, 1.0), before=present) == present
    chunked: tuple[Chunks, ...] = (((0, 0), (3, 4)), ((1, 2), (5, 5)))
    assert partition(6, (1.0, 1.0), chunks=2, before=chunked) == chunked


def test_of_equally_good_partitions_the_nearest_is_taken() -> None:
    """Ten layers at speeds (1, 1, 2), at most 3, 3 and 6 of them: the middle stage takes two, nothing else moves."""
    present: tuple[Chunks, ...] = (((0, 0),), ((1, 1),), ((2, 9),))
    assert partition(10, (1.0, 1.0, 2.0), before=present) == (((0, 0),), ((1, 3),), ((4, 9),))
    assert counts(partition(10, (1.0, 1.0, 2.0))) == (2, 2, 6)


def test_memory_limits_a_stage() -> None:
    assert counts(partition(12, (1.0, 1.0, 1.0), limits=(2, 12, 12))) == (2, 5, 5)
    with pytest.raises(PlanError, match="12 layers do not fit the memory of 3 stages"):
        partition(12, (1.0, 1.0, 1.0), limits=(2, 4, 4))


def test_too_few_layers_are_refused_and_the_slowest_stages_are_the_first_to_go() -> None:
    with pytest.raises(PlanError, match="3 layers are too few for 2 stages of 2 chunks"):
        partition(3, (1.0, 1.0), chunks=2)
    assert fitting(3, (1.0, 0.5, 1.0, 2.0)) == (0, 2, 3)
    assert fitting(3, (1.0, 1.0), chunks=2) == (0,)
    assert fitting(8, (1.0, 0.1)) == (0, 1)


SPEEDS = st.lists(st.sampled_from([0.3, 0.5, 1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=4)


@settings(max_examples=200)
@given(SPEEDS, st.integers(4, 12), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 1.3]), st.data())
def test_no_partition_is_faster_and_of_the_fastest_none_is_nearer(
    speeds: list[float], layers: int, embedding: float, head: float, data: st.DataObject
) -> None:
    ends = Ends(embedding, head)
    every: list[tuple[Chunks, ...]] = []
    for cuts in itertools.combinations(range(1, layers), len(speeds) - 1):
        every.append(tuple(((a, b - 1),) for a, b in itertools.pairwise((0, *cuts, layers))))
    before = data.draw(st.sampled_from(every))

    def moved(spans: tuple[Chunks, ...]) -> int:
        held = [set(range(old[0][0], old[0][1] + 1)) for old in before]
        return sum(len(set(range(new[0][0], new[0][1] + 1)) - old) for new, old in zip(spans, held, strict=True))

    found = partition(layers, speeds, ends=ends, before=before)
    assert found in every
    best = min(slowest(spans, speeds, ends) for spans in every)
    assert slowest(found, speeds, ends) == pytest.approx(best)
    equal = [spans for spans in every if slowest(spans, speeds, ends) <= best * (1 + 1e-10)]
    assert moved(found) == min(map(moved, equal))
    assert partition(layers, speeds, ends=ends, before=found) == found


@settings(max_examples=200)
@given(SPEEDS, st.integers(1, 3), st.integers(0, 9), st.sampled_from([0.0, 1.3]))
def test_chunks_are_a_pipeline_and_their_stages_as_fast_as_can_be(
    speeds: list[float], chunks: int, more: int, head: float
) -> None:
    layers = len(speeds) * chunks + more
    found = partition(layers, speeds, chunks=chunks, ends=Ends(head=head))
    stages = tuple(Stage((s,), held) for s, held in enumerate(found))
    model = ModelSpec(layers=layers, hidden=8, heads=1, kv_groups=1, ffn_hidden=8, vocab=8, sequence=8)
    validate(Layout((Replica(stages),)), model)
    assert all(len(held) == chunks for held in found)
    best = min(
        max((n + head * (s == len(speeds) - 1)) / speeds[s] for s, n in enumerate(split))
        for split in itertools.product(range(chunks, layers + 1), repeat=len(speeds))
        if sum(split) == layers
    )
    assert slowest(found, speeds, Ends(head=head)) == pytest.approx(best)
    assert partition(layers, speeds, chunks=chunks, ends=Ends(head=head), before=found) == found
