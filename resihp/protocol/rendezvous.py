"""Rendezvous: ranks that build communicators exchange their addresses over the existing, authenticated connections.

An attacker able to change an address or an NCCL id could stand between two ranks and read their gradients. So torch's
own store, which requires no key, is not used. A value for other ranks goes to the rank's agent, from there to the
supervisor, and from there once to each node with a subscribed rank (`messages.Attend`). There is no polling. A key is
set only once: of two values the first stays.

`Meetings` is the table of published values. The supervisor has one for its nodes, and each agent has one for its ranks.
`Attendance` is one rank's part in a rendezvous. Neither class uses a socket. They decide only which rendezvous are
over: those of earlier epochs. A rendezvous is lost with its supervisor; ranks then try again under the next epoch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from resihp.errors import CommunicatorError, ProtocolError
from resihp.protocol.messages import MeetingId, Publish, Said

MAX_MEETING_BYTES = 64 << 20
"""Size limit of one rendezvous. 16,384 ranks with six NCCL communicators each need 11 MB. gloo needs 8 bytes times the
square of the number of ranks, since each rank publishes an address for each peer: this allows at most 2,700 ranks."""
MAX_PROBE_MEETINGS = 64
"""Number of newest probes with a rendezvous in the table; few probes are in progress at a time."""
BATCH_BYTES = 1 << 20
"""Size limit of one message; larger sets of values are sent in several messages."""
_ENTRY_BYTES = 200
"""Estimated memory of a table entry in addition to its strings."""

Who = TypeVar("Who", bound=Hashable)


class _Meeting(Generic[Who]):
    def __init__(self) -> None:
        self.said: dict[str, dict[str, Said]] = {}
        self.attending: dict[str, set[Who]] = {}
        self.bytes = 0


class Meetings(Generic[Who]):
    """The values published in all rendezvous that are not over, and their subscribers."""

    def __init__(self, most_bytes: int = MAX_MEETING_BYTES) -> None:
        self._most_bytes = most_bytes
        self._meetings: dict[MeetingId, _Meeting[Who]] = {}
        self._newest = MeetingId()

    def open(self, meeting: MeetingId) -> None:
        """Begin a rendezvous, and drop those that it supersedes. Does nothing if it is over or exists already."""
        if meeting in self._meetings or self._is_over(meeting):
            return
        self._newest = MeetingId(max(self._newest.epoch, meeting.epoch), max(self._newest.probe, meeting.probe))
        self._meetings = {other: kept for other, kept in self._meetings.items() if not self._is_over(other)}
        self._meetings[meeting] = _Meeting()

    def attend(self, meeting: MeetingId, subscriber: Who, groups: Iterable[str]) -> tuple[list[Said], tuple[str, ...]]:
        """Subscribe `subscriber` to groups of a rendezvous.

        Return the values published in these groups so far, and the names of the groups without a previous subscriber.

        Raises ProtocolError if the rendezvous would exceed the size limit.
        """
        table = self._meetings.get(meeting)
        if table is None:
            return [], ()
        before: list[Said] = []
        new_groups = []
        for group in groups:
            if (attending := table.attending.get(group)) is None:
                self._account(meeting, table, len(group) + _ENTRY_BYTES)
                attending = table.attending[group] = set()
                new_groups.append(group)
            attending.add(subscriber)
            before += table.said.get(group, {}).values()
        return before, tuple(new_groups)

    def publish(self, meeting: MeetingId, said: Iterable[Said], by: Who | None = None) -> dict[Who, list[Said]]:
        """Add values; return the new values for each subscriber, except for `by`.

        Raises ProtocolError if the rendezvous would exceed the size limit.
        """
        table = self._meetings.get(meeting)
        new_values: dict[Who, list[Said]] = {}
        if table is None:
            return new_values
        for entry in said:
            group = table.said.setdefault(entry.group, {})
            if entry.key in group:
                continue
            self._account(meeting, table, len(entry.group) + len(entry.key) + len(entry.value) + _ENTRY_BYTES)
            group[entry.key] = entry
            for subscriber in table.attending.get(entry.group, ()):
                if subscriber != by:
                    new_values.setdefault(subscriber, []).append(entry)
        return new_values

    def leave(self, subscriber: Who) -> None:
        """Unsubscribe `subscriber` from all groups."""
        for table in self._meetings.values():
            for attending in table.attending.values():
                attending.discard(subscriber)

    def _is_over(self, meeting: MeetingId) -> bool:
        if meeting.epoch:
            return meeting.epoch < self._newest.epoch
        return meeting.probe <= self._newest.probe - MAX_PROBE_MEETINGS

    def _account(self, meeting: MeetingId, table: _Meeting[Who], count: int) -> None:
        if table.bytes + count > self._most_bytes:
            raise ProtocolError(f"rendezvous of {meeting}: more than {self._most_bytes} bytes were said")
        table.bytes += count


class Pending(Generic[Who]):
    """Collects the values to be sent to each subscriber, so that all values of one turn of the event loop share a
    message."""

    def __init__(self) -> None:
        self._pending: dict[tuple[Who, MeetingId], list[Said]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, subscriber: Who, meeting: MeetingId, said: Sequence[Said]) -> None:
        if said:
            self._pending.setdefault((subscriber, meeting), []).extend(said)

    def take(self) -> Iterator[tuple[Who, MeetingId, tuple[Said, ...]]]:
        pending, self._pending = self._pending, {}
        for (subscriber, meeting), said in pending.items():
            for batch in batches(said):
                yield subscriber, meeting, batch


def batches(said: Iterable[Said]) -> Iterator[tuple[Said, ...]]:
    """Yield the values in batches that fit into a frame."""
    batch: list[Said] = []
    size = 0
    for entry in said:
        count = len(entry.group) + len(entry.key) + len(entry.value) + _ENTRY_BYTES
        if batch and size + count > BATCH_BYTES:
            yield tuple(batch)
            batch, size = [], 0
        batch.append(entry)
        size += count
    if batch:
        yield tuple(batch)


class Attendance:
    """One rank's part in a rendezvous: publishes its values and receives those of other ranks. Thread-safe.

    `say` sends a message to the rank's agent. Subscribe to the groups (`messages.Attend`) only after this object
    exists, so that no value is lost. No wait takes longer than `patience_s` seconds from now.
    """

    def __init__(self, meeting: MeetingId, say: Callable[[Publish], None], patience_s: float) -> None:
        self._meeting = meeting
        self._say = say
        self._limit = time.monotonic() + patience_s
        self._heard: dict[tuple[str, str], bytes] = {}
        self._changed = threading.Condition()
        self.left = False

    def publish(self, group: str, values: dict[str, bytes]) -> None:
        """Publish values to all subscribers of the group. Raises CommunicatorError if a value is larger than a message
        may be."""
        said = [Said(group, key, value) for key, value in values.items()]
        for entry in said:
            if len(entry.value) > BATCH_BYTES:
                raise CommunicatorError(f"{self._meeting}: {len(entry.value)} bytes under {group}/{entry.key}")
        self.hear(said)
        for batch in batches(said):
            self._say(Publish(meeting=self._meeting, said=batch))

    def hear(self, said: Iterable[Said]) -> None:
        with self._changed:
            for entry in said:
                self._heard.setdefault((entry.group, entry.key), entry.value)
            self._changed.notify_all()

    def has(self, group: str, keys: Sequence[str]) -> bool:
        """Return whether values for all these keys have been received, without waiting."""
        with self._changed:
            return all((group, key) in self._heard for key in keys)

    def values(self, group: str, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Wait for values of all these keys, and return them in order. Raises CommunicatorError after the time limit,
        or after `leave`."""
        wanted = [(group, key) for key in keys]
        limit = self._limit if timeout_s is None else min(self._limit, time.monotonic() + timeout_s)
        with self._changed:
            while missing := [key for key in wanted if key not in self._heard]:
                if self.left:
                    raise CommunicatorError(f"communicators of {self._meeting}: woken while waiting for a peer")
                if not self._changed.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                    raise CommunicatorError(
                        f"communicators of {self._meeting}: not all ranks of {group} came in time ({missing[0][1]})"
                    )
            return [self._heard[key] for key in wanted]

    def leave(self) -> None:
        """Make every present and future wait on this object raise CommunicatorError. Thread-safe; idempotent."""
        with self._changed:
            self.left = True
            self._changed.notify_all()
