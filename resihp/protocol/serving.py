"""Listening for peers that know the job's key, among strangers that do not.

`serve` hands out connections that have proven the key (`resihp.protocol.framing`). Until then a connection is a
stranger's, and costs a descriptor and a few kilobytes for some seconds at most. The module decides which connection is
closed if there are too many strangers (`Unproven`), and how many refusals are reported (`Refusals`). Used by the
supervisor for its agents and operators, and by agents for their peers.
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
"""Number of connections that the kernel keeps until they are accepted: all agents of a large job may connect at once.
The kernel allows no more than net.core.somaxconn."""
ACCEPTED_AT_ONCE = 100
"""Number of connections accepted before the event loop does anything else."""
MAX_UNPROVEN = 4096
"""Largest number of connections that have yet to prove the key; fewer where a quarter of the descriptors is less."""
REPORTED_PER_MINUTE = 10
"""Largest number of refused connections that are reported per minute."""

Refused = Callable[[str, str], None]
"""(peer, reason)"""


class Unproven:
    """Connections that have yet to prove the key, in the order of their arrival.

    Beyond `most`, each newcomer costs another connection its place: the oldest of the address that has the most. A peer
    that knows the key proves it within a few round trips and is one of many addresses; so a stranger that opens many
    silent connections displaces its own. Among addresses with equally many, one from which the key was never proven
    goes first. (sshd's MaxStartups turns newcomers away instead, which may well be our agents.)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_address: dict[str, dict[SecureChannel[Any], None]] = {}
        self._count = 0
        self._known: set[str] = set()

    def add(self, channel: SecureChannel[Any]) -> SecureChannel[Any] | None:
        """Note a newcomer; return the connection that has to go for it, if any."""
        self._by_address.setdefault(channel.peer_host, {})[channel] = None
        self._count += 1
        if self._count <= self._most:
            return None
        address = max(self._by_address, key=lambda host: (len(self._by_address[host]), host not in self._known))
        oldest = next(iter(self._by_address[address]))
        self.remove(oldest)
        return oldest

    def remove(self, channel: SecureChannel[Any]) -> bool:
        """Remove a connection that is gone, or has proven the key; return False for one that was displaced before."""
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
    """Reports refused connections, but a limited number: anybody who reaches a port can cause them."""

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
    """Listen on a bound socket; `handle` each connection that proves the key, and close it afterwards.

    A connection that sends a bad frame, at any time, is dropped alone and reported to `refused(peer, reason)`.
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
    listener.listen(LISTEN_BACKLOG)  # asyncio has set it to the number it accepts at once
    return server
