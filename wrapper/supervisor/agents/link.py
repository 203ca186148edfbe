"""The link to one node's agent: its connection, its workers, and the orders sent to it.

Decides whether an agent that connects is the expected one. Sends nothing by itself. Owned by `links`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.resumable import Conversation

RELEASED_S = 10.0
"""How long an agent that was released may take to end its processes and itself."""


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class AgentLink:
    """The link to one node's agent. `dropped`: the supervisor refuses this agent from now on. `ended`: the agent is
    lost or has exited."""

    node: str
    conversation: Conversation[m.AgentMessage] = field(default_factory=Conversation)
    channel: SecureChannel[Any] | None = None
    pid: int = 0
    incarnation: str = ""
    """Incarnation of the only agent that is accepted for this node; empty while it is unknown."""
    join: m.Join | None = None
    """The `Join` message of the current connection, or of the last one if there is no connection."""
    peer: m.Peer | None = None
    joined: bool = False
    dropped: bool = False
    ended: bool = False
    live: dict[int, int] = field(default_factory=dict)
    """Process id of each live worker, by rank."""
    closed: asyncio.Event = field(default_factory=_set_event)
    """Set while the agent is not connected."""
    breaks: int = 0
    """Number of connections that have ended."""
    inherited_epoch: int = 1
    """Epoch of the last `Go` that the agent received from an earlier supervisor."""
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """(number of the message, epoch) of each `Go` sent to this agent."""

    def epochs_after(self, received: int) -> set[int]:
        """Return the epochs that an agent which follows this leader may report after it has received `received`
        messages.

        An agent that has received no message may also report 0. An agent that has received messages but no `Go` reports
        `inherited_epoch`.
        """
        epoch = max((epoch for number, epoch in self.epochs if number <= received), default=self.inherited_epoch)
        return {epoch, 0} if received == 0 else {epoch}

    def meeting_place(self) -> dict[str, str]:
        """Return the address (`MASTER_ADDR`, `MASTER_PORT`) at which ranks can rendezvous on this node. Empty if the
        agent has not joined or has no port for it."""
        if self.join is None or self.peer is None or not self.join.meeting_port:
            return {}
        return {"MASTER_ADDR": self.peer.host.strip("[]"), "MASTER_PORT": str(self.join.meeting_port)}

    def moved_meeting(self, port: int) -> None:
        """Note the port at which ranks of the next round can rendezvous on this node."""
        if self.join is not None:
            self.join = msgspec.structs.replace(self.join, meeting_port=port)

    async def cut_unless_closed(self) -> None:
        """Break the connection of an agent that was released, unless the agent has closed it in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RELEASED_S):
                await self.closed.wait()
        if self.channel is not None:
            self.channel.abort()

    def refusal(self, join: m.Join, received: int, *, follows_us: bool) -> str | None:
        """Return the reason to refuse an agent that connects for this node; None to accept it.

        `received`: number of this supervisor's messages that the agent has received. `follows_us`: the agent has
        accepted this supervisor's term.
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
