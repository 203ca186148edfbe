"""How long the present regime of a series has lasted."""

from __future__ import annotations

import numpy as np
import pytest

from resihp.detector.sequential.run_lengths import MAX_RUN_LENGTH, RunLengths


def runs(values: list[float]) -> list[int]:
    lengths = RunLengths()
    return [lengths.update(value) for value in values]


def test_a_shift_ends_a_run() -> None:
    rng = np.random.default_rng(0)
    values = [*(1 + 0.02 * rng.standard_normal(60)), *(1.3 + 0.02 * rng.standard_normal(20))]
    found = runs(values)
    assert max(found[:60]) >= 59
    assert found[-1] == 20


@pytest.mark.parametrize("values", [[0.5] * 100, [0.5, 0.5001] * 50])
def test_what_hardly_differs_has_no_change_points(values: list[float]) -> None:
    assert runs(values)[-1] == 100


def test_a_dropped_value_was_never_there() -> None:
    rng = np.random.default_rng(1)
    with_outlier, without = RunLengths(), RunLengths()
    for value in rng.normal(1.0, 0.01, 40).tolist():
        assert with_outlier.update(value) == without.update(value)
    with_outlier.update(9.0)
    with_outlier.drop()
    assert with_outlier.update(1.0) == without.update(1.0)
    assert with_outlier.confidence == without.confidence


def test_a_regime_that_outlasts_what_is_told_apart_does_not_end_by_that() -> None:
    rng = np.random.default_rng(2)
    lengths = RunLengths()
    found = [lengths.update(value) for value in rng.normal(1.0, 0.01, 3 * MAX_RUN_LENGTH).tolist()]
    assert lengths.lasting
    assert all(run == MAX_RUN_LENGTH for run in found[2 * MAX_RUN_LENGTH :])
    for value in rng.normal(1.2, 0.01, 5).tolist():
        lengths.update(value)
    assert lengths.longest == 5
