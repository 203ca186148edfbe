"""The back ends of communicators: gloo, NCCL, or gloo with NCCL's semantics. Each worker uses one back end.

A back end creates each communicator from (store, index, size, timeout, role). A communicator offers allreduce,
broadcast, _allgather_base and _reduce_scatter_base, which need no lists of tensors. Back ends differ in the order in
which communicators must be built, in the guarantees of `wait`, and in the way to free a blocked rank: with gloo by
shutting down the sockets under it (`communicators`), with NCCL by aborting all communicators.

NCCL's guarantees (torch 2.13's ProcessGroupNCCL.cpp): a call with `asyncOp=False` returns nothing. `wait` orders
streams, does not block, and does not report an abort; after an abort, buffers may contain anything. `wait(timeout)`
blocks, and aborts the communicator after the timeout. So resihp never passes a timeout to NCCL's wait, and code that
copies a result off the device checks afterwards whether the rank was woken (`channels.PendingWork`,
`Communicators.settle`).

`RESIHP_BACKEND` selects `gloo`, also for tensors on GPUs; `nccl`; or, for tests, `nccl-like`: NCCL's semantics on gloo.
The default is NCCL if there is a GPU. Called only in workers: querying a GPU starts CUDA, which does not survive a
fork.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch

from resihp.errors import CommunicatorError, ModelError
from resihp.executor import devices
from resihp.executor.tensor_group import Backend, dist
from resihp.pipeline.program import Use
from resihp.worker import nccl_versions
from resihp.worker.leaving import begin_thread

BACKEND_VARIABLE = "RESIHP_BACKEND"
ABORT_S = 10.0
"""Seconds allowed for an abort. NCCL's abort may itself wait for a kernel that a dead peer keeps running."""
NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Environment variables set before the first communicator is built. Otherwise torch's watchdog ends a process that has
lost a peer, even after a recovery."""
CONNECT_LIMITS = {
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Environment variables set unless the user has set them. The first limits the time, in seconds, in which a
communicator under construction waits for a lost peer; threads that wait for torch's lock on it wait no longer either.
The default is half an hour. The second makes peers connect when a communicator is built, not at its first use."""


EDGE_CTAS = 4
"""Number of thread blocks of an NCCL kernel between two stages, which is the number of SMs that it occupies while it
waits for its peer. Two to four are enough for an activation: an estimate, not measured."""


def _ignore_begun(begun: Backend) -> None:
    """Default of `Role.begun`: does nothing."""


@dataclass(frozen=True)
class Role:
    """The purpose of a communicator in the plan. NCCL treats communicators differently by their roles; gloo ignores
    them.

    `ranks` are the ranks of the communicator, as numbered in the plan. `parent` is the connected communicator that it
    is split from; all ranks of the parent take part in the split at the same time. `colour` is its number in the split.
    Without a parent, the communicator is built independently. `begun` is called with the communicator as soon as it can
    be aborted, which is before it is connected.
    """

    use: Use = "bulk"
    ranks: tuple[int, ...] = ()
    parent: Backend | None = None
    colour: int = 0
    begun: Callable[[Backend], None] = _ignore_begun


STANDALONE_ROLE = Role()
"""Role of a communicator outside any plan."""


class BackEnd(ABC):
    """Base class of the back ends; `device` is the device that communicators work on."""

    name: ClassVar[str]
    in_order: ClassVar[bool] = False
    """Whether communicators must be built one after the other, in the plan's order."""
    has_sockets: ClassVar[bool] = True
    """Whether shutting down a communicator's sockets frees the threads that wait in it."""
    scatters: ClassVar[bool] = False
    """Whether a thread that waits for the communicator's own reduce_scatter can be woken."""
    aborts: ClassVar[bool] = True
    """Whether `abort` has any effect."""
    timed_waits: ClassVar[bool] = True
    """Whether work is unaffected when a wait for it has timed out. With NCCL it is not: the wait blocks the host,
    counts from the time when the work was enqueued, and then aborts the communicator (`WorkNCCL::wait`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = STANDALONE_ROLE) -> Backend:
        """Build a communicator and return it connected. Raises RuntimeError."""

    def sit_out(self, parent: Backend, colour: int, timeout: timedelta) -> None:
        """Take part in a split as a rank that is in none of its communicators. Does nothing in back ends that do not
        split."""
        return

    def enter_thread(self) -> None:
        """Prepare the calling thread. Every thread that uses this back end must call this first."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def free_cached_memory(self) -> None:
        """Return the memory cached by torch to the device. Communicators do not allocate through torch, so a device
        that trains at its memory limit would have no memory left for them."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def abort(self, communicators: Sequence[Backend], connecting: Sequence[Backend] = ()) -> bool:
        """Free the threads that wait in these communicators, where shutting down sockets is not enough.

        Return False if this takes more than `ABORT_S`. Aborts of communicators in `connecting` are begun but not waited
        for, since torch may hold its lock (`CONNECT_LIMITS`).
        """
        return True


class Gloo(BackEnd):
    """gloo communicators. They share one listening socket; each has one thread, so its work is first in, first out, as
    with NCCL."""

    name = "gloo"
    aborts = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        self._shared: Any = None
        self._guard = threading.Lock()

    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = STANDALONE_ROLE) -> Backend:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._listening()]
        options._threads = 1
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, index, size, options)

    def _listening(self) -> Any:
        gloo = dist.ProcessGroupGloo
        with self._guard:
            if self._shared is None:
                interface = self._interface
                self._shared = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
        return self._shared


class Nccl(BackEnd):
    """NCCL communicators on GPUs. Written from the documentation of torch and NCCL; not yet run on a GPU."""

    name = "nccl"
    in_order = True
    has_sockets = False
    scatters = True
    timed_waits = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        os.environ |= NO_WATCHDOG
        for name, value in CONNECT_LIMITS.items():
            os.environ.setdefault(name, value)
        version = nccl_versions.loaded()
        if version is not None and (doubt := nccl_versions.doubt(version, nccl_versions.files())):
            print(f"{doubt}; {nccl_versions.UPGRADE_ADVICE}", flush=True)

    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = STANDALONE_ROLE) -> Backend:
        """Build a communicator and connect it at once: ranks might connect lazily built communicators in different
        orders.

        With `blocking`, NCCL could not be aborted while it connects, and torch would have nothing to abort. Without it,
        the first call waits until all peers have arrived. torch cannot poll for this and holds its lock during the
        wait, so an abort takes effect only when the loss of a peer is noticed (`CONNECT_LIMITS`). A split also holds
        the lock of its parent, and the child is registered nowhere before the split ends
        (`ProcessGroupNCCL::initNCCLComm`). So no order of aborts shortens the wait.

        Communicators that computation waits for get priority on the device. Each child of the world communicator has
        its own resources. If children shared resources (NCCL's splitShare), aborting one would abort all; but those
        that move state are released before the others.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.blocking = 0
        options.is_high_priority_stream = role.use != "bulk"
        options.global_ranks_in_group = list(role.ranks)
        if role.use == "edge":
            options.config.max_ctas = EDGE_CTAS
        if role.parent is not None:
            options.split_from = role.parent
            options.split_color = 1 + role.colour  # torch refuses 0
        backend = dist.ProcessGroupNCCL(store, index, size, options)
        role.begun(backend)
        backend.eager_connect_single_device(self.device)
        backend.allreduce([torch.zeros(1, device=self.device)]).wait()
        return backend

    def sit_out(self, parent: Backend, colour: int, timeout: timedelta) -> None:
        """Build a communicator of this rank alone and release it at once. torch's own call for a rank without a colour
        holds the interpreter lock until all peers have arrived; meanwhile this process could neither send heartbeats
        nor receive an order to park."""
        self.connect(dist.HashStore(), 0, 1, timeout, Role(parent=parent, colour=colour)).abort()

    def abort(self, communicators: Sequence[Backend], connecting: Sequence[Backend] = ()) -> bool:
        """Abort each communicator in its own thread, which also releases the communicator.

        All aborts begin before any is waited for: a communicator may wait for a kernel of another communicator, and its
        abort then ends only after the abort of the other.
        """
        aborted: list[Backend] = []

        def abort(communicator: Backend) -> None:
            communicator.abort()
            aborted.append(communicator)

        threads = [begin_thread(abort, backend, name="resihp-abort") for backend in (*communicators, *connecting)]
        for thread in threads[: len(communicators)]:
            thread.join(ABORT_S)
        return all(any(backend is ended for ended in aborted) for backend in communicators)


class NcclLike(Gloo):
    """gloo with the problematic semantics of NCCL, on CPUs, for tests.

    A connection or communication that fails hangs until it is aborted, like a kernel with a dead peer. After an abort,
    `wait` returns without an error, and the buffer contains NaN (-1 for integers) from the moment of the abort, so that
    a peer that continues receives invalid numbers as well. Synchronous calls return nothing. A wait with a timeout
    aborts the communicator and raises, even if the work is short. NCCL does so after the timeout, and with a real model
    the host is that far ahead of its device.
    """

    name = "nccl-like"
    in_order = True
    aborts = True
    timed_waits = False

    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = STANDALONE_ROLE) -> Backend:
        communicator = _NcclLikeCommunicator()
        role.begun(communicator)
        communicator.connect(partial(super().connect, store, index, size, timeout, role))
        return communicator

    def abort(self, communicators: Sequence[Backend], connecting: Sequence[Backend] = ()) -> bool:
        for communicator in (*communicators, *connecting):
            communicator.abort()
        return True


class _WorkInProgress:
    """The work in progress on one communicator, and whether it was aborted.

    Work refers to this object, not to the communicator: otherwise the garbage collector could destroy the communicator
    in any thread, which would then wait for the communicator's threads.
    """

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self._works: set[_NcclLikeWork] = set()
        self._guard = threading.Lock()

    def add(self, work: _NcclLikeWork) -> None:
        with self._guard:
            if not self.aborted.is_set():
                self._works.add(work)

    def remove(self, work: _NcclLikeWork) -> None:
        with self._guard:
            self._works.discard(work)

    def abort(self) -> None:
        self.aborted.set()
        with self._guard:
            while self._works:
                self._works.pop().poison()


class _NcclLikeCommunicator:
    """A gloo communicator that behaves like one of NCCL."""

    def __init__(self) -> None:
        self._gloo: Backend = None
        self._in_progress = _WorkInProgress()
        self._settled = threading.Event()
        """Set once the communicator is connected or aborted."""

    def connect(self, connect: Callable[[], Backend]) -> None:
        """Connect. Where gloo would fail, hang until aborted and then raise RuntimeError."""
        begin_thread(self._connect, connect, name="resihp-gloo")
        self._settled.wait()
        if self._in_progress.aborted.is_set():
            raise RuntimeError("aborted while it was being connected")

    def _connect(self, connect: Callable[[], Backend]) -> None:
        try:
            self._gloo = connect()
        except (CommunicatorError, RuntimeError):
            return
        self._settled.set()

    def size(self) -> int:
        return int(self._gloo.size())

    def rank(self) -> int:
        return int(self._gloo.rank())

    def abort(self) -> None:
        self._in_progress.abort()
        self._settled.set()

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        return self._begin(tensors, lambda: self._gloo.allreduce(tensors, *options), options)

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, *options: Any) -> Any:
        return self._begin([output], lambda: self._gloo._allgather_base(output, part), options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._begin(tensors, lambda: self._gloo.broadcast(tensors, options), (options,))

    def _begin(self, written: list[torch.Tensor], begin: Callable[[], Any], options: Sequence[Any]) -> Any:
        try:
            work = begin()
        except RuntimeError:
            work = None  # a failure is reported only by a wait for the work
        nccl_like = _NcclLikeWork(work, written, self._in_progress)
        self._in_progress.add(nccl_like)
        if options and getattr(options[0], "asyncOp", True) is False:
            nccl_like.wait()
            return None
        return nccl_like


class _NcclLikeWork:
    """A collective that never reports its failure."""

    def __init__(self, work: Any, written: list[torch.Tensor], in_progress: _WorkInProgress) -> None:
        self._work = work
        self._written = written
        self._in_progress = in_progress

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as NCCL does, and return True whether or not there is a result. Raises RuntimeError if given a
        timeout."""
        if timeout is not None:
            self._in_progress.abort()
            raise RuntimeError(f"timed out: waited for {timeout.total_seconds()} s, and aborted the communicator")
        if self._work is None or not self._finished():
            self._in_progress.aborted.wait()  # a dead peer's kernel never ends
            self.poison()
        self._in_progress.remove(self)
        return True

    def poison(self) -> None:
        for tensor in self._written:
            tensor.detach().fill_(math.nan if tensor.is_floating_point() else -1)

    def _finished(self) -> bool:
        poll_interval = timedelta(seconds=0.1)
        while not self._in_progress.aborted.is_set():
            try:
                return bool(self._work.wait(poll_interval))
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    return False
        return False

    def is_completed(self) -> bool:
        return self._in_progress.aborted.is_set() or (self._work is not None and bool(self._work.is_completed()))


_KINDS: dict[str, type[BackEnd]] = {kind.name: kind for kind in (Gloo, Nccl, NcclLike)}


def chosen() -> BackEnd:
    """Return this worker's back end. Raises ModelError for an unknown name, or if the back end cannot be used here."""
    gpus = devices.visible()
    name = os.environ.get(BACKEND_VARIABLE) or ("nccl" if gpus else "gloo")
    if name not in _KINDS:
        raise ModelError(f"{BACKEND_VARIABLE}={name}: must be one of {', '.join(_KINDS)}")
    if not gpus and name == "nccl":
        raise ModelError(f"{BACKEND_VARIABLE}=nccl: no GPU is visible here; look at nvidia-smi, or choose gloo")
    if name == "nccl" and not dist.is_nccl_available():
        raise ModelError(
            f"GPUs: torch {torch.__version__} is built without NCCL, by which GPUs communicate; install a build that "
            f"has it (pytorch.org), or set {BACKEND_VARIABLE}=gloo, which is slow"
        )
    on_gpu = gpus and name != "nccl-like"
    device = devices.own_device(gpus) if on_gpu else torch.device("cpu")
    if name == "nccl":
        devices.refuse_slices(device)
    back_end = _KINDS[name](device)
    back_end.enter_thread()
    return back_end
