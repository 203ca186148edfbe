"""Finds the steps in which a series of a recorded trace is slow. Pure; called by `operations`.

While a job runs, `resihp.detector.sequential.peer_cusum` does this, and must first learn levels and noise. A trace is
judged only after it has been read to its end: its noise is estimated from all steps, and ranks that are slow from the
first step are found without bounds on the learnt levels. The test is nevertheless sequential, a one-sided CUSUM (Page,
1954) of the log-likelihood of a shift, so that `detected` is the step at which an observer would have known.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from resihp.detector.offline.analysis import Where
from resihp.detector.offline.traces import Floats, Ints

FALSE_ALARM_EVERY = 100_000.0
"""Number of steps between false alarms of all series together, for Gaussian noise. The threshold of the CUSUM is the
log of this number times the number of series (Lorden, 1971)."""
MIN_STEPS_PER_ALARM = 2.5
"""Smallest number of steps that raise an alarm: one step contributes at most the threshold divided by this, so that two
outliers in a row are no slow-down. In a trace of one or two steps, fewer steps suffice."""
MIN_SHIFT_SIGMAS = 2.0
"""Smallest shift that is searched, in standard deviations, because noise is never exactly Gaussian."""
NOISE_FLOOR = 0.004
"""Lower bound of a series' noise, log units."""
MAX_HEALTHY_OFFSET = 0.05
"""Highest permanent difference of healthy ranks of one kind, log units."""
MAX_CORRELATION = 0.95
"""Upper bound of the correlation of consecutive steps."""
MIN_VALUES = 4
"""Number of values that an estimate of scatter needs."""
NORMAL_QUARTILE, NORMAL_DECILE, NORMAL_TAIL = 0.6745, 1.2816, 1.6449
"""Quantiles of a normal variable: 0.75, 0.9, 0.95."""


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """A slow-down, with indices of steps. `where` is None if the whole step is slow and no single rank."""

    onset: int
    """First slow step."""
    detected: int
    """Step at which an observer would have known of the slow-down."""
    end: int | None = None
    """First healthy step after the slow-down; None if it lasts to the end of the trace."""
    known_over: int | None = None
    """Step at which an observer would have known of the end; None without an end."""
    change: float
    """Slow-down relative to healthy: 0.31 is 31 % slower."""
    where: Where | None = None


def noises(values: Floats, peers: Ints) -> Floats:
    """Return the standard deviation of each series, a column of `values` (steps, series), log units, without
    slow-downs.

    It is the deviation of the peers, or the series' own deviation from step to step if that is larger. It is increased
    if consecutive steps are correlated, because sums over steps then scatter more (as for an AR(1) process with the
    correlation of the peers). In a trace too short for that, it is the deviation between peers; infinite if there are
    too few values.
    """
    noise = np.empty(values.shape[1])
    jumps = np.array([_jumps(column) for column in values.T])
    around = np.array([_around(column) for column in values.T])
    for group in np.unique(peers):
        own = peers == group
        many = int(own.sum()) >= MIN_VALUES
        usual = _median(np.fmax(jumps[own], around[own]) if many else jumps[own])
        if math.isnan(usual):
            usual = _around(values[:, own].ravel() if many else values.ravel())
        steady = _median(jumps[own]) / max(_median(around[own]), NOISE_FLOOR) if many else 1.0
        correlated = min(max(1.0 - steady**2, 0.0), MAX_CORRELATION) if math.isfinite(steady) else 0.0
        noise[own] = np.fmax(usual, 0.8 * jumps[own]) * math.sqrt((1 + correlated) / (1 - correlated))
    return np.asarray(np.fmax(np.where(np.isnan(noise), np.inf, noise), NOISE_FLOOR))


def runs(values: Floats, noise: float, least: float, *, peered: bool, series: int = 1) -> list[Slowness]:
    """Return the slow-downs of a series `values` (steps,): runs of steps at least `least` above the healthy level.

    `noise`: standard deviation; `series`: number of series that are tested. If the series has peers (`peered`), the
    healthy level is 0 plus a small permanent offset; else it is the lowest level that the series has for a quarter of
    its steps. Steps without a value (NaN) are skipped. A rank that is slow from the first step must be slower than its
    peers by twice `least`.
    """
    steps = np.flatnonzero(np.isfinite(values))
    finite_values = values[steps]
    if not finite_values.size or not math.isfinite(noise):
        return []
    low = (
        float(np.quantile(finite_values, 0.1 if peered else 0.25))
        + (NORMAL_DECILE if peered else NORMAL_QUARTILE) * noise
    )
    deviations = finite_values - (min(max(low, -MAX_HEALTHY_OFFSET), MAX_HEALTHY_OFFSET) if peered else low)
    threshold = math.log(FALSE_ALARM_EVERY * series)
    max_gain = threshold / min(MIN_STEPS_PER_ALARM, values.size)
    sought = max(least, MIN_SHIFT_SIGMAS * noise)
    spans: list[_Span] = []
    slow: tuple[int, int] | None = None
    level, first, evidence = sought, 0, 0.0
    for i, value in enumerate(deviations.tolist()):
        gain = level / noise**2 * (value - level / 2 if slow is None else level / 2 - value)
        evidence += min(max(gain, -max_gain), max_gain)
        if evidence <= 0.0:
            first, evidence = i + 1, 0.0
        if evidence < threshold:
            continue
        past = deviations[first : i + 1]
        if slow is None:
            onset = first + _turn(past - float(np.median(past)) / 2)
            above = float(np.median(deviations[onset : i + 1]))
            if above >= (2 * least if onset == 0 and peered else least):
                slow, level = (onset, i), max(above, sought)
        else:
            end = first + _turn(level / 2 - past)
            above = float(np.median(deviations[end : i + 1]))
            if above < max(least, sought / 2):
                spans.append((*slow, end, i))
                slow, level = None, sought
            else:
                level = max(above, sought)
        first, evidence = i + 1, 0.0
    if slow is not None:
        spans.append((*slow, None, None))
    return [
        Slowness(
            onset=int(steps[onset]),
            detected=int(steps[detected]),
            end=None if end is None else int(steps[end]),
            known_over=None if known_over is None else int(steps[known_over]),
            change=float(
                np.expm1(np.median(finite_values[onset:end]) - _healthy(finite_values, spans, 0.0 if peered else low))
            ),
        )
        for onset, detected, end, known_over in spans
    ]


_Span = tuple[int, int, int | None, int | None]
"""Onset, detected, end, known over."""


def _turn(gains: Floats) -> int:
    """Return the most likely place of a change, from each value's evidence that it comes after the change."""
    return int(np.argmax(np.cumsum(gains[::-1])[::-1]))


def _healthy(values: Floats, spans: list[_Span], unless: float) -> float:
    """Return the level of a series outside of its slow-downs; `unless` if too few values are outside."""
    healthy = np.ones(values.size, dtype=np.bool_)
    for onset, _, end, _ in spans:
        healthy[onset:end] = False
    return float(np.median(values[healthy])) if healthy.sum() >= MIN_VALUES else unless


def _jumps(values: Floats) -> float:
    """Return the standard deviation from step to step, robust to level changes; NaN if too few values are known."""
    finite = values[np.isfinite(values)]
    if finite.size < MIN_VALUES:
        return math.nan
    apart = np.abs(np.diff(finite)) / math.sqrt(2)
    return max(float(np.median(apart)) / NORMAL_QUARTILE, float(np.quantile(apart, 0.9)) / NORMAL_TAIL)


def _around(values: Floats) -> float:
    """Return the standard deviation around the median, robust to correlation; NaN if too few values are known."""
    finite = values[np.isfinite(values)]
    return (
        float(np.median(np.abs(finite - np.median(finite)))) / NORMAL_QUARTILE
        if finite.size >= MIN_VALUES
        else math.nan
    )


def _median(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan
