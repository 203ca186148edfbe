"""A conversation that survives its connections: every message arrives once and in order, whatever breaks in between.

This is one side's half; agents (`wrapper.agent.process`) and the supervisor's view of each
(`wrapper.supervisor.agents`) use it alike. Posted messages are numbered and kept until the other side has acknowledged
their numbers. Every envelope carries an acknowledgement; `acknowledge`, called about once a second, sends one where
there is no other message. The first envelope on a new connection has the number of the last message its sender has
received; once that of the other side has arrived, all messages that it lacks are sent again. Duplicates are dropped by
their numbers. Messages of number 0 are not part of this: they are lost with their connection, never repeated.

A side that lets more than `most_bytes` pile up does not read: the conversation is `overdue`, and its owner gives the
other side up. Knows no socket and no clock, and decides nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol.framing import MAX_MESSAGE_BYTES, Envelope

MAX_KEPT_BYTES = 32 << 20
"""Half the backlog at which a connection gives its peer up (`channels.MAX_UNSENT_BYTES`): everything kept fits at
once."""

T = TypeVar("T")

Post = Callable[[Envelope[Any]], None]
"""Queues an envelope on a connection; raises ConnectionError once that is closed."""


class Conversation(Generic[T]):
    """One side of a conversation; `T` is the type of the other side's messages. Not thread-safe."""

    def __init__(self, most_bytes: int = MAX_KEPT_BYTES) -> None:
        self.sent = 0
        """Number of the last message posted."""
        self.received = 0
        """Number of the last message received, including all before it."""
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, msgspec.Raw]] = deque()
        self._kept_bytes = 0
        self._acknowledged_to_peer = 0
        self._post: Post | None = None
        self._resumed = False

    @property
    def acknowledged(self) -> int:
        """Number of the last message that the other side is known to have received."""
        return self._kept[0][0] - 1 if self._kept else self.sent

    @property
    def overdue(self) -> bool:
        """Whether more bytes wait for acknowledgement than may be kept."""
        return self._kept_bytes > self._most_bytes

    def connect(self, post: Post, first: msgspec.Struct | None = None) -> None:
        """Continue over this connection, whatever was before; `first` is sent at once and not numbered."""
        self._post = post
        self._resumed = False
        self._send(Envelope(acknowledged=self.received, message=first))

    def disconnect(self) -> None:
        """Note that there is no connection; posted messages wait for the next one."""
        self._post = None
        self._resumed = False

    def post(self, message: msgspec.Struct | msgspec.Raw) -> int:
        """Post a message that must not be lost; return its number. Raises ProtocolError if it does not fit a frame.

        `Raw`: it is already encoded, for many recipients.
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
        """Send a message that may be lost, and is lost if there is no connection."""
        if self._resumed:
            self._send(Envelope(acknowledged=self.received, message=message))

    def acknowledge(self) -> None:
        """Acknowledge received messages, if that has not been done yet."""
        if self._resumed and self._acknowledged_to_peer < self.received:
            self._send(Envelope(acknowledged=self.received))

    def can_resume(self, acknowledged: int) -> bool:
        """Return whether a side that has received so many messages is the one that this conversation was with."""
        return self.acknowledged <= acknowledged <= self.sent

    def take(self, envelope: Envelope[T]) -> T | None:
        """Return the message of an envelope of the present connection, or None if it has no new one.

        Raises ProtocolError if the other side cannot be the one that this conversation was with.
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
