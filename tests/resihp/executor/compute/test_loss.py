"""The loss over a split vocabulary: its value, its gradient, and how little it allocates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from resihp.executor.compute import stage
from resihp.executor.compute.stage import IGNORED_LABEL, CrossEntropy
from resihp.executor.tensor_group import TensorGroup
from tests.resihp.executor.counting import LiveBytes

TOKENS, ROWS, VOCAB = 37, 96, 90
CHUNK = 5 * ROWS


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LOSS_ELEMENTS", CHUNK)


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = (4 * torch.randn(TOKENS, ROWS, generator=generator)).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[[3, TOKENS - 1]] = IGNORED_LABEL
    return logits, labels


def passed(logits: Tensor, labels: Tensor, group: TensorGroup | None = None) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of a hundredth of it."""
    leaf = logits.clone().requires_grad_()
    loss = CrossEntropy.apply(leaf * 1, labels, group or TensorGroup(), VOCAB)
    (gradient,) = torch.autograd.grad(loss / 100, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-3)])
def test_loss_and_gradient_are_those_of_torch_in_float32(dtype: torch.dtype, tolerance: float) -> None:
    logits, labels = example(dtype)
    loss, gradient = passed(logits, labels)
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole[:, :VOCAB], labels, ignore_index=IGNORED_LABEL, reduction="sum")
    (right,) = torch.autograd.grad(expected / 100, whole)
    assert gradient.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    rounded = right.to(dtype).float()
    assert (gradient.float() - rounded).norm() <= tolerance * rounded.norm()
    assert not gradient[:, VOCAB:].any()
    assert not gradient[[3, TOKENS - 1]].any()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = example(torch.float32)
    loss, gradient = passed(logits, labels)
    monkeypatch.setattr(stage, "LOSS_ELEMENTS", 1 << 23)
    whole_loss, whole_gradient = passed(logits, labels)
    assert torch.equal(gradient, whole_gradient)
    assert loss == whole_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_copy_of_the_logits_is_ever_alive(dtype: torch.dtype) -> None:
    """Beside the logits: one chunk in float32, and a few numbers a token."""
    count = 400
    logits = torch.randn(count, ROWS, dtype=dtype, requires_grad=True)
    labels = torch.zeros(count, dtype=torch.int64)
    with LiveBytes() as live:
        loss = CrossEntropy.apply(logits.clone(), labels, TensorGroup(), VOCAB)
        loss.backward()
    beside = live.peak - logits.untyped_storage().nbytes()
    assert 4 * CHUNK <= beside <= 4 * CHUNK + 64 * count


def test_an_evaluation_leaves_the_logits_alone() -> None:
    logits, labels = example(torch.float32)
    kept = logits[:, :VOCAB].clone()
    with torch.no_grad():
        loss = CrossEntropy.apply(logits, labels, TensorGroup(), VOCAB)
    assert torch.equal(logits[:, :VOCAB], kept)
    assert loss == passed(logits, labels)[0]


def test_a_second_backward_pass_is_refused() -> None:
    logits, labels = example(torch.float32)
    loss = CrossEntropy.apply(logits.requires_grad_() * 1, labels, TensorGroup(), VOCAB)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
