"""Fits Eq. 1 to the times of healthy devices, from measurements that include slow ones. Pure.

A measured time is (c + alpha N + beta S) times a factor shared by everything in an iteration, times the device's own
slowness, times the chunk's noise. Factor and coefficients are estimated in turn: the factor is correlated from one
iteration to the next, and would otherwise look like a dependence on the workload, or bias the level. Devices are
compared over all iterations, and those slower than their peers are left out before a coefficient is fitted.

Fits the given samples (`resihp.detector.online.predictor` chooses them, and the time); keeps no state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.observation import Floats

Ints = npt.NDArray[np.intp]

FIT_PASSES = 4
"""Number of alternations between coefficients and factors: both settle after three."""
START_NOISE = 0.02
"""Initial relative noise of a chunk."""
SAME_SPEED = 0.025
"""Devices whose times differ by less, relative, count as equally fast. GPUs of one kind differ by 1 to 3 %."""
ASSUMED_CORRELATION = 0.5
"""Assumed correlation of the iterations' factors for the error of their mean: a warm-up is too short to measure it."""
MIN_NOISE = 1e-3
"""Lower bound of the relative noise of a chunk: clocks, and float32 on the wire, are no better."""


class Coefficients(msgspec.Struct, frozen=True):
    """Eq. 1 with an intercept: seconds of a chunk of N tokens with sum of squared lengths S. None is negative."""

    intercept_s: float
    per_token_s: float
    per_square_s: float

    def seconds(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats:
        """Return seconds; broadcasts N and S against each other."""
        n, s = np.asarray(tokens, dtype=np.float64), np.asarray(squares, dtype=np.float64)
        seconds = np.asarray(self.per_token_s * n + self.per_square_s * s)
        seconds += self.intercept_s
        return seconds


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Chunks of one key and kind; all arrays (n,). Seconds and tokens are positive and finite."""

    iteration: Ints
    """Index of the iteration, from 0."""
    rank: Ints
    tokens: Floats
    squares: Floats
    seconds: Floats


class Fit(msgspec.Struct, frozen=True, eq=False):
    """Result for one key and kind."""

    coefficients: Coefficients
    tokens: float
    """Mean N of the chunks behind the fit."""
    folded: bool
    """Whether N hardly varied, so that the part that depends on it is in the intercept."""
    noise: float
    """Standard deviation of a chunk, relative, without the iteration's factor."""
    uncertainty: float
    """Standard error of a prediction at the mean workload, relative."""
    ratios: dict[int, float]
    """By rank: its times over the fitted ones. Ranks far above 1 were left out."""
    reach: tuple[float, float, float, float]
    """Lowest and highest N, lowest and highest S of the chunks behind the fit."""


def fit(tracks: Sequence[Samples], anchors: Floats) -> list[Fit]:
    """Fit tracks that were observed in the same iterations, each with at least one chunk.

    `anchors` (iterations,): log of the iteration's factor if it is known from other tracks, else NaN. The level of the
    free factors is taken from the tracks themselves: their (robust) mean is 1.
    """
    factor = np.where(np.isnan(anchors), 0.0, anchors)
    free = np.isnan(anchors)
    solved = [_solve(track, factor, None) for track in tracks]
    for done in range(FIT_PASSES):
        if done:
            solved = [_solve(track, factor, before) for track, before in zip(tracks, solved, strict=True)]
        total, weight = np.zeros(factor.size), np.zeros(factor.size)
        for track, solution in zip(tracks, solved, strict=True):
            precision = solution.weights / solution.noise**2
            offset = np.log(track.seconds / solution.predicted)
            total += np.bincount(track.iteration, precision * offset, factor.size)
            weight += np.bincount(track.iteration, precision, factor.size)
        observed = free & (weight > 0.0)
        if observed.any():
            own = total[observed] / weight[observed]
            factor[observed] = own - _location(own)
    return [_fit(track, solution, factor, free) for track, solution in zip(tracks, solved, strict=True)]


class _Solved(msgspec.Struct, frozen=True, eq=False):
    coefficients: Floats
    """(3,): c, alpha, beta."""
    columns: tuple[int, ...]
    predicted: Floats
    """(n,), without the iteration's factor."""
    weights: Floats
    """(n,): 1 for a sample that fits, down to 0 for an outlier or a slow device."""
    noise: float
    ratios: dict[int, float]


def _solve(samples: Samples, factor: Floats, before: _Solved | None) -> _Solved:
    """Fit the coefficients for given factors of iterations, starting from the previous pass.

    Minimises relative errors. Outliers get little weight, slow devices none.
    """
    seconds = samples.seconds / np.exp(factor[samples.iteration])
    design = np.stack([np.ones_like(seconds), samples.tokens, samples.squares], axis=1)
    ranks, of_rank = np.unique(samples.rank, return_inverse=True)
    chunks_of = [np.flatnonzero(of_rank == i) for i in range(len(ranks))]
    if before is None:
        noise = START_NOISE
        start = 1.0 / np.maximum(seconds, np.median(seconds)) ** 2  # limits the weight of outliers of any size
        predicted = _predicted(design, non_negative(design, seconds, start, _columns(design, start, noise)))
    else:
        noise, predicted = before.noise, before.predicted
    for _ in range(1 if before else 3):
        relative = seconds / predicted
        level = np.array([np.median(relative[own]) for own in chunks_of])
        counts = np.array([own.size for own in chunks_of])
        healthy = _alike(level, np.maximum(SAME_SPEED, 4.0 * noise / np.sqrt(counts)))[of_rank]
        reference = float(np.median(relative[healthy]))
        residual = relative / reference - 1.0
        noise = max(1.4826 * float(np.median(np.abs(residual[healthy]))), MIN_NOISE)
        weights = np.where(healthy, _bisquare(residual / noise), 0.0)
        scaled = weights / predicted**2
        columns = _columns(design, scaled, noise)
        theta = non_negative(design, seconds, scaled, columns)
        predicted = _predicted(design, theta)
    ratios = dict(zip(ranks.tolist(), (level / reference).tolist(), strict=True))
    return _Solved(theta, columns, predicted, weights, noise, ratios)


def _predicted(design: Floats, theta: Floats) -> Floats:
    return np.maximum(design @ theta, 1e-300)


def _alike(level: Floats, tolerance: Floats) -> npt.NDArray[np.bool_]:
    """Return, by device, whether it is as fast as a healthy one: failures slow down, so the fast devices are right.

    The reference is the device at one third of the order: two thirds may be slow, and a third may seem too fast.
    """
    reference = np.sort(level)[len(level) // 3]
    return np.asarray(np.abs(level / reference - 1.0) <= tolerance)


def _columns(design: Floats, weights: Floats, noise: float) -> tuple[int, ...]:
    """Return those of 1, N, S whose effects can be separated with samples of that noise; others fold into earlier ones.

    A column counts if its remainder, after the earlier columns are taken out, determines its share of the time to
    within a quarter of the whole.
    """
    kept: list[int] = []
    basis: list[Floats] = []
    root = np.sqrt(weights)
    for column in range(design.shape[1]):
        scaled = design[:, column] * root
        rest = scaled.copy()
        for direction in (*basis, *basis):  # twice, against rounding errors
            rest -= direction * (direction @ rest)
        size, remainder = float(np.linalg.norm(scaled)), float(np.linalg.norm(rest))
        if size == 0.0 or remainder < 1e-7 * size:
            continue
        # relative weights make root * seconds = 1, so that a column's share of the time has an error of noise /
        # remainder
        if kept and noise * size / (remainder * np.sqrt(np.count_nonzero(root))) > 0.25:
            continue
        kept.append(column)
        basis.append(rest / remainder)
    return tuple(kept)


def non_negative(design: Floats, seconds: Floats, weights: Floats, columns: Sequence[int]) -> Floats:
    """Solve weighted least squares without negative coefficients, by trying which of at most three are zero."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0.0] = 1.0
    scaled = design / scale
    gram = scaled.T @ (scaled * weights[:, None])
    moment = scaled.T @ (weights * seconds)
    best, least = np.zeros(design.shape[1]), np.inf
    for count in range(len(columns), 0, -1):
        for chosen in itertools.combinations(columns, count):
            part = np.ix_(chosen, chosen)
            try:
                candidate = np.linalg.solve(gram[part], moment[list(chosen)])
            except np.linalg.LinAlgError:
                continue
            if not (candidate >= 0.0).all():
                continue
            loss = float(candidate @ gram[part] @ candidate - 2.0 * candidate @ moment[list(chosen)])
            if loss < least:
                least = loss
                best = np.zeros(design.shape[1])
                best[list(chosen)] = candidate
        if count == len(columns) and np.isfinite(least):
            break  # no coefficient needs to be held at zero
    return np.asarray(best / scale)


def _fit(samples: Samples, solution: _Solved, factor: Floats, free: npt.NDArray[np.bool_]) -> Fit:
    believed = solution.weights > 0.0
    iterations = np.unique(samples.iteration[believed])
    own = iterations[free[iterations]]
    correlated = (1.0 + ASSUMED_CORRELATION) / (1.0 - ASSUMED_CORRELATION)
    share = own.size / max(1, iterations.size)  # anchored iterations have a known level
    of_level = share**2 * _spread(factor[own]) ** 2 * correlated / max(1, own.size)
    of_chunks = solution.noise**2 * len(solution.columns) / max(1, int(np.count_nonzero(believed)))
    return Fit(
        coefficients=Coefficients(*map(float, solution.coefficients)),
        tokens=float(samples.tokens[believed].mean()) if believed.any() else float(samples.tokens.mean()),
        folded=1 not in solution.columns,
        noise=solution.noise,
        uncertainty=float(np.sqrt(of_level + of_chunks)) if believed.any() else np.inf,
        ratios=solution.ratios,
        reach=(
            float(samples.tokens.min()),
            float(samples.tokens.max()),
            float(samples.squares.min()),
            float(samples.squares.max()),
        ),
    )


def _bisquare(scaled: Floats) -> Floats:
    """Return Tukey's weights: 1 in the middle, 0 from 4.7 standard deviations on; 95 % efficient for normal values."""
    return np.maximum(0.0, 1.0 - (scaled / 4.685) ** 2) ** 2


def _location(values: Floats) -> float:
    """Return Huber's location: the mean, with deviations clipped at two standard deviations."""
    centre = float(np.median(values))
    reach = 2.0 * max(1.4826 * float(np.median(np.abs(values - centre))), MIN_NOISE)
    for _ in range(10):
        centre += float(np.clip(values - centre, -reach, reach).mean())
    return centre


def _spread(values: Floats) -> float:
    """Return the standard deviation, as robust as the location."""
    if values.size < 2:
        return np.inf if values.size else 0.0
    centre = _location(values)
    reach = 3.0 * max(1.4826 * float(np.median(np.abs(values - centre))), MIN_NOISE)
    return float(np.sqrt((np.clip(values - centre, -reach, reach) ** 2).sum() / (values.size - 1)))
