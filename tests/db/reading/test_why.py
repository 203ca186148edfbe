"""Why an iteration took as long as it did: the causes that were there, and none that were not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from resihp.db.reading import queries
from resihp.db.reading.iterations.why import Why, why
from resihp.db.reading.reader import Reader
from resihp.db.writer import Ledger
from resihp.errors import UsageError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from tests.db.conftest import DP3, outcome, story, write_journal
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
        "iteration 7 took 2.00 s, 2.00 times the 1.00 s predicted for healthy devices",
        "n1 device 1 was slow, at 50% of its speed from iteration 6 until 10 (failure 1: rank 5 at 50 % of its speed): "
        "accounts for up to 1.00 s of the 1.00 s excess",
    ]
    assert [one["failure"] for one in told.failures] == [1]
    told = ask(iterations, 12, slow(1, 6, 11))
    assert not told.slow
    assert told.verdict == ["iteration 12 took 1.00 s: not slow, 1.00 times the 1.00 s predicted for healthy devices"]
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
        "iteration 5 took 2.00 s, 2.00 times the 1.00 s usual for this job (median of the last 3 iterations of this "
        "shape)",
        "unexplained: 1.00 s of the 1.00 s excess; no failure, workload or checkpoint in the ledger explains it",
    ]
    assert ask(iterations[:1], 1).slow is None


def test_what_cannot_explain_the_size_is_not_the_cause() -> None:
    iterations = rows(*[0.1] * 21, *[1.2] * 9, predicted=0.1)
    innocent = slow(1, 22) | {"speed": 0.92, "cause": "rank 3 works at 92% of a healthy device's speed"}
    told = ask(iterations, 28, innocent)
    assert told.verdict == [
        "iteration 28 took 1.20 s, 12.00 times the 0.10 s predicted for healthy devices",
        "unexplained: 1.09 s of the 1.10 s excess",
        "too little to be the cause: n1 device 1 was slow, at 92% of its speed since iteration 22 (failure 1: rank 3 "
        "works at 92% of a healthy device's speed): accounts for up to 8.7 ms of the 1.10 s excess",
    ]
    assert (told.excess_seconds, told.unexplained_seconds) == (pytest.approx(1.1), pytest.approx(1.0913, abs=1e-4))
    [found] = told.causes
    assert (found["failure"], found["explains_seconds"]) == (1, pytest.approx(0.0087, abs=1e-4))


def test_several_causes_have_their_shares_and_what_is_left_is_told() -> None:
    iterations = rows(*[1.0] * 5, *[3.0] * 5)
    device, other = slow(1, 6), slow(2, 6) | {"speed": 0.8, "device": 2}
    whole = slow(3, 6) | {"component": "job", "node": None, "device": None, "speed": 0.8, "cause": "a power cap"}
    told = ask(iterations, 7, other, whole, device)
    assert [line.partition(": accounts for ")[2] for line in told.verdict[1:4]] == [
        "up to 1.00 s of the 2.00 s excess",
        "up to 0.25 s of the 2.00 s excess",
        "up to 0.25 s of the 2.00 s excess",
    ]
    # The slower device decides, and all are at 80 % of their speed besides: 1.25 / 0.5 of 1.00 s.
    assert told.verdict[4:] == ["unexplained: 0.50 s of the 2.00 s excess"]
    now_and_then = ask(iterations, 7, device | {"intermittent": True})
    assert now_and_then.verdict[1].endswith("; its share of the 2.00 s excess is unknown")
    assert len(now_and_then.verdict) == 2, "it may be all of it"


def test_where_predictions_are_off_the_usual_of_the_job_is_the_measure() -> None:
    iterations = rows(*[0.7] * 20, 1.9, 0.71, predicted=0.16)
    told = ask(iterations, 21, slow(1, 21, 22) | {"speed": 0.39})
    assert told.verdict[:2] == [
        "iteration 21 took 1.90 s, 2.71 times the 0.70 s usual for this job (median of the last 20 iterations of this "
        "shape)",
        "predicted for healthy devices: 0.16 s, not used: those iterations took 4.4 times their predictions",
    ]
    assert told.verdict[2].endswith(": accounts for up to 1.09 s of the 1.20 s excess")
    assert told.measure == "usual"
    usual = ask(iterations, 22)
    assert not usual.slow
    assert usual.verdict[0].startswith("iteration 22 took 0.71 s: not slow, 1.01 times the 0.70 s usual for this job")


def test_the_first_iteration_under_a_plan_is_measured_by_how_far_predictions_were_off_before() -> None:
    iterations = rows(*[0.7] * 20, 1.1, 0.5, predicted=0.16)
    for row in iterations[20:]:
        row["epoch"] = 2
    told = why(21, job(99), iterations, [], [], [plan(1, 8), plan(2, 8)], [])
    assert (told.measure, told.usual_seconds) == ("usual", pytest.approx(0.7))


def test_without_predictions_iterations_of_another_layout_are_no_measure() -> None:
    iterations = rows(*[0.7] * 20, 1.9, predicted=None)
    iterations[-1]["epoch"] = 2
    answer = why(21, job(99), iterations, [], [], [plan(1, 8), plan(2, 6)], [])
    assert (answer.usual_seconds, answer.slow) == (None, None)
    assert answer.verdict[0] == (
        "iteration 21 took 1.90 s; nothing was predicted, and there is nothing to compare it with"
    )


def test_the_first_prediction_of_a_job_is_no_measure_beside_what_is_usual() -> None:
    iterations = rows(*[0.4] * 20, predicted=None) + rows(0.41, predicted=0.17)
    iterations[-1]["iteration"] = 21
    told = ask(iterations, 21)
    assert not told.slow, told.verdict
    assert (told.measure, told.usual_seconds) == ("usual", 0.4)


def test_an_iteration_with_less_to_do_is_not_compared_with_longer_ones() -> None:
    """By how far predictions are off, where too few were like it: it is twice as slow as it should be."""
    iterations = rows(*[0.8] * 20, 0.8, predicted=0.2)
    iterations[-1] |= {"predicted_seconds": 0.1, "sum_squared_lengths": 4}
    told = ask(iterations, 21)
    assert told.verdict[0] == (
        "iteration 21 took 0.80 s, 2.00 times the 0.40 s usual for this job (the last 20 iterations of this shape, "
        "scaled by each prediction)"
    )
    assert told.slow


def test_a_prediction_that_was_mended_meanwhile_makes_no_workload_larger() -> None:
    iterations = rows(*[0.5] * 20, predicted=0.2)
    iterations[-1]["predicted_seconds"] = 0.4
    assert not any("sequences" in line for line in ask(iterations, 20).verdict), "they had as much to do"


def test_what_stands_by_slows_nothing_and_what_it_leaves_is_usual() -> None:
    iterations = rows(*[0.7] * 20, *[2.1] * 5, *[0.9] * 20, 1.8, predicted=0.16)
    for row in iterations[25:]:
        row["epoch"] = 2
    put_aside, plans = slow(1, 21), [plan(1, 8), plan(2, 8) | {"unaffected_by": "[1]"}]
    told = why(46, job(99), iterations, [put_aside], [], plans, [])
    assert told.verdict == [
        "iteration 46 took 1.80 s, 2.00 times the 0.90 s usual for this job (median of the last 20 iterations of this "
        "shape)",
        "predicted for healthy devices: 0.16 s, not used: those iterations took 5.6 times their predictions",
        "unexplained: 0.90 s of the 0.90 s excess; no failure, workload or checkpoint in the ledger explains it",
    ]
    assert told.failures == []
    [cause] = why(23, job(99), iterations, [put_aside], [], plans, []).causes
    assert cause["failure"] == 1, "before it stood by"


def test_in_another_layout_what_is_slow_still_is_measured_by_how_far_predictions_are_off() -> None:
    iterations = rows(*[0.7] * 20, *[1.2] * 20, predicted=0.16)
    for row in iterations[20:]:
        row.update(epoch=2, predicted_seconds=0.2)
    told = why(40, job(99), iterations, [slow(1, 21)], [], [plan(1, 8), plan(2, 8)], [])
    assert told.verdict[0] == (
        "iteration 40 took 1.20 s, 1.37 times the 0.88 s usual for this job (the last 20 iterations of other layouts, "
        "scaled by each prediction)"
    )


def test_early_in_a_job_later_iterations_of_the_same_layout_tell_what_is_usual() -> None:
    iterations = rows(2.0, 0.7, 9.0, 0.7, 0.7, predicted=None)
    iterations[2]["epoch"] = 2
    for row in iterations[3:]:
        row["epoch"] = 3
    plans = [plan(1, 8), plan(2, 6), plan(3, 8) | {"description": "layout 1"}]
    told = why(1, job(99), iterations, [], [], plans, [])
    assert told.verdict[0] == (
        "iteration 1 took 2.00 s, 2.86 times the 0.70 s usual for this job (median of 3 other iterations of this shape)"
    )


def test_a_larger_workload_is_told() -> None:
    iterations = rows(1.0, 1.0, 1.0)
    iterations.append({**iteration(4, 5.0, 2.0, predicted=1.9), "tokens": 1000, "sum_squared_lengths": 30})
    told = ask(iterations, 4)
    assert not told.slow
    assert told.verdict[1] == "its sequences were longer: 1.90 times the usual work, which the prediction includes"
    iterations = [*rows(1.0, 1.0, predicted=None), {**rows(2.0, tokens=2000)[0], "iteration": 3}]
    iterations[-1]["predicted_seconds"] = None
    assert ask(iterations, 3).verdict[1] == (
        "it had 2.00 times the usual tokens: accounts for up to 1.00 s of the 1.00 s excess"
    )


def test_checkpoints_and_injected_faults_that_touch_it() -> None:
    events = [
        {"kind": "CheckpointCommitted", "iteration": 2, "at": at(99), "text": "checkpoint of iteration 2"},
        {"kind": "FaultInjected", "iteration": 3, "at": at(2.5), "text": "fault 1: slow:rank=5"},
        {"kind": "FaultInjected", "iteration": 1, "at": at(0.5), "text": "fault 0: kill:rank=4"},
    ]
    told = ask(rows(1.0, 1.0, 1.5), 3, events=events)
    assert told.verdict[1:] == [
        "a checkpoint of iteration 2 was written during it or just before; its share of the 0.50 s excess is unknown",
        "fault injected on purpose: fault 1: slow:rank=5",
    ]


def test_what_was_slowed_on_purpose_and_is_so_still_is_told() -> None:
    def fault(number: int, iteration: int, text: str) -> Row:
        return {"kind": "FaultInjected", "iteration": iteration, "at": at(iteration), "text": f"fault {number}: {text}"}

    events = [
        fault(1, 2, "slow:link=n1-n2,speed=0.25@iteration=2,phase=forward injected"),
        fault(2, 3, "slow:rank=5,speed=0.4@iteration=3,phase=forward,until=6 injected"),
        fault(3, 3, "slow:rank=6,speed=0.5 injected in iteration 3"),
        fault(4, 5, "slow:rank=6,speed=1 injected in iteration 5"),
    ]
    told = {n: [one["text"][:7] for one in ask(rows(*[1.0] * 8), n, events=events).injected] for n in range(1, 8)}
    assert told[1] == []
    assert told[2] == ["fault 1"]
    assert told[4] == ["fault 1", "fault 2", "fault 3"]
    assert told[5] == ["fault 1", "fault 2", "fault 3", "fault 4"]
    assert told[6] == ["fault 1"]
    assert ask(rows(*[1.0] * 8), 7, events=events).verdict[-1] == (
        "fault injected on purpose: fault 1: slow:link=n1-n2,speed=0.25@iteration=2,phase=forward injected"
    )


def test_the_first_iteration_after_a_failure() -> None:
    iterations = [*rows(1.0, 1.0), {**rows(1.0)[0], "iteration": 3, "epoch": 2, "finished_at": at(5.0), "seconds": 1.2}]
    mended = failure(1, 2.5, 3, recovered_epoch=2, detect_seconds=0.1, cause="rank 5 killed")
    told = why(3, job(99), iterations, [mended], [transition(2, 2.5, 5.0)], [plan(1, 8), plan(2, 6)], [])
    assert told.lost_s == pytest.approx({"detect": 0.1, "redo": 0.4, "reconfigure": 1.3})
    assert told.verdict == [
        "iteration 3 took 1.20 s, 1.20 times the 1.00 s predicted for healthy devices",
        "it was the first under the plan of epoch 2, with one-time set-up; its share of the 0.20 s excess is unknown",
        "training was interrupted before it, 1.80 s lost (0.10 s until it was noticed, 0.40 s of work redone, "
        "1.30 s to reconfigure): failure 1: rank 5 killed",
        "6 of 8 devices worked, under the plan of epoch 2 (layout 2): reason 2",
    ]
    assert [one["failure"] for one in told.failures] == [1]


def found_slow(number: int, component: journal.Component, ranks: tuple[int, ...], since: int) -> journal.FailureFound:
    return journal.FailureFound(
        failure=number,
        kind="fail-slow",
        component=component,
        cause=f"{component} of {ranks} is slow",
        ranks=ranks,
        node="n1",
        device=0 if component == "device" else None,
        iteration=since,
        epoch=2,
        evidence="",
        detect_s=None,
        speed=0.4,
    )


def test_a_slow_down_that_lasts_is_compared_with_before_it_and_ends_for_who_stands_by(
    tmp_path: Any, ledger_url: str
) -> None:
    def entries() -> Iterator[tuple[journal.AnyEntry, float]]:
        before = list(story(ended=False))
        yield from before
        when = before[-1][1]
        yield found_slow(2, "device", (0,), 21), when
        for number in range(21, 221):
            when += 1.5
            took = journal.IterationCommitted(epoch=2, outcome=outcome(number), seconds=1.5, predicted_seconds=0.1)
            yield took, when
        layout = Layout(replicas=DP3.replicas[2:], standby=(0, 1, 2, 3, 4, 6, 7))
        plan = Plan(epoch=3, layout=layout, assignment=spread(12, 1))
        yield (
            journal.PlanDecided(
                plan=plan, next_iteration=221, action="between", finish=None, reason="slow", unaffected_by=(2, 4)
            ),
            when,
        )
        yield found_slow(3, "link", (8, 10), 230), when
        yield found_slow(4, "link", (0, 2), 230), when
        for number in range(221, 231):
            when += 0.7
            took = journal.IterationCommitted(epoch=3, outcome=outcome(number), seconds=0.7, predicted_seconds=0.1)
            yield took, when

    with Ledger.open(ledger_url, tmp_path) as ledger:
        for record in write_journal(tmp_path / "journal", entries()):
            ledger.submit(record)
        assert ledger.close()
    with Reader.open(ledger_url) as reader:
        lasting, aside_of_it = (queries.why(reader, reader.job(), number) for number in (220, 230))
    assert lasting.usual_seconds == 0.6, "of iterations more than 100 before it"
    assert [one["failure"] for one in lasting.failures] == [2]
    assert aside_of_it.usual_seconds == 0.7
    assert [one["failure"] for one in aside_of_it.failures] == [3], "one has no work, nobody sends over the other"


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
        with pytest.raises(UsageError, match="iteration 99: not committed in job local-1; committed: 1 to 20"):
            queries.why(reader, row, 99)
