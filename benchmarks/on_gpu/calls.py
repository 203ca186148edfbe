"""Single calls of CUDA and of NCCL that the design rests on and that nobody has seen on a GPU.

Each is a few seconds and breaks alone. On a processor the same calls are made of `nccl-like`, and mean nothing.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from benchmarks.on_gpu.figures import Figure, Missing, Scale, at_most, attempt
from resihp.executor import backends
from resihp.executor.backends import BackEnd, Role
from resihp.executor.compute import device_waits
from resihp.executor.tensor_group import Backend, dist

BUSY_CYCLES = int(1.5e9)
"""Of the GPU's clock: most of a second."""
TICK_S = 0.01
SHORT_WAIT_S = 0.1
CONNECT_TIMEOUT = timedelta(seconds=60)


def measure(scale: Scale) -> Iterator[Figure]:
    torch.ones(1, device=scale.device)
    yield from attempt("cuEventQuery from a thread that never had a context", lambda: _event_from_new_thread(scale))
    yield from attempt("the interpreter's lock while the host waits", lambda: _lock_while_waiting(scale))
    os.environ["RESIHP_BACKEND"] = "nccl" if scale.full else "nccl-like"
    if scale.full and not dist.is_nccl_available():
        raise Missing("this build of torch has no NCCL")
    back_end = backends.chosen()
    yield from attempt("NCCL: a wait with a time limit on a busy device", lambda: _timed_wait(scale, back_end))
    yield from attempt("NCCL, one rank: made and aborted", lambda: _cycles(scale, back_end))
    yield from attempt("NCCL: a split", lambda: _split(scale, back_end))


def _keep_busy(scale: Scale) -> None:
    if scale.full:
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


def _event_from_new_thread(scale: Scale) -> Iterator[Figure]:
    """What a rank's beats ask (`device_waits`): a device that is busy has not come to a mark, one that is done has."""
    _keep_busy(scale)
    mark = device_waits.mark_on(scale.device)
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append(str(mark.query()))
        except RuntimeError as error:
            answers.append(str(error))

    for is_done in (False, True):
        if is_done:
            scale.settle()
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    expected = ["False", "True"]
    name = "cuEventQuery from a new thread: on a busy device, on one that is done"
    yield Figure(name, ", ".join(answers), ", ".join(expected), answers == expected if scale.full else None)


def _lock_while_waiting(scale: Scale) -> Iterator[Figure]:
    """A thread that beats must run on while the host waits for its device."""
    done = threading.Event()
    ticks = [0]

    def tick() -> None:
        while not done.wait(TICK_S):
            ticks[0] += 1

    _keep_busy(scale)
    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    torch.ones(1, device=scale.device).tolist()
    waited_s = time.perf_counter() - began
    done.set()
    thread.join()
    name = f"ticks of {TICK_S:g} s of another thread while the host waits for {waited_s:.2f} s"
    yield Figure(name, str(ticks[0]), f"about {waited_s / TICK_S:.0f}")


def _one_rank(back_end: BackEnd, key: str, role: Role = backends.STANDALONE_ROLE) -> Backend:
    return back_end.connect(dist.PrefixStore(key, dist.HashStore()), 0, 1, CONNECT_TIMEOUT, role)


def _timed_wait(scale: Scale, back_end: BackEnd) -> Iterator[Figure]:
    """Whether a wait with a time limit blocks the host and aborts: why no wait of NCCL's is given one."""
    communicator = _one_rank(back_end, "timed")
    tensor = torch.ones(1 << 20, device=back_end.device)
    _keep_busy(scale)
    work = communicator.allreduce([tensor])
    began = time.perf_counter()
    try:
        answer = str(work.wait(timedelta(seconds=SHORT_WAIT_S)))
    except RuntimeError as error:
        answer = f"{type(error).__name__}: {str(error)[:150]}"
    took_s = time.perf_counter() - began
    yield Figure(f"NCCL: wait({SHORT_WAIT_S:g} s) on a busy device", f"after {took_s:.2f} s: {answer}")
    try:
        communicator.allreduce([tensor]).wait()
        state = "of use"
    except RuntimeError as error:
        state = f"of no use: {str(error)[:150]}"
    yield Figure("NCCL: the communicator after it", state)
    back_end.abort([communicator])


def _cycles(scale: Scale, back_end: BackEnd) -> Iterator[Figure]:
    """Communicators of one rank, made and aborted again and again."""
    made_s, aborted_s, used = [], [], []
    for cycle in range(scale.of(10, 3)):
        began = time.perf_counter()
        communicator = _one_rank(back_end, f"cycle/{cycle}")
        back_end.settle()
        made_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert back_end.abort([communicator]), "an abort did not end"
        del communicator
        aborted_s.append(time.perf_counter() - began)
        used.append(_used_bytes(scale))
    name = "NCCL, one rank"
    yield Figure(f"{name}: to connect, first; median", f"{made_s[0]:.3f} s; {statistics.median(made_s):.3f} s")
    yield at_most(f"{name}: to abort and release, slowest", max(aborted_s), 1.0, " s")
    yield at_most(f"{name}: device memory that {len(used) - 2} cycles leak", (used[-1] - used[1]) / 1e6, 50.0, " MB")


def _split(scale: Scale, back_end: BackEnd) -> Iterator[Figure]:
    world = _one_rank(back_end, "world")
    began = time.perf_counter()
    child = _one_rank(back_end, "child", Role(parent=world, colour=3))
    back_end.settle()
    took_s = time.perf_counter() - began
    ended = back_end.abort([world, child])
    yield Figure("NCCL: to split a communicator", f"{took_s:.3f} s")
    yield Figure(
        "NCCL: parent and child aborted together", "both end" if ended else "not within time", "both end", ended
    )


def _used_bytes(scale: Scale) -> int:
    """Of the device, by all."""
    if not scale.full:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
