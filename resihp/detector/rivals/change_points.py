"""The detectors of the ResiHP paper and of Greyhound: change points of iteration times, and their verification. Pure.

Both examine only the seconds of each iteration (`resihp.detector.sequential.run_lengths`). They report that the job is
slow, without the slow rank; the controller then probes all devices.

==============  ====================================================================================================
`paper`         only at a change point, the time of this iteration's workload is predicted (Eq. 1 and 2). An iteration
                that took more than 1.25 times that is a suspicion; any other is benign, and dropped from the series
                (ResiHP, section 5.2)
`greyhound`     a change point counts if the mean after it is 10 % higher than before (Greyhound's verification)
==============  ====================================================================================================

Recoveries are found in the same way: if, at a change point, the iteration is nearer to its healthy time than to its
slow time (`paper`), or if the mean is 10 % lower (`greyhound`). Never decides on a reaction. Created by
`resihp.detector.modes`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from resihp.detector.findings import Assessment, Finding
from resihp.detector.observation import Observation
from resihp.detector.online.plan_arrays import MAX_CHUNK_S
from resihp.detector.online.predictor import Predictor
from resihp.detector.rivals.healthy_times import HealthyTimes
from resihp.detector.sequential.run_lengths import RunLengths
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan
from resihp.pipeline.timeline import Orders

SLOW_RATIO = 1.25
"""`paper`: ratio of measured to predicted time above which an iteration raises a suspicion."""
MEAN_RATIO = 1.1
"""`greyhound`: ratio of the means after and before a change point above which the change point counts."""
VERIFIED_FROM, VERIFIED_UNTIL = 3, 10
"""`greyhound`: a change point is verified when there are at least 3, and at most 10, iterations after it."""
MIN_VISIBLE_RATIO = 1.1
"""`paper`: ratio of the expected slow time to the healthy time above which a recovery can be seen."""


class _Series:
    """The iteration times since the adoption of a plan, without benign change points that were dropped."""

    def __init__(self) -> None:
        self.runs = RunLengths()
        self.seconds: list[float] = []
        self.iterations: list[int] = []
        self.before, self.start = 0, 0
        """Indices in `seconds` at which the present regime (`start`) and the previous one (`before`) begin."""
        self.verified = True
        """Whether the latest change point has been judged."""

    def take(self, iteration: int, seconds: float) -> bool:
        """Add the next iteration; return whether it reveals a change point."""
        former_run = self.runs.longest
        self.seconds.append(seconds)
        self.iterations.append(iteration)
        run = self.runs.update(seconds)
        start = len(self.seconds) - max(run, 1)
        if not self.runs.ready or self.runs.lasting or run > former_run or start <= self.start:
            return False
        self.before, self.start, self.verified = self.start, start, False
        return True

    def drop(self) -> None:
        """Remove the last iteration, because its change point was benign."""
        self.runs.drop()
        self.seconds.pop()
        self.iterations.pop()
        self.start, self.verified = self.before, True


class ChangePointDetector:
    """A `resihp.detector.interface.Detector` that examines the times of whole iterations, by the given rule."""

    def __init__(self, rule: Literal["paper", "greyhound"]) -> None:
        self.predictor = Predictor()
        self._rule = rule
        self._healthy: HealthyTimes | None = None
        self._epoch, self._last = 0, -1
        self._series = _Series()
        self._slow: dict[int, float] = {}
        """Speed of each rank that a probe found slow."""
        self._open = False
        """Whether the job was reported as slow, and no probe has found the slow rank yet."""

    @property
    def settled(self) -> bool:
        return self._healthy is not None and self._healthy.settled

    @property
    def beside_s(self) -> float:
        return 0.0 if self._healthy is None else self._healthy.beside_s

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        return (None, None) if self._healthy is None else self._healthy.transfers()

    def adopt(self, plan: Plan, model: ModelSpec, orders: Orders, nodes: Mapping[int, Hashable] | None = None) -> None:
        """Judge the iterations of `plan` from now on, as a new series."""
        self._healthy = HealthyTimes(plan, orders, nodes, self.predictor)
        self._epoch, self._last, self._series = plan.epoch, -1, _Series()
        present = {*self._healthy.ranks, *plan.layout.standby}
        self._slow = {rank: speed for rank, speed in self._slow.items() if rank in present}

    def observe(self, observation: Observation) -> Assessment:
        healthy, iteration, seconds = self._healthy, observation.iteration, observation.seconds
        basis: Literal["workload", "plain times"] = "workload" if observation.times else "plain times"
        sound = 0.0 < seconds < MAX_CHUNK_S
        if healthy is None or observation.epoch != self._epoch or iteration <= self._last or not sound:
            return Assessment(predicted_s=None, known=basis)
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
        return Assessment(predicted_s=predicted, findings=findings, known=basis)

    def forecast(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> float | None:
        return None if self._healthy is None else self._healthy.forecast(tokens, squares, self._at_work())

    def speeds(self) -> dict[int, float]:
        """Return the speeds that probes confirmed; nothing else is known of single ranks."""
        return dict(sorted(self._slow.items()))

    def standing(self, rank: int) -> None:
        """Return None: ranks are not judged individually."""

    def coverage(self) -> dict[int, int]:
        return {}

    def scores(self) -> None:
        """Return None, as `standing` does."""

    def confirmed(self, rank: int, speed: float) -> None:
        """Record the speed at which a rank was declared slow. Raises ValueError for a speed that is not positive."""
        if not (math.isfinite(speed) and speed > 0.0):
            raise ValueError(f"rank {rank}: speed {speed} is not a positive number; 1 is healthy, 0.5 is half as fast")
        self._slow[rank] = speed
        self._open = False

    def cleared(self, rank: int) -> None:
        self._slow.pop(rank, None)

    def job_is_slow(self) -> None:
        self._open = True

    def cleared_link(self, sender: int, receiver: int) -> None:
        """Do nothing: links are never suspected."""

    # --- the two rules -----------------------------------------------------------------------------------------------

    def _by_prediction(self, iteration: int, seconds: float) -> tuple[Finding, ...]:
        """Apply the paper's rule: at a change point, compare the iteration with the prediction for its workload.

        Called also at the end of a plan's warm-up, to find the recovery from earlier slowness.
        """
        assert self._healthy is not None
        healthy, present = self._healthy.seconds({}), self._healthy.seconds(self._at_work())
        if healthy is None or present is None:
            return ()
        at_change = not self._series.verified
        if at_change and seconds > SLOW_RATIO * present:
            self._open = True
            evidence = f"{seconds / present:.3f} times the prediction for its workload"
            return (self._finding("fail-slow", iteration, seconds / healthy - 1, evidence),)
        visible = present > MIN_VISIBLE_RATIO * healthy
        if (visible and seconds < math.sqrt(healthy * present)) or (at_change and self._open):
            return self._ended(iteration, seconds / healthy - 1, f"{seconds / healthy:.3f} times its healthy time")
        if at_change:
            self._series.drop()
        return ()

    def _by_mean(self, iteration: int) -> tuple[Finding, ...]:
        """Apply Greyhound's rule: compare the mean since a change point with the mean before it."""
        series = self._series
        since = len(series.seconds) - series.start
        if series.verified or not VERIFIED_FROM <= since <= VERIFIED_UNTIL:
            return ()
        shift = float(np.mean(series.seconds[series.start :]) / np.mean(series.seconds[series.before : series.start]))
        evidence = f"{shift:.3f} times the mean before"
        if shift > MEAN_RATIO:
            series.verified = self._open = True
            return (self._finding("fail-slow", iteration, shift - 1, evidence),)
        if shift < 1 / MEAN_RATIO and (self._open or self._at_work()):
            series.verified = True
            return self._ended(iteration, shift - 1, evidence)
        return ()

    def _ended(self, iteration: int, change: float, evidence: str) -> tuple[Finding, ...]:
        """Return recoveries of all slow ranks, because it cannot be decided which of them recovered."""
        ranks = tuple(self._at_work())
        self._open = False
        for rank in ranks:
            del self._slow[rank]
        named: list[tuple[int, ...]] = [(rank,) for rank in ranks] or [()]
        return tuple(self._finding("recovered", iteration, change, evidence, rank_group) for rank_group in named)

    def _finding(
        self,
        kind: Literal["fail-slow", "recovered"],
        iteration: int,
        change: float,
        evidence: str,
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
            evidence=f"iteration times changed at {onset}; iteration {iteration} at {evidence} ({self._rule})",
        )

    def _at_work(self) -> dict[int, float]:
        """Return the speeds of the slow ranks with work under the adopted plan."""
        ranks = frozenset[int]() if self._healthy is None else self._healthy.ranks
        return {rank: speed for rank, speed in self._slow.items() if rank in ranks}
