"""Which activations are dropped in the forward pass and computed again in the backward pass, as the config says.

Means what it means in megatron-core (`TransformerConfig.recompute_*`), layer by layer of each chunk, but is done with
torch's own checkpoint: megatron's keeps CUDA's random state. Nothing here draws random numbers (dropout is refused).
Collectives inside are repeated, on all ranks of a group in the same order, since all build the same graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

MODULES = frozenset({"core_attn", "mlp"})
"""What selective recomputation can name; the rest of megatron's list belongs to experts, MLA and fused norms."""


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
    for name, path in (("core_attn", "self_attention.core_attention"), ("mlp", "mlp")):
        if name in config.recompute_modules:
            module: Any = layer.get_submodule(path)
            module.forward = recomputed(module.forward)
