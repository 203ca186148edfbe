"""A conversation that survives its connections: every message arrives once and in order, whatever breaks in between.

One side's half; agents (`wrapper.agent.process`) and the supervisor's view of each (`wrapper.supervisor.agents`) use it
alike. What is posted is numbered and kept until the other side has acknowledged its number. Acknowledgements ride on
everything that is sent; `acknowledge`, called about once a second, sends them where there is nothing to ride on. The
first envelope on a new connection tells what its sender has received, and once that of the other side has come, all
that it lacks is sent again. What comes twice is dropped by its number. Messages of number 0 are outside of all this:
lost with their connection, never repeated.

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

MOST_BYTES = 32 << 20
"""Half of what a connection takes before it gives the peer up (`framing.MAX_UNSENT_BYTES`): all fits at once."""

T = TypeVar("T")

Post = Callable[[Envelope[Any]], None]
"""Queues an envelope on a connection; raises ConnectionError once that is closed."""


class Conversation(Generic[T]):
    """One side of it; `T` is what the other side says. Not thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.sent = 0
        """Number of the last message that was posted."""
        self.received = 0
        """Number of the last message that came, all before it included."""
        self._most_bytes = most_bytes
        self._kept: deque[tuple[int, msgspec.Raw]] = deque()
        self._kept_bytes = 0
        self._told = 0
        self._post: Post | None = None
        self._resumed = False

    @property
    def acknowledged(self) -> int:
        """Number of the last message that the other side is known to have received."""
        return self._kept[0][0] - 1 if self._kept else self.sent

    @property
    def overdue(self) -> bool:
        """Whether more is waiting to be acknowledged than may be kept."""
        return self._kept_bytes > self._most_bytes

    def connect(self, post: Post, first: msgspec.Struct | None = None) -> None:
        """Go on over this connection, whatever was before; `first` is said at once and outside of all numbers."""
        self._post = post
        self._resumed = False
        self._send(Envelope(acknowledged=self.received, message=first))

    def disconnect(self) -> None:
        """There is no connection; what is posted waits for the next one."""
        self._post = None
        self._resumed = False

    def post(self, message: msgspec.Struct | msgspec.Raw) -> int:
        """Say something that must not be lost; returns its number. Raises ProtocolError if it fits no frame.

        `Raw`: it is encoded already, for many.
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
        """Say something that may be lost, and is where there is no connection."""
        if self._resumed:
            self._send(Envelope(acknowledged=self.received, message=message))

    def acknowledge(self) -> None:
        """Tell the other side what has come, if it was not told yet."""
        if self._resumed and self._told < self.received:
            self._send(Envelope(acknowledged=self.received))

    def can_resume(self, acknowledged: int) -> bool:
        """Whether a side that has received so much is the one that this conversation was with."""
        return self.acknowledged <= acknowledged <= self.sent

    def take(self, envelope: Envelope[T]) -> T | None:
        """What an envelope of the present connection says that was not said before.

        Raises ProtocolError when the other side cannot be the one that this conversation was with.
        """
        if not self._resumed and not self.can_resume(envelope.acknowledged):
            raise ProtocolError(
                f"has received {envelope.acknowledged} messages, where {self.acknowledged} to {self.sent} are possible"
            )
        if envelope.acknowledged > self.sent:
            raise ProtocolError(f"acknowledges message {envelope.acknowledged}, and {self.sent} were sent")
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
            raise ProtocolError(f"message {envelope.number} came where {self.received + 1} is due")
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
            self._told = envelope.acknowledged
