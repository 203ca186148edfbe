"""Is a device fit for work, and how fast is it? Short examinations, while no iteration is under way on the rank.

Right or wrong is decided here (`examine`); what is fast or slow, compared with peers and the past, the detector says
(`resihp.detector.probes`). Times are the device's own, as in `stopwatch`: on a processor those of the thread, so that
whoever shares its cores does not make it look slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from resihp.errors import CommunicatorError, DeviceError
from resihp.executor.channels import guarded
from resihp.executor.engine import Engine
from resihp.executor.stopwatch import Speed
from resihp.pipeline.program import Membership
from resihp.protocol import messages as m

SIZE = 256
SEED = 20260507

GEMM_SIZE = {"cpu": 256, "cuda": 4096}
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}
LINK_BYTES = 1 << 20
REPEATS = 12


def examine(device: torch.device) -> None:
    """Multiply matrices twice on the device and compare with the processor's result. Raises DeviceError."""
    generator = torch.Generator().manual_seed(SEED)
    left, right = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    expected = left.double() @ right.double()
    try:
        results = [(left.to(device) @ right.to(device)).cpu() for _ in range(2)]
    except RuntimeError as error:
        raise DeviceError(f"device {device}: fails its probe: {error}") from error
    if not torch.equal(results[0], results[1]):
        raise DeviceError(f"device {device}: fails its probe: the same product comes out differently")
    worst = float((results[0].double() - expected).abs().max())
    if not worst < 1e-2 * SIZE**0.5:
        raise DeviceError(f"device {device}: fails its probe: a product is off by {worst:g}")


def measure(asked: m.Probe, rank: int, engine: Engine) -> m.Probed:
    """Answer a probe. Whatever goes wrong is in the answer."""
    began = time.perf_counter()
    speed, error, missed = m.Speed(), "", ""
    transfers: tuple[m.Transfer, ...] = ()
    try:
        examine(engine.device)
        speed = device_speed(engine.device, engine.speed)
    except DeviceError as trouble:
        error = str(trouble)
    try:
        transfers = link_times(asked, rank, engine)
    except CommunicatorError as trouble:
        missed = str(trouble)
    seconds = time.perf_counter() - began
    return m.Probed(probe=asked.probe, speed=speed, transfers=transfers, seconds=seconds, error=error, missed=missed)


def device_speed(device: torch.device, speed: Speed) -> m.Speed:
    """Throughput of a matrix product and of copies in memory. Raises DeviceError."""
    size, count = GEMM_SIZE[device.type], COPIED_BYTES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    try:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        product = _fastest(device, speed, lambda: torch.mm(left, right))
        source = torch.ones(count // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        copy = _fastest(device, speed, lambda: target.copy_(source))
    except RuntimeError as error:
        raise DeviceError(f"device {device}: fails its probe: {error}") from error
    return m.Speed(flops=2 * size**3 / product, memory_bytes=2 * count / copy)


def _fastest(device: torch.device, speed: Speed, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several repetitions, after one that warms up: the rest is others' doing."""
    work()
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        else:
            began = time.thread_time()
            work()
            times.append(time.thread_time() - began)
    return min(times) / speed()


def link_times(asked: m.Probe, rank: int, engine: Engine) -> tuple[m.Transfer, ...]:
    """All-reduce a buffer with one peer after the other: each round's pairs have their links to themselves.

    Raises CommunicatorError when a peer does not come.
    """
    mine = [(round_, pair) for round_, pairs in enumerate(asked.pairs) for pair in pairs if rank in pair]
    if not mine or asked.store is None:
        return ()
    groups = [Membership(f"{round_}/{a}-{b}", (a, b)) for round_, (a, b) in mine]
    communicators = engine.meet(f"probe-{asked.probe}", groups, rank, asked.store)
    found = []
    try:
        buffer = torch.zeros(LINK_BYTES // 4, device=engine.device)
        for (_, pair), group in zip(mine, groups, strict=True):
            channel = communicators.channel(group.name)
            times = []
            for _ in range(REPEATS + 1):
                began = time.perf_counter()
                with guarded("probe of a link"):
                    channel.allreduce([buffer]).wait()
                if engine.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
            peer = pair[0] if pair[1] == rank else pair[1]
            found.append(m.Transfer(peer=peer, seconds=statistics.median(times[1:])))
    finally:
        engine.disconnect()
    return tuple(found)
