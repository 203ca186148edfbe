"""The `torch.distributed.Store` of one communicator's back end, and the transport behind it.

gloo and NCCL exchange addresses and ids through such a store. Under an agent it is a `GroupStore`, which keeps the
messages of one group of a meeting (`resihp.protocol.rendezvous`); under torchrun it is torchrun's own store. Used by
`communicators`, created by `trainer`; decides nothing.
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
    """A meeting that this rank has joined."""

    @property
    def at_once(self) -> bool:
        """Whether several threads may wait in its stores at the same time."""

    def store(self, group: str) -> Store:
        """Return the store for the back end of that communicator."""

    def leave(self) -> None:
        """Make all waits in its stores raise, if the store allows that. From any thread; idempotent."""


class MeetingPlace(Protocol):
    """A place where ranks meet to build communicators."""

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting: ...


class GroupStore(dist.Store):
    """Messages between the ranks of one communicator; `attend` its meeting first.

    gloo and NCCL in torch 2.13 call `set`, `get`, `wait` and `multi_get` while they connect. NCCL's monitor calls
    `check` once a second, which is answered locally. A key is set only once. Waiting raises CommunicatorError, after
    the rank's own time limit or as soon as it is woken; meanwhile it does not hold the interpreter lock. torch finds
    the Python half of a store only while it is referenced: `channels.Channel` keeps the reference.
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
        """Return whether `append`, `multi_get` and `multi_set` exist; keys are set once, never appended to."""
        return False


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AgentRendezvous:
    """Meetings over the socket to the agent. `attend`: that of `resihp.protocol.client.AgentClient`."""

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
    """Meetings in a torch store that outlives the ranks: torchrun's. Waits there cannot be woken."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting:
        return _StoreMeeting(dist.PrefixStore(str(meeting), self._store))


class _StoreMeeting:
    at_once = False
    """A thread that waits in torch's store occupies its only connection, so no other thread can use it meanwhile."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def store(self, group: str) -> Store:
        return dist.PrefixStore(group, self._store)

    def leave(self) -> None:
        pass
