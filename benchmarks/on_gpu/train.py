"""Train a model of 1.3B on one GPU for a minute: by the executor alone, then by megatron-core alone.

One after the other, so that memory is each one's own. `throughput` lets them take turns, and takes nine minutes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

import msgspec
import torch

from benchmarks import plain_megatron
from benchmarks.contest import TIMEOUT, Corpus
from benchmarks.on_gpu import contestants, profiles
from benchmarks.on_gpu.contestants import Settled, Size
from benchmarks.on_gpu.figures import Figure, Scale, at_most, attempt
from benchmarks.on_gpu.mfu import shown_mfu
from benchmarks.on_gpu.throughput import REHEARSED, SYNCS
from resihp.executor.tensor_group import dist

MODEL_SIZE = Size(24, 2048, 16, 5504, 32000, 8192, 4, 0, 0)
ITERATIONS = 4


class Work(msgspec.Struct):
    """What both contestants train, and what the first one leaves for the second."""

    size: Size
    corpus: Corpus
    address: tuple[str, int]
    first: dict[str, Any] = {}
    """Parameters that both begin with, on the host."""
    losses: list[float] = []
    best_s: float = 0.0


def measure(scale: Scale) -> Iterator[Figure]:
    size = MODEL_SIZE if scale.full else REHEARSED["tiny"]
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)
    corpus = Corpus(size.micro_batches, size.length, size.vocab)
    work = Work(size, corpus, ("127.0.0.1", store.port))
    yield from _ours(scale, work)
    contestants.give_memory_back(scale)
    yield from attempt("megatron", lambda: _megatron(scale, work))


def _ours(scale: Scale, work: Work) -> Iterator[Figure]:
    began = time.perf_counter()
    contestant = Settled(scale, contestants.ours(work.size, work.corpus, work.address))
    scale.settle()
    yield Figure("ours: engine made and parameters drawn", f"{time.perf_counter() - began:.2f} s")
    work.first = contestants.parameters_on_host(contestant.inner)
    work.best_s = yield from _iterations(work.size, "ours", contestant)
    work.losses = contestant.losses
    yield from attempt("ours: memory", lambda: _memory(scale, work.size, contestant))
    if scale.full:
        yield from attempt("ours: waits of the host", lambda: _host_waits(contestant))
    yield from attempt("ours: profile", lambda: profiles.by_kernel(scale, "ours", contestant))


def _megatron(scale: Scale, work: Work) -> Iterator[Figure]:
    plain_megatron.connect(0, work.address, 1, 1, 1, TIMEOUT)
    contestant = Settled(scale, contestants.Theirs(scale, work.size, work.corpus, work.first))
    best_s = yield from _iterations(work.size, "megatron", contestant)
    yield Figure(f"time of {contestants.rival()} over ours", f"{best_s / work.best_s:.3f}")
    difference = contestants.disagreement(work.losses, contestant.losses)
    yield Figure("losses of both", difference or "agree", "agree", not difference)


def _iterations(size: Size, name: str, contestant: Settled) -> Generator[Figure, None, float]:
    """Returns the seconds of the fastest one, the first left out."""
    seconds = []
    for number in range(1, ITERATIONS + 1):
        began = time.perf_counter()
        loss = contestant.iterate(number)
        seconds.append(time.perf_counter() - began)
        yield Figure(f"{name}: iteration {number}", f"{seconds[-1]:.3f} s, loss {loss:.4f}")
    best_s = min(seconds[1:])
    rate = f"{size.tokens / best_s:,.0f} tokens/s, {shown_mfu(size.flops / best_s)}"
    yield Figure(f"{name}: fastest iteration", f"{best_s:.3f} s, {rate}")
    return best_s


def _memory(scale: Scale, size: Size, contestant: Settled) -> Iterator[Figure]:
    state = contestant.inner.engine.state
    held_bytes = sum(tensor.nbytes for tensor in state.storages())
    expected_bytes = size.expected_bytes()
    yield Figure("ours: state", f"{held_bytes / 1e9:.3g} GB")
    yield Figure("ours: memory that the planner expects", f"{expected_bytes / 1e9:.3g} GB")
    if scale.full:
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        yield at_most("ours: most allocated over what the planner expects", allocated / expected_bytes, 1.0)
        yield Figure("ours: most allocated, most reserved", f"{allocated / 1e9:.4g} GB, {reserved / 1e9:.4g} GB")


def _host_waits(contestant: Settled) -> Iterator[Figure]:
    yield at_most("ours: times in an iteration that the host waits", contestants.syncs(contestant), SYNCS)
