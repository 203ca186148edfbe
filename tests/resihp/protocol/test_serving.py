"""Who gets in among strangers: real sockets on loopback, where 127.0.0.x stand for other hosts."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from resihp.errors import ProtocolError
from resihp.protocol.channels import SecureChannel
from resihp.protocol.framing import MAGIC
from resihp.protocol.messages import AgentMessage, Exited, OperatorReply
from resihp.protocol.serving import LISTEN_BACKLOG, REPORTED_PER_MINUTE, Refusals, serve

KEY = bytes(range(32))

Port = tuple[str, int]


class Yard:
    """A listener that answers each message, and what comes to it from several hosts."""

    def __init__(self, port: int, stack: AsyncExitStack) -> None:
        self.port = port
        self.refused: list[tuple[str, str]] = []
        self._stack = stack
        self.strangers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def stranger(self, host: str, says: bytes = b"") -> None:
        """Connects, and stays until it is thrown out."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        self._stack.callback(writer.transport.abort)
        self.strangers.append((reader, writer))
        writer.write(says)

    async def agent(self, host: str) -> None:
        """Proves the key and has an answer, at the first attempt."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        channel: SecureChannel[OperatorReply] = SecureChannel(reader, writer, KEY, "client", OperatorReply)
        self._stack.callback(channel.abort)
        await channel.prove()
        await channel.send(Exited(rank=7, pid=1, status=0))
        assert await channel.recv() == OperatorReply(ok=True, text="7")


def served(play: Callable[[Yard], Awaitable[None]], **options: Any) -> None:
    async def answer(channel: SecureChannel[Any]) -> None:
        while (message := await channel.recv()) is not None:
            await channel.send(OperatorReply(ok=True, text=str(message.rank)))

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with AsyncExitStack() as stack, asyncio.timeout(60):
            yard = Yard(listener.getsockname()[1], stack)
            refused = yard.refused
            server = await serve(
                listener, KEY, AgentMessage, answer, lambda peer, why: refused.append((peer, why)), **options
            )
            stack.callback(server.close)
            await play(yard)

    asyncio.run(main())


@pytest.mark.parametrize("host_of_agents", ["127.0.1.{}", "127.0.0.9"])
def test_no_agent_is_locked_out_by_strangers_that_stay(host_of_agents: str) -> None:
    """Also where the stranger is a user of the agents' own node."""

    async def play(yard: Yard) -> None:
        for _ in range(500):
            await yard.stranger("127.0.0.9")
        for i in range(20):
            await yard.stranger("127.0.0.8", os.urandom(100))
            await yard.stranger("127.0.0.7", MAGIC[: i % 8])
            await yard.stranger("127.0.0.6", MAGIC + os.urandom(32))
            await yard.agent(host_of_agents.format(i + 1))
        assert not [peer for peer, _ in yard.refused if peer.startswith("127.0.1.")]

    served(play, proof_timeout_s=30.0)


def test_many_agents_find_their_way_through_a_table_that_is_full() -> None:
    async def play(yard: Yard) -> None:
        for _ in range(200):
            await yard.stranger("127.0.0.9")
        await asyncio.gather(*(yard.agent(f"127.0.1.{i + 1}") for i in range(100)))
        assert all(peer.startswith("127.0.0.9:") for peer, _ in yard.refused)
        assert {why for _, why in yard.refused} == {"had not proven the key when another connection needed its place"}

    served(play, proof_timeout_s=30.0, most_unproven=150)


def test_strangers_at_many_addresses_keep_nobody_out() -> None:
    async def play(yard: Yard) -> None:
        for host in range(1, 120):
            await yard.stranger(f"127.0.2.{host}")
        for i in range(40):
            await yard.agent(f"127.0.1.{i % 4 + 1}")
            await yard.stranger(f"127.0.3.{i + 1}")

    served(play, proof_timeout_s=30.0, most_unproven=32)


def test_stranger_is_given_some_seconds_and_learns_nothing() -> None:
    async def play(yard: Yard) -> None:
        await yard.stranger("127.0.0.9")
        await yard.stranger("127.0.0.9", MAGIC + os.urandom(32))
        heard = [await reader.read() for reader, _ in yard.strangers]
        assert len(heard[0]) == len(MAGIC) + 32, "a greeting, which is the same words and chance"
        assert len(heard[1]) == len(MAGIC) + 32 + 12 + 32, "and an empty frame"
        assert all("did not prove the key within 0.2 s" in why for _, why in yard.refused)

    served(play, proof_timeout_s=0.2)


def test_kernel_keeps_all_agents_of_a_large_job_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def main() -> int:
            async def handle(channel: SecureChannel[Any]) -> None: ...

            server = await serve(listener, KEY, AgentMessage, handle, lambda *_: None)
            state = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
            server.close()
            (most,) = struct.unpack_from("I", state, 28)  # tcpi_sacked, which is the backlog of a listener
            return int(most)

        allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
        assert asyncio.run(main()) == min(LISTEN_BACKLOG, allowed)


def test_wrong_key_is_refused_from_wherever_it_comes() -> None:
    async def play(yard: Yard) -> None:
        await yard.agent("127.0.0.1")
        with pytest.raises(ProtocolError, match="wrong key"):
            await SecureChannel.connect("127.0.0.1", yard.port, bytes(32), OperatorReply)
        await yard.agent("127.0.0.1")

    served(play)


def test_refusals_are_told_but_not_without_end() -> None:
    told: list[str] = []
    now = 0.0
    refusals = Refusals(told.append, lambda: now)
    for _ in range(5000):
        refusals("10.0.0.1:5", "garbage")
    assert len(told) == REPORTED_PER_MINUTE
    assert told[0] == "connection from 10.0.0.1:5 refused: garbage"
    assert told[-1].endswith("; further ones are not reported for a minute")
    now = 61.0
    refusals("10.0.0.1:5", "garbage")
    assert told[REPORTED_PER_MINUTE:] == [
        f"{5000 - REPORTED_PER_MINUTE} more connections were refused",
        "connection from 10.0.0.1:5 refused: garbage",
    ]
