"""Which counts are more than chance: tails, the rate of others, false ones among the picked, and the fleet's spread."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from resihp.detector.excess import MIN_SHAPE, POISSON_SHAPE, dispersion, excess, false_share, rate_of_others, tail

RATE = 2e-5


def test_tails_are_those_of_the_distributions() -> None:
    counts, expected = np.array([0.0, 1.0, 3.0, 9.0]), np.array([0.1, 0.7, 0.7, 0.37])
    exact = stats.poisson.sf(counts - 1, expected)
    assert tail(counts, expected, np.full(4, 1e9)) == pytest.approx(exact, rel=1e-5)
    shape = 1.7
    exact = stats.nbinom.sf(counts - 1, shape, shape / (shape + expected))
    assert tail(counts, expected, np.full(4, shape)) == pytest.approx(exact, rel=1e-9)


def test_the_rate_of_others_by_hand() -> None:
    counts, exposure = np.array([[4.0], [1.0], [0.0]]), np.array([[1000.0], [2000.0], [3000.0]])
    rate, weight = rate_of_others(counts, exposure, np.array([False, True, True]), np.array([500.0]), RATE)
    # One failure is presumed in 1 / RATE hours; the first is not among anybody's others.
    assert rate[:, 0] == pytest.approx([2.0 / 55_500, 1.0 / 53_500, 2.0 / 52_500])
    assert weight[:, 0] == pytest.approx([2.0, 1.0, 2.0])


def test_what_is_presumed_gives_way_where_others_show_more() -> None:
    counts, exposure = np.full((3, 1), 6.0), np.full((3, 1), 500.0)
    rate, _ = rate_of_others(counts, exposure, np.ones(3, dtype=np.bool_), np.zeros(1), RATE)
    assert (rate > 0.5 * 12 / 1000).all()


def test_false_shares_by_hand() -> None:
    p = np.array([0.04, 0.001, 0.03, 0.9])
    assert false_share(p) == pytest.approx([0.04 * 4 / 3, 0.004, 0.04 * 4 / 3, 0.9])
    assert false_share(p, 4) == pytest.approx([0.04 * 8 / 3, 0.008, 0.04 * 8 / 3, 1.0])


def test_probabilities_are_no_smaller_than_chance() -> None:
    """In a fleet of one rate, p falls below x at most x of the time, over all windows."""
    rng = np.random.default_rng(4)
    hours = np.outer(rng.uniform(0.2, 1.0, 20_000), [30.0, 90.0, 180.0]) * 8 * 24
    counts = np.cumsum(rng.poisson(5 * RATE * np.diff(hours, prepend=0.0)), axis=1).astype(float)
    found = excess(counts, hours, (0.04, 0.06, 0.9), shape=POISSON_SHAPE, usual_rate=RATE, false=0.05, least=3)
    for chance in (0.001, 0.01, 0.05, 0.2):
        assert np.mean(found.p <= chance) < chance * 1.1
    assert not found.picked.any()


def test_the_spread_of_a_fleet_is_told_and_lemons_are_not_taken_for_it() -> None:
    rng = np.random.default_rng(1)
    hours = rng.uniform(0.5, 1.0, 2000) * 180 * 8 * 24
    even = rng.poisson(RATE * hours).astype(float)
    assert dispersion(even, hours) == POISSON_SHAPE
    lemons = np.where(np.arange(2000) < 40, rng.poisson(20 * RATE * hours), even).astype(float)
    assert lemons.var() > 3 * lemons.mean()
    assert dispersion(lemons, hours) == POISSON_SHAPE
    for shape in (1.5, 3.0):
        spread = rng.poisson(3 * RATE * hours * rng.gamma(shape, 1 / shape, 2000)).astype(float)
        assert dispersion(spread, hours) == pytest.approx(shape, rel=0.4)
    wild = rng.poisson(RATE * hours * rng.gamma(0.2, 5.0, 2000)).astype(float)
    assert dispersion(wild, hours) == pytest.approx(MIN_SHAPE, rel=0.01)
    assert dispersion(even[:10], hours[:10]) == POISSON_SHAPE


def test_where_rates_differ_it_takes_more_to_stand_out() -> None:
    counts = np.zeros((200, 1))
    counts[:100] = 1.0
    counts[0] = 6.0
    hours = np.full((200, 1), 1.0 / RATE)

    def q(shape: float) -> float:
        return float(excess(counts, hours, (1.0,), shape=shape, usual_rate=RATE, false=0.1, least=3).q[0])

    assert q(POISSON_SHAPE) < 0.05 < q(1.0)
