"""Frames on sockets: the encoding of messages as bytes, and the check of received bytes.

There are two codecs. They do no input or output themselves; `channels` calls them:

===============  ==============================  =========================================================
codec            channel                         carries
===============  ==============================  =========================================================
`LocalCodec`     `LocalChannel` (blocking)       inherited socket pairs: worker, agent, fork server
`SecureCodec`    `SecureChannel` (asyncio)       TCP: agents and operators to the supervisor
===============  ==============================  =========================================================

A local frame is a big-endian u32 length and a msgpack body (`LocalFrames` returns undecoded bodies). A secure
connection begins with a greeting from both sides (8 bytes of magic, 32 random bytes). Each direction has its own key,
HMAC-SHA256(job key, direction, both nonces), so that no frame can be replayed on another connection or reflected. A
secure frame consists of a u32 length, a u64 number, the body, and HMAC-SHA256 over these three. Frame 0 of each
direction is empty and proves that the sender knows the key; before it has arrived, only small frames are accepted.

Frames are authenticated but not encrypted: others on the network can read the job's reports, but cannot send messages.
This module never unpickles anything.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec

from resihp.errors import ProtocolError

MAX_FRAME_BYTES = 4 << 20
MAX_UNPROVEN_BYTES = 1 << 10
"""Size limit of a frame before the peer has proven that it knows the key."""
KEY_BYTES = 32
NONCE_BYTES = 32
MAGIC = b"RESIHP\x00\x02"
"""The last byte is the version of the protocol, including that of the messages."""

_LENGTH = struct.Struct(">I")
LOCAL_HEADER_BYTES = _LENGTH.size
_HEADER = struct.Struct(">IQ")
_MAC_BYTES = 32

T = TypeVar("T")
Side = Literal["client", "server"]


class Envelope(msgspec.Struct, Generic[T], frozen=True, kw_only=True, tag=True):
    """Wraps each message between agents and supervisor, so that no message is lost with a connection.

    `number` counts the sender's messages from 1, over all connections of a conversation. Number 0 marks a message that
    may be lost: a heartbeat, the first message of a connection, an answer to an unknown peer. `acknowledged` is the
    number of the last message that the sender of the envelope has received; all earlier messages have been received as
    well. An envelope without a message is only an acknowledgement (`resihp.protocol.resumable`).
    """

    number: int = 0
    acknowledged: int = 0
    message: T | None = None


MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 64
"""Size limit of a message in an envelope, in bytes."""


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """Decode a message. Raises ProtocolError if the bytes are not a message of the decoder's type."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message. Raises ProtocolError if it is larger than a frame may be."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__}: {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return body


def local_frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def announced_bytes(frame: bytes | bytearray) -> int:
    """Return the body length in the header of a local frame. Raises ProtocolError if it exceeds `MAX_FRAME_BYTES`."""
    (length,) = _LENGTH.unpack_from(frame)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"oversize frame: {length} bytes announced, {MAX_FRAME_BYTES} allowed")
    return int(length)


class LocalFrames:
    """Splits a stream into the bodies of local frames, without decoding them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Add received bytes; yield each body that is complete. Raises ProtocolError for a frame that is too long."""
        self._buffer += chunk
        while len(self._buffer) >= LOCAL_HEADER_BYTES:
            end = LOCAL_HEADER_BYTES + announced_bytes(self._buffer)
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[LOCAL_HEADER_BYTES:end])
            del self._buffer[:end]
            yield body

    def end(self) -> None:
        """Mark the end of the stream. Raises ProtocolError if it is inside a frame."""
        if self._buffer:
            raise ProtocolError(f"truncated frame: the stream ended after {len(self._buffer)} bytes of it")


class LocalCodec(Generic[T]):
    """Encodes messages as length and msgpack, for sockets between processes of one job on one node. `receives` is a
    message type or union."""

    def __init__(self, receives: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)
        self._frames = LocalFrames()

    def encode(self, message: msgspec.Struct) -> bytes:
        return local_frame(encode(message))

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Add received bytes; yield each message that is complete. Raises ProtocolError at the first invalid frame."""
        for body in self._frames.feed(chunk):
            yield decode(self._decoder, body)

    def end(self) -> None:
        """Mark the end of the stream. Raises ProtocolError if it is inside a frame."""
        self._frames.end()


class SecureCodec(Generic[T]):
    """The codec of one end of an authenticated connection.

    The caller sends `greeting` at once, and `take_reply()` after each `feed`. It may encode messages once `proven` is
    true. `nonce` is random by default; tests pass their own.
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
        """Return and remove the bytes of the handshake that must be sent now."""
        reply, self._reply = self._reply, b""
        return reply

    def encode(self, message: msgspec.Struct) -> bytes:
        assert self.proven, "the handshake comes first"
        return self._seal(encode(message))

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Add received bytes; yield each authenticated message. Raises ProtocolError at the first invalid byte."""
        self._buffer += chunk
        if self._send_key is None and not self._greeted():
            return
        while (body := self._open()) is not None:
            if self._received > 1:
                yield decode(self._decoder, body)
            elif body:
                raise ProtocolError("malformed handshake: the first frame is not empty")

    def end(self) -> None:
        """Mark the end of the stream. Raises ProtocolError if it is inside a frame or before the peer has proven the
        key."""
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
