"""What ranks on different nodes say to each other while they build communicators: from agents, to agents.

The supervisor's table of `resihp.protocol.rendezvous`, the only one that all meet in. A node hears of what its workers
attend, once, and all of one turn of the loop in one message. A meeting begins with the order to build, and a newer
epoch's ends it. Owned by `wrapper.supervisor.agents`.
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
    """`post` says something to a node's agent."""

    def __init__(self, post: Callable[[str, m.Published], object]) -> None:
        self._post = post
        self._meetings: Meetings[str] = Meetings()
        self._pending: Pending[str] = Pending()
        self._due = False

    def open(self, meeting: m.MeetingId) -> None:
        """It begins, and those of older epochs are over."""
        self._meetings.open(meeting)

    def leave(self, node: str) -> None:
        """It is left out."""
        self._meetings.leave(node)

    def said(self, node: str, message: m.MeetingMessage) -> None:
        """Workers of a node attend, or say something."""
        meeting = message.meeting
        try:
            if isinstance(message, m.Attend):
                before, _ = self._meetings.attend(meeting, node, message.groups)
                self._tell_later(node, meeting, before)
            else:
                for other, new in self._meetings.publish(meeting, message.said, node).items():
                    self._tell_later(other, meeting, new)
        except ProtocolError as error:
            _log.warning("node %s: %s; who waits for it is given up after the budget of a transition", node, error)

    def _tell_later(self, node: str, meeting: m.MeetingId, said: Sequence[m.Said]) -> None:
        self._pending.add(node, meeting, said)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        for node, meeting, said in self._pending.take():
            self._post(node, m.Published(meeting=meeting, said=said))
