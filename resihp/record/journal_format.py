"""Encode and decode the bytes of a journal's file: records in frames.

Format: the 8 bytes `RESIHPJ1`, then the records; each record is a little-endian u32 length, the u32 CRC-32 of the body,
and the body. A body is a msgpack-encoded `Record`. Decides whether a file is damaged or only has a torn tail; never
opens a file. Called by `journal_file` and `reading_on`, and for single records by all modules that send or keep copies
of records.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from resihp.errors import ProtocolError
from resihp.record.journal import Record

MAGIC = b"RESIHPJ1"
MAX_RECORD_BYTES = 16 << 20
"""Largest size of a record that is read, in bytes."""

_ANY_RECORD = b"\x83\xa3seq"
"""First bytes of the body of every record: a msgpack map of three fields, the first of which is `seq`."""

_MAX_SEARCHED_LENGTHS = 64
"""Largest number of bytes that the search for whole records in a damaged file may check, as a multiple of the file's
length. It stops a malicious file from keeping the search busy for ever."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    return _encoder.encode(record)


def decode(body: bytes) -> Record:
    """Decode the body of a record. Raises ProtocolError if it is not a record of this version."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"record is of another version: {error}") from error


def as_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def scan(content: bytes, name: str) -> Iterator[tuple[int, Record]]:
    """Yield (end offset, record) of every whole record. Raises ProtocolError if the content is not a journal of this
    version, or is damaged before its tail."""
    if content[: len(MAGIC)] != MAGIC[: len(content)]:
        raise ProtocolError(f"journal {name}: not a resihp journal")
    at = len(MAGIC)
    while (body := body_at(content, at)) is not None:
        try:
            record = decode(body)
        except ProtocolError as error:
            raise ProtocolError(f"journal {name}: at byte {at}: {error}") from error
        at += 8 + len(body)
        yield at, record
    offset = content.find(_ANY_RECORD, at + 8 + 1)  # no whole record follows a torn tail
    searched = 0
    while offset != -1:
        searched += min(int.from_bytes(content[offset - 8 : offset - 4], "little"), MAX_RECORD_BYTES)
        if searched > _MAX_SEARCHED_LENGTHS * len(content):
            raise ProtocolError(f"journal {name}: damaged at byte {at}, and the rest is not ours")
        if body_at(content, offset - 8) is not None:
            raise ProtocolError(
                f"journal {name}: damaged at byte {at}, and whole records follow from byte {offset - 8}: "
                "left as it is; restore it, or another node's copy of it"
            )
        offset = content.find(_ANY_RECORD, offset + 1)


def body_at(content: bytes, at: int) -> bytes | None:
    """Return the body of the record with a frame that begins at offset `at`; None if the record is not whole."""
    length = int.from_bytes(content[at : at + 4], "little")
    body = content[at + 8 : at + 8 + length]
    if not 0 < length <= MAX_RECORD_BYTES or len(body) < length:
        return None
    return body if zlib.crc32(body) == int.from_bytes(content[at + 4 : at + 8], "little") else None
