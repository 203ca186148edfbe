"""Frames: what arrives is what was sent, and nothing else gets in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import ProtocolError
from resihp.protocol import framing
from resihp.protocol.channels import LocalChannel, SecureChannel
from resihp.protocol.framing import Envelope, LocalCodec, SecureCodec
from resihp.protocol.messages import AgentMessage, Exited, Halt, Inject, KillNode, OperatorReply, Park, WorkerOrder
from resihp.protocol.serving import serve

KEY = bytes(range(32))
OTHER_KEY = bytes(32)

Codec = SecureCodec[Any]
EXITED: Any = {"rank": st.integers(0, 2**31), "pid": st.integers(1, 2**22), "status": st.integers(-64, 255)}
messages = st.lists(st.builds(Exited, **EXITED), max_size=6)


def codec(side: Literal["client", "server"], key: bytes = KEY, nonce: bytes | None = None) -> Codec:
    return SecureCodec(key, side, AgentMessage, nonce=nonce)


def introduce(client: Codec, server: Codec) -> None:
    """The handshake, both ways."""
    to_server, to_client = client.greeting, server.greeting
    while to_server or to_client:
        list(server.feed(to_server))
        list(client.feed(to_client))
        to_server, to_client = client.take_reply(), server.take_reply()


def pair() -> tuple[Codec, Codec]:
    client, server = codec("client"), codec("server")
    introduce(client, server)
    assert client.proven
    assert server.proven
    return client, server


def pieces(content: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [content[a:b] for a, b in itertools.pairwise(edges)]


# --- envelopes ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.none() | st.builds(Exited, **EXITED))
def test_envelopes_arrive_as_they_were_sent(number: int, acknowledged: int, message: Exited | None) -> None:
    receives = Envelope[AgentMessage] | Inject
    envelope = Envelope(number=number, acknowledged=acknowledged, message=message)
    sender, receiver = LocalCodec[Any](receives), LocalCodec[Any](receives)
    ask = Inject(kind="kill", rank=1)
    assert list(receiver.feed(sender.encode(envelope) + sender.encode(ask))) == [envelope, ask]


def test_any_message_that_fits_an_envelope_fits_a_frame() -> None:
    body = msgspec.Raw(msgspec.msgpack.encode("x" * (framing.MAX_MESSAGE_BYTES - 5)))
    assert len(body) == framing.MAX_MESSAGE_BYTES
    LocalCodec[Any](AgentMessage).encode(Envelope(number=2**64 - 1, acknowledged=2**64 - 1, message=body))


def test_messages_of_the_wrong_direction_are_refused_in_envelopes_too() -> None:
    frame = LocalCodec[Any](AgentMessage).encode(Envelope(message=KillNode(signal=9)))
    with pytest.raises(ProtocolError, match="malformed message"):
        list(LocalCodec[Any](Envelope[AgentMessage]).feed(frame))


# --- secure frames ------------------------------------------------------------------------------------------------


@given(messages, st.lists(st.integers(0, 10_000)))
def test_what_is_sent_arrives_however_it_is_cut(sent: list[Exited], cuts: list[int]) -> None:
    client, server = pair()
    stream = b"".join(client.encode(message) for message in sent)
    assert [message for piece in pieces(stream, cuts) for message in server.feed(piece)] == sent


@given(st.lists(st.integers(0, 10_000)))
def test_handshake_may_be_cut_anywhere(cuts: list[int]) -> None:
    client, server = codec("client"), codec("server")
    list(client.feed(server.greeting))
    for piece in pieces(client.greeting + client.take_reply(), cuts):
        assert list(server.feed(piece)) == []
    assert server.proven


def test_wrong_key_is_named() -> None:
    client, server = codec("client", OTHER_KEY), codec("server")
    with pytest.raises(ProtocolError, match="wrong key"):
        introduce(client, server)
    assert not server.proven


@given(st.binary(min_size=1, max_size=200))
def test_garbage_instead_of_a_greeting_is_named(garbage: bytes) -> None:
    server = codec("server")
    if framing.MAGIC.startswith(garbage[: len(framing.MAGIC)]):
        return
    with pytest.raises(ProtocolError, match="garbage"):
        list(server.feed(garbage))


@given(st.binary(min_size=100, max_size=400))
def test_garbage_after_the_greeting_never_proves_the_key(garbage: bytes) -> None:
    server = codec("server")
    with contextlib.suppress(ProtocolError):
        list(server.feed(codec("client").greeting + garbage))
    assert not server.proven


@given(messages.filter(bool), st.data())
def test_any_flipped_bit_is_refused_and_nothing_after_it_is_read(sent: list[Exited], data: st.DataObject) -> None:
    client, server = pair()
    frames = [client.encode(message) for message in sent]
    stream = bytearray(b"".join(frames))
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    got: list[Any] = []
    refused = False
    try:
        for message in server.feed(bytes(stream)):
            got.append(message)
        server.end()
    except ProtocolError:
        refused = True
    assert refused
    ends = [sum(map(len, frames[: i + 1])) for i in range(len(frames))]
    assert got == [message for message, end in zip(sent, ends, strict=True) if end <= bit // 8]


def test_replayed_frame_is_named() -> None:
    client, server = pair()
    frame = client.encode(Exited(rank=1, pid=2, status=0))
    assert len(list(server.feed(frame))) == 1
    with pytest.raises(ProtocolError, match="replayed frame: number 1 instead of 2"):
        list(server.feed(frame))


def test_dropped_and_swapped_frames_are_refused() -> None:
    client, server = pair()
    first, second = (client.encode(Exited(rank=rank, pid=2, status=0)) for rank in (1, 2))
    with pytest.raises(ProtocolError, match="replayed"):
        list(server.feed(second + first))


def test_frame_of_another_connection_is_refused() -> None:
    client, _ = pair()
    _, server = pair()
    with pytest.raises(ProtocolError, match="another connection"):
        list(server.feed(client.encode(Exited(rank=1, pid=2, status=0))))


def test_whole_recorded_connection_cannot_be_played_again() -> None:
    client, server = codec("client"), codec("server")
    list(client.feed(server.greeting))
    recorded = client.greeting + client.take_reply()
    list(server.feed(recorded))
    list(client.feed(server.take_reply()))
    recorded += client.encode(Exited(rank=1, pid=2, status=0))
    again = codec("server")
    with pytest.raises(ProtocolError, match="wrong key, or a frame of another connection"):
        list(again.feed(recorded))


def test_frames_cannot_be_reflected() -> None:
    client, server = pair()
    with pytest.raises(ProtocolError, match="altered"):
        list(client.feed(client.encode(Exited(rank=1, pid=2, status=0))))
    mirror = codec("server")
    with pytest.raises(ProtocolError, match="echoes"):
        list(mirror.feed(mirror.greeting))
    del server


def test_oversize_frames_are_refused_from_their_header_and_earlier_without_proof() -> None:
    client, server = pair()
    with pytest.raises(ProtocolError, match="oversize"):
        list(server.feed((framing.MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(8)))
    stranger = codec("server")
    with pytest.raises(ProtocolError, match="oversize"):
        list(stranger.feed(client.greeting + (framing.MAX_UNPROVEN_BYTES + 1).to_bytes(4, "big") + bytes(8)))
    with pytest.raises(ProtocolError, match="a frame holds"):
        client.encode(Inject(kind="x" * framing.MAX_FRAME_BYTES))


@given(st.integers(1, 60))
def test_truncated_stream_is_told(cut: int) -> None:
    client, server = pair()
    frame = client.encode(Exited(rank=1, pid=2, status=0))
    assert list(server.feed(frame[: min(cut, len(frame) - 1)])) == []
    with pytest.raises(ProtocolError, match="truncated"):
        server.end()
    with pytest.raises(ProtocolError, match="closed before it proved the key"):
        codec("server").end()


def test_authentic_message_of_another_type_is_refused() -> None:
    client, server = pair()
    with pytest.raises(ProtocolError, match="malformed"):
        list(server.feed(client.encode(OperatorReply(ok=True, text=""))))


def test_key_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="31 bytes"):
        codec("client", bytes(31))


# --- local frames -------------------------------------------------------------------------------------------------


@given(messages, st.lists(st.integers(0, 10_000)))
def test_local_frames_arrive_however_they_are_cut(sent: list[Exited], cuts: list[int]) -> None:
    local: LocalCodec[Any] = LocalCodec(AgentMessage)
    stream = b"".join(local.encode(message) for message in sent)
    assert [message for piece in pieces(stream, cuts) for message in local.feed(piece)] == sent
    local.end()


@given(st.binary(min_size=1, max_size=100))
def test_local_garbage_raises_nothing_but_protocol_errors(garbage: bytes) -> None:
    local: LocalCodec[Any] = LocalCodec(AgentMessage)
    with pytest.raises(ProtocolError, match="malformed"):
        list(local.feed(len(garbage).to_bytes(4, "big") + garbage))
    with pytest.raises(ProtocolError, match="oversize"):
        list(local.feed(b"\xff\xff\xff\xff"))


def channels() -> tuple[LocalChannel, LocalChannel]:
    ours, theirs = socket.socketpair()
    return LocalChannel(ours), LocalChannel(theirs)


def test_local_channel_reads_one_frame_at_a_time_so_that_it_can_be_polled() -> None:
    import select

    ours, theirs = channels()
    ours.send(Park(epoch=2, reason="a"))
    ours.send(Halt(reason="b"))
    assert theirs.recv(WorkerOrder) == Park(epoch=2, reason="a")
    assert select.select([theirs], [], [], 0)[0]
    assert theirs.recv(WorkerOrder) == Halt(reason="b")
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv(WorkerOrder)
    theirs.close()


def test_local_channel_may_be_sent_on_by_many_threads() -> None:
    ours, theirs = channels()
    text = "x" * 100_000
    threads = [
        threading.Thread(target=lambda: [ours.send(Park(epoch=epoch, reason=text)) for epoch in range(20)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert sorted(theirs.recv(WorkerOrder).epoch for _ in range(80)) == sorted(list(range(20)) * 4)
    for thread in threads:
        thread.join()
    ours.close()
    theirs.close()


def test_a_peer_that_has_the_whole_message_may_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    send_fds = socket.send_fds

    def send_and_lose_the_peer(*arguments: Any) -> int:
        sent = send_fds(*arguments)
        theirs.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_lose_the_peer)
    with ours:
        LocalChannel(ours).send(Exited(rank=1, pid=2, status=0), [ours.fileno()])


def test_local_channel_passes_file_descriptors_in_order() -> None:
    ours, theirs = channels()
    for epoch in range(3):
        read, write = os.pipe()
        os.write(write, bytes([epoch]))
        os.close(write)
        ours.send(Park(epoch=epoch, reason="r" * 70_000), [read])
        os.close(read)
        order = theirs.recv(WorkerOrder)
        descriptor = theirs.take_descriptor()
        assert not os.get_inheritable(descriptor)
        assert os.read(descriptor, 1) == bytes([order.epoch])
        os.close(descriptor)
    with pytest.raises(ProtocolError):
        theirs.take_descriptor()
    ours.close()
    theirs.close()


# --- a listener ---------------------------------------------------------------------------------------------------


def served(play: Callable[[int, list[Any], list[str]], Awaitable[None]], proof_timeout_s: float = 5.0) -> None:
    """Run `play(port, received, refused)` against a listener that answers each message with an `OperatorReply`."""

    async def main() -> None:
        received: list[Any] = []
        refused: list[str] = []

        async def handle(channel: SecureChannel[Any]) -> None:
            while (message := await channel.recv()) is not None:
                received.append(message)
                await channel.send(OperatorReply(ok=True, text=str(message.rank)))

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = await serve(
            listener, KEY, AgentMessage, handle, lambda _, why: refused.append(why), proof_timeout_s=proof_timeout_s
        )
        async with server, asyncio.timeout(20):
            await play(port, received, refused)

    asyncio.run(main())


async def throw(port: int, content: bytes) -> None:
    """Send bytes and wait until the listener has closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    try:
        while await reader.read(1000):
            pass
    except ConnectionError:
        pass
    writer.close()


def test_good_connection_is_not_disturbed_by_bad_ones() -> None:
    async def play(port: int, received: list[Any], refused: list[str]) -> None:
        good: SecureChannel[OperatorReply] = await SecureChannel.connect("127.0.0.1", port, KEY, OperatorReply)
        greeting = framing.MAGIC + os.urandom(32)
        bad = [
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(5000),
            greeting + os.urandom(500),
            greeting + b"\xff" * 12,
            greeting + bytes(12) + bytes(32),
        ]
        for i, content in enumerate(bad):
            await throw(port, content)
            await good.send(Exited(rank=i, pid=1, status=0))
            assert await good.recv() == OperatorReply(ok=True, text=str(i))
        with pytest.raises(ProtocolError):
            await SecureChannel.connect("127.0.0.1", port, OTHER_KEY, OperatorReply)
        await good.send(Exited(rank=99, pid=1, status=0))
        assert await good.recv() == OperatorReply(ok=True, text="99")
        assert [message.rank for message in received] == [0, 1, 2, 3, 4, 99]
        assert len(refused) == 6
        assert any("garbage" in why for why in refused)
        assert any("oversize" in why for why in refused)
        assert any("wrong key" in why for why in refused)
        good.close()
        await good.flushed()

    served(play)


def test_client_refuses_a_server_without_the_key() -> None:
    async def main() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(codec("server", OTHER_KEY).greeting + bytes(12) + os.urandom(32))
            await reader.read(1000)
            writer.close()

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(ProtocolError, match="wrong key"):
                await SecureChannel.connect("127.0.0.1", port, KEY, OperatorReply)

    asyncio.run(main())
