"""Which ranks take which places of a layout: those that hold most of what a place needs. Pure.

A search finds shapes; who of equal ranks stands where is then free. Whole nodes change places, whatever the groups that
they hold, groups of equally many, equally fast ranks over the whole job, then equally fast ranks of a node within it,
standing by or not, each an assignment of least bytes (`scipy.optimize.linear_sum_assignment`), in turn until nothing is
gained. Called by `resihp.scheduler.anytime`, and by the planner where there is no memory for a transition otherwise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy.optimize import linear_sum_assignment

from resihp.parallelism.layout import LayerSpan, Replica, Stage
from resihp.scheduler.cost.prices import Lacking, units_outside
from resihp.scheduler.situation import Situation

ROUNDS = 4
"""At most; two are usual."""
MOST_TOGETHER = 512
"""Ranks up to which all change places; in a larger job those of a node that lack something, or stand by."""

MOST_NODES = 32
"""More do not change places as a whole."""


class _Place(msgspec.Struct, frozen=True):
    replica: int
    stage: int
    chunks: tuple[LayerSpan, ...]
    units: frozenset[str]
    tp: int


def relabelled(replicas: Sequence[Replica], situation: Situation) -> tuple[Replica, ...]:
    """The same shapes at the same speeds, of ranks that need to receive fewer bytes, or as they were.

    Groups stay on one node each, but may be on another one: where links differ, the time may be another.
    """
    labels = _Labels(situation)
    if len(situation.available) <= MOST_TOGETHER:
        return labels.run(tuple(replicas))
    lacking = [d for d, one in enumerate(replicas) if labels.bytes_of((one,))]
    labels.leave({rank for d, one in enumerate(replicas) if d not in lacking for rank in one.ranks})
    own = labels.run(tuple(replicas[d] for d in lacking), between=False)
    named = dict(zip(lacking, own, strict=True))
    return tuple(named.get(d, one) for d, one in enumerate(replicas))


class _Labels:
    def __init__(self, situation: Situation) -> None:
        self._situation, self._lacking = situation, Lacking(situation)
        self._at: defaultdict[tuple[str, float], list[int]] = defaultdict(list)
        """Ranks by node and speed."""
        for rank in situation.available:
            self._at[self._kind(rank)].append(rank)

    def leave(self, ranks: set[int]) -> None:
        """These stay where they are."""
        for kind, there in self._at.items():
            self._at[kind] = [rank for rank in there if rank not in ranks]

    def _kind(self, rank: int) -> tuple[str, float]:
        return self._situation.nodes[rank], self._situation.speeds.get(rank, 1.0)

    def run(self, replicas: tuple[Replica, ...], *, between: bool = True) -> tuple[Replica, ...]:
        """`between`: also groups of different nodes change places."""
        bytes_now = self.bytes_of(replicas)
        for _ in range(ROUNDS):
            begin = (replicas, self._between_nodes(replicas)) if between else (replicas,)
            offers = [self._in_place(self._between_groups(one) if between else one) for one in dict.fromkeys(begin)]
            found = min(offers, key=self.bytes_of)
            bytes_then = self.bytes_of(found)
            if bytes_then >= bytes_now:
                break
            replicas, bytes_now = found, bytes_then
        return replicas

    def bytes_of(self, replicas: tuple[Replica, ...]) -> int:
        return sum(self._of(rank, place, t) for place, ranks in self._places(replicas) for t, rank in enumerate(ranks))

    def _of(self, rank: int, place: _Place, t: int) -> int:
        return self._lacking.bytes_of(rank, place.chunks, place.units, t, place.tp)

    def _places(self, replicas: tuple[Replica, ...]) -> list[tuple[_Place, tuple[int, ...]]]:
        found: list[tuple[_Place, tuple[int, ...]]] = []
        for d, replica in enumerate(replicas):
            for s, stage in enumerate(replica.stages):
                if stage.ranks:
                    place = _Place(d, s, stage.chunks, units_outside(replica, s), stage.tp)
                    found.append((place, stage.ranks))
        return found

    def _between_nodes(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """All groups of a node, whatever their widths, to a node that has ranks of their speeds for them."""
        seats: defaultdict[str, defaultdict[float, list[tuple[_Place, int]]]] = defaultdict(lambda: defaultdict(list))
        taken: dict[tuple[int, int], list[int]] = {}
        for place, ranks in self._places(replicas):
            taken[place.replica, place.stage] = list(ranks)
            for t, rank in enumerate(ranks):
                node, speed = self._kind(rank)
                seats[node][speed].append((place, t))
        nodes = sorted({node for node, _ in self._at})
        if len(nodes) > MOST_NODES:
            return replicas
        named = [[self._named(seats[a], b) for b in nodes] for a in nodes]
        cost = np.array([[math.inf if one is None else one[0] for one in row] for row in named])
        cost[np.isinf(cost)] = 1.0 + 2.0 * len(nodes) * np.max(cost[np.isfinite(cost)], initial=1.0)
        for a, b in zip(*(found.tolist() for found in linear_sum_assignment(cost)), strict=True):
            one = named[a][b]
            if one is None:
                return replicas
            for place, t, rank in one[1]:
                taken[place.replica, place.stage][t] = rank
        return _with(replicas, {where: tuple(ranks) for where, ranks in taken.items()})

    def _named(
        self, seats: dict[float, list[tuple[_Place, int]]], node: str
    ) -> tuple[int, list[tuple[_Place, int, int]]] | None:
        """Bytes that these seats lack if ranks of a node take them, and which; None if it has not enough of a speed."""
        total, found = 0, []
        for speed, asked in seats.items():
            pool = self._at.get((node, speed), [])
            if len(pool) < len(asked):
                return None
            cost = np.array([[self._of(rank, place, t) for rank in pool] for place, t in asked])
            at, which = linear_sum_assignment(cost)
            total += int(cost[at, which].sum())
            found += [(*asked[i], pool[j]) for i, j in zip(at.tolist(), which.tolist(), strict=True)]
        return total, found

    def _between_groups(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Groups of one width and speeds, each to a place of such a group."""
        alike: defaultdict[tuple[float, ...], list[tuple[_Place, tuple[int, ...]]]] = defaultdict(list)
        for place, ranks in self._places(replicas):
            alike[tuple(sorted(self._kind(rank)[1] for rank in ranks))].append((place, ranks))
        idle = set(self._situation.available).difference(*(replica.ranks for replica in replicas))
        taken: dict[tuple[int, int], tuple[int, ...]] = {}
        for speeds, members in alike.items():
            groups = [ranks for _, ranks in members] + self._idle_groups(speeds, idle)
            cost = np.array([[self._least(ranks, place) for ranks in groups] for place, _ in members])
            at, which = linear_sum_assignment(cost)
            for i, j in zip(at.tolist(), which.tolist(), strict=True):
                place = members[i][0]
                taken[place.replica, place.stage] = groups[j]
            idle.update(*(ranks for _, ranks in members))
            idle.difference_update(*(groups[j] for j in which.tolist()))
        return _with(replicas, taken)

    def _idle_groups(self, speeds: tuple[float, ...], idle: set[int]) -> list[tuple[int, ...]]:
        """Groups of ranks that stand by, of these speeds, as many as each node has."""
        found = []
        for node in sorted({self._situation.nodes[rank] for rank in idle}):
            there = {
                speed: [rank for rank in self._at.get((node, speed), ()) if rank in idle]
                for speed in dict.fromkeys(speeds)
            }
            while all(len(there[speed]) >= speeds.count(speed) for speed in there):
                found.append(tuple(there[speed].pop(0) for speed in speeds))
        return found

    def _in_place(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        return self._within_groups(self._within_nodes(self._within_groups(replicas)))

    def _within_groups(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """The order of each group's ranks."""
        taken: dict[tuple[int, int], tuple[int, ...]] = {}
        for place, ranks in self._places(replicas):
            cost = np.array([[self._of(rank, place, t) for rank in ranks] for t in range(place.tp)])
            taken[place.replica, place.stage] = tuple(ranks[j] for j in linear_sum_assignment(cost)[1].tolist())
        return _with(replicas, taken)

    def _least(self, ranks: tuple[int, ...], place: _Place) -> int:
        """Bytes that a group's place needs at least, were it for ranks like these of their nodes alone."""
        pool = list(dict.fromkeys(rank for own in ranks for rank in self._at[self._kind(own)]))
        cost = np.array([[self._of(rank, place, t) for rank in pool] for t in range(place.tp)])
        at, which = linear_sum_assignment(cost)
        return int(cost[at, which].sum())

    def _within_nodes(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Ranks of one node and speed, each to a seat of one of them."""
        seats: defaultdict[tuple[str, float], list[tuple[_Place, int]]] = defaultdict(list)
        taken: dict[tuple[int, int], list[int]] = {}
        for place, ranks in self._places(replicas):
            taken[place.replica, place.stage] = list(ranks)
            for t, rank in enumerate(ranks):
                seats[self._kind(rank)].append((place, t))
        for kind, asked in seats.items():
            pool = self._at[kind]
            cost = np.array([[self._of(rank, place, t) for rank in pool] for place, t in asked])
            for i, j in zip(*(found.tolist() for found in linear_sum_assignment(cost)), strict=True):
                place, t = asked[i]
                taken[place.replica, place.stage][t] = pool[j]
        return _with(replicas, {where: tuple(ranks) for where, ranks in taken.items()})


def _with(replicas: tuple[Replica, ...], taken: dict[tuple[int, int], tuple[int, ...]]) -> tuple[Replica, ...]:
    return tuple(
        Replica(tuple(Stage(taken.get((d, s), ()), stage.chunks) for s, stage in enumerate(replica.stages)))
        for d, replica in enumerate(replicas)
    )
