"""NCCL's communicators of one rank: made, used, aborted and destroyed again and again. `Nccl` of our back ends."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from benchmarks.on_gpu.figures import Figure, Missing, Scale, at_most
from resihp.executor import backends
from resihp.executor.compute.channels import Channel
from resihp.executor.tensor_group import dist
from resihp.scheduler.cost import device_memory

CYCLES = 50


def measure(scale: Scale) -> Iterator[Figure]:
    os.environ["RESIHP_BACKEND"] = "nccl" if scale.full else "nccl-like"
    if scale.full and not dist.is_nccl_available():
        raise Missing("this build of torch has no NCCL")
    back_end = backends.chosen()
    torch.ones(1, device=back_end.device)
    counted = device_memory.CONTEXT_BYTES / 1e6
    yield at_most("device memory in use once CUDA has begun", _used_bytes(scale) / 1e6, counted, " MB")
    if scale.full:
        stands = all(os.environ.get(name) == value for name, value in backends.NO_WATCHDOG.items())
        yield Figure("torch's watchdog is told to end nobody", "yes" if stands else "no", "yes", stands)
    made, aborted, used, threads = [], [], [], []
    options = dist.AllreduceOptions()
    options.asyncOp = False
    for cycle in range(scale.of(CYCLES, 3)):
        began = time.perf_counter()
        communicator = back_end.connect(dist.PrefixStore(str(cycle), dist.HashStore()), 0, 1, timedelta(seconds=60))
        made.append(time.perf_counter() - began)
        channel = Channel(communicator, lambda: False, kind=backends.Nccl)
        tensor = torch.ones(1 << 20, device=back_end.device)
        channel.allreduce([tensor], options).wait()  # a synchronous one, as megatron's layers ask for
        channel.allreduce([tensor]).wait()
        back_end.settle()
        assert float(tensor.sum()) == 1 << 20, "a sum over one rank changed what it summed"
        began = time.perf_counter()
        assert back_end.abort([communicator]), "an abort did not end"
        del communicator
        channel.detach()
        aborted.append(time.perf_counter() - began)
        used.append(_used_bytes(scale))
        threads.append(threading.active_count())
    yield Figure("a synchronous collective, waited for", "returns", "returns", True)
    yield Figure("to connect, median; first", f"{statistics.median(made):.3f} s; {made[0]:.3f} s")
    yield at_most("to abort and destroy, slowest", max(aborted), 1.0, " s")
    leaked = (used[-1] - used[1]) / 1e6
    yield at_most(f"device memory that {len(used) - 2} cycles leak", leaked, 50.0, " MB")
    yield Figure("threads after the first and the last cycle", f"{threads[0]}, {threads[-1]}")


def _used_bytes(scale: Scale) -> int:
    if not scale.full:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
