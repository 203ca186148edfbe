"""Gradients add up in one buffer, which lives as long as its state and is summed where it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import resihp.executor  # noqa: F401 imports megatron-core the way workers do
from resihp.executor.state.gradients import Gradients, summed_in_place
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import share
from resihp.parallelism.parameter_outline import outline
from resihp.pipeline.program import Bucket, buckets

MODEL = ModelSpec(layers=4, hidden=32, heads=4, kv_groups=4, ffn_hidden=128, vocab=64, sequence=32)
Ranks = Callable[..., list[Any]]


def of_layout(layout: Layout, rank: int) -> tuple[tuple[Bucket, ...], dict[int, tuple[str, ...]]]:
    specs = outline(MODEL)
    place = layout.place(rank)
    assert place is not None
    tp = layout.replicas[place.replica].stages[place.stage].tp
    found = buckets(layout, specs)
    return found, summed_in_place(found, rank, {spec.name: share(spec, place.t, tp) for spec in specs})


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 2), (2, 1, 2), (1, 2, 3), (2, 2, 2)])
def test_replicas_that_are_alike_sum_every_bucket_where_it_lies(tp: int, pp: int, dp: int) -> None:
    layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=MODEL.layers)
    for rank in layout.ranks:
        found, in_place = of_layout(layout, rank)
        assert list(in_place) == [i for i, bucket in enumerate(found) if rank in bucket.owners]


def test_what_is_cut_finer_or_summed_with_several_is_copied() -> None:
    """A replica of degree 1 beside one of degree 2: its slices are halves, and whole ones are in two buckets."""
    whole = ((0, MODEL.layers - 1),)
    layout = Layout((Replica((Stage((0, 1), whole),)), Replica((Stage((2,), whole),))))
    assert len(of_layout(layout, 0)[1]) > 0
    found, in_place = of_layout(layout, 2)
    assert in_place == {}
    assert sum(2 in bucket.owners for bucket in found) > 1


def a_pair(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = {name: torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)) for name in ("a", "b")}
    if dtype == torch.float32:
        return parameters, parameters
    return parameters, {name: parameter.detach().float() for name, parameter in parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_passes_add_up_in_float32_and_keep_the_buffer(dtype: torch.dtype) -> None:
    parameters, masters = a_pair(dtype)
    gradients = Gradients(parameters, masters)
    gradients.begin((), 0, {})
    where = gradients.of("a").data_ptr()
    factor = torch.tensor(1.0 + 2.0**-7, dtype=dtype)  # whose sum of 257 takes more than bfloat16 has
    for _ in range(257):
        (parameters["a"].sum() * factor).backward()
    assert torch.equal(gradients.of("a"), torch.full((2, 3), 257 * (1.0 + 2.0**-7)))
    assert not gradients.of("b").any()
    assert masters["a"].grad is gradients.of("a")
    if dtype == torch.bfloat16:
        assert parameters["a"].grad is None
    gradients.begin((), 0, {})
    assert gradients.of("a").data_ptr() == where
    assert not gradients.of("a").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_that_was_let_go_of_gets_nothing_more(dtype: torch.dtype) -> None:
    parameters, masters = a_pair(dtype)
    gradients = Gradients(parameters, masters)
    gradients.begin((), 0, {})
    old = gradients.of("a")
    gradients.release()
    assert masters["a"].grad is None
    gradients.begin((), 0, {})
    parameters["a"].sum().backward()
    assert torch.equal(gradients.of("a"), torch.ones(2, 3))
    assert not old.any()


def test_no_bucket_of_equal_replicas_is_copied(ranks: Ranks) -> None:
    """What a rank sums with others is its one gradient buffer, the same in every iteration."""
    for answer in ranks("sums_in_place", 4, grid_of=(1, 2, 2)):
        assert answer["copies"] == 0
        assert answer["buffers"] == 1


@pytest.mark.parametrize(
    ("kind", "grid", "plan"),
    [
        ("gpt", (1, 1, 2), {}),
        ("llama-bf16", (2, 1, 2), {"sequence_parallel": True}),
        ("llama", (1, 2, 2), {"schedule": "zero-bubble"}),
    ],
)
def test_sums_that_begin_within_the_last_backward_change_nothing(
    ranks: Ranks, kind: str, grid: tuple[int, int, int], plan: dict[str, Any]
) -> None:
    """Values to the bit, what is measured and told of; with buckets so small that a chunk has several."""
    cut, whole = (
        ranks("train", math.prod(grid), kind=kind, grid_of=grid, plan=plan, bucket_bytes=5000, cut=cut)
        for cut in (True, False)
    )
    for one, other in zip(cut, whole, strict=True):
        assert one["digest"] == other["digest"]
        assert one["outcomes"] == other["outcomes"]
        assert one["primitives"] == other["primitives"]
        assert one["parts"] >= 2
        assert other["parts"] == 0


def test_a_broken_iteration_leaves_its_buffer_to_what_may_still_write_to_it(ranks: Ranks) -> None:
    (answer,) = ranks("broken_buffer", 1)
    assert answer["new"]
    assert answer["equal"]


def test_the_norm_is_taken_without_a_wait_for_each_slice(ranks: Ranks) -> None:
    """A number read back is a wait for the device; the sums over all ranks are the one that has to be."""
    (answer,) = ranks("asked_at_the_end")
    assert answer["slices"] > 40
    assert answer["reads"] == 0
