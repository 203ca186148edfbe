"""What an agent passes on, and what it reads of it.

Reports of workers and orders to them stay encoded on their way through the agent (`messages.FromWorker`,
`messages.ToWorkers`). It reads a label off each; whoever it is for decodes and checks all of it. Used by
`wrapper.agent` and `wrapper.supervisor.agents`; decides nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from resihp.errors import ProtocolError
from resihp.protocol import messages as m
from resihp.protocol.framing import decode

WORTH_BYTES = 16 << 10
"""What goes to every agent and is longer is made smaller, once for all: sealing and sending are paid for each."""
MOST_INFLATED_BYTES = 64 << 20


class _Outcome(msgspec.Struct, frozen=True):
    iteration: int


class _Plan(msgspec.Struct, frozen=True):
    epoch: int


class Label(msgspec.Struct, frozen=True, kw_only=True):
    """The few fields of a report or an order that its agent goes by; each is there if the message has it."""

    type: str
    """Name of its class in `messages`; also one that is not there."""
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
    """Passes over all other fields. Raises ProtocolError for what is no message."""
    return decode(_labels, body)


def report_of(body: bytes) -> m.WorkerMessage:
    """Raises ProtocolError for what is no report of a worker."""
    return decode(_reports, body)


def to_workers(ranks: tuple[int, ...], order: bytes, smaller: bytes | None) -> m.ToWorkers:
    """An encoded order to workers of one node; `smaller` as `deflated` has it of the order."""
    return m.ToWorkers(ranks=ranks, body=smaller or order, deflated=smaller is not None)


def order_in(message: m.ToWorkers) -> bytes:
    """The order, as encoded. Raises ProtocolError."""
    return _inflated(message.body) if message.deflated else message.body


def replicate(after: int, records: Sequence[bytes], *, smaller: bool) -> m.Replicate:
    """Encoded records that follow number `after`; `smaller`: deflated, where that is worth it."""
    packed = deflated(msgspec.msgpack.encode(records)) if smaller else None
    if packed is None:
        return m.Replicate(after=after, records=tuple(records))
    return m.Replicate(after=after, records=(packed,), deflated=True)


def records_in(message: m.Replicate) -> tuple[bytes, ...]:
    """The records, each as encoded. Raises ProtocolError."""
    if not message.deflated:
        return message.records
    (packed,) = message.records or (b"",)
    return decode(_records, _inflated(packed))


def deflated(body: bytes) -> bytes | None:
    """A shorter form of what is long; None where that is not worth it."""
    if len(body) <= WORTH_BYTES:
        return None
    smaller = zlib.compress(body, 1)
    return smaller if len(smaller) < len(body) else None


def _inflated(body: bytes) -> bytes:
    try:
        inflater = zlib.decompressobj()
        found = inflater.decompress(body, MOST_INFLATED_BYTES)
        if not inflater.eof:
            raise ProtocolError(f"more than {MOST_INFLATED_BYTES} bytes, or not whole")
    except zlib.error as error:
        raise ProtocolError(f"malformed message: {error}") from error
    return found
