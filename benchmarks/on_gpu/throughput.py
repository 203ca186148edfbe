"""Training without failures on one GPU in bf16: the executor against megatron-core's own loop, with the same attention.

Two models, 1.3B and eight layers of a 7B, 16 micro-batches of one document of 8,192 tokens, from the same first
parameters; losses must agree to the end. Contestants take turns block by block (`benchmarks.contest`) where both fit
into the device, else the one comes after the other: eight layers of a 7B, twice, need 84 GB.

The other one is megatron-core as pip installs it, without Transformer Engine, apex and fused Adam: a ratio near 1 says
that the executor costs nothing beside it, not that it is as fast as a tuned Megatron. MFU says how fast both are.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Generator, Iterator

import msgspec
import torch
from torch import Tensor

from benchmarks import plain_megatron
from benchmarks.contest import TIMEOUT, Contestant, Corpus, in_turn, mean_ratio
from benchmarks.on_gpu import contestants, profiles
from benchmarks.on_gpu.contestants import Settled, Size, Theirs, Unwatched
from benchmarks.on_gpu.figures import Figure, Scale, at_least, at_most
from benchmarks.on_gpu.mfu import shown_mfu
from resihp.executor.tensor_group import dist
from resihp.scheduler.cost.device_memory import GAP_SHARE

SYNCS = 3
"""Times in an iteration that the host may wait for the device, beyond data."""
SIZES = {
    "1.3B": Size(24, 2048, 16, 5504, 32000, 8192, 16, 6, 2),
    "8 layers of 7B": Size(8, 4096, 32, 11008, 32000, 8192, 16, 6, 2),
}
REHEARSED = {"tiny": Size(2, 64, 4, 172, 256, 64, 4, 2, 2)}


class Times(msgspec.Struct):
    """Seconds an iteration of each block by contestant, and losses of ours and of megatron's."""

    seconds: dict[str, list[float]] = {}
    ours: list[float] = []
    megatron: list[float] = []


def measure(scale: Scale) -> Iterator[Figure]:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=TIMEOUT, wait_for_workers=False)
    address = ("127.0.0.1", store.port)
    plain_megatron.connect(0, address, 1, 1, 1, TIMEOUT)
    for name, size in (SIZES if scale.full else REHEARSED).items():
        yield from duel(scale, name, size, address)
        contestants.give_memory_back(scale)


def duel(scale: Scale, name: str, size: Size, address: tuple[str, int]) -> Iterator[Figure]:
    together = not scale.full or size.both_fit(torch.cuda.get_device_properties(0).total_memory)
    times = Times()
    run = _in_turn if together else _one_after_the_other
    yield Figure(f"{name}: contestants", "take turns" if together else "one after the other: both do not fit")
    yield from run(scale, name, size, address, times)
    difference = contestants.disagreement(times.ours, times.megatron)
    if difference:
        raise SystemExit(f"{name}, {difference}")
    for contestant, seconds in times.seconds.items():
        median_s = statistics.median(seconds)
        rate = f"{size.tokens / median_s:,.0f} tokens/s, {shown_mfu(size.flops / median_s)}"
        yield Figure(f"{name}, {contestant}", f"{median_s:.3f} s an iteration, {rate}")
    ratio, low, high = mean_ratio(times.seconds["megatron"], times.seconds["ours"])
    yield at_least(f"{name}: time of {contestants.rival()} over ours (95 %: {low:.3f} to {high:.3f})", ratio, 0.98)
    cost, low, high = mean_ratio(times.seconds["ours"], times.seconds["without its stopwatch"])
    yield at_most(
        f"{name}: stopwatch (95 %: {100 * (low - 1):.2f} to {100 * (high - 1):.2f} %)", 100 * (cost - 1), 0.5, " %"
    )


def _in_turn(scale: Scale, name: str, size: Size, address: tuple[str, int], times: Times) -> Iterator[Figure]:
    corpus = Corpus(size.micro_batches, size.length, size.vocab)
    ours = Settled(scale, contestants.ours(size, corpus, address))
    megatron = Settled(scale, Theirs(scale, size, corpus, contestants.parameters_on_host(ours.inner)))
    _run(scale, size, {"ours": ours, "without its stopwatch": Unwatched(ours), "megatron": megatron}, times)
    times.ours, times.megatron = ours.losses, megatron.losses
    yield from _alone(scale, name, ours)


def _one_after_the_other(
    scale: Scale, name: str, size: Size, address: tuple[str, int], times: Times
) -> Iterator[Figure]:
    corpus = Corpus(size.micro_batches, size.length, size.vocab)
    first = yield from _ours(scale, name, size, address, times)
    contestants.give_memory_back(scale)
    megatron = Settled(scale, Theirs(scale, size, corpus, first))
    _run(scale, size, {"megatron": megatron}, times)
    times.megatron = megatron.losses


def _ours(
    scale: Scale, name: str, size: Size, address: tuple[str, int], times: Times
) -> Generator[Figure, None, dict[str, Tensor]]:
    """Returns the parameters that it began with. A function of its own: when it ends, nothing refers to the engine."""
    corpus = Corpus(size.micro_batches, size.length, size.vocab)
    ours = Settled(scale, contestants.ours(size, corpus, address))
    first = contestants.parameters_on_host(ours.inner)
    _run(scale, size, {"ours": ours, "without its stopwatch": Unwatched(ours)}, times)
    times.ours = ours.losses
    yield from _alone(scale, name, ours)
    return first


def _run(scale: Scale, size: Size, names: dict[str, Contestant], times: Times) -> None:
    answer = in_turn(names, size.blocks, size.iterations, 2, scale.settle, speaks=True)
    for name, blocks in answer["seconds"].items():
        times.seconds[name] = [seconds / size.iterations for seconds in blocks]


def _alone(scale: Scale, name: str, ours: Settled) -> Iterator[Figure]:
    """What is asked of the executor alone. After its turns: its parameters are others afterwards."""
    if scale.full:
        yield at_most(f"{name}: times in an iteration that the host waits", contestants.syncs(ours), SYNCS)
        gaps = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1
        yield at_most(f"{name}: gaps between allocations", 100 * gaps, 100 * GAP_SHARE, " %")
    yield from profiles.by_kernel(scale, name, ours)
    print(f"{name}: losses of ours: {ours.losses}", file=sys.stderr)
