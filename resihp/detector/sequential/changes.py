"""Detects lasting changes of the level of one series, with onset, size and confidence, value by value. No clock.

Each value updates the odds of two hypotheses: the level is unchanged, or it changed to another level at some earlier
time. This is the run-length recursion of Adams & MacKay ("Bayesian online changepoint detection", 2007) on a grid of
changes, in the limit of rare changes. There, the posterior odds over the hazard are the statistic of Shiryaev and
Roberts: without a change its mean grows by 1 per value, so that alarms at B are on average at least B values apart. For
each change of the grid only the most probable run length is kept. Small changes collect evidence for as long as
necessary. A level that drifts without a jump is compared with its first value (`levels`).

The predictive density is Student's t on AR(1) innovations, mixed with outliers that may come in bursts. A checkpoint or
an evaluation therefore is an outlier, and no change, however large it is. Level, scale and correlation are estimated
robustly in a warm-up, and adapt slowly while nothing changes.

Never judges the meaning of a change; its callers, such as `resihp.detector.offline.series` and
`resihp.detector.online.iteration_channel`, do.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from resihp.detector.sequential import levels
from resihp.detector.sequential.densities import (
    BURST_PROBABILITY,
    GAUSSIAN_SCALE,
    OUTLIER_PROBABILITY,
    T_DEGREES,
    T_PEAK,
    Floats,
    LateRange,
    Skew,
    broad,
    robust,
    settled,
)
from resihp.detector.sequential.levels import ChangePoint, SeriesLevel
from resihp.detector.sequential.shifts import Alarm

WARM_UP = 12
"""Number of values from which level and noise are first estimated; slow values at the start are dropped."""
ADAPTATION_VALUES = 150
"""Number of values over which level, scale and correlation adapt while nothing changes."""
KEPT_VALUES = 96
"""Number of latest values in which the onset of a change is searched."""
RETURN_SHARE = 0.1
"""A change counts as a return to the healthy level if that level has at least this share of the evidence."""
CORRELATION_VALUES = 10.0
"""Weight of an assumed correlation, as a number of values."""
FAMILIAR_VALUES = 40.0
"""Weight of an assumed correlation that is `familiar`, as a number of values."""
HALVING_EVIDENCE = 5.0
"""Evidence for a change at which a value has half of its weight for the correlation."""
CORRELATION_ERRORS = 0.5
"""Number of standard errors that are added to the estimated correlation."""
MAX_EVIDENCE = 1e15
"""Upper bound of the evidence for a level."""
MAX_WARM_UP_SHIFT, MAX_WARM_UP_SCALES = 0.1, 4.0
"""If the level of the warm-up is above the expected level by more than both, in log units and in scales of the noise,
it is not taken for healthy."""


class ChangeDetector:
    """Finds the change points of a series, one value after the other.

    `noise`: standard deviation of a value around its level; None to estimate it. `level`: the healthy level (0 for
    residuals); None to estimate it. With both there is no warm-up. `correlation`: assumed lag-one correlation, until it
    can be estimated. `familiar`: whether the correlation is surely close to the assumed one; if values look more
    correlated while there is evidence for a change, this is then attributed to the change. `least`: smallest reported
    change, in the unit of the values; larger while the level is not well known. `false_alarms_per`: lower bound of the
    mean number of values between false alarms, under correlated Gaussian noise. `aim`: size of a change that should be
    found within four values; smaller changes are then found late or never. None to find small, persistent changes.
    `floor`: lower bound of the standard deviation. `expected`: approximate healthy level, which replaces the level of
    the warm-up if that is far above; None if unknown. `several_levels`: whether values may alternate between several
    levels without a change; the range of late values is then a lower bound of the noise.
    """

    def __init__(
        self,
        *,
        noise: float | None = None,
        correlation: float = 0.1,
        familiar: bool = False,
        least: float = 0.03,
        false_alarms_per: int = 10_000,
        level: float | None = None,
        aim: float | None = None,
        floor: float = 0.003,
        expected: float | None = None,
        several_levels: bool = False,
    ) -> None:
        self._known_noise, self._known_level = noise, level
        self._least, self._false_alarms_per, self._floor = least, false_alarms_per, floor
        self._expected = expected
        self._correlation, self._aim, self._familiar = correlation, aim, familiar
        self._pseudo = FAMILIAR_VALUES if familiar else CORRELATION_VALUES
        self._products, self._squares = 0.0, 0.0
        self._rho = correlation
        self._skew = Skew()
        self._patience = 3 * WARM_UP
        self._buffer: list[tuple[int, float]] = []
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT_VALUES)
        self._range = LateRange() if several_levels else None
        self._pending: deque[tuple[float, float, float]] = deque()
        self._healthy: SeriesLevel | None = None
        self._now: SeriesLevel | None = None
        self._last, self._stride = 0, 1
        self._drift = levels.SlowDrift(least)
        self._carried, self._outlier, self._before = 0.0, 0.0, 0.0
        self._levels: Floats = np.empty(0)
        self._prior: Floats = np.empty(0)
        self._levels_squared: Floats = np.empty(0)
        self._blur: Floats = np.empty(0)
        self._evidence: Floats = np.empty(0)
        self._seen_values: Floats = np.empty(0)
        self._carried_by_level: Floats = np.empty(0)
        self._onset: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        if noise is not None and level is not None:
            variance = (GAUSSIAN_SCALE * noise) ** 2 * (1 - correlation**2)
            self._healthy = self._now = SeriesLevel(level, ADAPTATION_VALUES, variance, ADAPTATION_VALUES)
            self._restart()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the warm-up is over; during it, no change is found."""
        return self._now is not None

    @property
    def healthy(self) -> float:
        """The healthy level, with which changes are compared; NaN during the warm-up."""
        return math.nan if self._healthy is None else self._healthy.level

    @property
    def level(self) -> float:
        """The present level: the healthy one, or the one after the last change; NaN during the warm-up."""
        return math.nan if self._now is None else self._now.level

    @property
    def noise(self) -> float:
        """Standard deviation of a value around the healthy level; NaN during the warm-up."""
        return math.nan if self._healthy is None else self._spread(self._healthy)

    @property
    def changed(self) -> bool:
        """Whether the series has changed away from the healthy level and not returned."""
        return self._now is not self._healthy

    # --- the next value ---------------------------------------------------------------------------------------------

    def update(self, index: int, value: float) -> ChangePoint | None:
        """Test the next value, and return the change that it completes, if any.

        Indices increase and may have gaps. NaN and infinities are ignored.
        """
        value = float(value)
        if not math.isfinite(value):
            return None
        self._recent.append((index, value))
        if self._now is None or self._healthy is None:
            self._warm_up(index, value)
            return None
        now = self._now
        rho = self._rho ** max(1, min((index - self._last) // self._stride, 50))
        self._last = index
        offset = value - now.level
        uncertain = self._uncertain(now)
        width = math.sqrt(now.variance * self._caution + uncertain * (1 - rho) ** 2)
        error = offset - rho * self._carried
        skew = self._skew.factor
        z = error / (width * (skew if error > 0 else 1 / skew))
        even = 2 / (skew + 1 / skew)
        wide = broad(offset)
        chance = OUTLIER_PROBABILITY + (BURST_PROBABILITY - OUTLIER_PROBABILITY) * self._outlier
        inlying = (1 - chance) * T_PEAK * even / width * (1 + z * z / T_DEGREES) ** -4
        density = inlying + chance * wide
        self._outlier = 1 - inlying / density

        self._levels[0] = self._healthy.level - now.level
        widths = np.sqrt(now.variance * self._caution + self._blur)
        if self.changed:
            widths[0] = math.sqrt(self._healthy.variance + self._uncertain(self._healthy) * (1 - rho) ** 2)
        away = offset - self._levels
        errors = np.empty((2, away.size))
        np.subtract(away, rho * self._carried, out=errors[0])
        np.subtract(away, rho * self._carried_by_level, out=errors[1])
        (first, more), (_, inlier) = self._densities(errors, widths, wide)
        begun = self._priors(uncertain) * (first / density)
        grown = self._evidence * (more / density)
        fresh = begun > grown
        self._seen_values = np.where(fresh, 1.0, self._seen_values + inlier)
        self._onset[fresh] = index
        self._evidence = np.minimum(begun + grown, MAX_EVIDENCE)
        self._carried = offset * (1 - self._outlier)
        self._carried_by_level = away * inlier

        evidence = float(np.add.reduce(self._evidence[self._seen_values > levels.MIN_VALUES - 0.5]))
        if evidence >= self._threshold():
            return self._change(index, evidence, self._threshold())
        self._learn(value, rho)
        return self._drifted(index)

    def _densities(self, errors: Floats, widths: Floats, wide: float) -> tuple[Floats, Floats]:
        """Return, for each level, the density of a value and the probability that it is not an outlier.

        `errors`: prediction errors; `widths`: scales of the densities; `wide`: density of an outlier.
        """
        skew = self._skew.factor
        z = errors / (widths * np.where(errors > 0, skew, 1 / skew))
        kernel = 1 + z * z / T_DEGREES
        kernel *= kernel
        even = 2 / (skew + 1 / skew)
        inlying = (1 - OUTLIER_PROBABILITY) * T_PEAK * even / (widths * kernel * kernel)
        density = inlying + OUTLIER_PROBABILITY * wide
        return density, inlying / density

    def _threshold(self) -> float:
        assert self._healthy is not None
        ratio = None if self._aim is None else self._aim / self._spread(self._healthy)
        return levels.evidence_needed(self._false_alarms_per, self._rho, self._healthy.worth, ratio)

    def _priors(self, uncertain: float) -> Floats:
        """Return the prior of each level; it is smaller for small changes while the present level is uncertain."""
        doubt = (6 * uncertain + self._dull) / self._levels_squared
        doubt[0] = 0.0  # the healthy level is well known, and a return to it is expected
        priors: Floats = self._prior / (1 + doubt * doubt)
        return priors

    # --- level and noise --------------------------------------------------------------------------------------------

    def _correlate(self) -> None:
        """Update the lag-one correlation: shrunk towards the assumed one, corrected for bias, plus half a standard
        error."""
        assert self._healthy is not None
        variance = self._healthy.variance / (1 - self._rho**2)
        pseudo = self._pseudo
        rho = (self._products + pseudo * variance * self._correlation) / (self._squares + pseudo * variance)
        count = pseudo + self._healthy.worth
        rho += (1 + 4 * rho) / count + CORRELATION_ERRORS * math.sqrt(max(1 - rho**2, 0) / count)
        self._rho = min(max(rho, 0.0), 0.9)
        if self._known_noise is not None:
            self._healthy.variance = (GAUSSIAN_SCALE * self._known_noise) ** 2 * (1 - self._rho**2)

    def _spread(self, level: SeriesLevel) -> float:
        return math.sqrt(level.variance / (1 - self._rho**2)) / GAUSSIAN_SCALE

    def _uncertain(self, level: SeriesLevel) -> float:
        """Return the squared standard error of a level."""
        rho = self._rho
        return level.variance / (1 - rho) ** 2 / level.count

    @property
    def _caution(self) -> float:
        """Factor on the variance, because the variance of few values may be too small by chance."""
        return 1.0 if self._now is None else 1 + 3 / self._now.worth

    def _learn(self, value: float, rho: float) -> None:
        """Adapt level, scale and correlation to earlier values: the latest few may belong to a change not found yet."""
        assert self._now is not None
        now = self._now
        self._pending.append((value, 1 - self._outlier, rho))
        delay = min(6, int(now.count) // 4)
        evidence = float(np.add.reduce(self._evidence))
        slack = 1 / (1 + evidence / (30 if self._aim is None else 200))
        # A lasting shift looks like correlated noise.
        doubt = 1 / (1 + evidence / HALVING_EVIDENCE) if self._familiar else 1.0
        while len(self._pending) > delay:
            value, inlier, rho = self._pending.popleft()
            offset = value - now.level
            spread = now.variance / (1 - self._rho**2)
            weight = inlier * (T_DEGREES + 1) / (T_DEGREES + offset * offset / spread)
            now.count = min(now.count + slack * min(weight, 1), ADAPTATION_VALUES)
            now.level += slack * weight * offset / (now.count + 1)
            if self._known_noise is None:
                error = offset - rho * self._before
                weight = inlier * (T_DEGREES + 1) / (T_DEGREES + error * error / now.variance)
                now.worth = min(now.worth + slack * inlier, ADAPTATION_VALUES)
                share = slack * inlier / (now.worth + 1)
                now.variance += share * (weight * error * error - now.variance)
                now.variance = max(now.variance, self._floor**2, self._least_variance(offset))
                if now is self._healthy:
                    fade = 1 - 1 / ADAPTATION_VALUES
                    self._skew.follow(inlier * min(error * error / now.variance, 12.0), error > 0, fade)
                    weight *= doubt
                    fade = 1 - doubt / ADAPTATION_VALUES
                    self._products = self._products * fade + weight * offset * self._before
                    self._squares = self._squares * fade + weight * self._before**2
                    self._correlate()
            self._before = offset * inlier

    def _least_variance(self, offset: float) -> float:
        """Return the lower bound of the innovations' variance, for values that alternate between levels.

        `offset`: deviation of the next value from its level.
        """
        if self._range is None:
            return 0.0
        return (GAUSSIAN_SCALE * self._range.follow(offset)) ** 2 * (1 - self._rho**2)

    def _warm_up(self, index: int, value: float) -> None:
        """Take a value of the warm-up; after enough values, estimate level and noise.

        Slow values at the start are dropped.
        """
        self._last = index
        self._buffer.append((index, value))
        if len(self._buffer) < WARM_UP:
            return
        values = np.array([v for _, v in self._buffer])
        self._stride = max(1, int(np.median(np.diff([i for i, _ in self._buffer]))))
        late = settled(values, self._floor)
        if 0 < late <= self._patience:
            self._patience -= late
            del self._buffer[:late]
            return
        level, scale = robust(values, self._floor)
        if self._expected is not None and level - self._expected > max(MAX_WARM_UP_SHIFT, MAX_WARM_UP_SCALES * scale):
            level = self._expected
        if self._known_level is not None:
            level = self._known_level
        if self._known_noise is not None:
            scale = GAUSSIAN_SCALE * self._known_noise
        errors = (values - level) / (1 + ((values - level) / (3 * scale)) ** 2)
        self._products = float(errors[1:] @ errors[:-1])
        self._squares = float(errors[:-1] @ errors[:-1])
        self._healthy = SeriesLevel(level, len(values), scale**2, len(values))
        self._correlate()
        self._healthy.variance = max(scale**2 * (1 - self._rho**2), self._floor**2)
        for value in values.tolist() if self._range is not None else ():
            self._healthy.variance = max(self._healthy.variance, self._least_variance(value - level))
        self._now = self._healthy
        self._restart()
        self._buffer.clear()

    # --- changes ----------------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Restart the comparison of the present level with all others, without evidence."""
        assert self._now is not None
        assert self._healthy is not None
        away = abs(self._now.level - self._healthy.level)
        least = max(self._least, 0.25 * away)
        upward = levels.sizes_compared(least)
        back = 0.5 if self.changed else 0.0
        up = 0.9 if not self.changed else 0.5
        self._levels = np.concatenate([[self._healthy.level - self._now.level or 1.0], upward, -upward])
        prior_share = (1 - back) / len(upward)
        self._prior = np.concatenate(
            [[back], np.full(len(upward), up * prior_share), np.full(len(upward), (1 - up) * prior_share)]
        )
        self._levels_squared = np.maximum(self._levels**2, 1e-12)
        self._blur = (self._levels * 0.06) ** 2
        self._evidence = np.zeros(len(self._levels))
        self._seen_values = np.zeros(len(self._levels))
        self._onset = np.zeros(len(self._levels), dtype=np.int64)
        self._carried, self._outlier, self._before = 0.0, 0.0, 0.0
        self._carried_by_level = np.zeros(len(self._levels))
        self._pending.clear()
        # To find a change at once, alarms must not be spent on changes that noise hides for long.
        self._dull = 0.0 if self._aim is None else 4 * self._spread(self._healthy) ** 2

    def _change(self, index: int, evidence: float, threshold: float) -> ChangePoint | None:
        assert self._now is not None
        assert self._healthy is not None
        before, healthy = self._now, self._healthy
        best = int(np.argmax(np.where(self._seen_values > levels.MIN_VALUES - 0.5, self._evidence, 0)))
        onset, after, count = levels.located(self._recent, before, float(self._levels[best]), int(self._onset[best]))
        if abs(after - before.level) < self._least:
            self._restart()
            return None
        away = before.level - healthy.level
        error = math.sqrt(self._uncertain(healthy) + healthy.variance / count)
        near = max(self._least, 0.25 * abs(away), 2.5 * error)
        back = self._evidence[0] >= RETURN_SHARE * self._evidence.sum()
        if before is not healthy and (back or abs(after - healthy.level) <= near):
            self._now = healthy
        else:
            self._now = SeriesLevel(after, count, before.variance, WARM_UP)
            if after < healthy.level:
                self._healthy = self._now
                self._drift.forget()
        self._restart()
        self._carried = self._recent[-1][1] - self._now.level
        while self._recent[0][0] < onset:
            self._recent.popleft()
        return ChangePoint(
            onset=onset,
            detected=index,
            before=before.level,
            after=after,
            confidence=min(evidence / (evidence + 1000), 1 - 1e-9),
            alarm=Alarm(test="log evidence", statistic=math.log(evidence), threshold=math.log(threshold)),
        )

    def _drifted(self, index: int) -> ChangePoint | None:
        """Return a change if the healthy level has drifted away from its first reliable value; else None."""
        assert self._healthy is not None
        if self._aim is not None or self.changed:
            return None
        healthy = self._healthy
        change = self._drift.follow(index, healthy, self._uncertain(healthy), self._evidence)
        if change is None:
            return None
        if change.after > change.before:
            self._now = SeriesLevel(healthy.level, healthy.count, healthy.variance, healthy.worth)
            healthy.level = change.before
        else:
            self._drift.forget()
        self._restart()
        return change
