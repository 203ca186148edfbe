"""Fits Eq. 1 to the chunk times of healthy devices; the samples may include slow devices. Pure.

The model of a measured time is (c + alpha N + beta S), times a factor that all chunks of an iteration share, times the
slowness of the device, times the noise of the chunk. Factors and coefficients are estimated alternately: factors are
correlated from one iteration to the next, and would otherwise look like a dependence on the workload or bias the level.
Devices are compared over all iterations, and a device that is slower than its peers is left out before a coefficient is
fitted.

Called by `resihp.detector.online.predictor`, which chooses the samples and the time of a fit; keeps no state.
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
"""Number of alternations between coefficients and factors; both converge after three."""
START_NOISE = 0.02
"""Initial relative noise of a chunk."""
SAME_SPEED = 0.025
"""Largest relative difference between the times of equally fast devices. GPUs of one kind differ by 1 to 3 %."""
ASSUMED_CORRELATION = 0.5
"""Assumed correlation of the factors of consecutive iterations: a warm-up is too short to measure it."""
MIN_NOISE = 1e-3
"""Lower bound of the relative noise of a chunk: clocks, and float32 on the wire, have no better resolution."""


class Coefficients(msgspec.Struct, frozen=True):
    """Coefficients of Eq. 1 with an intercept, in seconds, for a chunk of N tokens and a sum of squared lengths S.

    No coefficient is negative.
    """

    intercept_s: float
    per_token_s: float
    per_square_s: float

    def seconds(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats:
        """Return the seconds of chunks; `tokens` (N) and `squares` (S) are broadcast against each other."""
        n, s = np.asarray(tokens, dtype=np.float64), np.asarray(squares, dtype=np.float64)
        seconds = np.asarray(self.per_token_s * n + self.per_square_s * s)
        seconds += self.intercept_s
        return seconds


class Samples(msgspec.Struct, frozen=True, eq=False):
    """Measured chunks of one key and kind; all arrays have shape (n,). Seconds and tokens are positive and finite."""

    iteration: Ints
    """Index of each chunk's iteration in the fit, from 0."""
    rank: Ints
    tokens: Floats
    squares: Floats
    seconds: Floats


class Fit(msgspec.Struct, frozen=True, eq=False):
    """The fit of one key and kind."""

    coefficients: Coefficients
    tokens: float
    """Mean N of the fitted chunks."""
    folded: bool
    """Whether N hardly varied, so that the intercept includes the time that depends on N."""
    noise: float
    """Relative standard deviation of a chunk's time, without the factor of its iteration."""
    uncertainty: float
    """Relative standard error of a prediction at the mean workload."""
    ratios: dict[int, float]
    """Time of each rank over its fitted time. Ranks far above 1 were left out of the fit."""
    reach: tuple[float, float, float, float]
    """Lowest and highest N, then lowest and highest S, of the samples."""


def fit(tracks: Sequence[Samples], anchors: Floats) -> list[Fit]:
    """Fit several keys and kinds together, because all chunks of an iteration share a factor.

    `tracks`: samples of each key and kind, at least one chunk each. `anchors` (iterations,): log of the iteration's
    factor if it is known from other keys, else NaN. The unknown factors are estimated; their robust mean is 1.
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
    """Indices of the coefficients that were fitted; the others are 0."""
    predicted: Floats
    """(n,): predicted seconds, without the iteration's factor."""
    weights: Floats
    """(n,): 1 for a sample that fits, down to 0 for an outlier or a slow device."""
    noise: float
    ratios: dict[int, float]


def _solve(samples: Samples, factor: Floats, before: _Solved | None) -> _Solved:
    """Fit the coefficients of one key and kind, given the log factors of iterations.

    `before`: result of the previous pass; None in the first pass. Minimises relative errors. Outliers get little
    weight, slow devices none.
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
    """Return, for each device, whether its `level` equals that of a healthy device, within `tolerance`.

    Failures only slow devices down. The reference is therefore the device at one third of the order from the fastest:
    up to two thirds may be slow, and up to one third may seem too fast.
    """
    reference = np.sort(level)[len(level) // 3]
    return np.asarray(np.abs(level / reference - 1.0) <= tolerance)


def _columns(design: Floats, weights: Floats, noise: float) -> tuple[int, ...]:
    """Return the columns of 1, N and S that can be fitted separately with samples of this noise.

    A column is fitted if the part of it that earlier columns do not explain determines its share of the time to within
    a quarter of the whole time. The effect of any other column becomes part of the earlier columns' coefficients.
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
    """Solve weighted least squares without negative coefficients, by trying every subset of at most three columns."""
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
    """Return Tukey's bisquare weights: 1 at 0, falling to 0 at 4.7 standard deviations; 95 % efficient for normal
    values."""
    return np.maximum(0.0, 1.0 - (scaled / 4.685) ** 2) ** 2


def _location(values: Floats) -> float:
    """Return Huber's location: the mean, with deviations clipped at two standard deviations."""
    centre = float(np.median(values))
    reach = 2.0 * max(1.4826 * float(np.median(np.abs(values - centre))), MIN_NOISE)
    for _ in range(10):
        centre += float(np.clip(values - centre, -reach, reach).mean())
    return centre


def _spread(values: Floats) -> float:
    """Return a robust standard deviation, with deviations clipped; infinite for a single value."""
    if values.size < 2:
        return np.inf if values.size else 0.0
    centre = _location(values)
    reach = 3.0 * max(1.4826 * float(np.median(np.abs(values - centre))), MIN_NOISE)
    return float(np.sqrt((np.clip(values - centre, -reach, reach) ** 2).sum() / (values.size - 1)))
