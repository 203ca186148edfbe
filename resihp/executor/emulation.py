"""Emulates devices of a known speed by sleeping, so that many workers on few cores take realistic times.

For tests and demonstrations of predicted times; decides nothing. Off unless LAYER_MS is in a worker's environment, and
refused on a GPU. A chunk takes as long as the scheduler assumes before anything is measured
(`resihp.scheduler.cost.profile.layer_units`), so that predictions can be compared with measured times; a fault (`slow`)
divides the speed (`stopwatch`). Training computes as always; the emulated time must be long enough for that real work.
Called by `trainer`.

Links between nodes are emulated in the same way (LINK_MS): a transfer between stages, or of a link's measurement,
arrives that much later, and transfers on the same link follow one after the other. Collectives of more than two ranks,
gradient sums and state transfers are not delayed.
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
"""Environment variable of workers: milliseconds of a layer's forward pass for one micro-batch on one healthy device. If
unset, nothing is emulated."""

HEAD_LAYERS = "RESIHP_EMULATED_HEAD_LAYERS"
"""Environment variable of workers: time of each of the head's passes (forward, backward, weights), in units of a
layer's forward pass. If unset, it follows from the head's operations. With it, devices differ from the planner's
assumptions until they are measured."""

Work = Literal["F", "B", "W", "BW"]
"""Kinds of primitives as in `resihp.detector.online.monitor`: BW is a B that also does the work of W."""

Pace = Callable[[Work, HeldPart, int], float]
"""Returns the seconds that a healthy device needs for a kind of work on a chunk that it holds."""


def pace_of(environment: Mapping[str, str], model: ModelSpec, device: torch.device) -> Pace | None:
    """Return the emulated pace; None if nothing is emulated. Raises ConfigurationError for an invalid time or a GPU."""
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
    """Emulated links between nodes; each transfer over a healthy one takes `healthy_s` seconds.

    The trainer fills in `nodes`, by rank, and `speed`, which returns the speed of the link between two nodes.
    """

    def __init__(self, healthy_s: float) -> None:
        self.nodes: dict[int, str] = {}
        self.speed: Callable[[str, str], float] = lambda a, b: 1.0
        self._healthy_s = healthy_s

    def of(self, group: GroupSpec) -> Callable[[], float] | None:
        """Return a function that gives the present seconds of a transfer on a communicator; None if not emulated."""
        if group.use != "edge":
            return None
        a, b = (self.nodes.get(rank, "") for rank in group.ranks)
        return None if a == b else lambda: self._healthy_s / self.speed(a, b)


def wires_of(environment: Mapping[str, str], device: torch.device) -> Wires | None:
    """Return the emulated links, under the same rules as `pace_of`."""
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
