"""All communicators of one epoch: built eagerly in one order, woken from outside, closed.

Which there are follows from the plan alone (`resihp.pipeline.program.memberships`), so that every rank arrives at the
same list. Each is made under its own name in the store, straight from the back end: `torch.distributed.new_group` with
local synchronisation names groups after the *number* of groups that a process has, which differs between our ranks, and
a default group would be the user's business. Used by the engine; decides nothing. The back ends are in `backends`.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from resihp.errors import CommunicatorError
from resihp.executor import backends
from resihp.executor.compute.channels import Channel, SingleFile, guarded
from resihp.executor.emulation import Wires
from resihp.executor.tensor_group import dist
from resihp.pipeline.program import GroupSpec

Store = Any
"""A torch.distributed store; which class is up to its host."""

STORE_TIMEOUT_S = 60.0
_POLL_S = 0.002
_LOOK_UP_S = 0.05
_CLOSING_S = 0.2
_ASSEMBLY_NOTICES_S = 0.2
"""A rank that waits for others to come polls; only if it is stuck in the store must the store's connection go."""


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
    """One rank's communicators of one epoch, or of a probe between two.

    `wake` may be called from any thread, all else from the rank's own.
    """

    def __init__(
        self,
        epoch: int | str,
        rank: int,
        memberships: Sequence[GroupSpec],
        timeout_s: float,
        directory: Directory,
        *,
        strict: bool = False,
        patience_s: float | None = None,
        wires: Wires | None = None,
    ) -> None:
        """`timeout_s` is the back ends' own; `patience_s`, if it is less, how long the others are waited for; `wires`
        emulates links of known speeds."""
        self._epoch, self._rank = epoch, rank
        self._patience_s = timeout_s if patience_s is None else patience_s
        self.wanted = [group for group in memberships if rank in group.ranks]
        self._strict = SingleFile() if strict else None
        self._wires = wires
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
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
        with guarded(f"communicators of epoch {self._epoch}"):
            if isinstance(store, tuple):
                store, self._store_sockets = self._directory.client(store, self._timeout)
            self._before = _tcp_sockets()
            named = dist.PrefixStore(f"epoch-{self._epoch}", store)
            self._assemble(named)
            self._past_assembly.set()
            self._channels = self._connected(named)
        with self._guard:
            self._ours = _tcp_sockets() - self._before
        self._check_awake()

    def _connected(self, store: Store) -> dict[str, Channel]:
        """All channels, made in a thread of its own, which is left behind when the rank is woken.

        A peer may die after it has told its address and before it connects: gloo then waits for it where no socket is
        that could be shut down. Raises what the back ends raise, CommunicatorError when woken.
        """
        making = _Making(self._make, store)
        while not making.done.wait(_LOOK_UP_S):
            if self._woken and not making.done.wait(_CLOSING_S):
                making.abandon()
                raise CommunicatorError(f"communicators of epoch {self._epoch}: woken while a peer was waited for")
        return making.taken()

    def _make(self, store: Store, channels: dict[str, Channel]) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a thread's own
        make = backends.nccl if self._gpu is not None else backends.Gloo()
        for group in self.wanted:
            self._check_awake()
            prefix = dist.PrefixStore(group.name, store)
            index = group.ranks.index(self._rank)
            backend = make(prefix, index, len(group.ranks), self._timeout)
            wire = None if self._wires is None else self._wires.of(group)
            channels[group.name] = Channel(backend, lambda: self._woken, self._strict, wire)
            del backend  # it has one owner

    def _assemble(self, store: Store) -> None:
        """Wait, here and awake, until all members have come: the back ends' own wait cannot be interrupted."""
        store.set(f"here/{self._rank}", "1")
        peers = {rank for group in self.wanted for rank in group.ranks}
        keys = [f"here/{rank}" for rank in sorted(peers)]
        limit = time.monotonic() + self._patience_s
        while keys and not store.check(keys):
            self._check_awake()
            if time.monotonic() > limit:
                raise CommunicatorError(f"epoch {self._epoch}: not all of ranks {sorted(peers)} came in time")
            time.sleep(_POLL_S)

    def _check_awake(self) -> None:
        if self._woken:
            raise CommunicatorError(f"communicators of epoch {self._epoch}: woken")

    # --- who is who -------------------------------------------------------------------------------------------

    def channel(self, name: str) -> Channel:
        """The communicator of that name. Raises CommunicatorError if it is closed, or was never built."""
        try:
            return self._channels[name]
        except KeyError:
            raise CommunicatorError(f"rank {self._rank}: no communicator {name} in epoch {self._epoch}") from None

    @property
    def world(self) -> Channel | None:
        """All active ranks; None when there is only one, or this rank is not active."""
        return self._channels.get("world")

    def find(self, name: str) -> Channel | None:
        return self._channels.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the communicators that this rank belongs to."""
        return tuple(self._channels)

    def release(self, prefix: str) -> None:
        """Let go of the communicators whose names begin so, once nobody uses them any more."""
        going = {name: self._channels.pop(name) for name in list(self._channels) if name.startswith(prefix)}
        if going:
            _let_go(going)

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
        if torch.cuda.is_available():  # never run so far: see `backends`
            backends.abort_all([channel.backend for channel in list(self._channels.values())])
            return
        _shut_down(ours or set())

    def close(self) -> None:
        """Let go of everything. Safe after `wake`, after failures, and twice. Peers that still wait for us fail."""
        self.wake()
        channels, self._channels = self._channels, {}
        if self._strict is not None:
            self._strict.close()
        _let_go(channels)


class _Making:
    """Back ends being made, by a thread that owns them until they are taken; what nobody takes, it destroys itself."""

    def __init__(self, make: Callable[[Store, dict[str, Channel]], None], store: Store) -> None:
        self.done = threading.Event()
        self._guard = threading.Lock()
        self._abandoned = False
        self._channels: dict[str, Channel] = {}
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(make, store), name="resihp-connecting", daemon=True).start()

    def _run(self, make: Callable[[Store, dict[str, Channel]], None], store: Store) -> None:
        try:
            make(store, self._channels)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            self._error = error
        with self._guard:
            self.done.set()
            if not self._abandoned:
                return
        self._destroy()

    def _destroy(self) -> None:
        going = [channel.detach() for channel in self._channels.values()]
        self._channels.clear()
        going.clear()

    def abandon(self) -> None:
        """Nobody waits any more."""
        with self._guard:
            self._abandoned = True
            left = self.done.is_set()
        if left:
            _let_go(self._channels)

    def taken(self) -> dict[str, Channel]:
        """The channels, which are the caller's from now on. Raises what making them raised."""
        if self._error is not None:
            error, self._error = self._error, None
            _let_go(self._channels)
            raise error
        return self._channels


def _let_go(channels: dict[str, Channel]) -> None:
    """Destroy back ends, without waiting for one that is stuck.

    A back end joins its threads when it goes, and one may be in the middle of a message (`Transfer.wait`): then it is
    left behind, until gloo's own timeout ends it. Nothing else may hold a back end, or the garbage collector would
    destroy it, and block, in any thread at any time.
    """
    going = [channel.detach() for channel in channels.values()]
    closing = threading.Thread(target=going.clear, name="resihp-closing", daemon=True)
    closing.start()
    closing.join(_CLOSING_S)


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
