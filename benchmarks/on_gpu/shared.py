"""Several of NCCL's ranks on one GPU, which NCCL 2.30 and later allow: real aborts of kernels whose peers never come.

The same kills as over gloo; nobody else may end afterwards, for as long as torch's watchdog could still think of it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.on_gpu.figures import Figure, Missing, Scale, at_most
from benchmarks.on_gpu.supervised import FAULTS, JOB_S, compared, job
from resihp.executor import backends
from resihp.executor.tensor_group import dist
from resihp.scheduler.cost import device_memory
from resihp.worker import nccl_versions

CYCLES = 20
BRIEF_CYCLES = 5
WATCHED_S = 90.0
OLDEST = (2, 30)
SEVERAL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
ABORTS_S = 60.0
"""How long both ranks of `aborts` may take."""
STUCK_S = 0.5
"""How long a kernel waits for its peer before it is aborted."""


def measure(scale: Scale) -> Iterator[Figure]:
    yield require_several_ranks(scale)
    settings = environment(scale)
    os.environ |= settings
    yield from aborts(scale)
    yield from compared(scale, "NCCL, 8 ranks", settings, FAULTS)
    yield from _watched(scale, settings)


def require_several_ranks(scale: Scale) -> Figure:
    """Return the version of NCCL that is loaded. Raises Missing if it allows one rank on a GPU only."""
    version = nccl_versions.loaded() or (0,)
    shown, oldest = nccl_versions.shown(version), nccl_versions.shown(OLDEST)
    if scale.full and version < OLDEST:
        raise Missing(
            f"NCCL {shown} is loaded, which allows one rank on a GPU; several need {oldest} or later: "
            "name its libnccl.so.2 with --nccl (make gpu NCCL=...)"
        )
    return Figure("NCCL that is loaded", shown if any(version) else "none")


def environment(scale: Scale) -> dict[str, str]:
    return {"RESIHP_BACKEND": "nccl" if scale.full else "nccl-like", "RESIHP_SHARE_GPUS": "1", **SEVERAL}


def _watched(scale: Scale, settings: dict[str, str]) -> Iterator[Figure]:
    """After a kill nobody else may end, for as long as torch's watchdog could think of it: many short iterations."""
    short = job(scale, "NCCL, 8 ranks iteration time", settings, iterations=scale.of(8, 4))
    if short.trouble:
        yield Figure("lost long after a kill", short.trouble, "1 of 8", False)
        return
    iterations = int(WATCHED_S / short.iteration_s) if scale.full else 10
    faults = FAULTS["killed in backward"]
    name = f"NCCL, 8 ranks watched for {WATCHED_S:g} s"
    outcome = job(scale, name, settings, faults, iterations, limit_s=WATCHED_S + JOB_S)
    lost = outcome.trouble or f"{len(outcome.lost)} of 8"
    met = not outcome.trouble and len(outcome.lost) == 1
    yield Figure(f"lost within {WATCHED_S:g} s after a kill", lost, "1 of 8", met)


def aborts(scale: Scale) -> Iterator[Figure]:
    """Two ranks: each time one begins a sum that the other never joins, and aborts it."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=120), wait_for_workers=False)
    context = get_context("spawn")
    answers = context.SimpleQueue()
    cycles = scale.count(CYCLES, BRIEF_CYCLES, 3)
    ranks = [context.Process(target=_rank, args=(rank, store.port, cycles, scale, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(ABORTS_S)
    exits = [rank.exitcode for rank in ranks]
    if exits != [0, 0]:
        raise RuntimeError(f"aborts: the two ranks ended with {exits}")
    slowest_s, leaked_bytes, held_bytes = answers.get()
    yield at_most(f"abort of a stuck sum, slowest of {cycles}", slowest_s, 1, " s")
    yield at_most(f"device memory that {cycles} such cycles leak", leaked_bytes / 1e6, 50, " MB")
    counted = device_memory.PEERS_PER_CHANNEL * device_memory.CONNECTION_BYTES / 1e6
    channels = int(SEVERAL["NCCL_MAX_CTAS"])
    yield at_most("a communicator's memory, of each rank and channel", held_bytes / 2 / channels / 1e6, counted, " MB")


def _rank(rank: int, port: int, cycles: int, scale: Scale, answers: Any) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    back_end = backends.chosen()
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=120))
    took, used, held = [], list[int](), list[int]()
    for cycle in range(cycles):
        keys = dist.PrefixStore(str(cycle), store)
        communicator = back_end.connect(keys, rank, 2, timedelta(seconds=120))
        tensor = torch.ones(1 << 20, device=back_end.device)
        communicator.allreduce([tensor])
        back_end.settle()
        if rank == 0:
            if used:
                held.append(_used_bytes(scale) - used[-1])
            communicator.allreduce([tensor])
            time.sleep(STUCK_S)
            began = time.perf_counter()
            assert back_end.abort([communicator]), "an abort did not end"
            back_end.settle()
            took.append(time.perf_counter() - began)
            keys.set("aborted", "1")
        keys.wait(["aborted"])
        if rank == 1:
            back_end.abort([communicator])
        del communicator
        keys.set(f"released/{rank}", "1")
        keys.wait(["released/0", "released/1"])
        used.append(_used_bytes(scale))
        keys.set(f"counted/{rank}", "1")
        keys.wait(["counted/0", "counted/1"])
    if rank == 0:
        answers.put((max(took), used[-1] - used[1], statistics.median(held)))


def _used_bytes(scale: Scale) -> int:
    """Of the device, by all."""
    if not scale.full:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
