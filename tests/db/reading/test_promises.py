"""What plans promised and kept: measured as things were when they were decided, and silent where nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest

from resihp.db.reading.plans.promises import promises
from tests.db.reading.test_cost_accounts import at, failure, iteration

Row = dict[str, Any]


def plan(epoch: int, predicted: float | None, present: float | None = None, *, taken: bool = True) -> Row:
    return {
        "epoch": epoch,
        "reason": f"reason {epoch}",
        "predicted": predicted,
        "present": present,
        "unit": "layer times",
        "in_effect_at": at(0) if taken else None,
    }


def run(*parts: tuple[int, int, float], noise: float = 0.0) -> list[Row]:
    """(epoch, iterations, seconds of each), one after the other."""
    rows: list[Row] = []
    for epoch, count, seconds in parts:
        for n in range(count):
            wobble = 1.0 + noise * (-1) ** n
            rows.append(iteration(len(rows) + 1, float(len(rows)), seconds * wobble, epoch=epoch))
    return rows


def verdicts(plans: list[Row], iterations: list[Row], failures: list[Row] | None = None) -> list[str]:
    return [row["verdict"] for row in promises(plans, iterations, failures or [])]


def test_a_rank_is_lost_and_the_plan_takes_as_long_as_it_said() -> None:
    first, second = promises([plan(1, 100.0), plan(2, 150.0)], run((1, 10, 1.0), (2, 10, 1.52)), [])
    assert (first["promised"], first["kept"], first["verdict"]) == (None, None, "promised nothing")
    assert second["promised"] == 1.5
    assert second["kept"] == pytest.approx(1.52)
    assert (second["verdict"], second["before"], second["after"]) == ("kept", 9, 9)


def test_a_promise_is_broken_by_more_than_the_tolerance_only() -> None:
    plans = [plan(1, 100.0), plan(2, 150.0)]
    assert verdicts(plans, run((1, 10, 1.0), (2, 10, 1.8)))[1] == "broken"
    assert verdicts(plans, run((1, 10, 1.0), (2, 10, 1.6)))[1] == "kept"
    assert verdicts(plans, run((1, 10, 1.0), (2, 10, 0.9)))[1] == "kept"
    assert verdicts(plans, run((1, 10, 1.0), (2, 10, 1.8), noise=0.4))[1] == "too short to tell"
    assert verdicts(plans, run((1, 10, 1.0), (2, 4, 1.8)))[1] == "too short to tell"


def test_a_slow_device_is_planned_around_and_the_slow_iterations_are_the_measure() -> None:
    # Healthy 1.0 s, slow 2.0 s since iteration 11; the new plan promises three quarters of that.
    iterations = run((1, 10, 1.0), (1, 8, 2.0), (2, 10, 1.5))
    slow = failure(1, 12.0, 11, kind="fail-slow", speed=0.5)
    row = promises([plan(1, 100.0), plan(2, 150.0, 200.0)], iterations, [slow])[1]
    assert (row["promised"], row["kept"], row["verdict"]) == (0.75, pytest.approx(0.75), "kept")
    assert row["before"] == 8


def test_what_becomes_slow_later_breaks_no_promise() -> None:
    iterations = run((1, 10, 1.0), (2, 10, 1.5), (2, 30, 3.0))
    slow = failure(1, 12.0, 21, kind="fail-slow", speed=0.5)
    row = promises([plan(1, 100.0), plan(2, 150.0)], iterations, [slow])[1]
    assert (row["verdict"], row["after"]) == ("kept", 9)


def test_plans_that_never_took_effect_promised_nobody_anything() -> None:
    plans = [plan(1, 100.0), plan(2, 400.0, taken=False), plan(3, 150.0)]
    rows = promises(plans, run((1, 10, 1.0), (3, 10, 1.5)), [])
    assert [(row["epoch"], row["promised"]) for row in rows] == [(1, None), (3, 1.5)]


def test_predictions_in_other_units_cannot_be_compared() -> None:
    second = {**plan(2, 1.5), "unit": "s"}
    assert verdicts([plan(1, 100.0), second], run((1, 10, 1.0), (2, 10, 1.5)))[1] == "promised nothing"
    assert verdicts([plan(1, None), plan(2, 150.0)], run((1, 10, 1.0), (2, 10, 1.5)))[1] == "promised nothing"


def test_longer_sequences_are_no_broken_promise() -> None:
    iterations = run((1, 10, 1.0), (2, 10, 3.0))
    for row in iterations[10:]:
        row["tokens"] = 2000
    assert verdicts([plan(1, 100.0), plan(2, 150.0)], iterations)[1] == "kept"
