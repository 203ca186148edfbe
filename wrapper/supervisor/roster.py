"""Whom agents ask, and tell of a successor, when the supervisor is gone: those that may choose one know all others.

They are told of each once, and after that what has changed. Thousands join within seconds: what is new is told once a
second, in one message to each, encoded once for all. Owned by `wrapper.supervisor.agents`; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from resihp.protocol import messages as m
from resihp.protocol.framing import encode


class Rosters:
    """What agents know of each other. `post(node, message)` says it to one of them."""

    def __init__(self, post: Callable[[str, msgspec.Raw], int]) -> None:
        self._post = post
        self._there: dict[str, m.Peer] = {}
        self._told: dict[str, m.Peer] = {}
        """What was there when it was last told."""
        self._enlisted: set[str] = set()
        """Who is to be told."""
        self._informed: set[str] = set()
        """Who was told all of that."""
        self._stale = False

    def joined(self, peer: m.Peer) -> None:
        self._there[peer.node], self._stale = peer, True

    def enlist(self, node: str) -> None:
        """It may have to choose a leader: it is to know the others, from the next time on."""
        self._enlisted.add(node)
        self._stale = True

    def left(self, node: str) -> None:
        """It is told nothing any more."""
        self._enlisted.discard(node)
        if self._there.pop(node, None) is not None:
            self._informed.discard(node)
            self._stale = True

    def tell(self) -> None:
        """Tell what has changed since the last time."""
        if not self._stale:
            return
        new = tuple(peer for node, peer in self._there.items() if self._told.get(node) != peer)
        gone = tuple(node for node in self._told if node not in self._there)
        if self._informed:
            self._say(self._informed, m.Roster(peers=new, left=gone))
        if newcomers := (self._there.keys() & self._enlisted) - self._informed:
            self._say(newcomers, m.Roster(peers=tuple(self._there.values()), whole=True))
        self._told, self._stale = dict(self._there), False
        self._informed |= newcomers

    def _say(self, nodes: set[str], roster: m.Roster) -> None:
        body = msgspec.Raw(encode(roster))
        for node in nodes:
            self._post(node, body)
