"""What a probe says of devices under suspicion: everybody against its own past, without what all have lost."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resihp.detector.suspects import Verdicts, judge
from resihp.protocol.messages import Speed

SURE = 6.0


def at(flops: float, memory: float = 1.0) -> Speed:
    return Speed(flops=flops * 1e14, memory_bytes=memory * 1e12)


def probed(shares: dict[int, float], *, seed: int = 0, repeat: float = 0.01, unlike: float = 0.03) -> Verdicts:
    """Everybody's answer, `shares` of its own past, with a probe's repeat error; devices differ by themselves."""
    rng = np.random.default_rng(seed)
    own = {rank: math.exp(unlike * rng.standard_normal()) for rank in shares}
    past = {rank: at(own[rank]) for rank in shares}
    found = {rank: at(own[rank] * share * math.exp(repeat * rng.standard_normal())) for rank, share in shares.items()}
    return judge(found, {}, past)


def standing_out(verdicts: Verdicts) -> set[int]:
    n = len(verdicts.devices)
    return {rank for rank, one in verdicts.devices.items() if one.odds - math.log(n) >= SURE}


@pytest.mark.parametrize("share", [1.0, 0.92, 0.75])
@pytest.mark.parametrize("count", [8, 16, 64])
def test_what_all_have_lost_is_nobodys_fault(count: int, share: float) -> None:
    false = [standing_out(probed(dict.fromkeys(range(count), share), seed=seed)) for seed in range(100)]
    assert sum(map(bool, false)) <= 2
    lost = [probed(dict.fromkeys(range(count), share), seed=seed).lost for seed in range(20)]
    assert lost == pytest.approx([1.0 - share] * 20, abs=0.015) if share < 1.0 else set(lost) == {0.0}


def test_of_sixteen_thousand_healthy_devices_nobody_stands_out_and_the_one_that_is_slow_does() -> None:
    began = time.perf_counter()
    for seed in range(3):
        shares = dict.fromkeys(range(16384), 0.9) | {77: 0.8}
        assert standing_out(probed(shares, seed=seed)) == {77}
    assert time.perf_counter() - began < 10.0


@pytest.mark.parametrize("slow", [1, 4, 8, 12])
def test_up_to_three_quarters_that_became_slow_are_told_from_those_that_did_not(slow: int) -> None:
    shares = dict.fromkeys(range(slow), 0.8) | dict.fromkeys(range(slow, 16), 1.0)
    right = [standing_out(probed(shares, seed=seed)) == set(range(slow)) for seed in range(100)]
    assert sum(right) >= 95


@pytest.mark.parametrize("disturbed", [0.94, 0.8])
def test_a_node_that_was_disturbed_when_its_past_was_measured_makes_the_others_no_slower(disturbed: float) -> None:
    for seed in range(10):
        shares = {rank: 1.0 / disturbed if rank < 8 else 1.0 for rank in range(32)}
        assert standing_out(probed(shares, seed=seed)) == set()
        assert standing_out(probed(shares | {20: 0.85}, seed=seed)) == {20}


def test_several_levels_are_all_below_the_healthy_one() -> None:
    shares = dict.fromkeys(range(12), 1.0) | {12: 0.8, 13: 0.8, 14: 0.5, 15: 0.3}
    assert standing_out(probed(shares)) == {12, 13, 14, 15}


def test_devices_that_always_were_unlike_are_compared_with_their_pasts_where_nobody_is_suspected() -> None:
    past = {0: at(1.0), 1: at(0.6), 2: at(1.0), 3: at(0.6), 4: at(1.0), 5: at(1.0)}
    assert standing_out(judge(past, {}, past)) == set()


def test_a_suspect_that_was_slow_from_the_start_shows_beside_its_peers() -> None:
    past = {rank: at(0.7 if rank == 3 else 1.0) for rank in range(5)}
    verdicts = judge(past, {}, past, suspects={3})
    assert verdicts.devices[3].odds >= SURE
    assert "of its peers" in verdicts.devices[3].evidence


def test_a_suspect_is_compared_with_what_its_witnesses_lost_too() -> None:
    past = {rank: at(1.0) for rank in range(5)}
    found = {rank: at(0.9) for rank in range(5)}
    verdicts = judge(found, {}, past, suspects={3})
    assert max(one.odds for one in verdicts.devices.values()) < 0.0
    assert verdicts.lost == pytest.approx(0.1)
    alone = judge(found | {3: at(0.8)}, {}, past, suspects={3}).devices[3]
    assert alone.odds >= SURE
    assert "80% of its own past, others at 90%" in alone.evidence


def test_alone_a_device_has_its_past_and_what_is_known_that_all_have_lost() -> None:
    assert judge({3: at(0.9)}, {}, {3: at(1.0)}, suspects={3}).devices[3].odds >= SURE
    spared = judge({3: at(0.9)}, {}, {3: at(1.0)}, suspects={3}, usual=at(0.9e-14, 1e-12)).devices[3]
    assert spared.odds < 0.0


def test_the_worse_a_probe_repeats_the_less_it_says() -> None:
    past = {rank: at(1.0) for rank in range(6)}
    steady = {rank: at(1.0) for rank in range(5)} | {5: at(0.94)}
    noisy = {0: at(0.94), 1: at(1.0), 2: at(1.06), 3: at(0.97), 4: at(1.03), 5: at(0.94)}
    odds = [judge(found, {}, past, suspects={5}).devices[5].odds for found in (steady, noisy)]
    assert odds[0] > SURE > odds[1]


def test_a_small_slow_down_shows_and_half_of_it_says_little() -> None:
    past = {rank: at(1.0) for rank in range(5)}
    odds = [judge(past | {4: at(share)}, {}, past, suspects={4}).devices[4].odds for share in (0.95, 0.985, 1.0)]
    assert odds[0] > 5.0
    assert -2.0 < odds[1] < 1.0
    assert odds[2] < -2.5


def test_who_fails_outright_is_slow_and_who_has_nothing_to_be_compared_with_is_not() -> None:
    verdicts = judge({0: at(1.0)}, {1: "a product is off by 3"}, {})
    assert verdicts.devices[1].odds >= SURE
    assert not verdicts.devices[1].fit
    assert (verdicts.devices[0].odds, verdicts.devices[0].speed) == (0.0, None)
    assert verdicts.share is None


def test_nothing_measured_is_nothing_judged() -> None:
    assert judge({}, {}, {}).devices == {}


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=12), st.lists(st.floats(0.0, 10.0), max_size=12))
@example([2.0, 2.225073858507e-311, 2.2250738585072014e-308], [1.0, 1.0, 2.0])
@example([1.0, 1e-320, 1e294], [1e-13, 1.0, 1.0])
def test_whatever_was_measured_is_judged(now: list[float], before: list[float]) -> None:
    found = {rank: at(share) for rank, share in enumerate(now)}
    past = {rank: at(share) for rank, share in enumerate(before)}
    for suspects in (None, {0}, set(found)):
        verdicts = judge(found, {}, past, suspects)
        assert set(verdicts.devices) == set(found)
        assert all(math.isfinite(one.odds) for one in verdicts.devices.values())
        assert 0.0 <= verdicts.lost <= 1.0


def test_where_processors_are_shared_only_what_is_far_below_the_others_is_slow() -> None:
    """Figures of eight workers on two processors whose clock rate comes and goes; rank 5 is slowed down to 0.4."""
    past = {r: Speed(flops=f, memory_bytes=1e10) for r, f in enumerate((117, 149, 113, 113, 151, 156, 148, 114))}
    found = {r: Speed(flops=f, memory_bytes=1e10) for r, f in enumerate((110, 118, 111, 128, 111, 51, 111, 128))}
    odds = {rank: one.odds for rank, one in judge(found, {}, past, (4, 5, 6), shared=True).devices.items()}
    assert odds.pop(5) > SURE
    assert max(odds.values()) < 1.0
