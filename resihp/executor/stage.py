"""The part of the model that one rank holds, on megatron-core's layers with explicit groups.

With a pipeline size of 1 in its configuration, megatron numbers a layer as it is told: a rank may hold any set of
layers at any tensor-parallel degree. Which ones is not decided here.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from resihp.executor.attention import PackedAttention, Packing
from resihp.executor.honoured import refuse_unhonoured
from resihp.executor.tensor_group import TensorGroup
from resihp.layout import LayerSpan
from resihp.model import ModelSpec

__all__ = ["PositionEmbedding", "StageModule", "model_spec", "refuse_unhonoured"]

PositionEmbedding = Literal["rope", "learned_absolute"]


class StageModule(nn.Module):
    """Layers `chunks` of the model, with the embedding if `first`, and with final norm, head and loss if `last`.

    Parameters are left unset: `resihp.executor.parameters` draws or loads them. `tp_group` need not be connected.
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: ModelSpec,
        chunks: tuple[LayerSpan, ...],
        first: bool,
        last: bool,
        tp_group: TensorGroup,
        *,
        position_embedding: PositionEmbedding = "rope",
        rotary_base: int = 10000,
    ) -> None:
        super().__init__()
        self.config = config = _for_stage(config)
        self.tp_group = tp_group
        self.first, self.last = first, last
        groups = ProcessGroupCollection()
        groups.tp, groups.cp, groups.pp, groups.ep = tp_group, TensorGroup(), TensorGroup(), TensorGroup()
        if first:
            self.embedding = LanguageModelEmbedding(
                config, model.vocab, model.sequence, position_embedding_type=position_embedding, tp_group=tp_group
            )
        spec = _layer_spec(config)
        self.layers = nn.ModuleDict(
            {
                str(layer): build_module(spec, config=config, layer_number=layer + 1, pg_collection=groups)
                for start, stop in chunks
                for layer in range(start, stop + 1)
            }
        )
        if last:
            self.final_layernorm = build_module(
                spec.submodules.input_layernorm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                model.vocab,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=tp_group,
            )
        self._rotation: Tensor | None = None
        if position_embedding == "rope":
            self._rotation = _rotation(config, model.sequence, rotary_base)

    def forward(self, lengths: tuple[int, ...], inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """One packed micro-batch of N = sum(lengths) tokens.

        `inputs` are tokens, int64 [N], for a first stage, else activations [N, 1, hidden]. Returns activations
        [N, 1, hidden], or, for a last stage with `labels` int64 [N], the sum over tokens of the cross entropy.
        """
        packing = Packing.of(lengths)
        positions = packing.positions(inputs.device)
        hidden = self.embedding(inputs[None], positions[None]) if self.first else inputs
        rotation = None if self._rotation is None else self._rotation.to(inputs.device)[positions]
        for layer in self.layers.values():
            hidden, _ = layer(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotation, packed_seq_params=packing
            )
        if not self.last:
            return hidden
        assert labels is not None
        logits, _ = self.output_layer(self.final_layernorm(hidden))
        loss: Tensor = _CrossEntropy.apply(logits[:, 0], labels, self.tp_group)
        return loss


class _CrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of logits [N, vocab / tp] that are split over the vocabulary.

    megatron-core's arithmetic; its two functions are of no use here: one asks parallel_state for the group, the
    other rounds gradients to bfloat16. Overwrites the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: TensorGroup) -> Tensor:
        native = VocabParallelCrossEntropy
        logits, highest = native.calculate_logits_max(logits)
        group.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        width = logits.shape[-1]
        begin = group.rank() * width
        mask, target, predicted, total, exponentials = native.calculate_predicted_logits(
            logits, labels, highest, begin, begin + width
        )
        sums = torch.stack((predicted, total))
        group.all_reduce(sums)
        softmax, loss = native.calculate_cross_entropy_loss(exponentials, sums[0], sums[1])
        ctx.save_for_backward(softmax, mask, target)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax, mask, target = ctx.saved_tensors
        gradient = softmax.clone()
        rows = torch.arange(gradient.shape[0], device=gradient.device)
        gradient[rows, target] -= (~mask).to(gradient.dtype)
        return gradient.mul_(gradients[0]), None, None


def model_spec(config: TransformerConfig, vocab: int, sequence: int) -> ModelSpec:
    """What the planner must know of a configuration."""
    return ModelSpec(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_groups=config.num_query_groups,
        ffn_hidden=config.ffn_hidden_size,
        vocab=vocab,
        sequence=sequence,
        gated=config.gated_linear_unit,
    )


def _for_stage(config: TransformerConfig) -> TransformerConfig:
    """A copy that makes megatron build layers by the groups they are given, without drawing parameters."""
    local = copy.copy(config)
    local.perform_initialization = False
    local.use_cpu_initialization = True
    return local


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    attention = replace(spec.submodules.self_attention.submodules, core_attention=PackedAttention)
    return replace(
        spec,
        submodules=replace(
            spec.submodules, self_attention=replace(spec.submodules.self_attention, submodules=attention)
        ),
    )


def _rotation(config: TransformerConfig, sequence: int, base: int) -> Tensor:
    """Angles for each position, [sequence, 1, 1, head width], as `RotaryEmbedding.get_emb` lays them out."""
    rotary = RotaryEmbedding(
        config.kv_channels, 1.0, rotary_base=base, use_cpu_initialization=True, cp_group=TensorGroup()
    )
    angles = rotary.get_freqs_non_repeated(sequence)
    if config.rotary_interleaved:
        angles = torch.stack((angles, angles), dim=-1).flatten(1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    return angles[:, None, None, :]
