"""Whether a transition is worth it: gain against cost, unknown durations, flickering devices, learned costs, nodes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.record.state import ChangeCost
from resihp.scheduler import transition_cost
from resihp.scheduler.transition_cost import Cost, Movement, Rates, verdict

HOUR_S = 3600.0
TEN_S = Cost(total_bytes=0, groups_s=2.0, transfer_s=3.0, fixed_s=1.0, lost_s=4.0)


def test_cost_is_the_sum_of_its_parts() -> None:
    movement = Movement(total_bytes=100, busiest_bytes=40e9, groups=8)
    found = transition_cost.cost(movement, Rates(fixed_s=1.0, group_s=0.5, byte_s=1e-10), lost_s=2.0)
    assert (found.groups_s, found.transfer_s, found.fixed_s, found.lost_s) == (4.0, 4.0, 1.0, 2.0)
    assert found.seconds == 11.0


# --- how long it lasts is known ---------------------------------------------------------------------------------------


def test_for_good_it_is_worth_it_if_enough_is_left() -> None:
    """A tenth of the time is saved: 10 s are paid back after 100 s."""
    assert verdict(TEN_S, 1.0, 0.9, remaining_s=101, duration_s=math.inf).go
    late = verdict(TEN_S, 1.0, 0.9, remaining_s=99, duration_s=math.inf)
    assert not late.go
    assert late.again_in_s is None
    assert "until the job's end" in late.reason
    assert transition_cost.pays_back_s(TEN_S, 1.0, 0.9) == pytest.approx(100)


def test_what_soon_passes_is_sat_out() -> None:
    short = verdict(TEN_S, 1.0, 0.5, remaining_s=HOUR_S, duration_s=15)
    assert not short.go
    assert "while it lasts" in short.reason
    assert verdict(TEN_S, 1.0, 0.5, remaining_s=HOUR_S, duration_s=25).go


def test_the_verdict_carries_its_numbers() -> None:
    found = verdict(TEN_S, 2.0, 1.5, remaining_s=400, duration_s=math.inf)
    assert (found.share, found.horizon_s, found.gain_s, found.cost_s) == (0.25, 400, 100, 10)
    assert found.reason == "saves 25.0 % per iteration, 100 s of the remaining time; switching costs 10 s"


def test_predictions_count_in_any_unit() -> None:
    seconds = verdict(TEN_S, 2.0, 1.5, remaining_s=400)
    layers = verdict(TEN_S, 200.0, 150.0, remaining_s=400)
    assert seconds == layers


def test_what_predictions_cannot_tell_apart_is_no_gain() -> None:
    assert not verdict(TEN_S, 1.0, 0.995, duration_s=math.inf).go
    assert not verdict(TEN_S, 1.0, 1.2, duration_s=math.inf).go
    assert not verdict(TEN_S, 1.0, math.inf).go


def test_anything_is_better_than_nothing() -> None:
    found = verdict(TEN_S, math.inf, 9.0, remaining_s=1.0)
    assert found.go
    assert found.reason == "nothing runs under the present plan"
    assert not verdict(TEN_S, math.inf, math.inf).go
    assert transition_cost.pays_back_s(TEN_S, math.inf, 9.0) == 0.0


@pytest.mark.parametrize("bad", [{"now_s": math.nan}, {"then_s": -1.0}, {"remaining_s": math.nan}, {"elapsed_s": -1.0}])
def test_times_that_are_none(bad: dict[str, float]) -> None:
    times = {"now_s": 1.0, "then_s": 0.5, **bad}
    with pytest.raises(ValueError, match=next(iter(bad))):
        verdict(TEN_S, **times)


# --- how long it lasts is not known -----------------------------------------------------------------------------------


def test_unknown_durations_are_waited_out_until_they_have_cost_as_much() -> None:
    """Half of the time is lost: the 10 s are reached after 20."""
    early = verdict(TEN_S, 1.0, 0.5, remaining_s=HOUR_S, elapsed_s=14)
    assert not early.go
    assert early.again_in_s == pytest.approx(6)
    assert verdict(TEN_S, 1.0, 0.5, remaining_s=HOUR_S, elapsed_s=20).go


def test_not_at_the_end_however_much_was_lost() -> None:
    assert not verdict(TEN_S, 1.0, 0.5, remaining_s=15, elapsed_s=HOUR_S).go
    soon = verdict(TEN_S, 1.0, 0.5, remaining_s=30, elapsed_s=0)
    assert not soon.go
    assert soon.again_in_s is None  # 10 s are left by then


@settings(deadline=None)
@given(
    cost_s=st.floats(0.1, 100),
    then_s=st.floats(0.05, 0.95),
    duration_s=st.floats(0, 1e4),
    step_s=st.floats(0.01, 1.0),
)
def test_never_more_than_twice_what_is_lost_by_somebody_who_knows(
    cost_s: float, then_s: float, duration_s: float, step_s: float
) -> None:
    """Ski rental, asked again when the verdict says so, or a little later."""
    cost = Cost(total_bytes=0, groups_s=0.0, transfer_s=0.0, fixed_s=cost_s)
    share = 1.0 - then_s
    best = min(share * duration_s, cost_s)
    elapsed_s = 0.0
    lost = share * duration_s
    while elapsed_s < duration_s:
        found = verdict(cost, 1.0, then_s, elapsed_s=elapsed_s)
        if found.go:
            lost = share * elapsed_s + cost_s
            break
        assert found.again_in_s is not None
        elapsed_s += found.again_in_s + 1e-6
    assert lost <= 2 * best + share * 1e-5


def test_a_recovery_has_to_last_as_well() -> None:
    """The same question, from the recovery's onset: back when the work it could have done equals the cost."""
    assert not verdict(TEN_S, 1.25, 1.0, remaining_s=HOUR_S, elapsed_s=40, changes=0).go
    assert verdict(TEN_S, 1.25, 1.0, remaining_s=HOUR_S, elapsed_s=50.1, changes=0).go
    assert transition_cost.pays_back_s(TEN_S, 1.25, 1.0) == pytest.approx(50)


# --- flickering -------------------------------------------------------------------------------------------------------


def test_each_recent_change_doubles_the_threshold() -> None:
    thresholds = [verdict(TEN_S, 1.0, 0.5, changes=changes).threshold_s for changes in range(4)]
    assert thresholds == [10, 20, 40, 80]
    assert "counted as 40 s after recent changes" in verdict(TEN_S, 1.0, 0.5, changes=2).reason


def test_changes_are_forgotten_after_a_while() -> None:
    assert transition_cost.recent((10.0, 20.0, 4000.0), now_s=4100.0) == 1
    assert transition_cost.recent((10.0, 20.0, 4000.0), now_s=3615.0) == 1  # the last is yet to come
    assert transition_cost.recent((), now_s=4100.0) == 0


@pytest.mark.parametrize("period_s", [1.0, 7.0, 30.0, 120.0, 600.0])
def test_a_flickering_device_does_not_flip_the_layout(period_s: float) -> None:
    """It is slow, then not, then slow, for an hour, each as long as `period_s`."""
    changes: list[float] = []
    served = True  # the layout is that for a healthy device
    onset_s, slow = 0.0, True
    for tick in range(1, 3600):
        now_s = float(tick)
        if now_s - onset_s >= period_s:
            onset_s, slow = now_s, not slow
        if served != slow:
            continue  # the layout suits
        now, then = (1.0, 0.8) if slow else (1.25, 1.0)
        elapsed_s = now_s - onset_s
        if verdict(TEN_S, now, then, elapsed_s=elapsed_s, changes=transition_cost.recent(changes, now_s)).go:
            changes.append(now_s)
            served = not slow
    most = math.log2(3600 * 0.2 / TEN_S.seconds) + 2
    assert len(changes) <= most
    if period_s <= 30.0:
        assert not changes  # over before it has cost as much as the change
    if period_s >= 120.0:
        assert changes


# --- learned costs ----------------------------------------------------------------------------------------------------

TRUE = Rates(fixed_s=2.0, group_s=0.05, byte_s=1 / 5e9)


def records(count: int, seed: int = 0, noise: float = 0.1) -> list[ChangeCost]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        groups, moved = draw.randint(4, 40), draw.uniform(0, 50e9)
        seconds = TRUE.fixed_s + groups * TRUE.group_s + moved * TRUE.byte_s
        found.append(
            ChangeCost(busiest_bytes=moved, communicators=groups, seconds=seconds * math.exp(draw.gauss(0, noise)))
        )
    return found


def predicted(rates: Rates, groups: int = 12, moved: float = 20e9) -> float:
    return transition_cost.cost(Movement(busiest_bytes=moved, groups=groups), rates).seconds


def test_without_records_the_defaults_hold() -> None:
    assert transition_cost.calibrated([]) == transition_cost.DEFAULT_RATES


def test_many_records_are_believed() -> None:
    rates = transition_cost.calibrated(records(200))
    for groups, moved in ((4, 0.0), (12, 20e9), (40, 50e9)):
        assert predicted(rates, groups, moved) == pytest.approx(predicted(TRUE, groups, moved), rel=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_a_few_records_already_tell(seed: int) -> None:
    near = abs(math.log(predicted(transition_cost.calibrated(records(4, seed))) / predicted(TRUE)))
    assert near < abs(math.log(predicted(transition_cost.DEFAULT_RATES) / predicted(TRUE))) / 2


def test_one_that_went_wrong_does_not_make_all_others_dear() -> None:
    good = records(12)
    rates = transition_cost.calibrated([*good, ChangeCost(busiest_bytes=1e9, communicators=8, seconds=600.0)])
    assert predicted(rates) == pytest.approx(predicted(transition_cost.calibrated(good)), rel=0.15)


def test_what_records_do_not_tell_stays_as_it_was() -> None:
    """None of them moved anything."""
    still = [ChangeCost(busiest_bytes=0.0, communicators=8, seconds=3.0)] * 10
    rates = transition_cost.calibrated(still)
    assert rates.byte_s == pytest.approx(transition_cost.DEFAULT_RATES.byte_s)
    assert predicted(rates, 8, 0.0) == pytest.approx(3.0, rel=0.05)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            ChangeCost,
            busiest_bytes=st.floats(0, 1e13),
            communicators=st.integers(0, 10_000),
            seconds=st.floats(0, 1e5) | st.just(math.nan) | st.just(math.inf),
        ),
        max_size=8,
    )
)
def test_rates_are_never_negative(found: list[ChangeCost]) -> None:
    rates = transition_cost.calibrated(found)
    assert min(rates.fixed_s, rates.group_s, rates.byte_s) >= 0
    assert math.isfinite(predicted(rates))


# --- another node -----------------------------------------------------------------------------------------------------


def test_a_node_that_comes_too_late_is_not_asked_for() -> None:
    asked = {"wait_s": 600.0, "joining_s": 30.0}
    assert transition_cost.worth_asking(TEN_S, 1.25, 1.0, remaining_s=HOUR_S, **asked).go
    assert not transition_cost.worth_asking(TEN_S, 1.25, 1.0, remaining_s=670.0, **asked).go
    assert not transition_cost.worth_asking(TEN_S, 1.25, 1.0, remaining_s=300.0, **asked).go
    assert transition_cost.worth_asking(TEN_S, 1.25, 1.0, remaining_s=None, **asked).go
    assert not transition_cost.worth_asking(TEN_S, 1.0, 1.0, remaining_s=HOUR_S, **asked).go


def test_a_job_that_cannot_run_waits_for_its_node() -> None:
    assert transition_cost.worth_asking(TEN_S, math.inf, 1.0, remaining_s=10.0, wait_s=600.0, joining_s=30.0).go
