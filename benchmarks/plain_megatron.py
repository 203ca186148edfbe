"""megatron-core on its own, as the executor's peer: model, 1F1B, DistributedDataParallel and optimizer are all its own.

Runs without CUDA by the shim of the integration tests, which changes torch for the whole process; used by `steady`, and
on a GPU, without the shim, by `on_gpu.throughput`.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resihp.executor  # noqa: F401 imports megatron-core the way workers do
from resihp.executor._imports import use_global_random_state
from resihp.executor.state.optimizer import AdamW

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about apex and Transformer Engine
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

SHIM = Path(__file__).parents[1] / "tests" / "integration" / "cuda_shim.py"
dist: Any = torch.distributed
Documents = Iterable[tuple[Tensor, Tensor]]
"""(tokens, labels) of each micro-batch, int64 [length]."""


def connect(rank: int, store: tuple[str, int], world: int, tp: int, pp: int, timeout: timedelta) -> None:
    """Make the process one of megatron-core's ranks, in its order: tensor, data, pipeline."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        _shim()
    use_global_random_state()
    keys = dist.PrefixStore("megatron", dist.TCPStore(*store, None, False, timeout=timeout))
    dist.init_process_group("nccl" if on_gpu else "gloo", store=keys, rank=rank, world_size=world, timeout=timeout)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)


class PlainMegatron:
    """One rank's share of GPTModel, trained as Megatron-LM's `train_step` does.

    `kernel` replaces the local specification's attention, which computes and masks all scores, by the fused one that
    our executor calls. `overlap` is megatron's `overlap_grad_reduce`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        settings: AdamW,
        *,
        vocab: int,
        length: int,
        micro_batches: int,
        kernel: bool,
        overlap: bool,
        device: str | torch.device = "cpu",
    ) -> None:
        self._length, self._micro_batches = length, micro_batches
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_size
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
        if kernel:
            attention = replace(spec.submodules.self_attention.submodules, core_attention=FusedAttention)
            taught = replace(spec.submodules.self_attention, submodules=attention)
            spec = replace(spec, submodules=replace(spec.submodules, self_attention=taught))
        self._ends = stage == stages - 1
        self._first_layer = stage * config.num_layers // stages
        model = GPTModel(
            config,
            spec,
            vocab_size=vocab,
            max_sequence_length=length,
            pre_process=stage == 0,
            post_process=self._ends,
            position_embedding_type="rope",
        ).to(device)
        if config.bf16:
            model = Float16Module(config, model)
        buckets = DistributedDataParallelConfig(overlap_grad_reduce=overlap, grad_reduce_in_fp32=config.bf16)
        self._model = DistributedDataParallel(config, buckets, model)
        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = self._model.no_sync if overlap else None
        beta1, beta2 = settings.betas
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=beta1,
                adam_beta2=beta2,
                adam_eps=settings.eps,
                clip_grad=settings.clip,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
            ),
            [self._model],
            use_gloo_process_groups=False,
        )
        for group in self._optimizer.param_groups:  # as OptimizerParamScheduler does
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        self._run = get_forward_backward_func()
        self._mask = None
        if not kernel:  # which knows that it is causal
            self._mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=device), 1)[None, None]
        self._positions = torch.arange(length, device=device)[None]

    def start_from(self, first: dict[str, nn.Parameter]) -> None:
        """Take over parameters, by our names: `decoder.layers.1.x` of stage 1 is our `layers.3.x`."""
        with torch.no_grad():
            for name, parameter in self._model.module.named_parameters():
                ours = name.removeprefix("module.").removeprefix("decoder.")
                if ours.startswith("layers."):
                    _, layer, rest = ours.split(".", 2)
                    ours = f"layers.{int(layer) + self._first_layer}.{rest}"
                parameter.copy_(first[ours])
        self._optimizer.reload_model_params()  # its masters, where it has any

    def iterate(self, documents: Documents) -> float | None:
        """One iteration on this replica's micro-batches; the global batch's mean loss on ranks of the last stage."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        reported = self._run(
            forward_step_func=self._forward,
            data_iterator=iter(documents),
            model=self._model,
            num_microbatches=self._micro_batches,
            seq_length=self._length,
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.step()
        if not self._ends:
            return None
        loss = torch.stack([entry["loss"] for entry in reported]).mean()
        replicas = parallel_state.get_data_parallel_group()
        dist.all_reduce(loss, group=replicas)
        return float(loss) / int(replicas.size())

    def _forward(
        self, documents: Iterator[tuple[Tensor, Tensor]], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        tokens, labels = next(documents)
        output = model(tokens[None], self._positions, self._mask, labels=labels[None])
        return output, self._loss

    def _loss(self, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.sum() / self._length
        return loss, {"loss": loss.detach().clone()}


class FusedAttention(nn.Module):
    """torch's fused causal attention in place of megatron-core's own: [N, 1, heads, width] -> [N, 1, heads * width]."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def _shim() -> None:
    """The integration tests' shim, and what the optimizer wants besides: gradients that say they are on CUDA."""
    spec = importlib.util.spec_from_file_location("cuda_shim", SHIM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    native = torch.Tensor.type

    def typed(self: Tensor, *arguments: Any, **keywords: Any) -> Any:
        answer = native(self, *arguments, **keywords)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = typed  # type: ignore[method-assign, assignment]
