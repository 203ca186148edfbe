"""Finds series that flicker: they are slow in some iterations, more often than their peers, and never for long.

An outlier is a value far above the level of its series. A burst is a run of at most MAX_BURST_LENGTH outliers; a longer
run is a shift, which `resihp.detector.sequential.peer_cusum` finds. Bursts are the evidence, not outliers, because the
outliers of one stall have one cause. The bursts of each series are tested by CUSUMs (Page, 1954) of Bernoulli log odds:
a burst probability of BURST_RATES against the rate of the other series, either of the same group or of all, whichever
is higher. If many lanes have outliers in one iteration, as after a checkpoint or a garbage collection, these count for
no series. Without flicker, a CUSUM reaches the threshold h at most once in e^h values (Lorden, 1971); h follows from
the number of series. Flicker that costs less than MIN_COST on average is not reported, however certain it is.

Called by `resihp.detector.online.beside`, which knows the meaning of the series. Never decides on a reaction. No clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.sequential.noise import Bools, Floats, Ints
from resihp.detector.sequential.shifts import Alarm

BURST_RATES = (0.03, 0.1)
"""Rates of bursts, per iteration, that the tests search."""
MIN_OUTLIER_LOG = float(np.log(1.1))
"""Smallest distance of an outlier from the level of its series, log units."""
OUTLIER_SIGMAS = 5.0
"""Smallest distance of an outlier from the level of its series, in standard deviations."""
MAX_BURST_LENGTH = 4
"""Largest number of consecutive outliers that form a burst; more are a shift, not flicker."""
MIN_BURSTS = 4
"""Smallest number of bursts of reported flicker."""
WORSE_FACTOR = 2.0
"""Known flicker is reported again when its cost is this many times the known cost."""
MIN_COST = 0.01
"""Smallest cost of reported flicker: average excess over the healthy time."""
PRIOR_BURSTS, PRIOR_VALUES = 1.0, 500.0
"""Prior of the rate of the other series: number of bursts, and number of values in which they occurred."""
MIN_RATE = 1e-3
"""Lower bound of the rate of the other series, bursts per iteration."""
MEMORY_ITERATIONS = 1000.0
"""Number of iterations over which the rates of bursts fade."""
FALSE_ALARM_SHARE = 0.25
"""Share of the allowed false alarms for these tests."""
COMMON_SHARE = 0.25
"""Share of the lanes, at least three lanes, above which outliers in one iteration are an event common to all."""
QUIET_PROBABILITY = 1e-3
"""Flicker has ended when a time without bursts as long as the present one would be less probable than this."""


class Flickering(msgspec.Struct, frozen=True, kw_only=True):
    """Flicker of a series: it began (`kind` "slow") or ended ("recovered") at iteration `onset`."""

    series: int
    kind: Literal["slow", "recovered"]
    onset: int
    share: float
    """Share of the iterations since the beginning that were slow, 0 to 1."""
    factor: float
    """Mean time of the slow iterations, over the healthy time."""
    bursts: int
    """Number of bursts since the beginning."""
    rate: float
    """Usual bursts per iteration of the other series."""
    patience: int
    """Number of iterations without a burst after which the flicker has ended."""
    confidence: float
    alarm: Alarm | None = None
    """State of the test that found the flicker; None if it follows from the alarm of another series."""

    @property
    def cost(self) -> float:
        """Average excess of all iterations over the healthy time: 0.01 is 1 %."""
        return self.share * (self.factor - 1.0)


class Flicker:
    """Tests of n series for flicker.

    `groups` (n,): group of each series; series of a group are alike. `lanes` (n,): lane of each series, within a group;
    series of a lane cannot always be distinguished, so that they are not compared with each other, and count as one for
    events common to all. `known_flicker`: flicker that was already reported.
    """

    def __init__(
        self,
        groups: npt.ArrayLike,
        lanes: npt.ArrayLike,
        *,
        known_flicker: Iterable[Flickering] = (),
        false_alarms_per: int = 10_000,
    ) -> None:
        _, self._group = np.unique(np.asarray(groups), return_inverse=True)
        _, self._lane = np.unique(np.asarray(lanes), return_inverse=True)
        n = self.size = self._group.size
        self._members = np.bincount(self._group, minlength=1)
        self._wide = np.bincount(self._lane, minlength=1)
        """Number of series in each lane; all series of a lane are of one group."""
        self._most = max(COMMON_SHARE * self._wide.size, 2.0)
        self._threshold = float(np.log(len(BURST_RATES) * max(n, 1) * false_alarms_per / FALSE_ALARM_SHARE))
        self._prior = float(np.log(max(n, 1) * 10_000.0))
        self._sums = np.zeros((len(BURST_RATES), n))
        self._run = np.zeros(n, dtype=np.int64)
        """(n,): number of consecutive outliers up to the latest value."""
        self._began, self._since = np.zeros((2, n), dtype=np.int64)
        """(n,) both: iteration of the first outlier in the present evidence, and number of values since, including
        it."""
        self._bursts, self._outliers = np.zeros((2, n), dtype=np.int64)
        self._excess = np.zeros(n)
        """(n,): sum of the relative excess of the outliers in the present evidence; `_outliers` and `_bursts` are the
        numbers of these outliers and of their bursts."""
        self._burst_counts, self._seen_iterations = np.zeros(n), 0.0
        """Number of bursts of each series, and number of iterations; both fade."""
        self.flickering: dict[int, Flickering] = {flicker.series: flicker for flicker in known_flicker}
        """Reported flicker that has not ended, by series."""
        self._judged: list[int] = []
        """Series with enough evidence in the last update, reported or already known."""
        self._cleared_costs: dict[int, float] = {}
        """Cost of the flicker of series that were reported and then measured to be healthy."""
        self._quiet: dict[int, tuple[int, int]] = {}
        """For each series that flickers: iteration of its last outlier, and number of values since."""

    def update(self, index: int, away: Floats, noise: Floats, slow: Bools) -> list[Flickering]:
        """Test an iteration and return flicker that is new, worse, or has ended.

        `index`: number of the iteration, increasing. `away` (n,): deviations from the present levels, log units, NaN if
        missing. `noise` (n,): standard deviations of the series. `slow` (n,): series with a known shift, which do not
        flicker.
        """
        if self._judged:  # evidence from now on is judged separately
            self._forget(np.array(self._judged))
            self._judged = []
        with np.errstate(invalid="ignore"):
            outlying = away > np.maximum(OUTLIER_SIGMAS * noise, MIN_OUTLIER_LOG)
        present = np.isfinite(away)
        rows = np.flatnonzero(outlying)
        if rows.size and np.unique(self._lane[rows]).size > self._most:
            outlying[:], rows = False, rows[:0]
        ended = np.flatnonzero((self._run > 0) & ~outlying & present)
        ended = ended[self._run[ended] <= MAX_BURST_LENGTH]
        self._run = np.where(outlying, self._run + 1, np.where(present, 0, self._run))
        self._count(index, rows, away, present)
        self._weigh(ended, present)
        self._forget(np.flatnonzero(slow | (self._run > MAX_BURST_LENGTH)))
        for series in np.flatnonzero(slow).tolist():  # another test reports their recovery
            self.flickering.pop(series, None)
        return self._alarms() + self._ceased(index, outlying, present)

    def alike(self, flicker: Flickering, rows: Iterable[int], share: float) -> list[int]:
        """Return the series of `rows` that cannot be distinguished from a flickering one.

        They have at least `share` of its outliers, and of the sum of their excess.
        """
        outliers, excess = share * self._outliers[flicker.series], share * self._excess[flicker.series]
        return [
            row
            for row in rows
            if row != flicker.series and self._outliers[row] >= outliers and self._excess[row] >= excess
        ]

    def record(self, flicker: Flickering) -> None:
        """Record that the flicker of a series is known."""
        self.flickering[flicker.series] = flicker

    def clear(self, series: int) -> None:
        """Record that a series was measured to be healthy: its flicker is reported again only if it becomes much
        worse."""
        flicker = self.flickering.pop(series, None)
        if flicker is not None:
            self._cleared_costs[series] = flicker.cost
        self._forget(np.array([series]))

    def _count(self, index: int, rows: Ints, away: Floats, present: Bools) -> None:
        first = rows[self._outliers[rows] == 0]
        self._began[first], self._since[first] = index, 0
        self._since += present
        self._outliers[rows] += 1
        self._excess[rows] += np.expm1(away[rows])
        self._seen_iterations = self._seen_iterations * (1 - 1 / MEMORY_ITERATIONS) + 1.0
        self._burst_counts *= 1 - 1 / MEMORY_ITERATIONS

    def _weigh(self, ended: Ints, present: Bools) -> None:
        """Add the log odds of bursts that have ended, and of iterations without a burst."""
        rates = np.array(BURST_RATES)[:, None]
        self._sums += np.log((1 - rates) / (1 - MIN_RATE)) * present
        if ended.size:
            self._bursts[ended] += 1
            self._sums[:, ended] += np.maximum(np.log(rates / self._usual(ended)), 0.0)
            self._burst_counts[ended] += 1.0
        np.maximum(self._sums, 0.0, out=self._sums)
        spent = (self._outliers > 0) & (self._run == 0)
        if spent.any():
            self._forget(np.flatnonzero(spent & (self._sums.max(axis=0) <= 0.0)))

    def _usual(self, rows: Ints) -> Floats:
        """Return the usual bursts per iteration of other lanes: of all, or of the same group if that is higher."""
        counted = self._burst_counts.copy()
        counted[list(self.flickering)] = 0.0
        lane, group = self._lane[rows], self._group[rows]
        own, wide = np.bincount(self._lane, counted)[lane], self._wide[lane]
        of_group = np.bincount(self._group, counted, self._members.size)[group]
        of_all = (PRIOR_BURSTS + counted.sum() - own) / (PRIOR_VALUES + self._seen_iterations * (self.size - wide))
        of_peers = (PRIOR_BURSTS + of_group - own) / (
            PRIOR_VALUES + self._seen_iterations * (self._members[group] - wide)
        )
        return np.asarray(np.maximum(np.maximum(of_all, of_peers), MIN_RATE))

    def _alarms(self) -> list[Flickering]:
        best = self._sums.max(axis=0)
        over = (best >= self._threshold) & (self._run == 0) & (self._bursts >= MIN_BURSTS)
        flickers = []
        for series in np.flatnonzero(over).tolist():
            weight = min(float(best[series]) - self._prior, 60.0)
            flicker = self._standing(series, min(1 / (1 + float(np.exp(-weight))), 1 - 1e-9))
            alarm = Alarm(test="log evidence", statistic=float(best[series]), threshold=self._threshold)
            flicker = msgspec.structs.replace(flicker, alarm=alarm)
            known_cost = self.flickering[series].cost if series in self.flickering else self._cleared_costs.get(series)
            if flicker.cost >= (MIN_COST if known_cost is None else WORSE_FACTOR * known_cost):
                flickers.append(flicker)
            if flicker in flickers or known_cost is not None:
                self._judged.append(series)
        for flicker in flickers:
            self.record(flicker)
        return sorted(flickers, key=lambda flicker: -flicker.cost)

    def _standing(self, series: int, confidence: float) -> Flickering:
        outliers, bursts, values = (int(counts[series]) for counts in (self._outliers, self._bursts, self._since))
        return Flickering(
            series=series,
            kind="slow",
            onset=int(self._began[series]),
            share=outliers / values,
            factor=1.0 + float(self._excess[series]) / outliers,
            bursts=bursts,
            rate=float(self._usual(np.array([series]))[0]),
            patience=int(np.ceil(np.log(QUIET_PROBABILITY) / np.log1p(-min(bursts / values, 0.5)))),
            confidence=confidence,
        )

    def _ceased(self, index: int, outlying: Bools, present: Bools) -> list[Flickering]:
        """Return the flicker that has ended, because there was no burst for `patience` values.

        Missing values do not count.
        """
        quiet, self._quiet = self._quiet, {}
        ended = []
        for series, flicker in list(self.flickering.items()):
            last, values = quiet.get(series, (index, 0))
            last, values = (index, 0) if outlying[series] else (last, values + int(present[series]))
            self._quiet[series] = last, values
            if values > flicker.patience:
                del self.flickering[series]
                self._forget(np.array([series]))
                ended.append(
                    msgspec.structs.replace(
                        flicker, kind="recovered", onset=last + 1, confidence=1.0 - QUIET_PROBABILITY
                    )
                )
        return ended

    def _forget(self, rows: Ints) -> None:
        """Discard the evidence of the series `rows`."""
        self._sums[:, rows] = 0.0
        self._bursts[rows] = self._outliers[rows] = self._since[rows] = 0
        self._excess[rows] = 0.0
