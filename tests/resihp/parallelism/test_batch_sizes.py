"""Batch ramp-up: megatron-core's numbers, and the same micro-batches one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.errors import DatasetError
from resihp.parallelism.batch_sizes import BatchSizes, Ramp, RampUp


@pytest.fixture(scope="module")
def calculator() -> Any:
    """Return megatron-core's own class."""
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    try:
        return module.RampupBatchsizeNumMicroBatchesCalculator
    except AttributeError:
        pytest.skip("this megatron-core has no ramps by increments: 0.19 replaced them by steps")


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3000))
def test_each_iteration_has_as_many_as_with_megatron(
    calculator: Any, start: int, increment: int, steps: int, over: int
) -> None:
    usual = start + increment * steps
    theirs = calculator(
        global_batch_size=usual,
        micro_batch_size=1,
        data_parallel_size=1,
        decrease_batch_size_if_needed=False,
        rank=0,
        start_global_batch_size=start,
        batch_size_increment=increment,
        ramup_samples=over,
    )
    ours = RampUp(start=start, increment=increment, micro_batches=over).sizes(usual)
    used = 0
    for iteration in range(1, ours.ramp[-1][0] + 5):
        theirs.update(used, consistency_check=False)
        assert ours.at(iteration) == theirs.current_global_batch_size
        assert ours.before(iteration) == used
        used += theirs.current_global_batch_size
    assert ours.at(10**9) == usual


def test_without_a_ramp_all_iterations_are_alike() -> None:
    sizes = BatchSizes(8)
    assert [(sizes.at(i), sizes.before(i)) for i in (1, 2, 100)] == [(8, 0), (8, 8), (8, 792)]


@pytest.mark.parametrize(
    ("ramp_up", "usual", "message"),
    [
        (RampUp(start=0, increment=1, micro_batches=10), 4, "must be at least 1"),
        (RampUp(start=1, increment=1, micro_batches=0), 4, "must be at least 1"),
        (RampUp(start=4, increment=1, micro_batches=10), 4, "choose a start below 4"),
        (RampUp(start=1, increment=2, micro_batches=10), 4, "an increment that divides the difference"),
    ],
)
def test_a_ramp_up_that_does_not_add_up_is_refused(ramp_up: RampUp, usual: int, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        ramp_up.sizes(usual)


@pytest.mark.parametrize("ramp", [((2, 4), (5, 8)), ((1, 4), (1, 8)), ((1, 4), (5, 6)), ((1, 0), (5, 8))])
def test_steps_that_are_none_are_refused(ramp: Ramp) -> None:
    with pytest.raises(DatasetError, match="batch sizes"):
        BatchSizes(8, ramp)


def test_a_ramp_goes_up() -> None:
    with pytest.raises(DatasetError, match="ascend"):
        BatchSizes(4, ((1, 16), (5, 4)))
