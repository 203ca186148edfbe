"""Explains why no plan can run: the constraint that prevents it, and the changes that would remove it. Pure.

Called by `resihp.scheduler.planner` once every way to plan has failed. The explanation considers the best possible
case: all ranks in groups of the job's initial degree, in one pipeline, with as many layers on each stage as its memory
allows.
"""

from __future__ import annotations

from resihp.scheduler.cost import memory
from resihp.scheduler.layouts.groups import Group, idle_groups
from resihp.scheduler.situation import Situation

RESOLUTION_BYTES = 100_000_000
"""Resolution, in bytes, of the memory per device that a message names as sufficient."""


def reason(situation: Situation) -> str:
    """Return a message, with ranks and numbers, that explains why nothing can run in this situation."""
    live = situation.available
    if not live:
        return "no rank is left; bring some back, or restart from a checkpoint"
    stopped = [rank for rank in live if not situation.speeds.get(rank, 1.0)]
    if len(stopped) == len(live):
        return f"all {len(live)} remaining ranks have speed 0: {_ranks(stopped)}; add others, for example spares"
    groups = idle_groups(situation, [rank for rank in live if rank not in stopped])
    layers = situation.model.layers
    if situation.room_bytes is not None:
        room, stages = _most_layers(situation, groups, situation.room_bytes)
        if room < layers:
            return _memory(situation, groups, room, stages)
    if situation.lost.issuperset(situation.base.ranks):
        return "no rank of the layout is left, so all state is lost; restart from a checkpoint"
    return (
        f"one pipeline of {len(groups)} groups has room for the {layers} layers, but no transition to it was found; "
        "restart from a checkpoint"
    )


def _memory(situation: Situation, groups: tuple[Group, ...], room: int, stages: int) -> str:
    """Explain that memory is the constraint: the layers that fit, the needs of the tightest stage, and possible
    remedies."""
    model, tokens = situation.model, situation.tokens
    setups = [situation.stage_setup(s, stages, len(group.ranks), 1) for s, group in enumerate(groups[:stages])]
    limit = situation.room_bytes
    assert limit is not None
    rooms = [memory.capacity(model, setup, limit, tokens) for setup in setups]
    tightest = rooms.index(min(rooms))
    state, activations = memory.layer_bytes(model, setups[tightest], tokens)
    rank = groups[tightest].ranks[0]
    more_ranks, sufficient_bytes = _more_ranks(situation, groups), _enough_bytes(situation, groups)
    remedies = [] if more_ranks is None else [f"{more_ranks} more ranks, for example spares"]
    remedies += [] if sufficient_bytes is None else [f"devices of {sufficient_bytes / 1e9:.1f} GB"]
    remedies += ["shorter micro-batches"] if activations else []
    remedies += [] if situation.sequence_parallel or situation.tp == 1 else ["sequence parallelism"]
    return (
        f"out of memory: even one pipeline of all remaining ranks, with {stages} stages, has room for only {room} of "
        f"{model.layers} layers; the tightest stage ({tightest}, with rank {rank}) has room for {rooms[tightest]}, "
        f"each with {state / 1e9:.3g} GB of state and {activations / 1e9:.3g} GB of activations; remedies: "
        f"{', '.join(remedies)}"
    )


def _most_layers(situation: Situation, groups: tuple[Group, ...], room_bytes: int) -> tuple[int, int]:
    """Return the most layers that fit into one pipeline of these groups, largest group first, and its number of
    stages."""
    model, most = situation.model, (0, 1)
    for stages in range(1, min(len(groups), model.layers // situation.chunks) + 1):
        setups = [situation.stage_setup(s, stages, len(group.ranks), 1) for s, group in enumerate(groups[:stages])]
        rooms = [memory.capacity(model, setup, room_bytes, situation.tokens) for setup in setups]
        if min(rooms) >= situation.chunks and sum(rooms) > most[0]:
            most = sum(rooms), stages
    return most


def _more_ranks(situation: Situation, groups: tuple[Group, ...]) -> int | None:
    """Return how many more ranks, in groups of the job's initial degree, suffice; None if twice as many groups do
    not."""
    assert situation.room_bytes is not None
    whole = Group(tuple(range(situation.tp)))  # only the number of ranks matters
    for count in range(1, len(groups) + 1):
        if _most_layers(situation, (*([whole] * count), *groups), situation.room_bytes)[0] >= situation.model.layers:
            return count * situation.tp
    return None


def _enough_bytes(situation: Situation, groups: tuple[Group, ...]) -> int | None:
    """Return the memory in bytes that each device would need; None if ten times the present memory is not enough."""
    assert situation.memory_bytes is not None
    low, high = situation.memory_bytes, 10 * situation.memory_bytes

    def fits(memory_bytes: int) -> bool:
        room = situation.overhead.room(memory_bytes)
        return room > 0 and _most_layers(situation, groups, room)[0] >= situation.model.layers

    if not fits(high):
        return None
    while high - low > RESOLUTION_BYTES:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _ranks(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text if len(ranks) <= 8 else f"{text} and {len(ranks) - 8} more"
