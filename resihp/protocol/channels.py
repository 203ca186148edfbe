"""Channels: sockets that carry messages in frames (`framing`).

`LocalChannel` is a blocking channel between processes of one job on one node. `SecureChannel` is an authenticated
asyncio connection. This module decides when to disconnect a peer that does not read or does not answer. It never keeps
a message for a later connection (`resumable` does). Used by agents, workers, the fork server, the supervisor and the
command line.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol.framing import (
    LOCAL_HEADER_BYTES,
    SecureCodec,
    Side,
    announced_bytes,
    decode,
    encode,
    local_frame,
)

MAX_UNSENT_BYTES = 64 << 20
"""Number of unsent bytes at which a connection is aborted, because its peer does not read."""
_CHUNK_BYTES = 1 << 16

T = TypeVar("T")


class LocalChannel:
    """A blocking channel on an inherited socket. Any thread may call `send`; only one thread may call `recv`.

    `recv` reads one frame and nothing beyond it, so that the socket can be polled between frames.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._descriptors: list[int] = []

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send one message, with file descriptors. Raises OSError if the peer has closed its end."""
        frame = local_frame(encode(message))
        with self._lock:
            if descriptors:
                sent = socket.send_fds(self._sock, [frame], list(descriptors))
                frame = frame[sent:]
            if frame:  # after receiving the whole frame, the peer may have closed its end
                self._sock.sendall(frame)

    def recv(self, receives: Any) -> Any:
        """Return the next message, of the type or union `receives`.

        Raises EOFError if the peer has closed its end (also inside a frame), ProtocolError for an invalid frame,
        OSError.
        """
        length = announced_bytes(self._exactly(LOCAL_HEADER_BYTES))
        decoder = self._decoders.get(receives)
        if decoder is None:
            decoder = self._decoders[receives] = msgspec.msgpack.Decoder(receives)
        return decode(decoder, self._exactly(length))

    def take_descriptor(self) -> int:
        """Return and remove the oldest file descriptor received. Descriptors are in the order of their messages.

        Raises ProtocolError if there is none.
        """
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
            chunk, descriptors, _, _ = socket.recv_fds(self._sock, count - len(content), 16)
            for descriptor in descriptors:  # `recv_fds` of Python 3.11 passes no flags on
                os.set_inheritable(descriptor, False)
            self._descriptors += descriptors
            if not chunk:
                raise EOFError("the other end of the socket is closed")
            content += chunk
        return bytes(content)


class NoAnswerError(TimeoutError):
    """The connection was accepted, but the peer did not complete the handshake in time: it is busy, stopped or not yet
    started."""


class SecureChannel(Generic[T]):
    """An authenticated asyncio connection, created by `connect` on the client's side and by `resihp.protocol.serving`
    on the server's side."""

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
        """Address of this process on the connection; empty if unknown."""

    @classmethod
    async def connect(
        cls, host: str, port: int, key: bytes, receives: Any, *, timeout_s: float = 5.0
    ) -> SecureChannel[T]:
        """Connect, and authenticate both sides by the job's key. Raises OSError, TimeoutError (`NoAnswerError`),
        ProtocolError."""
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
        """Perform the handshake. Called by `connect` and `serving`. Raises ProtocolError."""
        self._writer.write(self._codec.greeting)
        while not self._codec.proven:
            if not await self._read():
                self._codec.end()

    def post(self, message: msgspec.Struct) -> None:
        """Queue one message without waiting. Raises ConnectionError if the connection is closed or the peer does not
        read."""
        transport = self._writer.transport
        if transport.is_closing():
            raise ConnectionResetError(f"connection to {self.peer} is closed")
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            transport.abort()
            raise ConnectionAbortedError(f"{self.peer} does not read: {MAX_UNSENT_BYTES} bytes wait for it")
        self._writer.write(self._codec.encode(message))

    async def send(self, message: msgspec.Struct) -> None:
        """Queue one message and wait until the socket accepts it. Raises ConnectionError."""
        self.post(message)
        await self._writer.drain()

    async def recv(self) -> T | None:
        """Return the next message; None at the end of the connection. Raises ProtocolError for an invalid frame, after
        all valid messages before it have been returned."""
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
        """Close the connection without waiting. Queued messages are still sent."""
        self._writer.close()

    def abort(self) -> None:
        """Close the connection at once and drop queued messages."""
        self._writer.transport.abort()

    async def flushed(self) -> None:
        """Wait until the connection is closed, after `close`."""
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
