"""Which of many series is slow now and then: more often than its peers, never for long. No clock.

An outlier is a value far above its series' own level; a burst is a run of at most LONGEST of them that has ended: what
lasts longer is a shift, which `resihp.detector.sequential.peer_cusum` finds. Bursts, not outliers, are evidence: those
of one stall have one cause. Each series' bursts are tested by CUSUMs (Page, 1954) of Bernoulli log odds, a burst's
probability being one of RATES against that which the others have shown, in its group or altogether, whichever is
larger. What many lanes have in one iteration is a common event and nobody's: a checkpoint, a collection of garbage.
Without flicker a CUSUM reaches h at most once in e^h values (Lorden, 1971); h follows from the number of series.

Cost comes before odds: what costs less than LEAST_COST on average is not told, however certain.

Called by `resihp.detector.online.beside`, which knows what the series are; decides nothing about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.sequential.noise import Bools, Floats, Ints
from resihp.detector.sequential.shifts import Alarm

RATES = (0.03, 0.1)
"""Bursts per iteration that are looked for."""
LEAST_SIZE = float(np.log(1.1))
OUTLYING = 5.0
"""An outlier is this far above its level: log units, and standard deviations."""
LONGEST = 4
"""Outliers in a row that are one burst; more are no flicker."""
LEAST_BURSTS = 4
WORSE = 2.0
"""So many times the cost that is known is news."""
LEAST_COST = 0.01
"""Average excess over the healthy time that is worth a finding."""
USUAL, WEIGHT = 1.0, 500.0
"""Bursts, and in how many values, that the others' rate is taken for before they have shown it."""
LEAST_RATE = 1e-3
"""Nobody is taken to be steadier than this, bursts per iteration."""
MEMORY = 1000.0
"""Iterations over which rates of bursts are remembered."""
SHARE = 0.25
"""Of the false alarms allowed, what these tests may use."""
COMMON = 0.25
"""Share of the lanes, at least three, whose outliers in one iteration are a common event."""
QUIET = 1e-3
"""A flicker has ended when it would be quiet for as long as it is only with this probability."""


class Flickering(msgspec.Struct, frozen=True, kw_only=True):
    """Series `series` is slow now and then since iteration `onset`, or has ceased to be so then."""

    series: int
    kind: Literal["slow", "recovered"]
    onset: int
    share: float
    """Of the iterations since then that were slow, and how many times as long these took on average."""
    factor: float
    bursts: int
    rate: float
    """Bursts per iteration that are usual among the others."""
    patience: int
    """Iterations without any after which it has ceased."""
    confidence: float
    alarm: Alarm | None = None

    @property
    def cost(self) -> float:
        """Average excess over the healthy time."""
        return self.share * (self.factor - 1.0)


class Flicker:
    """Tests of `n` series.

    `groups` (n,): series of one group are alike; `lanes` (n,): those of one lane, and group, cannot always be told
    apart: they are not each other's peers, and count as one where common events are looked for. `known`: series that
    flicker and are no news.
    """

    def __init__(
        self,
        groups: npt.ArrayLike,
        lanes: npt.ArrayLike,
        *,
        known: Iterable[Flickering] = (),
        false_alarms_per: int = 10_000,
    ) -> None:
        _, self._group = np.unique(np.asarray(groups), return_inverse=True)
        _, self._lane = np.unique(np.asarray(lanes), return_inverse=True)
        n = self.size = self._group.size
        self._members = np.bincount(self._group, minlength=1)
        self._wide = np.bincount(self._lane, minlength=1)
        """Series of each lane, all of one group."""
        self._most = max(COMMON * self._wide.size, 2.0)
        self._threshold = float(np.log(len(RATES) * max(n, 1) * false_alarms_per / SHARE))
        self._prior = float(np.log(max(n, 1) * 10_000.0))
        self._sums = np.zeros((len(RATES), n))
        self._run = np.zeros(n, dtype=np.int64)
        """Outliers in a row until now."""
        self._began, self._since = np.zeros((2, n), dtype=np.int64)
        """Iteration of the first outlier that counts, and values since, that one included."""
        self._bursts, self._outliers = np.zeros((2, n), dtype=np.int64)
        self._excess = np.zeros(n)
        """Of those outliers: how many bursts, how many, and the sum of their times over the healthy one, minus 1."""
        self._shown, self._seen = np.zeros(n), 0.0
        """Bursts that each series has shown, and in how many iterations; both fade."""
        self.told: dict[int, Flickering] = {one.series: one for one in known}
        self._judged: list[int] = []
        """Series whose evidence has sufficed: told, or known."""
        self._pardoned: dict[int, float] = {}
        """Of those that were told and measured: their cost."""
        self._quiet: dict[int, tuple[int, int]] = {}
        """Of those that flicker: iteration of the last outlier, and how many values came since."""

    def update(self, index: int, away: Floats, noise: Floats, slow: Bools) -> list[Flickering]:
        """Take an iteration's deviations (n,) from the present levels, log units; NaN where there is none.

        `noise` (n,): their standard deviations. `slow` (n,): series that are known to have shifted: not flickering.
        Indices increase.
        """
        if self._judged:  # what they show from now on is looked at by itself
            self._forget(np.array(self._judged))
            self._judged = []
        with np.errstate(invalid="ignore"):
            out = away > np.maximum(OUTLYING * noise, LEAST_SIZE)
        present = np.isfinite(away)
        rows = np.flatnonzero(out)
        if rows.size and np.unique(self._lane[rows]).size > self._most:
            out[:], rows = False, rows[:0]
        ended = np.flatnonzero((self._run > 0) & ~out & present)
        ended = ended[self._run[ended] <= LONGEST]
        self._run = np.where(out, self._run + 1, np.where(present, 0, self._run))
        self._count(index, rows, away, present)
        self._weigh(ended, present)
        self._forget(np.flatnonzero(slow | (self._run > LONGEST)))
        for series in np.flatnonzero(slow).tolist():  # of which another test tells the end
            self.told.pop(series, None)
        return self._alarms() + self._ceased(index, out, present)

    def alike(self, one: Flickering, rows: Iterable[int], share: float) -> list[int]:
        """Which of `rows` are slow as often, and by `share` of as much at least: they cannot be told from it."""
        outliers, excess = share * self._outliers[one.series], share * self._excess[one.series]
        return [
            row for row in rows if row != one.series and self._outliers[row] >= outliers and self._excess[row] >= excess
        ]

    def tell(self, one: Flickering) -> None:
        """It is known from now on that a series flickers."""
        self.told[one.series] = one

    def clear(self, series: int) -> None:
        """It was measured, and nothing found: what it has shown is no news, unless it gets much worse."""
        one = self.told.pop(series, None)
        if one is not None:
            self._pardoned[series] = one.cost
        self._forget(np.array([series]))

    def _count(self, index: int, rows: Ints, away: Floats, present: Bools) -> None:
        first = rows[self._outliers[rows] == 0]
        self._began[first], self._since[first] = index, 0
        self._since += present
        self._outliers[rows] += 1
        self._excess[rows] += np.expm1(away[rows])
        self._seen = self._seen * (1 - 1 / MEMORY) + 1.0
        self._shown *= 1 - 1 / MEMORY

    def _weigh(self, ended: Ints, present: Bools) -> None:
        """Log odds of bursts that have ended, and of there having been none."""
        rates = np.array(RATES)[:, None]
        self._sums += np.log((1 - rates) / (1 - LEAST_RATE)) * present
        if ended.size:
            self._bursts[ended] += 1
            self._sums[:, ended] += np.maximum(np.log(rates / self._usual(ended)), 0.0)
            self._shown[ended] += 1.0
        np.maximum(self._sums, 0.0, out=self._sums)
        spent = (self._outliers > 0) & (self._run == 0)
        if spent.any():
            self._forget(np.flatnonzero(spent & (self._sums.max(axis=0) <= 0.0)))

    def _usual(self, rows: Ints) -> Floats:
        """Bursts per iteration of the others: of all other lanes, or of those in their group where these have more."""
        shown = self._shown.copy()
        shown[list(self.told)] = 0.0
        lane, group = self._lane[rows], self._group[rows]
        own, wide = np.bincount(self._lane, shown)[lane], self._wide[lane]
        of_group = np.bincount(self._group, shown, self._members.size)[group]
        of_all = (USUAL + shown.sum() - own) / (WEIGHT + self._seen * (self.size - wide))
        of_peers = (USUAL + of_group - own) / (WEIGHT + self._seen * (self._members[group] - wide))
        return np.asarray(np.maximum(np.maximum(of_all, of_peers), LEAST_RATE))

    def _alarms(self) -> list[Flickering]:
        best = self._sums.max(axis=0)
        over = (best >= self._threshold) & (self._run == 0) & (self._bursts >= LEAST_BURSTS)
        found = []
        for series in np.flatnonzero(over).tolist():
            weight = min(float(best[series]) - self._prior, 60.0)
            one = self._standing(series, min(1 / (1 + float(np.exp(-weight))), 1 - 1e-9))
            alarm = Alarm(test="log evidence", statistic=float(best[series]), threshold=self._threshold)
            one = msgspec.structs.replace(one, alarm=alarm)
            known = self.told[series].cost if series in self.told else self._pardoned.get(series)
            if one.cost >= (LEAST_COST if known is None else WORSE * known):
                found.append(one)
            if one in found or known is not None:
                self._judged.append(series)
        for one in found:
            self.tell(one)
        return sorted(found, key=lambda one: -one.cost)

    def _standing(self, series: int, confidence: float) -> Flickering:
        outliers, bursts, values = (int(of[series]) for of in (self._outliers, self._bursts, self._since))
        return Flickering(
            series=series,
            kind="slow",
            onset=int(self._began[series]),
            share=outliers / values,
            factor=1.0 + float(self._excess[series]) / outliers,
            bursts=bursts,
            rate=float(self._usual(np.array([series]))[0]),
            patience=int(np.ceil(np.log(QUIET) / np.log1p(-min(bursts / values, 0.5)))),
            confidence=confidence,
        )

    def _ceased(self, index: int, out: Bools, present: Bools) -> list[Flickering]:
        """Flickers that have been quiet for longer than they ever would; of who does not report nothing is known."""
        quiet, self._quiet = self._quiet, {}
        found = []
        for series, one in list(self.told.items()):
            last, values = quiet.get(series, (index, 0))
            last, values = (index, 0) if out[series] else (last, values + int(present[series]))
            self._quiet[series] = last, values
            if values > one.patience:
                del self.told[series]
                self._forget(np.array([series]))
                found.append(msgspec.structs.replace(one, kind="recovered", onset=last + 1, confidence=1.0 - QUIET))
        return found

    def _forget(self, rows: Ints) -> None:
        """What these have shown counts no more."""
        self._sums[:, rows] = 0.0
        self._bursts[rows] = self._outliers[rows] = self._since[rows] = 0
        self._excess[rows] = 0.0
