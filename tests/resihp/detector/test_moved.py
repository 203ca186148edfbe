"""Boards are swapped, moved and repaired, and nodes' names given to other machines: whose record is whose then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.detector.lemons import NodeFailure, NodeHealth, node_health
from resihp.detector.moved import Machine, Renewal, SeenDevice, follow
from resihp.detector.service_hours import DAY_S, Service, part

NOW = 200 * DAY_S
FLEET = [Service(node=f"n{i}", since=20 * DAY_S, until=NOW, devices=8) for i in range(500)]
USUAL = [
    NodeFailure(node=f"n{i}", at=(21 + i % 178) * DAY_S, kind="fail-stop", component="device", device=i % 8)
    for i in range(10, 360)
]
BAD = [30.0, 40.0, 50.0, 60.0, 70.0, 80.0]
"""Days on which device 3 of n1 fails."""
FIRST = [
    SeenDevice(node=f"n{i}", device=d, uuid=f"GPU-{i}-{d}", since=20 * DAY_S, bus=f"{d:02}")
    for i in range(500)
    for d in range(8)
]


def failures(*days: float, node: str = "n1", device: int | None = 3) -> list[NodeFailure]:
    component = "node" if device is None else "device"
    return [
        NodeFailure(node=node, device=device, at=day * DAY_S, kind="fail-stop", component=component) for day in days
    ]


def seen(node: str, device: int, uuid: str, day: float, **more: Any) -> SeenDevice:
    return SeenDevice(node=node, device=device, uuid=uuid, since=day * DAY_S, **more)


def judged(*given: NodeFailure, then: Sequence[SeenDevice] = (), **what: Any) -> dict[str, NodeHealth]:
    counted = follow([*USUAL, *given], FLEET, [*FIRST, *then], **what)
    return {one.node: one for one in node_health(*counted, NOW)}


def lemons(found: dict[str, NodeHealth]) -> dict[str, tuple[int, ...]]:
    """Devices by node, of all that are called lemons."""
    return {name: one.lemon_devices for name, one in found.items() if one.lemon}


def test_a_device_that_stays_where_it_is_is_judged_as_ever() -> None:
    found = judged(*failures(*BAD))
    assert lemons(found) == {"n1": (3,)}
    plain = {one.node: one for one in node_health([*USUAL, *failures(*BAD)], FLEET, NOW)}
    assert found == plain


def test_a_swapped_boards_failures_do_not_count_against_the_new_one() -> None:
    found = judged(*failures(*BAD), then=[seen("n1", 3, "GPU-new", 90)])
    assert lemons(found) == {}
    assert found["n1"].failures == 0
    assert found["n1"].device_hours == pytest.approx(24 * (7 * 180 + 110))
    again = judged(*failures(*BAD, 100.0, 110.0), then=[seen("n1", 3, "GPU-new", 90)])
    assert again["n1"].devices[3].observed == 2
    assert lemons(again) == {}


def test_the_old_board_is_found_in_another_slot_with_all_that_it_did() -> None:
    then = [seen("n1", 3, "GPU-new", 90), seen("n7", 5, "GPU-1-3", 95)]
    found = judged(*failures(*BAD), then=then)
    assert lemons(found) == {"n7": (5,)}
    assert found["n7"].devices[5].observed == 6
    assert found["n1"].failures == 0
    assert "on n1 device 3, where the device was then" in found["n7"].verdicts[0].cause
    # It served 70 days in n1 and 105 in n7; who was in n7 before is not there any more.
    assert found["n7"].device_hours == pytest.approx(24 * (7 * 180 + 70 + 105))


def test_failures_before_and_after_a_move_are_one_record() -> None:
    then = [seen("n1", 3, "GPU-new", 90), seen("n7", 5, "GPU-1-3", 95)]
    found = judged(*failures(30.0, 50.0), *failures(120.0, 140.0, 160.0, node="n7", device=5), then=then)
    assert found["n7"].devices[5].observed == 5
    assert found["n7"].devices[5].lemon


def test_two_boards_that_changed_places_keep_their_records() -> None:
    then = [seen("n1", 3, "GPU-1-4", 90, bus="03"), seen("n1", 4, "GPU-1-3", 90, bus="04")]
    found = judged(*failures(*BAD), then=then)
    assert lemons(found) == {"n1": (4,)}
    assert found["n1"].device_hours == pytest.approx(24 * 8 * 180)


def test_a_board_that_came_back_has_its_record_back() -> None:
    then = [seen("n1", 3, "GPU-new", 90), seen("n1", 3, "GPU-1-3", 100)]
    assert lemons(judged(*failures(*BAD), *failures(95.0), then=then)) == {"n1": (3,)}
    assert judged(*failures(*BAD), *failures(95.0), then=then)["n1"].devices[3].observed == 6


def test_what_failed_before_devices_were_known_is_theirs_who_were_there_first() -> None:
    """Inventories began on day 60; on day 90 the board was swapped."""
    first = [seen("n1", 3, "GPU-1-3", 60)]
    verdicts = failures(30.0, 40.0, 50.0)
    kept, _ = follow(verdicts, [], first)
    assert kept == verdicts
    assert follow(verdicts, [], [*first, seen("n1", 3, "GPU-new", 90)])[0] == []
    came = [seen("n1", 3, "GPU-9", 60), seen("n2", 3, "GPU-9", 10)]  # it cannot have been here before: it was there
    assert follow(verdicts, [], came)[0] == []


def test_nodes_that_number_devices_otherwise_from_job_to_job_are_judged_by_number() -> None:
    """Two jobs share a node: device 0 of the one is not device 0 of the other."""
    given = [seen("n1", 0, "GPU-a", 20, bus="07"), seen("n1", 0, "GPU-b", 21, bus="0b"), seen("n1", 0, "GPU-a", 22)]
    verdicts, served = failures(30.0, device=0), [Service(node="n1", since=0.0, until=NOW, devices=4)]
    assert follow(verdicts, served, given) == (verdicts, served)


# --- repairs --------------------------------------------------------------------------------------------------------


def mended(day: float, **what: Any) -> list[Renewal]:
    return [Renewal(**({"node": "n1", "since": day * DAY_S} | what))]


@pytest.mark.parametrize(
    "what", [{}, {"uuid": "GPU-1-3"}, {"device": 3}, {"uuid": "GPU-1-3", "kind": "replaced"}], ids=str
)
def test_what_was_repaired_starts_anew(what: dict[str, Any]) -> None:
    found = judged(*failures(*BAD, 100.0), renewals=mended(90, **what))
    assert lemons(found) == {}
    assert found["n1"].devices[3].observed == found["n1"].failures == 1
    assert judged(*failures(*BAD, *(day + 70 for day in BAD)), renewals=mended(90, **what))["n1"].lemon_devices == (3,)


def test_repairs_of_something_else_change_nothing() -> None:
    for what in ({"uuid": "GPU-1-4"}, {"device": 4}, {"node": "n2"}, {"uuid": "GPU-unknown"}):
        assert lemons(judged(*failures(*BAD), renewals=mended(90, **what))) == {"n1": (3,)}


def test_repairs_are_the_same_as_told_to_the_judge() -> None:
    verdicts = [*failures(*BAD, 100.0), *failures(35.0, 75.0, device=None), *failures(55.0, device=5)]
    for renewal, key in (({}, "n1"), ({"device": 3}, part("n1", 3))):
        found = judged(*verdicts, renewals=mended(90, **renewal))["n1"]
        told = {one.node: one for one in node_health([*USUAL, *verdicts], FLEET, NOW, mended={key: 90 * DAY_S})}["n1"]
        assert (found.failures, found.device_hours, found.verdicts) == (told.failures, told.device_hours, told.verdicts)
        assert found.tally.expected == pytest.approx(told.tally.expected)
        assert {d: t.told for d, t in found.devices.items()} == {d: t.told for d, t in told.devices.items()}


def test_a_repaired_board_starts_anew_wherever_it_is_and_a_replaced_one_only_leaves() -> None:
    then = [seen("n1", 3, "GPU-new", 90), seen("n7", 5, "GPU-1-3", 95)]
    repaired = mended(90, uuid="GPU-1-3")
    assert lemons(judged(*failures(*BAD), then=then, renewals=repaired)) == {}
    replaced = mended(90, uuid="GPU-1-3", kind="replaced")
    assert lemons(judged(*failures(*BAD), then=then, renewals=replaced)) == {"n7": (5,)}
    assert lemons(judged(*failures(*BAD), then=then, renewals=mended(90, kind="replaced"))) == {"n7": (5,)}


def test_a_repaired_node_is_told_even_if_it_has_not_served_since() -> None:
    found = judged(renewals=mended(200))
    assert found["n1"].device_hours == 0.0


def test_a_name_given_to_other_hardware_starts_anew() -> None:
    node = failures(*BAD, device=None)
    machines = [Machine(node="n1", serial="A", since=20 * DAY_S), Machine(node="n1", serial="B", since=90 * DAY_S)]
    assert lemons(judged(*node, machines=machines[:1])) == {"n1": ()}
    assert lemons(judged(*node, machines=machines)) == {}
    # Another chassis, the same boards: what is known by UUID keeps its record.
    assert lemons(judged(*failures(*BAD), machines=machines)) == {"n1": (3,)}
    assert lemons(judged(*failures(*BAD), machines=[machines[0], machines[0]])) == {"n1": (3,)}


def test_one_bad_week_is_no_lemon_with_or_without_a_repair() -> None:
    week = failures(*np.arange(100.0, 107.0, 0.5))
    assert lemons(judged(*week)) == {}
    assert judged(*week)["n1"].devices[3].observed == 1
    assert lemons(judged(*week, renewals=mended(103))) == {}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 300)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3), st.integers(0, 300)), max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300), st.integers(0, 4)), max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["", "uuid", "device"]), st.integers(0, 300)), max_size=4),
)
def test_whatever_was_seen_nothing_is_counted_twice(
    seen_at: list[tuple[int, int, int, int]],
    failed: list[tuple[int, int | None, int]],
    served: list[tuple[int, int, int, int]],
    repaired: list[tuple[int, str, int]],
) -> None:
    placements = [seen(f"n{n}", d, f"GPU-{u}", day) for n, d, u, day in seen_at]
    verdicts = [one for n, d, day in failed for one in failures(float(day), node=f"n{n}", device=d)]
    services = [
        Service(node=f"n{n}", since=min(a, b) * DAY_S, until=max(a, b) * DAY_S, devices=d) for n, a, b, d in served
    ]
    renewals = [
        Renewal(
            node=f"n{n}",
            since=day * DAY_S,
            uuid=f"GPU-{n}" if what == "uuid" else None,
            device=n if what == "device" else None,
        )
        for n, what, day in repaired
    ]
    found, pieces = follow(verdicts, services, placements, renewals)
    assert len(found) <= len(verdicts)
    hours = sum(one.devices * (one.until - one.since) for one in services)
    assert sum(one.devices * (one.until - one.since) for one in pieces) <= hours + 1e-6
    assert follow(verdicts[::-1], services, placements[::-1], renewals[::-1])[0] == found[::-1]
    node_health(found, pieces, 300 * DAY_S)
