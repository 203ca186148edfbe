"""Exchange of messages between ranks on different nodes that build communicators, from agent to agent.

This is the supervisor's instance of `resihp.protocol.rendezvous`; all ranks meet here. A node receives each message for
its workers' groups once, and all messages of one turn of the event loop together. A meeting opens with the order to
build communicators, and ends when the meeting of a newer epoch opens. Owned by `resihp.wrapper.supervisor.agents`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.rendezvous import Meetings, Pending

_log = logging.getLogger("supervisor")


class Exchange:
    """All open meetings of ranks. `post` sends a message to a node's agent."""

    def __init__(self, post: Callable[[str, m.Published], object]) -> None:
        self._post = post
        self._meetings: Meetings[str] = Meetings()
        self._pending: Pending[str] = Pending()
        self._due = False

    def open(self, meeting: m.MeetingId) -> None:
        """Open a meeting, and end the meetings of older epochs."""
        self._meetings.open(meeting)

    def leave(self, node: str) -> None:
        """Remove a node from all meetings."""
        self._meetings.leave(node)

    def receive(self, node: str, message: m.MeetingMessage) -> None:
        """Handle a message of a node: its workers join a meeting, or publish a message in it."""
        meeting = message.meeting
        try:
            if isinstance(message, m.Attend):
                before, _ = self._meetings.attend(meeting, node, message.groups)
                self._send_later(node, meeting, before)
            else:
                for recipient, new in self._meetings.publish(meeting, message.said, node).items():
                    self._send_later(recipient, meeting, new)
        except ProtocolError as error:
            _log.warning("node %s: %s; ranks that wait for it give up after the transition's time budget", node, error)

    def _send_later(self, node: str, meeting: m.MeetingId, said: Sequence[m.Said]) -> None:
        self._pending.add(node, meeting, said)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        for node, meeting, said in self._pending.take():
            self._post(node, m.Published(meeting=meeting, said=said))
