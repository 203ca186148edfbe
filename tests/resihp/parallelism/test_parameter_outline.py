"""The outline is part of the real list of parameters: the same names, units, shapes and cuts, nearly all weights."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import outline
from resihp.parallelism.transfers import Base, missing

GPT: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "ffn_hidden_size": 88,
}
QWEN3: dict[str, Any] = {**LLAMA, "kv_channels": 12, "qk_layernorm": True}
MODEL = ModelSpec(layers=4, hidden=16, heads=4, kv_groups=2, ffn_hidden=40, vocab=30, sequence=8, vocab_multiple=4)


def real(settings: dict[str, Any], *, tied: bool) -> tuple[ModelSpec, tuple[ParameterSpec, ...]]:
    torch = pytest.importorskip("torch", reason="the real parameters are torch's: pip install 'resihp[train]'")
    from resihp.executor.compute.stage import StageModule, model_spec
    from resihp.executor.state import parameters
    from resihp.executor.tensor_group import TensorGroup

    from megatron.core.transformer import TransformerConfig  # isort: skip

    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, **settings)
    model = model_spec(config, 61, 16, tied=tied, vocab_multiple=8)
    with torch.device("meta"):
        whole = StageModule(config, model, ((0, 0),), True, True, TensorGroup())
    return model, parameters.specs_of(whole, config.num_layers, tied=tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("settings", [GPT, LLAMA, QWEN3], ids=["gpt", "llama", "qwen3"])
def test_outline_is_part_of_the_real_parameters(settings: dict[str, Any], tied: bool) -> None:
    model, specs = real(settings, tied=tied)
    by_name = {spec.name: spec for spec in specs}
    order = [spec.name for spec in specs]
    drawn = outline(model)
    for spec in drawn:
        assert spec == by_name[spec.name]
    assert sorted(drawn, key=lambda spec: order.index(spec.name)) == list(drawn)
    left_out = [spec for spec in specs if spec not in drawn]
    assert all(len(spec.shape) == 1 for spec in left_out), left_out


def test_outline_counts_what_the_model_counts() -> None:
    for changes in ({}, {"gated": True, "tied_embeddings": True}, {"kv_channels": 7}):
        model = msgspec.structs.replace(MODEL, **changes)
        weights = sum(spec.elements for spec in outline(model) if spec.axis is not None)
        assert weights == model.parameters


def test_each_layer_has_something_that_is_never_cut() -> None:
    whole = {spec.unit for spec in outline(MODEL) if spec.axis is None}
    assert whole == {"layer.0", "layer.1", "layer.2", "layer.3", "final"}


def test_a_lost_stage_is_noticed() -> None:
    layout = Layout.uniform(tp=2, pp=2, dp=1, layers=4)
    assert missing(Base(epoch=1, layout=layout, survivors=(0, 1, 2, 3)), outline(MODEL)) is None
    lost = missing(Base(epoch=1, layout=layout, survivors=(0, 1, 3)), outline(MODEL))
    assert lost == "the state of layers.2.self_attention.linear_proj.weight, rows 0 to 7 was lost with rank 2"
