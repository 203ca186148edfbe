"""What communicators are made of: gloo on CPUs, NCCL on GPUs, behind the interface that torch gives both.

A back end is made from (store, index, size, timeout) and offers allreduce, allgather, reduce_scatter, broadcast, each
returning work with `wait`. They differ in how a rank that is blocked in one is set free: gloo only by shutting down
the sockets under it (`communicators`), NCCL by aborting the communicators, all of them, from another thread.

The NCCL half is written by reading torch's and NCCL's documentation and has never run: no GPU was at hand.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from resihp.executor.tensor_group import Backend, dist

ABORT_S = 10.0
"""How long aborting may take; NCCL's abort can itself wait for a kernel that a dead peer keeps running."""


class Gloo:
    """Makes gloo back ends that share one listening socket and have one thread each: FIFO, as NCCL's are."""

    def __init__(self) -> None:
        gloo = dist.ProcessGroupGloo
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        self._device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    def __call__(self, store: Any, index: int, size: int, timeout: timedelta) -> Backend:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, index, size, options)


def nccl(store: Any, index: int, size: int, timeout: timedelta) -> Backend:
    """One NCCL communicator, connected at once: a communicator built lazily could meet others in another order."""
    import torch

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    backend = dist.ProcessGroupNCCL(store, index, size, options)
    backend.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return backend


def abort_all(nccl_backends: Sequence[Backend]) -> bool:
    """Abort NCCL communicators from a thread of its own; False if that took longer than `ABORT_S`.

    All are aborted before any is waited for: a communicator that waits for another one's kernel ends only with it. An
    aborted communicator is released by that; it must not be shut down in the ordinary way afterwards.
    """
    threads = [threading.Thread(target=backend.abort, name="resihp-abort", daemon=True) for backend in nccl_backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_S)
    return not any(thread.is_alive() for thread in threads)
