"""Which series is slow relative to its peers: found soon, and hardly ever wrongly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from resihp.detector.sequential.peer_cusum import PeerTest, Shift

Floats = npt.NDArray[np.float64]


class Series:
    """`n` series with noise `sigma` each, and what is common to all; shifts by (iteration, series)."""

    def __init__(self, n: int, *, sigma: float = 0.0075, seed: int = 0, groups: npt.ArrayLike | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.sigma = sigma
        self.test = PeerTest(np.zeros(n) if groups is None else groups)
        self.offsets = np.zeros(n)
        self.common = 0.0
        self.found: list[Shift] = []
        self.now = 0

    def run(self, iterations: int, common: float = 0.0, hide: tuple[int, ...] = ()) -> list[Shift]:
        """Go on for so many iterations; what was found in them."""
        found: list[Shift] = []
        for _ in range(iterations):
            self.common = 0.5 * self.common + 0.026 * float(self.rng.standard_normal())
            values = common + self.common + self.offsets + self.sigma * self.rng.standard_normal(len(self.offsets))
            values[list(hide)] = np.nan
            found += self.test.update(self.now, values)
            self.now += 1
        return found


@pytest.mark.parametrize(("n", "iterations"), [(8, 6000), (64, 4000), (1024, 2000)])
def test_without_a_shift_nothing_is_found(n: int, iterations: int) -> None:
    assert Series(n, groups=np.arange(n) // 4).run(iterations) == []


@pytest.mark.parametrize("dof", [5.0])
def test_heavy_tails_and_single_outliers_are_not_shifts(dof: float) -> None:
    rng = np.random.default_rng(4)
    test = PeerTest(np.zeros(16))
    found = []
    for i in range(4000):
        values = 0.01 * rng.standard_t(dof, 16)
        if i % 50 == 0:
            values[int(rng.integers(16))] += 1.0
        found += test.update(i, values)
    assert len(found) <= 1


@pytest.mark.parametrize(("speed", "limit"), [(0.95, 10), (0.9, 3), (0.8, 3), (0.3, 3)])
def test_a_shift_is_found_with_onset_and_size(speed: float, limit: int) -> None:
    for seed in range(20):
        series = Series(8, seed=seed, groups=np.arange(8) // 4)
        assert series.run(100 + seed) == []
        series.offsets[3] = -np.log(speed)
        (shift,) = series.run(60)
        assert (shift.series, shift.kind) == (3, "slow")
        assert abs(shift.onset - (100 + seed)) <= 1
        assert shift.detected < 100 + seed + limit
        assert np.exp(shift.after) == pytest.approx(1 / speed, rel=0.02)
        assert 0.9 < shift.confidence < 1.0
        assert np.exp(series.test.shift(3)) == pytest.approx(1 / speed, rel=0.01)


def test_recovery_is_found_too() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.2
    assert [shift.kind for shift in series.run(30)] == ["slow"]
    series.offsets[5] = 0.0
    (shift,) = series.run(200)
    assert (shift.series, shift.kind) == (5, "recovered")
    assert shift.onset == 110
    assert series.test.slow == ()


def test_slower_still_is_news_and_a_little_is_not() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.2
    series.run(30)
    series.offsets[5] = 0.24
    assert series.run(60) == []
    assert series.test.shift(5) == pytest.approx(0.24, abs=0.01)
    series.offsets[5] = 0.7
    (shift,) = series.run(30)
    assert (shift.kind, shift.series) == ("slow", 5)
    assert shift.before == pytest.approx(0.24, abs=0.02)


def test_slow_from_the_start_is_found_against_peers_not_learnt() -> None:
    for speed in (0.95, 0.9, 0.5):
        series = Series(8, groups=[0, 0, 0, 0, 1, 1, 1, 1])
        series.offsets[:4] += 0.15  # the prediction of a whole group may be off
        series.offsets[2] -= np.log(speed)
        (shift,) = series.run(100 if speed > 0.9 else 10)
        assert (shift.series, shift.kind) == (2, "slow")
        assert np.exp(shift.after) == pytest.approx(1 / speed, rel=0.02)


def test_the_slower_of_two_peers_is_the_slow_one() -> None:
    series = Series(4, groups=[0, 0, 1, 1])
    series.offsets[3] = 0.3
    assert [shift.series for shift in series.run(40)] == [3]


def test_small_constant_differences_are_healthy_and_without_peers_any() -> None:
    series = Series(6, groups=[0, 0, 0, 0, 1, 2])
    series.offsets[:] = [0.0, 0.01, -0.015, 0.02, 0.4, -0.3]
    assert series.run(1500) == []


def test_what_hits_everybody_is_nobody_s_fault() -> None:
    series = Series(8)
    series.run(60)
    assert series.run(60, common=0.3) == []
    assert series.run(60) == []


def test_most_of_them_slower_does_not_make_the_others_fast() -> None:
    """5 of 8 slow down at once and recover: the three others are healthy all the time."""
    series = Series(8)
    series.run(80)
    series.offsets[:5] = 0.4
    found = series.run(40)
    series.offsets[:5] = 0.0
    found += series.run(40)
    assert not {shift.series for shift in found} & {5, 6, 7}


def test_half_of_them_slower_are_all_found() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[:4] = 0.3
    assert {shift.series for shift in series.run(10)} == {0, 1, 2, 3}
    series.offsets[:4] = 0.0
    recovered = series.run(10)
    assert {shift.series for shift in recovered} == {0, 1, 2, 3}
    assert {shift.kind for shift in recovered} == {"recovered"}


def test_a_slow_drift_is_found() -> None:
    series = Series(8)
    series.run(100)
    found: list[Shift] = []
    for _ in range(400):
        series.offsets[1] += 0.0002
        found += series.run(1)
    assert found
    assert {shift.series for shift in found} == {1}
    assert found[0].after < 0.06


def test_missing_values_delay_and_deceive_nobody() -> None:
    series = Series(8)
    rng = np.random.default_rng(9)
    for _ in range(600):
        hidden = tuple(np.flatnonzero(rng.random(8) < 0.3).tolist())
        assert series.run(1, hide=hidden) == []
    series.offsets[6] = 0.25
    assert series.run(10, hide=(6,)) == []
    assert [shift.series for shift in series.run(4)] == [6]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9, -1e9])
def test_what_cannot_be_is_ignored(value: float) -> None:
    series = Series(8)
    series.run(50)
    for i in range(20):
        values = np.zeros(8)
        values[4] = value
        assert series.test.update(50 + i, values) == []
    assert series.test.update(80, np.full(8, value)) == []


def test_few_series_are_no_peers() -> None:
    assert PeerTest([]).update(0, []) == []
    alone = Series(1)
    alone.run(20)
    alone.offsets[0] = 1.0
    assert alone.run(20) == []


def test_a_cleared_suspicion_is_not_raised_again_at_once() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.06
    assert len(series.run(20)) == 1
    series.test.clear(5, series.now)
    assert series.test.slow == ()
    assert series.run(400) == []
    series.offsets[5] = 0.4
    assert [shift.kind for shift in series.run(5)] == ["slow"]


def test_a_cleared_suspicion_is_forgotten_after_a_while() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.06
    series.run(20)
    series.test.clear(5, series.now)
    series.run(480)
    assert [shift.series for shift in series.run(100)] == [5]
    series.test.clear(5, series.now)
    assert series.run(900) == []


def test_what_is_known_to_be_slow_is_no_news_but_its_recovery_is() -> None:
    series = Series(8)
    series.test = PeerTest(np.zeros(8), known={2: 0.3})
    series.offsets[2] = 0.3
    assert series.run(100) == []
    assert series.test.slow == (2,)
    series.offsets[2] = 0.0
    assert [shift.kind for shift in series.run(20)] == ["recovered"]


def test_much_noise_hides_little_but_not_much() -> None:
    series = Series(8, sigma=0.1)
    assert series.run(1500) == []
    series.offsets[0] = np.log(2.0)
    (shift,) = series.run(20)
    assert (shift.series, shift.kind) == (0, "slow")


def test_correlated_noise_is_no_shift() -> None:
    rng = np.random.default_rng(3)
    test = PeerTest(np.zeros(8))
    noise = np.zeros(8)
    found = []
    for i in range(4000):
        noise = 0.6 * noise + 0.01 * rng.standard_normal(8)
        found += test.update(i, noise)
    assert len(found) <= 1
