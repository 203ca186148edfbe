"""One policy for what is slow, what is new and what could be asked for: what it weighs, journals and remembers."""

from __future__ import annotations

from typing import Any

import msgspec

from resihp.controller import interface as api
from resihp.controller import replan_policy
from resihp.record.journal import ChangeDecided, ChangeDeclined, PlanDecided
from resihp.scheduler.transition_cost import FLICKER_WINDOW_S
from tests.resihp.controller.direct import DECLARE, Direct
from tests.resihp.controller.test_takeover import TakenOver


def crashed(**options: Any) -> Direct:
    """Three nodes of two; rank 1 died, training goes on without it, and rank 6 is starting in its place."""
    given: dict[str, Any] = {"declare": msgspec.structs.replace(DECLARE, iterations=10_000)} | options
    job = Direct(nodes=3, **given).run(1)
    job.crash(1)
    job.park(stepped=1)
    return job.run(1)


def told(job: Direct) -> list[str]:
    return [action.text for action in job.actions if isinstance(action, api.Say)]


def test_what_a_newcomer_is_worth_is_told_and_journaled() -> None:
    job = crashed()
    job.join(6)
    (decided,) = job.all(ChangeDecided)
    assert (decided.devices, decided.links) == ((("n1", 1),), ())
    assert decided.reason.startswith("saves ")
    assert job.job.changed_at["n1", 1] == [job.now], "it counts against the next one"
    assert job.job.pause is not None
    assert job.job.pause.reason == f"rank 6 joined: {decided.reason}"


def test_near_the_end_a_newcomer_interrupts_nobody_and_the_next_plan_has_work_for_it() -> None:
    job = crashed(declare=msgspec.structs.replace(DECLARE, iterations=8))
    job.join(6)
    assert job.job.pause is None
    assert job.all(ChangeDecided) == []
    (why,) = [text for text in told(job) if text.startswith("rank 6 joined")]
    assert "the plan stays: saves" in why
    assert "until the job's end, but switching costs" in why
    (declined,) = job.all(ChangeDeclined)
    assert (declined.about, declined.reason) == ("plan", "rank 6 joined")
    assert why == f"rank 6 joined: the plan stays: {declined.why}"
    assert declined.predicted < declined.present
    assert declined.layout
    job.crash(4)
    job.park(stepped=2)
    assert 6 in job.plan.layout.active


def test_what_else_was_possible_is_on_record_with_a_plan() -> None:
    job = crashed()
    plan = job.all(PlanDecided)[-1]
    assert plan.considered
    assert all(one.predicted >= plan.predicted for one in plan.considered)


def test_a_device_that_comes_and_goes_has_to_gain_more_each_time() -> None:
    job = crashed()
    job.job.changed_at["n1", 1] = [job.now] * 14
    job.join(6)
    assert job.job.pause is None
    assert any("counted as" in text and "after recent changes" in text for text in told(job))
    asked = len(told(job))
    job.step(3)
    assert len(told(job)) == asked, "the planner is not asked at every event"
    assert 0.0 < job.job.reconsider_at - job.now <= replan_policy.NEWCOMER_RECHECK_S
    job.job.changed_at["n1", 1] = [job.now - FLICKER_WINDOW_S] * 14
    job.job.reconsider_at = job.now
    job.step(4)
    assert job.job.pause is not None


def test_a_take_over_remembers_what_newcomers_were_taken_in_for() -> None:
    job = crashed()
    job.join(6)
    job.step(3, pause=True)
    job.park(0, stepped=3, epoch=3)
    job.park(6, stepped=0)
    job.park(stepped=3)
    job.run(1)
    heir = TakenOver(job).all_back()
    assert heir.job.changed_at["n1", 1] == [heir.job.now]


def test_a_take_over_remembers_how_often_a_better_plan_was_found() -> None:
    job = Direct().run(3)
    job.actions.append(api.Log(entry=ChangeDecided(reason="saves 3 s", found=True)))
    heir = TakenOver(job).all_back()
    assert heir.job.changed_at["found"] == [heir.job.now]


def test_a_newcomer_that_goes_again_is_no_reason_any_more() -> None:
    job = crashed(declare=msgspec.structs.replace(DECLARE, iterations=8))
    job.join(6)
    job.crash(6)
    asked = len(told(job))
    job.job.reconsider_at = job.now
    job.step(3)
    assert [text for text in told(job)[asked:] if "rank 6 joined" in text] == []
    assert job.job.reconsider == []
