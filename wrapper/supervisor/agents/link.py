"""The link to one node's agent: its connection, its workers, and what it was sent.

Decides whether an agent that connects is the one that is expected. Sends nothing by itself. Owned by `links`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.resumable import Conversation


@dataclass
class AgentLink:
    """The link to one node's agent. `dropped`: it is refused from now on."""

    node: str
    conversation: Conversation[m.AgentMessage] = field(default_factory=Conversation)
    channel: SecureChannel[Any] | None = None
    pid: int = 0
    incarnation: str = ""
    """Incarnation of the only agent that is accepted for this node; empty until it is known."""
    join: m.Join | None = None
    """The `Join` of the present connection, or of the last one."""
    peer: m.Peer | None = None
    joined: bool = False
    dropped: bool = False
    ended: bool = False
    live: dict[int, int] = field(default_factory=dict)
    """Process id by rank of the workers that have started and not ended."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is no connection."""
    breaks: int = 0
    """Number of connections that have ended."""
    inherited_epoch: int = 1
    """Epoch of the last `Go` from a supervisor before us."""
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """(number of the message, epoch) of each `Go` sent to this agent."""

    def epochs_after(self, received: int) -> set[int]:
        """Return the epochs that an agent of our term may report after it has received that many messages.

        0 is valid for an agent that has no answer yet; 1 is also valid for one that was answered and got no `Go`.
        """
        epoch = max((epoch for number, epoch in self.epochs if number <= received), default=self.inherited_epoch)
        return {epoch, 0} if received == 0 else {epoch}

    def refusal(self, join: m.Join, received: int, *, follows_us: bool) -> str | None:
        """Return why an agent of this node is refused; None if it is accepted.

        `received`: number of our messages that it has received. `follows_us`: it is of our term.
        """
        if self.dropped or self.ended:
            return f"the node was left out; process {join.pid} is refused"
        if self.pid not in (0, join.pid):
            return f"process {join.pid} where {self.pid} is expected"
        if self.incarnation not in ("", join.incarnation):
            return "was started again and has lost its earlier promises"
        if not follows_us:
            return "has lost its state" if self.joined else None
        if not self.conversation.can_resume(received):
            return f"has received {received} of {self.conversation.sent} messages, and the others are not all kept"
        if self.joined and join.epoch not in (due := self.epochs_after(received)):
            return f"is of epoch {join.epoch}, but {max(due)} is due after the messages that it has received"
        return None
