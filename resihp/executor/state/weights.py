"""Splits the backward pass of a stage: B computes input gradients at once, W computes weight gradients later (zero
bubble).

No peer is needed for weight gradients, and none waits for them, so a schedule may place them where a rank would idle
(Qi et al., 2024). Gradients of biases, norms and embeddings are small and stay in B. This module never decides when W
runs: the plan's order of primitives does.

A stage passes its megatron linear layers to `DeferredWeights.take` when it is built; the interpreter calls the other
methods.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from resihp.executor.tensor_group import TensorGroup

Queued = tuple[Tensor, Tensor, Tensor]
"""Inputs of one weight gradient: weight [out, in], inputs of its layer [N, in], gradient of the layer's output [N,
out]."""


class DeferredWeights:
    """Queues of weight gradients of one stage that are not computed yet, by key.

    A key identifies one backward pass of a chunk. Its queue keeps the chunk's activations in memory until `finish`.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, list[Queued]] = {}
        self._open: list[Queued] | None = None

    def take(self, module: nn.Module) -> None:
        """Make the backward pass of all megatron linear layers in `module` splittable: inside `collecting`, it queues
        weights."""
        for linear in module.modules():
            if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                linear._forward_impl = partial(_multiply, self)

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Queue the weight gradients of a backward pass in the block under the new `key`."""
        assert self._open is None, "one backward chunk at a time"
        assert key not in self._queues, f"{key} is still to be finished"
        self._open = self._queues[key] = []
        try:
            yield
        finally:
            self._open = None

    def finish(self, key: Hashable) -> None:
        """Compute the weight gradients queued under `key`, add them to each weight's `main_grad`, and free inputs along
        the way.

        Waits for no peer. Raises KeyError for an unknown key.
        """
        queue = self._queues.pop(key)
        with torch.no_grad():
            while queue:
                weight, inputs, gradient = queue.pop(0)
                _add_gradient(weight.main_grad, inputs, gradient)  # type: ignore[attr-defined]

    def discard(self) -> None:
        """Drop all queued gradients, because the iteration failed."""
        self._queues.clear()

    def put(self, weight: Tensor, inputs: Tensor, gradient: Tensor) -> bool:
        """Queue a weight gradient inside `collecting`. Otherwise return False; the caller then computes it itself."""
        if self._open is None:
            return False
        self._open.append((weight, inputs, gradient))
        return True


def _multiply(
    deferred: DeferredWeights,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: TensorGroup | None = None,
    **_: Any,
) -> Tensor:
    """Replaces `_forward_impl` of one linear layer, with megatron's arguments."""
    output: Tensor = _Linear.apply(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group, deferred)
    return output


class _Linear(torch.autograd.Function):
    """Linear layer, input [N, 1, in] -> [N, 1, out]; its backward pass is split while weight gradients are being
    collected.

    Equivalent to megatron's own function, which cannot be split, and which under sequence parallelism (input [N/tp, 1,
    in]) requires CUDA and a global buffer. Input gradients are exchanged while weight gradients are computed. A split
    backward pass keeps the gathered input from B until W, so that W waits for no peer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        reduces: bool,
        scatters: bool,
        group: TensorGroup | None,
        deferred: DeferredWeights,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.parameter = weight  # saved tensors come back as copies when activations are recomputed
        ctx.deferred, ctx.group, ctx.use_bias = deferred, group, bias is not None
        ctx.reduces, ctx.scatters = reduces, scatters
        if scatters:
            assert group is not None
            input = group.all_gather(input)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        group: TensorGroup = ctx.group
        gathering = group.start_all_gather(inputs) if ctx.scatters else None
        input_gradient = gradient.matmul(weight)
        if gathering is not None:
            inputs = gathering.result()
        exchange = None
        if ctx.scatters:
            exchange = group.start_reduce_scatter(input_gradient)
        elif ctx.reduces:
            exchange = group.start_all_reduce(input_gradient)
        weight_gradient = None
        if not ctx.deferred.put(ctx.parameter, inputs.detach(), gradient.detach()):
            weight_gradient = _weight_gradient(ctx.parameter, inputs, gradient)
        bias_gradient = gradient.flatten(0, -2).sum(0) if ctx.use_bias else None
        if exchange is not None:
            input_gradient = exchange.result()
        return input_gradient, weight_gradient, bias_gradient, None, None, None, None


def _weight_gradient(weight: Tensor, inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """Return a weight's gradient; None if it was added to the weight's `main_grad`, as megatron's fused kernel does."""
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return gradient.flatten(0, -2).t().matmul(inputs.flatten(0, -2))
    _add_gradient(main, inputs, gradient)
    return None


def _add_gradient(main: Tensor, inputs: Tensor, gradient: Tensor) -> None:
    first, second = gradient.flatten(0, -2).t(), inputs.flatten(0, -2)
    if main.dtype == first.dtype:
        main.addmm_(first, second)
    elif not (main.is_cuda and _add_unrounded(main, first, second)):
        main.add_(first.matmul(second))


_refused_dtypes: set[torch.dtype] = set()
"""Types for which this torch cannot add a product to a float32 sum."""


def _add_unrounded(main: Tensor, first: Tensor, second: Tensor) -> bool:
    """Add first @ second to `main` in float32, without rounding the product first; return False if torch cannot do
    this.

    This takes one kernel instead of two, and no memory for the product. Some builds of torch lack `out_dtype`; others
    require the sum to have the precision of the factors. All of them raise before they change `main`. Only on GPUs; not
    yet run on a GPU.
    """
    if first.dtype in _refused_dtypes:
        return False
    try:
        torch.addmm(main, first, second, out_dtype=torch.float32, out=main)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TypeError, RuntimeError):
        _refused_dtypes.add(first.dtype)
        return False
    return True
