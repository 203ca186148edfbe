"""Probes: who is not fit beside its peers or its own past, which links are slow, and who measures which link when."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.detector.probes import (
    DEFAULT_PROBE_LIMITS,
    RECHECK_LOOKS,
    Former,
    beside,
    in_doubt,
    in_turns,
    judge_again,
    judge_devices,
    judge_link,
    judge_links,
    judge_nodes,
    link_seconds,
    ring,
    usual_speeds,
)
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


def test_who_is_slow_or_nearly_so_is_in_doubt_and_who_fails_is_not() -> None:
    judged = judge_devices({0: at(1), 1: at(0.89), 2: at(1, 0.5), 3: at(0.91), 4: at(1)}, {5: "it fails"})
    assert in_doubt(judged) == (1, 2)


def test_a_device_in_doubt_is_unfit_after_three_looks_beside_steady_witnesses() -> None:
    witnesses = [at(1), at(0.95), at(1.05)]
    assert [judge_again(3, at(0.7), witnesses, looks) for looks in (1, 2)] == [None, None]
    judged = judge_again(3, at(0.7), witnesses, 3)
    assert judged is not None
    assert (judged.fit, judged.speed) == (False, pytest.approx(0.7))


def test_a_device_in_doubt_is_fit_at_once_where_it_is_as_fast_as_steady_witnesses() -> None:
    judged = judge_again(3, at(0.95), [at(1), at(1), at(1)], 1)
    assert judged is not None
    assert judged.fit


@given(st.floats(0.1, 2.0), st.floats(0.1, 0.85), st.integers(1, 8))
def test_nobody_is_judged_by_a_witness_that_is_disturbed(own: float, disturbed: float, looks: int) -> None:
    judged = judge_again(3, at(own, own), [at(1, 1), at(1, 1), at(disturbed, disturbed)], looks)
    assert judged is None if looks < RECHECK_LOOKS[1] else judged is not None and judged.fit


def test_what_witnesses_agree_in_counts_though_they_differ_in_the_rest() -> None:
    """Copies of others fill the memory's bus; the matrix products tell all the same."""
    judged = judge_again(3, at(0.6, 1.0), [at(1, 0.5), at(1, 1.0), at(1, 1.0)], 3)
    assert judged is not None
    assert not judged.fit
    assert "matrix products at 60%" in judged.evidence


def test_devices_that_share_processors_take_turns_on_each_machine_and_the_others_do_not_wait() -> None:
    machines = {rank: "a" if rank < 3 else "b" for rank in range(5)}
    assert in_turns([0, 1, 2, 3, 4], machines, {0, 1, 2, 3, 4}) == [(0, 3), (1, 4), (2,)]
    assert in_turns([0, 1, 2, 3, 4], machines, {1, 2}) == [(0, 1, 3, 4), (2,)]
    assert in_turns([], machines, set()) == []


@given(st.floats(1e-3, 1e3), st.integers(3, 40))
def test_equal_devices_are_fit_whatever_their_kind(scale: float, count: int) -> None:
    judged = judge_devices({rank: at(scale, scale) for rank in range(count)}, {})
    assert {(verdict.speed, verdict.fit) for verdict in judged.values()} == {(1.0, True)}


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.1]), st.floats(0.01, 2.0)), min_size=3, max_size=12))
def test_each_device_is_compared_with_the_median_of_all_others(shares: list[tuple[float, float]]) -> None:
    found = {rank: at(flops, memory) for rank, (flops, memory) in enumerate(shares)}
    judged = judge_devices(found, {})
    for rank, own in found.items():
        others = [speed for other, speed in found.items() if other != rank]
        flops = statistics.median(speed.flops for speed in others)
        memory_bytes = statistics.median(speed.memory_bytes for speed in others)
        parts = [own.flops / flops] if flops else []
        assert judged[rank].speed == min([*parts, own.memory_bytes / memory_bytes])


class Counted(dict[int, Speed]):
    """Counts how often somebody goes through all of it."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def test_thousands_are_not_each_compared_with_thousands() -> None:
    found = Counted({rank: at(1 + rank / 1e6) for rank in range(500)})
    judge_devices(found, {})
    assert found.walks < 5


@pytest.mark.parametrize(
    ("share", "fit"), [(DEFAULT_PROBE_LIMITS.fit + 0.01, True), (DEFAULT_PROBE_LIMITS.fit - 0.01, False)]
)
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


def test_a_device_that_was_always_slower_is_not_cleared_by_its_past() -> None:
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


# --- nodes, against former jobs -----------------------------------------------------------------------------------


PLACE = ("gpu-17", "gpu-17.site", "A100")


def former(job: int, flops: float, memory: float = 1.0, place: tuple[str, str, str] = PLACE) -> Former:
    own = at(flops, memory)
    return Former(place=place, job=job, flops=own.flops, memory_bytes=own.memory_bytes)


def test_what_a_node_usually_gives_is_the_median_of_its_jobs_not_of_its_devices() -> None:
    """One odd job with many devices counts once."""
    told = [former(1, 1.0), *[former(2, 0.2)] * 20, former(3, 1.02), former(3, 0.1), former(3, 1.04)]
    assert usual_speeds(told) == {PLACE: at(1.0)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_too_few_jobs_do_not_tell_what_is_usual(jobs: int) -> None:
    assert usual_speeds([former(job, 1.0) for job in range(jobs) for _ in range(8)]) == {}


def test_a_node_that_was_refitted_or_is_of_another_cluster_begins_anew() -> None:
    told = [former(1, 1.0), former(2, 1.0)]
    told += [former(3, 1.0, place=("gpu-17", "gpu-17.site", "H100")), former(4, 1.0, place=("gpu-17", "other", "A100"))]
    assert usual_speeds(told) == {}


def test_the_latest_jobs_tell_what_is_usual() -> None:
    assert usual_speeds([former(job, 0.7 if job < 9 else 1.0) for job in range(40)]) == {PLACE: at(0.7, 1.0)}


def test_a_node_is_as_slow_as_the_best_of_its_devices() -> None:
    places = {0: PLACE, 1: PLACE, 2: ("gpu-18", "gpu-18.site", "A100"), 3: ("gpu-19", "gpu-19.site", "A100")}
    usual = {place: at(1) for place in places.values() if place[0] != "gpu-19"}
    shares = judge_nodes({0: at(0.5), 1: at(0.7), 2: at(1.0, 0.6), 3: at(0.1)}, places, usual)
    assert shares == {
        "gpu-17": (
            pytest.approx(0.7),
            "matrix products at 70% of this node's speed in former jobs, 2.8e+05 GFLOP/s",
        ),
        "gpu-18": (pytest.approx(0.6), "memory at 60% of this node's speed in former jobs, 1200 GB/s"),
    }


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
    judged = judge_links(link_seconds(both_ends(within | between)), NODES)
    assert judged == {pair: 1.0 for pair in (*within, *between)} | {(6, 7): 0.5, (5, 6): 0.25}


def test_too_few_links_of_a_kind_are_not_judged() -> None:
    assert judge_links({(0, 1): 1e-3, (2, 3): 9e-3}, NODES) == {}
    judged = judge_links({(0, 1): 1e-3, (1, 2): 1e-2, (3, 4): 1e-2, (5, 6): 1e-2}, NODES)
    assert sorted(judged) == [(1, 2), (3, 4), (5, 6)], "one link inside a node has no peers"


def test_a_link_that_only_one_end_measured_counts_and_one_that_failed_does_not() -> None:
    found = both_ends({(1, 2): 1e-2, (3, 4): 1e-2, (5, 6): 1e-2})
    found[0] = [Transfer(peer=7, seconds=4e-2)]
    assert judge_links(link_seconds(found), NODES)[0, 7] == 0.25
    found[0] = [Transfer(peer=7, seconds=0.0)]
    assert (0, 7) not in judge_links(link_seconds(found), NODES)


def test_nothing_measured_is_nothing_judged() -> None:
    assert judge_links({}, {}) == {}
    assert link_seconds({0: (), 1: ()}) == {}


# --- a link under suspicion ---------------------------------------------------------------------------------------


def test_a_link_under_suspicion_is_compared_with_links_of_other_nodes() -> None:
    times = {(1, 2): 4e-2, (4, 6): 1e-2, (5, 7): 1e-2, (4, 5): 1e-3}
    judged = judge_link((1, 2), times, NODES, {})
    assert (judged.speed, judged.slow, judged.evidence) == (0.25, True, "transfers at 25% of 2 other links'")
    assert not judge_link((4, 6), times, NODES, {}).slow


@pytest.mark.parametrize(("share", "witnesses", "slow"), [(0.75, 2, True), (0.85, 2, False), (0.75, 1, False)])
def test_one_witness_alone_may_be_odd_itself(share: float, witnesses: int, slow: bool) -> None:
    times = {(1, 2): 1e-2 / share, **dict([((4, 6), 1e-2), ((0, 7), 1e-2)][:witnesses])}
    assert judge_link((1, 2), times, NODES, {}).slow is slow


def test_the_past_does_not_tell_where_others_do() -> None:
    """While training goes on, transfers may be slower than when everybody was parked."""
    times = {(1, 2): 4e-2, (4, 6): 4e-2}
    assert judge_link((1, 2), times, NODES, {(1, 2): 1e-2}).speed == 1.0


def test_where_there_are_no_others_the_past_tells() -> None:
    judged = judge_link((1, 2), {(1, 2): 4e-2}, NODES, {(1, 2): 1e-2})
    assert (judged.speed, judged.slow, judged.evidence) == (0.25, True, "transfers at 25% of those at the start")
    assert judge_link((1, 2), {(1, 2): 4e-2}, NODES, {(0, 3): 1e-2, (0, 1): 1e-4}).speed == 0.25, "that of its kind"
    assert not judge_link((1, 2), {(1, 2): 1.4e-2}, NODES, {(1, 2): 1e-2}).slow, "others train beside it"


def test_a_link_with_nothing_to_compare_it_with_is_not_judged() -> None:
    judged = judge_link((1, 2), {(1, 2): 1.0}, NODES, {(0, 1): 1.0})
    assert (judged.speed, judged.slow) == (None, False)


@given(st.data())
def test_links_beside_one_under_suspicion_are_few_and_have_their_nodes_to_themselves(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 40))
    per_node = data.draw(st.integers(1, 8))
    nodes = {rank: f"n{rank // per_node}" for rank in range(count)}
    a, b = sorted(data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)))
    first, *others = beside((a, b), range(count), nodes)
    assert first == (a, b)
    assert len(others) <= 4
    used = [node for pair in (first, *others) for node in {nodes[rank] for rank in pair}]
    assert len(used) == len(set(used))
    assert {nodes[c] == nodes[d] for c, d in others} <= {nodes[a] == nodes[b]}, "all are of its kind"
    if count >= 6 * per_node:
        assert len(others) >= 2 or (nodes[a] == nodes[b] and per_node == 1)


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


def test_a_disturbed_reference_device_does_not_clear_a_device_that_is_slower_than_all() -> None:
    """Others' work only makes a device look slower: a device that is far below the slowest witness is slow."""
    witnesses = [at(1.0), at(1.0), at(1.0), at(0.85)]
    assert judge_again(0, at(0.3), witnesses, 2, shared=False) is None
    judged = judge_again(0, at(0.3), witnesses, 3, shared=False)
    assert judged is not None
    assert not judged.fit
    near = judge_again(0, at(0.75), witnesses, 5, shared=False)
    assert near is not None
    assert near.fit, "within what the witnesses differ by"
