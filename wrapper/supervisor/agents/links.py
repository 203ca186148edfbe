"""The supervisor's view of its agents: which ones are connected, which may reconnect, and which are refused.

`AgentLinks` turns connections and exits into events for the controller. A broken connection is not an event: messages
that were in flight, in either direction, are sent again on the next connection (`resihp.protocol.resumable`). Every
connection begins with the supervisor's term. An agent that accepts a new term reports its workers (`Inventory`), and is
part of the job from then on. Stale agents are recognised, and refused, by process id, by epoch, and by the number of
messages that they have received. An agent that reads too slowly, or that does not reconnect in time, counts as lost.
Decides nothing about training. Owned by `resihp.wrapper.supervisor.shell`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from resihp.controller import interface as api
from resihp.errors import ProtocolError
from resihp.process import ending
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.forwarding import deflated, report_of, to_workers
from resihp.protocol.framing import Envelope, encode
from resihp.protocol.resumable import Conversation
from resihp.wrapper.launch.launcher import CANNOT_START, NO_SUPERVISOR_STATUS, Launcher
from resihp.wrapper.supervisor.agents.link import AgentLink
from resihp.wrapper.supervisor.agents.rendezvous import Exchange
from resihp.wrapper.supervisor.agents.roster import Rosters

LOOK_EVERY_S = 0.1
RETURN_WINDOW_S = 20.0
"""Time limit for agents to reconnect after their connections broke together, or after the supervisor was stopped."""
MIN_PAUSE_S = 0.02
"""Shortest sleep between two readings of the clock, which may be standing still
(`resihp.wrapper.supervisor.attention`)."""
EXIT_DRAIN_S = 0.15
"""How long to read the last messages of an agent that has exited."""

_log = logging.getLogger("supervisor")


class AgentLinks:
    """Links to all agents of the job. `event` hands an event to the controller, at once and in order."""

    def __init__(
        self,
        launcher: Launcher,
        event: Callable[[api.AnyEvent], None],
        task: Callable[[Coroutine[Any, Any, None]], object],
        *,
        reconnect_s: float,
        clock: Callable[[], float] | None = None,
        lead: m.Lead | None = None,
        joined: Callable[[m.Join], None] = lambda join: None,
        acknowledged: Callable[[str, int], None] = lambda node, number: None,
        deposed: Callable[[str], None] = lambda reason: None,
        roster: bool = False,
        incarnations: Mapping[str, str] | None = None,
    ) -> None:
        """`joined(join)` is called before the event `AgentJoined`; `acknowledged(node, number)` with every message of
        an agent. `clock` counts only the time in which the supervisor could receive messages of agents.

        `roster`: send agents the list of all agents (`enlist`). `incarnations`: by node, of the agents that joined an
        earlier leader.
        """
        self._launcher = launcher
        self._event = event
        self._task = task
        self._reconnect_s = reconnect_s
        self._clock = clock or asyncio.get_running_loop().time
        self.lead = lead or m.Lead(term=1, node="", log=0)
        """The supervisor's term and node: the first message on every new connection."""
        self._joined = joined
        self._acknowledged = acknowledged
        self._deposed = deposed
        self._rosters = Rosters(self.post) if roster else None
        self._incarnations = incarnations or {}
        self._links = {node: AgentLink(node, incarnation=self._incarnations.get(node, "")) for node in launcher.nodes}
        self._node_of: dict[int, str] = {}
        self._rendezvous = Exchange(self.post)
        self._herd_until = float("-inf")
        """Time until which agents may reconnect without being lost, because the supervisor was stopped."""
        self._returned_at = 0.0
        """Time at which an agent last reconnected after its connection had broken."""
        self._unreadable: set[int] = set()
        """Ranks that have sent an undecodable report."""
        self.epoch = 0
        """Epoch of the last `Go` that was sent."""

    @property
    def live_ranks(self) -> tuple[int, ...]:
        return tuple(rank for link in self._links.values() for rank in link.live)

    def connected(self, nodes: Iterable[str]) -> frozenset[str]:
        """Return the nodes among `nodes` whose agents are connected and have joined."""
        links = ((node, self._links.get(node)) for node in nodes)
        return frozenset(node for node, link in links if link is not None and link.channel is not None and link.joined)

    def enlist(self, node: str) -> None:
        """Send the node's agent the list of all agents from now on: an agent that keeps a copy of the journal may have
        to elect a leader."""
        if self._rosters is not None:
            self._rosters.enlist(node)

    def meeting_place(self, node: str) -> dict[str, str]:
        """Return the address at which ranks of a script with its own process groups can rendezvous, if rank 0 is on
        this node (`AgentLink.meeting_place`)."""
        link = self._links.get(node)
        return {} if link is None else link.meeting_place()

    # --- out --------------------------------------------------------------------------------------------------

    def spawn(self, node: str, spawn: m.Spawn) -> None:
        self._node_of |= {start.rank: node for start in spawn.workers}
        self._unreadable -= {start.rank for start in spawn.workers}
        self.post(node, spawn)

    def order(self, ranks: Iterable[int], order: m.WorkerOrder) -> None:
        """Send an order to the workers of these ranks. Workers without an agent are skipped."""
        if isinstance(order, m.Go):
            self.epoch = order.epoch
            if self._rosters is not None:
                self._rosters.send_changes()  # once a plan is in effect, agents may have to elect a leader
            self._rendezvous.open(m.MeetingId(epoch=order.epoch))
        elif isinstance(order, m.Probe):
            self._rendezvous.open(m.MeetingId(probe=order.probe))
        body = encode(order)
        smaller = deflated(body)
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            if rank in self._node_of:
                by_node.setdefault(self._node_of[rank], []).append(rank)
        for node, local in by_node.items():
            number = self.post(node, to_workers(tuple(local), body, smaller))
            if number and isinstance(order, m.Go):
                self._links[node].epochs.append((number, order.epoch))

    def signal(self, rank: int, number: int) -> None:
        if rank in self._node_of:
            self.post(self._node_of[rank], m.Signal(rank=rank, signal=number))

    def signal_node(self, node: str, number: int) -> None:
        self.post(node, m.KillNode(signal=number))

    def cut(self, node: str) -> None:
        """Break the agent's connection and lose all messages in flight: an injected fault."""
        link = self._links[node]
        if link.channel is not None:
            link.channel.abort()

    def drop(self, node: str, *, in_order: bool = False) -> None:
        """Refuse the node's agent from now on, and end all processes that may still run on the node. `in_order`: the
        agent does this itself, at once, instead of looking for another supervisor first."""
        link = self._links.setdefault(node, AgentLink(node))
        if in_order:
            self.post(node, m.Release(grace_s=0.0))
        link.dropped = True
        link.live.clear()
        self._rendezvous.leave(node)
        if in_order:
            self._task(link.cut_unless_closed())
        else:
            self.cut(node)
        self._launcher.kill(node)
        if self._rosters is not None:
            self._rosters.left(node)

    def release(self, grace_s: float) -> None:
        for node in self._links:
            self.post(node, m.Release(grace_s=grace_s))

    def abandon(self) -> None:
        """Close every connection without a message: the agents then look for the current leader."""
        for link in self._links.values():
            link.dropped = True
            if link.channel is not None:
                link.channel.abort()

    async def all_closed(self, timeout_s: float) -> None:
        """Wait until every agent has closed its connection, at most `timeout_s`: this supervisor cannot see the exit of
        agents that it did not start."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for link in self._links.values():
                    await link.closed.wait()

    async def all_ended(self) -> None:
        """Wait until all agents that ever connected have exited, were dropped, or are on lost nodes."""
        while any(link.pid and not link.dropped and not link.ended for link in self._links.values()):
            await asyncio.sleep(LOOK_EVERY_S)

    def acknowledge(self) -> None:
        """Acknowledge messages that no other message has acknowledged; to be called a few times a second."""
        for link in self._links.values():
            link.conversation.acknowledge()

    def were_stopped(self) -> None:
        """Note that the supervisor was stopped for so long that agents may have presumed it dead: all agents will
        reconnect, and the supervisor will answer slowly."""
        self._herd_until = self._clock() + RETURN_WINDOW_S

    def beat(self) -> None:
        """Send agents a heartbeat and changes of the list of agents; to be called once a second."""
        if self._rosters is not None:
            self._rosters.send_changes()
        for link in self._links.values():
            link.conversation.mention(m.Alive())

    def post(self, node: str, order: msgspec.Struct | msgspec.Raw) -> int:
        """Send a message to the node's agent, now or when it reconnects. `Raw` is an already encoded message.

        Returns the message's number; 0 if the node has no agent.
        """
        link = self._links.get(node)
        if link is None or link.dropped or link.ended:
            return 0
        number = link.conversation.post(order)
        if link.conversation.overdue:
            link.ended = True
            self._task(self._give_up(link))
        return number

    # --- in ---------------------------------------------------------------------------------------------------

    async def converse(self, channel: SecureChannel[Any], first: Envelope[Any], join: m.Join) -> None:
        """Serve one agent's connection until it closes. `first` is the received envelope that contained `join`. Raises
        ProtocolError if the agent is refused."""
        link = self._admit(channel, first, join)
        if link.channel is not None:
            link.channel.abort()  # the agent has noticed the end of this connection first
        if join.term < self.lead.term:
            # the agent does not follow this leader yet: its acknowledgements are of another leader's messages
            if link.conversation.received or link.conversation.acknowledged:
                link.conversation = Conversation()  # otherwise messages that wait for the agent are still to be sent
            first = Envelope(message=join)
        link.pid, link.incarnation, link.channel, link.join = join.pid, join.incarnation, channel, join
        link.peer = m.Peer(node=join.node, host=channel.peer.rpartition(":")[0], port=join.peer_port)
        link.closed.clear()
        if link.breaks:
            self._returned_at = self._clock()
        try:
            link.conversation.connect(channel.post, self.lead)
            link.conversation.take(first)
            self._acknowledged(link.node, link.conversation.acknowledged)
            while (envelope := await channel.recv()) is not None and link.channel is channel and not link.dropped:
                message = link.conversation.take(envelope)
                self._acknowledged(link.node, link.conversation.acknowledged)
                if message is not None:
                    self._receive(link, message)
        finally:
            if link.channel is channel:
                link.channel = None
                link.conversation.disconnect()
                link.closed.set()
                link.breaks += 1
                if not link.dropped and not link.ended:
                    self._task(self._await_return(link, link.breaks))

    def _admit(self, channel: SecureChannel[Any], first: Envelope[Any], join: m.Join) -> AgentLink:
        if join.term > self.lead.term:
            reason = f"agent of node {join.node}: follows a supervisor of term {join.term}, ours is {self.lead.term}"
            self._deposed(reason)
            raise ProtocolError(reason)
        link = self._links.get(join.node)
        if link is None and join.lease:
            link = self._links[join.node] = AgentLink(join.node, incarnation=self._incarnations.get(join.node, ""))
        follows_us = join.term == self.lead.term
        refusal: str | None = "not a node of this job"
        if link is not None:
            refusal = link.refusal(join, first.acknowledged, follows_us=follows_us)
            if refusal is None:
                return link
        channel.post(Envelope(message=m.Release(grace_s=0.0)))
        raise ProtocolError(f"agent of node {join.node}: {refusal}")

    def _receive(self, link: AgentLink, message: object) -> None:
        if not link.joined and not isinstance(message, m.Inventory | m.Beat):
            raise ProtocolError(f"agent of node {link.node}: {type(message).__name__} before its inventory")
        match message:
            case m.Inventory() if not link.joined:
                self._accept(link, message)
            case m.Beat():
                if link.joined:
                    self._event(api.AgentBeat(node=link.node, beat=message))
            case m.FromWorker():
                self._check(link, message.rank)
                self._receive_report(link, message)
            case m.Printed():
                self._check(link, message.rank)
                self._event(api.WorkerPrinted(printed=message))
            case m.Attend() | m.Publish():
                self._rendezvous.receive(link.node, message)
            case m.Spawned():
                self._check(link, message.rank)
                link.live[message.rank] = message.pid
                self._event(
                    api.WorkerSpawned(rank=message.rank, node=link.node, device=message.device, pid=message.pid)
                )
            case m.Exited():
                self._check(link, message.rank)
                link.live.pop(message.rank, None)
                self._event(api.WorkerExited(rank=message.rank, status=message.status, clues=message.clues))
                link.conversation.acknowledge()  # an agent that is about to exit waits for it
            case m.RoundEnded():
                link.moved_meeting(message.meeting_port)
                self._event(api.ProcessesEnded(node=link.node, round=message.round))
            case m.WorkersInspected():
                self._event(api.WorkersSeen(node=link.node, looks=message.looks, nccl=message.nccl))
            case m.SpawnFailed():
                if message.rank is not None:
                    self._check(link, message.rank)
                self._event(api.SpawnRefused(node=link.node, reason=message.reason, rank=message.rank))
            case m.Signalled():
                self._event(api.AgentSignalled(node=link.node, signal=message.signal))
            case _:
                raise ProtocolError(f"agent of node {link.node}: unexpected {type(message).__name__}")

    def _receive_report(self, link: AgentLink, envelope: m.FromWorker) -> None:
        """Hand a worker's report to the controller. A worker whose report is undecodable is disconnected; its agent and
        the other workers are not."""
        if envelope.rank in self._unreadable:
            return
        try:
            message = report_of(envelope.body)
        except ProtocolError as error:
            _log.warning("rank %d on node %s: %s", envelope.rank, link.node, error)
            self._unreadable.add(envelope.rank)
            self.post(link.node, m.HangUp(rank=envelope.rank, reason=str(error)))
        else:
            self._event(api.WorkerSaid(rank=envelope.rank, message=message))

    def _accept(self, link: AgentLink, inventory: m.Inventory) -> None:
        """Make an agent that has accepted this supervisor's term part of the job."""
        assert link.join is not None
        link.joined = True
        link.live.update({worker.rank: worker.pid for worker in inventory.workers})
        self._node_of |= dict.fromkeys((*link.live, *(rank for rank, _ in inventory.ended)), link.node)
        link.inherited_epoch = max(1, link.join.epoch)
        self._joined(link.join)
        self._event(
            api.AgentJoined(
                node=link.node,
                host=link.join.host,
                devices=link.join.devices,
                lease=link.join.lease,
                hardware=link.join.hardware,
                incarnation=link.join.incarnation,
                inventory=inventory,
                machine=link.join.machine,
            )
        )
        if self._rosters is not None and link.peer is not None:
            self._rosters.joined(link.peer)

    def _check(self, link: AgentLink, rank: int) -> None:
        if self._node_of.get(rank) != link.node:
            raise ProtocolError(f"agent of node {link.node}: sent a message of rank {rank}, which is not its own")

    async def _await_return(self, link: AgentLink, breaks: int) -> None:
        """Report the agent as lost unless it reconnects, or its exit is noticed, in time."""
        began = self._clock()
        due, last = began + self._reconnect_s, began + RETURN_WINDOW_S
        while (now := self._clock()) < due:
            await asyncio.sleep(max(due - now, MIN_PAUSE_S))
            others_return = self._returned_at + self._reconnect_s
            due = min(last, max(due, others_return, self._herd_until))
        if link.channel is None and link.breaks == breaks and not link.dropped and not link.ended:
            link.ended = True
            self._event(api.AgentLost(node=link.node, reason=f"connection closed for {self._reconnect_s:g} s"))

    async def _give_up(self, link: AgentLink) -> None:
        """Report an agent that does not read its messages as lost. A task, since `post` is called by the controller."""
        if link.channel is not None:
            link.channel.abort()
        link.live.clear()
        self._event(api.AgentLost(node=link.node, reason="its agent does not read its messages", how="agent"))

    def agent_ended(self, node: str, status: int | None) -> None:
        """Report the exit of an agent's process, after reading its last messages. `status`: None if the exit status
        could not be observed."""
        link = self._links[node]
        if link.dropped or link.ended:
            return
        link.ended = True
        self._task(self._lost(link, status))

    async def _lost(self, link: AgentLink, status: int | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_DRAIN_S):
                await link.closed.wait()
        link.live.clear()
        if status is None:
            reason = "its agent is gone"
        elif status == NO_SUPERVISOR_STATUS:
            reason = (
                f"its agent never reached the supervisor at {self._launcher.host}; check the network between the "
                "nodes: `ip address`, [network] interface"
            )
        else:
            reason = f"its agent {ending(status)}"
        self._event(api.AgentLost(node=link.node, reason=reason, how="agent", cannot_start=status in CANNOT_START))
