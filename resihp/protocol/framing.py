"""Frames on sockets: how a message becomes bytes, and which bytes are refused.

Two codecs without any input or output of their own, and the channels that drive them:

===============  ==============================  =========================================================
codec            channel                         carries
===============  ==============================  =========================================================
`LocalCodec`     `LocalChannel` (blocking)       inherited socket pairs: worker, agent, fork server
`SecureCodec`    `SecureChannel` (asyncio)       TCP: agents and operators to the supervisor
===============  ==============================  =========================================================

A local frame is a big-endian u32 length and a msgpack body (`LocalFrames` returns undecoded bodies). A secure
connection opens with a greeting from both sides (8 bytes of magic, 32 random bytes); each direction has its own key,
HMAC-SHA256(job key, direction, both nonces), so that no frame can be replayed on another connection or reflected. A
secure frame is u32 length, u64 number, body, and HMAC-SHA256 over the three. Frame 0 of each direction is empty and
proves the key; until it has arrived, frames are small.

Nothing here is encrypted: others on the network can read the job's reports, but cannot talk to it. Nothing is
unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from resihp.errors import ProtocolError

MAX_FRAME_BYTES = 4 << 20
MAX_UNPROVEN_BYTES = 1 << 10
"""Largest frame accepted before the peer has proven that it knows the key."""
MAX_UNSENT_BYTES = 64 << 20
"""Number of unsent bytes at which a peer that does not read is given up."""
KEY_BYTES = 32
NONCE_BYTES = 32
MAGIC = b"RESIHP\x00\x02"
"""The last byte is the version of the protocol, messages included."""

_LENGTH = struct.Struct(">I")
_HEADER = struct.Struct(">IQ")
_MAC_BYTES = 32
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")
Side = Literal["client", "server"]


class Envelope(msgspec.Struct, Generic[T], frozen=True, kw_only=True, tag=True):
    """The envelope around each message of agents and supervisor, so that none is lost with a connection.

    `number` counts the sender's messages from 1 over all connections of a conversation; 0 is a message that may be lost
    (a heartbeat, the first of a connection, an answer to a stranger). `acknowledged` is the number of the last message
    that the sender has received, including all before it; an envelope without a message only acknowledges
    (`resihp.protocol.resumable`).
    """

    number: int = 0
    acknowledged: int = 0
    message: T | None = None


MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 64
"""Largest message in an envelope, in bytes."""


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Decode a message. Raises ProtocolError if it is not one of the decoder's messages."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message. Raises ProtocolError if it does not fit a frame."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__}: {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return body


def local_frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class LocalFrames:
    """Splits a stream into the bodies of local frames, for forwarding without decoding."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Add received bytes, yield complete bodies. Raises ProtocolError at a frame that is too long."""
        self._buffer += chunk
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"oversize frame: {length} bytes announced, {MAX_FRAME_BYTES} allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
            del self._buffer[:end]
            yield body

    def end(self) -> None:
        """Note the end of the stream. Raises ProtocolError if that was inside a frame."""
        if self._buffer:
            raise ProtocolError(f"truncated frame: the stream ended after {len(self._buffer)} bytes of it")


class LocalCodec(Generic[T]):
    """Length and msgpack, for sockets that only our own processes can hold. `receives`: a message type or union."""

    def __init__(self, receives: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)
        self._frames = LocalFrames()

    def encode(self, message: msgspec.Struct) -> bytes:
        return local_frame(encode(message))

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Add received bytes, yield complete messages. Raises ProtocolError at the first invalid frame."""
        for body in self._frames.feed(chunk):
            yield decode(self._decoder, body)

    def end(self) -> None:
        """Note the end of the stream. Raises ProtocolError if that was inside a frame."""
        self._frames.end()


class SecureCodec(Generic[T]):
    """One end of one authenticated connection.

    Send `greeting` at once. After each `feed`, send `take_reply()`. Messages may be encoded once `proven` is true.
    `nonce` is random; tests pass their own.
    """

    def __init__(self, key: bytes, side: Side, receives: Any, *, nonce: bytes | None = None) -> None:
        if len(key) != KEY_BYTES:
            raise ProtocolError(f"key: {len(key)} bytes, {KEY_BYTES} needed")
        self._key = key
        self._side: Side = side
        self._nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(receives)
        self._buffer = bytearray()
        self._reply = b""
        self._send_key: bytes | None = None
        self._receive_key = b""
        self._sent = 0
        self._received = 0

    @property
    def greeting(self) -> bytes:
        return MAGIC + self._nonce

    @property
    def proven(self) -> bool:
        """Whether the peer has proven that it knows the key."""
        return self._received > 0

    def take_reply(self) -> bytes:
        """Return the bytes of the handshake to send now."""
        reply, self._reply = self._reply, b""
        return reply

    def encode(self, message: msgspec.Struct) -> bytes:
        assert self.proven, "the handshake comes first"
        return self._seal(encode(message))

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Add received bytes, yield authentic messages. Raises ProtocolError at the first invalid byte."""
        self._buffer += chunk
        if self._send_key is None and not self._greeted():
            return
        while (body := self._open()) is not None:
            if self._received > 1:
                yield decode(self._decoder, body)
            elif body:
                raise ProtocolError("malformed handshake: the first frame is not empty")

    def end(self) -> None:
        """Note the end of the stream. Raises ProtocolError if that was inside a frame or before the key was proven."""
        if not self.proven:
            raise ProtocolError("closed before it proved the key")
        if self._buffer:
            raise ProtocolError(f"truncated frame: the stream ended after {len(self._buffer)} bytes of it")

    def _greeted(self) -> bool:
        start = bytes(self._buffer[: len(MAGIC)])
        if start != MAGIC[: len(start)]:
            raise ProtocolError(f"garbage: {start!r} is not a resihp greeting of this version")
        if len(self._buffer) < len(MAGIC) + NONCE_BYTES:
            return False
        theirs = bytes(self._buffer[len(MAGIC) : len(MAGIC) + NONCE_BYTES])
        del self._buffer[: len(MAGIC) + NONCE_BYTES]
        if hmac.compare_digest(theirs, self._nonce):
            raise ProtocolError("replayed greeting: the peer echoes our own")
        nonces = self._nonce + theirs if self._side == "client" else theirs + self._nonce
        to_server = hmac.digest(self._key, b"client to server" + nonces, "sha256")
        to_client = hmac.digest(self._key, b"server to client" + nonces, "sha256")
        ours, self._receive_key = (to_server, to_client) if self._side == "client" else (to_client, to_server)
        self._send_key = ours
        self._reply += self._seal(b"")
        return True

    def _seal(self, body: bytes) -> bytes:
        assert self._send_key is not None
        frame = _HEADER.pack(len(body), self._sent) + body
        self._sent += 1
        return frame + hmac.digest(self._send_key, frame, "sha256")

    def _open(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        length, number = _HEADER.unpack_from(self._buffer)
        limit = MAX_FRAME_BYTES if self.proven else MAX_UNPROVEN_BYTES
        if length > limit:
            raise ProtocolError(f"oversize frame: {length} bytes announced, {limit} allowed")
        signed = _HEADER.size + length
        if len(self._buffer) < signed + _MAC_BYTES:
            return None
        with memoryview(self._buffer) as view:
            body, mac = bytes(view[_HEADER.size : signed]), bytes(view[signed : signed + _MAC_BYTES])
            expected = hmac.digest(self._receive_key, view[:signed], "sha256")
        del self._buffer[: signed + _MAC_BYTES]
        if not hmac.compare_digest(expected, mac):
            if not self.proven:
                raise ProtocolError("wrong key, or a frame of another connection")
            raise ProtocolError(f"frame {self._received}: altered, or of another connection")
        if number != self._received:
            raise ProtocolError(f"replayed frame: number {number} instead of {self._received}")
        self._received += 1
        return body


class LocalChannel:
    """A blocking channel on an inherited socket: `send` from any thread, `recv` from one.

    `recv` reads one frame and not a byte more, so that the socket can be polled between frames.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._descriptors: list[int] = []

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send one message, with file descriptors. Raises OSError when the peer is gone."""
        frame = local_frame(encode(message))
        with self._lock:
            if descriptors:
                sent = socket.send_fds(self._sock, [frame], list(descriptors))
                frame = frame[sent:]
            if frame:  # a peer that has all of it may have closed its end already
                self._sock.sendall(frame)

    def recv(self, receives: Any) -> Any:
        """Return the next message, of the type or union `receives`.

        Raises EOFError when the peer has closed (also inside a frame), ProtocolError for a bad frame, OSError.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"oversize frame: {length} bytes announced, {MAX_FRAME_BYTES} allowed")
        decoder = self._decoders.get(receives)
        if decoder is None:
            decoder = self._decoders[receives] = msgspec.msgpack.Decoder(receives)
        return decode(decoder, self._exactly(length))

    def take_descriptor(self) -> int:
        """Return the oldest file descriptor received and not taken yet; they are in the order of the messages."""
        if not self._descriptors:
            raise ProtocolError("a file descriptor was announced but did not arrive")
        return self._descriptors.pop(0)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        content = bytearray()
        while len(content) < count:
            flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            chunk, descriptors, _, _ = socket.recv_fds(self._sock, count - len(content), 16, flags)
            self._descriptors += descriptors
            if not chunk:
                raise EOFError("the other end of the socket is closed")
            content += chunk
        return bytes(content)


class NoAnswerError(TimeoutError):
    """The connection was accepted, but no greeting came in time: the peer is busy, stopped or not yet started."""


class SecureChannel(Generic[T]):
    """An authenticated asyncio connection, made by `connect` or handed out by `resihp.protocol.serving`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, side: Side, receives: Any
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._codec: SecureCodec[T] = SecureCodec(key, side, receives)
        self._waiting: deque[T] = deque()
        self._refused: ProtocolError | None = None
        name = writer.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else "an unknown peer"
        self.peer_host = self.peer.rpartition(":")[0]
        own = writer.get_extra_info("sockname")
        self.own_host = str(own[0]) if isinstance(own, tuple) and own else ""
        """Address of this end of the connection."""

    @classmethod
    async def connect(
        cls, host: str, port: int, key: bytes, receives: Any, *, timeout_s: float = 5.0
    ) -> SecureChannel[T]:
        """Connect and prove the key both ways. Raises OSError, TimeoutError (`NoAnswerError`), ProtocolError."""
        channel: SecureChannel[T] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
                channel = cls(reader, writer, key, "client", receives)
                try:
                    await channel.prove()
                except BaseException:
                    channel.close()
                    raise
        except TimeoutError:
            if channel is None:
                raise
            raise NoAnswerError(f"{host}:{port}: no answer within {timeout_s:g} s") from None
        return channel

    async def prove(self) -> None:
        """Perform the handshake; called by `connect` and `serving`. Raises ProtocolError."""
        self._writer.write(self._codec.greeting)
        while not self._codec.proven:
            if not await self._read():
                self._codec.end()

    def post(self, message: msgspec.Struct) -> None:
        """Queue one message. Raises ConnectionError when the connection is closed or the peer does not read."""
        transport = self._writer.transport
        if transport.is_closing():
            raise ConnectionResetError(f"connection to {self.peer} is closed")
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()
            raise ConnectionAbortedError(f"{self.peer} does not read: {MAX_UNSENT_BYTES} bytes wait for it")
        self._writer.write(self._codec.encode(message))

    async def send(self, message: msgspec.Struct) -> None:
        """Queue one message and wait until the socket takes it. Raises ConnectionError."""
        self.post(message)
        await self._writer.drain()

    async def recv(self) -> T | None:
        """Return the next message; None when the connection has ended. Raises ProtocolError, after all good
        messages."""
        while not self._waiting:
            if self._refused is not None:
                raise self._refused
            try:
                if not await self._read():
                    return None
            except ProtocolError as error:
                self._refused = error
        return self._waiting.popleft()

    def close(self) -> None:
        """Close; queued messages are still sent, without waiting for it."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once; queued messages are lost."""
        self._writer.transport.abort()

    async def flushed(self) -> None:
        """Wait until a closed connection is gone."""
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return

    async def _read(self) -> bool:
        try:
            chunk = await self._reader.read(_CHUNK_BYTES)
        except (ConnectionError, TimeoutError):
            return False
        self._waiting += self._codec.feed(chunk)
        if reply := self._codec.take_reply():
            self._writer.write(reply)
        return bool(chunk)
