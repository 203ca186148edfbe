"""Messages between a node's workers and the ranks with which they build communicators.

This is the agent's instance of `resihp.protocol.rendezvous`. A message for several workers of the node is received only
once, and messages that they publish at the same time are sent to the supervisor together. A meeting opens with the
order to build communicators, and ends when the leader changes. Nothing here waits. Owned by
`resihp.wrapper.agent.workers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.rendezvous import Meetings, Pending

_SUPERVISOR = -1
"""Recipient number that stands for the supervisor; the other numbers are ranks."""


class Relay:
    """The meetings of this node's workers. `send` sends a message to the leader, `hand_to` passes one to a worker."""

    def __init__(self, send: Callable[[m.AgentMessage], None], hand_to: Callable[[int, m.Published], None]) -> None:
        self._send = send
        self._hand_to = hand_to
        self._due = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all meetings, because the leader has changed: the new leader does not know them, and will open
        others."""
        self._meetings: Meetings[int] = Meetings()
        self._pending: Pending[int] = Pending()
        self._attended: dict[m.MeetingId, list[str]] = {}

    def open(self, meeting: m.MeetingId) -> None:
        self._meetings.open(meeting)

    def leave(self, rank: int) -> None:
        self._meetings.leave(rank)

    def receive(self, rank: int, message: m.MeetingMessage) -> None:
        """Handle a message of a worker, which joins a meeting or publishes a message in it."""
        meeting = message.meeting
        try:
            if isinstance(message, m.Attend):
                before, first = self._meetings.attend(meeting, rank, message.groups)
                self._attended.setdefault(meeting, []).extend(first)
                self._send_later(rank, meeting, before)
            else:
                self._publish(meeting, message.said, rank)
                self._send_later(_SUPERVISOR, meeting, message.said)
        except ProtocolError as error:
            print(f"rank {rank}: {error}", flush=True)

    def published(self, order: m.Published) -> None:
        """Deliver messages of ranks on other nodes, which the supervisor forwarded."""
        try:
            self._publish(order.meeting, order.said, None)
        except ProtocolError as error:
            print(error, flush=True)

    def _publish(self, meeting: m.MeetingId, said: Sequence[m.Said], by: int | None) -> None:
        for rank, new in self._meetings.publish(meeting, said, by).items():
            self._send_later(rank, meeting, new)

    def _send_later(self, rank: int, meeting: m.MeetingId, said: Sequence[m.Said]) -> None:
        self._pending.add(rank, meeting, said)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        attended, self._attended = self._attended, {}
        for meeting, groups in attended.items():
            if groups:
                self._send(m.Attend(meeting=meeting, groups=tuple(groups)))
        for rank, meeting, said in self._pending.take():
            if rank == _SUPERVISOR:
                self._send(m.Publish(meeting=meeting, said=said))
            else:
                self._hand_to(rank, m.Published(meeting=meeting, said=said))
