"""The state of a simulated worker: slices as bits, and a value that depends on the history of steps.

Moves no state itself. Used by the simulated workers and by the invariants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache

from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec, Slice, holders, share
from resihp.parallelism.parameter_outline import outline as whole_outline
from resihp.protocol import messages as m

PIECES_PER_PARAMETER = 4
"""Number of pieces into which the simulator divides each parameter that can be cut."""


@cache
def outline(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Return two parameters of each layer, one that is cut and one that is not. The layer's other parameters have the
    same holders."""
    return tuple(spec for spec in whole_outline(model) if "attention" not in spec.name and "fc2" not in spec.name)


@dataclass(frozen=True)
class Holding:
    """State of one worker after `iteration`. `slices` has one bit for each slice.

    `value` represents the contents of all slices: it is equal only for equal histories of steps.
    """

    slices: int
    iteration: int
    value: int


def drawn(slices: int, iteration: int) -> Holding:
    """Return state drawn from the seed, or loaded from the checkpoint of `iteration`."""
    return Holding(slices, iteration, hash(("drawn", iteration)))


def after(holding: Holding, outcome: m.StepOutcome) -> Holding:
    """Return the state after one more step, with the same slices."""
    value = hash((holding.value, outcome.iteration, outcome.gradient_norm))
    return Holding(holding.slices, outcome.iteration, value)


def bits(model: ModelSpec, slices: Iterable[Slice]) -> int:
    mask = 0
    index, specs = _index(model)
    for piece in slices:
        extent = specs[piece.name]
        width = max(extent // PIECES_PER_PARAMETER, 1)
        for part in range(piece.start // width, piece.stop // width):
            mask |= 1 << (index[piece.name] * PIECES_PER_PARAMETER + part)
    return mask


@cache
def _index(model: ModelSpec) -> tuple[dict[str, int], dict[str, int]]:
    specs = outline(model)
    return {spec.name: i for i, spec in enumerate(specs)}, {spec.name: spec.extent for spec in specs}


@lru_cache(maxsize=20000)
def needed(model: ModelSpec, layout: Layout) -> dict[int, int]:
    """Return the slices that each active rank needs under a layout, as bits."""
    slices = dict.fromkeys(layout.active, 0)
    for spec in outline(model):
        for stage in holders(layout, spec):
            for t, rank in enumerate(stage.ranks):
                slices[rank] |= bits(model, (share(spec, t, stage.tp),))
    return slices


@cache
def everything(model: ModelSpec) -> int:
    return bits(model, (Slice(spec.name, 0, spec.extent) for spec in outline(model)))
