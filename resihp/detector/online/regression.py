"""Eq. 1 fitted to what healthy devices took, when some of what was measured is not of healthy devices. Pure.

What is measured is (c + alpha N + beta S) times a factor that everything in an iteration shares, times a device's own
slowness, times noise of the chunk. Factor and coefficients are estimated in turn: the factor, correlated from one
iteration to the next, would else look like a dependence on the workload, or pull the level after it. Devices are
compared over all iterations, and those that are slower than their peers are left out before a coefficient is fitted.

This module fits what it is given (`resihp.detector.online.predictor` decides what, and when); it keeps nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.observation import Floats

Ints = npt.NDArray[np.intp]

PASSES = 4
"""Coefficients, then factors, so often: both settle after three."""
START_NOISE = 0.02
"""Of a chunk, relative, before any is known."""
SAME_SPEED = 0.025
"""Devices whose times differ by less are alike. GPUs of one kind differ by 1 to 3 %."""
CORRELATION = 0.5
"""Assumed of the iterations' factors when telling how sure their mean is: a warm-up is too short to measure it."""
LEAST_NOISE = 1e-3
"""Clocks and float32 on the wire are no better, relative to a chunk."""


class Coefficients(msgspec.Struct, frozen=True):
    """Eq. 1 with an intercept: seconds of a chunk of N tokens whose squared lengths sum up to S. None is negative."""

    intercept_s: float
    per_token_s: float
    per_square_s: float

    def seconds(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> Floats:
        """Broadcasts N and S against each other."""
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
    """What was learnt of one key and kind."""

    coefficients: Coefficients
    tokens: float
    """Mean N of the chunks that it was learnt from."""
    folded: bool
    """N hardly varied: what depends on it is in the intercept."""
    noise: float
    """Standard deviation of a chunk, relative, the iteration's factor apart."""
    uncertainty: float
    """Standard error of a prediction at the mean workload, relative."""
    ratios: dict[int, float]
    """Of each rank: its times over the fitted ones. Those far above 1 were left out."""
    reach: tuple[float, float, float, float]
    """Least and most N, least and most S of the chunks that it was learnt from."""


def fit(tracks: Sequence[Samples], anchors: Floats) -> list[Fit]:
    """Fit tracks that were observed in the same iterations, each with at least one chunk.

    `anchors` (iterations,): log of the iteration's factor where it is known from elsewhere, else NaN. The level of the
    others is taken from the tracks themselves: their factors are 1 in the (robust) mean.
    """
    factor = np.where(np.isnan(anchors), 0.0, anchors)
    free = np.isnan(anchors)
    solved = [_solve(track, factor, None) for track in tracks]
    for done in range(PASSES):
        if done:
            solved = [_solve(track, factor, before) for track, before in zip(tracks, solved, strict=True)]
        total, weight = np.zeros(factor.size), np.zeros(factor.size)
        for track, found in zip(tracks, solved, strict=True):
            precision = found.weights / found.noise**2
            offset = np.log(track.seconds / found.predicted)
            total += np.bincount(track.iteration, precision * offset, factor.size)
            weight += np.bincount(track.iteration, precision, factor.size)
        seen = free & (weight > 0.0)
        if seen.any():
            own = total[seen] / weight[seen]
            factor[seen] = own - _location(own)
    return [_fit(track, found, factor, free) for track, found in zip(tracks, solved, strict=True)]


class _Solved(msgspec.Struct, frozen=True, eq=False):
    coefficients: Floats
    """(3,): c, alpha, beta."""
    columns: tuple[int, ...]
    predicted: Floats
    """(n,), the iteration's factor apart."""
    weights: Floats
    """(n,): 1 for a sample that is believed, 0 for one that is not."""
    noise: float
    ratios: dict[int, float]


def _solve(samples: Samples, factor: Floats, before: _Solved | None) -> _Solved:
    """Coefficients for given factors, from those of the pass before: relative errors, robust, slow devices left out."""
    seconds = samples.seconds / np.exp(factor[samples.iteration])
    design = np.stack([np.ones_like(seconds), samples.tokens, samples.squares], axis=1)
    ranks, of_rank = np.unique(samples.rank, return_inverse=True)
    chunks_of = [np.flatnonzero(of_rank == i) for i in range(len(ranks))]
    if before is None:
        noise = START_NOISE
        start = 1.0 / np.maximum(seconds, np.median(seconds)) ** 2  # an outlier counts little, whatever its size
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
        noise = max(1.4826 * float(np.median(np.abs(residual[healthy]))), LEAST_NOISE)
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
    """Which devices are as fast as healthy ones, from their times: failures slow down, so the fast ones are right.

    Healthy is whoever has a third of the devices before it: two thirds may be slow, and a third seem too fast.
    """
    reference = np.sort(level)[len(level) // 3]
    return np.asarray(np.abs(level / reference - 1.0) <= tolerance)


def _columns(design: Floats, weights: Floats, noise: float) -> tuple[int, ...]:
    """Which of 1, N, S can be told apart with samples of that noise; the others are folded into those before them.

    A column counts if what is left of it, once those before are taken out, tells its share of the time to within a
    quarter of the whole.
    """
    kept: list[int] = []
    basis: list[Floats] = []
    root = np.sqrt(weights)
    for column in range(design.shape[1]):
        scaled = design[:, column] * root
        rest = scaled.copy()
        for direction in (*basis, *basis):  # twice: rounding
            rest -= direction * (direction @ rest)
        size, left = float(np.linalg.norm(scaled)), float(np.linalg.norm(rest))
        if size == 0.0 or left < 1e-7 * size:
            continue
        # of relative weights root * seconds = 1, so that a column's share of the time has an error of noise / left
        if kept and noise * size / (left * np.sqrt(np.count_nonzero(root))) > 0.25:
            continue
        kept.append(column)
        basis.append(rest / left)
    return tuple(kept)


def non_negative(design: Floats, seconds: Floats, weights: Floats, columns: Sequence[int]) -> Floats:
    """Weighted least squares with no negative coefficient, by trying which of at most three are zero."""
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
                found = np.linalg.solve(gram[part], moment[list(chosen)])
            except np.linalg.LinAlgError:
                continue
            if not (found >= 0.0).all():
                continue
            loss = float(found @ gram[part] @ found - 2.0 * found @ moment[list(chosen)])
            if loss < least:
                least = loss
                best = np.zeros(design.shape[1])
                best[list(chosen)] = found
        if count == len(columns) and np.isfinite(least):
            break  # nothing to hold at zero
    return np.asarray(best / scale)


def _fit(samples: Samples, found: _Solved, factor: Floats, free: npt.NDArray[np.bool_]) -> Fit:
    believed = found.weights > 0.0
    iterations = np.unique(samples.iteration[believed])
    own = iterations[free[iterations]]
    correlated = (1.0 + CORRELATION) / (1.0 - CORRELATION)
    share = own.size / max(1, iterations.size)  # anchored iterations say what the level is
    of_level = share**2 * _spread(factor[own]) ** 2 * correlated / max(1, own.size)
    of_chunks = found.noise**2 * len(found.columns) / max(1, int(np.count_nonzero(believed)))
    return Fit(
        coefficients=Coefficients(*map(float, found.coefficients)),
        tokens=float(samples.tokens[believed].mean()) if believed.any() else float(samples.tokens.mean()),
        folded=1 not in found.columns,
        noise=found.noise,
        uncertainty=float(np.sqrt(of_level + of_chunks)) if believed.any() else np.inf,
        ratios=found.ratios,
        reach=(
            float(samples.tokens.min()),
            float(samples.tokens.max()),
            float(samples.squares.min()),
            float(samples.squares.max()),
        ),
    )


def _bisquare(scaled: Floats) -> Floats:
    """Tukey's weights: 1 in the middle, 0 from 4.7 standard deviations on; 95 % efficient for a normal distribution."""
    return np.maximum(0.0, 1.0 - (scaled / 4.685) ** 2) ** 2


def _location(values: Floats) -> float:
    """Huber's location: the mean, but what lies beyond two standard deviations counts no more than that."""
    centre = float(np.median(values))
    reach = 2.0 * max(1.4826 * float(np.median(np.abs(values - centre))), LEAST_NOISE)
    for _ in range(10):
        centre += float(np.clip(values - centre, -reach, reach).mean())
    return centre


def _spread(values: Floats) -> float:
    """Standard deviation; as robust as the location."""
    if values.size < 2:
        return np.inf if values.size else 0.0
    centre = _location(values)
    reach = 3.0 * max(1.4826 * float(np.median(np.abs(values - centre))), LEAST_NOISE)
    return float(np.sqrt((np.clip(values - centre, -reach, reach) ** 2).sum() / (values.size - 1)))
