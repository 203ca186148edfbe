"""Finds the series that became slow relative to their peers: ranks by compute time, links by delay. No clock.

Each iteration has one value per series, log(measured / predicted). The part that all series have in common, as from an
imprecise prediction, is their median, and is subtracted. The rest of each series is compared with the series' own level
by two-sided CUSUMs for several sizes of shift (Page, "Continuous inspection schemes", 1954), computed for all series at
once. The threshold h follows from the number of series: without a shift, a CUSUM reaches h at most once in e^h values
(Lorden, 1971), and h is chosen for the false alarms of all series together. A single value contributes at most h / 2.5,
so that one or two outliers raise no alarm.

Levels are learnt in the first iterations, within narrow bounds around the levels of the series' peers (the series of
its group, which should be alike). A series that is slow from the start is outside of these bounds, and is therefore
found. A series without peers is compared with its own past only.

Called by the channels of `resihp.detector.online`, which know the meaning of the series. Never decides on a reaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.detector.sequential.drift import MIN_CALM_SERIES, Drift, variance
from resihp.detector.sequential.noise import NEW_WEIGHT, SPARSE_AFTER, SPARSE_STRIDE, Bools, Floats, Noise
from resihp.detector.sequential.shifts import Alarm, Cooldown, SeriesStanding, Shift
from resihp.detector.sequential.window import Window, low_median, medians

__all__ = ["Cooldown", "PeerTest", "SeriesStanding", "Shift"]

SHIFT_GRID = (0.03, 0.1, 0.3)
"""Sizes of shifts that the CUSUMs search, log units. A CUSUM finds all shifts above half of its size; with much noise,
a large shift is found sooner by the CUSUM of that size."""
LEARNING_ITERATIONS = 5
"""Number of first iterations from which levels are learnt; more if many values are missing."""
SETTLED_ITERATIONS = 60
"""Number of iterations after which a healthy level is fixed, so that a later slow drift away from it is a shift."""
MIN_FURTHER_SHIFT = 0.05
"""Smallest further shift of a slow series that is reported, log units."""
WANDERING_SHARE = 0.7
"""Share of the series' usual wandering from which on a deviation is evidence of a shift."""
MAX_PATIENCE_FACTOR = 4
"""Longest cooldown, as a multiple of the first one, so that a lasting problem is not ignored for too long."""
REVIEW_EVERY = 16
"""Number of values between two reviews of wandering and slow drift."""
MAX_PEER_SIGMAS = 4.0
"""Largest deviation of a healthy series from its peers, in standard deviations of such deviations."""
CREEP_CONFIDENCE = 0.9
"""Confidence of a shift without an alarm of a CUSUM, as after a slow drift."""
RECENT_VALUES = 8
"""Number of latest values from which the recent level of a series is computed."""
MAX_LOG_RATIO = float(np.log(1e4))
"""Largest absolute value of a valid log ratio; a larger one is a clock error."""
MIN_LEVEL_ERRORS = 8.0
"""Smallest shift that is searched, in standard errors of the level before it."""
MIN_VALUES_PER_ALARM = 2.5
"""Smallest number of values that raise an alarm: one value contributes at most the threshold divided by this."""
MEDIAN_VARIANCE = float(np.pi / 2)
"""Variance of the median of many standard normal values, times their number."""
FALSE_ALARM_SHARE = 0.05
"""Share of the allowed false alarms for one test; the rest is a margin for noise that deviates from the assumptions."""


class PeerTest:
    """Sequential tests of n series against each other and against their own past.

    `groups` (n,): group of each series; the series of a group are alike and are compared from the start.
    `known_shifts`: shifts that were already reported, by series. `cooldowns`: cooldowns by series. `spread`, a number
    or (n,): largest difference between healthy series of a group, log units; infinite if they cannot be compared.
    `least`: smallest reported shift, log units; increased if series wander by more. `false_alarms_per`: lower bound of
    the mean number of iterations between false alarms. `quorum`: share of the series that must have a value for an
    iteration to count. `patience`: length of a first cooldown in iterations; doubled for each further one of the same
    series, up to `MAX_PATIENCE_FACTOR` times the first. `wandering`: earlier value of the property `wandering`.
    """

    def __init__(
        self,
        groups: npt.ArrayLike,
        *,
        known_shifts: Mapping[int, float] | None = None,
        cooldowns: Mapping[int, Cooldown] | None = None,
        spread: float | Floats = 0.02,
        least: float = 0.03,
        false_alarms_per: int = 10_000,
        quorum: float = 0.5,
        patience: int = 500,
        wandering: float = 0.0,
    ) -> None:
        _, group = np.unique(np.asarray(groups), return_inverse=True)
        self._group = group.reshape(-1)
        n = self.size = self._group.size
        self._members = np.bincount(self._group, minlength=1)
        self._spread = np.where(self._members[self._group] > 1, spread, np.inf) if n else np.zeros(0)
        self._kept_cooldowns = dict(cooldowns or {})
        """Cooldowns from before, which take effect when levels are learnt."""
        self._least = least
        self._quorum = max(quorum * n, min(n, 3))
        self._threshold = float(np.log(len(SHIFT_GRID) * max(n, 1) * false_alarms_per / FALSE_ALARM_SHARE))
        self._prior = float(np.log(max(n, 1) * 10_000.0))
        self._base, self._level = np.zeros(n), np.zeros(n)
        self._reported_shift = np.zeros(n)
        """Shift of each series when it was last reported as slow."""
        self._slow = np.zeros(n, dtype=bool)
        self._explained = np.zeros(n, dtype=bool)
        for series, shift in (known_shifts or {}).items():
            self._level[series], self._reported_shift[series], self._slow[series] = shift, shift, True
        self._centre = np.zeros(n)
        """(n,): level of each series' group."""
        self._counts = np.zeros(n, dtype=np.int64)
        """(n,): number of values from which each healthy level (`_base`) was learnt."""
        self._has_unlearnt = False
        self._since = np.full(n, SETTLED_ITERATIONS)
        """Number of values since an alarm last set the level."""
        self._learnt: list[tuple[int, Floats, Floats | None]] | None = []
        self._sums = np.zeros((2, len(SHIFT_GRID), n))
        self._onsets = np.zeros((2, len(SHIFT_GRID), n), dtype=np.int64)
        self._window = Window(n)
        self._recent: Floats | None = None
        """(n,): recent positions of series; None until requested."""
        self._rows = 0
        self._noise = Noise(self._group)
        self._drift = Drift(self._group, false_alarms_per, wandering)
        self._floor = np.maximum(self._drift.least, least)
        """(n,): smallest reported shift of each series; larger than healthy wandering."""
        self._cooldowns: dict[int, tuple[int, float]] = {}
        self._patience = {series: cooldown.patience for series, cooldown in self._kept_cooldowns.items()}
        self._least_patience = patience
        self._slow_count = int(self._slow.sum())
        self._stale = False
        self._refresh()

    @property
    def ready(self) -> bool:
        """Whether levels are learnt; before, no shift is found."""
        return self._learnt is None

    @property
    def slow(self) -> tuple[int, ...]:
        """The series that were found slow and have not recovered."""
        return tuple(np.flatnonzero(self._slow).tolist())

    @property
    def suspects(self) -> bool:
        """Whether any series has a large part of the evidence for an alarm that it is slow."""
        return bool(self._sums[0].max(initial=0.0) > self._threshold / (MIN_VALUES_PER_ALARM + 0.5))

    @property
    def wandering(self) -> float:
        """Variance of healthy series around their first levels, log units squared."""
        return self._drift.pooled

    @property
    def cooldowns(self) -> dict[int, Cooldown]:
        """The cooldowns of all series in cooldown, also while levels are being learnt.

        A series is in cooldown after it looked slow and was measured to be healthy.
        """
        return self._kept_cooldowns | {
            series: Cooldown(shift=float(self._base[series]) - before, until=until, patience=self._patience[series])
            for series, (until, before) in self._cooldowns.items()
        }

    @property
    def noise(self) -> Floats:
        """(n,): standard deviation of each series around its level that the tests assume."""
        return self._noise.sigma

    def levels(self, *, healthy: bool) -> Floats:
        """Return (n,): the healthy levels, or the present ones."""
        return (self._base if healthy else self._level).copy()

    def shift(self, series: int) -> float:
        """Return the present level relative to the healthy one, log units."""
        return float(self._level[series] - self._base[series])

    def mean_since(self, onset: int) -> Floats:
        """Return (n,): the median of each series from iteration `onset` on, minus its healthy level; NaN if unknown."""
        return np.asarray(self._window.medians(onset) - self._base)

    def moved(self, series: int, onset: int) -> float:
        """Return the change of `series` at iteration `onset`, from the kept iterations; NaN if unknown."""
        return self._window.moved(series, onset)

    def standing(self, series: int) -> SeriesStanding:
        """Return the state of `series`. Only the first call after an update takes time linear in the number of
        series."""
        if self._recent is None:
            self._recent = self._window.medians(self._window.back(RECENT_VALUES))
        until, before = self._cooldowns.get(series, (None, float(self._base[series])))
        return SeriesStanding(
            level=float(self._recent[series]) - before if self.ready else float("nan"),
            noise=float(self._sigma[series]),
            evidence=float(self._sums[0, :, series].max()) / self._threshold,
            slow=bool(self._slow[series]),
            pardon=float(self._base[series]) - before,
            pardoned_until=until,
            peers=int(self._members[self._group[series]]) - 1,
        )

    def scores(self) -> tuple[Floats, Floats]:
        """Return `level` and `evidence` of all series, as in `standing`, (n,) both."""
        if self._recent is None:
            self._recent = self._window.medians(self._window.back(RECENT_VALUES))
        before = self._base.copy()
        for series, (_, base) in self._cooldowns.items():
            before[series] = base
        levels = self._recent - before if self.ready else np.full(self.size, np.nan)
        return levels, np.asarray(self._sums[0].max(axis=0) / self._threshold)

    def is_slow(self, series: int) -> bool:
        """Return whether `series` was found slow and has not recovered."""
        return bool(self._slow[series])

    def explain(self, series: int, shift: float) -> None:
        """Attribute the shift of `series` to another cause: its level is `shift` above the healthy level, but it is not
        slow."""
        self._mark(series, False)
        self._set(series, self._base[series] + shift)
        self._explained[series] = True

    def accept(self, series: int, shift: float, *, slow: bool) -> None:
        """Apply an outside judgement of `series`: its level is `shift` above the healthy level, and it is slow or
        not."""
        self._set(series, self._base[series] + shift)
        self._mark(series, slow)
        self._reported_shift[series] = shift

    def clear(self, series: int, index: int) -> None:
        """Begin a cooldown of `series` at `index`: its present level counts as healthy for `patience` iterations.

        Call after a measurement has found the series healthy.
        """
        shift = max(self.shift(series), 0.0)
        self._mark(series, False)
        before = self._patience.get(series)
        patience = (
            self._least_patience if before is None else min(2 * before, MAX_PATIENCE_FACTOR * self._least_patience)
        )
        self._patience[series] = patience
        if not self.ready:
            self._kept_cooldowns[series] = Cooldown(shift=shift, until=index + patience, patience=patience)
            self._set(series, 0.0)
            return
        base = self._cooldowns.pop(series, (0, float(self._base[series])))[1]
        self._cooldowns[series] = (index + patience, base)
        self._base[series] += shift
        self._counts[series] = SETTLED_ITERATIONS
        self._set(series, self._base[series])

    def update(self, index: int, values: npt.ArrayLike, widths: Floats | None = None) -> list[Shift]:
        """Test the values of an iteration and return the shifts.

        `index`: number of the iteration, increasing. `values` (n,): log ratios; NaN and impossible values are missing.
        `widths` (n,): relative standard deviations of the values, if they are means of different numbers of
        measurements. An iteration without a quorum of values is skipped.
        """
        value = np.array(values, dtype=np.float64)
        value[~(np.abs(value) < MAX_LOG_RATIO)] = np.nan
        present = np.isfinite(value)
        if self.size < 2 or np.count_nonzero(present) < self._quorum:
            return []
        if self._learnt is None:
            return self._test(index, value, present, widths)
        self._learnt.append((index, value, widths))
        values = sum(np.count_nonzero(np.isfinite(row)) for _, row, _ in self._learnt)
        if len(self._learnt) < LEARNING_ITERATIONS or (
            values < 0.8 * LEARNING_ITERATIONS * self.size and len(self._learnt) < 4 * LEARNING_ITERATIONS
        ):
            return []
        buffered, self._learnt = self._learnt, None
        self._learn(index, np.array([row for _, row, _ in buffered]), [width for _, _, width in buffered])
        shifts: dict[int, Shift] = {}
        for index_then, row, width in buffered:
            for shift in self._test(index_then, row, np.isfinite(row), width):
                shifts[shift.series] = msgspec.structs.replace(shift, detected=index)
        return list(shifts.values())

    def _learn(self, index: int, rows: Floats, widths: list[Floats | None]) -> None:
        """Learn the first levels and scales from values (iterations, n).

        The level of a series is its median, within bounds around the level of its peers.
        """
        expected = self._level.copy()
        rows = rows - expected
        for _ in range(2):  # the second pass has levels that make the common part more precise
            common = np.array([low_median(row[np.isfinite(row)]) for row in rows - self._base])
            own = medians(rows - common[:, None])
            centre = np.zeros(self._members.size)
            for group in range(self._members.size):
                of_group = own[self._group == group]
                of_group = of_group[np.isfinite(of_group)]
                centre[group] = low_median(of_group) if of_group.size else 0.0
            centre_of = centre[self._group]
            offset = np.where(np.isfinite(own), own - centre_of, 0.0)
            self._widen_bounds(offset)
            self._base = centre_of + np.clip(offset, -self._spread, self._spread)
        self._centre = centre_of
        self._counts[:] = np.isfinite(rows).sum(axis=0)
        self._has_unlearnt = True
        self._keep_cooldowns(offset, index)
        self._level = self._base + expected
        away = np.abs(rows - common[:, None] - own)
        for row, width in zip(away, widths, strict=True):
            finite = np.isfinite(row)
            row /= self._width(width, finite, max(int(np.count_nonzero(finite)), 1)) if finite.any() else 1.0
        away[away == 0.0] = np.nan  # the series that is itself the common part
        away[:, np.isfinite(away).sum(axis=0) < LEARNING_ITERATIONS - 2] = np.nan  # too few for an estimate
        self._noise.learn(away, np.where(np.isfinite(own), own - self._base, 0.0))
        self._refresh()

    def _widen_bounds(self, offset: Floats) -> None:
        """Widen the bounds around peers if healthy series in general differ by more than `spread`."""
        compared = np.isfinite(self._spread)
        if np.count_nonzero(compared) >= MIN_CALM_SERIES:
            apart = variance(offset[compared], np.zeros(1))
            self._spread[compared] = np.maximum(self._spread[compared], MAX_PEER_SIGMAS * np.sqrt(apart))

    def _keep_cooldowns(self, offset: Floats, index: int) -> None:
        """Apply earlier cooldowns to series that still have the cleared shift. `offset` (n,): deviations from peers."""
        for series, cooldown in self._kept_cooldowns.items():
            if index < cooldown.until and offset[series] > max(cooldown.shift / 2, self._least):
                more = min(cooldown.shift, float(offset[series]))
                before = self._centre[series] + np.clip(
                    offset[series] - more, -self._spread[series], self._spread[series]
                )
                self._cooldowns[series] = (cooldown.until, float(before))
                self._base[series] = before + more
                self._counts[series] = SETTLED_ITERATIONS
        self._kept_cooldowns = {}

    def _test(self, index: int, value: Floats, present: Bools, widths: Floats | None) -> list[Shift]:
        whole = bool(present.all())
        away = value - self._level
        healthy = present & ~self._slow if self._slow_count else present
        if whole and not self._slow_count:
            common = low_median(away, self._ambiguous)
        else:
            common = low_median(away[healthy] if healthy.any() else away[present], self._ambiguous)
        away -= common
        if self._has_unlearnt:
            self._take_first_values(value - common, away, present)
        self._window.add(index, value - common, common)
        self._rows += 1
        self._recent = None

        present_count = self.size if whole else int(np.count_nonzero(present))
        unit = away / self._width(widths, present, present_count)
        z = unit / self._sigma
        if not whole:
            z = np.where(present, z, 0.0)
        gains = np.subtract(np.stack([z, -z])[:, None], self._halves)
        gains *= self._steps
        np.minimum(gains, self._carry, out=gains)
        np.maximum(gains, -self._threshold / MIN_VALUES_PER_ALARM, out=gains)
        if not whole:
            gains[:, :, ~present] = 0.0
        fresh = self._sums <= 0.0
        self._sums += gains
        np.maximum(self._sums, 0.0, out=self._sums)
        self._onsets[fresh] = index
        evidence = self._sums.max(axis=(0, 1))
        shifts = self._alarms(index) if evidence.max() >= self._threshold else []
        self._noise.follow(unit, self._sigma, present)
        if self._rows < SPARSE_AFTER or self._rows % SPARSE_STRIDE == 0:
            self._adapt(away, present, evidence)
        if self._rows % REVIEW_EVERY == 0 or self._rows == REVIEW_EVERY // 2:
            self._wander()
        if self._rows % REVIEW_EVERY == 0:
            shifts += self._drifted(index)
        self._end_cooldowns(index)
        if self._stale or self._rows % REVIEW_EVERY == 0 or (self._rows < SETTLED_ITERATIONS and self._rows % 4 == 0):
            self._refresh()
        return shifts

    def _take_first_values(self, value: Floats, away: Floats, present: Bools) -> None:
        """Set the healthy level of each series without peers and without a known level to its first value."""
        new = present & (self._counts == 0) & np.isinf(self._spread)
        if new.any():
            shift = self._level - self._base
            self._base[new] = (value - shift)[new]
            self._level[new] = value[new]
            self._counts[new] = 1
            away[new] = 0.0
        self._has_unlearnt = bool(((self._counts == 0) & np.isinf(self._spread)).any())

    def _width(self, widths: Floats | None, present: Bools, count: int) -> Floats | float:
        """Return the relative standard deviations of values minus their common part, which is a median of `count`."""
        own = max(1.0 - 2.0 / count, 0.0)  # because each value contributes to the common part
        if widths is None:
            return float(np.sqrt(own + MEDIAN_VARIANCE / count))
        squares = widths * widths
        return np.asarray(np.sqrt(own * squares + MEDIAN_VARIANCE * float(squares[present].mean()) / count))

    def _adapt(self, away: Floats, present: Bools, evidence: Floats) -> None:
        """Let the levels of series without much evidence of a shift follow their values slowly."""
        calm = present & (evidence < 3.0)
        if not calm.any():
            return
        step = np.maximum(1.0 / (self._since + 1.0), NEW_WEIGHT)
        learning = calm & (self._counts < SETTLED_ITERATIONS) & (self._level == self._base)
        step = np.where(learning, np.maximum(1.0 / (self._counts + 1.0), NEW_WEIGHT), step)
        move = np.where(calm, step * np.minimum(np.maximum(away, -2 * self._sigma), 2 * self._sigma), 0.0)
        move[calm] -= move.sum() / np.count_nonzero(calm)  # a common movement belongs to the common part
        self._level += move
        if learning.any():
            bounded = np.clip(self._base + move, self._centre - self._spread, self._centre + self._spread)
            self._base = np.where(learning, bounded, self._base)
            self._level = np.where(learning, self._base, self._level)
            self._counts += learning
        self._since += calm

    def _wander(self) -> None:
        """Update the estimate of how far healthy series wander, and with it the smallest reported shifts."""
        late, counts = self._window.means(REVIEW_EVERY)
        calm = ~self._slow & ~self._explained & (counts > REVIEW_EVERY // 4)
        learnt = max(1.0 - 2 * REVIEW_EVERY / self._rows, 0.0)  # base and values share part of their data
        error = learnt * self._noise.scale**2 / np.maximum(counts, 1.0)
        self._drift.follow(late - self._base, error, calm)
        ahead = 1.0 + 2 * REVIEW_EVERY / self._rows  # wandering goes on until the next review
        self._floor = np.maximum(self._drift.least * ahead, self._least)

    def _refresh(self) -> None:
        """Compute the constants of the tests from the present noise."""
        self._stale = False
        self._sigma = self._noise.sigma
        self._ambiguous = 4 * float(np.median(self._sigma)) if self.size else 0.0
        value_count = np.maximum(np.minimum(self._counts, self._since), 1)
        self._steps = np.maximum(
            np.array(SHIFT_GRID)[:, None] / self._sigma, np.maximum(MIN_LEVEL_ERRORS / np.sqrt(value_count), 1.0)
        )
        wandering = np.where(self._floor > self._least, WANDERING_SHARE * self._floor / self._sigma, 0.0)
        self._halves = np.maximum(self._steps / 2, wandering)
        self._carry = np.minimum(self._noise.surprise, self._threshold / MIN_VALUES_PER_ALARM)

    def _alarms(self, index: int) -> list[Shift]:
        best = self._sums.max(axis=1)
        over = np.flatnonzero(best.max(axis=0) >= self._threshold).tolist()
        estimates: dict[int, tuple[int, float]] = {}
        for series in over:
            side = int(best[1, series] > best[0, series])
            hint = int(self._onsets[side, self._sums[side, :, series].argmax(), series])
            estimates[series] = self._window.locate(series, float(self._level[series]), 1.0 - 2.0 * side, hint)
        changes = [level - float(self._level[series]) for series, (_, level) in estimates.items()]
        first = min(onset for onset, _ in estimates.values())
        moved = self._window.others_moved(first, changes)
        if moved:
            return self._most_moved(over, index, first, moved)
        shifts = []
        for series, (onset, level) in estimates.items():
            alarm = Alarm(test="log evidence", statistic=float(best[:, series].max()), threshold=self._threshold)
            shift = self._interpret(series, index, onset, level, alarm)
            if shift is not None:
                shifts.append(shift)
        return shifts

    def _most_moved(self, over: list[int], index: int, onset: int, moved: float) -> list[Shift]:
        """Shift the levels of all series except `over` by `moved`, and return the shifts of those that became slow.

        If `moved` is negative, these series were slow while levels were learnt.
        """
        rest = np.ones(self.size, dtype=bool)
        rest[over] = False
        before = self._level - self._base
        self._level[rest] += moved
        self._sums[:] = 0.0
        slower = rest & ~self._slow & (before + moved >= self._floor)
        if moved < 0.0 or not slower.any():
            self._base[rest] += moved
            return []
        shifts = []
        for series in np.flatnonzero(slower).tolist():
            self._set(series, float(self._level[series]))
            shifts.append(self._slower(series, onset, index, float(before[series]), float(before[series]) + moved))
        return shifts

    def _slower(
        self, series: int, onset: int, index: int, before: float, after: float, alarm: Alarm | None = None
    ) -> Shift:
        """Mark `series` as slow and return its shift, with `CREEP_CONFIDENCE`."""
        self._mark(series, True)
        self._reported_shift[series] = after
        return Shift(
            series=series,
            kind="slow",
            onset=onset,
            detected=index,
            before=before,
            after=after,
            confidence=CREEP_CONFIDENCE,
            alarm=alarm,
        )

    def _interpret(self, series: int, index: int, onset: int, level: float, alarm: Alarm) -> Shift | None:
        """Return the shift of an alarm, given the state of the series; None if it is not to be reported.

        `level`: the new level of the series.
        """
        centre = float(self._centre[series])
        if self._counts[series] < SETTLED_ITERATIONS and level > self._base[series] > centre + self._spread[series] / 2:
            self._base[series] = centre  # a base at its bounds was clipped there, not learnt
        base = float(self._base[series])
        before, after = self.shift(series), level - base
        was_slow = bool(self._slow[series])
        count = max(3, self._window.count(onset))
        weight = min(count * ((after - before) / float(self._sigma[series])) ** 2 / 2, 60.0) - self._prior
        confidence = min(max(1 / (1 + float(np.exp(-weight))), 0.5), 1 - 1e-9)
        self._set(series, level, count)
        floor = float(self._floor[series])
        kind: Literal["slow", "recovered"]
        if was_slow and after < max(min(floor, before / 2), 0.2 * before, self._least):
            self._mark(series, False)
            self._set(series, base if abs(after) < self._least else level, count)
            kind = "recovered"
        elif after >= floor and (not was_slow or self._is_worth_reporting(series, after, confidence)):
            self._mark(series, True)
            self._reported_shift[series] = after
            kind = "slow"
        else:
            if after <= -floor and not was_slow:  # it was slow, unnoticed, while levels were learnt
                self._base[series] = level
                self._cooldowns.pop(series, None)
            return None
        return Shift(
            series=series,
            kind=kind,
            onset=onset,
            detected=index,
            before=before,
            after=after,
            confidence=confidence,
            alarm=alarm,
        )

    def _is_worth_reporting(self, series: int, after: float, confidence: float) -> bool:
        """Return whether a further shift of a slow series is reported."""
        more = after - float(self._reported_shift[series])
        worse = max(MIN_FURTHER_SHIFT, float(self._floor[series]))
        return (more >= worse and confidence > 0.9) or abs(more) >= max(0.1, self._least)

    def _drifted(self, index: int) -> list[Shift]:
        """Return the shifts of series with levels that drifted away from the healthy level without an alarm of a
        CUSUM."""
        away = self._level - self._base
        least = np.where(self._slow, self._reported_shift + np.maximum(MIN_FURTHER_SHIFT, self._floor), self._floor)
        certain = 4 * self._sigma / np.sqrt(np.clip(self._since, 1, SETTLED_ITERATIONS))
        needed = np.maximum(least, certain)
        crept = (away >= needed) & ~self._explained & (self._counts >= SETTLED_ITERATIONS)
        shifts = []
        for series in np.flatnonzero(crept).tolist():
            before = float(self._reported_shift[series]) if self._slow[series] else 0.0
            shift, threshold = float(away[series]), float(needed[series])
            alarm = Alarm(test="shift", statistic=shift, threshold=threshold)
            shifts.append(self._slower(series, self._window.first, index, before, shift, alarm))
        return shifts

    def _end_cooldowns(self, index: int) -> None:
        """End expired cooldowns: the healthy level is again that before the cooldown."""
        for series, (until, base) in list(self._cooldowns.items()):
            if index >= until:
                del self._cooldowns[series]
                if self._slow[series]:  # slow beyond the cleared shift, and now by that shift as well
                    self._reported_shift[series] += self._base[series] - base
                    self._base[series] = base
                    continue
                self._base[series] = base
                self._level[series] = base
                self._sums[:, :, series] = 0.0

    def _set(self, series: int, level: float, count: int = 3) -> None:
        self._level[series] = level
        self._explained[series] = False
        self._since[series] = count
        self._stale = True
        self._sums[:, :, series] = 0.0

    def _mark(self, series: int, slow: bool) -> None:
        self._slow[series] = slow
        self._slow_count = int(self._slow.sum())
