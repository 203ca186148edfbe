"""Frames between the supervisor and its planning process: a length, then a question or an answer as msgpack.

Sent over the socket of a process that the supervisor itself started; messages are nevertheless typed and limited in
size.
"""

from __future__ import annotations

import struct

import msgspec

from resihp.controller import interface as api

MAX_FRAME_BYTES = 64 << 20
"""Largest frame. For comparison: a question about 16,384 ranks has 0.3 MB."""
FRAME_LENGTH = struct.Struct(">I")

QUESTION_DECODER = msgspec.msgpack.Decoder(api.Think)
ANSWER_DECODER = msgspec.msgpack.Decoder(api.Thought)
_encoder = msgspec.msgpack.Encoder()


def frame(message: api.Think | api.Thought) -> bytes:
    body = _encoder.encode(message)
    return FRAME_LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Return the length of the body that follows a header. Raises ValueError if the length is out of range."""
    length: int = FRAME_LENGTH.unpack(header)[0]
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return length
