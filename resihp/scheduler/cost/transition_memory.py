"""Bytes that a rank holds at once during a transition: its old state beside its new state. Pure.

The executor's procedure (`resihp.executor.engine.Engine.adopt`) determines them: activations are freed, a step that
others took is taken first, then gradients are freed; the new state is allocated beside the old one, except for
unchanged tensors, which both share; state moves in chunks (`device_memory.TRANSFER_BYTES`), and nothing is freed until
the plan is in effect, since a rank that lacks it may request it until then. A rank whose place does not change, or that
has no old or no new state, holds no more than in an iteration. Under ZeRO-1, which the executor does not support yet,
the optimizer's state has one copy, and no other could replace it: the model assumes that it moves piece by piece, so
that a rank has room for the larger of its two parts.

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
"""Bytes per parameter, by precision: all of `tensor_bytes.STATE_BYTES` except the gradient in 32 bits."""
VALUE_BYTES = GRADIENT_BYTES = 2
"""Bytes per parameter under ZeRO-1 (`tensor_bytes.zero_1`) besides the optimizer's state, which replicas share."""


class TransitionBytes(msgspec.Struct, frozen=True):
    """Bytes of a rank: its old state, and the new state that is allocated beside it."""

    old: int
    new: int

    @property
    def total(self) -> int:
        return self.old + self.new


def beside(old: HeldState, new: HeldState, model: ModelSpec, sharing: tuple[int, int] | None = None) -> TransitionBytes:
    """Return the bytes of a rank while it goes from one part of the model to another.

    `sharing`: how many replicas share the optimizer's state (ZeRO-1) before and after, None if each has its own.
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
    """Return which rank most exceeds its device's `memory_bytes` during the transition from `base` to `layout`.

    The message includes remedies; None if all ranks have room. `survivors` are the ranks that have their state of
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
    """Return the fewest layers that the ranks of a group have room for beside their old state.

    `first`, `last`: whether the stage has the embedding, the head. State that a rank held at the same place of a group
    of the same size is assumed to stay.
    """
    tp, layers = len(old), model.layers
    for t, old_state in enumerate(old):
        if old_state is None or (old_state.t, old_state.tp) == (t, tp):
            continue
        outside, per_layer = carried_bytes(model, tp, first=first, last=last, sharing=sharing)
        layers = min(layers, (left_bytes(old_state, model, room_bytes, sharing) - outside) // per_layer)
    return max(0, layers)


def left_bytes(old: HeldState, model: ModelSpec, room_bytes: int, sharing: tuple[int, int] | None = None) -> int:
    """Return the bytes that a rank has left beside its old state."""
    per_parameter = CARRIED_BYTES[model.precision] if sharing is None else VALUE_BYTES
    return room_bytes - per_parameter * _elements(old, old, model)


def carried_bytes(
    model: ModelSpec, tp: int, *, first: bool, last: bool, sharing: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return the bytes of a stage's new state: outside its layers, and for each layer."""
    units = frozenset(({"embedding"} if first else set()) | ({"final", "head"} if last else set()))
    outside, layer = (HeldState(chunks, units, 0, tp) for chunks in ((), ((0, 0),)))
    per_parameter = carried_each(model, sharing)
    outside_elements = _elements(outside, outside, model)
    return per_parameter * outside_elements, per_parameter * (_elements(layer, layer, model) - outside_elements)


def carried_each(model: ModelSpec, sharing: tuple[int, int] | None = None) -> int:
    """Return the bytes per parameter of new state."""
    return CARRIED_BYTES[model.precision] if sharing is None else tensor_bytes.zero_1(sharing[1]) - GRADIENT_BYTES


def _changed(base: Layout, survivors: set[int], layout: Layout) -> Iterator[tuple[int, HeldState, HeldState]]:
    """Yield the ranks that hold state and get different state, with both."""
    same = {id(replica) for replica in base.replicas}
    changed = dict(holdings(replica for replica in layout.replicas if id(replica) not in same))
    for rank, old in holdings(base.replicas) if changed else ():
        new = changed.get(rank)
        if new is not None and rank in survivors and new != old:
            yield rank, old, new


@lru_cache(maxsize=4096)
def _elements(old: HeldState, new: HeldState, model: ModelSpec) -> int:
    """Return the elements of the tensors that two parts share: those of the same parameters, with equal cuts."""
    same_cut = (old.t, old.tp) == (new.t, new.tp)

    def shared(spec: ParameterSpec) -> int:
        return spec.elements if spec.axis is None else spec.elements // old.tp if same_cut else 0

    layers = len(old.layers & new.layers)
    total = layers * sum(shared(spec) for spec in layer_outline(model, 0))
    for spec in outline(msgspec.structs.replace(model, layers=0)):
        if old.units.intersection(spec.units) and new.units.intersection(spec.units):
            total += shared(spec)
    return total
