"""Which of many counts are higher than chance allows: exact tails against the rate of all others, with the false ones
among those that are picked held down. Arrays in, arrays out; knows no nodes and no time. Called by `lemons`.

A count that is looked at in several windows has a tail probability in each. The windows share the error (`SHARES`), so
that the least of tail / share is a probability, too (weighted Bonferroni); over all counts, Benjamini and Hochberg's
step-up procedure decides. Who is picked no longer belongs to the others: the rate is taken anew without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import special

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.intp]

MOST_PROBABLE = 1e-3
"""Nobody is picked whose count chance explains better than this, however many others stand out. As counts are whole and
windows overlap, it makes about 1 of 2,000 that are all alike stand out, not 2 (`benchmarks/lemons.py`)."""
ROUNDS = 10
"""Of picking and taking the rate anew, at most; two or three are usual."""
CERTAIN = 0.05
"""The rate of others is not taken to be lower than they show with an error of this."""
BULK = 0.95
"""Share of counts that a Poisson fleet of the mean rate would have up to the cap above which the spread is not judged
by: what stands out must not pass for spread."""
FEW = 20
"""Of fewer counts, or counted things, the spread cannot be told."""
SPREAD = 3.84
"""Twice the log-likelihood that a fleet must gain to be taken as overdispersed (chi-square, one degree, 5 %)."""
EVEN = 1e6
"""Shape of a Gamma distribution that is as good as a point: the counts are Poisson."""
LEAST_SPREAD, MOST_SPREAD = 1e3, 1.0
"""Shapes between which one is looked for. The least is of rates that differ exponentially: a fleet in which bursts look
like more spread would excuse everybody, even for 9 outages where 0.4 are expected."""
GROUPS = 8
"""Of similar exposure, in which counts are tabulated to fit the spread."""


class Excess(msgspec.Struct, frozen=True, kw_only=True):
    """Of n counts: the window that tells most, by index, the count expected in it, the tail probability over all
    windows, the share of false ones among all that are at least as conspicuous, and who is picked. Shapes (n,)."""

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
    """Judge `counts`, whole, that were seen in `exposure`, both of shape (n, windows), the last window the longest.

    `shares` of the error by window, sum 1; `shape` of the rates' distribution (`dispersion`); `usual_rate` for one
    exposure, presumed with the weight of one count; `false`: accepted share of false ones among the picked. Counts
    below `least` in the longest window are not picked. `others_exposure`, shape (windows,): in which `others_number`
    more had no count at all.
    """
    nothing = np.zeros(counts.shape[1]) if others_exposure is None else others_exposure
    picked = np.zeros(len(counts), dtype=np.bool_)
    for _ in range(ROUNDS):
        rate, weight = rate_of_others(counts, exposure, ~picked, nothing, usual_rate)
        expected = rate * exposure
        tails = tail(counts, expected, 1.0 / (1.0 / shape + 1.0 / weight))
        tails[exposure <= 0.0] = 1.0  # nothing can be expected of who is not known to have served
        weighed = tails / np.asarray(shares)
        p = np.minimum(weighed.min(axis=1, initial=1.0), 1.0)
        q = false_share(np.where(counts[:, -1] >= least, p, 1.0), others_number)
        found = (q <= false) & (p <= MOST_PROBABLE)
        if not (found & ~picked).any():
            break
        picked |= found
    window = np.where(p < 1.0, weighed.argmin(axis=1), counts.shape[1] - 1)
    told = expected[np.arange(len(counts)), window]
    return Excess(window=window.astype(np.intp), expected=told, p=p, q=q, picked=found)


def tail(counts: Floats, expected: Floats, shape: Floats) -> Floats:
    """P(X >= count) of X that is Poisson with a Gamma-distributed mean of this expectation and shape, exactly."""
    chance = special.betainc(np.maximum(counts, 1.0), shape, expected / (expected + shape))
    return np.asarray(np.where(counts < 1.0, 1.0, chance), dtype=np.float64)


def rate_of_others(
    counts: Floats, exposure: Floats, kept: npt.NDArray[np.bool_], more_exposure: Floats, usual_rate: float
) -> tuple[Floats, Floats]:
    """Rate of all others that are `kept`, and by how many counts' weight it is known; shapes (n, windows).

    One count in 1 / `usual_rate` is presumed, and the weight is the conjugate posterior's shape. Where others show for
    certain that their rate is higher than that (`CERTAIN`), it is what they show.
    """
    seen, over = np.where(kept[:, None], counts, 0.0), np.where(kept[:, None], exposure, 0.0)
    seen, over = seen.sum(axis=0) - seen, np.maximum(over.sum(axis=0) + more_exposure - over, 0.0)
    rate = (seen + 1.0) / (over + 1.0 / usual_rate)
    shown = special.gammaincinv(np.maximum(seen, 1.0), CERTAIN) / np.maximum(over, 1e-9)
    return np.where((seen > 0.0) & (over > 0.0), np.maximum(rate, shown), rate), seen + 1.0


def false_share(p: Floats, others_number: int = 0) -> Floats:
    """Benjamini-Hochberg: of all that are at least as improbable as this one, the share expected to be false; shape of
    `p`. `others_number` more were asked about, and are as probable as can be."""
    order = np.argsort(p, kind="stable")
    steps = p[order] * (len(p) + others_number) / np.arange(1, len(p) + 1)
    found = np.empty_like(p)
    found[order] = np.minimum.accumulate(steps[::-1])[::-1]
    return np.minimum(found, 1.0)


def dispersion(counts: Floats, exposure: Floats) -> float:
    """Shape of the Gamma distribution of the rates, `EVEN` where counts are not overdispersed for sure.

    Likeliest shape and mean for the counts up to a cap, as truncated there (`BULK`): the few that stand out are left
    out of it, whoever they are, and nobody is left out by what is asked of him.
    """
    served = exposure > 0.0
    counts, exposure = counts[served], exposure[served]
    if len(counts) < FEW or counts.sum() < FEW:
        return EVEN
    from scipy import optimize  # takes as long to import as all else

    mean = counts.sum() / exposure.sum()
    groups = [part for part in np.array_split(np.argsort(exposure, kind="stable"), GROUPS) if len(part)]
    over = np.array([exposure[part].mean() for part in groups])
    caps = np.array([_cap(mean * each) for each in over])
    tables = [
        np.unique(counts[part][counts[part] <= cap], return_counts=True) for part, cap in zip(groups, caps, strict=True)
    ]
    group = np.repeat(np.arange(len(groups)), [len(values) for values, _ in tables])
    values = np.concatenate([values for values, _ in tables])
    often = np.concatenate([number for _, number in tables]).astype(np.float64)

    def surprise(log_mean: float, log_shape: float) -> float:
        shape, expected = np.exp(log_shape), np.exp(log_mean) * over
        below = np.log1p(-special.betainc(caps + 1.0, shape, expected / (expected + shape)))
        each = (
            special.gammaln(shape + values)
            - special.gammaln(shape)
            - special.gammaln(values + 1.0)
            + shape * np.log1p(-(expected / (expected + shape)))[group]
            + special.xlogy(values, (expected / (expected + shape))[group])
        )
        return -float(often @ (each - below[group]))

    at = float(np.log(mean))

    def least(log_shape: float) -> float:
        best = optimize.minimize_scalar(
            lambda log_mean: surprise(log_mean, log_shape), bounds=(at - 2.0, at + 2.0), method="bounded"
        )
        return float(best.fun)

    spread = optimize.minimize_scalar(least, bounds=(np.log(MOST_SPREAD), np.log(LEAST_SPREAD)), method="bounded")
    return float(np.exp(spread.x)) if 2.0 * (least(np.log(EVEN)) - spread.fun) > SPREAD else EVEN


def _cap(expected: float) -> float:
    """The least count, of 2 or more, up to which `BULK` of Poisson counts are."""
    return max(2.0, float(np.ceil(special.pdtrik(BULK, expected))))
