"""What a stage keeps for its backward pass, counted storage by storage, and what the model of memory says of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from resihp.executor.compute.attention import PackedAttention, Packing
from resihp.executor.compute.stage import StageModule, model_spec
from resihp.executor.tensor_group import TensorGroup
from resihp.parallelism.model import ModelSpec
from resihp.scheduler.cost.tensor_bytes import LOSS_BYTES, LOSS_ELEMENTS, stage_bytes

from megatron.core.transformer import TransformerConfig  # isort: skip

HIDDEN, HEADS, VOCAB = 256, 4, 2048
LENGTHS = (96, 64)
TOKENS = sum(LENGTHS)

_LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 688,
}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "gpt": ({}, "learned_absolute"),
    "llama": (_LLAMA, "rope"),
    "fused": ({**_LLAMA, "bias_activation_fusion": True}, "rope"),
    "grouped": ({**_LLAMA, "num_query_groups": 2}, "rope"),
    "grouped, learned positions": ({"num_query_groups": 2}, "learned_absolute"),
    "normalised": ({"qk_layernorm": True}, "rope"),
    "normalised, grouped": ({**_LLAMA, "num_query_groups": 2, "qk_layernorm": True, "kv_channels": 128}, "rope"),
}


class Done:
    def wait(self, *_: Any) -> bool:
        return True


class FirstOfSeveral:
    """A communicator whose peers hold what this rank holds."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> Done:
        return Done()

    def all_gather(self, whole: Tensor, part: Tensor) -> Done:
        whole.view(-1, *part.shape).copy_(part)
        return Done()

    def reduce_scatter(self, own: Tensor, whole: Tensor) -> Done:
        own.copy_(whole[: own.shape[0]])
        return Done()


class FusedNorm(torch.autograd.Function):
    """Keeps what `aten::_fused_rms_norm` keeps on a GPU: its input, and one number for each norm."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        deviation = inputs.float().pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(inputs, weight, deviation)
        return (inputs * deviation).to(inputs.dtype) * weight


class PackedKernel(torch.autograd.Function):
    """Keeps what `torch_attn::_varlen_attn` keeps (its `_setup_context`), with groups as they are."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        sums = torch.zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bounds, output, sums)
        return output


def packed_attention(_: PackedAttention, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    output: Tensor = PackedKernel.apply(query.squeeze(1), key.squeeze(1), value.squeeze(1), packing.bounds)
    return output.reshape(output.shape[0], 1, -1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that keep what those of a GPU keep, which the CUDA build's shapes-only tensors gave as well."""
    monkeypatch.setattr(F, "rms_norm", lambda inputs, _, weight, eps: FusedNorm.apply(inputs, weight))
    monkeypatch.setattr(
        PackedAttention,
        "forward",
        lambda self, q, k, v, *_, packed_seq_params, **__: packed_attention(self, q, k, v, packed_seq_params),
    )


def kept_bytes(config: TransformerConfig, model: ModelSpec, layers: int, tp: int, parallel: bool, ends: bool) -> int:
    """Of the storages, parameters left out, that one pass of a rank's stage saves."""
    positions: Any = "rope" if model.computation.rotary else "learned_absolute"
    group = TensorGroup(tp, 0)
    group.bind(FirstOfSeveral())
    stage = StageModule(
        config,
        model,
        ((0, layers - 1),),
        ends,
        ends,
        group,
        position_embedding=positions,
        sequence_parallel=parallel,
    )
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    own = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    tokens = torch.arange(TOKENS)
    hidden = torch.randn(TOKENS // (tp if parallel else 1), 1, HIDDEN).to(config.params_dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(0, LENGTHS, tokens if ends else hidden, tokens if ends else None)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def described(kind: str, precision: str, device: str) -> tuple[TransformerConfig, ModelSpec]:
    settings, positions = KINDS[kind]
    if precision == "bf16":
        settings = {**settings, "bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=3,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )
    return config, model_spec(config, VOCAB, TOKENS, position_embedding=positions, device=device)


def compare(kind: str, precision: str, device: str) -> None:
    config, model = described(kind, precision, device)
    for tp, parallel in ((1, False), (2, False), (2, True)):
        one, three = (kept_bytes(config, model, layers, tp, parallel, ends=False) for layers in (1, 3))
        outside, _, layer = stage_bytes(
            model, tp, TOKENS, first=True, last=True, sequence_parallel=parallel, state_bytes=0
        )
        assert (three - one) / 2 == pytest.approx(layer, rel=0.03), (tp, parallel)
        ended = kept_bytes(config, model, 1, tp, parallel, ends=True)
        in_loss = LOSS_BYTES * min(LOSS_ELEMENTS, TOKENS * VOCAB // tp)
        assert ended - one == pytest.approx(outside - in_loss, rel=0.03), (tp, parallel)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("gpt", "fp32"),
        ("llama", "bf16"),
        ("grouped, learned positions", "bf16"),
        ("normalised, grouped", "fp32"),
        ("normalised, grouped", "bf16"),
    ],
)
def test_a_processor_keeps_what_the_model_says(kind: str, precision: str) -> None:
    compare(kind, precision, "cpu")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_keeps_what_the_model_says(kind: str) -> None:
    compare(kind, "bf16", "cuda")


def test_a_layer_like_that_of_llama_2_7b_keeps_36_bytes_a_token_and_hidden_unit() -> None:
    model = ModelSpec(
        layers=32, hidden=4096, heads=32, kv_groups=32, ffn_hidden=11_008, vocab=32_000, sequence=4096, gated=True
    )
    half = msgspec.structs.replace(model, precision="bf16")
    _, _, layer = stage_bytes(half, 1, 1000, first=False, last=False, state_bytes=0)
    assert layer / 1000 / half.hidden == pytest.approx(36.4, abs=0.1)
