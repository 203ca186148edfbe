"""The paper's detector and Greyhound's: change points of plain iteration times, and what makes one a suspicion. Pure.

Both look at one number of an iteration, its seconds (`resihp.detector.sequential.run_lengths`), and say that something
is slow, never who: the controller then measures all devices.

==============  ====================================================================================================
`paper`         only at a change point, the time of this iteration's workload is predicted (Eq. 1 and 2). A suspicion
                is what took more than 1.25 times that; anything else is benign, and dropped from the series
                (ResiHP, section 5.2)
`greyhound`     a change point counts if the mean after it is 10 % higher than before (Greyhound's verification)
==============  ====================================================================================================

That it is over is found by the same means: at a change point, the iteration is nearer to its healthy time than to that
of what is slow; or the mean is 10 % lower. Decides nothing else. Made by `resihp.detector.modes`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from resihp.detector.findings import Assessment, Finding
from resihp.detector.observation import Observation
from resihp.detector.online.plan_arrays import LONGEST_S
from resihp.detector.online.predictor import Predictor
from resihp.detector.rivals.healthy_times import HealthyTimes
from resihp.detector.sequential.run_lengths import RunLengths
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders

SLOW = 1.25
"""`paper`: an iteration that takes more than so many times what is predicted is suspect."""
SHIFT = 1.1
"""`greyhound`: the mean after a change point over that before it."""
VERIFIED_FROM, VERIFIED_UNTIL = 3, 10
"""`greyhound`: iterations since a change point from whose mean it is verified."""
APART = 1.1
"""`paper`: what is slow must make so much of a difference for its end to be seen."""


class _Series:
    """Iteration times since a plan took effect, those that were dropped left out."""

    def __init__(self) -> None:
        self.runs = RunLengths()
        self.seconds: list[float] = []
        self.iterations: list[int] = []
        self.before, self.start = 0, 0
        """Where the regime before the present one began, and the present one."""
        self.verified = True
        """Nothing more is expected of the present change point."""

    def take(self, iteration: int, seconds: float) -> bool:
        """The next iteration; whether it shows that there was a change point."""
        former = self.runs.longest
        self.seconds.append(seconds)
        self.iterations.append(iteration)
        run = self.runs.update(seconds)
        start = len(self.seconds) - max(run, 1)
        if not self.runs.ready or self.runs.lasting or run > former or start <= self.start:
            return False
        self.before, self.start, self.verified = self.start, start, False
        return True

    def drop(self) -> None:
        """The last one, which seemed to show a change point, was benign."""
        self.runs.drop()
        self.seconds.pop()
        self.iterations.pop()
        self.start, self.verified = self.before, True


class ChangePointDetector:
    """A `resihp.detector.interface.Detector` that looks at whole iterations."""

    def __init__(self, rule: Literal["paper", "greyhound"]) -> None:
        self.predictor = Predictor()
        self._rule = rule
        self._healthy: HealthyTimes | None = None
        self._epoch, self._last = 0, -1
        self._series = _Series()
        self._slow: dict[int, float] = {}
        """Speeds that probes have confirmed."""
        self._open = False
        """A suspicion was raised of which no probe has found the reason."""

    @property
    def settled(self) -> bool:
        return self._healthy is not None and self._healthy.settled

    @property
    def beside_s(self) -> float:
        return 0.0 if self._healthy is None else self._healthy.beside_s

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        return (None, None) if self._healthy is None else self._healthy.transfers()

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """A plan takes effect: its iteration times have nothing to do with those before."""
        self._healthy = HealthyTimes(plan, orders, nodes, self.predictor)
        self._epoch, self._last, self._series = plan.epoch, -1, _Series()
        present = {*self._healthy.ranks, *plan.layout.standby}
        self._slow = {rank: speed for rank, speed in self._slow.items() if rank in present}

    def observe(self, observation: Observation) -> Assessment:
        healthy, iteration, seconds = self._healthy, observation.iteration, observation.seconds
        known: Literal["workload", "plain times"] = "workload" if observation.times else "plain times"
        sound = 0.0 < seconds < LONGEST_S
        if healthy is None or observation.epoch != self._epoch or iteration <= self._last or not sound:
            return Assessment(predicted_s=None, known=known)
        self._last = iteration
        predicted = None
        if observation.times:
            healthy.learn(observation, self._slow)
            predicted = healthy.seconds({})
        warming_up = not self._series.runs.ready
        changed = self._series.take(iteration, seconds)
        if not self._series.runs.ready:
            return Assessment(predicted_s=predicted, known="warming up")
        if self._rule == "greyhound":
            findings = self._by_mean(iteration)
        else:
            findings = self._by_prediction(iteration, seconds) if changed or warming_up else ()
        return Assessment(predicted_s=predicted, findings=findings, known=known)

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        return None if self._healthy is None else self._healthy.forecast(tokens, squares, self._at_work())

    def speeds(self) -> dict[int, float]:
        """As confirmed: nothing else is known of single ranks."""
        return dict(sorted(self._slow.items()))

    def standing(self, rank: int) -> None:
        """No rank is judged by itself."""

    def coverage(self) -> dict[int, int]:
        return {}

    def scores(self) -> None:
        """As for `standing`."""

    def confirmed(self, rank: int, speed: float) -> None:
        """Raises ValueError for a speed that is not positive."""
        if not (math.isfinite(speed) and speed > 0.0):
            raise ValueError(f"rank {rank}: a speed of {speed} cannot be; 1 is healthy, 0.5 half as fast")
        self._slow[rank] = speed
        self._open = False

    def cleared(self, rank: int) -> None:
        self._slow.pop(rank, None)

    def job_is_slow(self) -> None:
        self._open = True

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Links are never suspected."""

    # --- the two rules -----------------------------------------------------------------------------------------------

    def _by_prediction(self, iteration: int, seconds: float) -> tuple[Finding, ...]:
        """The paper's: at a change point, against what is predicted for this iteration's workload. Once the first
        iterations of a plan are known, too, who was slow before may be found well."""
        assert self._healthy is not None
        healthy, present = self._healthy.seconds({}), self._healthy.seconds(self._at_work())
        if healthy is None or present is None:
            return ()
        at_change = not self._series.verified
        if at_change and seconds > SLOW * present:
            self._open = True
            told = f"{seconds / present:.3f} times what is predicted for its workload"
            return (self._told("fail-slow", iteration, seconds / healthy - 1, told),)
        visible = present > APART * healthy
        if (visible and seconds < math.sqrt(healthy * present)) or (at_change and self._open):
            return self._ended(iteration, seconds / healthy - 1, f"{seconds / healthy:.3f} times its healthy time")
        if at_change:
            self._series.drop()
        return ()

    def _by_mean(self, iteration: int) -> tuple[Finding, ...]:
        """Greyhound's: the mean since a change point against that before it."""
        series = self._series
        since = len(series.seconds) - series.start
        if series.verified or not VERIFIED_FROM <= since <= VERIFIED_UNTIL:
            return ()
        shift = float(np.mean(series.seconds[series.start :]) / np.mean(series.seconds[series.before : series.start]))
        told = f"{shift:.3f} times the mean before"
        if shift > SHIFT:
            series.verified = self._open = True
            return (self._told("fail-slow", iteration, shift - 1, told),)
        if shift < 1 / SHIFT and (self._open or self._at_work()):
            series.verified = True
            return self._ended(iteration, shift - 1, told)
        return ()

    def _ended(self, iteration: int, change: float, told: str) -> tuple[Finding, ...]:
        """All that was slow is so no more: nobody can tell its parts."""
        ranks = tuple(self._at_work())
        self._open = False
        for rank in ranks:
            del self._slow[rank]
        named: list[tuple[int, ...]] = [(rank,) for rank in ranks] or [()]
        return tuple(self._told("recovered", iteration, change, told, one) for one in named)

    def _told(
        self,
        kind: Literal["fail-slow", "recovered"],
        iteration: int,
        change: float,
        told: str,
        ranks: tuple[int, ...] = (),
    ) -> Finding:
        onset = self._series.iterations[self._series.start]
        return Finding(
            kind=kind,
            iteration=onset,
            detected=iteration,
            change=change,
            confidence=self._series.runs.confidence,
            ranks=ranks,
            link=None,
            component="device" if ranks else "job",
            evidence=f"iteration times changed at {onset}; iteration {iteration} at {told} ({self._rule})",
        )

    def _at_work(self) -> dict[int, float]:
        """Speeds of slow ranks that have work."""
        ranks = frozenset[int]() if self._healthy is None else self._healthy.ranks
        return {rank: speed for rank, speed in self._slow.items() if rank in ranks}
