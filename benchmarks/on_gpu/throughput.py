"""Training without failures on one GPU in bf16: the executor against megatron-core's own loop, with the same attention.

Two models, 1.3B and eight layers of a 7B, 16 micro-batches of one document of 8,192 tokens. Contestants take turns
block by block (`benchmarks.contest`), from the same first parameters, and their losses must agree to the end.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from megatron.core.transformer import TransformerConfig

from benchmarks import plain_megatron
from benchmarks.contest import TIMEOUT, Corpus, Ours, in_turn, mean_ratio
from benchmarks.on_gpu.figures import Figure, Scale, at_least, at_most
from benchmarks.on_gpu.models import LLAMA
from resihp.executor import engine as engine_module
from resihp.executor.compute.stopwatch import Stopwatch
from resihp.executor.engine import Engine
from resihp.executor.state.optimizer import AdamW
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost.device_memory import GAPS

SETTINGS = AdamW(lr=1e-4)
LOSS_TOLERANCE = 1e-2
"""Relative, of bf16 sums in another order."""
SYNCS = 3
"""Times in an iteration that the host may wait for the device, beyond data."""


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


SIZES = {
    "1.3B": Size(24, 2048, 16, 5504, 32000, 8192, 16, 6, 2),
    "8 layers of 7B": Size(8, 4096, 32, 11008, 32000, 8192, 16, 6, 2),
}
REHEARSED = {"tiny": Size(2, 64, 4, 172, 256, 64, 4, 2, 2)}


def measure(scale: Scale) -> Iterator[Figure]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)
    address = ("127.0.0.1", store.port)
    plain_megatron.connect(0, address, 1, 1, 1, TIMEOUT)
    for name, size in (SIZES if scale.full else REHEARSED).items():
        yield from duel(scale, name, size, address)
        if scale.full:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def duel(scale: Scale, name: str, size: Size, address: tuple[str, int]) -> Iterator[Figure]:
    corpus = Corpus(size.micro_batches, size.length, size.vocab)
    ours = _Settled(scale, _ours(size, corpus, address))
    state = ours.inner.engine.state
    assert state is not None
    theirs = _Theirs(scale, size, corpus)
    theirs.model.start_from(state.optimizer.parameters)
    megatron = _Settled(scale, theirs)
    contestants = {"ours": ours, "without its stopwatch": _Unwatched(ours), "megatron": megatron}
    found = in_turn(contestants, size.blocks, size.iterations, 2, scale.settle, speaks=True)
    for number, (a, b) in enumerate(zip(ours.losses, megatron.losses, strict=False), 1):
        if not math.isclose(a, b, rel_tol=LOSS_TOLERANCE):
            raise SystemExit(f"{name}, iteration {number}: loss {a} of ours, {b} of megatron's: not the same work")
    seconds = {who: [each / size.iterations for each in blocks] for who, blocks in found["seconds"].items()}
    for who, each in seconds.items():
        rate = size.micro_batches * size.length / statistics.median(each)
        yield Figure(f"{name}, {who}", f"{statistics.median(each):.3f} s an iteration, {rate:,.0f} tokens/s")
    ratio, low, high = mean_ratio(seconds["megatron"], seconds["ours"])
    yield at_least(f"{name}: megatron's time over ours (95 %: {low:.3f} to {high:.3f})", ratio, 0.98)
    cost, low, high = mean_ratio(seconds["ours"], seconds["without its stopwatch"])
    yield at_most(
        f"{name}: stopwatch (95 %: {100 * (low - 1):.2f} to {100 * (high - 1):.2f} %)", 100 * (cost - 1), 0.5, " %"
    )
    if scale.full:
        yield at_most(f"{name}: times in an iteration that the host waits", syncs(ours), SYNCS)
        gaps = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1
        yield at_most(f"{name}: gaps between allocations, ours and megatron's", 100 * gaps, 100 * GAPS, " %")


def _ours(size: Size, corpus: Corpus, address: tuple[str, int]) -> Ours:
    engine = Engine(
        size.config(), vocab_size=size.vocab, dataset=corpus, optimizer=SETTINGS, seed=5, sequence=size.length
    )
    layout = Layout.uniform(tp=1, pp=1, dp=1, layers=size.layers)
    plan = Plan(epoch=1, layout=layout, assignment=(tuple(range(size.micro_batches)),))
    return Ours(engine, plan, 0, address)


class _Settled:
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


class _Unwatched:
    """The same engine without its stopwatch."""

    def __init__(self, watched: _Settled) -> None:
        self._watched = watched

    def iterate(self, iteration: int) -> None:
        native, engine_module.stopwatch_of = engine_module.stopwatch_of, _unwatched
        try:
            self._watched.iterate(iteration)
        finally:
            engine_module.stopwatch_of = native


def _unwatched(*_: Any) -> Stopwatch:
    return Stopwatch()  # the host's clock, which costs next to nothing


class _Theirs:
    def __init__(self, scale: Scale, size: Size, corpus: Corpus) -> None:
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

    def iterate(self, iteration: int) -> float | None:
        documents = self._corpus.documents(iteration, self._share)
        return self.model.iterate([(a.to(self._scale.device), b.to(self._scale.device)) for a, b in documents])


def syncs(ours: _Settled) -> int:
    """Times that one iteration of ours waits for the device, as torch counts them."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ours.inner.iterate(len(ours.losses) + 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in told)
