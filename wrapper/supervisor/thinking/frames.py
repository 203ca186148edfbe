"""What passes between the supervisor and who thinks for it: a length, then a question or an answer as msgpack.

On the pipes of a process that we started ourselves; still typed, and capped in size.
"""

from __future__ import annotations

import struct

import msgspec

from resihp.controller import interface as api

MOST_BYTES = 64 << 20
"""Of one frame: a question of 16,384 ranks has 0.3 MB."""
LENGTH = struct.Struct(">I")

QUESTIONS = msgspec.msgpack.Decoder(api.Think)
ANSWERS = msgspec.msgpack.Decoder(api.Thought)
_encoder = msgspec.msgpack.Encoder()


def frame(message: api.Think | api.Thought) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Of the body that follows. Raises ValueError for one that is none."""
    length: int = LENGTH.unpack(header)[0]
    if not 0 < length <= MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes; {MOST_BYTES} are the most")
    return length
