"""When a series of a recorded trace is slow: runs of steps, told from noise that the whole trace shows. Pure.

`resihp.detector.sequential.peer_cusum` does this while a job runs, and has to learn levels and noise first. A trace is
read to its end before anything is judged, so that all of it says how much healthy ranks scatter, and ranks that are
slow from its first step need no bounds on what may be learnt. The test itself is sequential all the same, a one-sided
CUSUM (Page, 1954) of the log-likelihood for a shift: `detected` is the step with which an onlooker would have known.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from resihp.detector.offline.analysis import Where
from resihp.detector.offline.traces import Floats, Ints

FALSE_ALARM_EVERY = 100_000.0
"""Steps between false alarms of all series together, if noise is Gaussian: the CUSUM's threshold is the log of this
times their number (Lorden, 1971)."""
MOST = 2.5
"""Share of the threshold that one step can carry, inverted: two outliers in a row are no slow-down. In
traces of one or two steps they have to be."""
SHARP = 2.0
"""Shifts looked for are as large as this many standard deviations at least: noise is never quite Gaussian."""
STEADIEST = 0.004
"""No series is taken for steadier than this, log units."""
OFFSET = 0.05
"""Healthy ranks of one kind differ by up to so much for good, log units."""
CORRELATED = 0.95
"""Most that a step is taken to resemble the one before."""
FEW = 4
"""Fewer values than this say nothing about scatter."""
NORMAL_QUARTILE, NORMAL_DECILE, NORMAL_TAIL = 0.6745, 1.2816, 1.6449
"""Quantiles of a normal variable: 0.75, 0.9, 0.95."""


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """A slow-down, by indices of steps. None in place of `where`: no rank, all wait."""

    onset: int
    """First slow step."""
    detected: int
    """Step with which it was known."""
    end: int | None = None
    """First healthy step again, None if it was slow until the trace ended."""
    known_over: int | None = None
    """Step with which its end was known."""
    change: float
    """Relative to healthy: 0.31 is 31 % slower."""
    where: Where | None = None


def noises(values: Floats, peers: Ints) -> Floats:
    """Standard deviation of each column of (steps, series), log units, of which slow-downs are no part.

    That of its peers, or, if larger, its own from step to step; more where steps resemble those before, as sums over
    them then scatter more (as if by an AR(1) process, whose correlation is that of the peers). In traces too short for
    that, how far peers are apart; infinite where too few are known to tell.
    """
    noise = np.empty(values.shape[1])
    jumps = np.array([_jumps(column) for column in values.T])
    around = np.array([_around(column) for column in values.T])
    for group in np.unique(peers):
        own = peers == group
        many = int(own.sum()) >= FEW
        usual = _median(np.fmax(jumps[own], around[own]) if many else jumps[own])
        if math.isnan(usual):
            usual = _around(values[:, own].ravel() if many else values.ravel())
        steady = _median(jumps[own]) / max(_median(around[own]), STEADIEST) if many else 1.0
        correlated = min(max(1.0 - steady**2, 0.0), CORRELATED) if math.isfinite(steady) else 0.0
        noise[own] = np.fmax(usual, 0.8 * jumps[own]) * math.sqrt((1 + correlated) / (1 - correlated))
    return np.asarray(np.fmax(np.where(np.isnan(noise), np.inf, noise), STEADIEST))


def runs(values: Floats, noise: float, least: float, *, peered: bool, series: int = 1) -> list[Slowness]:
    """Runs of steps in which one of `series` series (steps,) is higher than healthy by `least` or more.

    Healthy is 0, and what differs from it a little for good, for a series with peers; else the lowest level that it
    has for a quarter of its steps. Steps without a value (NaN) are passed over. A rank that is slow from the first
    step, so that only peers tell, must be so by twice `least`.
    """
    steps = np.flatnonzero(np.isfinite(values))
    known = values[steps]
    if not known.size or not math.isfinite(noise):
        return []
    low = float(np.quantile(known, 0.1 if peered else 0.25)) + (NORMAL_DECILE if peered else NORMAL_QUARTILE) * noise
    away = known - (min(max(low, -OFFSET), OFFSET) if peered else low)
    threshold = math.log(FALSE_ALARM_EVERY * series)
    most = threshold / min(MOST, values.size)
    sought = max(least, SHARP * noise)
    found: list[_Span] = []
    slow: tuple[int, int] | None = None
    level, first, evidence = sought, 0, 0.0
    for i, value in enumerate(away.tolist()):
        gain = level / noise**2 * (value - level / 2 if slow is None else level / 2 - value)
        evidence += min(max(gain, -most), most)
        if evidence <= 0.0:
            first, evidence = i + 1, 0.0
        if evidence < threshold:
            continue
        past = away[first : i + 1]
        if slow is None:
            onset = first + _turn(past - float(np.median(past)) / 2)
            above = float(np.median(away[onset : i + 1]))
            if above >= (2 * least if onset == 0 and peered else least):
                slow, level = (onset, i), max(above, sought)
        else:
            end = first + _turn(level / 2 - past)
            above = float(np.median(away[end : i + 1]))
            if above < max(least, sought / 2):
                found.append((*slow, end, i))
                slow, level = None, sought
            else:
                level = max(above, sought)
        first, evidence = i + 1, 0.0
    if slow is not None:
        found.append((*slow, None, None))
    return [
        Slowness(
            onset=int(steps[onset]),
            detected=int(steps[detected]),
            end=None if end is None else int(steps[end]),
            known_over=None if known_over is None else int(steps[known_over]),
            change=float(np.expm1(np.median(known[onset:end]) - _healthy(known, found, 0.0 if peered else low))),
        )
        for onset, detected, end, known_over in found
    ]


_Span = tuple[int, int, int | None, int | None]
"""Onset, detected, end, known over."""


def _turn(gains: Floats) -> int:
    """Where a change began of which each value since then is evidence: the most likely of all places."""
    return int(np.argmax(np.cumsum(gains[::-1])[::-1]))


def _healthy(known: Floats, spans: list[_Span], unless: float) -> float:
    """The rank's own level while it was not slow, or `unless` if that was hardly ever so."""
    healthy = np.ones(known.size, dtype=np.bool_)
    for onset, _, end, _ in spans:
        healthy[onset:end] = False
    return float(np.median(known[healthy])) if healthy.sum() >= FEW else unless


def _jumps(values: Floats) -> float:
    """Standard deviation from step to step, which a change of level does not touch; NaN if too few are known."""
    known = values[np.isfinite(values)]
    if known.size < FEW:
        return math.nan
    apart = np.abs(np.diff(known)) / math.sqrt(2)
    return max(float(np.median(apart)) / NORMAL_QUARTILE, float(np.quantile(apart, 0.9)) / NORMAL_TAIL)


def _around(values: Floats) -> float:
    """Standard deviation around the median, which correlation does not touch; NaN if too few are known."""
    known = values[np.isfinite(values)]
    return float(np.median(np.abs(known - np.median(known)))) / NORMAL_QUARTILE if known.size >= FEW else math.nan


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan
