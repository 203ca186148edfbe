"""The supervisor's view of its agents: who is connected, who may come back, who is refused.

`AgentLinks` turns connections and exits into the controller's events; the epoch fences agents of the past. It decides
nothing about training. Owned by `wrapper.shell`.
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
from resihp.protocol.framing import SecureChannel
from wrapper.launcher import Launcher

EXIT_DRAIN_S = 0.15
"""After an agent's exit: how long the rest of what it sent may take to be read."""


@dataclass
class AgentLink:
    """One node's agent. `dropped`: it is refused from now on."""

    node: str
    channel: SecureChannel[Any] | None = None
    pid: int = 0
    joined: bool = False
    dropped: bool = False
    ended: bool = False
    live: dict[int, int] = field(default_factory=dict)
    """Process id by rank of the workers that have started and not ended."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is no connection."""


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
        """Of the last `Go`: an agent that comes back must know it."""
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
            self._post(node, m.ToWorkers(ranks=tuple(local), order=order))

    def signal(self, rank: int, number: int) -> None:
        if rank in self._node_of:
            self._post(self._node_of[rank], m.Signal(rank=rank, signal=number))

    def signal_node(self, node: str, number: int) -> None:
        self._post(node, m.KillNode(signal=number))

    def drop(self, node: str) -> None:
        """Refuse the node from now on, and end what may still run there."""
        link = self._links[node]
        link.dropped = True
        link.live.clear()
        if link.channel is not None:
            link.channel.abort()
        self._launcher.kill(node)

    def release(self, grace_s: float) -> None:
        for node in self._links:
            self._post(node, m.Release(grace_s=grace_s))

    def _post(self, node: str, order: msgspec.Struct) -> None:
        link = self._links[node]
        if link.channel is None or link.dropped:
            return
        try:
            link.channel.post(order)
        except ConnectionError:
            return  # the reader of the connection notices, and tells

    # --- in ---------------------------------------------------------------------------------------------------

    async def converse(self, channel: SecureChannel[Any], join: m.Join) -> None:
        """Serve one agent's connection to its end. Raises ProtocolError when it is refused."""
        link = self._admit(channel, join)
        returned = link.joined
        link.joined, link.pid, link.channel = True, join.pid, channel
        link.closed.clear()
        try:
            if not returned:
                self._event(api.AgentJoined(node=join.node, host=join.host, devices=join.devices))
            while (message := await channel.recv()) is not None and not link.dropped:
                self._said(link, message)
        finally:
            if link.channel is channel:
                link.channel = None
                link.closed.set()
                if not link.dropped and not link.ended:
                    self._task(self._await_return(link))

    def _admit(self, channel: SecureChannel[Any], join: m.Join) -> AgentLink:
        link = self._links.get(join.node)
        known = max(1, self.epoch) if link is not None and link.joined else 0
        if link is None:
            reason = f"agent of node {join.node}: not a node of this job"
        elif link.dropped or link.ended:
            reason = f"agent of node {join.node}: the node was left out; process {join.pid} is refused"
        elif join.epoch != known:
            reason = f"agent of node {join.node}: is of epoch {join.epoch}, the job is at {known}"
        elif link.joined and link.pid != join.pid:
            reason = f"agent of node {join.node}: process {join.pid} where {link.pid} is expected"
        else:
            return link
        channel.post(m.Release(grace_s=0.0))
        raise ProtocolError(reason)

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
            case m.SpawnFailed():
                self._event(api.SpawnRefused(node=link.node, reason=message.reason))
            case _:
                raise ProtocolError(f"agent of node {link.node}: {type(message).__name__} is not for now")

    def _check(self, link: AgentLink, rank: int) -> None:
        if self._node_of.get(rank) != link.node:
            raise ProtocolError(f"agent of node {link.node}: speaks for rank {rank}, which is not its own")

    async def _await_return(self, link: AgentLink) -> None:
        """The connection broke: unless the agent comes back or its exit is noticed in time, it is lost."""
        await asyncio.sleep(self._reconnect_s)
        if link.channel is None and not link.dropped and not link.ended:
            link.ended = True
            self._event(api.AgentLost(node=link.node, reason=f"connection closed for {self._reconnect_s:g} s"))

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
