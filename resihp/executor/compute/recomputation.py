"""Which activations are dropped in the forward pass and computed again in the backward pass, as the config says.

Means what it means in megatron-core (`TransformerConfig.recompute_*`), layer by layer of each chunk, but is done with
torch's own checkpoint: megatron's keeps CUDA's random state. Nothing here draws random numbers (dropout is refused).
Collectives inside are repeated, on all ranks of a group in the same order, since all build the same graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MODULES = frozenset({"core_attn", "mlp", "layernorm"})
"""What selective recomputation can name; the rest of megatron's list belongs to experts and MLA."""


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of whose activations only the inputs are kept."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)

    return call


def spans(config: TransformerConfig, layers: int) -> tuple[tuple[int, int, bool], ...]:
    """(start, stop, whether recomputed as one) of the runs of layers that a chunk of `layers` falls into.

    "uniform" recomputes runs of `recompute_num_layers`, the last one perhaps shorter; "block" the first
    `recompute_num_layers` layers of the chunk, one by one.
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
    """Make a megatron layer recompute the modules that the config names."""
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
    """The norm is computed where the MLP is, from the norm's input, which is all that is kept."""
    normalise, transform = norm.forward, mlp.forward
    norm.forward = _unchanged
    mlp.forward = recomputed(lambda inputs, **keywords: transform(normalise(inputs), **keywords))


def _unchanged(inputs: Tensor) -> Tensor:
    return inputs


class _OutputDropped:
    """A norm that keeps its input alone, and whose output its only reader does not keep either.

    The input is the residual stream, kept anyway; the reader saves for its backward pass a note to compute the norm
    again. So it is computed three times, and cheap each time, where megatron-core computes it twice.
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
        found: Tensor = saved()
    return found
