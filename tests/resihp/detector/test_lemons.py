"""Lemons: who is one, who is not, and whether a real cluster's lemons went on failing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.detector.lemons import HALF_LIFE_S, NodeFailure, NodeHealth, node_health
from resihp.detector.service_hours import DAY_S, Service, part

NOW = 1_740_994_011.0
TRACE = Path(__file__).parents[4] / "shared" / "data" / "infinitehbd_fault_trace_first_half.json"


def verdict(node: str = "n0", days_ago: float = 1.0, **what: Any) -> NodeFailure:
    return NodeFailure(
        **({"node": node, "at": NOW - days_ago * DAY_S, "kind": "fail-stop", "component": "device"} | what)
    )


FLEET = [Service(node=f"n{i}", since=NOW - 60 * DAY_S, until=NOW, devices=8) for i in range(50)]
LONG = [Service(node=f"n{i}", since=NOW - 182 * DAY_S, until=NOW, devices=8) for i in range(500)]
USUAL = [verdict(f"n{i}", 1 + i % 180, device=i % 8) for i in range(10, 360)]
"""Of 500 nodes 350 failed once in half a year: as often as Llama 3's."""


def of(node: str, found: Iterable[NodeHealth]) -> NodeHealth:
    return next(one for one in found if one.node == node)


def judged(failures: list[NodeFailure], node: str = "n0", **options: Any) -> NodeHealth:
    """How a node stands with these failures in the usual fleet."""
    return of(node, node_health(USUAL + failures, LONG, NOW, **options))


def every(days: float, until: float, **what: Any) -> list[NodeFailure]:
    """Failures of n0, so many days apart, for 80 days until so many days ago."""
    return [verdict("n0", until + day, **what) for day in np.arange(0.0, 80.0, days)]


def test_a_node_that_fails_again_and_again_is_a_lemon_and_comes_first() -> None:
    failures = [verdict("n7", days) for days in (2, 9, 11, 20)] + [verdict("n3", 5)]
    found = node_health(failures, FLEET, NOW)
    assert [one.node for one in found[:2]] == ["n7", "n3"]
    assert [one.node for one in found if one.lemon] == ["n7"]
    assert (found[0].failures, found[0].last) == (4, NOW - 2 * DAY_S)
    assert found[0].tally.observed == 4
    assert found[0].tally.q < 0.01
    assert found[0].verdicts == tuple(verdict("n7", days) for days in (20, 11, 9, 2))
    assert len(found) == 50
    assert of("n9", found).tally.p == 1.0
    assert of("n9", found).rate < of("n3", found).rate < found[0].rate


def test_nine_outages_where_less_than_one_is_expected_make_a_lemon() -> None:
    tally = judged(every(9.0, 60)).tally
    assert (tally.observed, tally.window_days, tally.lemon) == (9, 180, True)
    assert tally.expected == pytest.approx(0.7, abs=0.02)
    assert tally.told == "9 outages in 180 days, 0.7 expected"
    assert tally.p < 1e-7


def test_one_failure_makes_no_lemon_nor_do_two() -> None:
    for days in ([0.1], [0.1, 3.0]):
        failures = [verdict(days_ago=day) for day in days]
        assert not any(one.lemon for one in node_health(failures, FLEET, NOW))
        assert not any(one.lemon for one in node_health(failures, [], NOW))


def test_in_a_young_fleet_two_failures_are_nothing() -> None:
    young = [Service(node=f"n{i}", since=NOW - 3 * DAY_S, until=NOW, devices=8) for i in range(500)]
    found = node_health([verdict("n0", 2.5), verdict("n0", 0.5)], young, NOW)
    assert (found[0].node, found[0].failures, found[0].lemon) == ("n0", 2, False)
    assert found[0].tally.p < 1e-3  # by its count alone it would be one


@pytest.mark.parametrize("nodes", [3, 50, 500])
def test_a_fleet_that_fails_everywhere_has_no_lemons(nodes: int) -> None:
    fleet = [Service(node=f"n{i}", since=NOW - 60 * DAY_S, until=NOW, devices=8) for i in range(nodes)]
    for often in (2, 6, 20):
        failures = [
            verdict(f"n{i}", 0.5 + 58 * (k + (i % 7) / 7) / often) for i in range(nodes) for k in range(often + i % 3)
        ]
        assert not any(one.lemon for one in node_health(failures, fleet, NOW))


def test_who_fails_far_more_often_than_a_fleet_that_fails_often_is_a_lemon() -> None:
    failures = [verdict(f"n{i}", 0.5 + 10 * k + i % 7) for i in range(50) for k in range(5)]
    found = node_health(failures + [verdict("n0", 1.0 + 2.2 * k) for k in range(26)], FLEET, NOW)
    assert [one.node for one in found if one.lemon] == ["n0"]
    assert found[0].tally.expected == pytest.approx(4.6, abs=0.1)


def test_much_service_excuses_failures() -> None:
    failures = [verdict("n0", days) for days in (1, 3, 5)] + [verdict("n1", days) for days in (1, 3, 5)]
    services = [*FLEET[1:], Service(node="n0", since=NOW - 60 * DAY_S, until=NOW, devices=800)]
    found = node_health(failures, services, NOW)
    assert of("n1", found).lemon
    assert not of("n0", found).lemon
    assert of("n1", found).tally.p < of("n0", found).tally.p


def test_who_is_not_known_to_have_served_is_not_judged() -> None:
    found = node_health([verdict("elsewhere", days) for days in (1, 3, 5, 7)], FLEET, NOW)
    assert (found[0].node, found[0].failures, found[0].lemon) == ("elsewhere", 4, False)


@pytest.mark.parametrize(
    "what",
    [
        {"kind": "program", "component": "script"},
        {"kind": "communication", "component": "link"},
        {"kind": "suspicion"},
        {"secondary": True},
        {"certainty": 0.0},
        {"at": NOW + 1},
        {"at": NOW - 181 * DAY_S},
    ],
    ids=str,
)
def test_what_says_nothing_of_a_node_does_not_count(what: dict[str, Any]) -> None:
    days = (1, 3, 5, 7)
    failures = [verdict(**({"days_ago": day} | what)) for day in days]
    assert node_health(failures, FLEET, NOW) == node_health([], FLEET, NOW)


@pytest.mark.parametrize("what", [{"component": "process"}, {"component": "link"}, {"certainty": 0.4}], ids=str)
def test_without_evidence_against_hardware_a_node_moves_up_and_is_no_lemon(what: dict[str, Any]) -> None:
    failures = [verdict("n0", days, device=3, **what) for days in (1, 8, 15, 22, 29, 36)]
    found = node_health(failures, FLEET, NOW)
    assert (found[0].node, found[0].failures, found[0].unsure, found[0].lemon) == ("n0", 0, 6, False)
    assert found[0].tally.observed == 0
    assert found[0].devices == {}


def test_a_process_that_died_of_a_broken_device_is_no_outage_more() -> None:
    failures = [verdict("n0", days, component=what) for days in (1, 9, 17) for what in ("process", "device")]
    found = of("n0", node_health(failures, FLEET, NOW))
    assert (found.failures, found.unsure, found.lemon) == (3, 0, True)


# --- outages ----------------------------------------------------------------------------------------------------------


def test_verdicts_of_one_outage_count_once_with_the_surest() -> None:
    burst = [verdict("n0", 1 + i * 60 / DAY_S, certainty=0.2 + 0.1 * i) for i in range(8)]
    [once, *_] = node_health(burst, FLEET, NOW)
    assert (once.failures, len(once.verdicts)) == (1, 8)
    assert once.weight == pytest.approx(0.9, rel=0.05)


def test_one_bad_week_of_a_device_is_one_outage() -> None:
    week = [verdict("n0", 20 - 0.5 * i, device=3) for i in range(14)]
    found = judged(week)
    assert (found.failures, len(found.verdicts), found.lemon) == (1, 14, False)
    # Of different devices they are different faults, and so are those of which nobody knows the device.
    assert judged([verdict("n0", 20 - 0.5 * i, device=i % 8) for i in range(8)]).failures == 8
    assert judged([verdict("n0", 20 - 0.5 * i) for i in range(8)]).failures == 8


def test_who_goes_on_after_a_bad_week_is_a_lemon() -> None:
    weeks = [verdict("n0", 60 - 1.2 * i, device=3) for i in range(30)]
    found = judged(weeks)
    assert found.failures == 5
    assert found.lemon_devices == (3,)


def test_a_node_that_is_lost_again_within_hours_was_not_mended() -> None:
    lost = [verdict("n0", 20 - hours / 24, component="node") for hours in (0, 3, 9, 20, 33)]
    assert judged(lost).failures == 2  # 13 hours after the others it is lost anew


# --- devices ----------------------------------------------------------------------------------------------------------


def test_a_device_is_a_lemon_of_its_own() -> None:
    found = judged([verdict("n0", days, device=3) for days in (1, 40, 80, 120)] + [verdict("n0", 150, device=5)])
    assert found.lemon_devices == (3,)
    assert (found.devices[3].observed, found.devices[5].observed) == (4, 1)
    assert found.devices[3].expected == pytest.approx(0.7 / 8, rel=0.05)
    # As many of four devices are no device's.
    scattered = judged([verdict("n0", days, device=i) for i, days in enumerate((1, 40, 80, 120))])
    assert (scattered.lemon, scattered.lemon_devices) == (False, ())


def test_a_node_that_takes_its_devices_along_blames_none() -> None:
    crashes = [verdict("n0", days + i / 1e5, device=i) for days in (1, 40, 80, 120, 160, 170) for i in range(8)]
    found = judged(crashes)
    assert (found.tally.observed, found.tally.lemon, found.devices) == (6, True, {})


def test_a_device_number_that_no_node_has_costs_nothing() -> None:
    found = judged([verdict("n0", days, device=10**12) for days in (1, 20, 40, 60)])
    assert not found.devices[10**12].lemon


# --- mended -----------------------------------------------------------------------------------------------------------


def test_a_mended_node_starts_afresh() -> None:
    failures = [verdict("n0", days) for days in (5, 9, 11)]
    found = of("n0", node_health(failures, FLEET, NOW, mended={"n0": NOW - 4 * DAY_S}))
    assert (found.failures, found.last) == (0, None)
    assert found.device_hours < of("n1", node_health(failures, FLEET, NOW)).device_hours
    assert of("n0", node_health(failures, FLEET, NOW, mended={"n0": NOW - 6 * DAY_S})).failures == 1


def test_a_repaired_node_is_no_lemon_unless_it_goes_on_failing() -> None:
    before, repaired = every(9.0, 95), {"n0": NOW - 90 * DAY_S}
    assert judged(before).lemon
    after = judged(before, mended=repaired)
    assert (after.tally.observed, after.lemon) == (0, False)
    assert after.tally.expected == pytest.approx(0.35, abs=0.02)
    again = judged(before + every(14.0, 3), mended=repaired)
    assert (again.failures, again.lemon) == (6, True)


def test_a_board_that_was_changed_is_a_new_one_and_its_node_is_not_blamed_for_the_old_one() -> None:
    before, changed = every(9.0, 95, device=3), {part("n0", 3): NOW - 90 * DAY_S}
    assert judged(before).lemon_devices == (3,)
    assert judged(before).tally.lemon
    after = judged([*before, verdict("n0", 50, device=3), verdict("n0", 140, device=4)], mended=changed)
    assert (after.failures, after.lemon) == (2, False)
    assert (after.devices[3].observed, after.devices[4].observed) == (1, 1)
    assert after.device_hours == pytest.approx(7.5 * 180 * 24)
    assert after.devices[3].expected == pytest.approx(after.devices[4].expected / 2, rel=0.05)
    assert judged(before + every(14.0, 3, device=3), mended=changed).lemon_devices == (3,)
    # Another board of it goes on failing: that one is changed for nothing.
    assert judged(before, mended={part("n0", 4): NOW - 90 * DAY_S}).lemon_devices == (3,)


# --- fading -----------------------------------------------------------------------------------------------------------


def test_failures_fade_in_the_order_alone() -> None:
    def weight(days_ago: float) -> float:
        return of("n0", node_health([verdict(days_ago=days_ago)], FLEET, NOW)).weight

    assert weight(HALF_LIFE_S / DAY_S) == pytest.approx(weight(0) / 2) == pytest.approx(0.5)
    longer = of("n0", node_health([verdict(days_ago=60)], FLEET, NOW, half_life_s=60 * DAY_S))
    assert longer.weight == pytest.approx(0.5)
    with pytest.raises(ValueError, match="half-life of 0 s"):
        node_health([], [], NOW, half_life_s=0)
    failures = [verdict("n0", days) for days in (100, 110, 120, 130, 140, 150)] + [verdict("n1", 1), verdict("n2", 170)]
    ones = {half: node_health(failures, LONG, NOW, half_life_s=half * DAY_S) for half in (1.0, 30.0, 3650.0)}
    for found in ones.values():
        assert [one.node for one in found if one.lemon] == ["n0"]
        assert [one.node for one in found[:2]] == ["n0", "n1"]
    assert len({of("n0", found).tally for found in ones.values()}) == 1


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 400), st.floats(0, 1)), max_size=20),
    st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 400), st.floats(-5, 400)), max_size=10),
)
def test_any_history_gives_probabilities_and_the_same_in_any_order(
    failures: list[tuple[int, float, float]], times: list[tuple[int, float, float]]
) -> None:
    services = [
        Service(node=f"n{node}", since=NOW - since * DAY_S, until=NOW - until * DAY_S, devices=4)
        for node, since, until in times
    ]
    given = [
        verdict(f"n{node}", days, certainty=certainty, device=int(certainty * 10) if days > 9 else None)
        for node, days, certainty in failures
    ]
    found = node_health(given, services, NOW)
    assert [one.node for one in found] == [one.node for one in node_health(given[::-1], services[::-1], NOW)]
    for one in found:
        for tally in (one.tally, *one.devices.values()):
            assert 0.0 <= tally.p <= 1.0
            assert 0.0 <= tally.q <= 1.0
            assert np.isfinite(tally.expected)
        assert np.isfinite([one.rate, one.weight, one.device_hours]).all()


# --- a real cluster ---------------------------------------------------------------------------------------------------

NODES, DAYS = 400, 175


@pytest.fixture(scope="module")
def trace() -> list[dict[str, Any]]:
    if not TRACE.exists():
        pytest.skip(f"{TRACE.name} is not there")
    events: list[dict[str, Any]] = json.loads(TRACE.read_text())
    return [event for event in events if event["fault_type"]["Level"] != "Software Failure"]


@pytest.fixture(scope="module")
def lift(trace: list[dict[str, Any]]) -> Callable[..., tuple[float, int, int]]:
    """`lift(days, horizon, apart)`: over all origins, how much oftener lemons of that day failed in the `horizon` days
    after than others did; lemons, and their failures. `apart`: only failures so many days after the last repair."""
    starts = [event for event in trace if event["event_type"] == "fault_start"]
    names = {event["node_id"] for event in trace}
    names |= {f"quiet-{i}" for i in range(NODES - len(names))}
    ends: dict[str, float] = {}
    since_repair = []
    for event in trace:
        if event["event_type"] == "fault_end":
            ends[event["node_id"]] = event["event_time"]
        else:
            since_repair.append((event["node_id"], event["event_time"], ends.get(event["node_id"], -1e9)))

    def measured(days: Iterable[int], horizon: int, apart: float = 0.0) -> tuple[float, int, int]:
        lemons = hits = others = misses = 0
        for day in days:
            past = [
                NodeFailure(node=event["node_id"], at=event["event_time"] * DAY_S, kind="fail-stop", component="node")
                for event in starts
                if event["event_time"] < day
            ]
            services = [Service(node=name, since=0.0, until=day * DAY_S, devices=8) for name in names]
            bad = {one.node for one in node_health(past, services, day * DAY_S) if one.lemon}
            after = [
                node for node, at, end in since_repair if day <= at < min(day + horizon, DAYS) and at - end > apart
            ]
            lemons, others = lemons + len(bad), others + NODES - len(bad)
            hits, misses = hits + sum(node in bad for node in after), misses + sum(node not in bad for node in after)
        return (hits / max(lemons, 1)) / (misses / others), lemons, hits

    return measured


def test_lemons_fail_again_soon(lift: Callable[..., tuple[float, int, int]]) -> None:
    """Few, as nodes of this cluster fail in bursts, are repaired, and nobody tells. Some rules were chosen by it."""
    weekly = range(45, DAYS - 13, 7)
    within_two_weeks, lemons, hits = lift(weekly, 14)
    assert (lemons, hits) == (18, 7)
    assert within_two_weeks == pytest.approx(4.9, abs=0.1)
    assert lift(weekly, 30)[0] == pytest.approx(2.8, abs=0.1)
    # Without returns within two days of a repair, which may be the same fault, not mended.
    assert lift(weekly, 14, 2.0)[0] == pytest.approx(4.1, abs=0.1)


def test_nobody_is_called_a_lemon_whose_first_half_says_nothing_of_the_second(
    lift: Callable[..., tuple[float, int, int]],
) -> None:
    """Nodes of this cluster were repaired: who failed most until day 90 failed no more than others from then on."""
    _, lemons, _ = lift([90], DAYS - 90)
    assert lemons == 0
