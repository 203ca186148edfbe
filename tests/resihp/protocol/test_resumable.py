"""Conversations over connections that break anywhere: everything arrives once, in order, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.channels import SecureChannel
from resihp.protocol.framing import Envelope, LocalCodec
from resihp.protocol.resumable import Conversation
from resihp.protocol.serving import serve

KEY = bytes(32)
RECEIVES = Envelope[m.AgentMessage]


def numbered(n: int) -> m.Exited:
    return m.Exited(rank=n, pid=1, status=0)


@dataclass
class Wire:
    """One direction of one connection: bytes on their way."""

    codec: LocalCodec[Envelope[Any]] = field(default_factory=lambda: LocalCodec(RECEIVES))
    under_way: bytearray = field(default_factory=bytearray)
    open: bool = True

    def post(self, envelope: Envelope[Any]) -> None:
        if not self.open:
            raise ConnectionResetError
        self.under_way += self.codec.encode(envelope)


class Pair:
    """Two sides, a connection that can be cut at any byte, and what each side has heard."""

    def __init__(self) -> None:
        self.sides: tuple[Conversation[Any], Conversation[Any]] = (Conversation(), Conversation())
        self.heard: tuple[list[int], list[int]] = ([], [])
        self.said = [0, 0]
        self.wires: tuple[Wire, Wire] | None = None

    def connect(self) -> None:
        """As an agent (side 0) and the supervisor do: the agent speaks first."""
        self.cut()
        self.wires = (Wire(), Wire())
        self.sides[0].connect(self.wires[0].post, m.Beat(workers=()))
        self.sides[1].connect(self.wires[1].post)

    def cut(self, *, noticed: tuple[bool, bool] = (True, True)) -> None:
        """Lose what is under way. A side that has not noticed goes on posting into a connection that is closed."""
        if self.wires is not None:
            for side, wire, told in zip(self.sides, self.wires, noticed, strict=True):
                wire.open = False
                if told:
                    side.disconnect()
        self.wires = None

    def say(self, side: int) -> None:
        self.said[side] += 1
        assert self.sides[side].post(numbered(self.said[side])) == self.said[side]

    def deliver(self, side: int, count: int) -> None:
        """Bring `count` bytes of what `side` has sent to the other one."""
        if self.wires is None:
            return
        wire, hearer = self.wires[side], 1 - side
        chunk = bytes(wire.under_way[:count])
        del wire.under_way[:count]
        for envelope in wire.codec.feed(chunk):
            message = self.sides[hearer].take(envelope)
            if isinstance(message, m.Exited):
                self.heard[hearer].append(message.rank)

    def settle(self) -> None:
        self.connect()
        assert self.wires is not None
        while self.wires[0].under_way or self.wires[1].under_way:
            for side in (0, 1):
                self.deliver(side, len(self.wires[side].under_way))
        for side in self.sides:
            side.acknowledge()
        for side in (0, 1):
            self.deliver(side, len(self.wires[side].under_way))


sides = st.integers(0, 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), sides),
        st.tuples(st.just("mention"), sides),
        st.tuples(st.just("acknowledge"), sides),
        st.tuples(st.just("deliver"), sides, st.integers(1, 300)),
        st.tuples(st.just("cut"), st.booleans(), st.booleans()),
        st.tuples(st.just("connect")),
    ),
    max_size=80,
)


@given(steps)
def test_everything_arrives_once_and_in_order_wherever_connections_are_cut(plan: list[Any]) -> None:
    pair = Pair()
    for step, *arguments in plan:
        match step:
            case "say":
                pair.say(*arguments)
            case "mention":
                pair.sides[arguments[0]].mention(m.Beat(workers=()))
            case "acknowledge":
                pair.sides[arguments[0]].acknowledge()
            case "deliver":
                pair.deliver(*arguments)
            case "cut":
                pair.cut(noticed=(arguments[0], arguments[1]))
            case "connect":
                pair.connect()
        for side in (0, 1):
            assert pair.heard[1 - side] == list(range(1, len(pair.heard[1 - side]) + 1))
            assert pair.sides[side].acknowledged <= pair.sides[1 - side].received
    pair.settle()
    for side in (0, 1):
        assert pair.heard[1 - side] == list(range(1, pair.said[side] + 1))
        assert pair.sides[side].acknowledged == pair.sides[side].sent == pair.said[side]


def test_nothing_numbered_is_sent_before_the_other_side_has_told_what_it_has() -> None:
    sent: list[Envelope[Any]] = []
    side: Conversation[Any] = Conversation()
    side.post(numbered(1))
    side.connect(sent.append, m.Beat(workers=()))
    side.post(numbered(2))
    side.mention(m.Beat(workers=()))
    assert sent == [Envelope(message=m.Beat(workers=()))]
    side.take(Envelope())
    assert [envelope.number for envelope in sent] == [0, 1, 2]


def test_what_is_known_to_have_arrived_is_not_sent_again() -> None:
    sent: list[Envelope[Any]] = []
    side: Conversation[Any] = Conversation()
    for n in (1, 2, 3):
        side.post(numbered(n))
    side.connect(sent.append)
    side.take(Envelope(acknowledged=2))
    assert [envelope.number for envelope in sent] == [0, 3]
    assert side.acknowledged == 2


def test_what_comes_twice_is_dropped() -> None:
    side: Conversation[Any] = Conversation()
    side.connect(lambda envelope: None)
    side.take(Envelope())
    taken = [side.take(Envelope(number=n, message=numbered(n))) for n in (1, 2, 1, 2, 3)]
    assert taken == [numbered(1), numbered(2), None, None, numbered(3)]


def test_acknowledgements_ride_on_everything_and_are_sent_alone_only_where_nothing_did() -> None:
    sent: list[Envelope[Any]] = []
    side: Conversation[Any] = Conversation()
    side.connect(sent.append)
    side.take(Envelope())
    side.acknowledge()
    side.take(Envelope(number=1, message=numbered(1)))
    side.mention(m.Beat(workers=()))
    side.acknowledge()
    side.take(Envelope(number=2, message=numbered(2)))
    side.acknowledge()
    side.acknowledge()
    assert [(envelope.acknowledged, envelope.message is None) for envelope in sent] == [
        *((0, True), (1, False), (2, True))
    ]


def test_memory_is_bounded_and_freed_by_acknowledgements() -> None:
    side: Conversation[Any] = Conversation(most_bytes=1000)
    while not side.overdue:
        side.post(numbered(side.sent))
    assert 20 < side.sent < 40
    side.take(Envelope(acknowledged=side.sent))
    assert not side.overdue


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        (Envelope(acknowledged=9), "has received 9 messages, where 1 to 3 are possible"),
        (Envelope(acknowledged=0), "has received 0 messages, where 1 to 3 are possible"),
        (Envelope(acknowledged=2, number=2), "message 2 came instead of 1"),
    ],
)
def test_a_side_that_cannot_be_the_same_is_refused(envelope: Envelope[Any], message: str) -> None:
    side: Conversation[Any] = Conversation()
    for n in (1, 2, 3):
        side.post(numbered(n))
    side.connect(lambda envelope: None)
    side.take(Envelope(acknowledged=1))
    side.connect(lambda envelope: None)
    with pytest.raises(ProtocolError, match=message):
        side.take(envelope)


def test_acknowledging_what_was_never_sent_is_refused_at_any_time() -> None:
    side: Conversation[Any] = Conversation()
    side.connect(lambda envelope: None)
    side.take(Envelope())
    with pytest.raises(ProtocolError, match="acknowledges message 1, but only 0 were sent"):
        side.take(Envelope(acknowledged=1))


def test_a_message_that_fits_no_frame_is_refused_before_it_is_kept() -> None:
    side: Conversation[Any] = Conversation()
    with pytest.raises(ProtocolError, match=r"SpawnFailed: \d+ bytes; a frame holds"):
        side.post(m.SpawnFailed(reason="x" * (4 << 20)))
    assert side.sent == 0


# --- real sockets ---------------------------------------------------------------------------------------------------


class Cutter:
    """A relay that breaks connections off, without a goodbye, after a random number of bytes."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._random = random.Random(seed)
        self.connections = 0
        self.patient = False

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._port)
        left = 1 << 40 if self.patient else self._random.randrange(100, 6000)

        async def relay(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal left
            with contextlib.suppress(ConnectionError):
                while chunk := await source.read(1024):
                    target.write(chunk[:left])
                    left -= len(chunk)
                    if left <= 0:
                        break
            for transport in (writer.transport, onward.transport):
                transport.abort()

        await asyncio.gather(relay(reader, onward), relay(onward_reader, writer))


@pytest.mark.parametrize("seed", range(5))
def test_real_connections_that_break_all_the_time_lose_nothing(seed: int) -> None:
    async def main() -> None:
        count = 2000
        ours: Conversation[Any] = Conversation()
        theirs: Conversation[Any] = Conversation()
        heard: dict[str, list[int]] = {"agent": [], "supervisor": []}

        async def converse(
            name: str, side: Conversation[Any], channel: SecureChannel[Envelope[Any]], first: m.Join | None
        ) -> None:
            side.connect(channel.post, first)
            while (envelope := await channel.recv()) is not None:
                message = side.take(envelope)
                if isinstance(message, m.Exited):
                    heard[name].append(message.rank)
                side.acknowledge()
            side.disconnect()

        current: list[SecureChannel[Any]] = []

        async def accepted(channel: SecureChannel[Any]) -> None:
            while current:
                current.pop().abort()
            current.append(channel)
            await converse("supervisor", theirs, channel, None)

        listener = socket.create_server(("127.0.0.1", 0))
        server = await serve(listener, KEY, RECEIVES, accepted, lambda peer, reason: None)
        cutter = Cutter(listener.getsockname()[1], seed)
        relay = await asyncio.start_server(cutter, "127.0.0.1", 0)
        port = relay.sockets[0].getsockname()[1]

        async def agent() -> None:
            join = m.Join(node="n1", host="h", pid=1, devices=1, epoch=0)
            while True:
                try:
                    channel: SecureChannel[Any] = await SecureChannel.connect("127.0.0.1", port, KEY, RECEIVES)
                except (OSError, TimeoutError, ProtocolError):
                    continue
                await converse("agent", ours, channel, join)
                channel.abort()

        async def speak(side: Conversation[Any]) -> None:
            for n in range(1, count + 1):
                side.post(numbered(n))
                if n % 7 == 0:
                    await asyncio.sleep(0)

        async with asyncio.timeout(60):
            task = asyncio.create_task(agent())
            talk: list[Coroutine[Any, Any, None]] = [speak(ours), speak(theirs)]
            await asyncio.gather(*talk)
            while cutter.connections < 20:
                ours.post(numbered(ours.sent + 1))
                await asyncio.sleep(0.001)
            cutter.patient = True
            while (len(heard["supervisor"]), len(heard["agent"])) != (ours.sent, theirs.sent):
                await asyncio.sleep(0.005)
        assert heard["supervisor"] == list(range(1, ours.sent + 1))
        assert heard["agent"] == list(range(1, theirs.sent + 1))
        task.cancel()
        relay.close()
        server.close()

    asyncio.run(main())
