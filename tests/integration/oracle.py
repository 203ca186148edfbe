"""What the ranks of `test_oracle.py` do: one iteration with our engine, the same one with megatron-core alone.

Loaded by the fork server of the executor's tests (`tests/resihp/executor/ranks.py`).
"""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from meeting_place import Line
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import resihp.executor  # noqa: F401 imports megatron-core the way workers do
from resihp.executor._imports import use_global_random_state
from resihp.executor.compute.rotary import Rotary
from resihp.executor.engine import Engine
from resihp.executor.state.optimizer import AdamW
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.parallelism.workload import Evaluation, MicroBatch

TP, PP, DP, LAYERS, VOCAB, LENGTH, MICRO_BATCHES = 2, 2, 2, 4, 64, 16, 8
HELD_OUT = 100
"""Number of the first document that is evaluated and not trained on."""
TIMEOUT = timedelta(seconds=60)
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    },
    "qwen3": {
        "num_query_groups": 2,
        "kv_channels": 16,
        "qk_layernorm": True,
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "normalization": "RMSNorm",
    },
}
CONFIGS |= {f"{kind}-bf16": {**settings, **BF16} for kind, settings in CONFIGS.items()}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "qwen3": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
}
"""Of ours alone: megatron's recomputation wants CUDA."""
ROTARY: dict[str, dict[str, Any]] = {
    "qwen3": {"rotary_base": 200, "rotary_percent": 0.5, "seq_len_interpolation_factor": 2.0},
    "llama": {"rope_scaling": True, "rope_scaling_factor": 4.0},
}
"""GPTModel's arguments: of rotary positions."""


class Corpus:
    """One document of `LENGTH` tokens in each micro-batch, for which plain causal attention is the right one."""

    def __init__(self, first: int = 0) -> None:
        self._first = first

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        return [
            MicroBatch((LENGTH,), (10 * iteration + m,), partial(_document, self._first + m))
            for m in range(MICRO_BATCHES)
        ]


def _document(m: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(m).integers(0, VOCAB, size=LENGTH)
    return tokens, (tokens * 3 + 1) % VOCAB


class _Silent:
    def enter(self, phase: str) -> None: ...
    def progressed(self) -> None: ...
    def communicating(self, waits: bool) -> None: ...


def compare(rank: int, store: Line, *, kind: str, positions: str) -> dict[str, Any]:
    """Losses of both, trained on and evaluated, and the largest relative difference of any parameter's gradient."""
    # megatron's order of ranks is tensor, data, pipeline; ours tensor, pipeline, data
    t, d, s = rank % TP, rank // TP % DP, rank // (TP * DP)
    config = _config(kind, **RECOMPUTED.get(kind.removesuffix("-bf16"), {}))
    engine = Engine(
        config,
        vocab_size=VOCAB,
        dataset=Corpus(),
        optimizer=AdamW(),
        seed=5,
        sequence=LENGTH,
        position_embedding=positions,
        rotary=Rotary(**ROTARY.get(kind.removesuffix("-bf16"), {})),
        evaluation=Evaluation(Corpus(HELD_OUT), every=1, iterations=1),
    )
    layout = Layout.uniform(tp=TP, pp=PP, dp=DP, layers=LAYERS)
    plan = Plan(epoch=1, layout=layout, assignment=spread(MICRO_BATCHES, DP))
    ours = (d * PP + s) * TP + t
    engine.adopt(plan, ours)
    engine.connect(plan, ours, store, TIMEOUT.total_seconds())
    validation_loss, _ = engine.evaluate(plan, _Silent())
    outcome = engine.run(plan, 1, _Silent())
    engine.disconnect()
    assert engine.state is not None
    named = engine.state.optimizer.parameters
    loss, its_validation_loss, gradients = _megatron(rank, store, kind, positions, plan.assignment[d], named, s)
    assert set(gradients) == set(named)
    differences = {}
    for name, parameter in named.items():
        scale = gradients[name].abs().max()
        differences[name] = ((parameter.grad - gradients[name]).abs().max() / scale).item()
    worst = max(differences, key=differences.__getitem__)
    return {
        "ours": outcome.loss,
        "megatron": loss,
        "evaluated": [validation_loss, its_validation_loss],
        "worst": worst,
        "difference": differences[worst],
    }


def _config(kind: str, **extra: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **CONFIGS[kind],
        **extra,
    )


def _megatron(
    rank: int,
    store: Line,
    kind: str,
    positions: str,
    share: tuple[int, ...],
    first: dict[str, torch.nn.Parameter],
    stage: int,
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Losses, of what is trained on and of what is held out, and gradients (by our names) of megatron-core's model,
    schedule and groups, from our first parameters."""
    _shim().install()
    use_global_random_state()  # megatron's own wants CUDA
    keys = torch.distributed.PrefixStore("oracle", store.keys())
    torch.distributed.init_process_group("gloo", store=keys, rank=rank, world_size=TP * PP * DP, timeout=TIMEOUT)
    parallel_state.initialize_model_parallel(TP, PP, create_gloo_process_groups=False)
    config = _config(
        kind,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        pipeline_dtype=CONFIGS[kind].get("params_dtype", torch.float32),
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=stage == 0,
        post_process=stage == PP - 1,
        position_embedding_type=positions,
        **ROTARY.get(kind.removesuffix("-bf16"), {}),
    )
    named = {_our_name(name, stage): parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(first[name])
    if config.bf16:
        model = Float16Module(config, model)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]

    def forward_step(documents: Any, model: GPTModel) -> Any:
        tokens, labels = (torch.from_numpy(array)[None] for array in next(documents))
        output = model(tokens, torch.arange(LENGTH)[None], mask, labels=labels)
        return output, lambda losses: (losses.sum() / LENGTH, {"loss": losses.detach().sum().item() / LENGTH})

    def losses(first: int, *, forward_only: bool) -> list[dict[str, float]]:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([_document(first + m) for m in share]),
            model=model,
            num_microbatches=len(share),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    held_out, reported = losses(HELD_OUT, forward_only=True), losses(0, forward_only=False)
    # As megatron's finalize_model_grads does, which wants its DistributedDataParallel.
    for name, parameter in named.items():
        if "q_layernorm" in name or "k_layernorm" in name:
            torch.distributed.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
    # The mean over replicas is what megatron's DistributedDataParallel takes, whose buffers need CUDA.
    replicas = parallel_state.get_data_parallel_group()
    for parameter in named.values():
        torch.distributed.all_reduce(parameter.grad, group=replicas)
        parameter.grad /= DP
    last = stage == PP - 1 and rank % TP == 0
    sums = [sum(entry["loss"] for entry in those) if last else 0.0 for those in (reported, held_out)]
    loss = torch.tensor(sums, dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    means = loss / MICRO_BATCHES
    return means[0].item(), means[1].item(), {name: parameter.grad for name, parameter in named.items()}


def _our_name(name: str, stage: int) -> str:
    """`decoder.layers.1.x` of stage 1 is our `layers.3.x`."""
    name = name.removeprefix("decoder.")
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"layers.{int(layer) + stage * LAYERS // PP}.{rest}"
    return name


def _shim() -> Any:
    spec = importlib.util.spec_from_file_location("cuda_shim", Path(__file__).with_name("cuda_shim.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
