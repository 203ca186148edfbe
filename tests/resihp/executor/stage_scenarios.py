"""What ranks do in the tests of stages: one tensor-parallel group that holds the whole model, against a serial one.

No engine and no plan: stages are driven directly, one chunk after the other, as an interpreter would. Loaded by the
fork server (`ranks.py`), called once per rank; the parts that need no peers are imported by the tests themselves.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from resihp.executor.compute.channels import Channel
from resihp.executor.compute.stage import IGNORED_LABEL, StageModule, model_spec
from resihp.executor.state import parameters
from resihp.executor.tensor_group import TensorGroup
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec, share

from megatron.core.transformer import TransformerConfig  # isort: skip

if TYPE_CHECKING:
    from meeting_place import Line

SEQUENCE = 24
LAYERS = 3
TIMEOUT_S = 60.0

_LLAMA = {
    "num_query_groups": 4,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": _LLAMA,
    "qwen": {**_LLAMA, "add_qkv_bias": True},
    "qwen3": {**_LLAMA, "qk_layernorm": True, "kv_channels": 6, "window_size": (3, 0), "window_attn_skip_freq": 2},
    "normed": {"qk_layernorm": True},
}
POSITIONS = {"gpt": "learned_absolute", "llama": "rope", "qwen": "rope", "qwen3": "rope", "normed": "rope"}

LENGTHS = ((7, 1, 13), (5, 10))
"""Documents of each micro-batch; their sums, 21 and 15, must be padded for sequence parallelism."""
TOTAL = sum(map(sum, LENGTHS))

RECOMPUTED: dict[str, dict[str, Any]] = {
    "": {},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "layernorm mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]},
}


class Case(msgspec.Struct, frozen=True):
    """How the parallel model differs from the serial one."""

    split: bool = False
    sequence_parallel: bool = False
    recompute: str = ""
    tied: bool = False
    vocab: int = 64
    vocab_multiple: int = 1
    stages: tuple[tuple[tuple[int, int], ...], ...] = (((0, 1), (2, 2)),)
    """Chunks of each pipeline stage, all of which each rank holds."""
    positions: str | None = None
    cut: bool = False
    """Autograd's graph is cut between all layers of a chunk."""


def config_of(kind: str, recompute: str = "") -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        **CONFIGS[kind],
        **RECOMPUTED[recompute],
    )


def batch(m: int, vocab: int, multiple: int = 1) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """(lengths, tokens, labels) of a micro-batch, with one more document of padding where `multiple` asks for it."""
    generator = torch.Generator().manual_seed(m)
    lengths = LENGTHS[m]
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    labels = (tokens * 5 + 1) % vocab
    short = -len(tokens) % multiple
    if short:
        lengths = (*lengths, short)
        tokens, labels = F.pad(tokens, (0, short)), F.pad(labels, (0, short), value=IGNORED_LABEL)
    return lengths, tokens, labels


def whole_value(spec: ParameterSpec, config: TransformerConfig, model: ModelSpec) -> Tensor:
    """A parameter's first value, with noise on biases, which are zero, and on norms, which are one."""
    value = parameters.draw(spec, config, 7, model)
    if value.dim() == 1:
        seed = int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=4).digest(), "big")
        value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
    return value


def specs_for(config: TransformerConfig, model: ModelSpec, positions: Any, parallel: bool) -> list[ParameterSpec]:
    with torch.device("meta"):
        whole = StageModule(config, model, ((0, 0),), True, True, TensorGroup(), position_embedding=positions)
    return list(parameters.specs_of(whole, LAYERS, tied=model.tied_embeddings, sequence_parallel=parallel))


def stages_of(kind: str, case: Case, group: TensorGroup) -> tuple[list[StageModule], list[ParameterSpec]]:
    """All stages of a pipeline on this rank, filled, and the specifications of their parameters."""
    config = config_of(kind, case.recompute)
    model = model_spec(config, case.vocab, SEQUENCE, tied=case.tied, vocab_multiple=case.vocab_multiple)
    positions: Any = case.positions or POSITIONS[kind]
    specs = specs_for(config, model, positions, case.sequence_parallel)
    by_name = {spec.name: spec for spec in specs}
    stages = []
    for s, chunks in enumerate(case.stages):
        stage = StageModule(
            config,
            model,
            chunks,
            s == 0,
            s == len(case.stages) - 1,
            group,
            position_embedding=positions,
            sequence_parallel=case.sequence_parallel,
        )
        for name, parameter in stage.named_parameters():
            spec = by_name[name]
            parameters.fill(parameter, spec, group.rank(), group.size(), whole_value(spec, config, model))
        stages.append(stage)
    return stages, specs


def with_main_gradients(stage: StageModule) -> StageModule:
    """As `state.gradients` lays them out for parameters in float32: all that is added, is added there."""
    for parameter in stage.parameters():
        parameter.grad = parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    return stage


def unfinished(stage: StageModule) -> tuple[Hashable, ...]:
    """Keys of weight gradients that are still to be computed, in the order of their collection."""
    return tuple(stage.weights._queues)


def iterate(stages: Sequence[StageModule], case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all micro-batches, and gradients of all parameters; copies of a tied one are added up."""
    if case.split:
        for stage in stages:
            with_main_gradients(stage)
    pieces = [(stage, chunk) for stage, chunks in zip(stages, case.stages, strict=True) for chunk in range(len(chunks))]
    group = stages[0].tp_group
    multiple = group.size() if case.sequence_parallel else 1
    losses, keys = [], []
    for m in range(len(LENGTHS)):
        lengths, tokens, labels = batch(m, case.vocab, multiple)
        passed: list[tuple[StageModule, Hashable, Tensor, Tensor]] = []
        inputs = tokens
        for stage, chunk in pieces:
            ends = (stage, chunk) == pieces[-1]
            borders = range(LAYERS) if case.cut else ()
            parts = stage.in_pieces(chunk, lengths, inputs, labels if ends else None, borders)
            output = parts[-1][1]
            if not ends:
                rows = sum(lengths) // (group.size() if stage.sequence_parallel else 1)
                assert output.shape == (rows, 1, stage.config.hidden_size)
            else:
                losses.append(output.item())
                output = output / TOTAL
            parts[-1] = (parts[-1][0], output)
            passed += [(stage, (m, chunk, i), *part) for i, part in enumerate(parts)]
            inputs = output.detach().requires_grad_()
        gradient = None
        for stage, key, inputs, output in reversed(passed):
            with stage.weights.collecting(key) if case.split else nullcontext():
                output.backward(gradient)
            gradient = inputs.grad
            keys.append((stage, key))
    if case.split:
        assert all(
            p.grad is None or not p.grad.any()
            for s in stages
            for name, p in s.named_parameters()
            if name.endswith("proj.weight")
        )
        for stage, key in reversed(keys):
            stage.weights.finish(key)
        assert not any(unfinished(stage) for stage in stages)
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return losses, gradients


def compare(rank: int, store: Line, *, kind: str, tp: int, cases: list[dict[str, Any]]) -> list[Any]:
    """For each case the worst differences from the serial model, which has neither padding nor several chunks."""
    group, torch_group = TensorGroup(tp, rank), None
    if tp > 1:
        keys = store.keys()
        gloo = torch.distributed.ProcessGroupGloo(keys, rank, tp, timedelta(seconds=TIMEOUT_S))
        torch_group = Channel(gloo, lambda: False)
    group.bind(torch_group)
    answers = []
    for described in cases:
        case = Case(**described)
        whole_specs, expected_losses, expected = _serial(kind, case.tied, case.vocab, case.positions)
        waits: list[bool] = []
        group.on_wait, before = waits.append, group.waited_s
        stages, specs = stages_of(kind, case, group)
        losses, gradients = iterate(stages, case)
        answers.append(
            {
                "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True)),
                "losses": losses,
                "gradients": _differences(group, specs, gradients, whole_specs, expected),
                "split": _unsplit_difference(kind, case, group, gradients) if case.split else 0.0,
                "padding": _padding_gradient(group, specs, gradients, case),
                "marked": all(
                    # megatron knows those of queries and keys by their names
                    getattr(parameter, "sequence_parallel", False)
                    == (spec.partial and tp > 1 and case.sequence_parallel)
                    for spec in specs
                    for stage in stages
                    for name, parameter in stage.named_parameters()
                    if name == spec.name
                ),
                "names": sorted(gradients) == sorted(spec.name for spec in specs),
                "waited_s": group.waited_s - before,
                "waits": waits == [True, False] * (len(waits) // 2),
            }
        )
    return answers


@functools.cache
def _serial(kind: str, tied: bool, vocab: int, positions: str | None) -> Any:
    """Specifications, losses and gradients of the whole model in one piece."""
    case = Case(tied=tied, vocab=vocab, positions=positions, stages=(((0, LAYERS - 1),),))
    whole, specs = stages_of(kind, case, TensorGroup())
    return specs, *iterate(whole, case)


def _differences(
    group: TensorGroup,
    specs: list[ParameterSpec],
    gradients: dict[str, Tensor],
    whole_specs: list[ParameterSpec],
    expected: dict[str, Tensor],
) -> dict[str, float]:
    """Worst difference over all gradients: absolute, and relative to the largest entry of the parameter's gradient."""
    t, tp = group.rank(), group.size()
    absolute = relative = 0.0
    for spec, whole_spec in zip(specs, whole_specs, strict=True):
        ours = gradients[spec.name].clone()
        if spec.partial:
            group.all_reduce(ours)
        right = torch.zeros(spec.shape)
        right[tuple(slice(length) for length in whole_spec.shape)] = expected[spec.name]
        own = parameters.view(right, spec, 0, 1, share(spec, t, tp))
        difference = (parameters.view(ours, spec, t, tp, share(spec, t, tp)) - own).abs().max().item()
        absolute = max(absolute, difference)
        relative = max(relative, difference / right.abs().max().item())
    return {"absolute": absolute, "relative": relative}


def _unsplit_difference(kind: str, case: Case, group: TensorGroup, gradients: dict[str, Tensor]) -> float:
    """Worst difference of the gradients from those of the same case with B and W in one."""
    together = msgspec.structs.replace(case, split=False)
    _, others = iterate(stages_of(kind, together, group)[0], together)
    return max((gradients[name] - others[name]).abs().max().item() for name in gradients)


def _padding_gradient(
    group: TensorGroup, specs: list[ParameterSpec], gradients: dict[str, Tensor], case: Case
) -> float | None:
    """Largest gradient of a row that pads the vocabulary, None without such rows on this rank."""
    largest = None
    for spec in specs:
        if spec.name.endswith(("word_embeddings.weight", "output_layer.weight")):
            start = share(spec, group.rank(), group.size()).start
            rows = gradients[spec.name][max(case.vocab - start, 0) :]
            if len(rows):
                largest = max(largest or 0.0, rows.abs().max().item())
    return largest
