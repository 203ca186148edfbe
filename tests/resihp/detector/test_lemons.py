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

from resihp.detector.lemons import (
    DAY_S,
    HALF_LIFE_S,
    USUAL_RATE,
    NodeFailure,
    NodeHealth,
    Service,
    node_health,
    posterior,
)

NOW = 1_740_994_011.0
TRACE = Path(__file__).parents[4] / "shared" / "data" / "infinitehbd_fault_trace_first_half.json"


def verdict(node: str = "n0", days_ago: float = 1.0, **what: Any) -> NodeFailure:
    return NodeFailure(
        **({"node": node, "at": NOW - days_ago * DAY_S, "kind": "fail-stop", "component": "device"} | what)
    )


FLEET = [Service(node=f"n{i}", since=NOW - 60 * DAY_S, until=NOW, devices=8) for i in range(50)]


def of(node: str, found: Iterable[NodeHealth]) -> NodeHealth:
    return next(one for one in found if one.node == node)


def test_a_node_that_fails_again_and_again_is_a_lemon_and_comes_first() -> None:
    failures = [verdict("n7", days) for days in (2, 9, 11, 20)] + [verdict("n3", 5)]
    found = node_health(failures, FLEET, NOW)
    assert [one.node for one in found[:2]] == ["n7", "n3"]
    assert [one.node for one in found if one.lemon] == ["n7"]
    assert (found[0].failures, found[0].last) == (4, NOW - 2 * DAY_S)
    assert found[0].probability > 0.99
    assert found[0].verdicts == tuple(verdict("n7", days) for days in (20, 11, 9, 2))
    assert len(found) == 50
    assert of("n9", found).probability < 0.5
    assert of("n9", found).rate < of("n3", found).rate < found[0].rate


def test_one_failure_makes_no_lemon() -> None:
    assert not any(one.lemon for one in node_health([verdict(days_ago=0.1)], FLEET, NOW))
    assert not any(one.lemon for one in node_health([verdict(days_ago=0.1)], [], NOW))


def test_a_fleet_that_fails_everywhere_has_no_lemons() -> None:
    failures = [verdict(f"n{i}", days) for i in range(50) for days in (2 + 0.1 * i, 20)]
    assert not any(one.lemon for one in node_health(failures, FLEET, NOW))


def test_much_service_excuses_failures() -> None:
    failures = [verdict("n0", days) for days in (1, 3, 5)] + [verdict("n1", days) for days in (1, 3, 5)]
    services = [*FLEET[1:], Service(node="n0", since=NOW - 60 * DAY_S, until=NOW, devices=800)]
    found = node_health(failures, services, NOW)
    assert of("n1", found).probability > 0.95 > of("n0", found).probability


@pytest.mark.parametrize(
    "what",
    [
        {"kind": "program", "component": "script"},
        {"kind": "communication", "component": "link"},
        {"kind": "suspicion"},
        {"secondary": True},
        {"certainty": 0.0},
        {"at": NOW + 1},
    ],
    ids=str,
)
def test_what_says_nothing_of_a_node_does_not_count(what: dict[str, Any]) -> None:
    days = (1, 3, 5, 7)
    failures = [verdict(**({"days_ago": day} | what)) for day in days]
    assert node_health(failures, FLEET, NOW) == node_health([], FLEET, NOW)


def test_verdicts_of_one_outage_count_once_with_the_surest() -> None:
    burst = [verdict("n0", 1 + i * 60 / DAY_S, certainty=0.2 + 0.1 * i) for i in range(8)]
    [once, *_] = node_health(burst, FLEET, NOW)
    assert (once.failures, len(once.verdicts)) == (1, 8)
    assert once.weight == pytest.approx(0.9, rel=0.05)


def test_failures_fade() -> None:
    def weight(days_ago: float) -> float:
        return of("n0", node_health([verdict(days_ago=days_ago)], FLEET, NOW)).weight

    assert weight(HALF_LIFE_S / DAY_S) == pytest.approx(weight(0) / 2) == pytest.approx(0.5)
    longer = of("n0", node_health([verdict(days_ago=60)], FLEET, NOW, half_life_s=60 * DAY_S))
    assert longer.weight == pytest.approx(0.5)
    always = node_health([], [Service(node="n0", since=0.0, until=NOW, devices=8)], NOW)
    assert always[0].device_hours == pytest.approx(8 * HALF_LIFE_S / 3600 / np.log(2), rel=1e-3)
    with pytest.raises(ValueError, match="half-life of 0 s"):
        node_health([], [], NOW, half_life_s=0)


def test_a_mended_node_starts_afresh() -> None:
    failures = [verdict("n0", days) for days in (5, 9, 11)]
    found = of("n0", node_health(failures, FLEET, NOW, mended={"n0": NOW - 4 * DAY_S}))
    assert (found.failures, found.last) == (0, None)
    assert found.device_hours < of("n1", node_health(failures, FLEET, NOW)).device_hours
    assert of("n0", node_health(failures, FLEET, NOW, mended={"n0": NOW - 6 * DAY_S})).failures == 1


def test_the_posterior_by_hand() -> None:
    # Two nodes, one failure on the first. The other's rate: one failure that is presumed, in 1 / USUAL_RATE + 1000 h.
    rates, probabilities = posterior(np.array([1.0, 0.0]), np.array([1000.0, 1000.0]))
    mean = 1.0 / (1.0 / USUAL_RATE + 1000.0)
    shape = 1.0
    assert rates[0] == pytest.approx((shape + 1.0) / (shape / mean + 1000.0), rel=0.15)
    assert 0.5 < probabilities[0] < 0.9
    assert probabilities[1] < 0.5


def test_probabilities_are_calibrated() -> None:
    """Where rates are really drawn from a Gamma distribution, P = 0.9 means nine of ten."""
    rng = np.random.default_rng(4)
    true = rng.gamma(0.7, 1 / 0.7, 20_000) * 1e-4
    hours = rng.uniform(2_000, 20_000, 20_000)
    _, probabilities = posterior(rng.poisson(true * hours).astype(float), hours)
    for low in (0.05, 0.2, 0.4, 0.6, 0.8, 0.95):
        chosen = np.abs(probabilities - low) < 0.04
        assert np.mean(true[chosen] > 1e-4) == pytest.approx(np.mean(probabilities[chosen]), abs=0.05)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 400), st.floats(0, 1)), max_size=20),
    st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 400), st.floats(-5, 400)), max_size=10),
)
def test_any_history_gives_probabilities(
    failures: list[tuple[int, float, float]], times: list[tuple[int, float, float]]
) -> None:
    services = [
        Service(node=f"n{node}", since=NOW - since * DAY_S, until=NOW - until * DAY_S, devices=4)
        for node, since, until in times
    ]
    given = [verdict(f"n{node}", days, certainty=certainty) for node, days, certainty in failures]
    found = node_health(given, services, NOW)
    assert [one.node for one in found] == [one.node for one in node_health(given[::-1], services[::-1], NOW)]
    for one in found:
        assert 0.0 <= one.probability <= 1.0
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
    weekly = range(45, DAYS - 13, 7)
    within_two_weeks, lemons, hits = lift(weekly, 14)
    assert (lemons, hits) == (64, 27)
    assert within_two_weeks == pytest.approx(5.5, abs=0.1)
    assert lift(weekly, 30)[0] == pytest.approx(3.6, abs=0.1)
    # Without returns within two days of a repair, which may be the same fault, not mended.
    assert lift(weekly, 14, 2.0)[0] == pytest.approx(2.6, abs=0.1)


def test_lemons_of_the_first_half_are_as_good_as_others_in_the_second(
    lift: Callable[..., tuple[float, int, int]],
) -> None:
    """Nodes of this cluster were repaired: what they did until day 90 says nothing of days 90 to 175."""
    found, lemons, hits = lift([90], DAYS - 90)
    assert (lemons, hits) == (10, 4)
    assert found == pytest.approx(1.1, abs=0.1)
