"""Encoding and decoding of reports and orders that an agent forwards between workers and supervisor.

Reports and orders stay encoded on their way through the agent (`messages.FromWorker`, `messages.ToWorkers`). The agent
decodes only a `Label` of each message; the recipient decodes and checks the whole message. This module decides nothing.
Used by `resihp.wrapper.agent` and `resihp.wrapper.supervisor.agents.links`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.framing import decode

MIN_DEFLATED_BYTES = 16 << 10
"""Size from which a message to all agents is compressed, once for all of them, because it is authenticated and sent
once for each agent."""
MAX_INFLATED_BYTES = 64 << 20
"""Size limit of a message after decompression."""


class _Outcome(msgspec.Struct, frozen=True):
    iteration: int


class _Plan(msgspec.Struct, frozen=True):
    epoch: int


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """The few fields of a report or an order that an agent reads. A field has its default if the message lacks it."""

    type: str
    """Name of the message's class in `messages`; may be an unknown name."""
    epoch: int = 0
    fault: int = 0
    probe: int = 0
    after_iteration: bool | int | None = False
    outcome: _Outcome | None = None
    plan: _Plan | None = None

    @property
    def announced_epoch(self) -> int:
        return self.epoch if self.plan is None else self.plan.epoch


_records: msgspec.msgpack.Decoder[tuple[bytes, ...]] = msgspec.msgpack.Decoder(tuple[bytes, ...])
_labels = msgspec.msgpack.Decoder(Label)
_reports: msgspec.msgpack.Decoder[m.WorkerMessage] = msgspec.msgpack.Decoder(m.WorkerMessage)


def label_of(body: bytes) -> Label:
    """Decode only the label of a message. Raises ProtocolError if the bytes are not a message."""
    return decode(_labels, body)


def report_of(body: bytes) -> m.WorkerMessage:
    """Decode a worker's report. Raises ProtocolError if the bytes are not a report of a worker."""
    return decode(_reports, body)


def to_workers(ranks: tuple[int, ...], order: bytes, smaller: bytes | None) -> m.ToWorkers:
    """Wrap an encoded order for workers of one node. `smaller` is the result of `deflated(order)`; None if not
    compressed."""
    return m.ToWorkers(ranks=ranks, body=smaller or order, deflated=smaller is not None)


def order_in(message: m.ToWorkers) -> bytes:
    """Return the encoded order inside the message, decompressed. Raises ProtocolError."""
    return _inflated(message.body) if message.deflated else message.body


def replicate(after: int, records: Sequence[bytes], *, smaller: bool) -> m.Replicate:
    """Wrap encoded records that follow record number `after`. With `smaller`, compress them if that reduces their
    size."""
    packed = deflated(msgspec.msgpack.encode(records)) if smaller else None
    if packed is None:
        return m.Replicate(after=after, records=tuple(records))
    return m.Replicate(after=after, records=(packed,), deflated=True)


def records_in(message: m.Replicate) -> tuple[bytes, ...]:
    """Return the encoded records inside the message, decompressed. Raises ProtocolError."""
    if not message.deflated:
        return message.records
    (packed,) = message.records or (b"",)
    return decode(_records, _inflated(packed))


def deflated(body: bytes) -> bytes | None:
    """Compress a message of more than `MIN_DEFLATED_BYTES`. Return None for a shorter message, or if compression does
    not make it smaller."""
    if len(body) <= MIN_DEFLATED_BYTES:
        return None
    smaller = zlib.compress(body, 1)
    return smaller if len(smaller) < len(body) else None


def _inflated(body: bytes) -> bytes:
    try:
        inflater = zlib.decompressobj()
        content = inflater.decompress(body, MAX_INFLATED_BYTES)
        if not inflater.eof:
            raise ProtocolError(f"more than {MAX_INFLATED_BYTES} bytes, or incomplete")
    except zlib.error as error:
        raise ProtocolError(f"malformed message: {error}") from error
    return content
