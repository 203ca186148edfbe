"""Listens for peers that know the job's key, and limits the cost of unknown peers.

`serve` passes on connections that have proven the key (`resihp.protocol.framing`). Until then, a connection costs no
more than a descriptor and a few kilobytes, for a few seconds. This module decides which connection is closed if too
many have not proven the key (`Unproven`), and how many refusals are reported (`Refusals`). It never interprets a
message. Used by the supervisor for its agents and operators, and by agents for other agents.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from resihp.errors import ProtocolError
from resihp.process import most_open_files
from resihp.protocol.channels import SecureChannel

LISTEN_BACKLOG = 4096
"""Length of the kernel's queue of connections to be accepted: all agents of a large job may connect at the same time.
The kernel limits it to net.core.somaxconn."""
ACCEPTED_AT_ONCE = 100
"""Maximum number of connections accepted before the event loop does anything else."""
MAX_UNPROVEN = 4096
"""Maximum number of connections that have not proven the key; at most a quarter of the process's file descriptors."""
REPORTED_PER_MINUTE = 10
"""Maximum number of refused connections reported in a minute."""

Refused = Callable[[str, str], None]
"""Called with (peer, reason)."""


class Unproven:
    """Connections that have not proven the key yet, in order of arrival.

    If there are more than `most`, each new connection displaces another: the oldest from the address with the most
    connections. A peer that knows the key proves it within a few round trips and is one of many addresses. So a
    stranger that opens many silent connections displaces only its own. Among addresses with equally many connections,
    the first to lose one is an address from which no peer has ever proven the key. (sshd's MaxStartups instead refuses
    new connections, which may well be those of our agents.)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_address: dict[str, dict[SecureChannel[Any], None]] = {}
        self._count = 0
        self._known: set[str] = set()

    def add(self, channel: SecureChannel[Any]) -> SecureChannel[Any] | None:
        """Add a new connection; return the connection that it displaces, or None."""
        self._by_address.setdefault(channel.peer_host, {})[channel] = None
        self._count += 1
        if self._count <= self._most:
            return None
        address = max(self._by_address, key=lambda host: (len(self._by_address[host]), host not in self._known))
        oldest = next(iter(self._by_address[address]))
        self.remove(oldest)
        return oldest

    def remove(self, channel: SecureChannel[Any]) -> bool:
        """Remove a connection that is closed or has proven the key; return False if it was displaced before."""
        of_address = self._by_address.get(channel.peer_host, {})
        if channel not in of_address:
            return False
        del of_address[channel]
        self._count -= 1
        if not of_address:
            del self._by_address[channel.peer_host]
        return True

    def proven(self, channel: SecureChannel[Any]) -> None:
        self._known.add(channel.peer_host)


class Refusals:
    """Reports refused connections, up to a limit per minute, because anybody able to reach the port can cause them."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._since = float("-inf")
        self._count = 0

    def __call__(self, peer: str, reason: str) -> None:
        now = self._clock()
        if now - self._since >= 60.0:
            if self._count > REPORTED_PER_MINUTE:
                self._say(f"{self._count - REPORTED_PER_MINUTE} more connections were refused")
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= REPORTED_PER_MINUTE:
            more = "; further ones are not reported for a minute" if self._count == REPORTED_PER_MINUTE else ""
            self._say(f"connection from {peer} refused: {reason}{more}")


async def serve(
    listener: socket.socket,
    key: bytes,
    receives: Any,
    handle: Callable[[SecureChannel[Any]], Awaitable[None]],
    refused: Refused,
    *,
    proof_timeout_s: float = 5.0,
    most_unproven: int | None = None,
) -> asyncio.Server:
    """Listen on a bound socket. Await `handle` for each connection that proves the key, and close the connection
    afterwards.

    A connection that sends an invalid frame, at any time, is closed and reported to `refused(peer, reason)`; other
    connections are not affected.
    """
    unproven = Unproven(min(MAX_UNPROVEN, most_open_files() // 4) if most_unproven is None else most_unproven)

    async def prove(channel: SecureChannel[Any]) -> None:
        if (displaced := unproven.add(channel)) is not None:
            displaced.abort()
        reason = ""
        try:
            async with asyncio.timeout(proof_timeout_s):
                await channel.prove()
        except TimeoutError:
            reason = f"did not prove the key within {proof_timeout_s:g} s"
        except ProtocolError as error:
            reason = str(error)
        finally:
            if not unproven.remove(channel):
                reason = "had not proven the key when another connection needed its place"
        if reason:
            raise ProtocolError(reason)
        unproven.proven(channel)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel: SecureChannel[Any] = SecureChannel(reader, writer, key, "server", receives)
        try:
            await prove(channel)
            await handle(channel)
        except ProtocolError as error:
            refused(channel.peer, str(error))
        finally:
            channel.close()

    server = await asyncio.start_server(connected, sock=listener, backlog=ACCEPTED_AT_ONCE)
    listener.listen(LISTEN_BACKLOG)  # asyncio has set the backlog to ACCEPTED_AT_ONCE
    return server
