"""Bytes that a rank holds during a transition: its old state beside its new state. Pure.

They follow from the executor's procedure (`resihp.executor.engine.Engine.adopt`). First, activations are freed; a step
that other ranks have taken is taken; gradients are freed. Then the new state is allocated beside the old state;
unchanged tensors are shared by both. State moves in chunks (`device_memory.TRANSFER_BYTES`), and no old state is freed
until the plan is in effect, because a rank that lacks it may request it until then. A rank that keeps its place, or
that has no old or no new state, holds no more than in an iteration.

The executor does not support ZeRO-1 yet. Under ZeRO-1 the optimizer's state has one copy, which no other copy could
replace. The model assumes that it moves piece by piece, so that a rank needs room for the larger of its old and its new
part.

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
from resihp.scheduler.cost import memory, tensor_bytes
from resihp.scheduler.cost.device_memory import NO_OVERHEAD, Overhead
from resihp.scheduler.cost.held_state import HeldState, holdings

CARRIED_BYTES = {"fp32": 12, "bf16": 14}
"""Bytes per parameter that a rank keeps during a transition, by precision: `tensor_bytes.STATE_BYTES` without the
32-bit gradient."""
VALUE_BYTES = GRADIENT_BYTES = 2
"""Bytes of the value per parameter under ZeRO-1, and of the gradient (`tensor_bytes.zero_1`). The rest is the
optimizer's state, which replicas share."""


class TransitionBytes(msgspec.Struct, frozen=True):
    """Bytes of a rank during a transition: its old state, and the new state that is allocated beside it."""

    old: int
    new: int

    @property
    def total(self) -> int:
        return self.old + self.new


def beside(old: HeldState, new: HeldState, model: ModelSpec, sharing: tuple[int, int] | None = None) -> TransitionBytes:
    """Return the bytes of a rank during its transition from state `old` to state `new`.

    `sharing`: the numbers of replicas that share the optimizer's state (ZeRO-1) before and after; None if each replica
    has its own.
    """
    old_elements, new_elements, common_elements = (
        _elements(old, old, model),
        _elements(new, new, model),
        _elements(old, new, model),
    )
    if sharing is None:
        bytes_each = CARRIED_BYTES[model.precision]
        return TransitionBytes(bytes_each * old_elements, bytes_each * (new_elements - common_elements))
    before, after = (tensor_bytes.zero_1(replicas) - VALUE_BYTES - GRADIENT_BYTES for replicas in sharing)
    optimizer = max(before * old_elements, after * new_elements)
    whole = VALUE_BYTES * (old_elements + new_elements - common_elements) + optimizer
    return TransitionBytes((VALUE_BYTES + before) * old_elements, whole - (VALUE_BYTES + before) * old_elements)


def obstacle(
    base: Layout,
    survivors: Collection[int],
    layout: Layout,
    model: ModelSpec,
    memory_bytes: int,
    *,
    zero_1: bool = False,
    overhead: Overhead = NO_OVERHEAD,
) -> str | None:
    """Return a message about the rank that most exceeds its device's `memory_bytes` during the transition from `base`
    to `layout`.

    The message includes remedies; None if all ranks have room. `survivors` are the ranks that still have their state of
    `base`.
    """
    room = overhead.room(memory_bytes)
    sharing = (memory.sharing(base), memory.sharing(layout)) if zero_1 else None
    worst: tuple[int, int, TransitionBytes] | None = None
    state_of: dict[tuple[HeldState, HeldState], TransitionBytes] = {}
    for rank, old, new in _changed(base, set(survivors), layout):
        state = state_of.get((old, new))
        if state is None:
            state = state_of[old, new] = beside(old, new, model, sharing)
        if state.total > room and (worst is None or (state.total, -rank) > worst[:2]):
            worst = state.total, -rank, state
    if worst is None:
        return None
    _, rank, state = worst
    parts = ", ".join(
        f"{size / 1e9:.3g} GB of {name}"
        for name, size in (("old state", state.old), ("new state", state.new), *overhead.parts)
    )
    return (
        f"rank {-rank}: needs {overhead.with_gaps(state.total) / 1e9:.3g} GB while the layout changes, its device has "
        f"{memory_bytes / 1e9:.3g} GB: {parts}; spares could take this place without old state, and a job "
        "that restarts from a checkpoint needs no room for both"
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
    """Return the fewest layers for which the ranks of a group have room beside their old state: that of the tightest
    rank.

    `old`: state of each rank, None if it has none. `first`, `last`: whether the stage has the embedding, the head. A
    rank that held the same place in a group of the same size is not limited: its state is assumed to stay.
    """
    tp, layers = len(old), model.layers
    for t, old_state in enumerate(old):
        if old_state is None or (old_state.t, old_state.tp) == (t, tp):
            continue
        outside, per_layer = carried_bytes(model, tp, first=first, last=last, sharing=sharing)
        layers = min(layers, (left_bytes(old_state, model, room_bytes, sharing) - outside) // per_layer)
    return max(0, layers)


def left_bytes(old: HeldState, model: ModelSpec, room_bytes: int, sharing: tuple[int, int] | None = None) -> int:
    """Return the bytes of `room_bytes` that a rank has left beside its old state."""
    per_parameter = CARRIED_BYTES[model.precision] if sharing is None else VALUE_BYTES
    return room_bytes - per_parameter * _elements(old, old, model)


def carried_bytes(
    model: ModelSpec, tp: int, *, first: bool, last: bool, sharing: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return the bytes of a stage's new state on one rank: outside the layers, and for each layer."""
    units = frozenset(({"embedding"} if first else set()) | ({"final", "head"} if last else set()))
    outside, layer = (HeldState(chunks, units, 0, tp) for chunks in ((), ((0, 0),)))
    per_parameter = carried_each(model, sharing)
    outside_elements = _elements(outside, outside, model)
    return per_parameter * outside_elements, per_parameter * (_elements(layer, layer, model) - outside_elements)


def carried_each(model: ModelSpec, sharing: tuple[int, int] | None = None) -> int:
    """Return the bytes per parameter of new state."""
    return CARRIED_BYTES[model.precision] if sharing is None else tensor_bytes.zero_1(sharing[1]) - GRADIENT_BYTES


def _changed(base: Layout, survivors: set[int], layout: Layout) -> Iterator[tuple[int, HeldState, HeldState]]:
    """Yield (rank, old state, new state) for each rank that holds state and gets different state."""
    same = {id(replica) for replica in base.replicas}
    changed = dict(holdings(replica for replica in layout.replicas if id(replica) not in same))
    for rank, old in holdings(base.replicas) if changed else ():
        new = changed.get(rank)
        if new is not None and rank in survivors and new != old:
            yield rank, old, new


@lru_cache(maxsize=4096)
def _elements(old: HeldState, new: HeldState, model: ModelSpec) -> int:
    """Return the elements of the tensors that two states have in common: equal parameters with equal cuts."""
    same_cut = (old.t, old.tp) == (new.t, new.tp)

    def shared(spec: ParameterSpec) -> int:
        return spec.elements if spec.axis is None else spec.elements // old.tp if same_cut else 0

    layers = len(old.layers & new.layers)
    total = layers * sum(shared(spec) for spec in layer_outline(model, 0))
    for spec in outline(msgspec.structs.replace(model, layers=0)):
        if old.units.intersection(spec.units) and new.units.intersection(spec.units):
            total += shared(spec)
    return total
