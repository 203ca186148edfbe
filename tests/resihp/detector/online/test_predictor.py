"""Eq. 1: learnt from healthy devices only, as well as can be, and not claimed before it is known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.simulated_jobs import Job, NoLengths, Setting, autoregressive, simulate
from resihp.detector.observation import Floats
from resihp.detector.online.predictor import Key, Predictor, keys
from resihp.detector.online.regression import Coefficients
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Stop
from resihp.pipeline.compiled import PRIMITIVE_KINDS

MIDDLE: Key = (4, 2, False, False)
TRUE = Coefficients(intercept_s=2e-3, per_token_s=6e-6, per_square_s=4e-10)
N = np.array([2000.0, 8000.0])
S = np.array([1e6, 3e7])


def workload(rng: np.random.Generator, chunks: int = 8) -> tuple[Floats, Floats]:
    tokens = rng.uniform(2000.0, 8000.0, chunks)
    return tokens, tokens**2 * rng.uniform(0.1, 1.0, chunks)


def teach(
    predictor: Predictor,
    rng: np.random.Generator,
    iterations: Iterable[int],
    *,
    key: Key = MIDDLE,
    true: Coefficients = TRUE,
    ranks: int = 4,
    slow: dict[int, float] | None = None,
    noise: float = 0.015,
    factors: npt.ArrayLike = 1.0,
    constant: float | None = None,
) -> None:
    """Have F chunks observed; `slow`: time ratios of ranks; `factors`: of iterations; `constant`: every N."""
    iterations = list(iterations)
    of_iteration = np.broadcast_to(np.asarray(factors), len(iterations))
    for i, factor in zip(iterations, of_iteration, strict=True):
        for rank in range(ranks):
            tokens, squares = workload(rng)
            if constant is not None:
                tokens = np.full_like(tokens, constant)
            seconds = true.seconds(tokens, squares) * factor * (slow or {}).get(rank, 1.0)
            seconds *= np.exp(noise * rng.standard_normal(seconds.size))
            predictor.observe(key, "F", tokens, squares, seconds, rank=rank, iteration=i)


def error(predictor: Predictor, key: Key = MIDDLE, true: Coefficients = TRUE, n: Floats = N, s: Floats = S) -> float:
    predicted = predictor.predict(key, "F", n, s)
    assert predicted is not None
    return float(np.abs(predicted / true.seconds(n, s) - 1.0).max())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


# --- what it learns -------------------------------------------------------------------------------------------------


def test_exact_measurements_give_exact_coefficients(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(8), noise=0.0)
    found = predictor.coefficients(MIDDLE, "F")
    assert found is not None
    assert (found.intercept_s, found.per_token_s, found.per_square_s) == pytest.approx(
        (TRUE.intercept_s, TRUE.per_token_s, TRUE.per_square_s), rel=1e-6
    )


def test_nothing_is_known_before_eight_iterations(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(7))
    assert predictor.predict(MIDDLE, "F", N, S) is None
    assert not predictor.ready(MIDDLE, "F")
    assert predictor.known(MIDDLE, "F") == "unknown"
    assert predictor.uncertainty(MIDDLE, "F") == np.inf
    teach(predictor, rng, [7])
    assert predictor.ready(MIDDLE, "F")
    assert not predictor.ready(MIDDLE, "B")
    assert not predictor.ready((4, 2, True, False), "F")


def test_where_iterations_differ_much_knowing_takes_longer_but_not_for_ever(rng: np.random.Generator) -> None:
    predictor = Predictor()
    factors = autoregressive(rng, 20, 0.11, 0.5)
    teach(predictor, rng, range(19), factors=factors[:19])
    assert not predictor.ready(MIDDLE, "F")
    teach(predictor, rng, [19], factors=factors[19:])
    assert predictor.ready(MIDDLE, "F")
    assert predictor.uncertainty(MIDDLE, "F") > 0.02


def test_factors_of_iterations_are_averaged_and_leave_the_slopes_alone() -> None:
    """Whatever iterations share moves the level by their mean, and nothing else."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        factors = autoregressive(rng, 40, 0.03, 0.5)
        predictor = Predictor()
        teach(predictor, rng, range(40), factors=factors)
        predicted = predictor.predict(MIDDLE, "F", N, S)
        assert predicted is not None
        ratio = predicted / TRUE.seconds(N, S)
        assert ratio[0] == pytest.approx(ratio[1], rel=0.012)
        assert ratio.mean() == pytest.approx(np.exp(np.log(factors).mean()), rel=0.012)


def test_a_few_stalled_iterations_do_not_move_the_level(rng: np.random.Generator) -> None:
    predictor = Predictor()
    factors = np.ones(20)
    factors[[4, 11]] = 3.0
    teach(predictor, rng, range(20), factors=factors)
    assert error(predictor) < 0.01


@pytest.mark.parametrize("ratio", [1.05, 1.3, 3.3])
@pytest.mark.parametrize(("ranks", "slow"), [(2, [1]), (4, [0]), (4, [0, 3]), (8, [1, 2, 5]), (3, [2])])
def test_a_slow_device_in_the_warm_up_is_not_learnt_as_healthy(ranks: int, slow: list[int], ratio: float) -> None:
    rng = np.random.default_rng(ranks)
    predictor = Predictor()
    factors = autoregressive(rng, 20, 0.03, 0.0)
    factors /= np.exp(np.log(factors).mean())
    teach(predictor, rng, range(20), ranks=ranks, slow=dict.fromkeys(slow, ratio), factors=factors)
    assert error(predictor) < 0.02
    found = predictor.ratios(MIDDLE, "F")
    for rank in range(ranks):
        assert found[rank] == pytest.approx(ratio if rank in slow else 1.0, rel=0.012)


def test_a_device_that_becomes_slow_in_the_warm_up_is_not_learnt_either(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(14))
    teach(predictor, rng, range(14, 20), slow={2: 1.4})
    assert error(predictor) < 0.012


def test_wild_chunks_count_little(rng: np.random.Generator) -> None:
    predictor = Predictor()
    for i in range(20):
        for rank in range(4):
            tokens, squares = workload(rng)
            seconds = TRUE.seconds(tokens, squares) * np.exp(0.015 * rng.standard_normal(8))
            wild = rng.random(8) < 0.1
            seconds[wild] *= rng.choice([1e-6, 0.2, 5.0, 1e9], wild.sum())
            predictor.observe(MIDDLE, "F", tokens, squares, seconds, rank=rank, iteration=i)
    assert error(predictor) < 0.015


def test_more_ranks_than_are_kept_make_it_no_worse(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(8), ranks=100, slow=dict.fromkeys(range(8), 1.5))
    assert error(predictor) < 0.01
    assert len(predictor.ratios(MIDDLE, "F")) == 32


# --- workloads that tell little -------------------------------------------------------------------------------------


def test_constant_tokens_are_folded_into_the_intercept(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(20), constant=8192.0)
    found = predictor.coefficients(MIDDLE, "F")
    assert found is not None
    assert found.per_token_s == 0.0
    assert found.intercept_s == pytest.approx(TRUE.intercept_s + 8192.0 * TRUE.per_token_s, rel=0.01)
    assert found.per_square_s == pytest.approx(TRUE.per_square_s, rel=0.05)


@pytest.mark.parametrize("variation", [1e-6, 1e-4, 1e-3, 1e-2])
def test_nearly_constant_tokens_do_not_blow_up(variation: float) -> None:
    rng = np.random.default_rng(3)
    predictor = Predictor()
    for i in range(20):
        for rank in range(2):
            tokens = 8192.0 * (1.0 - variation * rng.random(4))
            squares = tokens**2 * rng.uniform(0.1, 1.0, 4)
            seconds = TRUE.seconds(tokens, squares) * np.exp(0.015 * rng.standard_normal(4))
            predictor.observe(MIDDLE, "F", tokens, squares, seconds, rank=rank, iteration=i)
    assert error(predictor, n=np.array([8100.0, 8192.0]), s=np.array([1e7, 6e7])) < 0.02
    half = predictor.predict(MIDDLE, "F", 4096.0, 1e7)
    assert half is not None
    assert 0.0 < half < 1.1 * TRUE.seconds(8192.0, 1e7)


@pytest.mark.parametrize(
    "squares_of", [lambda n: 0.0 * n, lambda n: 0.0 * n + 1e7, lambda n: 1024.0 * n, lambda n: n**2]
)
def test_any_relation_of_squares_to_tokens_is_predicted(rng: np.random.Generator, squares_of) -> None:  # type: ignore[no-untyped-def]
    predictor = Predictor()
    for i in range(12):
        for rank in range(2):
            tokens = rng.uniform(2000.0, 8000.0, 8)
            seconds = TRUE.seconds(tokens, squares_of(tokens)) * np.exp(0.015 * rng.standard_normal(8))
            predictor.observe(MIDDLE, "F", tokens, squares_of(tokens), seconds, rank=rank, iteration=i)
    assert error(predictor, s=squares_of(N)) < 0.015


def test_work_without_attention_gets_no_negative_coefficient(rng: np.random.Generator) -> None:
    predictor = Predictor()
    matrices = Coefficients(intercept_s=0.0, per_token_s=6e-6, per_square_s=0.0)
    teach(predictor, rng, range(12), true=matrices)
    found = predictor.coefficients(MIDDLE, "F")
    assert found is not None
    assert min(found.intercept_s, found.per_token_s, found.per_square_s) >= 0.0
    assert error(predictor, true=matrices) < 0.015


# --- bad input ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_measurement_is_ignored(rng: np.random.Generator) -> None:
    predictor = Predictor()
    bad = [np.nan, 0.0, -1.0, np.inf, -np.inf]
    for i in range(12):
        tokens, squares = workload(rng, 10)
        seconds = TRUE.seconds(tokens, squares)
        seconds[:5] = bad
        predictor.observe(MIDDLE, "F", tokens, squares, seconds, rank=0, iteration=i)
        predictor.observe(MIDDLE, "F", bad, np.ones(5), np.ones(5), rank=0, iteration=i)
        predictor.observe(MIDDLE, "F", [1.0, 2.0], [1.0], [1.0, 2.0, 3.0], rank=0, iteration=i)
        predictor.observe(MIDDLE, "F", [], [], [], rank=0, iteration=i)
        predictor.observe(MIDDLE, "F", ["?"], [1.0], [1.0], rank=0, iteration=i)
        predictor.observe((1, 1, True, True), "B", tokens, squares, np.full(10, np.nan), rank=0, iteration=i)
    assert error(predictor) < 1e-6
    assert not predictor.ready((1, 1, True, True), "B")


def test_iterations_may_be_missing_and_out_of_order(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, [907, 3, 12, 11, 500, 2, 77, 78])
    assert error(predictor) < 0.015


def test_thresholds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="least <= enough <= warm_up"):
        Predictor(least=8, enough=4)


# --- afterwards -----------------------------------------------------------------------------------------------------


def test_after_the_warm_up_nothing_is_learnt_until_a_refit(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(40))
    before, revision = predictor.coefficients(MIDDLE, "F"), predictor.revision
    assert not predictor.learning
    teach(predictor, rng, range(100, 200), factors=1.5)
    assert (predictor.coefficients(MIDDLE, "F"), predictor.revision) == (before, revision)

    predictor.refit(MIDDLE)
    assert predictor.learning
    teach(predictor, rng, range(200, 207), factors=1.5)
    assert not predictor.ready(MIDDLE, "F")
    assert predictor.coefficients(MIDDLE, "F") == before
    teach(predictor, rng, [207], factors=1.5)
    assert predictor.ready(MIDDLE, "F")
    assert predictor.revision > revision
    predicted = predictor.predict(MIDDLE, "F", N, S)
    assert predicted == pytest.approx(1.5 * TRUE.seconds(N, S), rel=0.015)


def test_frozen_on_demand(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(12))
    before = predictor.coefficients(MIDDLE, "F")
    predictor.freeze()
    teach(predictor, rng, range(12, 40), factors=1.1)
    assert predictor.coefficients(MIDDLE, "F") == before


def test_a_key_that_no_longer_occurs_is_not_waited_for(rng: np.random.Generator) -> None:
    predictor = Predictor()
    teach(predictor, rng, range(5))
    teach(predictor, rng, range(5, 60), key=(2, 2, False, False))
    assert predictor.ready((2, 2, False, False), "F")
    assert not predictor.learning
    teach(predictor, rng, range(100, 101))
    assert predictor.learning


# --- other layouts --------------------------------------------------------------------------------------------------

LAYER, EMBEDDING, HEAD = (5e-4, 1.5e-6, 1e-10), (1e-4, 2e-7, 0.0), (3e-4, 2e-6, 0.0)


def truth(key: Key) -> Coefficients:
    """Work in proportion to layers, embedding and head, shared by tensor-parallel peers; launches are not shared."""
    layers, tp, embedding, head = key
    c, alpha, beta = (layers * x + embedding * e + head * h for x, e, h in zip(LAYER, EMBEDDING, HEAD, strict=True))
    return Coefficients(c, alpha / tp, beta / tp)


def taught(rng: np.random.Generator, *known: Key, noise: float = 0.015) -> Predictor:
    predictor = Predictor()
    for key in known:
        teach(predictor, rng, range(20), key=key, true=truth(key), noise=noise)
    return predictor


@pytest.mark.parametrize(
    "asked",
    [
        (5, 2, False, False),
        (2, 2, False, True),
        (3, 4, True, False),
        (4, 1, False, True),
        (12, 2, True, True),
    ],
)
def test_another_layout_is_derived_from_what_is_known(rng: np.random.Generator, asked: Key) -> None:
    predictor = taught(rng, (4, 2, True, False), (4, 2, False, False), (4, 2, False, True))
    assert predictor.known(asked, "F") == "rescaled"
    assert not predictor.ready(asked, "F")
    assert error(predictor, asked, truth(asked)) < 0.03
    assert predictor.predict(asked, "B", N, S) is None


def test_without_a_middle_stage_the_embedding_counts_as_layers_and_the_head_is_told(rng: np.random.Generator) -> None:
    predictor = taught(rng, (4, 2, True, False), (4, 2, False, True))
    assert error(predictor, (5, 2, True, False), truth((5, 2, True, False))) < 0.03
    assert error(predictor, (3, 2, False, True), truth((3, 2, False, True))) < 0.03


def test_constant_tokens_are_rescaled_as_work(rng: np.random.Generator) -> None:
    predictor = Predictor()
    true = Coefficients(0.0, 6e-6, 4e-10)
    teach(predictor, rng, range(20), true=true, constant=8192.0)
    halved = Coefficients(0.0, 3e-6, 2e-10)
    assert error(predictor, (4, 4, False, False), halved, np.array([8192.0]), np.array([3e7])) < 0.02


def test_a_degree_that_is_known_counts_more_than_another(rng: np.random.Generator) -> None:
    """Small kernels are less efficient: TP8 takes longer than a quarter of TP2."""
    predictor = taught(rng, (4, 2, False, False))
    true = truth((4, 8, False, False))
    less = Coefficients(true.intercept_s, 1.3 * true.per_token_s, 1.3 * true.per_square_s)
    teach(predictor, rng, range(20), key=(4, 8, False, False), true=less)
    asked = Coefficients(1.25 * less.intercept_s, 1.25 * less.per_token_s, 1.25 * less.per_square_s)
    assert error(predictor, (5, 8, False, False), asked) < 0.05


def test_a_derived_key_is_refitted_once_it_was_observed_long_enough(rng: np.random.Generator) -> None:
    predictor = taught(rng, (4, 2, False, False))
    new: Key = (4, 4, False, False)
    true = Coefficients(2.5e-3, 2e-6, 1.5e-10)  # not what rescaling says
    teach(predictor, rng, range(40, 47), key=new, true=true)
    assert predictor.known(new, "F") == "rescaled"
    assert error(predictor, new, true) > 0.05
    teach(predictor, rng, [47], key=new, true=true)
    assert predictor.known(new, "F") == "fitted"
    assert error(predictor, new, true) < 0.015


def test_a_new_key_is_learnt_against_keys_that_are_known(rng: np.random.Generator) -> None:
    """Eight iterations that happen to be 6 % slow for everybody do not become the new key's healthy time."""
    known, new = (4, 2, False, False), (5, 2, False, False)
    predictor = Predictor()
    teach(predictor, rng, range(40), key=known, true=truth(known))
    assert predictor.ready(known, "F")
    for i in range(40, 49):
        teach(predictor, rng, [i], key=new, true=truth(new), factors=1.06)
        teach(predictor, rng, [i], key=known, true=truth(known), factors=1.06)
    assert predictor.known(new, "F") == "fitted"
    assert error(predictor, new, truth(new)) < 0.02


def test_keys_say_what_chunks_are() -> None:
    layout = Layout(
        replicas=(
            Replica((Stage((0, 1), ((0, 1), (4, 5))), Stage((2, 3), ((2, 3), (6, 7))))),
            Replica((Stage((4,), ((0, 7),)),)),
        )
    )
    assert keys(layout) == {
        Stop(0, 0, 0): (2, 2, True, False),
        Stop(0, 0, 1): (2, 2, False, False),
        Stop(0, 1, 0): (2, 2, False, False),
        Stop(0, 1, 1): (2, 2, False, True),
        Stop(1, 0, 0): (8, 1, True, True),
    }


# --- against an oracle ----------------------------------------------------------------------------------------------


def learnt(job: Job, iterations: int) -> Floats:
    """(iterations, slots) seconds, as predicted after a warm-up fed with what ranks report."""
    predictor, key_of, compiled = Predictor(), keys(job.plan.layout), job.compiled
    for observation in job.observations():
        if observation.iteration == iterations:
            break
        for (d, s), where in compiled.lanes.items():
            kinds = compiled.kind[compiled.in_order[where]]
            for rank in job.plan.layout.replicas[d].stages[s].ranks:
                times = observation.times[rank]
                for kind in np.unique(kinds):
                    own = kinds == kind
                    predictor.observe(
                        key_of[Stop(d, s, 0)],
                        PRIMITIVE_KINDS[kind],
                        times.tokens[own],
                        times.squares[own],
                        times.compute[own],
                        rank=rank,
                        iteration=observation.iteration,
                    )
    chunks = np.empty((job.iterations, compiled.size))
    for v in range(compiled.size):
        m, key, kind = (
            compiled.micro_batch[v],
            key_of[compiled.stops[compiled.stop[v]]],
            PRIMITIVE_KINDS[compiled.kind[v]],
        )
        seconds = predictor.predict(key, kind, job.tokens[:, m], job.squares[:, m])
        assert seconds is not None
        chunks[:, v] = seconds
    return chunks


@pytest.mark.parametrize(
    "setting",
    [
        Setting(budget=8192, micro_batches=4, schedule="1f1b"),
        Setting(budget=32768, micro_batches=8, schedule="zero-bubble"),
        Setting(budget=16384, micro_batches=4, schedule="zero-bubble", pp=4),
    ],
    ids=lambda setting: f"{setting.micro_batches}x{setting.budget}-{setting.schedule}-pp{setting.pp}",
)
def test_predictions_are_nearly_as_good_as_an_oracles(setting: Setting) -> None:
    """Of chunks, and of iterations with one factor learnt in the warm-up; `benchmarks/detector.py` does it in full."""
    warm, errors = 40, []
    for seed in range(10):
        try:
            job = simulate(setting, seed, 240)
        except NoLengths as missing:
            pytest.skip(str(missing))
        chunks, true = learnt(job, warm), job.true_chunks
        iterations, oracle = job.priced(chunks), job.priced(true)
        iterations *= np.exp(np.log(job.seconds[:warm] / iterations[:warm]).mean())
        errors.append(
            [
                np.abs(chunks[warm:, :, None] / job.compute[warm:] - 1.0).mean(),
                np.abs(true[warm:, :, None] / job.compute[warm:] - 1.0).mean(),
                np.abs(iterations[warm:] / job.seconds[warm:] - 1.0).mean(),
                np.abs(oracle[warm:] / job.seconds[warm:] - 1.0).mean(),
            ]
        )
    chunk, chunk_oracle, iteration, iteration_oracle = np.mean(errors, axis=0)
    assert chunk <= 1.05 * chunk_oracle
    assert iteration <= 1.05 * iteration_oracle
