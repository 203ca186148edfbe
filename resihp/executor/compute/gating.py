"""The activation of a gated MLP (SwiGLU and its relatives), of which only the input is kept for the backward pass.

megatron-core's layer, left alone, keeps four tensors as wide as the MLP besides what the next layer keeps anyway: both
halves of the input, the activated gate, and a copy of the other half made by adding `glu_linear_offset`. Here the gate
is activated once more in the backward pass: one element-wise kernel for 40 % of a layer's MLP memory.

megatron-core has a fused function, too (`bias_activation_fusion`), which keeps as little. It stays the user's choice:
it is compiled when it is first called, which takes a C compiler on every node and seconds of a recovery; this one needs
neither, and its gradients are those of the plain layer to the bit. Fused or not, the same is kept
(`resihp.scheduler.cost.memory`). Called by `stage`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


class GatedActivation(torch.nn.Module):
    """activation(gate) * linear of an input [..., 2 * width] that holds gate and linear side by side.

    Built by megatron-core's MLP (`MLPSubmodules.activation_func`), which adds the bias before it calls.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._activation: Activation = config.activation_func
        self._limit: float | None = config.activation_func_clamp_value
        self._offset = float(config.glu_linear_offset)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = _Gated.apply(inputs, self._activation, self._limit, self._offset)
        return output


class _Gated(torch.autograd.Function):
    """The activation as megatron-core's MLP computes it, with `limit` and `offset` where the configuration has them."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, activation: Activation, limit: float | None, offset: float) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.activation, ctx.limit, ctx.offset = activation, limit, offset
        gate, linear = inputs.chunk(2, dim=-1)
        return _activated(gate, activation, limit) * _shifted(linear, limit, offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        (inputs,) = ctx.saved_tensors
        gate, linear = (half.detach() for half in inputs.chunk(2, dim=-1))
        result = torch.empty_like(inputs)
        to_gate, to_linear = result.chunk(2, dim=-1)
        shifted = _shifted(linear, ctx.limit, ctx.offset)
        if ctx.activation is F.silu and ctx.limit is None:
            torch.mul(gradient, F.silu(gate), out=to_linear)
            torch.ops.aten.silu_backward.grad_input(gradient * shifted, gate, grad_input=to_gate)
            return result, None, None, None
        with torch.enable_grad():
            gate.requires_grad_()
            activated = _activated(gate, ctx.activation, ctx.limit)
        torch.mul(gradient, activated.detach(), out=to_linear)
        if ctx.limit is not None:
            to_linear.masked_fill_(linear.abs() > ctx.limit, 0.0)
        to_gate.copy_(*torch.autograd.grad(activated, gate, gradient * shifted))
        return result, None, None, None


def _activated(gate: Tensor, activation: Activation, limit: float | None) -> Tensor:
    return activation(gate if limit is None else gate.clamp(min=None, max=limit))


def _shifted(linear: Tensor, limit: float | None, offset: float) -> Tensor:
    if limit is not None:
        linear = linear.clamp(min=-limit, max=limit)
    return linear + offset if offset else linear
