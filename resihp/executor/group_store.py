"""torch's idea of a store, for the back end of one communicator, and where what is put into it goes.

gloo and NCCL tell each other addresses and ids through a `torch.distributed.Store`. Under an agent that is
`GroupStore`, behind which the words of one group of a meeting are (`resihp.protocol.rendezvous`); under torchrun it is
torchrun's own. Used by `communicators`, made by `trainer`; decides nothing.
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


class Attended(Protocol):
    """A meeting that this rank attends."""

    @property
    def at_once(self) -> bool:
        """Whether several threads may wait in its stores at the same time."""

    def store(self, group: str) -> Store:
        """What the back end of that communicator is given."""

    def leave(self) -> None:
        """Let whoever waits in one of its stores raise, if they can. From any thread; idempotent."""


class MeetingPlace(Protocol):
    """Where ranks meet."""

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> Attended: ...


class GroupStore(dist.Store):
    """What the ranks of one communicator say to each other; `attend` its meeting first.

    The calls that gloo and NCCL make in torch 2.13: `set`, `get`, `wait`, `multi_get` while they connect, `check` once
    a second by NCCL's monitor, which is answered without asking anybody. A key is set once. Waiting raises
    CommunicatorError, after the rank's own patience, or at once when it is woken; it holds no lock of the
    interpreter's. torch finds the Python half of a store only while somebody holds it: `channels.Channel` does.
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
        """Of `append`, `multi_get` and `multi_set`; nobody appends to what is set once."""
        return False


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AgentRendezvous:
    """Over the socket to the agent. `attend`: as of `resihp.protocol.client.AgentClient`."""

    def __init__(self, attend: Callable[[MeetingId, Sequence[str], float], Attendance]) -> None:
        self._attend = attend

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> Attended:
        return _OverAgent(self._attend(meeting, groups, patience_s))


class _OverAgent:
    at_once = True

    def __init__(self, attendance: Attendance) -> None:
        self._attendance = attendance

    def store(self, group: str) -> Store:
        return GroupStore(self._attendance, group)

    def leave(self) -> None:
        self._attendance.leave()


class TorchRendezvous:
    """In a store of torch's that outlives the ranks: torchrun's. Nobody can be woken there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def attend(self, meeting: MeetingId, groups: Sequence[str], patience_s: float) -> Attended:
        return _InStore(dist.PrefixStore(str(meeting), self._store))


class _InStore:
    at_once = False
    """Whoever waits in torch's store keeps its one connection, and others of the process from saying anything."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def store(self, group: str) -> Store:
        return dist.PrefixStore(group, self._store)

    def leave(self) -> None:
        pass
