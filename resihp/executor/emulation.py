"""Devices of a known speed, emulated by sleeping: many workers on few cores then take the times of as many devices.

For tests and demonstrations of predicted times; decides nothing. Off unless LAYER_MS is in a worker's environment, and
refused where there is a GPU. What a chunk takes is what the scheduler takes it to take where nothing is measured
(`resihp.scheduler.cost.profile.layer_units`), so that predictions can be compared with what was measured; a fault
(`slow`) divides it by its speed (`stopwatch`). Training computes what it always does, in the time that it is given: it
has to be enough for the real work. Called by `trainer`.

Links between nodes are emulated in the same way (LINK_MS): a transfer between stages, or of a link's measurement,
arrives that much later, and the next one on the same link after it. Collectives of more than two ranks, the sums of
gradients and the moves of state are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import torch

from resihp.errors import ConfigurationError
from resihp.executor.state.rank_state import HeldPart
from resihp.faults import LINK_MS
from resihp.parallelism.model import ModelSpec
from resihp.pipeline.program import GroupSpec
from resihp.scheduler.cost.profile import Times, layer_units

LAYER_MS = "RESIHP_EMULATED_LAYER_MS"
"""Milliseconds of a layer's forward for one micro-batch on one healthy device: read in workers, not set: off."""

HEAD_LAYERS = "RESIHP_EMULATED_HEAD_LAYERS"
"""How many layers the head takes as long as, in all it does; not set: what its operations say. With it, devices are not
what a plan takes them for before they are measured."""

Work = Literal["F", "B", "W", "BW"]
"""Kinds of primitives as in `resihp.detector.online.monitor`: BW is a B that does the work of both."""

Pace = Callable[[Work, HeldPart, int], float]
"""Seconds that a healthy device needs for a kind of work on a chunk of what it holds."""


def pace_of(environment: Mapping[str, str], model: ModelSpec, device: torch.device) -> Pace | None:
    """None where nothing is emulated. Raises ConfigurationError for a time that is none, and where there is a GPU."""
    layer_s = _seconds(environment, LAYER_MS, device)
    if layer_s is None:
        return None
    times = layer_units(model)
    head = _number(environment, HEAD_LAYERS)
    if head is not None:
        times = msgspec.structs.replace(times, head=Times(head, head, head))

    def seconds(work: Work, holding: HeldPart, chunk: int) -> float:
        units = times.span(*holding.chunks[chunk])
        share = {"F": units.f, "B": units.b, "W": units.w, "BW": units.b + units.w}[work]
        return share * layer_s / holding.tp

    return seconds


class Wires:
    """Links between nodes, each transfer over a healthy one in `healthy_s` seconds.

    `nodes` by rank, and the `speed` of a link between two of them, are filled in by the trainer.
    """

    def __init__(self, healthy_s: float) -> None:
        self.nodes: dict[int, str] = {}
        self.speed: Callable[[str, str], float] = lambda a, b: 1.0
        self._healthy_s = healthy_s

    def of(self, group: GroupSpec) -> Callable[[], float] | None:
        """Seconds of a transfer on that communicator now; None where it is not emulated."""
        if group.use != "edge":
            return None
        a, b = (self.nodes.get(rank, "") for rank in group.ranks)
        return None if a == b else lambda: self._healthy_s / self.speed(a, b)


def wires_of(environment: Mapping[str, str], device: torch.device) -> Wires | None:
    """As `pace_of`, for links."""
    healthy_s = _seconds(environment, LINK_MS, device)
    return None if healthy_s is None else Wires(healthy_s)


def _seconds(environment: Mapping[str, str], name: str, device: torch.device) -> float | None:
    milliseconds = _number(environment, name, "milliseconds")
    if milliseconds is not None and device.type != "cpu":
        raise ConfigurationError(f"{name}={environment[name]}: slows training down on purpose, not on a GPU; unset it")
    return None if milliseconds is None else milliseconds / 1e3


def _number(environment: Mapping[str, str], name: str, unit: str = "a number") -> float | None:
    given = environment.get(name)
    if given is None:
        return None
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0.0):
        raise ConfigurationError(f"{name}={given}: must be {unit} above 0, as in {name}=40; or unset it")
    return found
