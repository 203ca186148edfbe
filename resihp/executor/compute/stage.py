"""The part of the model on one rank, built from megatron-core's layers with explicit groups.

With a pipeline size of 1 in its configuration, megatron uses the layer numbers that it is given, so a rank may have any
set of layers at any tensor-parallel degree. This module does not decide which layers: the plan does. Built by
`resihp.executor.state.building`, used by the interpreter.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from resihp.executor._imports import use_global_random_state
from resihp.executor.compute.attention import PackedAttention, Packing
from resihp.executor.compute.recomputation import GatedActivation, recompute_selected, recomputed, spans
from resihp.executor.compute.rotary import Rotary
from resihp.executor.compute.staging import staged
from resihp.executor.config_support import refuse_unhonoured, without_ignored
from resihp.executor.state.weights import DeferredWeights
from resihp.executor.tensor_group import TensorGroup
from resihp.parallelism.layout import LayerSpan
from resihp.parallelism.model import Computation, ModelSpec
from resihp.scheduler.cost.tensor_bytes import LOSS_ELEMENTS

__all__ = ["IGNORED_LABEL", "PositionEmbedding", "StageModule", "model_spec", "refuse_unhonoured"]

PositionEmbedding = Literal["rope", "learned_absolute"]

IGNORED_LABEL = -1
"""Label of padding tokens, which contribute neither to the loss nor to any gradient."""
MAX_PACKINGS = 8
"""Number of micro-batch packings cached by a stage: of micro-batches between their first and last chunk on this
stage."""


class StageModule(nn.Module):
    """Layers `chunks` of the model, with the embedding if `first`, and with final norm, head and loss if `last`.

    The embedding belongs to chunk 0, the head to the last chunk. With tied embeddings, a stage that is `last` but not
    `first` has a copy of the word embedding, under the same name. The constructor does not initialise parameters:
    `resihp.executor.state.parameters` draws or loads them. `tp_group` need not be connected yet.
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
        rotary: Rotary = Rotary(),  # noqa: B008 frozen
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        use_global_random_state()
        self.sequence_parallel = sequence_parallel and tp_group.size() > 1
        """Whether activations are divided among ranks along the tokens; never in a group of one rank."""
        self.config = local = _for_stage(config, self.sequence_parallel)
        self.tp_group = tp_group
        self.first, self.last = first, last
        self._vocab = model.vocab
        groups = ProcessGroupCollection()
        groups.tp, groups.cp, groups.pp, groups.ep = tp_group, TensorGroup(), TensorGroup(), TensorGroup()
        if first:
            self.embedding: nn.Module = LanguageModelEmbedding(
                local, model.vocab_rows, model.sequence, position_embedding_type=position_embedding, tp_group=tp_group
            )
        elif last and model.tied_embeddings:
            table = VocabParallelEmbedding(
                model.vocab_rows, local.hidden_size, init_method=_no_init, config=local, tp_group=tp_group
            )
            self.embedding = nn.ModuleDict({"word_embeddings": table})
        spec = _layer_spec(local)
        self.layers = nn.ModuleDict()
        self._chunks = chunks
        self._runs: list[list[tuple[int, int, bool]]] = []
        """Runs of layers in each chunk: first layer, end (exclusive), whether the run is recomputed."""
        for start, stop in chunks:
            for number in range(start, stop + 1):
                layer = build_module(spec, config=local, layer_number=number + 1, pg_collection=groups)
                recompute_selected(config, layer)
                self.layers[str(number)] = layer
            runs = spans(config, stop + 1 - start)
            self._runs.append([(start + low, start + high, again) for low, high, again in runs])
        if last:
            self.final_layernorm = Norm(local, local.hidden_size, eps=local.layernorm_epsilon)
            self.output_layer = _head(local, model, tp_group)
        self.weights = DeferredWeights()
        """Splits the backward pass of this stage into B and W on request."""
        self.weights.take(self)
        self._tied = model.tied_embeddings
        self._packings: dict[tuple[int, ...], Packing] = {}
        """Packings of the latest micro-batches of all chunks, by document lengths."""
        self.to(config.params_dtype)  # the whole stage, as megatron's Float16Module does: norms are built in float32
        self._rotation: Tensor | None = None
        """Rotary angles of all positions in float32; None for learned positions. Moved to the device with the first
        micro-batch."""
        if position_embedding == "rope":
            with torch.device("cpu"):  # the angles need values, even if the stage is built on the meta device
                self._rotation = rotary.angles(local, model.sequence)

    def forward(self, chunk: int, lengths: tuple[int, ...], inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute one chunk on one packed micro-batch of N = sum(lengths) tokens.

        `inputs` are tokens, int64 [N], for the first chunk of a first stage, otherwise activations [N, 1, hidden]. The
        result is activations of the same shape. Under sequence parallelism, rank t of tp has the t-th part of the
        activations, [N/tp, 1, hidden], and N must be divisible by tp. The last chunk of a last stage needs `labels`,
        int64 [N], and returns the sum of the cross entropy over tokens, equal on all ranks of the group; tokens with
        the label IGNORED_LABEL do not count.
        """
        return self.in_pieces(chunk, lengths, inputs, labels)[-1][1]

    def in_pieces(
        self,
        chunk: int,
        lengths: tuple[int, ...],
        inputs: Tensor,
        labels: Tensor | None = None,
        borders: Collection[int] = (),
    ) -> list[tuple[Tensor, Tensor]]:
        """Compute as `forward` does, with autograd's graph cut before each layer in `borders`. Return (inputs, output)
        of each piece.

        Backward passes go piece by piece from the last; each starts from the gradient of the inputs of the next piece.
        They give the same gradients as a graph without cuts, bit for bit, except that the two shares of a tied table
        are added one after the other. If a cut is inside a run of layers that is recomputed as a unit, the run becomes
        two runs.
        """
        packing = self._packing(lengths, inputs.device)
        begins, ends = self.first and chunk == 0, self.last and chunk == len(self._runs) - 1
        hidden = self.embedding(inputs[None], packing.positions[None]) if begins else inputs
        pieces: list[tuple[Tensor, Tensor]] = []
        for start, stop, again in self._runs[chunk]:
            run = recomputed(_run) if again else _run
            for low, high in itertools.pairwise((start, *(b for b in sorted(borders) if start < b < stop), stop)):
                if low in borders and low > self._chunks[chunk][0]:
                    pieces.append((inputs, hidden))
                    inputs = hidden = hidden.detach().requires_grad_()
                layers = [self.layers[str(number)] for number in range(low, high)]
                hidden = run(layers, hidden, packing.rotation, packing)
        if ends:
            hidden = self._loss(hidden, labels)
        return [*pieces, (inputs, hidden)]

    def _loss(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        assert labels is not None
        shared = self.embedding.get_parameter("word_embeddings.weight") if self._tied else None
        logits, _ = self.output_layer(self.final_layernorm(hidden), weight=shared)
        loss: Tensor = CrossEntropy.apply(logits[:, 0], labels, self.tp_group, self._vocab)
        return loss

    def _packing(self, lengths: tuple[int, ...], device: torch.device) -> Packing:
        """Return the packing of documents with these lengths, shared by all layers and chunks of a micro-batch."""
        packing = self._packings.pop(lengths, None)
        if packing is None:
            if self._rotation is not None and self._rotation.device != device:
                self._rotation = staged(self._rotation, device)
            packing = Packing.of(lengths, device, self._rotation)
            if len(self._packings) >= MAX_PACKINGS:
                self._packings.pop(next(iter(self._packings)))
        self._packings[lengths] = packing
        return packing


def pass_through(stage: StageModule, device: torch.device, counts: Sequence[int]) -> None:
    """Run a stage without embedding and head forward and backward, once for each number of tokens. The values do not
    matter."""
    for count in counts:
        shape = count, 1, stage.config.hidden_size
        inputs = torch.zeros(shape, dtype=stage.config.params_dtype, device=device, requires_grad=True)
        stage(0, (count,), inputs).sum().backward()


class Norm:
    """Builds torch's own norm, whether or not megatron has found apex. torch's norm needs no support of sequence
    parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        unaware = copy.copy(config)
        unaware.sequence_parallel = False
        norm: nn.Module = WrappedTorchNorm(unaware, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class CrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross entropy of logits [N, rows / tp], which are split over the padded vocabulary.

    Works in float32 on `LOSS_ELEMENTS` logits at a time, so that a complete float32 copy never exists. The backward
    pass computes the softmax again; its gradient, rounded once, overwrites the logits. So torch refuses a second
    backward pass. Logits of padding rows, from `vocab` on, count as -inf, and are overwritten with it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: TensorGroup, vocab: int) -> Tensor:
        count, width = logits.shape
        begin = group.rank() * width
        logits[:, max(vocab - begin, 0) :] = -torch.inf
        highest = logits.amax(dim=-1).float()
        group.all_reduce(highest, torch.distributed.ReduceOp.MAX)
        foreign = (labels < begin) | (labels >= begin + width)  # labels of other ranks, and IGNORED_LABEL
        target = (labels - begin).masked_fill(foreign, 0)
        sums = torch.empty(2, count, dtype=torch.float32, device=logits.device)
        predicted, total = sums
        for span in _loss_spans(count, width):
            shifted = logits[span] - highest[span, None]
            predicted[span] = shifted.gather(1, target[span, None])[:, 0]
            total[span] = shifted.exp_().sum(dim=-1)
            del shifted  # before the next iteration allocates another
        predicted.masked_fill_(foreign, 0.0)
        group.all_reduce(sums)
        ignored = labels == IGNORED_LABEL
        loss = (total.log() - predicted).masked_fill(ignored, 0.0).sum()
        ctx.save_for_backward(logits, highest, total.masked_fill(ignored, torch.inf), target, foreign)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, highest, total, target, foreign = ctx.saved_tensors
        logits = logits.detach()
        for span in _loss_spans(*logits.shape):
            softmax = (logits[span] - highest[span, None]).exp_().div_(total[span, None])
            rows = torch.arange(softmax.shape[0], device=logits.device)
            softmax[rows, target[span]] -= (~foreign[span]).to(softmax.dtype)
            logits[span] = softmax.mul_(gradients[0])
            del softmax  # before the next iteration allocates another
        return logits, None, None, None


def _loss_spans(count: int, width: int) -> list[slice]:
    """Divide `count` tokens, with `width` logits each, into slices that are processed in float32 one at a time."""
    rows = max(1, LOSS_ELEMENTS // width)
    return [slice(start, start + rows) for start in range(0, count, rows)]


def model_spec(
    config: TransformerConfig,
    vocab: int,
    sequence: int,
    *,
    tied: bool = False,
    vocab_multiple: int = 1,
    position_embedding: PositionEmbedding = "rope",
    device: str = "cpu",
) -> ModelSpec:
    """Return the planner's description of a configuration. `tied` is megatron's share_embeddings_and_output_weights;
    `device` is the type of device that computes the model."""
    return ModelSpec(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_groups=config.num_query_groups,
        ffn_hidden=config.ffn_hidden_size,
        vocab=vocab,
        sequence=sequence,
        gated=config.gated_linear_unit,
        tied_embeddings=tied,
        vocab_multiple=vocab_multiple,
        precision="bf16" if config.bf16 else "fp32",
        kv_channels=None
        if config.kv_channels * config.num_attention_heads == config.hidden_size
        else config.kv_channels,
        qk_layernorm=config.qk_layernorm,
        computation=Computation(
            device="cuda" if device == "cuda" else "cpu",
            normalization="RMSNorm" if config.normalization == "RMSNorm" else "LayerNorm",
            rotary=position_embedding == "rope",
        ),
    )


def _run(layers: list[nn.Module], hidden: Tensor, rotation: Tensor | None, packing: Packing) -> Tensor:
    for layer in layers:
        hidden, _ = layer(hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotation, packed_seq_params=packing)
    return hidden


def _head(config: TransformerConfig, model: ModelSpec, tp_group: TensorGroup) -> nn.Module:
    return ColumnParallelLinear(
        config.hidden_size,
        model.vocab_rows,
        config=config,
        init_method=_no_init,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=model.tied_embeddings,
        tp_group=tp_group,
    )


def _for_stage(config: TransformerConfig, sequence_parallel: bool) -> TransformerConfig:
    """Return a copy of the configuration for megatron's constructors: explicit groups, no initialisation of parameters.

    Recomputation is switched off in megatron, since `resihp.executor.compute.recomputation` does it.
    """
    local = without_ignored(config)
    local.perform_initialization = False
    local.use_cpu_initialization = True
    local.sequence_parallel = sequence_parallel
    local.recompute_granularity = local.recompute_method = local.recompute_num_layers = None
    # This switch makes megatron-core's MLP call any activation module it is given, not only Transformer Engine's.
    local.use_te_activation_func = local.gated_linear_unit and not local.bias_activation_fusion
    return local


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    attention = replace(spec.submodules.self_attention.submodules, core_attention=PackedAttention)
    if config.qk_layernorm:
        attention = replace(attention, q_layernorm=Norm, k_layernorm=Norm)
    mlp = spec.submodules.mlp
    if config.use_te_activation_func:
        mlp = _with_activation(mlp)
    return replace(
        spec,
        submodules=replace(
            spec.submodules,
            input_layernorm=Norm,
            pre_mlp_layernorm=Norm,
            mlp=mlp,
            self_attention=replace(spec.submodules.self_attention, submodules=attention),
        ),
    )


def _with_activation(mlp: Any) -> Any:
    """Return the specification of an MLP that calls `GatedActivation`. It is a ModuleSpec up to megatron-core 0.16, and
    a partial call of the MLP's builder in later versions."""
    if isinstance(mlp, functools.partial):
        parts = replace(mlp.keywords["submodules"], activation_func=GatedActivation)
        return functools.partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": parts})
    return replace(mlp, submodules=replace(mlp.submodules, activation_func=GatedActivation))


def _no_init(_: Tensor) -> None:
    """Initialise nothing: parameters are drawn by name in `resihp.executor.state.parameters`."""
