"""Ranks and layers of each stage of a replica: progressive exclusion, replacement, distribution of layers. Pure.

These are the paper's first two steps. By Eq. 4, each stage keeps the best set of its live ranks and of idle ranks on
its node; the weakest stage chooses first. A stage without ranks gets others, or is left out. Then the layers of each
replica are spread over its groups. The module never adds or gives up whole stages or replicas:
`resihp.scheduler.layouts.draft` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan, Replica, Stage
from resihp.scheduler.cost import memory, transition_memory
from resihp.scheduler.cost.held_state import HeldState
from resihp.scheduler.cost.memory import StageSetup
from resihp.scheduler.layouts import layers, tp_groups
from resihp.scheduler.situation import Situation

SIGNIFICANT_GAIN = 0.01
"""Relative improvement of a prediction below which a change is not worth the disruption."""


class Group(msgspec.Struct, frozen=True):
    """Ranks of one stage, in order, and the layers that they held, or that the ranks that they replace held."""

    ranks: tuple[int, ...]
    held: tuple[LayerSpan, ...] = ()


class Pipe(msgspec.Struct, frozen=True):
    """A replica under construction: its groups in pipeline order, and the index of the base's replica that it continues
    (None for a new one)."""

    groups: tuple[Group, ...]
    base: int | None = None


class Pool:
    """Ranks without work, by node."""

    def __init__(self, situation: Situation, ranks: Iterable[int]) -> None:
        self._nodes = situation.nodes
        self._by_node: defaultdict[str, set[int]] = defaultdict(set)
        self.add(ranks)

    def add(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._by_node[self._nodes[rank]].add(rank)

    def take(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._by_node[self._nodes[rank]].discard(rank)

    def on(self, node: str) -> tuple[int, ...]:
        return tuple(sorted(self._by_node[node])) if node in self._by_node else ()

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted(node for node, ranks in self._by_node.items() if ranks))


def regroup(situation: Situation, given_up: Collection[int] = (), *, vacant_first: bool = True) -> tuple[Pipe, ...]:
    """Return the continuation of each replica of the base. Replicas in `given_up` are left out; their ranks become
    idle.

    Stages choose ranks from the pool of idle ranks, the stage with the lowest remaining speed first. `vacant_first`:
    whether stages without any rank choose before all others, or after them.
    """
    live = set(situation.available)
    replicas = len(situation.base.replicas) - len(given_up)
    places = [
        (d, s, stage, tuple(rank for rank in stage.ranks if rank in live))
        for d, replica in enumerate(situation.base.replicas)
        if d not in given_up
        for s, stage in enumerate(replica.stages)
    ]
    pool = Pool(situation, sorted(live.difference(rank for *_, live_ranks in places for rank in live_ranks)))
    places.sort(key=lambda place: (not place[3] and not vacant_first, _left(situation, place[2], place[3]), place[:2]))
    ranks_of_stage: dict[tuple[int, int], tuple[int, ...]] = {}
    for d, s, stage, live_ranks in places:
        setup = situation.stage_setup(s, len(situation.base.replicas[d].stages), situation.tp, replicas)
        group = _choice(situation, setup, stage, live_ranks, pool)
        pool.add(set(live_ranks).difference(group))
        pool.take(set(group).difference(live_ranks))
        ranks_of_stage[d, s] = group
    pipes = []
    for d, replica in enumerate(situation.base.replicas):
        groups = [Group(ranks_of_stage.get((d, s), ()), stage.chunks) for s, stage in enumerate(replica.stages)]
        if any(group.ranks for group in groups):
            pipes.append(Pipe(tuple(group for group in groups if group.ranks), d))
    return tuple(pipes)


def idle_groups(situation: Situation, idle: Collection[int]) -> tuple[Group, ...]:
    """Return the groups that idle ranks could form, each on one node, fastest first."""
    pool = Pool(situation, sorted(idle))
    groups: list[Group] = []
    for node in pool.nodes:
        while True:
            ranks = tp_groups.exclude(
                _throughputs(situation, pool.on(node)),
                started_with=situation.tp,
                obstacle=situation.model.tensor_parallel_obstacle,
            )
            if not ranks:
                break
            pool.take(ranks)
            groups.append(Group(ranks))
    return tuple(sorted(groups, key=lambda group: (-situation.speed(group.ranks), group.ranks)))


def lay(situation: Situation, pipe: Pipe, replicas: int, holds: Mapping[int, HeldState] | None = None) -> Replica:
    """Return a replica of these groups with their layers, in a layout of `replicas` replicas.

    A replica of unchanged groups keeps its layers, with two exceptions: some of its ranks' speeds were measured, and
    other layers make its slowest stage significantly faster; or its layers no longer fit into memory. If there are more
    virtual stages than layers, the slowest groups are left out.

    Raises PlanError if the layers do not fit into the groups' memory, or, with `holds`, beside the state that each rank
    holds.
    """
    before = None if pipe.base is None else situation.base.replicas[pipe.base]
    same = before is not None and _same(pipe, before) and not _outgrown(situation, before, replicas)
    if before is not None and same and _unmeasured(situation, before.ranks):
        return before
    model = situation.model
    all_speeds = [situation.speed(group.ranks) for group in pipe.groups]
    kept_indices = layers.fitting(model.layers, all_speeds, situation.chunks)
    groups = [pipe.groups[i] for i in kept_indices]
    speeds = [all_speeds[i] for i in kept_indices]
    ends = layers.ends_of(situation.times)
    limits = _most_layers(situation, groups, replicas, holds)
    held_layers = tuple(group.held for group in groups)
    try:
        spans = layers.partition(
            model.layers, speeds, chunks=situation.chunks, ends=ends, before=held_layers, limits=limits
        )
    except PlanError:
        if before is not None and same:
            return before
        raise
    if before is not None and same:
        current_slowest = layers.slowest(held_layers, speeds, ends)
        if layers.slowest(spans, speeds, ends) >= current_slowest * (1 - SIGNIFICANT_GAIN):
            return before
    return Replica(tuple(Stage(group.ranks, span) for group, span in zip(groups, spans, strict=True)))


def _most_layers(
    situation: Situation, groups: Sequence[Group], replicas: int, holds: Mapping[int, HeldState] | None
) -> list[int] | None:
    """Return the most layers that each group has memory for, with arguments as in `lay`; None if memory is unknown."""
    if situation.room_bytes is None:
        return None
    setups = [situation.stage_setup(s, len(groups), len(group.ranks), replicas) for s, group in enumerate(groups)]
    limits = [memory.capacity(situation.model, setup, situation.room_bytes, situation.tokens) for setup in setups]
    if holds is None:
        return limits
    limits_beside = [
        _beside(situation, group.ranks, setup, replicas, holds) for group, setup in zip(groups, setups, strict=True)
    ]
    return [min(pair) for pair in zip(limits, limits_beside, strict=True)]


def untouched(situation: Situation, pipe: Pipe) -> bool:
    """Return whether there is no reason to change a replica: it has the same ranks, and none of them was measured."""
    if pipe.base is None:
        return False
    before = situation.base.replicas[pipe.base]
    return _same(pipe, before) and _unmeasured(situation, before.ranks)


def _beside(
    situation: Situation, ranks: tuple[int, ...], setup: StageSetup, replicas: int, holds: Mapping[int, HeldState]
) -> int:
    """Return the number of layers for which a group has room beside the old state of its ranks."""
    assert situation.room_bytes is not None
    return transition_memory.layers_beside(
        [holds.get(rank) for rank in ranks],
        situation.model,
        situation.room_bytes,
        first=setup.stage == 0,
        last=setup.stage == setup.stages - 1,
        sharing=(len(situation.base.replicas), replicas) if situation.zero_1 else None,
    )


def _outgrown(situation: Situation, before: Replica, replicas: int) -> bool:
    """Return whether an unchanged replica no longer fits because fewer replicas than before share the optimizer's
    state."""
    if situation.room_bytes is None or len(situation.base.replicas) <= replicas or not situation.zero_1:
        return False
    stages = len(before.stages)
    setups = [situation.stage_setup(s, stages, stage.tp, replicas) for s, stage in enumerate(before.stages)]
    return any(
        len(stage.layers) > memory.capacity(situation.model, setup, situation.room_bytes, situation.tokens)
        for stage, setup in zip(before.stages, setups, strict=True)
    )


def _same(pipe: Pipe, before: Replica) -> bool:
    return tuple(group.ranks for group in pipe.groups) == tuple(stage.ranks for stage in before.stages)


def _unmeasured(situation: Situation, ranks: Iterable[int]) -> bool:
    return not any(rank in situation.speeds for rank in ranks)


def _throughputs(situation: Situation, ranks: Iterable[int]) -> list[tuple[int, float]]:
    return [(rank, situation.speeds.get(rank, 1.0)) for rank in ranks]


def _left(situation: Situation, stage: Stage, live_ranks: tuple[int, ...]) -> float:
    """Return the speed of the best group of a stage's live ranks."""
    if live_ranks != stage.ranks or not _unmeasured(situation, live_ranks):
        live_ranks = tp_groups.exclude(
            _throughputs(situation, live_ranks),
            started_with=situation.tp,
            obstacle=situation.model.tensor_parallel_obstacle,
        )
    return situation.speed(live_ranks)


def _choice(
    situation: Situation, setup: StageSetup, stage: Stage, live_ranks: tuple[int, ...], pool: Pool
) -> tuple[int, ...]:
    """Return the ranks of a stage: the fastest group by Eq. 3-4 on one of its nodes, or on any node if it has no live
    rank.

    Among equally fast groups, a group on a node of the stage is preferred, then the group that leaves the fewest ranks
    idle.
    """
    crosses = len({situation.nodes[rank] for rank in live_ranks}) > 1 and situation.speed(live_ranks) > 0
    if live_ranks == stage.ranks and (
        crosses or (len(live_ranks) == situation.tp and _unmeasured(situation, live_ranks))
    ):
        return live_ranks
    home = {situation.nodes[rank] for rank in (live_ranks or stage.ranks) if rank in situation.nodes}
    k_min = memory.smallest_degree(situation.model, setup, situation.room_bytes, situation.tokens)
    groups: list[tuple[tuple[float, bool, int, str], tuple[int, ...]]] = []
    for node in sorted(home) if live_ranks else pool.nodes:
        own_ranks = [rank for rank in live_ranks if situation.nodes[rank] == node]
        idle = pool.on(node)
        group = tp_groups.exclude(
            _throughputs(situation, (*own_ranks, *idle)),
            k_min,
            started_with=situation.tp,
            obstacle=situation.model.tensor_parallel_obstacle,
            before=stage.ranks,
        )
        if group:
            groups.append(((-situation.speed(group), node not in home, len(own_ranks) + len(idle), node), group))
    return min(groups)[1] if groups else ()
