"""What communicators are made of, chosen once per worker and asked everywhere: gloo, NCCL, or NCCL's manners on gloo.

A back end is made for each communicator from (store, index, size, timeout, role) and offers allreduce, broadcast,
_allgather_base and _reduce_scatter_base, which need no lists of tensors. What differs is here: the order in which
communicators may be built and what they are made from, what `wait` promises, and how a rank that is blocked in one is
set free: gloo by shutting down the sockets under it (`communicators`), NCCL by aborting all communicators.

What NCCL promises (torch 2.13's ProcessGroupNCCL.cpp): a call with `asyncOp=False` returns nothing; `wait` orders
streams, does not block, and says nothing of an abort, after which buffers hold anything; `wait(timeout)` blocks, and
aborts the communicator once the time has passed. So no wait of NCCL's is given a timeout, and whoever lets a result out
of the device asks afterwards whether the rank was woken (`channels.PendingWork`, `Communicators.settle`).

`RESIHP_BACKEND` chooses: `gloo`, also for tensors on GPUs; `nccl`; `nccl-like`, for tests: those manners, on gloo. By
default NCCL where a GPU is. Called only in workers: asking for a GPU starts CUDA, which no fork survives.
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

BACKEND = "RESIHP_BACKEND"
ABORT_S = 10.0
"""How long aborting may take; NCCL's abort can itself wait for a kernel that a dead peer keeps running."""
NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Before the first communicator: torch's watchdog ends a process that has met a dead peer, also one that recovered."""
PATIENCE = {
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
    "NCCL_RUNTIME_CONNECT": "0",
}
"""Unless they are set: how many seconds a communicator that is being made, and whoever waits for torch's lock on it,
waits for a peer that is gone (by default half an hour); and that peers connect then, not in its first use."""


EDGE_CTAS = 4
"""Blocks of an NCCL kernel between two stages: it holds as many SMs while it waits for its peer. Two to four are enough
for an activation: an estimate, not measured."""


def _unheard(begun: Backend) -> None:
    """Nobody is there to abort it."""


@dataclass(frozen=True)
class Role:
    """A communicator's place in the plan, for back ends that treat communicators differently; gloo does not.

    `ranks`: numbers of its ranks in the plan. `parent` and `colour`: the connected communicator that it is split from,
    of which every rank splits at the same time, and its number there; without a parent it is made by itself. `begun`
    hears of it as soon as it can be aborted, which is before it is connected.
    """

    use: Use = "bulk"
    ranks: tuple[int, ...] = ()
    parent: Backend | None = None
    colour: int = 0
    begun: Callable[[Backend], None] = _unheard


ALONE = Role()
"""Of a communicator that belongs to no plan."""


class BackEnd(ABC):
    """One kind, and the device that it works on."""

    name: ClassVar[str]
    in_order: ClassVar[bool] = False
    """Whether communicators are to be built in the plan's order, one after the other."""
    has_sockets: ClassVar[bool] = True
    """Whether shutting down the sockets under its communicators sets free who waits in one."""
    scatters: ClassVar[bool] = False
    """Whether its reduce_scatter is one that a wait can be woken from."""
    aborts: ClassVar[bool] = True
    """Whether `abort` does anything."""
    timed_waits: ClassVar[bool] = True
    """Whether a wait that is given a timeout leaves the work as it was when that has passed. NCCL's blocks the host,
    counts from when the work was enqueued, and then aborts the communicator (`WorkNCCL::wait`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = ALONE) -> Backend:
        """A communicator, connected. Raises RuntimeError."""

    def sit_out(self, parent: Backend, colour: int, timeout: timedelta) -> None:
        """Take part in a split in which this rank gets nothing; where nothing is split, there is nothing to do."""
        return

    def enter_thread(self) -> None:
        """To be called by each thread that works with it."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def free_cached_memory(self) -> None:
        """Give memory back to the device that torch keeps for later: a communicator's is not torch's, and a device
        that trained at its limit has none left for it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def abort(self, communicators: Sequence[Backend], connecting: Sequence[Backend] = ()) -> bool:
        """Set free who waits in one of these, beyond what shutting down sockets does; False if that took too long.
        Nobody waits for what is still connecting: torch may hold its lock until a peer is given up (`PATIENCE`)."""
        return True


class Gloo(BackEnd):
    """Communicators that share one listening socket and have one thread each: FIFO, as NCCL's are."""

    name = "gloo"
    aborts = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        self._shared: Any = None
        self._guard = threading.Lock()

    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = ALONE) -> Backend:
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
    """Written by reading torch's and NCCL's documentation: no GPU was at hand, and none of it has run."""

    name = "nccl"
    in_order = True
    has_sockets = False
    scatters = True
    timed_waits = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        os.environ |= NO_WATCHDOG
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        version = nccl_versions.loaded()
        if version is not None and (told := nccl_versions.doubt(version, nccl_versions.files())):
            print(f"{told}; {nccl_versions.WAY_OUT}", flush=True)

    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = ALONE) -> Backend:
        """Connected at once: a communicator that is built lazily could meet others in another order.

        With `blocking`, NCCL could not be aborted in it, nor would torch know what to abort. Without, the first call
        waits until all have come. torch has no way to ask instead, and keeps its lock meanwhile: an abort then takes
        effect when a peer that is gone has been noticed (`PATIENCE`). A split keeps its parent's lock as well, and its
        child is known to nobody before it ends (`ProcessGroupNCCL::initNCCLComm`): no order of aborts shortens that.

        What computation waits for goes ahead of it on the device. Children of the world keep resources of their own:
        NCCL's shared ones (splitShare) make one abort all, and those that move state go before the others.
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
        """By a communicator of its own, which goes at once: torch's call for no colour holds the interpreter's lock
        until all have come, and this process would neither beat nor hear that it is to park."""
        self.connect(dist.HashStore(), 0, 1, timeout, Role(parent=parent, colour=colour)).abort()

    def abort(self, communicators: Sequence[Backend], connecting: Sequence[Backend] = ()) -> bool:
        """From threads of their own. All are aborted before any is waited for: a communicator that waits for another
        one's kernel ends only with it. An aborted one is released by that."""
        aborted: list[Backend] = []

        def abort(communicator: Backend) -> None:
            communicator.abort()
            aborted.append(communicator)

        threads = [begin_thread(abort, each, name="resihp-abort") for each in (*communicators, *connecting)]
        for thread in threads[: len(communicators)]:
            thread.join(ABORT_S)
        return all(any(each is one for one in aborted) for each in communicators)


class NcclLike(Gloo):
    """NCCL's manners where they hurt, on gloo and CPUs, for tests.

    What fails, a connection or a communication, hangs until it is aborted, as a kernel does whose peer is dead. After
    an abort `wait` returns as if all were well, and the buffer holds no number: from that moment on, so that a peer
    which goes on is sent what is none either. Synchronous calls return nothing. A wait that is given a timeout aborts
    the communicator and raises, however short the work: NCCL's does once the timeout has passed, and the host of a real
    model is that far ahead of its device.
    """

    name = "nccl-like"
    in_order = True
    aborts = True
    timed_waits = False

    def connect(self, store: Any, index: int, size: int, timeout: timedelta, role: Role = ALONE) -> Backend:
        mannered = _Mannered()
        role.begun(mannered)
        mannered.connect(partial(super().connect, store, index, size, timeout, role))
        return mannered

    def abort(self, communicators: Sequence[Backend], connecting: Sequence[Backend] = ()) -> bool:
        for communicator in (*communicators, *connecting):
            communicator.abort()
        return True


class _UnderWay:
    """Work that has begun on one communicator, and whether that was aborted. Work holds this, and not the communicator:
    the garbage collector would destroy that, and wait for its threads, in whatever thread it comes by."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self._works: set[_MannersOfWork] = set()
        self._guard = threading.Lock()

    def add(self, work: _MannersOfWork) -> None:
        with self._guard:
            if not self.aborted.is_set():
                self._works.add(work)

    def remove(self, work: _MannersOfWork) -> None:
        with self._guard:
            self._works.discard(work)

    def abort(self) -> None:
        self.aborted.set()
        with self._guard:
            while self._works:
                self._works.pop().poison()


class _Mannered:
    """One of gloo's communicators that behaves as one of NCCL's."""

    def __init__(self) -> None:
        self._gloo: Backend = None
        self._under_way = _UnderWay()
        self._settled = threading.Event()
        """It is connected, or aborted."""

    def connect(self, connect: Callable[[], Backend]) -> None:
        """Hangs until it is aborted where gloo's fails. Raises RuntimeError then."""
        begin_thread(self._connect, connect, name="resihp-gloo")
        self._settled.wait()
        if self._under_way.aborted.is_set():
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
        self._under_way.abort()
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
            work = None  # seen by nobody before somebody asks
        mannered = _MannersOfWork(work, written, self._under_way)
        self._under_way.add(mannered)
        if options and getattr(options[0], "asyncOp", True) is False:
            mannered.wait()
            return None
        return mannered


class _MannersOfWork:
    """Work that tells of no failure."""

    def __init__(self, work: Any, written: list[torch.Tensor], under_way: _UnderWay) -> None:
        self._work = work
        self._written = written
        self._under_way = under_way

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What depends on the result comes after it; whether there is one, nobody says. Raises RuntimeError if it is
        given a timeout."""
        if timeout is not None:
            self._under_way.abort()
            raise RuntimeError(f"timed out: waited for {timeout.total_seconds()} s, and aborted the communicator")
        if self._work is None or not self._finished():
            self._under_way.aborted.wait()  # a dead peer's kernel never ends
            self.poison()
        self._under_way.remove(self)
        return True

    def poison(self) -> None:
        for tensor in self._written:
            tensor.detach().fill_(math.nan if tensor.is_floating_point() else -1)

    def _finished(self) -> bool:
        glance = timedelta(seconds=0.1)
        while not self._under_way.aborted.is_set():
            try:
                return bool(self._work.wait(glance))
            except RuntimeError as error:
                if "Operation timed out" not in str(error):
                    return False
        return False

    def is_completed(self) -> bool:
        return self._under_way.aborted.is_set() or (self._work is not None and bool(self._work.is_completed()))


_KINDS: dict[str, type[BackEnd]] = {kind.name: kind for kind in (Gloo, Nccl, NcclLike)}


def chosen() -> BackEnd:
    """This worker's back end. Raises ModelError for a name that is none, and for a device that is not there."""
    gpus = devices.visible()
    name = os.environ.get(BACKEND) or ("nccl" if gpus else "gloo")
    if name not in _KINDS:
        raise ModelError(f"{BACKEND}={name}: is none of {', '.join(_KINDS)}")
    if not gpus and name == "nccl":
        raise ModelError(f"{BACKEND}=nccl: no GPU is visible here; look at nvidia-smi, or choose gloo")
    if name == "nccl" and not dist.is_nccl_available():
        raise ModelError(
            f"GPUs: torch {torch.__version__} is built without NCCL, by which GPUs communicate; install a build that "
            f"has it (pytorch.org), or set {BACKEND}=gloo, which is slow"
        )
    on_gpu = gpus and name != "nccl-like"
    device = devices.own_device(gpus) if on_gpu else torch.device("cpu")
    if on_gpu and not devices.is_shared(device):
        devices.bind_near(device)
    if name == "nccl":
        devices.refuse_slices(device)
    back_end = _KINDS[name](device)
    back_end.enter_thread()
    return back_end
