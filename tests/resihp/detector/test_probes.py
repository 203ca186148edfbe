"""Probes: who is not fit beside its peers or its own past, which links are slow, and who measures which link when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.detector.probes import FIT, judge_devices, judge_links, ring
from resihp.protocol.messages import Speed, Transfer

HEALTHY = Speed(flops=4e14, memory_bytes=2e12)


def at(flops: float, memory: float = 1.0) -> Speed:
    """A device at these shares of a healthy one."""
    return Speed(flops=flops * HEALTHY.flops, memory_bytes=memory * HEALTHY.memory_bytes)


# --- devices ------------------------------------------------------------------------------------------------------


def test_a_device_is_judged_by_the_worse_of_its_products_and_its_memory() -> None:
    judged = judge_devices({0: at(1), 1: at(1), 2: at(0.5), 3: at(1.0, 0.25)}, {})
    assert {rank: verdict.speed for rank, verdict in judged.items()} == {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.25}
    assert {rank for rank, verdict in judged.items() if not verdict.fit} == {2, 3}
    assert judged[2].evidence == "matrix products at 50% of its peers, 2e+05 GFLOP/s"
    assert judged[3].evidence == "memory at 25% of its peers, 500 GB/s"


def test_one_slow_device_makes_nobody_else_look_odd() -> None:
    judged = judge_devices({0: at(1), 1: at(1), 2: at(0.02)}, {})
    assert [judged[rank].fit for rank in range(3)] == [True, True, False]


@given(st.floats(1e-3, 1e3), st.integers(3, 40))
def test_equal_devices_are_fit_whatever_their_kind(scale: float, count: int) -> None:
    judged = judge_devices({rank: at(scale, scale) for rank in range(count)}, {})
    assert {(verdict.speed, verdict.fit) for verdict in judged.values()} == {(1.0, True)}


@pytest.mark.parametrize(("share", "fit"), [(FIT + 0.01, True), (FIT - 0.01, False)])
def test_small_differences_between_devices_are_normal(share: float, fit: bool) -> None:
    judged = judge_devices({**{rank: at(1) for rank in range(7)}, 7: at(share)}, {})
    assert judged[7].fit is fit


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_devices_have_nothing_to_be_compared_with_and_are_fit(count: int) -> None:
    judged = judge_devices({rank: at(0.1 if rank else 1.0) for rank in range(count)}, {})
    assert [(v.speed, v.fit, v.evidence) for v in judged.values()] == [
        (None, True, "nothing to compare it with")
    ] * count


def test_a_device_alone_is_compared_with_its_own_past() -> None:
    verdict = judge_devices({0: at(0.6)}, {}, {0: at(1)})[0]
    assert verdict.speed == pytest.approx(0.6)
    assert not verdict.fit
    assert "of its own past" in verdict.evidence


def test_what_all_devices_lost_together_shows_in_their_past() -> None:
    """As when a rack is throttled: beside its peers nobody is odd."""
    slower = {rank: at(0.7) for rank in range(4)}
    assert all(verdict.fit for verdict in judge_devices(slower, {}).values())
    judged = judge_devices(slower, {}, dict.fromkeys(range(4), at(1)))
    assert not any(verdict.fit for verdict in judged.values())


def test_a_device_that_was_always_slower_is_not_acquitted_by_its_past() -> None:
    judged = judge_devices({0: at(1), 1: at(1), 2: at(0.5)}, {}, {2: at(0.5)})
    assert (judged[2].speed, judged[2].fit) == (0.5, False)


def test_a_device_that_could_not_be_measured_is_not_fit_and_says_why() -> None:
    judged = judge_devices({0: at(1), 1: at(1), 2: at(1)}, {3: "a product is off by 3"})
    assert (judged[3].rank, judged[3].speed, judged[3].fit) == (3, None, False)
    assert judged[3].evidence == "a product is off by 3"
    assert [judged[rank].fit for rank in range(3)] == [True] * 3, "it is nobody's peer"


def test_what_was_not_tried_is_not_judged() -> None:
    judged = judge_devices({rank: Speed(flops=1e12 * (rank != 2) + 5e11) for rank in range(4)}, {})
    assert [judged[rank].fit for rank in range(4)] == [True, True, False, True]
    assert "memory" not in judged[2].evidence
    nothing = judge_devices({rank: Speed() for rank in range(4)}, {})
    assert all(verdict.fit and verdict.speed is None for verdict in nothing.values())


def test_a_device_that_does_nothing_at_all_is_not_fit() -> None:
    judged = judge_devices({0: at(1), 1: at(1), 2: at(0.0)}, {})
    assert (judged[2].speed, judged[2].fit) == (0.0, False)


# --- links --------------------------------------------------------------------------------------------------------

NODES = {rank: f"n{rank // 2}" for rank in range(8)}


def both_ends(times: dict[tuple[int, int], float]) -> dict[int, list[Transfer]]:
    found: dict[int, list[Transfer]] = {}
    for (a, b), seconds in times.items():
        found.setdefault(a, []).append(Transfer(peer=b, seconds=seconds))
        found.setdefault(b, []).append(Transfer(peer=a, seconds=seconds))
    return found


def test_a_link_is_compared_with_others_of_its_kind() -> None:
    within = {(0, 1): 1e-3, (2, 3): 1e-3, (4, 5): 1e-3, (6, 7): 2e-3}
    between = {(1, 2): 1e-2, (3, 4): 1e-2, (5, 6): 4e-2, (0, 7): 1e-2}
    judged = judge_links(both_ends(within | between), NODES)
    assert judged == {pair: 1.0 for pair in (*within, *between)} | {(6, 7): 0.5, (5, 6): 0.25}


def test_too_few_links_of_a_kind_are_not_judged() -> None:
    assert judge_links(both_ends({(0, 1): 1e-3, (2, 3): 9e-3}), NODES) == {}
    judged = judge_links(both_ends({(0, 1): 1e-3, (1, 2): 1e-2, (3, 4): 1e-2, (5, 6): 1e-2}), NODES)
    assert sorted(judged) == [(1, 2), (3, 4), (5, 6)], "one link inside a node has no peers"


def test_a_link_that_only_one_end_measured_counts_and_one_that_failed_does_not() -> None:
    found = both_ends({(1, 2): 1e-2, (3, 4): 1e-2, (5, 6): 1e-2})
    found[0] = [Transfer(peer=7, seconds=4e-2)]
    assert judge_links(found, NODES)[0, 7] == 0.25
    found[0] = [Transfer(peer=7, seconds=0.0)]
    assert (0, 7) not in judge_links(found, NODES)


def test_nothing_measured_is_nothing_judged() -> None:
    assert judge_links({}, {}) == {}
    assert judge_links({0: (), 1: ()}, NODES) == {}


# --- who measures which link when ---------------------------------------------------------------------------------

ranks = st.lists(st.integers(0, 500), unique=True, max_size=60)


@given(ranks)
def test_in_a_ring_everybody_meets_both_neighbours_and_nobody_two_at_once(order: list[int]) -> None:
    rounds = ring(order)
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
        assert pairs
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert all(a < b for a, b in met)
    around = sorted(order)
    neighbours = {
        (min(pair), max(pair)) for pair in zip(around, (*around[1:], *around[:1]), strict=True) if len(set(pair)) == 2
    }
    assert set(met) == neighbours
    if len(order) > 2:
        assert set(Counter(rank for pair in met for rank in pair).values()) == {2}
    assert len(rounds) <= (2 if len(order) % 2 == 0 else 3)


def test_a_ring_of_none_one_and_two() -> None:
    assert ring([]) == ()
    assert ring([3]) == ()
    assert ring([5, 3]) == (((3, 5),),)
