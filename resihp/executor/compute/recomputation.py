"""Recomputes activations in the backward pass instead of storing them, according to the configuration.

The options have the same meaning as in megatron-core (`TransformerConfig.recompute_*`), applied to the layers of each
chunk. They are implemented with torch's checkpoint function. megatron's own function saves CUDA's random state, which
is not needed, since resihp draws no random numbers in a forward pass (dropout is refused). Collectives in recomputed
code are repeated in the same order on all ranks of a group, since all ranks build the same graph. Called by `stage`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Activation = Callable[[Tensor], Tensor]

RECOMPUTABLE_MODULES = frozenset({"core_attn", "mlp", "layernorm"})
"""Modules that selective recomputation may name. The other modules in megatron's list belong to experts and MLA."""


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` wrapped so that only its inputs are stored for the backward pass."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)

    return call


def spans(config: TransformerConfig, layers: int) -> tuple[tuple[int, int, bool], ...]:
    """Return (start, stop, whether recomputed as a unit) of each run of layers in a chunk with `layers` layers.

    "uniform" recomputes runs of `recompute_num_layers` layers; the last run may be shorter. "block" recomputes the
    first `recompute_num_layers` layers of the chunk, one by one.
    """
    if config.recompute_granularity != "full":
        return ((0, layers, False),)
    count = config.recompute_num_layers
    if config.recompute_method == "uniform":
        return tuple((start, min(start + count, layers), True) for start in range(0, layers, count))
    singly = min(count, layers)
    rest = ((singly, layers, False),) if singly < layers else ()
    return (*((layer, layer + 1, True) for layer in range(singly)), *rest)


def recompute_selected(config: TransformerConfig, layer: nn.Module) -> None:
    """Make a megatron layer recompute the modules named in the configuration."""
    if config.recompute_granularity != "selective":
        return
    named = set(config.recompute_modules)
    attention: Any = layer.get_submodule("self_attention.core_attention")
    norm, mlp = (layer.get_submodule(path) for path in ("pre_mlp_layernorm", "mlp"))
    if "core_attn" in named:
        attention.forward = recomputed(attention.forward)
    if "layernorm" in named:
        _OutputDropped(layer.get_submodule("input_layernorm"), layer.get_submodule("self_attention.linear_qkv"))
    if {"mlp", "layernorm"} <= named:
        _recompute_together(norm, mlp)
    elif "layernorm" in named:
        _OutputDropped(norm, mlp)
    elif "mlp" in named:
        mlp.forward = recomputed(mlp.forward)


def _recompute_together(norm: Any, mlp: Any) -> None:
    """Make the MLP's recomputation include the norm, so that only the norm's input is stored."""
    normalise, transform = norm.forward, mlp.forward
    norm.forward = _unchanged
    mlp.forward = recomputed(lambda inputs, **keywords: transform(normalise(inputs), **keywords))


def _unchanged(inputs: Tensor) -> Tensor:
    return inputs


class _OutputDropped:
    """Makes neither a norm nor the module after it store the norm's output.

    The norm stores only its input, which is the residual stream and stored anyway. For its backward pass, the module
    after it saves a function that computes the norm again. So the norm is computed three times, cheaply; in
    megatron-core twice.
    """

    def __init__(self, norm: Any, reader: Any) -> None:
        self._plain, self._read = norm.forward, reader.forward
        self._recomputed = recomputed(self._plain)
        self._inputs: Tensor | None = None
        norm.forward, reader.forward = self._norm, self._reads

    def _norm(self, inputs: Tensor) -> Any:
        self._inputs = inputs.detach()
        return self._recomputed(inputs)

    def _reads(self, hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "called without its norm"
        where = (hidden.data_ptr(), hidden.shape)
        again = functools.partial(self._plain, inputs)

        def drop(saved: Tensor) -> Any:
            return again if (saved.data_ptr(), saved.shape) == where else saved

        with torch.autograd.graph.saved_tensors_hooks(drop, _restored):
            return self._read(hidden, *arguments, **keywords)


def _restored(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    with torch.no_grad():
        tensor: Tensor = saved()
    return tensor


class GatedActivation(torch.nn.Module):
    """Computes activation(gate) * linear for an input [..., 2 * width] that contains gate and linear side by side.

    Created by megatron-core's MLP (`MLPSubmodules.activation_func`), which adds the bias before it calls this module.
    Only the input is stored for the backward pass, whether or not the configuration recomputes. megatron-core's own
    layer stores the activated gate, and a copy of the other half made by adding `glu_linear_offset`.

    megatron-core also has a fused function that stores as little (`bias_activation_fusion`), which users may choose. It
    is compiled at its first call, which needs a C compiler on every node and adds seconds to a recovery. This module
    needs neither, and its gradients equal those of the plain layer bit for bit.
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
    """Computes the activation as megatron-core's MLP does, with `limit` and `offset` where the configuration has
    them."""

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
