"""The `torch.distributed.Store` of a communicator, and the transports behind it.

gloo and NCCL exchange addresses and ids through such a store. Under an agent, it is a `GroupStore`, on top of one group
of a rendezvous (`resihp.protocol.rendezvous`). Under torchrun, it is torchrun's own store. Created by `trainer` and
`supervised`, used by `communicators`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from resihp.executor.tensor_group import dist
from resihp.protocol.messages import MeetingId
from resihp.protocol.rendezvous import Attendance

Store = Any
"""A torch.distributed.Store."""


class JoinedMeeting(Protocol):
    """A rendezvous that this rank has joined."""

    @property
    def at_once(self) -> bool:
        """Whether several threads may wait at the same time in the stores of this rendezvous."""

    def store(self, group: str) -> Store:
        """Return the store for the communicator with this name."""

    def leave(self) -> None:
        """Make all waits in these stores raise, if the kind of store allows it. Any thread; idempotent."""


class MeetingPlace(Protocol):
    """The service by which ranks join a rendezvous to build communicators."""

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting: ...


class GroupStore(dist.Store):
    """The store of one communicator under an agent. Join its rendezvous (`attend`) first.

    gloo and NCCL in torch 2.13 call `set`, `get`, `wait` and `multi_get` while they connect. NCCL's monitor calls
    `check` once a second, which is answered locally. A key can be set only once. A wait raises CommunicatorError after
    the time limit of the rank, or as soon as the rank is woken; it does not hold the interpreter lock. torch finds the
    Python part of a store only while a reference to it exists, so `channels.Channel` has one.
    """

    def __init__(self, attendance: Attendance, group: str) -> None:
        super().__init__()
        self._attendance = attendance
        self._group = group

    def clone(self) -> GroupStore:
        return self

    def set(self, key: str, value: bytes | str) -> None:
        self._attendance.publish(self._group, {key: _bytes(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._attendance.publish(self._group, dict(zip(keys, map(_bytes, values), strict=True)))

    def get(self, key: str) -> bytes:
        return self._attendance.values(self._group, [key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._attendance.values(self._group, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._attendance.values(self._group, keys, None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return self._attendance.has(self._group, keys)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` exist. False, since keys are set once and never appended
        to."""
        return False


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AgentRendezvous:
    """Rendezvous over the socket to the agent. `attend` is `resihp.protocol.client.AgentClient.attend`."""

    def __init__(self, attend: Callable[[MeetingId, Sequence[str], float], Attendance]) -> None:
        self._attend = attend

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting:
        return _AgentMeeting(self._attend(meeting, groups, patience_s))


class _AgentMeeting:
    at_once = True

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance

    def store(self, group: str) -> Store:
        return GroupStore(self._attendance, group)

    def leave(self) -> None:
        self._attendance.leave()


class TorchRendezvous:
    """Rendezvous in torchrun's store, which outlives the ranks. Waits in this store cannot be woken."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting:
        return _StoreMeeting(dist.PrefixStore(str(meeting), self._store))


class _StoreMeeting:
    at_once = False
    """False: a thread that waits in torch's store occupies its only connection, so that no other thread can use it."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def store(self, group: str) -> Store:
        return dist.PrefixStore(group, self._store)

    def leave(self) -> None:
        pass
