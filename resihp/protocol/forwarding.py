"""Reports and orders that an agent forwards, and the fields it reads of them.

Reports of workers and orders to them stay encoded on their way through the agent (`messages.FromWorker`,
`messages.ToWorkers`). The agent reads a label off each; the recipient decodes and checks all of it. Used by
`wrapper.agent` and `wrapper.supervisor.agents.links`; decides nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.framing import decode

MIN_DEFLATED_BYTES = 16 << 10
"""Size from which a message to every agent is deflated, once for all: sealing and sending cost for each agent."""
MAX_INFLATED_BYTES = 64 << 20
"""Largest message accepted, after inflation."""


class _Outcome(msgspec.Struct, frozen=True):
    iteration: int


class _Plan(msgspec.Struct, frozen=True):
    epoch: int


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """The few fields of a report or an order that its agent uses; each is set if the message has it."""

    type: str
    """Name of its class in `messages`, or of an unknown one."""
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
    """Return the label of a message, ignoring all other fields. Raises ProtocolError if it is not a message."""
    return decode(_labels, body)


def report_of(body: bytes) -> m.WorkerMessage:
    """Return a decoded report. Raises ProtocolError if it is not a report of a worker."""
    return decode(_reports, body)


def to_workers(ranks: tuple[int, ...], order: bytes, smaller: bytes | None) -> m.ToWorkers:
    """Return an encoded order to workers of one node; `smaller`: the order as `deflated` returns it."""
    return m.ToWorkers(ranks=ranks, body=smaller or order, deflated=smaller is not None)


def order_in(message: m.ToWorkers) -> bytes:
    """Return the order, still encoded. Raises ProtocolError."""
    return _inflated(message.body) if message.deflated else message.body


def replicate(after: int, records: Sequence[bytes], *, smaller: bool) -> m.Replicate:
    """Return encoded records that follow number `after`; `smaller`: deflated, where that is worth it."""
    packed = deflated(msgspec.msgpack.encode(records)) if smaller else None
    if packed is None:
        return m.Replicate(after=after, records=tuple(records))
    return m.Replicate(after=after, records=(packed,), deflated=True)


def records_in(message: m.Replicate) -> tuple[bytes, ...]:
    """Return the records, each still encoded. Raises ProtocolError."""
    if not message.deflated:
        return message.records
    (packed,) = message.records or (b"",)
    return decode(_records, _inflated(packed))


def deflated(body: bytes) -> bytes | None:
    """Return a shorter form of a long message; None where that is not worth it."""
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
