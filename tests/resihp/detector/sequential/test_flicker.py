"""Who is slow now and then: named within a hundred iterations; what befalls everybody alike names nobody."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from resihp.detector.observation import Floats
from resihp.detector.sequential.flicker import Flicker, Flickering

NOISE = 0.01
Slower = Callable[[int, Floats], None]
"""By iteration: adds to the deviations of all series."""


def played(n: int, iterations: int, slower: Slower, *, seed: int = 0, stalls: float = 0.002) -> list[Flickering]:
    """What is found among series of which each stalls now and then; pairs of them are lanes."""
    rng = np.random.default_rng(seed)
    flicker = Flicker(np.arange(n) // 2 % 2, np.arange(n) // 2)
    found = []
    for i in range(iterations):
        away = NOISE * rng.standard_normal(n)
        stalled = rng.random(n) < stalls
        away[stalled] += rng.exponential(0.5, int(stalled.sum()))
        slower(i, away)
        found += flicker.update(i, away, np.full(n, NOISE), np.zeros(n, dtype=bool))
    return found


def now_and_then(series: int, slow: int, of: int, factor: float, onset: int = 50, until: int = 10_000) -> Slower:
    def slower(i: int, away: Floats) -> None:
        if onset <= i < until and i % of < slow:
            away[series] += np.log(factor)

    return slower


@pytest.mark.parametrize(("slow", "of", "factor"), [(1, 10, 3.0), (2, 12, 1.5), (1, 10, 1.2)])
@pytest.mark.parametrize("n", [2, 16, 4096])
def test_who_is_slow_now_and_then_is_named_with_share_and_factor(n: int, slow: int, of: int, factor: float) -> None:
    (found,) = played(n, 151, now_and_then(1, slow, of, factor))
    assert (found.kind, found.series) == ("slow", 1)
    assert abs(found.onset - 50) <= of
    assert found.share == pytest.approx(slow / of, rel=0.3)
    assert found.factor == pytest.approx(factor, rel=0.05)
    assert found.cost == pytest.approx(slow / of * (factor - 1.0), rel=0.35)


def test_a_tenth_of_the_iterations_at_random_is_named_in_nine_of_ten_jobs() -> None:
    right = 0
    for seed in range(30):
        luck = np.random.default_rng([seed, 1]).random(150) < 0.1

        def slower(i: int, away: Floats, luck: np.ndarray = luck) -> None:
            away[3] += np.log(3.0) * (i >= 50 and luck[i])

        right += [one.series for one in played(16, 150, slower, seed=seed)] == [3]
    assert right >= 26


@pytest.mark.parametrize("stalls", [0.0, 0.002, 0.02, 0.05])
def test_stalls_of_each_alike_name_nobody(stalls: float) -> None:
    assert played(16, 3000, lambda i, away: None, stalls=stalls) == []
    assert played(1024, 300, lambda i, away: None, stalls=stalls) == []


def test_heavy_tails_name_nobody() -> None:
    rng = np.random.default_rng(1)

    def tails(i: int, away: Floats) -> None:
        away += 0.02 * rng.standard_t(2, away.size)

    assert played(16, 3000, tails) == []


def test_what_many_do_at_once_or_in_turn_names_nobody() -> None:
    """A checkpoint of half of the ranks, a collection of garbage on each in its turn."""

    def at_once(i: int, away: Floats) -> None:
        away[::2] += 0.7 * (i % 10 == 0)

    def in_turn(i: int, away: Floats) -> None:
        away[(np.arange(away.size) * 7 + i) % 20 == 0] += 0.5

    assert played(16, 1000, at_once) == []
    assert played(16, 1000, in_turn) == []


def test_what_costs_next_to_nothing_is_not_told() -> None:
    assert played(16, 1000, now_and_then(3, 1, 40, 1.25)) == []


def test_what_lasts_is_no_flicker() -> None:
    """Nine iterations of every thirty: a shift and its end, which are for others to tell."""
    assert played(16, 1000, now_and_then(3, 9, 30, 1.5)) == []


def test_who_is_known_to_be_slow_does_not_flicker() -> None:
    flicker = Flicker(np.zeros(8), np.arange(8))
    slow = np.arange(8) == 3
    away = np.zeros(8)
    for i in range(300):
        away[3] = 1.0 if i % 10 == 0 else 0.0
        assert flicker.update(i, away, np.full(8, NOISE), slow) == []


def test_it_ends_once_it_has_been_quiet_for_long_enough_and_may_begin_again() -> None:
    def slower(i: int, away: Floats) -> None:
        away[5] += np.log(3.0) * (i % 10 == 0 and (50 <= i < 200 or i >= 500))

    first, second, third = played(16, 700, slower)
    assert [(one.kind, one.series) for one in (first, second, third)] == [("slow", 5), ("recovered", 5), ("slow", 5)]
    assert 190 <= second.onset <= 191
    assert abs(third.onset - 500) <= 10


def test_two_at_once_are_both_named() -> None:
    def slower(i: int, away: Floats) -> None:
        now_and_then(2, 1, 10, 3.0)(i, away)
        now_and_then(9, 1, 7, 2.0)(i, away)

    assert sorted(one.series for one in played(16, 200, slower)) == [2, 9]


def test_reports_that_are_missing_are_nothing() -> None:
    rng = np.random.default_rng(2)

    def slower(i: int, away: Floats) -> None:
        now_and_then(2, 1, 10, 3.0)(i, away)
        away[rng.random(away.size) < 0.1] = np.nan
        if i % 9 == 0:
            away[:] = np.nan

    assert [one.series for one in played(16, 300, slower)] == [2]


def test_what_is_known_is_no_news_and_its_end_is() -> None:
    (known,) = played(16, 151, now_and_then(1, 1, 10, 3.0))
    flicker = Flicker(np.zeros(4), np.arange(4), known_flicker=[known])
    found = []
    for i in range(300, 700):
        away = np.zeros(4)
        away[1] = np.log(3.0) * (i % 10 == 0 and i < 450)
        found += flicker.update(i, away, np.full(4, NOISE), np.zeros(4, dtype=bool))
    assert [(one.kind, one.series, one.onset) for one in found] == [("recovered", 1, 441)]


def flickering(flicker: Flicker, iterations: range, every: int, factor: float, n: int = 16) -> list[Flickering]:
    """Series 1 is slow in one of so many iterations; NaN where `factor` is: it does not report. 0: never."""
    rng = np.random.default_rng(iterations.start)
    found = []
    for i in iterations:
        away = NOISE * rng.standard_normal(n)
        if factor and (np.isnan(factor) or i % every == 0):
            away[1] += np.log(factor)
        found += flicker.update(i, away, np.full(n, NOISE), np.zeros(n, dtype=bool))
    return found


def test_one_that_was_measured_and_found_well_is_told_again_only_when_it_gets_much_worse() -> None:
    flicker = Flicker(np.zeros(16), np.arange(16))
    (one,) = flickering(flicker, range(200), 12, 1.3)
    flicker.clear(one.series)
    assert flickering(flicker, range(200, 600), 12, 1.3) == []
    again, *_ = flickering(flicker, range(600, 800), 5, 3.0)
    assert (again.kind, again.series) == ("slow", 1)


def test_one_that_is_known_and_gets_much_worse_is_told_again() -> None:
    flicker = Flicker(np.zeros(16), np.arange(16))
    (one,) = flickering(flicker, range(120), 12, 1.3)
    found = flickering(flicker, range(120, 600), 5, 3.0)
    assert 1 <= len(found) <= 2
    assert found[-1].cost > 2 * one.cost


def test_of_one_that_does_not_report_nobody_says_that_it_is_over() -> None:
    flicker = Flicker(np.zeros(16), np.arange(16))
    assert [one.kind for one in flickering(flicker, range(120), 10, 3.0)] == ["slow"]
    assert flickering(flicker, range(120, 400), 1, float("nan")) == []
    assert [one.kind for one in flickering(flicker, range(400, 600), 10, 0.0)] == ["recovered"]


def test_a_long_burst_does_not_keep_the_end_from_being_told() -> None:
    flicker = Flicker(np.zeros(16), np.arange(16))
    assert [one.kind for one in flickering(flicker, range(120), 10, 3.0)] == ["slow"]
    assert flickering(flicker, range(120, 126), 1, 3.0) == []
    assert [one.kind for one in flickering(flicker, range(126, 400), 10, 0.0)] == ["recovered"]
