"""How ranks that build communicators learn each other's addresses: over the links that are there, and authenticated.

Whoever can rewrite an address or an NCCL id stands between two ranks and reads their gradients. So torch's own store,
which asks nobody for a key, is not used: what a rank tells its peers goes to its agent, to the supervisor, and from
there to each node on which a rank attends the same group (`messages.Attend`), once. Nobody asks again and again. A key
is set once: of two values the first stays.

`Meetings` is the table, kept by the supervisor for its nodes and by each agent for its ranks; `Attendance` is one
rank's part in a meeting. Neither knows a socket. Decides only what is over: with an epoch, the meetings of those before
it. A meeting does not outlive its supervisor: what it was for is tried again under the next epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from resihp.errors import CommunicatorError, ProtocolError
from resihp.protocol.messages import MeetingId, Publish, Said

MOST_BYTES = 64 << 20
"""Of one meeting. 16,384 ranks with six NCCL communicators each need 11 MB; gloo, whose ranks tell an address for each
peer, 8 bytes times the square of its ranks: 2,700 at most."""
MOST_PROBES = 64
"""Meetings of the newest probes that are kept: few are under way at a time."""
BATCH_BYTES = 1 << 20
"""Of one message; what a rank says at once is less."""
_ENTRY_BYTES = 200
"""What an entry costs beside its strings."""

Who = TypeVar("Who", bound=Hashable)


class _Meeting(Generic[Who]):
    def __init__(self) -> None:
        self.said: dict[str, dict[str, Said]] = {}
        self.attending: dict[str, set[Who]] = {}
        self.bytes = 0


class Meetings(Generic[Who]):
    """What was said in the meetings that are not over, and who is to hear it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._meetings: dict[MeetingId, _Meeting[Who]] = {}
        self._newest = MeetingId()

    def open(self, meeting: MeetingId) -> None:
        """It begins, and others are over; unless it is over itself."""
        if meeting in self._meetings or self._is_over(meeting):
            return
        self._newest = MeetingId(max(self._newest.epoch, meeting.epoch), max(self._newest.probe, meeting.probe))
        self._meetings = {each: kept for each, kept in self._meetings.items() if not self._is_over(each)}
        self._meetings[meeting] = _Meeting()

    def attend(self, meeting: MeetingId, who: Who, groups: Iterable[str]) -> tuple[list[Said], tuple[str, ...]]:
        """What was said before in these groups, and those of them that nobody attended yet.

        Raises ProtocolError when the meeting would hold too much.
        """
        held = self._meetings.get(meeting)
        if held is None:
            return [], ()
        before: list[Said] = []
        first = []
        for group in groups:
            if (attending := held.attending.get(group)) is None:
                self._account(meeting, held, len(group) + _ENTRY_BYTES)
                attending = held.attending[group] = set()
                first.append(group)
            attending.add(who)
            before += held.said.get(group, {}).values()
        return before, tuple(first)

    def publish(self, meeting: MeetingId, said: Iterable[Said], by: Who | None = None) -> dict[Who, list[Said]]:
        """What is new of it, for each who attends, but for `by` itself.

        Raises ProtocolError when the meeting would hold too much.
        """
        held = self._meetings.get(meeting)
        told: dict[Who, list[Said]] = {}
        if held is None:
            return told
        for each in said:
            group = held.said.setdefault(each.group, {})
            if each.key in group:
                continue
            self._account(meeting, held, len(each.group) + len(each.key) + len(each.value) + _ENTRY_BYTES)
            group[each.key] = each
            for who in held.attending.get(each.group, ()):
                if who != by:
                    told.setdefault(who, []).append(each)
        return told

    def leave(self, who: Who) -> None:
        """It hears nothing more."""
        for held in self._meetings.values():
            for attending in held.attending.values():
                attending.discard(who)

    def _is_over(self, meeting: MeetingId) -> bool:
        if meeting.epoch:
            return meeting.epoch < self._newest.epoch
        return meeting.probe <= self._newest.probe - MOST_PROBES

    def _account(self, meeting: MeetingId, held: _Meeting[Who], count: int) -> None:
        if held.bytes + count > self._most_bytes:
            raise ProtocolError(f"rendezvous of {meeting}: more than {self._most_bytes} bytes were said")
        held.bytes += count


class Pending(Generic[Who]):
    """What is to be told to each, until it is taken: all of one turn of a loop goes in one message."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Who, MeetingId], list[Said]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, who: Who, meeting: MeetingId, said: Sequence[Said]) -> None:
        if said:
            self._pending.setdefault((who, meeting), []).extend(said)

    def take(self) -> Iterator[tuple[Who, MeetingId, tuple[Said, ...]]]:
        pending, self._pending = self._pending, {}
        for (who, meeting), said in pending.items():
            for batch in batches(said):
                yield who, meeting, batch


def batches(said: Iterable[Said]) -> Iterator[tuple[Said, ...]]:
    """In messages that fit a frame."""
    batch: list[Said] = []
    size = 0
    for each in said:
        count = len(each.group) + len(each.key) + len(each.value) + _ENTRY_BYTES
        if batch and size + count > BATCH_BYTES:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(each)
        size += count
    if batch:
        yield tuple(batch)


class Attendance:
    """One rank's part in a meeting: what it says, and what it has heard. From any thread.

    `say` sends a message to the rank's agent, which has to be told of the groups (`messages.Attend`) once this is there
    to hear. Nobody is waited for beyond `patience_s` from now.
    """

    def __init__(self, meeting: MeetingId, say: Callable[[Publish], None], patience_s: float) -> None:
        self._meeting = meeting
        self._say = say
        self._limit = time.monotonic() + patience_s
        self._heard: dict[tuple[str, str], bytes] = {}
        self._changed = threading.Condition()
        self.left = False

    def publish(self, group: str, values: dict[str, bytes]) -> None:
        """Tell all who attend the group. Raises CommunicatorError for a value that fits no message."""
        said = [Said(group, key, value) for key, value in values.items()]
        for each in said:
            if len(each.value) > BATCH_BYTES:
                raise CommunicatorError(f"{self._meeting}: {len(each.value)} bytes under {group}/{each.key}")
        self.hear(said)
        for batch in batches(said):
            self._say(Publish(meeting=self._meeting, said=batch))

    def hear(self, said: Iterable[Said]) -> None:
        with self._changed:
            for each in said:
                self._heard.setdefault((each.group, each.key), each.value)
            self._changed.notify_all()

    def has(self, group: str, keys: Sequence[str]) -> bool:
        """Whether these have been heard; nobody is asked."""
        with self._changed:
            return all((group, key) in self._heard for key in keys)

    def values(self, group: str, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Wait until all have been heard. Raises CommunicatorError when that takes too long, or `leave` was called."""
        wanted = [(group, key) for key in keys]
        limit = self._limit if timeout_s is None else min(self._limit, time.monotonic() + timeout_s)
        with self._changed:
            while missing := [key for key in wanted if key not in self._heard]:
                if self.left:
                    raise CommunicatorError(f"communicators of {self._meeting}: woken while a peer was waited for")
                if not self._changed.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                    raise CommunicatorError(
                        f"communicators of {self._meeting}: not all ranks of {group} came in time ({missing[0][1]})"
                    )
            return [self._heard[key] for key in wanted]

    def leave(self) -> None:
        """Whoever waits here raises, now and from now on. From any thread; idempotent."""
        with self._changed:
            self.left = True
            self._changed.notify_all()
