"""Devices of a known speed, emulated by sleeping: many workers on few cores then take the times of as many devices.

For tests and demonstrations of predicted times; decides nothing. Off unless LAYER_MS is in a worker's environment, and
refused where there is a GPU. What a chunk takes is what the scheduler takes it to take where nothing is measured
(`resihp.scheduler.profile.layer_units`), so that predictions can be compared with what was measured; a fault (`slow`)
divides it by its speed (`stopwatch`). Training computes what it always does, in the time that it is given: it has to be
enough for the real work. Called by `trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from resihp.errors import ConfigurationError
from resihp.executor.state import Holding
from resihp.model import ModelSpec
from resihp.scheduler.profile import layer_units

LAYER_MS = "RESIHP_EMULATED_LAYER_MS"
"""Milliseconds of a layer's forward for one micro-batch on one healthy device: read in workers, not set: off."""

Work = Literal["F", "B", "W", "BW"]
"""Kinds of primitives as in `resihp.detector.monitor`: BW is a B that does the work of both."""

Pace = Callable[[Work, Holding, int], float]
"""Seconds that a healthy device needs for a kind of work on a chunk of what it holds."""


def pace_of(environment: Mapping[str, str], model: ModelSpec, device: torch.device) -> Pace | None:
    """None where nothing is emulated. Raises ConfigurationError for a time that is none, and where there is a GPU."""
    given = environment.get(LAYER_MS)
    if given is None:
        return None
    try:
        layer_s = float(given) / 1e3
    except ValueError:
        layer_s = math.nan
    if not (math.isfinite(layer_s) and layer_s > 0.0):
        raise ConfigurationError(f"{LAYER_MS}={given}: must be milliseconds above 0, as in {LAYER_MS}=40; or unset it")
    if device.type != "cpu":
        raise ConfigurationError(f"{LAYER_MS}={given}: slows training down on purpose, not on a GPU; unset it")
    times = layer_units(model)

    def seconds(work: Work, holding: Holding, chunk: int) -> float:
        units = times.span(*holding.chunks[chunk])
        share = {"F": units.f, "B": units.b, "W": units.w, "BW": units.b + units.w}[work]
        return share * layer_s / holding.tp

    return seconds
