"""What an agent passes on, and what it reads of it.

Reports of workers and orders to them stay encoded on their way through the agent (`messages.FromWorker`,
`messages.ToWorkers`). It reads a label off each; whoever it is for decodes and checks all of it. Used by
`wrapper.agent` and `wrapper.supervisor.agents`; decides nothing.
"""

from __future__ import annotations

import msgspec

from resihp.protocol import messages as m
from resihp.protocol.framing import decode


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


_labels = msgspec.msgpack.Decoder(Label)
_reports: msgspec.msgpack.Decoder[m.WorkerMessage] = msgspec.msgpack.Decoder(m.WorkerMessage)


def label_of(body: bytes) -> Label:
    """Passes over all other fields. Raises ProtocolError for what is no message."""
    return decode(_labels, body)


def report_of(body: bytes) -> m.WorkerMessage:
    """Raises ProtocolError for what is no report of a worker."""
    return decode(_reports, body)
