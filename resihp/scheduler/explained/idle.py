"""Reasons why devices are on standby: tries their possible uses, and reports the results. Pure.

The idle devices of a node are tried together, in four uses: as a further stage of a replica, in a larger group on their
node, in the places of slower ranks of such a group, as a replica of their own. Each use is laid out and priced as by
the planner (`resihp.scheduler.layouts.groups.lay`, `resihp.scheduler.cost.prices`), and compared with the plan's stages
under the same schedule. Neither side has tuned orders here, so their gain cancels. The number of tries is limited, so
that a large job takes no longer than a small one; devices that equal tried devices get the same reason.

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
from resihp.scheduler.layouts.groups import SIGNIFICANT_GAIN, Group, Pipe, idle_groups, lay
from resihp.scheduler.situation import Situation

MAX_TRIES = 160
"""Maximum number of layouts of a replica that are tried in total."""
MAX_REPLICAS_TRIED = 4
"""Maximum number of replicas in which a group is tried."""

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
"""Reason why devices are on standby.

- `unfit`: they are excluded from work.
- `stopped`: their speed is 0.
- `memory`: no possible use has room in memory.
- `layers`: a further stage would get no layer.
- `micro-batches`: another replica would get no micro-batch.
- `slower`: every use makes the iteration longer.
- `no gain`: the time stays the same.
- `too slow`: at full speed they would be useful.
- `node`: they would be useful to a group on another node.
- `memory unknown`: a further stage would be useful, but replicas grow only if device memory is known.
- `gain`: the iteration would be faster, and yet the plan has them on standby.
- `untried`: there are too many different devices to try all.
"""
Way = Literal["", "stage", "group", "place", "replica"]
"""Use that was tried: a further stage, a larger group, a slower rank's place, or a replica of their own; "" for
none."""


OBSTACLE_ORDER: tuple[Why, ...] = ("memory", "layers", "micro-batches")


class Idle(msgspec.Struct, frozen=True):
    """Devices of one node that are on standby, and the reason."""

    ranks: tuple[int, ...]
    node: str
    why: Why
    way: Way = ""
    """The best use that was tried; for `too slow` and `node`, the use that would be best without that obstacle."""
    change: float | None = None
    """Relative change of the iteration's time in that use; negative if it is faster. If the replica that contains the
    devices becomes slower, the relative change of the replica's time. None if no use could be priced."""


class _Tried(msgspec.Struct, frozen=True):
    """The result of one try: the relative change of the time, or the obstacle."""

    way: Way
    change: float = math.inf
    obstacle: Why | None = None


def reasons(plan: Plan, situation: Situation, unfit: Collection[int] = ()) -> tuple[Idle, ...]:
    """Return the reason for every standby rank, node by node.

    `unfit`: ranks that are in the layout, but not available.
    """
    standby = [rank for rank in plan.layout.standby if rank not in unfit]
    idle_devices = [Idle(ranks, node, "unfit") for node, ranks in _by_node(situation, unfit)]
    stopped = [rank for rank in standby if situation.speeds.get(rank, 1.0) <= 0]
    idle_devices += [Idle(ranks, node, "stopped") for node, ranks in _by_node(situation, stopped)]
    trial = _Trial(plan, situation)
    reason_of: dict[object, Idle] = {}
    for group in idle_groups(situation, set(standby).difference(stopped)):
        node = situation.nodes[group.ranks[0]]
        key = (trial.speeds_of(group.ranks), node in trial.homes and trial.at_home(node))
        if key not in reason_of:
            reason_of[key] = trial.why(group)
        idle_devices.append(msgspec.structs.replace(reason_of[key], ranks=group.ranks, node=node))
    return tuple(sorted(idle_devices, key=lambda idle: idle.ranks))


class _Trial:
    """Tries the idle devices of one plan in their possible uses."""

    def __init__(self, plan: Plan, situation: Situation) -> None:
        self._plan, self._situation, self._prices = plan, situation, Prices(situation)
        self._left = MAX_TRIES
        self._replicas = [replica for replica in plan.layout.replicas if not replica.vacant]
        self._shares = [len(plan.assignment[d]) for d, r in enumerate(plan.layout.replicas) if not r.vacant]
        self._iteration_s: float | None = None
        self.homes = {situation.nodes[rank] for replica in self._replicas for rank in replica.ranks}

    def speeds_of(self, ranks: Iterable[int]) -> tuple[float, ...]:
        return tuple(self._situation.speeds.get(rank, 1.0) for rank in ranks)

    def at_home(self, node: str) -> tuple[object, ...]:
        """Return the properties of the stages on a node that matter for the idle devices of the node."""
        nodes = self._situation.nodes
        return tuple(
            (s, self.speeds_of(stage.ranks), stage.chunks)
            for replica in self._replicas
            for s, stage in enumerate(replica.stages)
            if nodes[stage.ranks[0]] == node
        )

    def why(self, group: Group) -> Idle:
        tries = [*self._tries(group)]
        best = min((try_ for try_ in tries if try_.obstacle is None), key=lambda try_: try_.change, default=None)
        node = self._situation.nodes[group.ranks[0]]
        if best is None or best.change > -SIGNIFICANT_GAIN:
            changed_conditions: tuple[tuple[Why, list[_Tried]], ...] = (
                ("too slow", self._at_full_speed(group)),
                ("node", self._across_nodes(group)),
            )
            for why, tries_if_changed in changed_conditions:
                best_if_changed = min(tries_if_changed, key=lambda try_: try_.change, default=None)
                if best_if_changed is not None and best_if_changed.change <= -SIGNIFICANT_GAIN:
                    return Idle(group.ranks, node, why, best_if_changed.way, best_if_changed.change)
        if best is not None:
            return Idle(group.ranks, node, self._verdict(best), best.way, best.change)
        obstacles = [try_.obstacle for try_ in tries if try_.obstacle is not None]
        for obstacle in OBSTACLE_ORDER:
            if obstacle in obstacles:
                return Idle(group.ranks, node, obstacle)
        return Idle(group.ranks, node, "untried")

    def _verdict(self, best: _Tried) -> Why:
        if best.change > -SIGNIFICANT_GAIN:
            return "slower" if best.change > SIGNIFICANT_GAIN else "no gain"
        return "memory unknown" if best.way == "stage" and self._situation.memory_bytes is None else "gain"

    def _at_full_speed(self, group: Group) -> list[_Tried]:
        """Return the successful tries of a group as if its devices were healthy; none if they are healthy."""
        speeds = self._situation.speeds
        if all(speeds.get(rank, 1.0) >= 1 for rank in group.ranks):
            return []
        healthy = {rank: speed for rank, speed in speeds.items() if rank not in group.ranks}
        healthy_trial = _Trial(self._plan, msgspec.structs.replace(self._situation, speeds=healthy))
        healthy_trial._left = self._left
        tries = [*healthy_trial._tries(group)]
        self._left = healthy_trial._left
        return [try_ for try_ in tries if try_.obstacle is None]

    def _across_nodes(self, group: Group) -> list[_Tried]:
        """Return the successful tries in which a group joins groups on other nodes."""
        node = self._situation.nodes[group.ranks[0]]
        tries = [*self._larger(group, lambda home: home != node)]
        return [try_ for try_ in tries if try_.obstacle is None]

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
        """Yield the tries in which a group joins the group of a stage on a node for which `is_home` is true.

        The joined group consists of as many of all these ranks as are fastest together.
        """
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
                groups = [Group(member.ranks, member.chunks) for member in replica.stages]
                way: Way = "group" if len(ranks) > len(stage.ranks) else "place"
                yield self._changed(way, d, Pipe((*groups[:s], Group(ranks, stage.chunks), *groups[s + 1 :])))

    def _apart(self, group: Group) -> Iterator[_Tried]:
        """Yield the tries in which a group forms a replica of its own, together with other idle groups if needed.

        As in the planner, a replica needs at least half of the speed with which a replica of the job was started.
        """
        situation = self._situation
        standby = {rank for rank in self._plan.layout.standby if situation.speeds.get(rank, 1.0) > 0}
        standby &= set(situation.available)
        other_groups = [
            candidate
            for candidate in idle_groups(situation, standby)
            if not set(candidate.ranks).intersection(group.ranks)
        ]
        for count in range(min(situation.pp, 1 + len(other_groups))):
            pipe = Pipe((group, *other_groups[:count]))
            if sum(situation.speed(part.ranks) for part in pipe.groups) < situation.tp * situation.pp / 2:
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
        """Return the result of replacing replica `d` by `pipe`.

        The change is that of the replica's time if the replica becomes slower, else that of the iteration's time.
        """
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
        replicas = [priced if k == d else self._prices.priced(replica) for k, replica in enumerate(self._replicas)]
        return self._told(way, self._prices.iteration(replicas)[1])

    def _told(self, way: Way, seconds: float) -> _Tried:
        if math.isinf(seconds):
            return _Tried(way, obstacle="memory")
        if self._iteration_s is None:
            now: list[Priced] = [self._prices.priced(replica) for replica in self._replicas]
            self._iteration_s = self._prices.iteration(now)[1]
        return _Tried(way, seconds / self._iteration_s - 1 if math.isfinite(self._iteration_s) else 0.0)

    def _pipes(self, node: str) -> Sequence[int]:
        """Return the replicas to try, one of each kind: first replicas with a stage on `node`, then the slowest."""
        nodes = self._situation.nodes
        replica_of_kind: dict[object, int] = {}
        order = sorted(
            range(len(self._replicas)),
            key=lambda d: (
                all(nodes[rank] != node for rank in self._replicas[d].ranks),
                -self._shares[d] * self._prices.priced(self._replicas[d]).slowest,
                d,
            ),
        )
        for d in order:
            is_on_node = any(nodes[rank] == node for rank in self._replicas[d].ranks)
            replica_of_kind.setdefault((is_on_node, self._prices.priced(self._replicas[d]).shape), d)
        return [*itertools.islice(replica_of_kind.values(), MAX_REPLICAS_TRIED)]

    def _places(self, replica: Replica, node: str) -> list[int]:
        """Return the possible positions of a further stage: both ends, and next to stages on the same node."""
        stages_on_node = [s for s, stage in enumerate(replica.stages) if self._situation.nodes[stage.ranks[0]] == node]
        return sorted({0, len(replica.stages), *stages_on_node, *(s + 1 for s in stages_on_node)})


def _by_node(situation: Situation, ranks: Iterable[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    nodes: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(situation.nodes[rank], []).append(rank)
    for node, node_ranks in nodes.items():
        yield node, tuple(node_ranks)
