"""Measures a device: checks that it computes correctly, and measures its speed, while the rank runs no iteration.

This module decides about correctness (`examine`). It never decides about a speed: the detector compares it with those
of peers and of the past (`resihp.detector.probes`). Times are the device's own, as in `stopwatch`; on a CPU that is the
thread's processor time, so that waiting for a core does not make the device look slow. Other processes still take
caches and memory bandwidth, and can halve a measured speed, so one measurement decides nothing
(`resihp.controller.probing.second_looks`). A GPU is measured warm and with random numbers: clocks of a cold GPU are
slow, and ones and zeros draw less power than training does. The GPU part has not been run, for lack of a GPU.

A probe may interrupt training, when the device's memory may be full. Full memory says nothing about the device's
health. Called by `worker`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from resihp.errors import CommunicatorError, DeviceError
from resihp.executor.compute.channels import Channel
from resihp.executor.compute.stopwatch import Speed
from resihp.executor.devices import is_shared
from resihp.executor.engine import Engine
from resihp.executor.group_store import MeetingPlace
from resihp.executor.tensor_group import guarded, is_out_of_memory
from resihp.pipeline.program import GroupSpec
from resihp.protocol import messages as m

EXAMINED_SIZE = 256
MATRIX_SEED = 20260507

GEMM_SIZE = {"cpu": 256, "cuda": 8192}
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
"""Size of the copied buffer by device type, larger than any cache. Together with the matrices, a GPU needs 0.6 GiB,
also while training fills its memory."""
LINK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Size of the buffer sent over a link, by device type: about the size of a transfer between stages. Bandwidth
dominates, but latency between GPUs of a node is still visible."""
WARM_UP_S = 0.1
"""Seconds of work before a GPU is measured, so that its clocks have risen."""
REPEAT_COUNT = 8
REPEATS_PER_TURN = 2
"""Number of repetitions of one kind of work in a row."""
LINK_REPEAT_LIMITS = (3, 50)
"""Minimum and maximum number of repetitions; in between, as many as fit into `LINK_S`. CPUs may be busy with other
work."""
LINK_S = 0.2
ANNOUNCED_TIMEOUT_S = 2.0
"""Seconds to wait for the peer in a link probe between two iterations; training waits meanwhile."""


def examine(device: torch.device) -> None:
    """Multiply two matrices twice on the device, and compare with the result of the CPU. Raises DeviceError if a result
    is wrong. Does nothing if the device's memory is full."""
    generator = torch.Generator().manual_seed(MATRIX_SEED)
    first, second = (torch.randn(EXAMINED_SIZE, EXAMINED_SIZE, generator=generator) for _ in range(2))
    expected = first.double() @ second.double()
    try:
        with _classified_errors(device):
            results = [(first.to(device) @ second.to(device)).cpu() for _ in range(2)]
    except DeviceFullError:
        return
    if not torch.equal(results[0], results[1]):
        raise DeviceError(f"device {device}: fails its probe: the same product comes out differently")
    worst = float((results[0].double() - expected).abs().max())
    if not worst < 1e-2 * EXAMINED_SIZE**0.5:
        raise DeviceError(f"device {device}: fails its probe: a product is off by {worst:g}")


def measure(request: m.Probe, rank: int, engine: Engine, rendezvous: MeetingPlace) -> m.Probed:
    """Carry out a probe and return the answer. Errors are part of the answer."""
    began = time.perf_counter()
    speed, error, untried, missed = m.Speed(), "", "", ""
    transfers: tuple[m.Transfer, ...] = ()
    try:
        examine(engine.device)
        speed = device_speed(engine.device, engine.speed)
    except DeviceError as trouble:
        error = str(trouble)
    except DeviceFullError as trouble:
        untried = str(trouble)
    try:
        transfers = link_times(request, rank, engine, rendezvous)
    except (CommunicatorError, DeviceFullError) as trouble:
        missed = str(trouble)
    return m.Probed(
        probe=request.probe,
        speed=speed,
        transfers=transfers,
        seconds=time.perf_counter() - began,
        error=error,
        untried=untried,
        missed=missed,
        shared=is_shared(engine.device),
    )


class DeviceFullError(Exception):
    """The device's memory is too full for a measurement, which does not mean that the device is faulty."""


@contextmanager
def _classified_errors(device: torch.device) -> Iterator[None]:
    """Raise RuntimeErrors in the block as DeviceError, or as DeviceFullError if the device's memory is full."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceFullError(f"device {device}: has no memory left to measure it in") from error
        raise DeviceError(f"device {device}: fails its probe: {error}") from error


def device_speed(device: torch.device, speed: Speed) -> m.Speed:
    """Measure the throughput of a matrix product and of memory copies. Raises DeviceError and DeviceFullError."""
    size, count = GEMM_SIZE[device.type], COPIED_BYTES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with _classified_errors(device):
        generator = torch.Generator(device).manual_seed(MATRIX_SEED)
        first, second = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
        source = first.flatten().repeat(count // first.nbytes)
        target = torch.empty_like(source)
        product, copy = _fastest(device, speed, lambda: torch.mm(first, second), lambda: target.copy_(source))
    return m.Speed(flops=2 * size**3 / product, memory_bytes=2 * count / copy, hardware=hardware(device))


def hardware(device: torch.device) -> str:
    """Return the model name of a device; for a CPU also the number of threads. Only speeds with equal names are
    comparable."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")
    return f"{model}, {torch.get_num_threads()} threads"


def _fastest(device: torch.device, speed: Speed, *works: Callable[[], object]) -> tuple[float, ...]:
    """Return, for each kind of work, the seconds of its fastest repetition on a warm device.

    Slower repetitions are due to other processes. The kinds of work take turns, so that each is spread over the whole
    time: a neighbour that is busy for part of the time does not affect all repetitions of one kind. In the first
    repetition of a turn, the caches contain data of the other kind.
    """
    began = time.perf_counter()
    works[0]()
    while device.type == "cuda" and time.perf_counter() - began < WARM_UP_S:
        works[0]()
        torch.cuda.synchronize(device)
    times: tuple[list[float], ...] = tuple([] for _ in works)
    for _ in range(REPEAT_COUNT // REPEATS_PER_TURN):
        for work, taken in zip(works, times, strict=True):
            taken.extend(_seconds(device, work) for _ in range(REPEATS_PER_TURN))
    return tuple(min(taken) / speed() for taken in times)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the duration of `work` in seconds of the device's own time."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure_links(
    request: m.Probe, rank: int, engine: Engine, rendezvous: MeetingPlace, called_off: Callable[[], bool]
) -> m.Probed:
    """Carry out a link probe that was announced for this point between two iterations, and return the answer.

    The plan's communicators stay open. Errors are part of the answer.
    """
    began = time.perf_counter()
    transfers: tuple[m.Transfer, ...] = ()
    missed = ""
    try:
        transfers = link_times(request, rank, engine, rendezvous, ANNOUNCED_TIMEOUT_S, called_off)
    except (CommunicatorError, DeviceFullError) as trouble:
        missed = str(trouble)
    return m.Probed(
        probe=request.probe,
        transfers=transfers,
        seconds=time.perf_counter() - began,
        missed=missed,
        shared=is_shared(engine.device),
    )


def link_times(
    request: m.Probe,
    rank: int,
    engine: Engine,
    rendezvous: MeetingPlace,
    patience_s: float | None = None,
    called_off: Callable[[], bool] = lambda: False,
) -> tuple[m.Transfer, ...]:
    """Measure this rank's links one after the other by all-reduces with one peer. No other pair of a round shares a
    rank with this pair.

    Raises CommunicatorError if a peer does not arrive, and DeviceFullError, before any rendezvous, if this device's
    memory is full.
    """
    mine = [(round_, pair) for round_, pairs in enumerate(request.pairs) for pair in pairs if rank in pair]
    if not mine:
        return ()
    groups = [GroupSpec(f"{round_}/{a}-{b}", (a, b), "edge") for round_, (a, b) in mine]
    with _classified_errors(engine.device):
        buffer = torch.zeros(LINK_BYTES[engine.device.type] // 4, device=engine.device)
    transfers = []
    meeting = m.MeetingId(probe=request.probe)
    with engine.meet(meeting, groups, rank, rendezvous, patience_s, called_off) as communicators:
        for (_, pair), group in zip(mine, groups, strict=True):
            peer = pair[0] if pair[1] == rank else pair[1]
            transfers.append(m.Transfer(peer=peer, seconds=_transfer_s(communicators.channel(group.name), buffer)))
    return tuple(transfers)


def _transfer_s(channel: Channel, buffer: torch.Tensor) -> float:
    """Return the seconds of an all-reduce of a buffer with a peer.

    The result is the lower quartile of several repetitions, since other traffic makes some slower. On shared CPUs it is
    the fastest, since most may be disturbed. A slow link gets fewer repetitions; both ends agree on the number.
    """
    device = buffer.device

    def exchange(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        with guarded("probe of a link"):
            channel.allreduce([tensor]).wait()
            if device.type == "cuda":
                torch.cuda.synchronize()
        return time.perf_counter() - began

    exchange(buffer)
    sum_s = torch.tensor([exchange(buffer)], device=device)
    exchange(sum_s)
    min_repeats, max_repeats = LINK_REPEAT_LIMITS
    repeats = min(max(int(2 * LINK_S / max(float(sum_s), 1e-9)), min_repeats), max_repeats)
    times = [exchange(buffer) for _ in range(repeats)]
    return min(times) if is_shared(device) else statistics.quantiles(times, n=4)[0]
