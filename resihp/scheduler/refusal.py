"""Why nothing can run: the constraint that binds, and what would lift it. Pure.

Asked once every way to plan has failed. What is looked at is the best that could be: all ranks in groups as large as
the job's, in one pipeline, whose stages have as many layers as their memory allows. Called by
`resihp.scheduler.planner`.
"""

from __future__ import annotations

from resihp.scheduler.cost import memory
from resihp.scheduler.layouts.groups import Group, idle_groups
from resihp.scheduler.situation import Situation

FINE_BYTES = 100_000_000
"""To which what a device would need is told."""


def reason(situation: Situation) -> str:
    """In words, ids and numbers in; for a situation in which nothing can run."""
    live = situation.available
    if not live:
        return "no rank is left; bring some back, or start again from a checkpoint"
    stopped = [rank for rank in live if not situation.speeds.get(rank, 1.0)]
    if len(stopped) == len(live):
        return f"all {len(live)} ranks that are left stand still: {_ranks(stopped)}; bring others, spares for example"
    groups = idle_groups(situation, [rank for rank in live if rank not in stopped])
    layers = situation.model.layers
    if situation.room_bytes is not None:
        room, stages = _most_layers(situation, groups, situation.room_bytes)
        if room < layers:
            return _memory(situation, groups, room, stages)
    if situation.lost.issuperset(situation.base.ranks):
        return "no rank of the layout is left, and with it all state: start again from a checkpoint"
    return (
        f"one pipeline of {len(groups)} groups has room for the {layers} layers, but no way was found there; "
        "start again from a checkpoint"
    )


def _memory(situation: Situation, groups: tuple[Group, ...], room: int, stages: int) -> str:
    """That memory binds: how many layers there is room for, what the tightest stage needs, what would do."""
    model, tokens = situation.model, situation.tokens
    posts = [situation.post(s, stages, len(group.ranks), 1) for s, group in enumerate(groups[:stages])]
    limit = situation.room_bytes
    assert limit is not None
    rooms = [memory.capacity(model, post, limit, tokens) for post in posts]
    tightest = rooms.index(min(rooms))
    state, activations = memory.layer_bytes(model, posts[tightest], tokens)
    rank = groups[tightest].ranks[0]
    more, enough = _more_ranks(situation, groups), _enough_bytes(situation, groups)
    lift = [] if more is None else [f"{more} ranks more, of spares for example"]
    lift += [] if enough is None else [f"devices of {enough / 1e9:.1f} GB"]
    lift += ["shorter micro-batches"] if activations else []
    lift += [] if situation.sequence_parallel or situation.tp == 1 else ["sequence parallelism"]
    return (
        f"memory binds: even one pipeline of all ranks that are left, {stages} stages, has room for {room} of "
        f"{model.layers} layers, the tightest stage ({tightest}, with rank {rank}) for {rooms[tightest]}, where each "
        f"takes {state / 1e9:.3g} GB of state and {activations / 1e9:.3g} GB of activations; what would help: "
        f"{', '.join(lift)}"
    )


def _most_layers(situation: Situation, groups: tuple[Group, ...], room_bytes: int) -> tuple[int, int]:
    """Most layers that one pipeline of these groups has room for, the largest first, and its number of stages."""
    model, found = situation.model, (0, 1)
    for stages in range(1, min(len(groups), model.layers // situation.chunks) + 1):
        posts = [situation.post(s, stages, len(group.ranks), 1) for s, group in enumerate(groups[:stages])]
        rooms = [memory.capacity(model, post, room_bytes, situation.tokens) for post in posts]
        if min(rooms) >= situation.chunks and sum(rooms) > found[0]:
            found = sum(rooms), stages
    return found


def _more_ranks(situation: Situation, groups: tuple[Group, ...]) -> int | None:
    """How many ranks more, in groups as large as the job's, would be enough; None if twice as many groups are not."""
    assert situation.room_bytes is not None
    whole = Group(tuple(range(situation.tp)))  # only how many there are counts
    for count in range(1, len(groups) + 1):
        if _most_layers(situation, (*([whole] * count), *groups), situation.room_bytes)[0] >= situation.model.layers:
            return count * situation.tp
    return None


def _enough_bytes(situation: Situation, groups: tuple[Group, ...]) -> int | None:
    """What each device would have to have; None if more than ten times as much would not do."""
    assert situation.memory_bytes is not None
    low, high = situation.memory_bytes, 10 * situation.memory_bytes

    def fits(memory_bytes: int) -> bool:
        room = situation.overhead.room(memory_bytes)
        return room > 0 and _most_layers(situation, groups, room)[0] >= situation.model.layers

    if not fits(high):
        return None
    while high - low > FINE_BYTES:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
