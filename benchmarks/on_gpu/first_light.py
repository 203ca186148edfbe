"""Take a first look at one GPU in nine minutes: what fails, what is slow, what recovers.

The order is that of knowledge per minute. What is installed and whether a fork can use the GPU decide whether anything
else can be right, and take seconds. Then single calls that the design rests on, then training without failures, then
jobs that lose a rank: over gloo, which needs less of the machine, before NCCL. Kernels last: they tell how fast, which
matters least where the others fail.

A block's own imports are in it, so that a package which is missing breaks one block alone. This module is read by
`benchmarks.gpu` before it knows whether torch is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.on_gpu.figures import Figure, Scale

BLOCKS: dict[str, float] = {
    "facts": 20,
    "forks": 40,
    "micro": 75,
    "train": 130,
    "gloo": 150,
    "nccl": 130,
    "kernels": 80,
}
"""Seconds that each may take, in the order in which they run. Together they are a little more than `MINUTES`: most end
before their time is over."""
MINUTES = 9
KILLED_OF_FOUR = ("kill:rank=3@iteration={at},phase=backward",)


def facts(scale: Scale) -> Iterator[Figure]:
    """What the machine has, by its own programs and by torch."""
    from benchmarks.on_gpu import inventory

    return inventory.facts(scale)


def forks(scale: Scale) -> Iterator[Figure]:
    """Whether forks of what workers come from can use the GPU."""
    from benchmarks.on_gpu import inventory

    return inventory.forks(scale)


def micro(scale: Scale) -> Iterator[Figure]:
    """Single calls of CUDA, NCCL and torch that the design rests on."""
    from benchmarks.on_gpu import calls, operations

    yield from calls.measure(scale)
    yield from operations.measure(scale)


def train(scale: Scale) -> Iterator[Figure]:
    """Training without failures: MFU, memory against the model of it, the device's time by kernel."""
    from benchmarks.on_gpu import train

    return train.measure(scale)


def gloo(scale: Scale) -> Iterator[Figure]:
    """Jobs of eight ranks over gloo that share the GPU and lose a rank, or two."""
    from benchmarks.on_gpu import supervised

    faults = ("killed in backward", "hangs", "killed, and another in the transfer")
    yield from supervised.compared(
        scale,
        "gloo, 8 ranks",
        {"RESIHP_BACKEND": "gloo"},
        {name: supervised.FAULTS[name] for name in faults},
    )


def nccl(scale: Scale) -> Iterator[Figure]:
    """Aborts of a stuck sum, and jobs of four ranks over NCCL that share the GPU and lose one."""
    from benchmarks.on_gpu import shared, supervised
    from benchmarks.on_gpu.figures import attempt

    yield shared.require_several_ranks(scale)
    environment = {**shared.environment(scale), "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    os.environ |= environment
    yield from attempt("aborts of a stuck sum", lambda: shared.aborts(scale))
    yield from supervised.compared(
        scale, "NCCL, 4 ranks", environment, {"killed in backward": KILLED_OF_FOUR}, supervised.FOUR
    )


def kernels(scale: Scale) -> Iterator[Figure]:
    """Attention's error, a layer's time by its lengths, the probe's spread, and a probe with memory full."""
    from benchmarks.on_gpu import kernels
    from benchmarks.on_gpu.figures import attempt

    for part in (kernels.attention, kernels.gemm, kernels.layer, kernels.full_memory):
        yield from attempt(f"kernels: {part.__name__}", lambda part=part: part(scale))  # type: ignore[misc]
