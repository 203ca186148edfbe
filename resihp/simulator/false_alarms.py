"""A detector for simulated jobs that raises false alarms at random, to test the controller's reactions.

Never looks at measured times. Used by `world` instead of the real detector in jobs with `Scenario.slow`.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt

from resihp.detector.findings import Assessment, Component, Finding, Intermittent
from resihp.detector.observation import Observation
from resihp.detector.online.predictor import Key
from resihp.parallelism.plan import Plan
from resihp.settings import Detection

SLOW_COMPONENTS: tuple[Component, ...] = ("collective", "reduction", "data")


class RandomPredictor:
    """Predicts random durations for healthy chunks, and sometimes none."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def predict(self, key: Key, kind: str, tokens: Any, squares: Any) -> npt.NDArray[np.float64] | None:
        rng = random.Random(f"{self._seed} {key} {kind}")
        return None if rng.random() < 0.05 else np.array([rng.uniform(1e-3, 0.1)])


class Wolf:
    """A detector that cries wolf: each iteration has two chances of a random finding, each with probability `chance`.

    A finding is a slow rank, two slow ranks that cannot be distinguished, a slow link, slowness without a particular
    rank, slow work that ranks do together, or an intermittently slow rank.
    """

    def __init__(self, seed: int, chance: float, _: Detection) -> None:
        self._seed, self._chance = seed, chance
        self._ranks: tuple[int, ...] = ()
        self._slow: dict[int, float] = {}
        self.predictor, self.beside_s = RandomPredictor(seed), 0.01

    @property
    def settled(self) -> bool:
        """Whether the detector claims stable estimates: in two of three jobs, and only after a device was confirmed as
        slow."""
        return self._seed % 3 > 0 and len(self._slow) > 0

    def healthy_transfers(self) -> tuple[float | None, float | None]:
        rng = random.Random(f"{self._seed} transfers")
        return rng.choice([None, 0.01, 0.5]), rng.choice([None, 0.001])

    def adopt(self, plan: Plan, *_: Any) -> None:
        self._ranks = plan.layout.active

    def observe(self, observation: Observation) -> Assessment:
        rng = random.Random(f"{self._seed} {observation.epoch} {observation.iteration}")
        findings = []
        for _ in range(2):
            if rng.random() >= self._chance:
                continue
            ranks = tuple(rng.sample(self._ranks, min(rng.choice([0, 1, 1, 1, 2]), len(self._ranks))))
            link = tuple(rng.sample(self._ranks, 2)) if len(self._ranks) > 1 and rng.random() < 0.2 else None
            part = rng.choice(SLOW_COMPONENTS) if ranks and not link and rng.random() < 0.3 else None
            now_and_then = Intermittent(share=rng.uniform(0.05, 0.5), factor=rng.uniform(1.3, 4.0))
            findings.append(
                Finding(
                    kind=rng.choice(["fail-slow", "fail-slow", "recovered", "workload"]),
                    iteration=max(1, observation.iteration - rng.randint(0, 3)),
                    detected=observation.iteration,
                    change=rng.uniform(-0.3, 2.0),
                    confidence=rng.uniform(0.5, 1.0),
                    ranks=() if link else ranks,
                    link=(link[0], link[1]) if link else None,
                    evidence="a draw",
                    component=part or "device",
                    intermittent=now_and_then if part is None and not link and rng.random() < 0.2 else None,
                )
            )
        return Assessment(predicted_s=rng.choice([None, 0.4]), findings=tuple(findings), known="workload")

    def coverage(self) -> dict[int, int]:
        return {}

    def scores(self) -> None:
        return None

    def forecast(self, tokens: Any, squares: Any) -> float | None:
        return random.Random(f"{self._seed} {tokens}").choice([None, 0.4, 2.0])

    def speeds(self) -> dict[int, float]:
        return dict(self._slow)

    def confirmed(self, rank: int, speed: float) -> None:
        self._slow[rank] = speed

    def cleared(self, rank: int) -> None:
        self._slow.pop(rank, None)

    def job_is_slow(self) -> None:
        pass

    def cleared_link(self, sender: int, receiver: int) -> None:
        pass
