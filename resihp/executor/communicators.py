"""All communicators of one epoch on one rank: builds them eagerly, wakes their waits from another thread, closes them.

The plan alone determines the list of communicators (`resihp.pipeline.program.memberships`), so every rank derives the
same list. Each communicator has a name of its own and is created directly from the back end.
`torch.distributed.new_group` is not used: with local synchronisation, it names groups after the *number* of groups in a
process, which differs between ranks, and the default group belongs to the user. NCCL's communicators are split from the
world communicator in one order that all ranks share (`resihp.pipeline.splits`), since any other order deadlocks. Each
gloo communicator waits only for its own peers, so all of them are built at the same time, and their messages travel
through the supervisor in a single round trip. Used by the engine; decides nothing. The back ends are in `backends`. The
stores through which ranks find each other are in `group_store`.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from datetime import timedelta
from functools import partial

from resihp.errors import CommunicatorError
from resihp.executor.backends import BackEnd, Role
from resihp.executor.compute.channels import Channel, SingleFile
from resihp.executor.emulation import Wires
from resihp.executor.group_store import JoinedMeeting, MeetingPlace, Store
from resihp.executor.tensor_group import Backend, guarded
from resihp.pipeline.program import WORLD_GROUP, GroupSpec
from resihp.pipeline.splits import Split, steps
from resihp.protocol.messages import ABORT_STATUS, MeetingId
from resihp.worker.leaving import begin_thread

COMMUNICATION_TIMEOUT_S = 1800.0
"""Time limit of collectives in the back end. The supervisor detects hangs much sooner and wakes the blocked ranks."""
_POLL_S = 0.05
_CLOSING_S = 0.2
_GRACE_S = 1.0
"""Seconds by which a wait in a store times out before the wait in this module, since the store's error names the
missing ranks."""


class Communicators:
    """One rank's communicators of one epoch, or of one probe.

    Any thread may call `wake`; only the rank's own thread may call the other methods.
    """

    def __init__(
        self,
        meeting: MeetingId,
        rank: int,
        memberships: Sequence[GroupSpec],
        timeout_s: float,
        back_end: BackEnd,
        *,
        strict: bool = False,
        patience_s: float | None = None,
        wires: Wires | None = None,
    ) -> None:
        """`timeout_s` is the time limit of the back end. `patience_s` limits the wait for other ranks while
        communicators are built; it is `timeout_s` by default. `wires` emulates links of known speeds."""
        self._meeting, self._rank = meeting, rank
        self._patience_s = timeout_s if patience_s is None else patience_s
        self.wanted = [group for group in memberships if rank in group.ranks]
        self._groups = memberships
        self._strict = SingleFile() if strict else None
        self._wires = wires
        self._back_end = back_end
        self._timeout = timedelta(seconds=timeout_s)
        self._meeting_joined: JoinedMeeting | None = None
        self._channels: dict[str, Channel] = {}
        self._connecting: dict[str, Backend] = {}
        """Back ends that can be aborted although others are still being built: other ranks may already wait in them."""
        self._before: set[int] | None = None
        """Inodes of the TCP sockets that existed before the communicators' own; None until building begins."""
        self._ours: set[int] | None = None
        """Inodes of the communicators' TCP sockets; None until all communicators are built."""
        self._guard = threading.Lock()
        self._aborting: list[threading.Thread] = []
        self._woken = False
        self._reason = "woken"

    def open(self, rendezvous: MeetingPlace) -> None:
        """Build all communicators, waiting for the other ranks.

        Raises CommunicatorError if a peer does not arrive in time, or after `wake`.
        """
        try:
            with guarded(f"communicators of {self._meeting}"):
                self._before = _tcp_sockets() if self._back_end.has_sockets else set()
                self._meeting_joined = rendezvous.attend(
                    self._meeting, [group.name for group in self.wanted], self._patience_s
                )
                self._channels = self._connected(self._meeting_joined)
                self._connecting.clear()
        except CommunicatorError:
            self.check_awake()  # the reason of a wake-up explains more
            raise
        with self._guard:
            self._ours = _tcp_sockets() - self._before if self._back_end.has_sockets else set()
        self.check_awake()

    def _connected(self, joined: JoinedMeeting) -> dict[str, Channel]:
        """Build all channels and return them by name. The threads that build them are abandoned after `wake`.

        A peer may die after publishing its address and before connecting. gloo then waits for it without a socket that
        could be shut down. A wait in a store has a timeout, but the first rank of an NCCL communicator waits outside
        the store for peers that may never arrive. Raises the exceptions of the back ends, and CommunicatorError after
        `wake`.
        """
        in_order = self._back_end.in_order or self._strict is not None or not joined.at_once
        rows = [steps(self._groups, self._rank)] if in_order else [[Split(group)] for group in self.wanted]
        making = _ChannelBuilder(partial(self._make, joined, []), rows)
        counted, since = 0, time.monotonic()
        while not making.done.wait(_POLL_S):
            if making.made != counted:
                counted, since = making.made, time.monotonic()
            elif not self._woken and time.monotonic() - since > self._patience_s + _GRACE_S:
                self._reason = f"not all ranks came in time ({self._patience_s:g} s)"
                self.wake()
            if self._woken and not making.done.wait(_CLOSING_S):
                making.abandon()
                raise CommunicatorError(f"communicators of {self._meeting}: woken while a peer was waited for")
        made = making.taken()
        return {group.name: made[group.name] for group in self.wanted}

    def _make(self, joined: JoinedMeeting, worlds: list[Channel], step: Split) -> Channel | None:
        """Build a channel; return None for a split without this rank. `worlds` contains the world channel once it is
        built, from which others are split."""
        self.check_awake()
        self._back_end.enter_thread()
        group = step.group
        if group is None:
            self._back_end.sit_out(worlds[0].backend, step.colour or 0, self._timeout)
            return None
        store = joined.store(group.name)
        wire = None if self._wires is None else self._wires.of(group)
        index, size = group.ranks.index(self._rank), len(group.ranks)
        parent = None if step.colour is None else worlds[0].backend
        begun = partial(self._connecting.__setitem__, group.name)
        role = Role(group.use, group.ranks, parent, step.colour or 0, begun)
        backend = self._back_end.connect(store, index, size, self._timeout, role)
        channel = Channel(backend, lambda: self._woken, self._strict, wire, store, type(self._back_end))
        if group.name == WORLD_GROUP:
            worlds.append(channel)
        return channel

    def settle(self) -> None:
        """Wait until all work in progress is done, including work on the device. Raises CommunicatorError after
        `wake`."""
        self._back_end.settle()
        self.check_awake()

    def check_awake(self) -> None:
        """Raise CommunicatorError after `wake`: data received since then is undefined."""
        if self._woken:
            raise CommunicatorError(f"communicators of {self._meeting}: {self._reason}")

    # --- lookup -----------------------------------------------------------------------------------------------

    def channel(self, name: str) -> Channel:
        """Return the communicator with this name. Raises CommunicatorError if it is closed or was never built."""
        try:
            return self._channels[name]
        except KeyError:
            raise CommunicatorError(f"rank {self._rank}: no communicator {name} in {self._meeting}") from None

    @property
    def world(self) -> Channel | None:
        """The communicator of all active ranks. None if only one rank is active, or if this rank is not active."""
        return self._channels.get(WORLD_GROUP)

    def find(self, name: str) -> Channel | None:
        return self._channels.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of this rank's communicators."""
        return tuple(self._channels)

    def release(self, prefix: str) -> None:
        """Release the communicators with this prefix in their names. Call this when no rank uses them any more.

        They are aborted, as in every release. If a rank destroyed a communicator, it would wait in NCCL until all other
        ranks do so, which never happens if one has died or has aborted the communicator (pull request 194775 of
        pytorch).
        """
        going = {name: self._channels.pop(name) for name in list(self._channels) if name.startswith(prefix)}
        if going:
            back_ends = [backend for channel in going.values() if (backend := channel.backend_if_open) is not None]
            _release_channels(going, self._abort_beside(back_ends, []))

    # --- the end ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make every wait of this rank fail at once, by shutting down the communicators' sockets. Any thread;
        idempotent.

        This is the only way with gloo: aborting a gloo group does not wake its waiting threads. TCP sockets that
        existed before the communicators belong to other code and are left alone.
        """
        self._woken = True
        if self._meeting_joined is not None:
            self._meeting_joined.leave()
        with self._guard:
            ours = self._ours
            if ours is None and self._before is not None and self._back_end.has_sockets:  # still building
                ours = _tcp_sockets() - self._before
        back_ends = [
            backend for channel in list(self._channels.values()) if (backend := channel.backend_if_open) is not None
        ]
        connecting = [backend for backend in list(self._connecting.values()) if backend not in back_ends]
        self._aborting += self._abort_beside(back_ends, connecting)
        _shut_down(ours or set())

    def _abort_beside(self, back_ends: list[Backend], connecting: list[Backend]) -> list[threading.Thread]:
        """Start a thread that aborts these back ends, and return it in a list. Empty if the back end does not abort."""
        if not self._back_end.aborts:
            return []
        return [begin_thread(self._abort, back_ends, connecting, name="resihp-aborting")]

    def _abort(self, back_ends: list[Backend], connecting: list[Backend]) -> None:
        """Abort back ends. Runs in its own thread, since the thread that calls `wake` also sends heartbeats and must
        not block.

        The process ends if the abort takes too long, since its device would stay occupied.
        """
        if not self._back_end.abort(back_ends, connecting):
            print(
                f"rank {self._rank}: communicators of {self._meeting} cannot be aborted: this process ends", flush=True
            )
            os._exit(ABORT_STATUS)

    def close(self) -> None:
        """Release all communicators. Safe after `wake`, after failures, and if called twice. Peers that still wait for
        this rank fail."""
        self.wake()
        channels, self._channels = self._channels, {}
        if self._strict is not None:
            self._strict.close()
        _release_channels(channels, self._aborting, self._connecting)


class _ChannelBuilder:
    """Builds channels: the splits of each row in order, each row in its own thread. Releases channels that nobody
    takes."""

    def __init__(self, make: Callable[[Split], Channel | None], rows: Sequence[Sequence[Split]]) -> None:
        self.done = threading.Event()
        """Set once all channels are built, or one has failed."""
        self._make = make
        self._guard = threading.Lock()
        self._abandoned = False
        self._under_way = len(rows)
        self.made = 0
        self._channels: dict[str, Channel] = {}
        self._error: BaseException | None = None
        if not rows:
            self.done.set()
        for row in rows:
            begin_thread(self._run, row, name="resihp-connecting")

    def _run(self, row: Sequence[Split]) -> None:
        error: BaseException | None = None
        try:
            for step in row:
                channel = self._make(step)
                if step.group is not None and channel is not None and not self._keep(step.group.name, channel):
                    return
        except BaseException as raised:  # noqa: BLE001 - `taken` raises it in the rank's thread
            error = raised
        with self._guard:
            self._under_way -= 1
            self._error = self._error or error
            if self._error is not None or not self._under_way:
                self.done.set()

    def _keep(self, name: str, channel: Channel) -> bool:
        """Store a new channel for `taken`. After `abandon`, destroy it in the calling thread instead and return
        False."""
        with self._guard:
            if not self._abandoned:
                self._channels[name] = channel
                self.made += 1
                return True
        channel.detach()  # the back end may use the channel's store until it is destroyed
        return False

    def abandon(self) -> None:
        """Release all channels, including those still under construction, because nobody waits for them any more."""
        with self._guard:
            self._abandoned = True
            made, self._channels = self._channels, {}
        _release_channels(made)

    def taken(self) -> dict[str, Channel]:
        """Return the channels; the caller owns them from now on. Raises the error of the first channel that failed."""
        if self._error is not None:
            error, self._error = self._error, None
            self.abandon()
            raise error
        return self._channels


def _release_channels(
    channels: dict[str, Channel],
    aborting: Sequence[threading.Thread] = (),
    connecting: MutableMapping[str, Backend] | None = None,
) -> None:
    """Destroy back ends after their abort, without waiting for one that is stuck.

    A back end joins its threads when it is destroyed, and one of them may be in the middle of a message
    (`Transfer.wait`). Such a back end is left alone until gloo's own timeout ends it. No other code may hold a
    reference to a back end: otherwise the garbage collector might destroy it, and block, in any thread at any time.
    """
    stores = [channel.store for channel in channels.values()]  # back ends may use their stores until they are destroyed
    going = [channel.detach() for channel in channels.values()]
    if connecting is not None:
        going += [connecting.pop(name) for name in list(connecting)]
    begin_thread(_destroy, going, stores, aborting, name="resihp-closing").join(_CLOSING_S)


def _destroy(going: list[Backend | None], stores: list[Store], aborting: Sequence[threading.Thread]) -> None:
    for thread in aborting:  # each holds a reference to the back ends that it aborts
        thread.join()
    going.clear()
    stores.clear()


def _tcp_sockets() -> set[int]:
    """Return the inodes of this process's connected TCP sockets."""
    inodes = set()
    for inode, duplicate in _sockets():
        with duplicate:
            if _connected(duplicate):
                inodes.add(inode)
    return inodes


def _shut_down(inodes: set[int]) -> None:
    for inode, duplicate in _sockets():
        with duplicate:
            if inode in inodes and _connected(duplicate):
                try:
                    duplicate.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # closed by its peer meanwhile


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield (inode, duplicate) of every open socket. The descriptor is duplicated first, so that its reuse does no
    harm."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:
            continue
        status = os.fstat(copy)
        if not stat.S_ISSOCK(status.st_mode):
            os.close(copy)
            continue
        yield status.st_ino, socket.socket(fileno=copy)


def _connected(duplicate: socket.socket) -> bool:
    if duplicate.family not in (socket.AF_INET, socket.AF_INET6) or duplicate.type != socket.SOCK_STREAM:
        return False
    try:
        duplicate.getpeername()
    except OSError:
        return False
    return True
