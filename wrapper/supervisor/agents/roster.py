"""Sends agents the list of all agents: an agent that may elect a leader needs it to ask for votes and to announce the
leader.

Each agent receives the whole list once, and only changes after that. Because thousands of agents join within seconds,
changes are sent once a second, in one message to each agent, encoded once for all. Owned by
`resihp.wrapper.supervisor.agents`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resihp.protocol import messages as m
from resihp.protocol.framing import encode


class Rosters:
    """The list of agents, and the nodes that have received it. `post(node, message)` sends a message to a node's
    agent."""

    def __init__(self, post: Callable[[str, msgspec.Raw], int]) -> None:
        self._post = post
        self._present: dict[str, m.Peer] = {}
        self._announced: dict[str, m.Peer] = {}
        """The list as of the last `send_changes`."""
        self._enlisted: set[str] = set()
        """Nodes whose agents are to receive the list."""
        self._informed: set[str] = set()
        """Nodes whose agents have received the whole list."""
        self._stale = False

    def joined(self, peer: m.Peer) -> None:
        self._present[peer.node], self._stale = peer, True

    def enlist(self, node: str) -> None:
        """Send the list to this node's agent from the next `send_changes` on, because the agent may have to elect a
        leader."""
        self._enlisted.add(node)
        self._stale = True

    def left(self, node: str) -> None:
        """Remove a node from the list, and send it no more changes."""
        self._enlisted.discard(node)
        if self._present.pop(node, None) is not None:
            self._informed.discard(node)
            self._stale = True

    def send_changes(self) -> None:
        """Send all changes since the last call, and the whole list to agents that are new."""
        if not self._stale:
            return
        new = tuple(peer for node, peer in self._present.items() if self._announced.get(node) != peer)
        left_nodes = tuple(node for node in self._announced if node not in self._present)
        if self._informed:
            self._send(self._informed, m.Roster(peers=new, left=left_nodes))
        if newcomers := (self._present.keys() & self._enlisted) - self._informed:
            self._send(newcomers, m.Roster(peers=tuple(self._present.values()), whole=True))
        self._announced, self._stale = dict(self._present), False
        self._informed |= newcomers

    def _send(self, nodes: set[str], roster: m.Roster) -> None:
        body = msgspec.Raw(encode(roster))
        for node in nodes:
            self._post(node, body)
