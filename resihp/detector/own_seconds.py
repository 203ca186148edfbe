"""Finds the slow ranks of a script by the seconds of their own work, without knowing what that work is. Pure.

In synchronous training every iteration takes as long as the slowest rank needs. A script may measure what each rank
does by itself (`resihp.section`). Stages of a pipeline differ by nature, and a rank's share of the data varies; so a
rank is slow only if it needs more than before, and more than the other ranks compared with before. Each window of many
iterations gives one value for each rank: the logarithm of its own seconds for an iteration. A rank that needs more from
the first window on is found only if all others are alike.

Called by `resihp.controller.scripts.slow_ranks`, which chooses the windows and acts on the result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np

from resihp.detector.sequential.densities import Floats
from resihp.detector.sequential.window import low_median, medians

MIN_SLOWDOWN = 0.15
"""Smallest relative slowdown that is found."""
MIN_SPREADS = 5.0
"""Smallest slowdown that is found, in standard deviations of a window's value."""
AGREEING_WINDOWS = 3
"""Number of windows in a row that must agree on a slow rank, and on its recovery."""
LEARNED_WINDOWS = 6
"""Number of windows from which the usual seconds are learned before anything is found."""
MAX_LEARNED_WINDOWS = 20
"""Number of windows after which the usual seconds stay as they are, so that slow drift is not taken for usual."""
HISTORY_WINDOWS = 30
"""Number of latest windows that tell how much a rank varies."""
MIN_SPREAD = 0.01
NEW_WORK = 0.3
"""Relative change of the median rank from which on the script does other work than before, and all is learned anew."""
RECOVERED_SLOWDOWN, RECOVERED_SPREADS = 0.05, 2.0
"""A slow rank has recovered if less than the larger of these remains, and less than half of its slowdown."""
MAX_ALIKE_DIFFERENCE = 0.10
"""Largest relative difference of ranks that do equal work."""
MIN_ALIKE_RANKS = 4
"""Number of ranks from which on one rank stands out from the first window on."""


class WorkWindow(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Own seconds per iteration of each rank, over some iterations.

    `iteration`: the first of them. `own` (ranks,): NaN for a rank of which nothing is known; `sections`: the same for
    each section. `began_at`: monotonic time in seconds.
    """

    iteration: int
    began_at: float
    own: Floats
    sections: Mapping[str, Floats]


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that has become slow, or has recovered. `factor`: its own seconds over those it should need. `section`:
    the section with most of the difference; empty if it has no name."""

    rank: int
    factor: float
    spread: float
    section: str
    iteration: int
    began_at: float


class Judgement(msgspec.Struct, frozen=True):
    slow: tuple[SlowRank, ...] = ()
    recovered: tuple[SlowRank, ...] = ()


class OwnSeconds:
    """The usual own seconds of all ranks, and the latest windows."""

    def __init__(self) -> None:
        self._learned: deque[WorkWindow] = deque(maxlen=MAX_LEARNED_WINDOWS)
        self._is_learned = False
        self._recent: deque[tuple[WorkWindow, Floats, Floats]] = deque(maxlen=AGREEING_WINDOWS)
        """Latest windows with each rank's excess over its usual seconds (log units), and the evidence for slowness."""
        self._history: deque[Floats] = deque(maxlen=HISTORY_WINDOWS)
        """Excesses of ranks that are not slow."""
        self._usual = np.empty(0)
        self._new_work = 0

    @property
    def ranks(self) -> int:
        return int(self._usual.size)

    def begin_round(self) -> None:
        """Forget the latest windows: other processes have the ranks now, with the same work."""
        self._recent.clear()

    def add(self, window: WorkWindow, slow: Mapping[int, float]) -> Judgement:
        """Judge one more window. `slow`: speed of each rank that is known to be slow, relative to a healthy one."""
        if not self._is_learned:
            self._learned.append(window)
            return self._learn(slow) if len(self._learned) >= LEARNED_WINDOWS else Judgement()
        change = np.log(window.own) - self._usual
        common = _common(change)
        if not math.isfinite(common):
            return Judgement()
        if self._is_new_work(common):
            self._start_anew(window)
            return Judgement()
        excess = change - common
        evidence = np.minimum(excess, change)
        spread = self._spread(excess)
        doubtful = evidence >= np.maximum(math.log1p(MIN_SLOWDOWN), MIN_SPREADS * spread)
        has_verdict = np.isin(np.arange(excess.size), list(slow))
        self._recent.append((window, excess, np.where(doubtful, evidence, -np.inf)))
        self._history.append(np.where(doubtful | has_verdict, np.nan, excess))
        if len(self._learned) < MAX_LEARNED_WINDOWS and not (doubtful | has_verdict).any():
            self._learned.append(window)
            self._usual = self._level()
        return self._judge(spread, slow)

    # --- usual seconds ------------------------------------------------------------------------------------------

    def _level(self) -> Floats:
        """Return each rank's usual own seconds, as a logarithm, without what all ranks share."""
        logs = np.log(np.stack([window.own for window in self._learned]))
        level = medians(logs)
        common = np.array([_common(row - level) for row in logs])
        return medians(logs - common[:, None])

    def _learn(self, slow: Mapping[int, float]) -> Judgement:
        """Learn the usual seconds. Ranks that are known to be slow, or that stand out, count without their slowdown."""
        self._usual, self._is_learned = self._level(), True
        self._history.clear()
        for window in self._learned:
            change = np.log(window.own) - self._usual
            self._history.append(change - _common(change))
        spread = self._spread(np.zeros(self.ranks))
        recovered = []
        for rank, speed in slow.items():
            if rank < self.ranks and self._is_alike(rank):
                recovered.append(self._slowness(rank, 0.0, spread, self._learned))
            elif rank < self.ranks:
                self._usual[rank] += math.log(speed)
        outlier = self._outlier(spread, slow)
        if outlier is None:
            return Judgement(recovered=tuple(recovered))
        others = np.delete(self._usual, outlier)
        excess = float(self._usual[outlier] - _common(others))
        outlier_slowness = self._slowness(outlier, excess, spread, self._learned, from_start=True)
        self._usual[outlier] -= excess
        return Judgement(slow=(outlier_slowness,), recovered=tuple(recovered))

    def _outlier(self, spread: Floats, slow: Mapping[int, float]) -> int | None:
        """Return the rank that stands out among ranks that are alike; None if there is none. The first and the last
        rank may have more to do than others: they save, and compute the loss of a pipeline."""
        if self.ranks < MIN_ALIKE_RANKS or slow or not np.isfinite(self._usual).all():
            return None
        rank = int(np.argmax(self._usual))
        others = np.delete(self._usual, rank)
        least = max(math.log1p(MIN_SLOWDOWN), MIN_SPREADS * float(spread[rank]))
        is_alone = np.ptp(others) <= math.log1p(MAX_ALIKE_DIFFERENCE) and self._usual[rank] - others.max() >= least
        return rank if is_alone and 0 < rank < self.ranks - 1 else None

    def _is_alike(self, rank: int) -> bool:
        """Return whether a rank needs what all other ranks need, and these are alike."""
        if self.ranks < MIN_ALIKE_RANKS:
            return False
        others = np.delete(self._usual, rank)
        near = self._usual[rank] <= others.max() + math.log1p(RECOVERED_SLOWDOWN)
        return bool(near and np.ptp(others) <= math.log1p(MAX_ALIKE_DIFFERENCE))

    def _is_new_work(self, common: float) -> bool:
        """Return whether the script does other work now, such as longer sequences, for as long as a verdict needs."""
        self._new_work = self._new_work + 1 if abs(common) > math.log1p(NEW_WORK) else 0
        return self._new_work >= AGREEING_WINDOWS

    def _start_anew(self, window: WorkWindow) -> None:
        self._learned.clear()
        self._learned.append(window)
        self._recent.clear()
        self._is_learned, self._new_work = False, 0

    # --- verdicts -----------------------------------------------------------------------------------------------

    def _spread(self, excess: Floats) -> Floats:
        """Return the standard deviation of a window's value, for each rank: its own, that of the usual rank, or that
        among the ranks of this window, whichever is largest."""
        rows = np.stack(self._history)
        deviations = np.abs(rows - medians(rows))
        own = 1.4826 * np.nan_to_num(medians(deviations))
        among = 1.4826 * _common(np.abs(excess))
        return np.maximum(own, max(MIN_SPREAD, float(np.median(own)), among))

    def _judge(self, spread: Floats, slow: Mapping[int, float]) -> Judgement:
        if len(self._recent) < AGREEING_WINDOWS:
            return Judgement()
        windows = [window for window, _, _ in self._recent]
        excesses = np.stack([excess for _, excess, _ in self._recent])
        lasting = np.isfinite(np.stack([evidence for _, _, evidence in self._recent])).all(axis=0)
        mean = excesses.mean(axis=0)
        newly_slow = [int(rank) for rank in np.flatnonzero(lasting) if int(rank) not in slow]
        recovered = []
        for rank, speed in slow.items():
            if rank < self.ranks:
                remains = max(math.log1p(RECOVERED_SLOWDOWN), RECOVERED_SPREADS * float(spread[rank]))
                if bool((excesses[:, rank] <= min(remains, -0.5 * math.log(speed))).all()):
                    recovered.append(rank)
        return Judgement(
            slow=tuple(self._slowness(rank, float(mean[rank]), spread, windows) for rank in newly_slow),
            recovered=tuple(self._slowness(rank, float(mean[rank]), spread, windows) for rank in recovered),
        )

    def _slowness(
        self,
        rank: int,
        excess: float,
        spread: Floats,
        windows: deque[WorkWindow] | list[WorkWindow],
        *,
        from_start: bool = False,
    ) -> SlowRank:
        """Describe a rank's slowness in some windows. `from_start`: compare its sections with those of other ranks."""
        added: dict[str, float] = {}
        for name in windows[-1].sections:
            now = _median_of(windows, name)
            usual = _median_of(self._learned, name)
            added[name] = float(now[rank] - (_common(usual) if from_start else usual[rank]))
        named = {name: seconds for name, seconds in added.items() if seconds > 0.0}
        return SlowRank(
            rank=rank,
            factor=math.exp(excess),
            spread=float(spread[rank]),
            section=max(named, key=lambda name: named[name], default=""),
            iteration=windows[0].iteration,
            began_at=windows[0].began_at,
        )


def _median_of(windows: deque[WorkWindow] | list[WorkWindow], section: str) -> Floats:
    """Return each rank's median seconds in a section; NaN where nothing is known."""
    rows = [window.sections[section] for window in windows if section in window.sections]
    if not rows:
        return np.full(windows[-1].own.size, np.nan)
    return medians(np.stack(rows))


def _common(values: Floats) -> float:
    """Return the lower median of the known values, that of the faster one of two ranks; NaN without any."""
    finite = values[np.isfinite(values)]
    return low_median(finite) if finite.size else math.nan
