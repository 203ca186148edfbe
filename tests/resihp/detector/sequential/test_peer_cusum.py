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
    assert {(shift.series, shift.kind) for shift in found} == {(i, "slow") for i in range(5)}
    series.offsets[:5] = 0.0
    found = series.run(40)
    assert {(shift.series, shift.kind) for shift in found} == {(i, "recovered") for i in range(5)}


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


def test_a_pardon_becomes_longer_each_time_but_not_without_end() -> None:
    series = Series(8)
    series.test = PeerTest(np.zeros(8), patience=24)
    series.run(40)
    lasts = []
    for _ in range(5):
        series.test.clear(5, series.now)
        lasts.append((series.test.standing(5).pardoned_until or 0) - series.now)
    assert lasts == [24, 48, 96, 96, 96]


def test_what_is_known_to_be_slow_is_no_news_but_its_recovery_is() -> None:
    series = Series(8)
    series.test = PeerTest(np.zeros(8), known_shifts={2: 0.3})
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


# --- what healthy series wander by ------------------------------------------------------------------------------------


def wander(n: int, seed: int, iterations: int, *, swing: float = 0.0, level: float = 0.0) -> Floats:
    """(iterations, n): a slow swing of each series' own phase, and levels that wander, correlated with .98."""
    rng = np.random.default_rng(seed)
    phase, period = rng.uniform(0, 2 * np.pi, n), rng.uniform(200, 500)
    rows = swing * np.sin(2 * np.pi * np.arange(iterations)[:, None] / period + phase)
    away = level * rng.standard_normal(n)
    for row in rows:
        away = 0.98 * away + level * np.sqrt(1 - 0.98**2) * rng.standard_normal(n)
        row += away
    return rows + 0.006 * rng.standard_normal((iterations, n))


@pytest.mark.parametrize(("swing", "level"), [(0.015, 0.0), (0.0, 0.01)])
def test_devices_that_warm_up_and_cool_down_are_healthy(swing: float, level: float) -> None:
    found = 0
    for seed in range(8):
        test = PeerTest(np.zeros(16))
        for i, row in enumerate(wander(16, seed, 600, swing=swing, level=level)):
            found += len(test.update(i, row))
    assert found <= 2


@pytest.mark.parametrize(("swing", "level"), [(0.015, 0.0), (0.0, 0.01)])
def test_among_devices_that_wander_a_slow_one_is_found_as_soon(swing: float, level: float) -> None:
    for seed in range(8):
        test = PeerTest(np.zeros(16))
        rows = wander(16, seed, 260, swing=swing, level=level)
        rows[200:, 7] += np.log(1.2)
        found = [shift for i, row in enumerate(rows) for shift in test.update(i, row) if shift.series == 7]
        assert any(shift.kind == "slow" and 200 <= shift.detected < 203 for shift in found)


def test_nodes_of_a_large_job_that_wander_are_healthy() -> None:
    test = PeerTest(np.arange(2048) // 4 % 4)
    rows = wander(256, 5, 300, swing=0.015, level=0.01)
    rng = np.random.default_rng(5)
    found = []
    for i, row in enumerate(rows):
        found += test.update(i, np.repeat(row, 8) + 0.006 * rng.standard_normal(2048))
    assert found == []


def test_a_little_slower_still_is_news_too() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = -np.log(0.96)
    assert [shift.kind for shift in series.run(60)] == ["slow"]
    series.offsets[5] = -np.log(0.77)
    (shift,) = series.run(40)
    assert (shift.kind, shift.series, shift.onset) == ("slow", 5, 140)
    assert shift.after == pytest.approx(-np.log(0.77), abs=0.01)
    series.offsets[5] += 0.07
    (shift,) = series.run(40)
    assert shift.after == pytest.approx(0.07 - np.log(0.77), abs=0.01)


def test_small_steps_of_a_slow_series_add_up_to_news() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.2
    found = series.run(30)
    for _ in range(4):
        series.offsets[5] += 0.03
        found += series.run(80)
    assert [shift.kind for shift in found] == ["slow", "slow", "slow"]


def test_pardons_are_kept_for_as_long_as_they_were_given() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.13
    assert len(series.run(20)) == 1
    series.test.clear(5, series.now)
    cooldowns = series.test.cooldowns
    assert cooldowns[5].until == 600
    series.test = PeerTest(np.zeros(8), cooldowns=cooldowns)
    assert series.run(490) == []
    (shift,) = series.run(30)
    assert (shift.series, shift.kind) == (5, "slow")
    assert shift.after == pytest.approx(0.13, abs=0.02)


def test_who_recovers_under_a_pardon_is_not_faster_and_is_found_when_it_fails_again() -> None:
    series = Series(8)
    series.run(80)
    series.offsets[5] = 0.13
    series.run(20)
    series.test.clear(5, series.now)
    series.test = PeerTest(np.zeros(8), cooldowns=series.test.cooldowns)
    series.run(20)
    series.offsets[5] = 0.0
    assert series.run(60) == []
    assert series.test.levels(healthy=True)[5] == pytest.approx(0.0, abs=0.02)
    series.offsets[5] = 0.13
    assert [shift.series for shift in series.run(10)] == [5]


def test_devices_that_are_unlike_each_other_are_healthy_and_one_that_fails_is_not() -> None:
    found = 0
    for seed in range(10):
        series = Series(16, seed=seed, groups=np.arange(16) // 8)
        series.offsets[:] = 0.02 * np.random.default_rng(seed).standard_normal(16)
        found += len(series.run(200))
        series.offsets[3] += 0.2
        assert 3 in {shift.series for shift in series.run(4)}
    assert found <= 1


def test_what_series_wander_by_is_known_to_the_next_test() -> None:
    for seed in range(6):
        rows = wander(16, seed, 700, level=0.012)
        before = PeerTest(np.zeros(16))
        for i, row in enumerate(rows[:400]):
            before.update(i, row)
        test = PeerTest(np.zeros(16), wandering=before.wandering)
        assert [shift for i, row in enumerate(rows[400:]) for shift in test.update(i, row)] == []
