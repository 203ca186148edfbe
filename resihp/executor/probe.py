"""Is a device fit for work, and how fast is it? Short examinations, while no iteration is under way on the rank.

Right or wrong is decided here (`examine`); what is fast or slow, compared with peers and the past, the detector says
(`resihp.detector.probes`). Times are the device's own, as in `stopwatch`: on a processor those of the thread, so that
waiting for a core does not make it look slow. What others take of caches and of the memory's bus still does: by half,
which is why one measurement decides nothing (`resihp.controller.fail_slow.second_looks`). A GPU is measured warm, on
random numbers: cold clocks are slow ones, and ones and zeros draw too little power to show what training gets. That
part has not run: no GPU was at hand.

A probe may come in the middle of training, whose device may be full. That says nothing about the device: no verdict.
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

SIZE = 256
SEED = 20260507

GEMM_SIZE = {"cpu": 256, "cuda": 8192}
COPIED_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}
"""Beyond any cache; with the matrices a GPU is asked for 0.6 GiB, whoever else fills it."""
LINK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""As much as a stage sends another: bandwidth decides, and between GPUs of a node latency is still seen."""
WARM_S = 0.1
"""Of work before a GPU is measured: its clocks have risen by then."""
REPEATS = 8
TURN = 2
"""Repetitions in a row."""
LINK_REPEATS = (3, 50)
"""At least and at most, of which only as many as `LINK_S` allows: the processors may be busy, too."""
LINK_S = 0.2
ANNOUNCED_S = 2.0
"""How long a rank that trains waits for one that was told to come at the same moment: meanwhile, training waits."""


def examine(device: torch.device) -> None:
    """Multiply matrices twice on the device and compare with the processor's result. Raises DeviceError; a
    device that is full is not judged."""
    generator = torch.Generator().manual_seed(SEED)
    left, right = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    expected = left.double() @ right.double()
    try:
        with _examined(device):
            results = [(left.to(device) @ right.to(device)).cpu() for _ in range(2)]
    except DeviceFullError:
        return
    if not torch.equal(results[0], results[1]):
        raise DeviceError(f"device {device}: fails its probe: the same product comes out differently")
    worst = float((results[0].double() - expected).abs().max())
    if not worst < 1e-2 * SIZE**0.5:
        raise DeviceError(f"device {device}: fails its probe: a product is off by {worst:g}")


def measure(asked: m.Probe, rank: int, engine: Engine, rendezvous: MeetingPlace) -> m.Probed:
    """Answer a probe. Whatever goes wrong is in the answer."""
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
        transfers = link_times(asked, rank, engine, rendezvous)
    except (CommunicatorError, DeviceFullError) as trouble:
        missed = str(trouble)
    return m.Probed(
        probe=asked.probe,
        speed=speed,
        transfers=transfers,
        seconds=time.perf_counter() - began,
        error=error,
        untried=untried,
        missed=missed,
        shared=is_shared(engine.device),
    )


class DeviceFullError(Exception):
    """There is no memory to measure in, which is nobody's fault."""


@contextmanager
def _examined(device: torch.device) -> Iterator[None]:
    """Around what a device is asked to do. Raises DeviceError for what it cannot, DeviceFullError without memory."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceFullError(f"device {device}: has no memory left to measure it in") from error
        raise DeviceError(f"device {device}: fails its probe: {error}") from error


def device_speed(device: torch.device, speed: Speed) -> m.Speed:
    """Throughput of a matrix product and of copies in memory. Raises DeviceError, and DeviceFullError."""
    size, count = GEMM_SIZE[device.type], COPIED_BYTES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with _examined(device):
        generator = torch.Generator(device).manual_seed(SEED)
        left, right = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
        source = left.flatten().repeat(count // left.nbytes)
        target = torch.empty_like(source)
        product, copy = _fastest(device, speed, lambda: torch.mm(left, right), lambda: target.copy_(source))
    return m.Speed(flops=2 * size**3 / product, memory_bytes=2 * count / copy, hardware=hardware(device))


def hardware(device: torch.device) -> str:
    """Whose figures may be compared with this device's: its model, and of a processor how many threads work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor")
    return f"{model}, {torch.get_num_threads()} threads"


def _fastest(device: torch.device, speed: Speed, *works: Callable[[], object]) -> tuple[float, ...]:
    """Seconds of each work's fastest repetition, once the device is warm: the rest is others' doing.

    They take turns, so that each is spread over the whole time: a neighbour that is at work for a part of it does not
    meet all repetitions of one. Each turn's first one finds the caches as the other work left them.
    """
    began = time.perf_counter()
    works[0]()
    while device.type == "cuda" and time.perf_counter() - began < WARM_S:
        works[0]()
        torch.cuda.synchronize(device)
    times: tuple[list[float], ...] = tuple([] for _ in works)
    for _ in range(REPEATS // TURN):
        for work, taken in zip(works, times, strict=True):
            taken.extend(_seconds(device, work) for _ in range(TURN))
    return tuple(min(taken) / speed() for taken in times)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of the device's own time."""
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
    asked: m.Probe, rank: int, engine: Engine, rendezvous: MeetingPlace, called_off: Callable[[], bool]
) -> m.Probed:
    """Answer a probe of links that was announced for this moment, between two iterations; the plan's communicators
    stand. Whatever goes wrong is in the answer."""
    began = time.perf_counter()
    transfers: tuple[m.Transfer, ...] = ()
    missed = ""
    try:
        transfers = link_times(asked, rank, engine, rendezvous, ANNOUNCED_S, called_off)
    except (CommunicatorError, DeviceFullError) as trouble:
        missed = str(trouble)
    return m.Probed(
        probe=asked.probe,
        transfers=transfers,
        seconds=time.perf_counter() - began,
        missed=missed,
        shared=is_shared(engine.device),
    )


def link_times(
    asked: m.Probe,
    rank: int,
    engine: Engine,
    rendezvous: MeetingPlace,
    patience_s: float | None = None,
    called_off: Callable[[], bool] = lambda: False,
) -> tuple[m.Transfer, ...]:
    """All-reduce a buffer with one peer after the other: each round's pairs have their links to themselves.

    Raises CommunicatorError when a peer does not come, and DeviceFullError without having come itself.
    """
    mine = [(round_, pair) for round_, pairs in enumerate(asked.pairs) for pair in pairs if rank in pair]
    if not mine:
        return ()
    groups = [GroupSpec(f"{round_}/{a}-{b}", (a, b), "edge") for round_, (a, b) in mine]
    with _examined(engine.device):
        buffer = torch.zeros(LINK_BYTES[engine.device.type] // 4, device=engine.device)
    found = []
    meeting = m.MeetingId(probe=asked.probe)
    with engine.meet(meeting, groups, rank, rendezvous, patience_s, called_off) as communicators:
        for (_, pair), group in zip(mine, groups, strict=True):
            peer = pair[0] if pair[1] == rank else pair[1]
            found.append(m.Transfer(peer=peer, seconds=_transfer_s(communicators.channel(group.name), buffer)))
    return tuple(found)


def _transfer_s(channel: Channel, buffer: torch.Tensor) -> float:
    """Seconds of a buffer there and back, the lower quartile of several: the rest is others' doing. On processors that
    others share, the fastest: most of the rest may be. Of fewer where it takes long; both ends agree on how many."""
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
    least, most = LINK_REPEATS
    repeats = min(max(int(2 * LINK_S / max(float(sum_s), 1e-9)), least), most)
    times = [exchange(buffer) for _ in range(repeats)]
    return min(times) if is_shared(device) else statistics.quantiles(times, n=4)[0]
