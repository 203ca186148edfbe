"""Attention's one kernel for all documents, in the words of each torch that has it. The kernel itself needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from resihp.errors import ModelError
from resihp.executor.compute.attention import PackedAttention, Packing, causal_options
from resihp.executor.compute.stage import MAX_PACKINGS
from resihp.executor.tensor_group import TensorGroup
from tests.resihp.executor.stage_scenarios import Case, batch, stages_of

LENGTHS = (5, 1, 17, 9)
WIDTH = 8


def computed(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None, gqa: bool) -> Tensor:
    """Causal attention of [N, heads, width] inside each document."""
    assert bounds.dtype == torch.int32
    parts = []
    for start, stop in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True):
        q, k, v = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)[0])
    return torch.cat([part.transpose(0, 1) for part in parts])


def torch_2_10(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Tensor:
    assert is_causal
    assert cu_seq_q.equal(cu_seq_k)
    assert (max_q, max_k) == (max(LENGTHS), max(LENGTHS))
    return computed(query, key, value, cu_seq_q, None, gqa=False)


def torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert window_size == (-1, 0)
    # looks at no number of heads, as the kernel beneath takes fewer groups
    return computed(query, key, value, cu_seq_q, scale, gqa=query.shape[1] != key.shape[1])


def torch_2_12(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    assert window_size == (-1, 0)
    return computed(query, key, value, cu_seq_q, scale, gqa=enable_gqa)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("version", [torch_2_10, torch_2_11, torch_2_12])
def test_every_torch_is_asked_for_the_same(
    monkeypatch: pytest.MonkeyPatch, version: Callable[..., Tensor], groups: int, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(sum(LENGTHS), 1, heads, WIDTH, dtype=torch.float64, generator=generator)
        for heads in (4, groups, groups)
    )
    config = SimpleNamespace(window_size=None, window_attn_skip_freq=None)
    attention, packing = PackedAttention(config, 1, scale), Packing.of(LENGTHS)
    expected = attention(query, key, value, packed_seq_params=packing)
    monkeypatch.setattr(varlen, "varlen_attn", version)
    found = attention._varlen(query, key, value, packing)
    assert found.shape == expected.shape == (sum(LENGTHS), 1, 4 * WIDTH)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("version", "heads"), [(torch_2_10, 4), (torch_2_11, 2), (torch_2_12, 2)])
def test_keys_and_values_are_repeated_only_for_a_torch_that_takes_no_groups(
    version: Callable[..., Tensor], heads: int
) -> None:
    query, key, value = (torch.zeros(3, count, WIDTH) for count in (4, 2, 2))
    _, key, value, _ = causal_options(version, query, key, value, None)
    assert (key.shape[1], value.shape[1]) == (heads, heads)


@pytest.mark.parametrize("window", [-1, 0, 7])
def test_a_window_is_so_many_tokens_before_and_none_after(window: int) -> None:
    tensors = [torch.zeros(3, 2, WIDTH) for _ in range(3)]
    for version in (torch_2_11, torch_2_12):
        assert causal_options(version, *tensors, None, window)[3]["window_size"] == (window, 0)


def test_a_torch_that_knows_no_windows_is_told_of() -> None:
    tensors = [torch.zeros(3, 2, WIDTH) for _ in range(3)]
    with pytest.raises(ModelError, match=r"window_size on GPUs needs torch 2\.11"):
        causal_options(torch_2_10, *tensors, None, 7)


def test_lengths_become_positions_and_bounds_once() -> None:
    angles = torch.arange(20.0)[:, None, None, None]
    packing = Packing.of((3, 1, 2), angles=angles)
    assert packing.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packing.bounds.tolist() == [0, 3, 4, 6]
    assert packing.rotation is not None
    assert packing.rotation.flatten().tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 1.0]


def test_a_stage_works_out_a_micro_batchs_packing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all of its layers and chunks; of the last few only, since micro-batches differ."""
    made: list[tuple[int, ...]] = []
    of = Packing.of

    def counted(lengths: tuple[int, ...], *further: Any) -> Packing:
        made.append(lengths)
        return of(lengths, *further)

    monkeypatch.setattr(Packing, "of", counted)
    ((stage,), _) = stages_of("llama", Case(), TensorGroup())
    lengths, tokens, labels = batch(0, 64)
    for _ in range(2):
        hidden = stage(0, lengths, tokens)
        stage(1, lengths, hidden, labels)
    assert made == [lengths]
    for length in range(1, len(tokens)):
        stage(0, (length,), tokens[:length])
    assert len(stage._packings) == MAX_PACKINGS
