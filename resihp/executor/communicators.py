"""All communicators of one epoch: built eagerly, woken from outside, closed.

Which there are follows from the plan alone (`resihp.pipeline.program.memberships`), so that every rank arrives at the
same list. Each is made under its own name, straight from the back end: `torch.distributed.new_group` with local
synchronisation names groups after the *number* of groups that a process has, which differs between our ranks, and a
default group would be the user's business. NCCL's are split from the world's in one order that all ranks have
(`resihp.pipeline.splits`), since it deadlocks on any other. gloo's wait for nobody but their own peers, and are built
at the same time: what their ranks tell each other goes by way of the supervisor, there and back once instead of once
for each. Used by the engine; decides nothing. The back ends are in `backends`, the stores in which they find each other
in `group_store`.
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
from resihp.executor.group_store import Attended, MeetingPlace, Store
from resihp.executor.tensor_group import Backend, guarded
from resihp.pipeline.program import WORLD_GROUP, GroupSpec
from resihp.pipeline.splits import Split, steps
from resihp.protocol.messages import ABORT_STATUS, MeetingId
from resihp.worker.leaving import begin_thread

_LOOK_UP_S = 0.05
_CLOSING_S = 0.2
_GRACE_S = 1.0
"""By which patience in a store, which says who is missing, ends before it does here."""


class Communicators:
    """One rank's communicators of one epoch, or of a probe between two.

    `wake` may be called from any thread, all else from the rank's own.
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
        """`timeout_s` is the back ends' own; `patience_s`, if it is less, how long the others are waited for; `wires`
        emulates links of known speeds."""
        self._meeting, self._rank = meeting, rank
        self._patience_s = timeout_s if patience_s is None else patience_s
        self.wanted = [group for group in memberships if rank in group.ranks]
        self._groups = memberships
        self._strict = SingleFile() if strict else None
        self._wires = wires
        self._back_end = back_end
        self._timeout = timedelta(seconds=timeout_s)
        self._attended: Attended | None = None
        self._channels: dict[str, Channel] = {}
        self._connecting: dict[str, Backend] = {}
        """What can be aborted while not all are connected: those that are already may be what the others wait in."""
        self._before: set[int] | None = None
        """Inodes of the TCP sockets that were there before us; None until we begin."""
        self._ours: set[int] | None = None
        """Inodes of our TCP sockets; None until all are built."""
        self._guard = threading.Lock()
        self._aborting: list[threading.Thread] = []
        self._woken = False
        self._reason = "woken"

    def open(self, rendezvous: MeetingPlace) -> None:
        """Build everything, waiting for the other ranks.

        Raises CommunicatorError when a peer does not come in time, or when woken.
        """
        try:
            with guarded(f"communicators of {self._meeting}"):
                self._before = _tcp_sockets() if self._back_end.has_sockets else set()
                self._attended = rendezvous.attend(
                    self._meeting, [group.name for group in self.wanted], self._patience_s
                )
                self._channels = self._connected(self._attended)
                self._connecting.clear()
        except CommunicatorError:
            self.check_awake()  # the better reason
            raise
        with self._guard:
            self._ours = _tcp_sockets() - self._before if self._back_end.has_sockets else set()
        self.check_awake()

    def _connected(self, attended: Attended) -> dict[str, Channel]:
        """All channels, made in threads of their own, which are left behind when the rank is woken.

        A peer may die after it has told its address and before it connects: gloo then waits for it where no socket is
        that could be shut down. Whoever waits in a store loses patience there; NCCL's first rank waits elsewhere, for
        peers that may never come. Raises what the back ends raise, CommunicatorError when woken.
        """
        in_order = self._back_end.in_order or self._strict is not None or not attended.at_once
        rows = [steps(self._groups, self._rank)] if in_order else [[Split(group)] for group in self.wanted]
        making = _Making(partial(self._make, attended, []), rows)
        counted, since = 0, time.monotonic()
        while not making.done.wait(_LOOK_UP_S):
            if making.made != counted:
                counted, since = making.made, time.monotonic()
            elif not self._woken and time.monotonic() - since > self._patience_s + _GRACE_S:
                self._reason = f"not all ranks came in time, {self._patience_s:g} s"
                self.wake()
            if self._woken and not making.done.wait(_CLOSING_S):
                making.abandon()
                raise CommunicatorError(f"communicators of {self._meeting}: woken while a peer was waited for")
        made = making.taken()
        return {group.name: made[group.name] for group in self.wanted}

    def _make(self, attended: Attended, worlds: list[Channel], step: Split) -> Channel | None:
        """A channel, or None where others split. `worlds`: the one that is split, once it is there."""
        self.check_awake()
        self._back_end.enter_thread()
        group = step.group
        if group is None:
            self._back_end.sit_out(worlds[0].backend, step.colour or 0, self._timeout)
            return None
        store = attended.store(group.name)
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
        """Wait until all that was begun is done, on the device as well. Raises CommunicatorError once woken."""
        self._back_end.settle()
        self.check_awake()

    def check_awake(self) -> None:
        """Raises CommunicatorError once woken: what came since may be anything."""
        if self._woken:
            raise CommunicatorError(f"communicators of {self._meeting}: {self._reason}")

    # --- who is who -------------------------------------------------------------------------------------------

    def channel(self, name: str) -> Channel:
        """The communicator of that name. Raises CommunicatorError if it is closed, or was never built."""
        try:
            return self._channels[name]
        except KeyError:
            raise CommunicatorError(f"rank {self._rank}: no communicator {name} in {self._meeting}") from None

    @property
    def world(self) -> Channel | None:
        """All active ranks; None when there is only one, or this rank is not active."""
        return self._channels.get(WORLD_GROUP)

    def find(self, name: str) -> Channel | None:
        return self._channels.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the communicators that this rank belongs to."""
        return tuple(self._channels)

    def release(self, prefix: str) -> None:
        """Let go of the communicators whose names begin so, once nobody uses them any more.

        By aborting them, as all others are let go. A rank that destroys a communicator waits in NCCL for all others to
        do so, without end for one that has died or aborted it (pull request 194775 of pytorch).
        """
        going = {name: self._channels.pop(name) for name in list(self._channels) if name.startswith(prefix)}
        if going:
            held = [backend for channel in going.values() if (backend := channel.held) is not None]
            _let_go(going, self._abort_beside(held, []))

    # --- the end ----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make whatever the rank waits for fail at once, by shutting down the sockets under it. From any thread.

        On gloo only this works: aborting a group does not wake its waiters. Sockets that were there before, other
        people's, are left alone. Idempotent.
        """
        self._woken = True
        if self._attended is not None:
            self._attended.leave()
        with self._guard:
            ours = self._ours
            if ours is None and self._before is not None and self._back_end.has_sockets:  # still building
                ours = _tcp_sockets() - self._before
        held = [backend for channel in list(self._channels.values()) if (backend := channel.held) is not None]
        connecting = [each for each in list(self._connecting.values()) if each not in held]
        self._aborting += self._abort_beside(held, connecting)
        _shut_down(ours or set())

    def _abort_beside(self, held: list[Backend], connecting: list[Backend]) -> list[threading.Thread]:
        """The thread that aborts these; none where a back end has no aborts."""
        if not self._back_end.aborts:
            return []
        return [begin_thread(self._abort, held, connecting, name="resihp-aborting")]

    def _abort(self, held: list[Backend], connecting: list[Backend]) -> None:
        """Whoever wakes us also beats, and waits for nothing. A device that is not free again is of no use to us."""
        if not self._back_end.abort(held, connecting):
            print(
                f"rank {self._rank}: communicators of {self._meeting} cannot be aborted: this process ends", flush=True
            )
            os._exit(ABORT_STATUS)

    def close(self) -> None:
        """Let go of everything. Safe after `wake`, after failures, and twice. Peers that still wait for us fail."""
        self.wake()
        channels, self._channels = self._channels, {}
        if self._strict is not None:
            self._strict.close()
        _let_go(channels, self._aborting, self._connecting)


class _Making:
    """Channels being made, each row of groups one after the other by a thread of its own; what nobody takes, goes."""

    def __init__(self, make: Callable[[Split], Channel | None], rows: Sequence[Sequence[Split]]) -> None:
        self.done = threading.Event()
        """All are made, or one cannot be."""
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
        except BaseException as raised:  # noqa: BLE001 - whoever waits for it raises it
            error = raised
        with self._guard:
            self._under_way -= 1
            self._error = self._error or error
            if self._error is not None or not self._under_way:
                self.done.set()

    def _keep(self, name: str, channel: Channel) -> bool:
        """False if nobody waits for it any more: it has been destroyed, by the thread that made it."""
        with self._guard:
            if not self._abandoned:
                self._channels[name] = channel
                self.made += 1
                return True
        channel.detach()  # the channel holds its store, which the back end may ask to its end
        return False

    def abandon(self) -> None:
        """Nobody waits any more."""
        with self._guard:
            self._abandoned = True
            made, self._channels = self._channels, {}
        _let_go(made)

    def taken(self) -> dict[str, Channel]:
        """The channels, which are the caller's from now on. Raises what making them raised."""
        if self._error is not None:
            error, self._error = self._error, None
            self.abandon()
            raise error
        return self._channels


def _let_go(
    channels: dict[str, Channel],
    aborting: Sequence[threading.Thread] = (),
    connecting: MutableMapping[str, Backend] | None = None,
) -> None:
    """Destroy back ends once they are aborted, without waiting for one that is stuck.

    A back end joins its threads when it goes, and one may be in the middle of a message (`Transfer.wait`): then it is
    left behind, until gloo's own timeout ends it. Nothing else may hold a back end, or the garbage collector would
    destroy it, and block, in any thread at any time.
    """
    stores = [channel.store for channel in channels.values()]  # which back ends may ask to their end
    going = [channel.detach() for channel in channels.values()]
    if connecting is not None:
        going += [connecting.pop(name) for name in list(connecting)]
    begin_thread(_destroy, going, stores, aborting, name="resihp-closing").join(_CLOSING_S)


def _destroy(going: list[Backend | None], stores: list[Store], aborting: Sequence[threading.Thread]) -> None:
    for thread in aborting:  # each holds what it aborts
        thread.join()
    going.clear()
    stores.clear()


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
