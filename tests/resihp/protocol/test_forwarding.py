"""What an agent reads of messages that it passes on, and who finds out that they are none."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from resihp.errors import ProtocolError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan
from resihp.protocol import messages as m
from resihp.protocol.forwarding import deflated, label_of, order_in, records_in, replicate, report_of, to_workers
from resihp.protocol.framing import encode
from tests.wrapper.agent.test_agent import outcome

PLAN = Plan(epoch=4, layout=Layout.uniform(tp=1, pp=1, dp=2, layers=2), assignment=((0,), (1,)))


def test_a_label_tells_what_an_agent_goes_by() -> None:
    stepped = label_of(encode(m.Stepped(epoch=3, outcome=outcome(7), seconds=1.0, compute_s=1.0, chunks=bytes(5000))))
    assert stepped.outcome is not None
    assert (stepped.type, stepped.epoch, stepped.outcome.iteration) == ("Stepped", 3, 7)
    assert label_of(encode(m.FaultDue(fault=5))).fault == 5
    park = label_of(encode(m.Park(epoch=6, reason="r", after_iteration=True)))
    assert (park.type, park.announced_epoch, park.after_iteration) == ("Park", 6, True)
    assert label_of(encode(m.Propose(plan=PLAN, next_iteration=1))).announced_epoch == 4
    assert label_of(encode(m.Probe(probe=1, after_iteration=9))).announced_epoch == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", encode(m.Finished(iteration=1))[:-1], b"\x01", b"\x80", b"\x91" * 5000])
def test_what_is_no_message_has_no_label(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        label_of(body)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Finished", "iteration": "seven"},
        {"type": "Finished"},
        {"type": "Halt", "reason": "an order"},
        {"type": "Nobody knows it"},
        {"type": "Refuse", "reason": msgspec.Raw(b"\xa1\xff")},
    ],
)
def test_what_has_a_label_may_still_be_no_report(message: object) -> None:
    body = msgspec.msgpack.encode(message)
    label_of(body)
    with pytest.raises(ProtocolError, match="malformed"):
        report_of(body)


def test_what_is_long_and_goes_to_all_travels_shorter_and_comes_out_the_same() -> None:
    order = bytes(200_000) + b"end"
    small = deflated(order)
    assert small is not None
    assert len(small) < len(order) / 50
    assert order_in(to_workers((1, 2), order, small)) == order
    assert order_in(to_workers((1, 2), b"short", deflated(b"short"))) == b"short"
    records = [b"record %d" % number for number in range(5000)]
    message = replicate(7, records, smaller=True)
    assert message.deflated
    assert len(msgspec.msgpack.encode(message)) < sum(map(len, records)) / 2
    assert records_in(message) == tuple(records)
    assert records_in(replicate(7, records[:3], smaller=True)) == tuple(records[:3])


@pytest.mark.parametrize("body", [b"", b"?", zlib.compress(bytes(100))[:-3], zlib.compress(bytes(100 << 20), 1)])
def test_what_cannot_be_made_long_again_is_refused_and_fills_no_memory(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        order_in(m.ToWorkers(ranks=(0,), body=body, deflated=True))
    with pytest.raises(ProtocolError):
        records_in(m.Replicate(after=0, records=(body,), deflated=True))
