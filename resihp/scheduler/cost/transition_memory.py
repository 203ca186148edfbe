"""Bytes that a rank holds at once while a transition is under way: its state as it was beside its state to come. Pure.

As the executor does it (`resihp.executor.engine.Engine.adopt`): activations are gone, a step that others took is taken
first, then gradients are let go; what a rank will hold is allocated beside what it holds, but for tensors that stay as
they are, which both have in common; state moves in chunks (`device_memory.TRANSFER_BYTES`), and nothing is let go of
until the plan is in effect, since whoever lacks it may ask for it until then. A rank whose place stays what it was,
that has no state yet, or that has none to come, holds no more than in an iteration. Under ZeRO-1, which the executor
does not do yet, the optimizer's state has one copy, that no other one could replace: it is taken to move piece by
piece, so that a rank has room for the larger of its two parts.

Called by the planner, and by the executor before it agrees to a plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

import msgspec

from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.ownership import ParameterSpec
from resihp.parallelism.parameter_outline import layer_outline, outline
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.device_memory import NOTHING, Overhead
from resihp.scheduler.cost.held_state import HeldState, holdings

CARRIED_BYTES = {"fp32": 12, "bf16": 14}
"""Of each parameter, by precision: all of `memory.STATE_BYTES` but the gradient in 32 bits."""
VALUE_BYTES = GRADIENT_BYTES = 2
"""Of each parameter under ZeRO-1 (`memory.zero_1`): what is not the optimizer's state, which replicas share."""


class Both(msgspec.Struct, frozen=True):
    """Bytes of a rank: of its state as it was, of what is allocated beside it."""

    old: int
    new: int

    @property
    def total(self) -> int:
        return self.old + self.new


def beside(old: HeldState, new: HeldState, model: ModelSpec, sharing: tuple[int, int] | None = None) -> Both:
    """What a rank has while it goes from one part of the model to another. `sharing`: how many replicas share the
    optimizer's state (ZeRO-1) before and after, None where each has its own."""
    was, comes, stays = _elements(old, old, model), _elements(new, new, model), _elements(old, new, model)
    if sharing is None:
        each = CARRIED_BYTES[model.precision]
        return Both(each * was, each * (comes - stays))
    before, after = (memory.zero_1(replicas) - VALUE_BYTES - GRADIENT_BYTES for replicas in sharing)
    optimizer = max(before * was, after * comes)
    whole = VALUE_BYTES * (was + comes - stays) + optimizer
    return Both((VALUE_BYTES + before) * was, whole - (VALUE_BYTES + before) * was)


def obstacle(
    base: Layout,
    survivors: Collection[int],
    layout: Layout,
    model: ModelSpec,
    memory_bytes: int,
    *,
    zero_1: bool = False,
    overhead: Overhead = NOTHING,
) -> str | None:
    """Which rank would need more than its device's `memory_bytes` on the way from `base` to `layout`, the worst of
    them, and what would help; else None. `survivors` are the ranks that have their state of `base`."""
    room = overhead.room(memory_bytes)
    sharing = (memory.sharing(base), memory.sharing(layout)) if zero_1 else None
    worst: tuple[int, int, Both] | None = None
    known: dict[tuple[HeldState, HeldState], Both] = {}
    for rank, old, new in _changed(base, set(survivors), layout):
        both = known.get((old, new))
        if both is None:
            both = known[old, new] = beside(old, new, model, sharing)
        if both.total > room and (worst is None or (both.total, -rank) > worst[:2]):
            worst = both.total, -rank, both
    if worst is None:
        return None
    _, rank, both = worst
    parts = ", ".join(
        f"{size / 1e9:.3g} GB of {name}"
        for name, size in (("state as it was", both.old), ("state to come", both.new), *overhead.parts)
    )
    return (
        f"rank {-rank}: needs {overhead.with_gaps(both.total) / 1e9:.3g} GB while the layout changes, its device has "
        f"{memory_bytes / 1e9:.3g} GB: {parts}; spares would take such places without state of their own, and a job "
        "that is started again from a checkpoint needs no room for both"
    )


def layers_beside(
    old: Sequence[HeldState | None],
    model: ModelSpec,
    room_bytes: int,
    *,
    first: bool,
    last: bool,
    sharing: tuple[int, int] | None = None,
) -> int:
    """Layers for which the ranks of a group have room beside what each of them held, at least; `first`, `last`: whether
    its stage has the embedding, the head. What a rank held at the same place of as many ranks is taken to stay."""
    tp, found = len(old), model.layers
    for t, held in enumerate(old):
        if held is None or (held.t, held.tp) == (t, tp):
            continue
        outside, each = carried_bytes(model, tp, first=first, last=last, sharing=sharing)
        found = min(found, (left_bytes(held, model, room_bytes, sharing) - outside) // each)
    return max(0, found)


def left_bytes(old: HeldState, model: ModelSpec, room_bytes: int, sharing: tuple[int, int] | None = None) -> int:
    """Of a rank, beside what it held."""
    each = CARRIED_BYTES[model.precision] if sharing is None else VALUE_BYTES
    return room_bytes - each * _elements(old, old, model)


def carried_bytes(
    model: ModelSpec, tp: int, *, first: bool, last: bool, sharing: tuple[int, int] | None = None
) -> tuple[int, int]:
    """What comes beside that for a stage: outside of its layers, and for each of them."""
    units = frozenset(({"embedding"} if first else set()) | ({"final", "head"} if last else set()))
    outside, one = (HeldState(chunks, units, 0, tp) for chunks in ((), ((0, 0),)))
    each = carried_each(model, sharing)
    without = _elements(outside, outside, model)
    return each * without, each * (_elements(one, one, model) - without)


def carried_each(model: ModelSpec, sharing: tuple[int, int] | None = None) -> int:
    """Bytes of each parameter that comes."""
    return CARRIED_BYTES[model.precision] if sharing is None else memory.zero_1(sharing[1]) - GRADIENT_BYTES


def _changed(base: Layout, survivors: set[int], layout: Layout) -> Iterator[tuple[int, HeldState, HeldState]]:
    """Ranks that hold something, and are to hold something else."""
    same = {id(replica) for replica in base.replicas}
    changed = dict(holdings(replica for replica in layout.replicas if id(replica) not in same))
    for rank, old in holdings(base.replicas) if changed else ():
        new = changed.get(rank)
        if new is not None and rank in survivors and new != old:
            yield rank, old, new


@lru_cache(maxsize=4096)
def _elements(one: HeldState, other: HeldState, model: ModelSpec) -> int:
    """Elements of the tensors that two parts have in common: those of the same parameters, cut alike."""
    alike = (one.t, one.tp) == (other.t, other.tp)

    def held(spec: ParameterSpec) -> int:
        return spec.elements if spec.axis is None else spec.elements // one.tp if alike else 0

    layers = len(one.layers & other.layers)
    total = layers * sum(held(spec) for spec in layer_outline(model, 0))
    for spec in outline(msgspec.structs.replace(model, layers=0)):
        if one.units.intersection(spec.units) and other.units.intersection(spec.units):
            total += held(spec)
    return total
