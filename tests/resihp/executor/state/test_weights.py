"""Weight gradients that add up in float32 while passes are in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from resihp.executor.state import weights


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    weights._refused_dtypes.clear()
    yield
    weights._refused_dtypes.clear()


def factors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    left, right = (torch.randn(shape, generator=generator).bfloat16() for shape in ((6, 40), (40, 5)))
    return torch.randn(6, 5, generator=generator), left, right


def test_products_are_not_rounded_before_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert (total.dtype, out_dtype) == (torch.float32, torch.float32)
        return out.copy_(total + left.float() @ right.float())

    monkeypatch.setattr(torch, "addmm", on_gpu)
    total, left, right = factors()
    expected = total.double() + left.double() @ right.double()
    assert weights._add_unrounded(total, left, right)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("error", [RuntimeError("self and mat2 must have the same dtype"), TypeError("out_dtype")])
def test_a_torch_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    calls = []

    def refuse(*_: Any, **__: Any) -> Tensor:
        calls.append(1)
        raise error

    monkeypatch.setattr(torch, "addmm", refuse)
    total, left, right = factors()
    before = total.clone()
    assert not weights._add_unrounded(total, left, right)
    assert not weights._add_unrounded(total, left, right)
    assert torch.equal(total, before)
    assert len(calls) == 1


def test_a_full_device_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "addmm", fill)
    with pytest.raises(torch.OutOfMemoryError):
        weights._add_unrounded(*factors())
    assert not weights._refused_dtypes


def test_this_processor_adds_rounded_products() -> None:
    total, left, right = factors()
    expected = total + (left @ right)
    weights._add_gradient(total, right.t().contiguous().t(), left.t())
    assert torch.equal(total, expected)
