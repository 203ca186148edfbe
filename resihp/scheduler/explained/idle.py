"""Why devices stand by: what they could do is tried, and what comes of it is told. Pure.

Tried are, for the idle devices of a node together: to be a further stage of a replica, to make a group of their node
larger, to take slower ranks' places in it, to be a replica of their own. What is tried is laid out and priced as the
planner does it (`resihp.scheduler.layouts.groups.lay`, `resihp.scheduler.cost.prices`), against the plan's stages on
the same schedule: orders of work of its own, which neither side has here, cancel. Tries are counted, so that a large
job costs no more than a small one; devices like those that were tried are told the same.

Called by `resihp.scheduler.explained.explanation`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from resihp.errors import LayoutError
from resihp.parallelism.layout import Replica
from resihp.parallelism.plan import Plan
from resihp.scheduler.cost.prices import Priced, Prices
from resihp.scheduler.layouts import tp_groups
from resihp.scheduler.layouts.groups import SIGNIFICANT, Group, Pipe, idle_groups, lay
from resihp.scheduler.situation import Situation

MOST_TRIES = 160
"""Layouts of a replica that are tried in all."""
MOST_PIPES = 4
"""Replicas that a group is tried in."""

Why = Literal[
    "unfit",
    "stopped",
    "memory",
    "layers",
    "micro-batches",
    "slower",
    "no gain",
    "too slow",
    "node",
    "memory unknown",
    "gain",
    "untried",
]
"""`unfit`: kept out. `stopped`: speed 0. `memory`: nothing that they could do has room. `layers`: a further stage would
have none. `micro-batches`: another replica would have none. `slower`: whatever they do, it takes longer. `no gain`: it
takes as long. `too slow`: at full speed they would be of use. `node`: they would be of use to a group of another node.
`memory unknown`: a further stage would be of use, but replicas grow only where it is known what they have room for.
`gain`: it would be faster, and yet the plan has them stand by. `untried`: there are too many that are unlike."""
Way = Literal["", "stage", "group", "place", "replica"]
"""What was tried: a further stage, a larger group, a slower rank's place, a replica of their own."""


OBSTACLES: tuple[Why, ...] = ("memory", "layers", "micro-batches")


class Idle(msgspec.Struct, frozen=True):
    """Devices of one node that stand by, and why."""

    ranks: tuple[int, ...]
    node: str
    why: Why
    way: Way = ""
    """The best of what was tried, or of what would be if the obstacle were not there."""
    change: float | None = None
    """Of the time of an iteration in that case, relatively: below 0 it is faster. Where the replica that they would be
    in becomes slower, of the time of that one."""


class _Tried(msgspec.Struct, frozen=True):
    """One try: what it changes, or the obstacle."""

    way: Way
    change: float = math.inf
    obstacle: Why | None = None


def reasons(plan: Plan, situation: Situation, unfit: Collection[int] = ()) -> tuple[Idle, ...]:
    """Of every rank that stands by, node by node. `unfit` ranks are in the layout, but not among the available ones."""
    standby = [rank for rank in plan.layout.standby if rank not in unfit]
    found = [Idle(ranks, node, "unfit") for node, ranks in _by_node(situation, unfit)]
    stopped = [rank for rank in standby if situation.speeds.get(rank, 1.0) <= 0]
    found += [Idle(ranks, node, "stopped") for node, ranks in _by_node(situation, stopped)]
    trial = _Trial(plan, situation)
    alike: dict[object, Idle] = {}
    for group in idle_groups(situation, set(standby).difference(stopped)):
        node = situation.nodes[group.ranks[0]]
        key = (trial.speeds_of(group.ranks), node in trial.homes and trial.at_home(node))
        if key not in alike:
            alike[key] = trial.why(group)
        found.append(msgspec.structs.replace(alike[key], ranks=group.ranks, node=node))
    return tuple(sorted(found, key=lambda idle: idle.ranks))


class _Trial:
    """Tries of one plan."""

    def __init__(self, plan: Plan, situation: Situation) -> None:
        self._plan, self._situation, self._prices = plan, situation, Prices(situation)
        self._left = MOST_TRIES
        self._replicas = [replica for replica in plan.layout.replicas if not replica.vacant]
        self._shares = [len(plan.assignment[d]) for d, r in enumerate(plan.layout.replicas) if not r.vacant]
        self._iteration_s: float | None = None
        self.homes = {situation.nodes[rank] for replica in self._replicas for rank in replica.ranks}

    def speeds_of(self, ranks: Iterable[int]) -> tuple[float, ...]:
        return tuple(self._situation.speeds.get(rank, 1.0) for rank in ranks)

    def at_home(self, node: str) -> tuple[object, ...]:
        """What stands on a node, as far as it matters for who is idle there."""
        nodes = self._situation.nodes
        return tuple(
            (s, self.speeds_of(stage.ranks), stage.chunks)
            for replica in self._replicas
            for s, stage in enumerate(replica.stages)
            if nodes[stage.ranks[0]] == node
        )

    def why(self, group: Group) -> Idle:
        tried = [*self._tries(group)]
        best = min((one for one in tried if one.obstacle is None), key=lambda one: one.change, default=None)
        node = self._situation.nodes[group.ranks[0]]
        if best is None or best.change > -SIGNIFICANT:
            conditions: tuple[tuple[Why, list[_Tried]], ...] = (
                ("too slow", self._at_full_speed(group)),
                ("node", self._across_nodes(group)),
            )
            for why, others in conditions:
                other = min(others, key=lambda one: one.change, default=None)
                if other is not None and other.change <= -SIGNIFICANT:
                    return Idle(group.ranks, node, why, other.way, other.change)
        if best is not None:
            return Idle(group.ranks, node, self._verdict(best), best.way, best.change)
        obstacles = [one.obstacle for one in tried if one.obstacle is not None]
        for obstacle in OBSTACLES:
            if obstacle in obstacles:
                return Idle(group.ranks, node, obstacle)
        return Idle(group.ranks, node, "untried")

    def _verdict(self, best: _Tried) -> Why:
        if best.change > -SIGNIFICANT:
            return "slower" if best.change > SIGNIFICANT else "no gain"
        return "memory unknown" if best.way == "stage" and self._situation.memory_bytes is None else "gain"

    def _at_full_speed(self, group: Group) -> list[_Tried]:
        """What they would do if they were healthy."""
        speeds = self._situation.speeds
        if all(speeds.get(rank, 1.0) >= 1 for rank in group.ranks):
            return []
        healthy = {rank: speed for rank, speed in speeds.items() if rank not in group.ranks}
        other = _Trial(self._plan, msgspec.structs.replace(self._situation, speeds=healthy))
        other._left = self._left
        found = [*other._tries(group)]
        self._left = other._left
        return [one for one in found if one.obstacle is None]

    def _across_nodes(self, group: Group) -> list[_Tried]:
        """What they would do in groups of other nodes."""
        node = self._situation.nodes[group.ranks[0]]
        found = [*self._larger(group, lambda home: home != node)]
        return [one for one in found if one.obstacle is None]

    def _tries(self, group: Group) -> Iterator[_Tried]:
        node = self._situation.nodes[group.ranks[0]]
        yield from self._larger(group, lambda home: home == node)
        for d in self._pipes(node):
            replica = self._replicas[d]
            groups = [Group(stage.ranks, stage.chunks) for stage in replica.stages]
            for i in self._places(replica, node):
                yield self._changed("stage", d, Pipe((*groups[:i], group, *groups[i:])))
        yield from self._apart(group)

    def _larger(self, group: Group, is_home: Callable[[str], bool]) -> Iterator[_Tried]:
        """With ranks of a group on such a node: as many of all as are fastest together."""
        situation = self._situation
        for d in self._pipes(situation.nodes[group.ranks[0]]):
            replica = self._replicas[d]
            for s, stage in enumerate(replica.stages):
                if not is_home(situation.nodes[stage.ranks[0]]):
                    continue
                ranks = tp_groups.exclude(
                    [(rank, situation.speeds.get(rank, 1.0)) for rank in (*stage.ranks, *group.ranks)],
                    started_with=situation.tp,
                    obstacle=situation.model.tensor_parallel_obstacle,
                    before=stage.ranks,
                )
                if set(ranks).isdisjoint(group.ranks) or situation.speed(ranks) <= situation.speed(stage.ranks):
                    continue
                groups = [Group(other.ranks, other.chunks) for other in replica.stages]
                way: Way = "group" if len(ranks) > len(stage.ranks) else "place"
                yield self._changed(way, d, Pipe((*groups[:s], Group(ranks, stage.chunks), *groups[s + 1 :])))

    def _apart(self, group: Group) -> Iterator[_Tried]:
        """As a replica, with other idle groups where it takes several: from half of what one was started with, as the
        planner has it."""
        situation = self._situation
        standby = {rank for rank in self._plan.layout.standby if situation.speeds.get(rank, 1.0) > 0}
        standby &= set(situation.available)
        others = [other for other in idle_groups(situation, standby) if not set(other.ranks).intersection(group.ranks)]
        for count in range(min(situation.pp, 1 + len(others))):
            pipe = Pipe((group, *others[:count]))
            if sum(situation.speed(one.ranks) for one in pipe.groups) < situation.tp * situation.pp / 2:
                continue
            if self._left <= 0:
                return
            self._left -= 1
            try:
                priced = self._prices.priced(lay(situation, pipe, len(self._replicas) + 1))
            except LayoutError:
                yield _Tried("replica", obstacle="memory")
                continue
            if len(self._replicas) + 1 > situation.micro_batches:
                yield _Tried("replica", obstacle="micro-batches")
                return
            seconds = self._prices.iteration([*map(self._prices.priced, self._replicas), priced])[1]
            yield self._told("replica", seconds)

    def _changed(self, way: Way, d: int, pipe: Pipe) -> _Tried:
        """With replica `d` as this pipe: of its own time where it becomes slower, else of the iteration's."""
        if self._left <= 0:
            return _Tried(way, obstacle="untried")
        self._left -= 1
        try:
            priced = self._prices.priced(lay(self._situation, pipe, len(self._replicas)))
        except LayoutError:
            return _Tried(way, obstacle="memory")
        if len(priced.replica.stages) < len(pipe.groups):
            return _Tried(way, obstacle="layers")
        count = len(self._replicas)
        before = self._prices.seconds(self._prices.priced(self._replicas[d]), self._shares[d], count)
        after = self._prices.seconds(priced, self._shares[d], count)
        if math.isinf(after):
            return _Tried(way, obstacle="memory")
        if after > before or math.isinf(before):
            return _Tried(way, after / before - 1 if math.isfinite(before) else 0.0)
        replicas = [priced if k == d else self._prices.priced(other) for k, other in enumerate(self._replicas)]
        return self._told(way, self._prices.iteration(replicas)[1])

    def _told(self, way: Way, seconds: float) -> _Tried:
        if math.isinf(seconds):
            return _Tried(way, obstacle="memory")
        if self._iteration_s is None:
            now: list[Priced] = [self._prices.priced(replica) for replica in self._replicas]
            self._iteration_s = self._prices.iteration(now)[1]
        return _Tried(way, seconds / self._iteration_s - 1 if math.isfinite(self._iteration_s) else 0.0)

    def _pipes(self, node: str) -> Sequence[int]:
        """Replicas to try, one of each kind: those with a stage on that node first, then the slowest."""
        nodes = self._situation.nodes
        found: dict[object, int] = {}
        order = sorted(
            range(len(self._replicas)),
            key=lambda d: (
                all(nodes[rank] != node for rank in self._replicas[d].ranks),
                -self._shares[d] * self._prices.priced(self._replicas[d]).slowest,
                d,
            ),
        )
        for d in order:
            here = any(nodes[rank] == node for rank in self._replicas[d].ranks)
            found.setdefault((here, self._prices.priced(self._replicas[d]).shape), d)
        return [*itertools.islice(found.values(), MOST_PIPES)]

    def _places(self, replica: Replica, node: str) -> list[int]:
        """Where a further stage may stand: at both ends, and beside stages of its node."""
        beside = [s for s, stage in enumerate(replica.stages) if self._situation.nodes[stage.ranks[0]] == node]
        return sorted({0, len(replica.stages), *beside, *(s + 1 for s in beside)})


def _by_node(situation: Situation, ranks: Iterable[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(situation.nodes[rank], []).append(rank)
    for node, there in nodes.items():
        yield node, tuple(there)
