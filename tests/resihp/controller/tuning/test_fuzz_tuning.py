"""Random jobs with random failures that tune themselves every few iterations: nothing that must hold is broken."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from resihp.controller.interface import Dependencies
from resihp.detector.findings import Assessment
from resihp.detector.observation import Observation
from resihp.detector.online.predictor import Key
from resihp.record.journal import ChangeDecided
from resihp.scheduler import transition_cost
from resihp.simulator.false_alarms import Wolf
from resihp.simulator.scenarios.mixed_jobs import draw_ramped
from resihp.simulator.scenarios.plain_jobs import draw_plain, draw_stormy
from resihp.simulator.scenarios.scenario import Scenario
from resihp.simulator.world import Result, World

CHUNK = 50
FUZZ_SEEDS = int(os.environ.get("RESIHP_FUZZ_SEEDS", "500")) // 10


class Drifting:
    """Chunks whose head grows and shrinks from one iteration to the next."""

    def __init__(self) -> None:
        self.seen = 0

    def predict(self, key: Key, kind: str, tokens: Any, squares: Any) -> npt.NDArray[np.float64] | None:
        return np.array([0.01 * (key[0] + (self.seen * 7 % 5) * key[3])])


class Learnt(Wolf):
    """Knows all times from the start, and finds nobody slow."""

    def __init__(self, seed: int, *given: Any) -> None:
        super().__init__(seed, 0.0, *given)
        self.predictor: Any = Drifting()

    @property
    def settled(self) -> bool:
        return True

    def observe(self, observation: Observation) -> Assessment:
        self.predictor.seen += 1
        return super().observe(observation)


class TunedWorld(World):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.settings = msgspec.structs.replace(self.settings, tune=True, detect=True)
        self.controller = self.new_controller()

    def own_dependencies(self) -> Dependencies:
        monitor: Any = partial(Learnt, self.scenario.seed)
        return dataclasses.replace(super().own_dependencies(), monitor=monitor)


def played(draw: Any, first: int) -> list[Result]:
    found = []
    for seed in range(first, first + CHUNK):
        world = TunedWorld(draw(seed))
        found.append(world.run())
        if seed % 10 == 0:
            world.replay()
    return found


@pytest.mark.parametrize("draw", [draw_plain, draw_stormy, draw_ramped], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("first", range(0, FUZZ_SEEDS, CHUNK))
def test_invariants_hold_in_jobs_that_tune_themselves(draw: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resihp.controller.tuning.retuning.RETUNE_ITERATIONS", 2)
    monkeypatch.setattr("resihp.controller.tuning.retuning.VERIFY_ITERATIONS", 1)
    cheap = transition_cost.Rates(fixed_s=1e-6, group_s=1e-9, byte_s=1e-15)
    monkeypatch.setattr("resihp.scheduler.transition_cost.calibrated", lambda records: cheap)
    results = played(draw, first)
    assert any(entry.tuned for result in results for entry in result.all(ChangeDecided)), "nothing was ever tuned"
