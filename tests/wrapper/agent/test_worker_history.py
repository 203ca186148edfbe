"""What a new leader is told of a worker: all that is still true, and nothing that was overtaken."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import ProtocolError
from resihp.parallelism.model import ModelSpec
from resihp.protocol import messages as m
from resihp.protocol.forwarding import label_of
from resihp.protocol.framing import encode
from resihp.wrapper.agent.worker_history import MAX_PARTS, REPORTED_STEPS, WorkerRecord
from tests.wrapper.agent.test_agent import outcome

DECLARE = m.Declare(
    model=ModelSpec(layers=2, hidden=8, heads=2, kv_groups=2, ffn_hidden=16, vocab=16, sequence=8),
    micro_batches=2,
    iterations=9,
    resume_from=0,
    fingerprint="f",
)


def parked(epoch: int) -> m.Parked:
    return m.Parked(epoch=epoch, stepped=0, outcome=None, ready=False)


def ready(epoch: int) -> m.Ready:
    return m.Ready(epoch=epoch, groups_s=0.0, state_s=0.0)


def stepped(iteration: int) -> m.Stepped:
    return m.Stepped(epoch=1, outcome=outcome(iteration), seconds=1.0, compute_s=1.0)


GO = m.Go(epoch=3, next_iteration=1, finish=None)
PARK = m.Park(epoch=3, reason="")
PAUSE = m.Park(epoch=3, reason="", after_iteration=True)
STUCK = m.Stuck(epoch=2, error="e")
FINISHED = m.Finished(iteration=9)
DUE = m.FaultDue(fault=1)
RAISED = m.Raised(iteration=1, error="e", traceback="t")


@pytest.mark.parametrize(
    ("happened", "true"),
    [
        ([DECLARE, ready(2), m.Begin(epoch=2), STUCK, PARK, parked(3), GO, ready(3)], [DECLARE, parked(3), ready(3)]),
        ([DECLARE, parked(2), ready(2), m.Begin(epoch=2)], [DECLARE]),
        ([STUCK, PARK], []),
        ([m.Stuck(epoch=3, error="under the plan that the order announced"), PARK], None),
        ([parked(2), PARK], []),
        ([parked(2), PARK, parked(3)], [parked(3)]),
        ([ready(3), m.Begin(epoch=3), STUCK], [STUCK]),
        ([DUE, PAUSE], [DUE]),
        ([DUE, PARK], []),
        ([DUE, m.FaultGo(fault=1, fire=False)], []),
        ([DUE, m.FaultGo(fault=2, fire=False)], [DUE]),
        ([FINISHED, PARK, parked(3)], [FINISHED, parked(3)]),
        ([FINISHED, PARK, parked(3), GO], [parked(3)]),
        ([RAISED, PARK, GO, m.Begin(epoch=3)], [RAISED]),
        ([m.Confirm(epoch=3, digest=""), m.Object(epoch=3, reason=""), m.Refuse(reason="")], []),
    ],
)
def test_what_is_still_true(happened: list[m.Message], true: list[m.Message] | None) -> None:
    record = WorkerRecord()
    for each in happened:
        label = label_of(encode(each))
        if isinstance(each, m.WorkerOrder):
            record.note_order(label)
        else:
            record.add_report(label, encode(each))
    assert list(record.still_true()) == (happened[:1] if true is None else true)


def test_the_last_parts_of_checkpoints_are_kept_whatever_is_ordered_since() -> None:
    record = WorkerRecord()
    parts = [
        m.CheckpointPart(epoch=1, iteration=i, folder="f", file=f"part-{i}", bytes=1, seconds=0.1) for i in range(20)
    ]
    for part in parts:
        record.add_report(label_of(encode(part)), encode(part))
    record.add_report(label_of(encode(FINISHED)), encode(FINISHED))
    record.note_order(label_of(encode(PARK)))
    assert record.still_true() == (FINISHED, *parts[-MAX_PARTS:])


def test_steps_are_kept_until_they_are_committed_and_the_last_few_always() -> None:
    record = WorkerRecord(max_steps=60)
    for iteration in range(1, 101):
        body = encode(stepped(iteration))
        record.add_report(label_of(body), body)
    assert [step.outcome.iteration for step in record.steps()] == list(range(41, 101))
    record.committed(50)
    assert [step.outcome.iteration for step in record.steps()] == list(range(51, 101))
    record.committed(100)
    assert [step.outcome.iteration for step in record.steps()] == list(range(101 - REPORTED_STEPS, 101))
    assert [step.outcome.iteration for step in record.steps(2)] == [99, 100]


def test_what_is_no_report_is_found_out_when_somebody_asks_for_it() -> None:
    record = WorkerRecord()
    body = msgspec.msgpack.encode({"type": "Stuck", "epoch": 2, "error": 7})
    record.add_report(label_of(body), body)
    with pytest.raises(ProtocolError, match="malformed"):
        record.still_true()
