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
from benchmarks.on_gpu.supervised import FAULTS, job, judged
from resihp.executor import backends
from resihp.executor.tensor_group import dist
from resihp.scheduler.cost import device_memory
from resihp.worker import nccl_versions

CYCLES = 20
WATCHED_S = 90.0
OLDEST = (2, 30)
SEVERAL = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
STUCK_S = 0.5
"""How long a kernel waits for its peer before it is aborted."""


def measure(scale: Scale) -> Iterator[Figure]:
    version = nccl_versions.loaded() or (0,)
    if scale.full and version < OLDEST:
        found, oldest = nccl_versions.shown(version), nccl_versions.shown(OLDEST)
        raise Missing(f"NCCL {found} has one rank on a GPU; {oldest} is needed, and can be named in LD_PRELOAD")
    environment = {"RESIHP_BACKEND": "nccl" if scale.full else "nccl-like", "RESIHP_SHARE_GPUS": "1", **SEVERAL}
    os.environ |= environment
    yield from aborts(scale)
    undisturbed = job(scale, environment)
    yield Figure("iteration of eight workers", f"{undisturbed.iteration_s:.3f} s")
    for name, faults in FAULTS.items():
        yield from judged(name, faults, job(scale, environment, faults), undisturbed)
    faults = FAULTS["killed in backward"]
    iterations = int(WATCHED_S / undisturbed.iteration_s) if scale.full else 10
    outcome = job(scale, environment, faults, iterations)
    told = f"{len(outcome.lost)} of 8"
    yield Figure(f"lost within {WATCHED_S:g} s after a kill", told, "1 of 8", len(outcome.lost) == 1)


def aborts(scale: Scale) -> Iterator[Figure]:
    """Two ranks: each time one begins a sum that the other never joins, and aborts it."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=120), wait_for_workers=False)
    context = get_context("spawn")
    answers = context.SimpleQueue()
    cycles = scale.of(CYCLES, 3)
    ranks = [context.Process(target=_rank, args=(rank, store.port, cycles, scale, answers)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    exits = [rank.exitcode for rank in ranks]
    if exits != [0, 0]:
        raise RuntimeError(f"aborts: the two ranks ended with {exits}")
    slowest_s, leaked_bytes, held_bytes = answers.get()
    yield at_most(f"abort of a stuck sum, slowest of {cycles}", slowest_s, 1, " s")
    yield at_most(f"device memory that {cycles} such cycles leak", leaked_bytes / 1e6, 50, " MB")
    counted = device_memory.PEERS * device_memory.CONNECTION_BYTES / 1e6
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
