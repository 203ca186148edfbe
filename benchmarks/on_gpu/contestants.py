"""The executor and megatron-core on one device, as contestants that train the same model on the same tokens."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import msgspec
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks import plain_megatron
from benchmarks.contest import Corpus, Ours
from benchmarks.on_gpu.figures import Scale
from benchmarks.on_gpu.models import LLAMA
from resihp.executor import engine as engine_module
from resihp.executor.compute.stage import model_spec
from resihp.executor.compute.stopwatch import Stopwatch
from resihp.executor.engine import Engine
from resihp.executor.state.optimizer import AdamW
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost import memory

SETTINGS = AdamW(lr=1e-4)
LOSS_TOLERANCE = 1e-2
"""Relative, of bf16 sums in another order."""
MEGATRON_STATE_BYTES = 18
"""Of a parameter: itself in bf16, its gradient, its master copy and two moments in float32."""
USABLE_SHARE = 0.9
"""Of the device's memory that two contestants may take: the rest is gaps between allocations, CUDA, and kernels."""


class Size(msgspec.Struct, frozen=True):
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    length: int
    micro_batches: int
    blocks: int
    iterations: int

    def config(self, **extra: Any) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            ffn_hidden_size=self.ffn,
            **LLAMA,
            bf16=True,
            params_dtype=torch.bfloat16,
            **extra,
        )

    @property
    def tokens(self) -> int:
        """Of an iteration."""
        return self.micro_batches * self.length

    @property
    def multiplied_parameters(self) -> int:
        """All but the embedding, which is looked up, and norms."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        return self.layers * layer + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.multiplied_parameters + self.vocab * self.hidden

    @property
    def flops(self) -> int:
        """Of an iteration, forward and backward; of attention the half that is causal."""
        attention = 6 * self.layers * self.hidden * self.length
        return self.tokens * (6 * self.multiplied_parameters + attention)

    def plan(self) -> Plan:
        layout = Layout.uniform(tp=1, pp=1, dp=1, layers=self.layers)
        return Plan(epoch=1, layout=layout, assignment=(tuple(range(self.micro_batches)),))

    def expected_bytes(self) -> int:
        """What the planner expects the executor to hold at once."""
        model = model_spec(self.config(), vocab=self.vocab, sequence=self.length)
        return memory.needed_bytes(self.plan(), 0, model, self.length)

    def both_fit(self, device_bytes: int) -> bool:
        """Whether the executor in an iteration and megatron-core's state fit into a device together."""
        return self.expected_bytes() + MEGATRON_STATE_BYTES * self.parameters <= USABLE_SHARE * device_bytes


def rival() -> str:
    """Name the megatron-core that we compare with by what it has not, as far as this machine decides that."""
    without = ["Transformer Engine's layers"]
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        without = ["Transformer Engine", "apex", "fused Adam"]
    return f"megatron-core without {', '.join(without[:-1])}{' and ' if without[1:] else ''}{without[-1]}"


def ours(size: Size, corpus: Corpus, address: tuple[str, int]) -> Ours:
    engine = Engine(
        size.config(), vocab_size=size.vocab, dataset=corpus, optimizer=SETTINGS, seed=5, sequence=size.length
    )
    return Ours(engine, size.plan(), 0, address)


def parameters_on_host(contestant: Ours) -> dict[str, Tensor]:
    """Copies that another contestant can start from when this one is gone."""
    state = contestant.engine.state
    assert state is not None
    return {name: parameter.detach().cpu().clone() for name, parameter in state.optimizer.parameters.items()}


class Settled:
    """A contestant that is done when its device is. Counts its own iterations: others may share its engine."""

    def __init__(self, scale: Scale, inner: Any) -> None:
        self._scale, self.inner = scale, inner
        self.losses: list[float] = []

    def iterate(self, _: int) -> float | None:
        loss: float | None = self.inner.iterate(len(self.losses) + 1)
        self._scale.settle()
        assert loss is not None
        self.losses.append(loss)
        return loss


class Unwatched:
    """The same engine without its stopwatch."""

    def __init__(self, watched: Settled) -> None:
        self._watched = watched

    def iterate(self, iteration: int) -> float | None:
        module: Any = engine_module
        native, module.stopwatch_of = module.stopwatch_of, _unwatched
        try:
            self._watched.iterate(iteration)
        finally:
            module.stopwatch_of = native
        return None


def _unwatched(*_: Any) -> Stopwatch:
    return Stopwatch()  # the host's clock, which costs next to nothing


class Theirs:
    def __init__(self, scale: Scale, size: Size, corpus: Corpus, first: dict[str, Any]) -> None:
        self._scale, self._corpus, self._share = scale, corpus, tuple(range(size.micro_batches))
        self.model = plain_megatron.PlainMegatron(
            size.config(use_cpu_initialization=True, perform_initialization=False, pipeline_dtype=torch.bfloat16),
            SETTINGS,
            vocab=size.vocab,
            length=size.length,
            micro_batches=size.micro_batches,
            kernel=True,
            overlap=False,
            device=scale.device,
        )
        self.model.start_from(first)

    def iterate(self, iteration: int) -> float | None:
        documents = self._corpus.documents(iteration, self._share)
        return self.model.iterate([(a.to(self._scale.device), b.to(self._scale.device)) for a, b in documents])


def disagreement(ours: list[float], theirs: list[float]) -> str:
    """Say where losses of the same work differ; empty if they agree as far as both are known."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if not math.isclose(a, b, rel_tol=LOSS_TOLERANCE):
            return f"iteration {number}: loss {a} of ours, {b} of megatron's: not the same work"
    return ""


def syncs(contestant: Settled) -> int:
    """Times that one iteration of ours waits for the device, as torch counts them."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            contestant.inner.iterate(len(contestant.losses) + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def give_memory_back(scale: Scale) -> None:
    """To be called once nothing refers to a contestant: another one is to have the device for itself."""
    gc.unfreeze()  # `contest.in_turn` has frozen what there was
    gc.collect()
    if scale.full:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
