"""All communicators of one epoch: which there are, built eagerly in one order, woken from outside, closed.

Derived from the plan alone, so that every rank arrives at the same list: tensor-parallel groups, one communicator for
each directed pipeline edge, one for each set of ranks that sum gradients, and the world of active ranks. Each is made
under its own name in the store, straight from the back end: `torch.distributed.new_group` with local synchronisation
names groups after the *number* of groups that a process has, which differs between our ranks, and a default group
would be the user's business. Used by the engine; decides nothing.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from resihp.errors import CommunicatorError, LayoutError
from resihp.executor.tensor_group import Backend, dist
from resihp.plan import Plan

Store = Any
"""A torch.distributed store; which class is up to its host."""

STORE_TIMEOUT_S = 60.0
_POLL_S = 0.002
_GLANCE = timedelta(seconds=0.1)
_TIMED_OUT = "Operation timed out"
_CLOSING_S = 0.2
_ASSEMBLY_NOTICES_S = 0.2
"""A rank that waits for others to come polls; only if it is stuck in the store must the store's connection go."""


@dataclass(frozen=True)
class Membership:
    """One communicator: its name within the epoch, and its ranks in order (sender before receiver for an edge)."""

    name: str
    ranks: tuple[int, ...]


class Transfer:
    """A collective or a pipeline transfer under way."""

    def __init__(self, work: Any, woken: Callable[[], bool]) -> None:
        self._work = work
        self._woken = woken

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it. Raises CommunicatorError once the rank has been woken, RuntimeError for what the back end says.

        Shutting down gloo's sockets wakes its waiters at once, with one exception: gloo (transport/tcp/pair.cc,
        signalException) forgets whoever is in the middle of a message. So a wait looks up now and then.
        """
        if torch.cuda.is_available():
            return bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        limit = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            try:
                return bool(self._work.wait(_GLANCE))
            except RuntimeError as error:
                if _TIMED_OUT not in str(error) or (limit is not None and time.monotonic() > limit):
                    raise
            if self._woken():
                raise CommunicatorError("woken in the middle of a message")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class Channel:
    """One communicator. Everything on it is a collective of the back end's own thread, which a wait can outlive."""

    def __init__(self, backend: Backend, woken: Callable[[], bool]) -> None:
        self.backend = backend
        self._woken = woken

    def size(self) -> int:
        return int(self.backend.size())

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Transfer:
        return Transfer(self.backend.allreduce(tensors, *options), self._woken)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Transfer:
        return Transfer(self.backend.allgather(outputs, inputs), self._woken)

    def broadcast(self, tensor: Tensor) -> Transfer:
        """From the first rank to the others."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return Transfer(self.backend.broadcast([tensor], options), self._woken)


@dataclass(frozen=True)
class Edge:
    """One direction between two ranks, sender first. Transfers complete in the order in which they were begun."""

    channel: Channel

    def send(self, tensor: Tensor) -> Transfer:
        with guarded("pipeline send"):
            return self.channel.broadcast(tensor)

    def receive(self, tensor: Tensor) -> Transfer:
        with guarded("pipeline receive"):
            return self.channel.broadcast(tensor)


def memberships(plan: Plan, gradient_sets: Sequence[tuple[int, ...]]) -> tuple[Membership, ...]:
    """Every communicator of a plan, in the one order in which all ranks build those they belong to.

    Raises LayoutError if neighbouring stages of a replica have unequal tensor-parallel degrees.
    """
    groups = [Membership("world", plan.layout.active)] if len(plan.layout.active) > 1 else []
    for d, replica in enumerate(plan.layout.replicas):
        for s, stage in enumerate(replica.stages):
            if stage.tp > 1:
                groups.append(Membership(f"tensor/{d}/{s}", stage.ranks))
            if s + 1 == len(replica.stages):
                continue
            following = replica.stages[s + 1]
            if following.tp != stage.tp:
                raise LayoutError(
                    f"replica {d}: stages {s} and {s + 1} have tensor-parallel degrees {stage.tp} and "
                    f"{following.tp}; they must be equal"
                )
            for low, high in zip(stage.ranks, following.ranks, strict=True):
                groups.append(Membership(f"forward/{low}-{high}", (low, high)))
                groups.append(Membership(f"backward/{high}-{low}", (high, low)))
    for ranks in dict.fromkeys(tuple(sorted(owners)) for owners in gradient_sets):
        if 1 < len(ranks) < len(plan.layout.active):
            groups.append(Membership("gradients/" + "-".join(map(str, ranks)), ranks))
    return tuple(groups)


class Directory:
    """A rank's connections to stores, kept from epoch to epoch.

    torch asks the name service for the name of each store that it connects to; where that does not answer, the first
    connection of a process takes 5 s (1 s with RES_OPTIONS="timeout:1 attempts:1"), which no recovery should pay.
    """

    def __init__(self) -> None:
        self._clients: dict[tuple[str, int], tuple[Store, set[int]]] = {}

    def client(self, address: tuple[str, int], timeout: timedelta) -> tuple[Store, set[int]]:
        """A client of the TCPStore at (host, port), and the inodes of its sockets. Raises RuntimeError."""
        if address not in self._clients:
            before = _tcp_sockets()
            # Nothing can wake a rank that looks for a store which is gone, so it does not look for long.
            limit = min(timeout, timedelta(seconds=STORE_TIMEOUT_S))
            store = dist.TCPStore(*address, None, False, timeout=limit)
            self._clients[address] = (store, _tcp_sockets() - before)
        return self._clients[address]

    def forget(self, address: tuple[str, int]) -> None:
        """Connect anew the next time: the connection may be what failed, or was shut down by `wake`."""
        self._clients.pop(address, None)


class Communicators:
    """One rank's communicators of one epoch. `wake` may be called from any thread, all else from the rank's own."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        gradient_sets: Sequence[tuple[int, ...]],
        timeout_s: float,
        directory: Directory,
    ) -> None:
        place = plan.layout.place(rank)
        assert place is not None, "a standby rank has no communicators"
        self._plan, self._rank, self._place = plan, rank, place
        self._wanted = [group for group in memberships(plan, gradient_sets) if rank in group.ranks]
        self._timeout = timedelta(seconds=timeout_s)
        self._directory = directory
        self._store_sockets: set[int] = set()
        self._channels: dict[str, Channel] = {}
        self._before: set[int] | None = None
        """Inodes of the TCP sockets that were there before us; None until we begin."""
        self._ours: set[int] | None = None
        """Inodes of our TCP sockets; None until all are built."""
        self._guard = threading.Lock()
        self._woken = False
        self._past_assembly = threading.Event()

    def open(self, store: Store | tuple[str, int]) -> None:
        """Build everything, waiting for the other ranks. `store` is a store, or (host, port) of a TCPStore.

        Raises CommunicatorError when a peer does not come in time, or when woken.
        """
        try:
            self._build(store)
        except CommunicatorError:
            if isinstance(store, tuple):
                self._directory.forget(store)
            self._check_awake()  # the better reason
            raise
        finally:
            self._past_assembly.set()

    def _build(self, store: Store | tuple[str, int]) -> None:
        with guarded(f"communicators of epoch {self._plan.epoch}"):
            if isinstance(store, tuple):
                store, self._store_sockets = self._directory.client(store, self._timeout)
            self._before = _tcp_sockets()
            named = dist.PrefixStore(f"epoch-{self._plan.epoch}", store)
            self._assemble(named)
            self._past_assembly.set()
            make = _nccl if torch.cuda.is_available() else _Gloo()
            for group in self._wanted:
                self._check_awake()
                prefix = dist.PrefixStore(group.name, named)
                index = group.ranks.index(self._rank)
                backend = make(prefix, index, len(group.ranks), self._timeout)
                self._channels[group.name] = Channel(backend, lambda: self._woken)
        with self._guard:
            self._ours = _tcp_sockets() - self._before
        self._check_awake()

    def _assemble(self, store: Store) -> None:
        """Wait, here and awake, until all members have come: the back ends' own wait cannot be interrupted."""
        store.set(f"here/{self._rank}", "1")
        peers = {rank for group in self._wanted for rank in group.ranks}
        keys = [f"here/{rank}" for rank in sorted(peers)]
        limit = time.monotonic() + self._timeout.total_seconds()
        while keys and not store.check(keys):
            self._check_awake()
            if time.monotonic() > limit:
                raise CommunicatorError(f"epoch {self._plan.epoch}: not all of ranks {sorted(peers)} came in time")
            time.sleep(_POLL_S)

    def _check_awake(self) -> None:
        if self._woken:
            raise CommunicatorError(f"communicators of epoch {self._plan.epoch}: woken")

    # --- who is who -------------------------------------------------------------------------------------------

    @property
    def world(self) -> Channel | None:
        """All active ranks; None when there is only one."""
        return self._channels.get("world")

    @property
    def tensor(self) -> Channel | None:
        return self._channels.get(f"tensor/{self._place.replica}/{self._place.stage}")

    def gradients(self, owners: tuple[int, ...]) -> Channel:
        name = "gradients/" + "-".join(map(str, sorted(owners)))
        return self._channels[name] if name in self._channels else self._channels["world"]

    def edge(self, direction: str, *, outgoing: bool) -> Edge | None:
        """The edge "forward" or "backward" on which this rank sends or receives; None at the pipeline's ends."""
        for group in self._wanted:
            if group.name.startswith(f"{direction}/") and group.ranks[0 if outgoing else 1] == self._rank:
                return Edge(self._channels[group.name])
        return None

    # --- the end ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make whatever the rank waits for fail at once, by shutting down the sockets under it. From any thread.

        On gloo only this works: aborting a group does not wake its waiters. Sockets that were there before, the
        store's and other people's, are left alone. Idempotent.
        """
        self._woken = True
        if self._before is not None:
            self._past_assembly.wait(_ASSEMBLY_NOTICES_S)
        with self._guard:
            ours = self._ours
            if ours is None and self._before is not None:  # still building: then our connection to the store, too
                ours = _tcp_sockets() - self._before | self._store_sockets
        if torch.cuda.is_available():  # untested: NCCL is woken by abort, which is safe from another thread
            for channel in list(self._channels.values()):
                channel.backend.abort()
            return
        _shut_down(ours or set())

    def close(self) -> None:
        """Let go of everything. Safe after `wake`, after failures, and twice. Peers that still wait for us fail."""
        self.wake()
        channels, self._channels = self._channels, {}
        # A back end joins its threads when it goes, and one may be stuck in the middle of a message (`Transfer.wait`):
        # then it is left behind, until gloo's own timeout ends it.
        closing = threading.Thread(target=channels.clear, name="resihp-closing", daemon=True)
        closing.start()
        closing.join(_CLOSING_S)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turn a back end's errors, which are RuntimeErrors of its own, into CommunicatorError."""
    try:
        yield
    except CommunicatorError:
        raise
    except RuntimeError as error:
        raise CommunicatorError(f"{what}: {error}") from error


class _Gloo:
    """Makes gloo back ends that share one listening socket and have one thread each: FIFO, as NCCL's are."""

    def __init__(self) -> None:
        gloo = dist.ProcessGroupGloo
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        self._device = gloo.create_device(interface=interface) if interface else gloo.create_default_device()

    def __call__(self, store: Store, index: int, size: int, timeout: timedelta) -> Backend:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._threads = 1
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, index, size, options)


def _nccl(store: Store, index: int, size: int, timeout: timedelta) -> Backend:
    """Untested: written by reading."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, index, size, options)


def _tcp_sockets() -> set[int]:
    """Inodes of this process's connected TCP sockets."""
    found = set()
    for inode, held in _sockets():
        with held:
            if _connected(held):
                found.add(inode)
    return found


def _shut_down(inodes: set[int]) -> None:
    for inode, held in _sockets():
        with held:
            if inode in inodes and _connected(held):
                try:
                    held.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # closed by its peer meanwhile


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """(inode, duplicate) of every open socket; duplicated first, so that a number reused meanwhile does no harm."""
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:
            continue
        status = os.fstat(duplicate)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(duplicate)
            continue
        yield status.st_ino, socket.socket(fileno=duplicate)


def _connected(held: socket.socket) -> bool:
    if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
        return False
    try:
        held.getpeername()
    except OSError:
        return False
    return True
