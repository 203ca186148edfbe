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
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.scheduler.cost.held_state import HeldState, units_outside
from resihp.scheduler.cost.prices import Lacking
from resihp.scheduler.situation import Situation

ROUNDS = 4
"""At most; two are usual."""
MOST_TOGETHER = 512
"""Ranks up to which all change places; in a larger job those of a node that lack something, or stand by."""

MOST_NODES = 32
"""More do not change places as a whole."""


def assigned(gains: npt.NDArray[Any], *, maximize: bool = False) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`scipy.optimize.linear_sum_assignment`, imported by the first call: as long as all else of a question takes that
    puts no ranks anywhere. A controller has it since its start (`transition_cost`)."""
    from scipy.optimize import linear_sum_assignment

    found: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = linear_sum_assignment(gains, maximize=maximize)
    return found


class _Place(msgspec.Struct, frozen=True):
    """A stage. Its ranks have the seats from `first` on."""

    replica: int
    stage: int
    first: int
    tp: int


def relabelled(replicas: Sequence[Replica], situation: Situation) -> tuple[Replica, ...]:
    """The same shapes at the same speeds, of ranks that need to receive fewer bytes, or as they were.

    Groups stay on one node each, but may be on another one: where links differ, the time may be another.
    """
    if not replicas:
        return ()
    if len(situation.available) <= MOST_TOGETHER:
        return _Labels(situation, replicas, situation.available).run(tuple(replicas))
    needs = Lacking(situation)
    lacking = [d for d, one in enumerate(replicas) if needs.total(Layout((one,)))]
    busy = {rank for d, one in enumerate(replicas) if d not in lacking for rank in one.ranks}
    anew = tuple(replicas[d] for d in lacking)
    own = _Labels(situation, anew, [rank for rank in situation.available if rank not in busy]).run(anew, between=False)
    named = dict(zip(lacking, own, strict=True))
    return tuple(named.get(d, one) for d, one in enumerate(replicas))


class _Labels:
    """Of the places of `replicas`, for `ranks`."""

    def __init__(self, situation: Situation, replicas: Sequence[Replica], ranks: Sequence[int]) -> None:
        self._situation, self._ranks = situation, ranks
        self._places: list[_Place] = []
        seats: list[HeldState] = []
        for d, replica in enumerate(replicas):
            for s, stage in enumerate(replica.stages):
                if stage.ranks:
                    self._places.append(_Place(d, s, len(seats), stage.tp))
                    units = units_outside(replica, s)
                    seats += (HeldState(stage.chunks, units, t, stage.tp) for t in range(stage.tp))
        self._row = {rank: i for i, rank in enumerate(ranks)}
        self._bytes = Lacking(situation).table(ranks, seats)
        self._at: defaultdict[tuple[str, float], list[int]] = defaultdict(list)
        """Ranks by node and speed."""
        for rank in ranks:
            self._at[self._kind(rank)].append(rank)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, list[int]]] = {}

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
        seated = [rank for _, ranks in self._seated(replicas) for rank in ranks]
        return int(self._bytes[[self._row[rank] for rank in seated], range(len(seated))].sum())

    def _seated(self, replicas: tuple[Replica, ...]) -> list[tuple[_Place, tuple[int, ...]]]:
        return [(place, replicas[place.replica].stages[place.stage].ranks) for place in self._places]

    def _assigned(self, seats: Sequence[int], pool: Sequence[int]) -> tuple[int, list[int]]:
        """Who of these ranks takes which seat, for the fewest bytes; and these."""
        key = tuple(seats), tuple(pool)
        if key not in self._known:
            cost = self._bytes[np.array([self._row[rank] for rank in pool]), np.array(seats)[:, None]]
            at, which = assigned(cost)
            self._known[key] = int(cost[at, which].sum()), [pool[j] for j in which.tolist()]
        return self._known[key]

    def _least(self, place: _Place, pool: Sequence[int]) -> int:
        """Bytes that a place needs at least, were it for these ranks alone."""
        if place.tp == 1:
            return int(self._bytes[[self._row[rank] for rank in pool], place.first].min())
        return self._assigned(self._seats(place), pool)[0]

    def _between_nodes(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """All groups of a node, whatever their widths, to a node that has ranks of their speeds for them."""
        seats: defaultdict[str, defaultdict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
        taken: list[int] = []
        for place, ranks in self._seated(replicas):
            for t, rank in enumerate(ranks):
                node, speed = self._kind(rank)
                seats[node][speed].append(place.first + t)
                taken.append(rank)
        nodes = sorted({node for node, _ in self._at})
        if len(nodes) > MOST_NODES:
            return replicas
        named = [[self._named(seats[a], b) for b in nodes] for a in nodes]
        cost = np.array([[math.inf if one is None else one[0] for one in row] for row in named])
        cost[np.isinf(cost)] = 1.0 + 2.0 * len(nodes) * np.max(cost[np.isfinite(cost)], initial=1.0)
        for a, b in zip(*(found.tolist() for found in assigned(cost)), strict=True):
            one = named[a][b]
            if one is None:
                return replicas
            for seat, rank in one[1]:
                taken[seat] = rank
        return self._with(replicas, taken)

    def _named(self, seats: dict[float, list[int]], node: str) -> tuple[int, list[tuple[int, int]]] | None:
        """Bytes that these seats lack if ranks of a node take them, and which; None if it has not enough of a speed."""
        total: int = 0
        found: list[tuple[int, int]] = []
        for speed, asked in seats.items():
            pool = self._at.get((node, speed), [])
            if len(pool) < len(asked):
                return None
            bytes_lacking, which = self._assigned(asked, pool)
            total += bytes_lacking
            found += zip(asked, which, strict=True)
        return total, found

    def _between_groups(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Groups of one width and speeds, each to a place of such a group."""
        alike: defaultdict[tuple[float, ...], list[tuple[_Place, tuple[int, ...]]]] = defaultdict(list)
        for place, ranks in self._seated(replicas):
            alike[tuple(sorted(self._kind(rank)[1] for rank in ranks))].append((place, ranks))
        idle = set(self._situation.available).difference(*(replica.ranks for replica in replicas))
        taken = [0] * self._bytes.shape[1]
        least: dict[tuple[tuple[int, ...], int], int] = {}
        for speeds, members in alike.items():
            groups = [ranks for _, ranks in members] + self._idle_groups(speeds, idle)
            pools = [self._like(ranks) for ranks in groups]
            for pool in dict.fromkeys(pools):
                for place, _ in members:
                    least[pool, place.first] = self._least(place, pool)
            cost = np.array([[least[pool, place.first] for pool in pools] for place, _ in members])
            at, which = assigned(cost)
            for i, j in zip(at.tolist(), which.tolist(), strict=True):
                place = members[i][0]
                taken[place.first : place.first + place.tp] = groups[j]
            idle.update(*(ranks for _, ranks in members))
            idle.difference_update(*(groups[j] for j in which.tolist()))
        return self._with(replicas, taken)

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
        taken: list[int] = []
        for place, ranks in self._seated(replicas):
            taken += ranks if place.tp == 1 else self._assigned(self._seats(place), ranks)[1]
        return self._with(replicas, taken)

    def _seats(self, place: _Place) -> range:
        return range(place.first, place.first + place.tp)

    def _like(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """All ranks of their nodes and speeds."""
        return tuple(dict.fromkeys(rank for own in ranks for rank in self._at[self._kind(own)]))

    def _within_nodes(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Ranks of one node and speed, each to a seat of one of them."""
        seats: defaultdict[tuple[str, float], list[int]] = defaultdict(list)
        taken = [0] * self._bytes.shape[1]
        for place, ranks in self._seated(replicas):
            for t, rank in enumerate(ranks):
                seats[self._kind(rank)].append(place.first + t)
        for kind, asked in seats.items():
            for seat, rank in zip(asked, self._assigned(asked, self._at[kind])[1], strict=True):
                taken[seat] = rank
        return self._with(replicas, taken)

    def _with(self, replicas: tuple[Replica, ...], taken: list[int]) -> tuple[Replica, ...]:
        """These ranks in the seats."""
        ranks = {(at.replica, at.stage): tuple(taken[at.first : at.first + at.tp]) for at in self._places}
        return tuple(
            Replica(tuple(Stage(ranks.get((d, s), ()), stage.chunks) for s, stage in enumerate(replica.stages)))
            for d, replica in enumerate(replicas)
        )
