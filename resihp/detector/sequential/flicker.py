"""Finds series that are slow now and then: more often than their peers, never for long. No clock.

An outlier is a value far above its series' own level; a burst is a run of at most MAX_BURST_LENGTH outliers that has
ended; a longer run is a shift, which `resihp.detector.sequential.peer_cusum` finds. Bursts, not outliers, are evidence,
because the outliers of one stall have one cause. The bursts of each series are tested by CUSUMs (Page, 1954) of
Bernoulli log odds: probability of a burst one of BURST_RATES, against the rate that the others have shown, in its group
or altogether, whichever is higher. An event in many lanes in one iteration is common and counts for no series: a
checkpoint, a garbage collection. Without flicker a CUSUM reaches h at most once in e^h values (Lorden, 1971); h follows
from the number of series.

Cost comes before odds: flicker that costs less than MIN_COST on average is not reported, however certain.

Called by `resihp.detector.online.beside`, which knows the meaning of the series; decides nothing about them.
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
"""Burst rates, per iteration, that are searched for."""
MIN_OUTLIER_LOG = float(np.log(1.1))
OUTLIER_SIGMAS = 5.0
"""Distance of an outlier above its level: minimum in log units, and in standard deviations."""
MAX_BURST_LENGTH = 4
"""Highest number of outliers in a row that form one burst; more are not flicker."""
MIN_BURSTS = 4
WORSE_FACTOR = 2.0
"""Factor on the known cost from which on known flicker is reported again."""
MIN_COST = 0.01
"""Smallest reported cost: average excess over the healthy time."""
PRIOR_BURSTS, PRIOR_VALUES = 1.0, 500.0
"""Prior of the others' rate: bursts, and the number of values in which they occurred."""
MIN_RATE = 1e-3
"""Lower bound of a usual rate, bursts per iteration."""
MEMORY_ITERATIONS = 1000.0
"""Iterations over which rates of bursts are remembered."""
FALSE_ALARM_SHARE = 0.25
"""Share of the allowed false alarms that these tests may use."""
COMMON_SHARE = 0.25
"""Share of the lanes, at least three, with outliers in one iteration from which on that is a common event."""
QUIET_PROBABILITY = 1e-3
"""A flicker has ended once the probability of so long a quiet time would be below this."""


class Flickering(msgspec.Struct, frozen=True, kw_only=True):
    """Series `series` has been slow now and then since iteration `onset`, or ceased to be so then."""

    series: int
    kind: Literal["slow", "recovered"]
    onset: int
    share: float
    """`share`: share of the iterations since then that were slow; `factor`: their mean time over the healthy time."""
    factor: float
    bursts: int
    rate: float
    """Usual bursts per iteration of the other series."""
    patience: int
    """Iterations without a burst after which it has ceased."""
    confidence: float
    alarm: Alarm | None = None

    @property
    def cost(self) -> float:
        """Average excess over the healthy time."""
        return self.share * (self.factor - 1.0)


class Flicker:
    """Tests of `n` series.

    `groups` (n,): series of one group are alike; `lanes` (n,): series of one lane, and group, cannot always be
    distinguished: they are not each other's peers, and count as one in the search for common events. `known_flicker`:
    series whose flicker was already reported.
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
        """Number of series in each lane, all of one group."""
        self._most = max(COMMON_SHARE * self._wide.size, 2.0)
        self._threshold = float(np.log(len(BURST_RATES) * max(n, 1) * false_alarms_per / FALSE_ALARM_SHARE))
        self._prior = float(np.log(max(n, 1) * 10_000.0))
        self._sums = np.zeros((len(BURST_RATES), n))
        self._run = np.zeros(n, dtype=np.int64)
        """Outliers in a row up to now."""
        self._began, self._since = np.zeros((2, n), dtype=np.int64)
        """Iteration of the first outlier that counts, and the number of values since, including that one."""
        self._bursts, self._outliers = np.zeros((2, n), dtype=np.int64)
        self._excess = np.zeros(n)
        """Of these outliers: number of bursts, number of outliers, and the sum of their relative excess."""
        self._burst_counts, self._seen_iterations = np.zeros(n), 0.0
        """Bursts of each series, and the number of iterations seen; both fade."""
        self.flickering: dict[int, Flickering] = {flicker.series: flicker for flicker in known_flicker}
        self._judged: list[int] = []
        """Series with sufficient evidence in the last update, reported or already known."""
        self._cleared_costs: dict[int, float] = {}
        """Cost of series that were reported and then measured to be healthy."""
        self._quiet: dict[int, tuple[int, int]] = {}
        """Of series that flicker: iteration of the last outlier, and number of values since."""

    def update(self, index: int, away: Floats, noise: Floats, slow: Bools) -> list[Flickering]:
        """Take an iteration's deviations (n,) from the present levels, log units; NaN for missing ones.

        `noise` (n,): their standard deviations. `slow` (n,): series with a known shift, which do not flicker.
        Indices increase. Return new and ended flicker.
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
        """Return those of `rows` that are slow as often and as much, by at least `share`: indistinguishable from it."""
        outliers, excess = share * self._outliers[flicker.series], share * self._excess[flicker.series]
        return [
            row
            for row in rows
            if row != flicker.series and self._outliers[row] >= outliers and self._excess[row] >= excess
        ]

    def record(self, flicker: Flickering) -> None:
        """Record that a series is known to flicker."""
        self.flickering[flicker.series] = flicker

    def clear(self, series: int) -> None:
        """Record that a series was measured to be healthy: it is reported again only if it gets much worse."""
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
        """Add the log odds of bursts that have ended, and of iterations without one."""
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
        """Return the others' bursts per iteration: of all other lanes, or of those of the group if that is higher."""
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
        """Return flicker that has been quiet for too long to go on; a series that does not report is left as it is."""
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
        """Reset the evidence of these series."""
        self._sums[:, rows] = 0.0
        self._bursts[rows] = self._outliers[rows] = self._since[rows] = 0
        self._excess[rows] = 0.0
