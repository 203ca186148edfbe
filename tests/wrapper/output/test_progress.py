"""How far a job is, when it will be done, and whether it may be stuck."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from resihp.wrapper.output.progress import Goal, ago, goal, of_target, progress

BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)
MODEL = '{"iterations":60,"layers":[1,2]}'


def rows(*at_s: float, first: int = 1, seconds: float | None = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "iteration": first + n,
            "seconds": seconds,
            "tokens": 4000,
            "loss": 3.0 - n,
            "finished_at": BEGAN + timedelta(seconds=s),
        }
        for n, s in enumerate(at_s)
    ]


def found(*at_s: float, now_s: float, state: str = "running", model: str | None = MODEL, **of: Any) -> dict[str, Any]:
    return progress(goal(model), rows(*at_s, **of), BEGAN + timedelta(seconds=now_s), running=state == "running")


def test_a_running_job() -> None:
    told = found(2, 4, 6, now_s=7)
    assert (told["iteration"], told["target"], told["loss"]) == (3, 60, 1.0)
    assert told["seconds_since_iteration"] == 1
    assert told["eta_seconds"] == 57 * 2 - 1
    assert told["tokens_per_second"] == 2000, "by the same pace as the time that is left: with the pauses"
    assert not told["stuck"]
    assert of_target(told) == "3 of 60"


def test_the_pace_is_of_the_last_iterations_and_one_long_pause_does_not_count() -> None:
    times = [*range(0, 1000, 10), *range(1100, 1140, 2)]
    assert found(*times, now_s=1138, model='{"iterations":200}')["eta_seconds"] == 80 * 2


def test_iterations_that_are_committed_two_at_a_time_take_what_they_take_on_average() -> None:
    """The pause within such a pair is next to nothing: its median told 1.5 minutes where 1.8 hours were left."""
    times = [at for n in range(0, 20, 2) for at in (n, n + 0.001)]
    assert found(*times, now_s=18.001, model='{"iterations":120}')["eta_seconds"] == pytest.approx(100, rel=0.15)


@pytest.mark.parametrize(
    ("now_s", "stuck"),
    [(60, False), (65, False), (67, True)],
)
def test_short_iterations_are_given_a_minute(now_s: float, stuck: bool) -> None:
    told = found(2, 4, 6, now_s=now_s)
    assert told["stuck"] == stuck
    assert (told["eta_seconds"] is None) == stuck


def test_as_long_a_pause_as_there_was_is_usual() -> None:
    assert not found(0, 100, 110, now_s=600)["stuck"]
    assert found(0, 100, 110, now_s=611)["stuck"]


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled", "abnormal"])
def test_a_job_that_is_over_has_no_eta_and_is_not_stuck(state: str) -> None:
    told = found(2, 4, now_s=9999, state=state)
    assert (told["stuck"], told["eta_seconds"], told["seconds_since_iteration"]) == (False, None, None)
    assert told["last_iteration_at"] == BEGAN + timedelta(seconds=4)


def test_before_the_first_iteration_and_after_the_first() -> None:
    assert found(now_s=5)["iteration"] == 0
    assert found(5, now_s=6)["eta_seconds"] == 58
    assert found(5, now_s=6, seconds=None)["eta_seconds"] is None


def test_a_job_that_goes_on_from_a_checkpoint_is_at_its_iteration() -> None:
    """Before its first commit, and to its end where nothing was left to do."""
    resumed = '{"iterations":60,"resume_from":60}'
    assert of_target(found(now_s=5, model=resumed)) == "60 of 60"
    assert of_target(found(now_s=5, model=resumed, state="completed")) == "60 of 60"
    assert found(5, now_s=6, first=31, model='{"iterations":60,"resume_from":30}')["iteration"] == 31


def test_after_the_last_iteration_it_waits_for_nothing() -> None:
    """The last checkpoint is being written."""
    told = found(2, 4, now_s=500, first=59)
    assert (told["iteration"], told["stuck"], told["eta_seconds"]) == (60, False, None)


@pytest.mark.parametrize("model", [None, "", "{", "[]", '{"iterations":"x"}', "{}"])
def test_a_model_that_says_nothing(model: str | None) -> None:
    assert goal(model) == Goal()
    assert of_target(found(2, now_s=3, model=model)) == "1"


def test_ago() -> None:
    assert [ago(s) for s in (0, 3.4, 59.4, 59.6, 245)] == [
        *("0 s ago", "3 s ago", "59 s ago", "59.6 s ago", "4 min 05 s ago")
    ]
