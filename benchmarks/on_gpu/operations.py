"""How fast attention and weight gradients are, as the executor computes them and as it might."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.on_gpu.figures import Figure, Missing, Scale, at_most, attempt
from benchmarks.on_gpu.kernels import timed
from resihp.executor.compute.attention import PackedAttention, Packing

BACKWARD_OVER_FORWARD = 2.5
"""Of attention's arithmetic."""
GROUPS_DIFFERENCE = 0.02
"""Largest difference of bf16 outputs near 1 that is rounding."""


def measure(scale: Scale) -> Iterator[Figure]:
    document = _Document(scale)
    yield from attempt(
        "attention as the executor calls it", lambda: document.rates("as the executor calls it", document.ours)
    )
    yield from attempt("attention by cuDNN's varlen", lambda: _by_cudnn(document))
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if scale.full else (SDPBackend.MATH,):
        dense = partial(document.dense, kind)
        yield from attempt(f"attention by {kind.name}", lambda kind=kind, dense=dense: document.rates(kind.name, dense))  # type: ignore[misc]
    yield from attempt("attention with groups", lambda: _groups(scale, document))
    yield from attempt("weight gradients", lambda: _weight_gradients(scale))


def mean_seconds(scale: Scale, work: Callable[[], object]) -> float:
    """Of ten in a row, after three to warm up."""
    count = scale.of(10, 1)
    for _ in range(scale.of(3, 1)):
        work()

    def repeated() -> None:
        for _ in range(count):
            work()

    return timed(scale, repeated) / count


class _Document:
    """Queries, keys and values of one document, and ways to attend in it: [N, heads, width] -> [N, heads * width]."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self.length, self.heads, self.width = scale.of(8192, 64), scale.of(32, 4), scale.of(128, 16)
        self.query, self.key, self.value = (self.drawn(self.heads).requires_grad_() for _ in range(3))
        self.packing = Packing.of((self.length,), scale.device)
        config = TransformerConfig(num_layers=1, hidden_size=self.heads * self.width, num_attention_heads=self.heads)
        self._attention = PackedAttention(config, 1)

    def drawn(self, heads: int) -> Tensor:
        return torch.randn(self.length, heads, self.width, device=self._scale.device, dtype=torch.bfloat16)

    def ours(self) -> Tensor:
        return self.attended(self.query, self.key, self.value)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return self._attention(*tensors, packed_seq_params=self.packing).flatten(1)  # type: ignore[no-any-return]

    def dense(self, kind: SDPBackend) -> Tensor:
        with sdpa_kernel([kind]):
            query, key, value = (tensor.permute(1, 0, 2)[None] for tensor in (self.query, self.key, self.value))
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended[0].permute(1, 0, 2).flatten(1)

    def varlen(self) -> Tensor:
        """The operation under `varlen_attn` of torch 2.11, which leaves the choice of a kernel to torch."""
        bounds, length = self.packing.bounds, self.length
        operation = torch.ops.torch_attn._varlen_attn
        output = operation(self.query, self.key, self.value, bounds, bounds, length, length, True, None, None)[0]
        return output.flatten(1)  # type: ignore[no-any-return]

    def rates(self, name: str, attend: Callable[[], Tensor]) -> Iterator[Figure]:
        """TFLOP/s of the causal half of all scores."""
        flops = 2 * self.length**2 * self.heads * self.width
        gradient = torch.randn_like(attend())

        def both() -> None:
            torch.autograd.backward(attend(), gradient)
            self.query.grad = self.key.grad = self.value.grad = None

        forward_s, both_s = (mean_seconds(self._scale, work) for work in (attend, both))
        forward, whole = flops / forward_s, (1 + BACKWARD_OVER_FORWARD) * flops / both_s
        rates = f"{forward / 1e12:.1f}, {whole / 1e12:.1f} TFLOP/s"
        yield Figure(f"attention {name}, {self.length} tokens: forward; with backward", rates)


def _by_cudnn(document: _Document) -> Iterator[Figure]:
    from torch.nn.attention import varlen

    module: Any = varlen
    if not hasattr(module, "_should_use_cudnn") or document.query.device.type != "cuda":
        raise Missing("torch's varlen attention cannot be told to use cuDNN")
    chosen_by_torch = module._should_use_cudnn
    module._should_use_cudnn = lambda *_: True
    try:
        yield from document.rates("by cuDNN's varlen", document.varlen)
        with torch.no_grad():
            difference = float((document.varlen() - document.ours()).abs().max())
        yield at_most("attention by cuDNN's varlen: largest difference", difference, GROUPS_DIFFERENCE)
    finally:
        module._should_use_cudnn = chosen_by_torch


def _groups(scale: Scale, document: _Document) -> Iterator[Figure]:
    """Fewer keys and values than queries: as given, against each of them repeated."""
    shared_by = 4
    narrow = [document.drawn(document.heads // shared_by) for _ in range(2)]
    repeated = [tensor.repeat_interleave(shared_by, dim=1) for tensor in narrow]
    with torch.no_grad():
        as_given = document.attended(document.query, *narrow)
        difference = float((as_given - document.attended(document.query, *repeated)).abs().max())
        seconds = mean_seconds(scale, lambda: document.attended(document.query, *narrow))
        seconds_repeated = mean_seconds(scale, lambda: document.attended(document.query, *repeated))
    name = f"attention with {document.heads // shared_by} groups"
    yield at_most(f"{name}: largest difference from repeated keys", difference, GROUPS_DIFFERENCE)
    yield Figure(f"{name}: time over that with as many groups as heads", f"{seconds / seconds_repeated:.3f}")


def _weight_gradients(scale: Scale) -> Iterator[Figure]:
    """A weight's gradient of one micro-batch, added to a sum in float32: by two kernels, and by one."""
    rows, left, right = scale.of(8192, 16), scale.of(11008, 32), scale.of(4096, 8)
    gradient, inputs = (torch.randn(rows, width, device=scale.device, dtype=torch.bfloat16) for width in (left, right))
    total = torch.zeros(left, right, device=scale.device)

    def product() -> Tensor:
        return gradient.t().matmul(inputs)

    def in_one() -> Tensor:
        return torch.addmm(total, gradient.t(), inputs, out_dtype=torch.float32, out=total)

    yield Figure("a weight's gradient: product alone", _milliseconds(scale, product))
    yield Figure("the same, product and sum in float32", _milliseconds(scale, lambda: total.add_(product())))
    try:
        answer = _milliseconds(scale, in_one)
    except (RuntimeError, TypeError) as error:  # torch before 2.8, and processors
        answer = f"not here: {str(error).splitlines()[0][:120]}"
    yield Figure("the same by addmm with out_dtype", answer)


def _milliseconds(scale: Scale, work: Callable[[], object]) -> str:
    return f"{1e3 * mean_seconds(scale, work):.3f} ms"
