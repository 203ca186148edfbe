"""Slow ranks by the seconds of their own work: found with their factor, and nobody blamed for what is usual."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from resihp.detector.own_seconds import AGREEING_WINDOWS, Judgement, OwnSeconds, WorkWindow

ITERATIONS = 20
"""Number of iterations of a window, the fewest that one may have."""
TOTAL_WINDOWS = 10_000 // ITERATIONS

Work = Callable[[int, np.random.Generator], np.ndarray]
"""Own seconds of each rank in an iteration."""


def judged(work: Work, windows: int = TOTAL_WINDOWS, seed: int = 0) -> list[Judgement]:
    """Return the judgements of all windows of a job with this work. A verdict lasts until the rank has recovered."""
    generator, own_seconds = np.random.default_rng(seed), OwnSeconds()
    slow: dict[int, float] = {}
    judgements = []
    for number in range(windows):
        first = number * ITERATIONS
        rows = np.stack([work(first + i, generator) for i in range(ITERATIONS)])
        sections = {"forward": 0.7 * rows.mean(axis=0), "data": 0.3 * rows.mean(axis=0)}
        window = WorkWindow(iteration=first + 1, began_at=10.0 * number, own=rows.mean(axis=0), sections=sections)
        judgement = own_seconds.add(window, slow)
        slow |= {found.rank: 1.0 / found.factor for found in judgement.slow}
        for found in judgement.recovered:
            del slow[found.rank]
        judgements.append(judgement)
    return judgements


def equal(ranks: int = 8, jitter: float = 0.02) -> Work:
    return lambda _, generator: 0.1 * generator.lognormal(0.0, jitter, ranks)


def uneven(_: int, generator: np.random.Generator) -> np.ndarray:
    """Two pipelines of four stages: the first and the last one do more."""
    return np.array([0.14, 0.1, 0.1, 0.19] * 2) * generator.lognormal(0.0, 0.03, 8)


def one_pipeline(_: int, generator: np.random.Generator) -> np.ndarray:
    return np.array([0.1, 0.1, 0.1, 0.14]) * generator.lognormal(0.0, 0.03, 4)


def evaluating(iteration: int, generator: np.random.Generator) -> np.ndarray:
    """Rank 0 evaluates every 200 iterations, in the same sections."""
    own = equal()(iteration, generator)
    own[0] += 5.0 if iteration % 200 == 0 else 0.0
    return own


def saving(iteration: int, generator: np.random.Generator) -> np.ndarray:
    """Rank 0 saves every 50 iterations, from iteration 1,000 on."""
    own = equal()(iteration, generator)
    own[0] += 2.0 if iteration > 1000 and iteration % 50 == 0 else 0.0
    return own


def data_dependent(_: int, generator: np.random.Generator) -> np.ndarray:
    """Each rank draws documents of its own; the time grows with the square of their lengths."""
    lengths = generator.lognormal(6.0, 0.8, (8, 8))
    return 1e-8 * (1000 * lengths + lengths**2).sum(axis=1)


def growing(iteration: int, generator: np.random.Generator) -> np.ndarray:
    """The sequences of all ranks become longer, which costs stages with attention more than others."""
    longer = 1.0 + 2.0 * (iteration > 4000)
    return np.array([0.1, 0.1 * longer, 0.1 * longer, 0.12 * (0.5 + 0.5 * longer)]) * generator.lognormal(0.0, 0.02, 4)


HEALTHY: Mapping[str, Work] = {
    "equal ranks": equal(),
    "two ranks": equal(ranks=2),
    "20 % jitter": equal(jitter=0.2),
    "20 % jitter of two ranks": equal(ranks=2, jitter=0.2),
    "stages of two pipelines": uneven,
    "stages of one pipeline": one_pipeline,
    "evaluations": evaluating,
    "checkpoints": saving,
    "documents of each rank": data_dependent,
    "longer sequences": growing,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("work", HEALTHY.values(), ids=HEALTHY.keys())
def test_nobody_is_slow_in_ten_thousand_iterations_of_what_is_usual(work: Work, seed: int) -> None:
    judgements = judged(work, seed=seed)
    assert not [found for judgement in judgements for found in judgement.slow]


def with_slow_rank(
    work: Work, rank: int, factor: float, begins: int, ends: int = 10**9
) -> Callable[[int, np.random.Generator], np.ndarray]:
    def slowed(iteration: int, generator: np.random.Generator) -> np.ndarray:
        own = work(iteration, generator)
        own[rank] *= factor if begins <= iteration < ends else 1.0
        return own

    return slowed


@pytest.mark.parametrize(
    ("work", "rank", "factor"),
    [
        (equal(), 5, 1.25),
        (equal(), 0, 1.5),
        (equal(ranks=2), 1, 1.4),
        (equal(ranks=2), 0, 1.4),
        (equal(jitter=0.2), 3, 1.5),
        (uneven, 6, 1.3),
        (uneven, 3, 1.3),
        (one_pipeline, 3, 1.3),
        (data_dependent, 2, 3.0),
    ],
)
def test_a_rank_that_becomes_slow_is_found_with_its_factor_its_onset_and_its_section(
    work: Work, rank: int, factor: float
) -> None:
    judgements = judged(with_slow_rank(work, rank, factor, begins=1000), windows=60)
    (found,) = [found for judgement in judgements for found in judgement.slow]
    assert (found.rank, found.section) == (rank, "forward")
    assert found.factor == pytest.approx(factor, rel=0.25 if work is data_dependent else 0.1)
    assert found.iteration == pytest.approx(1000, abs=3 * ITERATIONS if work is data_dependent else ITERATIONS)
    number = next(number for number, judgement in enumerate(judgements) if judgement.slow)
    assert number - 1000 // ITERATIONS < AGREEING_WINDOWS + 3


def test_half_of_the_ranks_may_be_slow_at_once() -> None:
    work = equal()
    for rank in (4, 5, 6, 7):
        work = with_slow_rank(work, rank, 1.4, begins=1000)
    judgements = judged(work, windows=60)
    assert {found.rank for judgement in judgements for found in judgement.slow} == {4, 5, 6, 7}


def test_a_rank_that_is_slow_from_the_start_is_found_among_equal_ranks() -> None:
    judgements = judged(with_slow_rank(equal(), 5, 1.5, begins=0, ends=1000), windows=70)
    (found,) = [found for judgement in judgements for found in judgement.slow]
    assert (found.rank, found.iteration, found.section) == (5, 1, "forward")
    (recovered,) = [found for judgement in judgements for found in judgement.recovered]
    assert (recovered.rank, recovered.iteration) == (5, 1001)


def test_a_slow_rank_recovers_once_and_may_become_slow_again() -> None:
    work = with_slow_rank(with_slow_rank(equal(), 2, 1.4, 1000, 2000), 2, 1.4, 3000)
    judgements = judged(work, windows=200)
    assert [found.rank for judgement in judgements for found in judgement.slow] == [2, 2]
    (recovered,) = [found for judgement in judgements for found in judgement.recovered]
    assert recovered.iteration == pytest.approx(2000, abs=ITERATIONS)


def test_a_rank_that_others_leave_behind_is_not_slow() -> None:
    """One of two ranks has less to do."""
    judgements = judged(with_slow_rank(equal(ranks=2), 0, 0.8, begins=1000))
    assert not [found for judgement in judgements for found in judgement.slow]


def test_a_slow_rank_is_found_after_the_work_of_all_ranks_has_changed() -> None:
    judgements = judged(with_slow_rank(growing, 1, 1.5, begins=6000), windows=360)
    (found,) = [found for judgement in judgements for found in judgement.slow]
    assert (found.rank, found.iteration) == (1, 6001)


def test_a_known_slow_rank_stays_slow_when_all_is_learned_anew() -> None:
    own_seconds, generator = OwnSeconds(), np.random.default_rng(0)
    work, slow, recovered = with_slow_rank(equal(), 3, 1.5, 0, 1000), {3: 1 / 1.5}, []
    for number in range(70):
        own = np.stack([work(ITERATIONS * number + i, generator) for i in range(ITERATIONS)]).mean(axis=0)
        window = WorkWindow(iteration=ITERATIONS * number + 1, began_at=0.0, own=own, sections={})
        judgement = own_seconds.add(window, slow)
        assert not judgement.slow
        recovered += judgement.recovered
        slow = {} if judgement.recovered else slow
    assert [found.iteration for found in recovered] == [1001]


def test_ranks_of_which_nothing_is_known_are_left_out() -> None:
    work = with_slow_rank(equal(), 5, 1.5, begins=1000)

    def partly(iteration: int, generator: np.random.Generator) -> np.ndarray:
        own = work(iteration, generator)
        own[7] = np.nan
        if 900 <= iteration < 920:
            own[:] = np.nan
        return own

    judgements = judged(partly, windows=60)
    assert [found.rank for judgement in judgements for found in judgement.slow] == [5]
