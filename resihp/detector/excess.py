"""Picks the counts that are higher than chance allows, and limits the share of false picks.

Each count is compared with the rate of all other counts by its exact tail probability. A count has one tail probability
per time window. The windows divide the accepted error probability among them (`shares`), so that the minimum of
tail / share over the windows is a probability again (weighted Bonferroni). Over all counts, Benjamini and Hochberg's
step-up procedure decides. A picked count is removed from the reference, and the rate of the others is computed again.

Takes and returns arrays; knows nothing of nodes, devices and time. Called by `lemons`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.intp]

MAX_TAIL_PROBABILITY = 1e-3
"""Highest tail probability of a picked count, however many others stand out. About 1 of 2,000 identical nodes is
picked, not 2, because counts are whole numbers and windows overlap (`benchmarks/lemons.py`)."""
MAX_ROUNDS = 10
"""Limit on the rounds, each of which picks counts and computes the rate again; two or three are usual."""
RATE_ERROR = 0.05
"""One-sided error probability of the lower bound on the rate of the other counts."""
TRUNCATION_QUANTILE = 0.95
"""Quantile of the Poisson distribution with the fleet's mean rate. Counts above it are left out when the spread of
rates is fitted, so that outliers do not count as spread."""
MIN_COUNTS = 20
"""Smallest number of nodes, and smallest sum of counts, from which the spread of rates can be estimated."""
OVERDISPERSION_THRESHOLD = 3.84
"""Smallest value of twice the gain in log-likelihood at which a fleet counts as overdispersed (chi-square, one degree
of freedom, 5 %)."""
POISSON_SHAPE = 1e6
"""Shape of a Gamma distribution so narrow that all rates are equal, and counts are Poisson."""
MAX_SHAPE, MIN_SHAPE = 1e3, 1.0
"""Range of Gamma shapes that is searched; a small shape is a wide spread of rates. The minimum, 1, is an exponential
distribution. A smaller shape would excuse every node of a fleet with bursts of failures, which look like spread: even a
node with 9 outages where 0.4 are expected."""
EXPOSURE_GROUPS = 8
"""Number of groups of similar exposure in which counts are tabulated to fit the spread."""


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """Result for n counts; all arrays have shape (n,).

    `window`: index of the most significant window; `expected`: expected count in that window; `p`: tail probability
    over all windows; `q`: expected share of false picks among all counts that are at least as significant; `picked`:
    whether the count is higher than chance allows.
    """

    window: Whole
    expected: Floats
    p: Floats
    q: Floats
    picked: npt.NDArray[np.bool_]


def excess(
    counts: Floats,
    exposure: Floats,
    shares: Sequence[float],
    *,
    shape: float,
    usual_rate: float,
    false: float,
    least: int,
    others_exposure: Floats | None = None,
    others_number: int = 0,
) -> Excess:
    """Pick the counts that are higher than chance allows.

    `counts`: whole numbers, and `exposure`: their exposure (such as device-hours), both of shape (n, windows); the last
    window is the longest. `shares`: share of each window in the error probability, sum 1. `shape`: Gamma shape of the
    rates (`dispersion`). `usual_rate`: prior rate per unit of exposure, with the weight of one count. `false`: accepted
    share of false picks. `least`: smallest count in the longest window that may be picked. `others_exposure`, shape
    (windows,): exposure of `others_number` further members without any count.
    """
    more_exposure = np.zeros(counts.shape[1]) if others_exposure is None else others_exposure
    picked = np.zeros(len(counts), dtype=np.bool_)
    for _ in range(MAX_ROUNDS):
        rate, weight = rate_of_others(counts, exposure, ~picked, more_exposure, usual_rate)
        expected = rate * exposure
        tails = tail(counts, expected, 1.0 / (1.0 / shape + 1.0 / weight))
        tails[exposure <= 0.0] = 1.0  # without exposure nothing is expected
        weighed = tails / np.asarray(shares)
        p = np.minimum(weighed.min(axis=1, initial=1.0), 1.0)
        q = false_share(np.where(counts[:, -1] >= least, p, 1.0), others_number)
        selected = (q <= false) & (p <= MAX_TAIL_PROBABILITY)
        if not (selected & ~picked).any():
            break
        picked |= selected
    window = np.where(p < 1.0, weighed.argmin(axis=1), counts.shape[1] - 1)
    expected_in_window = expected[np.arange(len(counts)), window]
    return Excess(window=window.astype(np.intp), expected=expected_in_window, p=p, q=q, picked=selected)


def tail(counts: Floats, expected: Floats, shape: Floats) -> Floats:
    """Return P(X >= count) exactly, for a Poisson X. The mean of X is Gamma-distributed with mean `expected` and
    `shape`."""
    chance = special.betainc(np.maximum(counts, 1.0), shape, expected / (expected + shape))
    return np.asarray(np.where(counts < 1.0, 1.0, chance), dtype=np.float64)


def rate_of_others(
    counts: Floats, exposure: Floats, kept: npt.NDArray[np.bool_], more_exposure: Floats, usual_rate: float
) -> tuple[Floats, Floats]:
    """Return, for each count, the rate of all other counts, and the weight of this rate in counts; shapes (n, windows).

    Only counts marked in `kept`, and `more_exposure` without counts, contribute. The prior is one count in
    1 / `usual_rate` units of exposure; the weight is the shape of the conjugate posterior. If the lower bound of the
    others' rate (`RATE_ERROR`) is higher than the posterior mean, the bound is the rate.
    """
    counts_of_others, exposure_of_others = np.where(kept[:, None], counts, 0.0), np.where(kept[:, None], exposure, 0.0)
    counts_of_others, exposure_of_others = (
        counts_of_others.sum(axis=0) - counts_of_others,
        np.maximum(exposure_of_others.sum(axis=0) + more_exposure - exposure_of_others, 0.0),
    )
    rate = (counts_of_others + 1.0) / (exposure_of_others + 1.0 / usual_rate)
    lower_bound = special.gammaincinv(np.maximum(counts_of_others, 1.0), RATE_ERROR) / np.maximum(
        exposure_of_others, 1e-9
    )
    return np.where(
        (counts_of_others > 0.0) & (exposure_of_others > 0.0), np.maximum(rate, lower_bound), rate
    ), counts_of_others + 1.0


def false_share(p: Floats, others_number: int = 0) -> Floats:
    """Return, for each count, the expected share of false picks if it and all less probable counts were picked.

    This is the adjusted p of Benjamini and Hochberg, in the shape of `p`. `others_number`: number of further members
    with p = 1.
    """
    order = np.argsort(p, kind="stable")
    steps = p[order] * (len(p) + others_number) / np.arange(1, len(p) + 1)
    shares = np.empty_like(p)
    shares[order] = np.minimum.accumulate(steps[::-1])[::-1]
    return np.minimum(shares, 1.0)


def dispersion(counts: Floats, exposure: Floats) -> float:
    """Return the Gamma shape of the rates of a fleet, or `POISSON_SHAPE` if the rates do not differ significantly.

    Fits shape and mean by maximum likelihood to all counts up to a cap (`TRUNCATION_QUANTILE`), as a truncated
    distribution. Counts above the cap are left out whether or not they will be picked, so that the fit does not depend
    on the picks.
    """
    served = exposure > 0.0
    counts, exposure = counts[served], exposure[served]
    if len(counts) < MIN_COUNTS or counts.sum() < MIN_COUNTS:
        return POISSON_SHAPE
    from scipy import optimize  # takes as long to import as everything else together

    mean = counts.sum() / exposure.sum()
    groups = [part for part in np.array_split(np.argsort(exposure, kind="stable"), EXPOSURE_GROUPS) if len(part)]
    exposures = np.array([exposure[part].mean() for part in groups])
    caps = np.array([_cap(mean * exposure) for exposure in exposures])
    tables = [
        np.unique(counts[part][counts[part] <= cap], return_counts=True) for part, cap in zip(groups, caps, strict=True)
    ]
    group = np.repeat(np.arange(len(groups)), [len(values) for values, _ in tables])
    values = np.concatenate([values for values, _ in tables])
    multiplicity = np.concatenate([number for _, number in tables]).astype(np.float64)

    def surprise(log_mean: float, log_shape: float) -> float:
        shape, expected = np.exp(log_shape), np.exp(log_mean) * exposures
        below = np.log1p(-special.betainc(caps + 1.0, shape, expected / (expected + shape)))
        log_likelihood = (
            special.gammaln(shape + values)
            - special.gammaln(shape)
            - special.gammaln(values + 1.0)
            + shape * np.log1p(-(expected / (expected + shape)))[group]
            + special.xlogy(values, (expected / (expected + shape))[group])
        )
        return -float(multiplicity @ (log_likelihood - below[group]))

    log_mean_rate = float(np.log(mean))

    def best_surprise(log_shape: float) -> float:
        best = optimize.minimize_scalar(
            lambda log_mean: surprise(log_mean, log_shape),
            bounds=(log_mean_rate - 2.0, log_mean_rate + 2.0),
            method="bounded",
        )
        return float(best.fun)

    spread = optimize.minimize_scalar(best_surprise, bounds=(np.log(MIN_SHAPE), np.log(MAX_SHAPE)), method="bounded")
    return (
        float(np.exp(spread.x))
        if 2.0 * (best_surprise(np.log(POISSON_SHAPE)) - spread.fun) > OVERDISPERSION_THRESHOLD
        else POISSON_SHAPE
    )


def _cap(expected: float) -> float:
    """Return the `TRUNCATION_QUANTILE` of the Poisson distribution with mean `expected`, at least 2."""
    return max(2.0, float(np.ceil(special.pdtrik(TRUNCATION_QUANTILE, expected))))
