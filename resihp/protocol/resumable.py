"""A conversation that survives its connections: every message is delivered once and in order, even if connections
break.

This is one side of the conversation. Agents (`resihp.wrapper.agent.process`) and the supervisor, for each agent
(`resihp.wrapper.supervisor.agents`), use the same class. A posted message has a number and is stored until the other
side has acknowledged this number. Every envelope carries an acknowledgement; `acknowledge`, called about once a second,
sends an acknowledgement alone if there is no other message. The first envelope on a new connection contains the number
of the last message that its sender has received; after this envelope, the recipient sends all later messages again.
Duplicates are recognised by their numbers and dropped. Messages of number 0 are not stored: they are lost with their
connection, never repeated.

If more than `most_bytes` wait for acknowledgement, the other side does not read: the conversation is `overdue`, and its
owner disconnects. This module uses no socket and no clock, and decides nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol.framing import MAX_MESSAGE_BYTES, Envelope

MAX_KEPT_BYTES = 32 << 20
"""Size limit of unacknowledged messages. It is half of `channels.MAX_UNSENT_BYTES`, so that a new connection can send
all of them at once."""

T = TypeVar("T")

Post = Callable[[Envelope[Any]], None]
"""Queues an envelope on a connection. Raises ConnectionError if the connection is closed."""


class Conversation(Generic[T]):
    """One side of a conversation. `T` is the type of the messages that it receives. Not thread-safe."""

    def __init__(self, most_bytes: int = MAX_KEPT_BYTES) -> None:
        self.sent = 0
        """Number of the last message posted."""
        self.received = 0
        """Number of the last message received; all earlier messages have been received as well."""
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, msgspec.Raw]] = deque()
        self._kept_bytes = 0
        self._acknowledged_to_peer = 0
        self._post: Post | None = None
        self._resumed = False

    @property
    def acknowledged(self) -> int:
        """Number of the last message that the other side has acknowledged."""
        return self._kept[0][0] - 1 if self._kept else self.sent

    @property
    def overdue(self) -> bool:
        """Whether more bytes than `most_bytes` wait for acknowledgement."""
        return self._kept_bytes > self._most_bytes

    def connect(self, post: Post, first: msgspec.Struct | None = None) -> None:
        """Continue over a new connection, replacing any earlier one. `first` is sent at once, without a number."""
        self._post = post
        self._resumed = False
        self._send(Envelope(acknowledged=self.received, message=first))

    def disconnect(self) -> None:
        """Record that the connection is lost; posted messages wait for the next connection."""
        self._post = None
        self._resumed = False

    def post(self, message: msgspec.Struct | msgspec.Raw) -> int:
        """Post a message that must not be lost; return its number. Raises ProtocolError if it is larger than a frame
        may be.

        A message of type `Raw` is already encoded, for many recipients.
        """
        body = message if isinstance(message, msgspec.Raw) else msgspec.Raw(msgspec.msgpack.encode(message))
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{type(message).__name__}: {len(body)} bytes; a frame holds {MAX_MESSAGE_BYTES}")
        self.sent += 1
        self._kept.append((self.sent, body))
        self._kept_bytes += len(body)
        if self._resumed:
            self._send(Envelope(number=self.sent, acknowledged=self.received, message=body))
        return self.sent

    def mention(self, message: msgspec.Struct) -> None:
        """Send a message that may be lost; it is dropped if there is no connection."""
        if self._resumed:
            self._send(Envelope(acknowledged=self.received, message=message))

    def acknowledge(self) -> None:
        """Acknowledge received messages, unless an earlier envelope has done so."""
        if self._resumed and self._acknowledged_to_peer < self.received:
            self._send(Envelope(acknowledged=self.received))

    def can_resume(self, acknowledged: int) -> bool:
        """Return whether this conversation can continue with a side that has received messages up to number
        `acknowledged`."""
        return self.acknowledged <= acknowledged <= self.sent

    def take(self, envelope: Envelope[T]) -> T | None:
        """Process an envelope of the present connection. Return its message, or None if it has none or only a
        duplicate.

        Raises ProtocolError if the envelope's numbers do not fit this conversation.
        """
        if not self._resumed and not self.can_resume(envelope.acknowledged):
            raise ProtocolError(
                f"has received {envelope.acknowledged} messages, where {self.acknowledged} to {self.sent} are possible"
            )
        if envelope.acknowledged > self.sent:
            raise ProtocolError(f"acknowledges message {envelope.acknowledged}, but only {self.sent} were sent")
        while self._kept and self._kept[0][0] <= envelope.acknowledged:
            self._kept_bytes -= len(self._kept.popleft()[1])
        if not self._resumed and self._post is not None:
            self._resumed = True
            for number, body in list(self._kept):
                self._send(Envelope(number=number, acknowledged=self.received, message=body))
        if envelope.number == 0:
            return envelope.message
        if envelope.number <= self.received:
            return None
        if envelope.number != self.received + 1:
            raise ProtocolError(f"message {envelope.number} came instead of {self.received + 1}")
        self.received += 1
        return envelope.message

    def _send(self, envelope: Envelope[Any]) -> None:
        if self._post is None:
            return
        try:
            self._post(envelope)
        except ConnectionError:
            self.disconnect()
        else:
            self._acknowledged_to_peer = envelope.acknowledged
