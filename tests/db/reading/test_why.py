"""Why an iteration took as long as it did: the causes that were there, and none that were not."""

from __future__ import annotations

from typing import Any

import pytest

from db.reading import queries
from db.reading.reader import Reader
from db.reading.why import Why, why
from db.writer import Ledger
from resihp.errors import UsageError
from tests.db.conftest import story, write_journal
from tests.db.reading.test_cost_accounts import at, failure, iteration, job, transition

Row = dict[str, Any]


def plan(epoch: int, active: int) -> Row:
    return {
        "epoch": epoch,
        "active": active,
        "in_effect_at": at(0),
        "description": f"layout {epoch}",
        "reason": f"reason {epoch}",
    }


def rows(*seconds: float, predicted: float | None = 1.0, tokens: int = 1000) -> list[Row]:
    found, end = [], 0.0
    for number, each in enumerate(seconds, 1):
        end += each
        found.append({**iteration(number, end, each, predicted=predicted), "tokens": tokens, "sum_squared_lengths": 9})
    return found


def slow(number: int, since: int, until: int | None = None) -> Row:
    return failure(
        number,
        0.0,
        since,
        kind="fail-slow",
        speed=0.5,
        device=1,
        component="device",
        cause="rank 5 at 50 % of its speed",
        ended_iteration=until,
    )


def ask(iterations: list[Row], number: int, *failures: Row, events: list[Row] | None = None) -> Why:
    return why(number, job(99), iterations, failures, [], [plan(1, 8)], events or [])


def test_a_slow_device_while_it_is_slow() -> None:
    iterations = rows(*[1.0] * 5, *[2.0] * 5, *[1.0] * 5)
    told = ask(iterations, 7, slow(1, 6, 11))
    assert told.slow
    assert told.usual_seconds == 1.0
    assert told.verdict == [
        "iteration 7 took 2.00 s, 2.00 times the 1.00 s predicted where all is well",
        "n1 device 1 was slow, at 50% of its speed from iteration 6 until 10 (failure 1: rank 5 at 50 % of its speed)",
    ]
    assert [one["failure"] for one in told.failures] == [1]
    told = ask(iterations, 12, slow(1, 6, 11))
    assert not told.slow
    assert told.verdict == ["iteration 12 took 1.00 s: not slow, 1.00 times the 1.00 s predicted where all is well"]
    assert told.failures == []


@pytest.mark.parametrize(
    ("component", "node", "told"),
    [
        ("collective", "n1", "tensor-parallel collectives of n1 were slow, at 50% of their speed"),
        ("reduction", None, "the sums of gradients were slow, at 50% of their speed"),
        ("data", None, "the wait for data was slow, at 50% of its speed"),
    ],
)
def test_what_ranks_do_together_is_told_by_its_name(component: str, node: str | None, told: str) -> None:
    part = slow(1, 6) | {"component": component, "node": node, "device": None}
    assert ask(rows(*[1.0] * 5, *[2.0] * 5), 7, part).verdict[1].startswith(told)


def test_without_a_prediction_its_plan_s_healthy_iterations_are_the_measure() -> None:
    iterations = rows(1.0, 1.0, 1.0, 5.0, 2.0, predicted=None)
    told = ask(iterations, 5, slow(1, 4, 5))
    assert told.usual_seconds == 1.0
    assert told.verdict == [
        "iteration 5 took 2.00 s, 2.00 times the 1.00 s usual under this plan (median of 3)",
        "no failure, workload or checkpoint in the ledger explains it",
    ]
    assert ask(iterations[:1], 1).slow is None


def test_a_larger_workload_is_told() -> None:
    iterations = rows(1.0, 1.0, 1.0)
    iterations.append({**iteration(4, 5.0, 2.0, predicted=1.9), "tokens": 1000, "sum_squared_lengths": 9})
    told = ask(iterations, 4)
    assert not told.slow
    assert told.verdict[1] == "its sequences were longer: 1.90 times the usual work, which the prediction knows"
    iterations = [*rows(1.0, 1.0, predicted=None), {**rows(2.0, tokens=2000)[0], "iteration": 3}]
    iterations[-1]["predicted_seconds"] = None
    assert ask(iterations, 3).verdict[1] == "it had 2.00 times the usual tokens"


def test_checkpoints_and_injected_faults_that_touch_it() -> None:
    events = [
        {"kind": "CheckpointCommitted", "iteration": 2, "at": at(99), "text": "checkpoint of iteration 2"},
        {"kind": "FaultInjected", "iteration": 3, "at": at(2.5), "text": "fault 1: slow:rank=5"},
        {"kind": "FaultInjected", "iteration": 1, "at": at(0.5), "text": "fault 0: slow:rank=4"},
    ]
    told = ask(rows(1.0, 1.0, 1.5), 3, events=events)
    assert told.verdict[1:] == [
        "a checkpoint of iteration 2 was written meanwhile, or just before",
        "fault injected on purpose: fault 1: slow:rank=5",
    ]


def test_the_first_iteration_after_a_failure() -> None:
    iterations = [*rows(1.0, 1.0), {**rows(1.0)[0], "iteration": 3, "epoch": 2, "finished_at": at(5.0), "seconds": 1.2}]
    mended = failure(1, 2.5, 3, recovered_epoch=2, detect_seconds=0.1, cause="rank 5 killed")
    told = why(3, job(99), iterations, [mended], [transition(2, 2.5, 5.0)], [plan(1, 8), plan(2, 6)], [])
    assert told.lost_s == pytest.approx({"detect": 0.1, "redo": 0.4, "reconfigure": 1.3})
    assert told.verdict == [
        "iteration 3 took 1.20 s, 1.20 times the 1.00 s predicted where all is well",
        "it was the first under the plan of epoch 2, and built what the others find",
        "before it training was interrupted, 1.80 s lost (0.10 s until it was noticed, 0.40 s of work redone, "
        "1.30 s to reconfigure): failure 1: rank 5 killed",
        "6 of 8 devices worked, under the plan of epoch 2 (layout 2): reason 2",
    ]
    assert [one["failure"] for one in told.failures] == [1]


def test_from_a_ledger(tmp_path: Any, ledger_url: str) -> None:
    with Ledger.open(ledger_url, tmp_path) as ledger:
        for record in write_journal(tmp_path / "journal", story()):
            ledger.submit(record)
        assert ledger.close()
    with Reader.open(ledger_url) as reader:
        row = reader.job()
        told = queries.why(reader, row, 12)
        assert told.lost_s == pytest.approx({"detect": 0.02, "redo": 0.28, "reconfigure": 0.4}, abs=1e-4)
        assert [one["text"] for one in told.injected] == ["fault 1: kill:rank=5@iteration=12,phase=forward injected"]
        with pytest.raises(UsageError, match="iteration 99: not committed in job local-1, of which 1 to 20 are"):
            queries.why(reader, row, 99)
