"""The supervisor's view of its agents: who is connected, who may come back, who is refused.

`AgentLinks` turns connections and exits into the controller's events. A connection that breaks is no event: what was
under way both ways is said again on the next one (`wrapper.conversation`). Agents of the past are fenced by process,
by epoch, and by what they have received. An agent that lets too much pile up is lost, as is one that stays away. It
decides nothing about training. Owned by `wrapper.shell`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from resihp.controller import interface as api
from resihp.errors import ProtocolError
from resihp.process import ending
from resihp.protocol import messages as m
from resihp.protocol.framing import Envelope, SecureChannel
from wrapper.conversation import Conversation
from wrapper.launcher import Launcher

EXIT_DRAIN_S = 0.15
"""After an agent's exit: how long the rest of what it sent may take to be read."""


@dataclass
class AgentLink:
    """One node's agent. `dropped`: it is refused from now on."""

    node: str
    conversation: Conversation[m.AgentMessage] = field(default_factory=Conversation)
    channel: SecureChannel[Any] | None = None
    pid: int = 0
    joined: bool = False
    dropped: bool = False
    ended: bool = False
    live: dict[int, int] = field(default_factory=dict)
    """Process id by rank of the workers that have started and not ended."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is no connection."""
    breaks: int = 0
    """Connections that have come to their end."""
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """(number of the message, epoch) of each `Go` that went there."""

    def epochs_after(self, received: int) -> set[int]:
        """What an agent may say it is of, when it has received that many messages.

        0 is one that was not answered yet; 1 also one that was answered and had no `Go`.
        """
        if not self.joined:
            return {0}
        epoch = max((epoch for number, epoch in self.epochs if number <= received), default=1)
        return {epoch, 0} if received == 0 else {epoch}


class AgentLinks:
    """All agents of the job. `event` hands an event to the controller, at once and in order."""

    def __init__(
        self,
        launcher: Launcher,
        event: Callable[[api.AnyEvent], None],
        task: Callable[[Coroutine[Any, Any, None]], object],
        *,
        reconnect_s: float,
    ) -> None:
        self._launcher = launcher
        self._event = event
        self._task = task
        self._reconnect_s = reconnect_s
        self._links = {node: AgentLink(node) for node in launcher.nodes}
        self._node_of: dict[int, str] = {}
        self.epoch = 0
        """Of the last `Go`."""
        for link in self._links.values():
            link.closed.set()

    @property
    def live_ranks(self) -> tuple[int, ...]:
        return tuple(rank for link in self._links.values() for rank in link.live)

    # --- out --------------------------------------------------------------------------------------------------

    def spawn(self, node: str, spawn: m.Spawn) -> None:
        for start in spawn.workers:
            self._node_of[start.rank] = node
        self._post(node, spawn)

    def order(self, ranks: Iterable[int], order: m.WorkerOrder) -> None:
        """Send to these workers; those whose agent is gone are skipped."""
        if isinstance(order, m.Go):
            self.epoch = order.epoch
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            if rank in self._node_of:
                by_node.setdefault(self._node_of[rank], []).append(rank)
        for node, local in by_node.items():
            number = self._post(node, m.ToWorkers(ranks=tuple(local), order=order))
            if number and isinstance(order, m.Go):
                self._links[node].epochs.append((number, order.epoch))

    def signal(self, rank: int, number: int) -> None:
        if rank in self._node_of:
            self._post(self._node_of[rank], m.Signal(rank=rank, signal=number))

    def signal_node(self, node: str, number: int) -> None:
        self._post(node, m.KillNode(signal=number))

    def cut(self, node: str) -> None:
        """Fault injection: break the connection, and lose what is on its way."""
        link = self._links[node]
        if link.channel is not None:
            link.channel.abort()

    def drop(self, node: str) -> None:
        """Refuse the node from now on, and end what may still run there."""
        link = self._links[node]
        link.dropped = True
        link.live.clear()
        self.cut(node)
        self._launcher.kill(node)

    def release(self, grace_s: float) -> None:
        for node in self._links:
            self._post(node, m.Release(grace_s=grace_s))

    def acknowledge(self) -> None:
        """Tell agents what has come from them, where nothing else is said; to be called a few times a second."""
        for link in self._links.values():
            link.conversation.acknowledge()

    def _post(self, node: str, order: msgspec.Struct) -> int:
        """Say it to the node's agent, now or when it is back. Returns the message's number, 0 if nobody is there."""
        link = self._links[node]
        if link.dropped or link.ended:
            return 0
        number = link.conversation.post(order)
        if link.conversation.overdue:
            link.ended = True
            self._task(self._give_up(link))
        return number

    # --- in ---------------------------------------------------------------------------------------------------

    async def converse(self, channel: SecureChannel[Any], first: Envelope[Any], join: m.Join) -> None:
        """Serve one agent's connection to its end; `join` came in `first`. Raises ProtocolError when it is refused."""
        link = self._admit(channel, first, join)
        if link.channel is not None:
            link.channel.abort()  # the agent has noticed its end before us
        returned = link.joined
        link.joined, link.pid, link.channel = True, join.pid, channel
        link.closed.clear()
        try:
            link.conversation.connect(channel.post)
            link.conversation.take(first)
            if not returned:
                self._event(api.AgentJoined(node=join.node, host=join.host, devices=join.devices))
            while (envelope := await channel.recv()) is not None and link.channel is channel and not link.dropped:
                message = link.conversation.take(envelope)
                if message is not None:
                    self._said(link, message)
        finally:
            if link.channel is channel:
                link.channel = None
                link.conversation.disconnect()
                link.closed.set()
                link.breaks += 1
                if not link.dropped and not link.ended:
                    self._task(self._await_return(link, link.breaks))

    def _admit(self, channel: SecureChannel[Any], first: Envelope[Any], join: m.Join) -> AgentLink:
        link = self._links.get(join.node)
        received = first.acknowledged
        if link is None:
            reason = "not a node of this job"
        elif link.dropped or link.ended:
            reason = f"the node was left out; process {join.pid} is refused"
        elif link.joined and link.pid != join.pid:
            reason = f"process {join.pid} where {link.pid} is expected"
        elif not link.conversation.can_resume(received):
            reason = f"has received {received} messages of {link.conversation.sent}, not all others are still there"
        elif join.epoch not in (due := link.epochs_after(received)):
            reason = f"is of epoch {join.epoch}, where {max(due)} is due after what it has received"
        else:
            return link
        channel.post(Envelope(message=m.Release(grace_s=0.0)))
        raise ProtocolError(f"agent of node {join.node}: {reason}")

    def _said(self, link: AgentLink, message: object) -> None:
        match message:
            case m.Beat():
                self._event(api.AgentBeat(node=link.node, beat=message))
            case m.FromWorker():
                self._check(link, message.rank)
                self._event(api.WorkerSaid(rank=message.rank, message=message.message))
            case m.Spawned():
                self._check(link, message.rank)
                link.live[message.rank] = message.pid
                self._event(
                    api.WorkerSpawned(rank=message.rank, node=link.node, device=message.device, pid=message.pid)
                )
            case m.Exited():
                self._check(link, message.rank)
                link.live.pop(message.rank, None)
                self._event(api.WorkerExited(rank=message.rank, status=message.status))
                link.conversation.acknowledge()  # an agent that ends waits for it
            case m.SpawnFailed():
                if message.rank is not None:
                    self._check(link, message.rank)
                self._event(api.SpawnRefused(node=link.node, reason=message.reason, rank=message.rank))
            case _:
                raise ProtocolError(f"agent of node {link.node}: {type(message).__name__} is not for now")

    def _check(self, link: AgentLink, rank: int) -> None:
        if self._node_of.get(rank) != link.node:
            raise ProtocolError(f"agent of node {link.node}: speaks for rank {rank}, which is not its own")

    async def _await_return(self, link: AgentLink, breaks: int) -> None:
        """The connection broke: unless the agent comes back or its exit is noticed in time, it is lost."""
        await asyncio.sleep(self._reconnect_s)
        if link.channel is None and link.breaks == breaks and not link.dropped and not link.ended:
            link.ended = True
            self._event(api.AgentLost(node=link.node, reason=f"connection closed for {self._reconnect_s:g} s"))

    async def _give_up(self, link: AgentLink) -> None:
        """It does not read what it is told. Not told from within `_post`, whose caller is the controller."""
        if link.channel is not None:
            link.channel.abort()
        link.live.clear()
        self._event(api.AgentLost(node=link.node, reason="its agent does not read what it is told"))

    def agent_ended(self, node: str, status: int) -> None:
        """Its process is gone: a fact. What it had sent is read first."""
        link = self._links[node]
        if link.dropped or link.ended:
            return
        link.ended = True
        self._task(self._lost(link, status))

    async def _lost(self, link: AgentLink, status: int) -> None:
        try:
            async with asyncio.timeout(EXIT_DRAIN_S):
                await link.closed.wait()
        except TimeoutError:
            pass
        link.live.clear()
        self._event(api.AgentLost(node=link.node, reason=f"its agent {ending(status)}"))
