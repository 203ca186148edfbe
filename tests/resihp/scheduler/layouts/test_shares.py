"""Micro-batches go where they are done first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import PlanError
from resihp.parallelism.plan import spread
from resihp.scheduler.layouts.shares import Seconds, contiguous, estimate, improved, split


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [5, 8, 13])
def test_equal_replicas_share_evenly(replicas: int, micro_batches: int) -> None:
    found = split(micro_batches, [estimate(4, 2.0)] * replicas)
    assert contiguous(found) == spread(micro_batches, replicas)
    assert improved(found, [estimate(4, 2.0)] * replicas) == found


def test_a_replica_of_half_the_speed_gets_half_as_much() -> None:
    assert split(12, [estimate(1, 1.0), estimate(1, 2.0)]) == (8, 4)


def test_everybody_gets_something_or_it_is_refused() -> None:
    assert split(3, [estimate(1, 1.0), estimate(1, 100.0)]) == (2, 1)
    with pytest.raises(PlanError, match="2 micro-batches an iteration cannot feed 3 replicas"):
        split(2, [estimate(1, 1.0)] * 3)
    with pytest.raises(PlanError, match="cannot feed 0 replicas"):
        split(2, [])


SHAPES = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0])), min_size=1, max_size=3)


def times(shapes: list[tuple[int, float]]) -> list[Seconds]:
    return [estimate(stages, slowest) for stages, slowest in shapes]


@given(SHAPES, st.integers(0, 7), st.data())
def test_no_other_distribution_is_faster_whatever_the_guess(
    shapes: list[tuple[int, float]], more: int, data: st.DataObject
) -> None:
    seconds = times(shapes)
    count = len(shapes) + more
    every = [c for c in itertools.product(range(1, count + 1), repeat=len(shapes)) if sum(c) == count]

    def longest(counts: tuple[int, ...]) -> float:
        return max(time(m) for time, m in zip(seconds, counts, strict=True))

    best = min(map(longest, every))
    assert longest(split(count, seconds)) == best
    assert longest(improved(data.draw(st.sampled_from(every)), seconds)) == best
