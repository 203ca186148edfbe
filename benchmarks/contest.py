"""Contestants that take turns in the same ranks, block by block, so that the machine's mood hits all alike."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch

from resihp.executor.engine import Engine
from resihp.executor.group_store import TorchRendezvous
from resihp.parallelism.plan import Plan
from resihp.parallelism.workload import MicroBatch

TIMEOUT = timedelta(seconds=120)


class Corpus:
    """`count` micro-batches of one document of `length` tokens each; the same few iterations again and again."""

    ITERATIONS = 16

    def __init__(self, count: int, length: int, vocab: int) -> None:
        self.count, self.length = count, length
        tokens = np.random.default_rng(1).integers(0, vocab, size=(self.ITERATIONS, count, length))
        self._arrays = [[(row, (row * 3 + 1) % vocab) for row in batch] for batch in tokens]

    def micro_batches(self, iteration: int) -> list[MicroBatch]:
        arrays = self._arrays[iteration % self.ITERATIONS]
        return [
            MicroBatch((self.length,), (self.count * iteration + m,), functools.partial(arrays.__getitem__, m))
            for m in range(self.count)
        ]

    def documents(self, iteration: int, share: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        arrays = self._arrays[iteration % self.ITERATIONS]
        return [(torch.from_numpy(arrays[m][0]), torch.from_numpy(arrays[m][1])) for m in share]


class Silent:
    """An observer that observes nothing."""

    def enter(self, phase: str) -> None: ...
    def progressed(self) -> None: ...
    def communicating(self, waits: bool) -> None: ...


class Contestant(Protocol):
    def iterate(self, iteration: int) -> float | None:
        """The loss, on ranks that know it."""


class Ours:
    """Our executor, as `resihp.executor.trainer` drives it."""

    def __init__(self, engine: Engine, plan: Plan, rank: int, store: tuple[str, int]) -> None:
        self.engine, self._plan, self._observer = engine, plan, Silent()
        engine.adopt(plan, rank)
        where = torch.distributed.TCPStore(*store, None, False, timeout=TIMEOUT)
        engine.connect(plan, rank, TorchRendezvous(where), TIMEOUT.total_seconds())

    def iterate(self, iteration: int) -> float | None:
        outcome = self.engine.run(self._plan, iteration, self._observer)
        self.engine.step(outcome)
        return outcome.loss


def in_turn(
    contestants: Mapping[str, Contestant],
    blocks: int,
    iterations: int,
    warm_up: int,
    barrier: Callable[[], object],
    speaks: bool,
) -> dict[str, Any]:
    """Seconds and CPU seconds of each block by contestant, and the losses where known."""
    gc.collect()
    gc.freeze()
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    first = 1
    for block in range(-1, blocks):
        count = iterations if block >= 0 else warm_up
        for turn in range(len(names)):
            name = names[(block + turn) % len(names)]
            barrier()
            began, used = time.perf_counter(), time.process_time()
            for iteration in range(first, first + count):
                loss = contestants[name].iterate(iteration)
                if loss is not None:
                    losses[name].append(loss)
            if block >= 0:
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
        first += count
        if speaks and block >= 0:
            row = ", ".join(f"{name} {seconds[name][-1] / count:.3f}" for name in names)
            print(f"block {block + 1}/{blocks}, s an iteration: {row}", file=sys.stderr)
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


def slowest(blocks: list[list[float]], iterations: int) -> list[float]:
    """Seconds an iteration of each block, by the slowest rank."""
    return [max(ranks) / iterations for ranks in zip(*blocks, strict=True)]


def mean_ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Geometric mean of the ratio over pairs of blocks, with its 95 % confidence interval."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.mean(logs)
    half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
