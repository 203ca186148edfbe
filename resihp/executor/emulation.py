"""Emulates devices of a known speed by sleeping, so that many workers on few cores take realistic times.

For tests and demonstrations of predicted times; decides nothing. Used only if LAYER_MS is set in a worker's
environment; refused on a GPU. A chunk takes as long as the scheduler assumes before any measurement
(`resihp.scheduler.cost.profile.layer_units`), so that predictions can be compared with measured times. A fault of kind
`slow` reduces the speed (`stopwatch`). Training computes as always; the emulated time must be long enough for this real
work. Called by `trainer`.

LINK_MS emulates links between nodes: a transfer between stages or in a link probe arrives later by this time, and
transfers on one link follow one after the other. Collectives of more than two ranks, gradient sums and state transfers
are not delayed.
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
"""Environment variable of workers: milliseconds that a healthy device needs for the forward pass of a layer on one
micro-batch. If it is not set, devices are not emulated."""

HEAD_LAYERS = "RESIHP_EMULATED_HEAD_LAYERS"
"""Environment variable of workers: duration of each pass of the head (forward, backward, weights), in units of a
layer's forward pass. If it is not set, the number of operations in the head determines the duration. If it is set,
devices differ from the planner's assumptions until they are measured."""

Work = Literal["F", "B", "W", "BW"]
"""Kinds of primitives as in `resihp.detector.online.monitor`: BW is a B that includes the work of W."""

Pace = Callable[[Work, HeldPart, int], float]
"""Returns the seconds that a healthy device needs for work of a kind on one chunk of its part of the model."""


def pace_of(environment: Mapping[str, str], model: ModelSpec, device: torch.device) -> Pace | None:
    """Return the emulated speed of a device as a `Pace`; None if devices are not emulated. Raises ConfigurationError
    for an invalid time, and on a GPU."""
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
    """Emulated links between nodes. A transfer over a healthy link takes `healthy_s` seconds.

    The trainer sets `nodes`, each rank's node, and `speed`, which returns the relative speed of the link between two
    nodes.
    """

    def __init__(self, healthy_s: float) -> None:
        self.nodes: dict[int, str] = {}
        self.speed: Callable[[str, str], float] = lambda a, b: 1.0
        self._healthy_s = healthy_s

    def of(self, group: GroupSpec) -> Callable[[], float] | None:
        """Return a function that returns the present duration in seconds of a transfer on a communicator; None if its
        link is not emulated."""
        if group.use != "edge":
            return None
        a, b = (self.nodes.get(rank, "") for rank in group.ranks)
        return None if a == b else lambda: self._healthy_s / self.speed(a, b)


def wires_of(environment: Mapping[str, str], device: torch.device) -> Wires | None:
    """Return the emulated links; None if links are not emulated. Raises ConfigurationError as `pace_of` does."""
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
        value = float(given)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigurationError(f"{name}={given}: must be {unit} above 0, as in {name}=40; or unset it")
    return value
