"""Gated activations: the values and gradients of megatron-core's plain layer, of which the input alone is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from resihp.executor.compute.recomputation import GatedActivation

from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip


def configuration(**settings: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, gated_linear_unit=True, **settings)


def plain(inputs: Tensor, config: TransformerConfig) -> Tensor:
    """As megatron-core's MLP computes it when nothing is fused (`transformer/mlp.py`)."""
    gate, linear = torch.chunk(inputs, 2, dim=-1)
    if (limit := config.activation_func_clamp_value) is not None:
        gate, linear = gate.clamp(min=None, max=limit), linear.clamp(min=-limit, max=limit)
    return config.activation_func(gate) * (linear + config.glu_linear_offset)  # type: ignore[no-any-return]


def passed(function: Any, inputs: Tensor) -> tuple[Tensor, Tensor, int]:
    """Output, gradient of the input, and bytes kept for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    leaf = inputs.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(leaf)
    (gradient,) = torch.autograd.grad(output, leaf, torch.linspace(-1, 1, output.numel()).view_as(output).to(output))
    return output.detach(), gradient, sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [
        {"activation_func": F.silu},
        {"activation_func": F.gelu, "glu_linear_offset": 1.0},
        {"activation_func": F.silu, "activation_func_clamp_value": 0.7, "glu_linear_offset": 1.0},
    ],
)
def test_outputs_and_gradients_are_those_of_the_plain_layer_to_the_bit(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    config = configuration(**settings)
    inputs = torch.randn(5, 1, 12, generator=torch.Generator().manual_seed(3)).to(dtype)
    output, gradient, kept = passed(GatedActivation(config), inputs)
    expected, expected_gradient, plainly_kept = passed(lambda leaf: plain(leaf, config), inputs)
    assert torch.equal(output, expected)
    assert torch.equal(gradient, expected_gradient)
    assert kept == inputs.untyped_storage().nbytes()
    assert plainly_kept >= 2 * kept


def test_as_little_is_kept_as_by_the_fused_function_of_megatron() -> None:
    inputs = torch.randn(5, 1, 12, generator=torch.Generator().manual_seed(3))
    output, gradient, kept = passed(GatedActivation(configuration(activation_func=F.silu)), inputs)
    fused, fused_gradient, kept_by_fused = passed(lambda leaf: bias_swiglu_impl(leaf, None), inputs)
    torch.testing.assert_close(output, fused, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, fused_gradient, rtol=1e-5, atol=1e-6)
    assert kept == kept_by_fused
