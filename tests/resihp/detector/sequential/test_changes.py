"""Change points of one series: found soon and placed right, silent on outliers and on correlated noise, cheap."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from resihp.detector.sequential.changes import ChangeDetector
from resihp.detector.sequential.densities import DECILE_RANGE_SIGMAS, LATE_VALUES, UPDATE_EVERY, LateRange
from resihp.detector.sequential.levels import ChangePoint
from tests.resihp.detector.synthetic_runs import Floats, noise


def changes(values: Floats, detector: ChangeDetector | None = None) -> list[ChangePoint]:
    detector = detector or ChangeDetector()
    found = [detector.update(index, value) for index, value in enumerate(values.tolist())]
    return [change for change in found if change is not None]


def stepped(rng: np.random.Generator, size: float, deviation: float = 0.03, correlation: float = 0.0) -> Floats:
    """Healthy until 100 and from 170 on, `size` above in between."""
    values = noise(rng, "gaussian", 250, deviation, correlation)
    values[100:170] += size
    return values


@pytest.mark.parametrize("size", [0.2, 0.5, 1.25])
def test_onset_and_recovery_are_found_within_three_values_and_placed_right(size: float) -> None:
    for seed in range(10):
        slow, well = changes(stepped(np.random.default_rng(seed), size))
        assert abs(slow.onset - 100) <= 1
        assert abs(well.onset - 170) <= 1
        assert slow.detected <= 103
        assert well.detected <= 173
        assert slow.after - slow.before == pytest.approx(size, abs=0.06)
        assert well.after == pytest.approx(slow.before, abs=0.04)
        assert slow.confidence > 0.5


def test_a_change_is_never_known_from_fewer_than_three_values() -> None:
    values = noise(np.random.default_rng(0), "gaussian", 200, 0.02)
    values[80:82] += 1.0
    values[150:152] += 0.4
    assert changes(values) == []


def test_outliers_alone_or_at_regular_times_are_no_change() -> None:
    rng = np.random.default_rng(1)
    for period in (5, 10, 100):
        values = noise(rng, "gaussian", 800, 0.03)
        values[period - 1 :: period] += rng.uniform(0.7, 2.3, len(values[period - 1 :: period]))
        assert changes(values) == []


def test_a_slow_start_is_not_learnt_as_healthy() -> None:
    values = noise(np.random.default_rng(2), "gaussian", 200, 0.03)
    values[:4] += [1.6, 1.2, 0.9, 0.7]
    values[120:] += 0.3
    (change,) = changes(values)
    assert change.onset == 120
    assert change.before == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(("expected", "found"), [(0.0, True), (0.35, False), (None, False)])
def test_what_is_slow_while_levels_are_learnt_anew_is_not_taken_for_healthy(
    expected: float | None, found: bool
) -> None:
    """Unless nobody knows better."""
    values = np.random.default_rng(7).normal(0.4, 0.02, 40)
    detector = ChangeDetector(expected=expected)
    told = changes(values, detector)
    assert [round(change.after - change.before, 1) for change in told] == ([0.4] if found else [])
    assert detector.healthy == pytest.approx(0.0 if found else 0.4, abs=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_a_level_a_little_above_what_was_expected_is_learnt(correlation: float) -> None:
    detector = ChangeDetector(correlation=correlation, expected=0.0)
    assert changes(np.random.default_rng(8).normal(0.08, 0.02, 200), detector) == []
    assert detector.healthy == pytest.approx(0.08, abs=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.6])
def test_correlated_noise_raises_no_false_alarms(correlation: float) -> None:
    """At most one in 10,000 values; here 12,000 of each."""
    found = []
    for seed in range(12):
        found += changes(noise(np.random.default_rng(seed), "gaussian", 1000, 0.04, correlation))
    assert len(found) <= 2  # a false alarm and the return from it


def test_small_persistent_shift_of_a_residual_is_found_by_patience() -> None:
    late = []
    for seed in range(20):
        values = noise(np.random.default_rng(seed), "gaussian", 260, 0.03, 0.5)
        values[120:] += math.log(1.05)
        detector = ChangeDetector(noise=0.03, level=0.0, correlation=0.5)
        found = [change for change in changes(values, detector) if change.detected >= 120]
        late.append(found[0].detected - 120 if found else 999)
    assert sorted(late)[18] <= 45


def test_a_level_that_creeps_away_is_told() -> None:
    values = noise(np.random.default_rng(3), "gaussian", 900, 0.02)
    values[200:] += np.minimum(np.arange(700) * 2e-4, 0.1)
    (change, *_) = changes(values)
    assert change.after > change.before
    assert change.detected < 650


def test_values_that_are_no_numbers_and_gaps_are_passed_over() -> None:
    values = stepped(np.random.default_rng(4), 0.4)
    plain = changes(values)
    detector = ChangeDetector()
    found = []
    for index, value in enumerate(values.tolist()):
        for bad in (math.nan, math.inf, -math.inf):
            assert detector.update(index, bad) is None
        if index % 7 != 5:
            found.append(detector.update(index, value))
    told = [change for change in found if change is not None]
    assert len(told) == len(plain) == 2
    assert all(abs(ours.onset - theirs.onset) <= 1 for ours, theirs in zip(told, plain, strict=True))


def test_what_is_known_is_told() -> None:
    detector = ChangeDetector()
    assert not detector.ready
    assert math.isnan(detector.level)
    for index, value in enumerate(noise(np.random.default_rng(5), "gaussian", 200, 0.05).tolist()):
        detector.update(index, 3 + value)
    assert detector.ready
    assert not detector.changed
    assert detector.level == detector.healthy == pytest.approx(3, abs=0.02)
    assert detector.noise == pytest.approx(0.05, rel=0.25)
    for index in range(200, 210):
        detector.update(index, 3.5)
    assert detector.changed
    assert detector.level == pytest.approx(3.5, abs=0.05)
    assert detector.healthy == pytest.approx(3, abs=0.02)


def test_equal_values_are_no_change_and_the_first_other_level_is() -> None:
    assert changes(np.full(300, 0.7)) == []
    (change,) = changes(np.concatenate([np.full(100, 0.7), np.full(50, 0.9)]))
    assert (change.onset, change.detected) == (100, 102)


def test_back_to_back_levels_are_changes_each() -> None:
    values = noise(np.random.default_rng(6), "gaussian", 300, 0.02)
    values[80:150] += 0.2
    values[150:220] += 0.7
    assert [change.onset for change in changes(values)] == [80, 150, 220]


def test_an_update_is_cheap() -> None:
    values = noise(np.random.default_rng(7), "gaussian", 3000, 0.03).tolist()
    detector = ChangeDetector()
    spent = time.process_time()
    for index, value in enumerate(values):
        detector.update(index, value)
    assert (time.process_time() - spent) / len(values) <= 3e-4


def test_the_range_of_late_values_is_numpys_to_the_last_bit() -> None:
    """Of values that repeat, too: those that leave are the oldest."""
    values = np.random.default_rng(5).normal(0.0, 0.03, 1000).round(2)
    late, deviation = LateRange(), 0.0
    for count, value in enumerate(values.tolist(), 1):
        seen = values[max(count - LATE_VALUES, 0) : count]
        if len(seen) >= 10 and (count % UPDATE_EVERY == 0 or len(seen) < 4 * UPDATE_EVERY):
            low, high = np.quantile(seen, (0.1, 0.9))
            deviation = float(high - low) / DECILE_RANGE_SIGMAS
        assert late.follow(value) == deviation
