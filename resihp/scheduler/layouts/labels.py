"""Assigns ranks to the places of a layout, so that they keep most of the state that their places need. Pure.

A search finds the shape of a layout; the choice among equal ranks for each place remains free. The module exchanges
ranks in three steps: whole nodes, whatever their groups; groups of equal size and equal speeds, over the whole job;
equally fast ranks within a node, including standby ranks. Each step is an assignment that minimises the bytes to
receive (`scipy.optimize.linear_sum_assignment`); the steps are repeated until they gain nothing. Called by
`resihp.scheduler.anytime`, and by the planner if memory would otherwise not suffice for the transition.
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
from resihp.scheduler.cost.lacking_state import Lacking
from resihp.scheduler.situation import Situation

MAX_ROUNDS = 4
"""Maximum number of rounds; two are usual."""
MAX_RANKS_TOGETHER = 512
"""Maximum number of ranks of a job for which all ranks may be exchanged. In a larger job, only standby ranks and the
ranks of replicas that lack state are exchanged."""

MAX_NODES = 32
"""Maximum number of nodes that are exchanged as a whole."""


def assigned(gains: npt.NDArray[Any], *, maximize: bool = False) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Call `scipy.optimize.linear_sum_assignment`, which the first call imports.

    The import takes as long as the rest of a decision that assigns no ranks. A supervisor imports scipy beside the job
    (`resihp.wrapper.supervisor.thinking.loading`).
    """
    from scipy.optimize import linear_sum_assignment

    indices: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = linear_sum_assignment(gains, maximize=maximize)
    return indices


class _Place(msgspec.Struct, frozen=True):
    """A stage and its seats: its ranks have the `tp` seats from number `first` on."""

    replica: int
    stage: int
    first: int
    tp: int


def relabelled(replicas: Sequence[Replica], situation: Situation) -> tuple[Replica, ...]:
    """Return the replicas with equal shapes and speeds, on ranks that receive fewer bytes; unchanged if there are no
    such ranks.

    Each group stays within one node, but may change nodes: if links differ, the iteration time may therefore change.
    """
    if not replicas:
        return ()
    if len(situation.available) <= MAX_RANKS_TOGETHER:
        return _Labels(situation, replicas, situation.available).run(tuple(replicas))
    needs = Lacking(situation)
    lacking = [d for d, replica in enumerate(replicas) if needs.total(Layout((replica,)))]
    busy = {rank for d, replica in enumerate(replicas) if d not in lacking for rank in replica.ranks}
    lacking_replicas = tuple(replicas[d] for d in lacking)
    relabelled_replicas = _Labels(
        situation, lacking_replicas, [rank for rank in situation.available if rank not in busy]
    ).run(lacking_replicas, between=False)
    replica_at = dict(zip(lacking, relabelled_replicas, strict=True))
    return tuple(replica_at.get(d, replica) for d, replica in enumerate(replicas))


class _Labels:
    """Assignment of `ranks` to the places of `replicas`."""

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
        """Return the replicas with ranks exchanged. `between`: whether to exchange nodes and groups as well."""
        bytes_now = self.bytes_of(replicas)
        for _ in range(MAX_ROUNDS):
            starts = (replicas, self._between_nodes(replicas)) if between else (replicas,)
            offers = [
                self._in_place(self._between_groups(start) if between else start) for start in dict.fromkeys(starts)
            ]
            best = min(offers, key=self.bytes_of)
            bytes_then = self.bytes_of(best)
            if bytes_then >= bytes_now:
                break
            replicas, bytes_now = best, bytes_then
        return replicas

    def bytes_of(self, replicas: tuple[Replica, ...]) -> int:
        seated = [rank for _, ranks in self._seated(replicas) for rank in ranks]
        return int(self._bytes[[self._row[rank] for rank in seated], range(len(seated))].sum())

    def _seated(self, replicas: tuple[Replica, ...]) -> list[tuple[_Place, tuple[int, ...]]]:
        return [(place, replicas[place.replica].stages[place.stage].ranks) for place in self._places]

    def _assigned(self, seats: Sequence[int], pool: Sequence[int]) -> tuple[int, list[int]]:
        """Return the fewest bytes with which ranks of `pool` can take the seats, and the rank of each seat."""
        key = tuple(seats), tuple(pool)
        if key not in self._known:
            cost = self._bytes[np.array([self._row[rank] for rank in pool]), np.array(seats)[:, None]]
            seat_indices, pool_indices = assigned(cost)
            self._known[key] = int(cost[seat_indices, pool_indices].sum()), [pool[j] for j in pool_indices.tolist()]
        return self._known[key]

    def _least(self, place: _Place, pool: Sequence[int]) -> int:
        """Return the fewest bytes that a place needs if it chooses first among these ranks."""
        if place.tp == 1:
            return int(self._bytes[[self._row[rank] for rank in pool], place.first].min())
        return self._assigned(self._seats(place), pool)[0]

    def _between_nodes(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Move all groups of each node, whatever their sizes, to a node that has ranks of their speeds."""
        seats: defaultdict[str, defaultdict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
        rank_of_seat: list[int] = []
        for place, ranks in self._seated(replicas):
            for t, rank in enumerate(ranks):
                node, speed = self._kind(rank)
                seats[node][speed].append(place.first + t)
                rank_of_seat.append(rank)
        nodes = sorted({node for node, _ in self._at})
        if len(nodes) > MAX_NODES:
            return replicas
        assignments = [[self._named(seats[a], b) for b in nodes] for a in nodes]
        cost = np.array(
            [[math.inf if assignment is None else assignment[0] for assignment in row] for row in assignments]
        )
        cost[np.isinf(cost)] = 1.0 + 2.0 * len(nodes) * np.max(cost[np.isfinite(cost)], initial=1.0)
        for a, b in zip(*(indices.tolist() for indices in assigned(cost)), strict=True):
            assignment = assignments[a][b]
            if assignment is None:
                return replicas
            for seat, rank in assignment[1]:
                rank_of_seat[seat] = rank
        return self._with(replicas, rank_of_seat)

    def _named(self, seats: dict[float, list[int]], node: str) -> tuple[int, list[tuple[int, int]]] | None:
        """Return the bytes that ranks of `node` would receive in these seats, and (seat, rank) for each seat.

        `seats`: the seats for ranks of each speed. None if the node has too few ranks of some speed.
        """
        total: int = 0
        seat_ranks: list[tuple[int, int]] = []
        for speed, speed_seats in seats.items():
            pool = self._at.get((node, speed), [])
            if len(pool) < len(speed_seats):
                return None
            bytes_lacking, chosen_ranks = self._assigned(speed_seats, pool)
            total += bytes_lacking
            seat_ranks += zip(speed_seats, chosen_ranks, strict=True)
        return total, seat_ranks

    def _between_groups(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Assign groups of equal size and speeds, including idle ones, to the places of such groups."""
        members_of_kind: defaultdict[tuple[float, ...], list[tuple[_Place, tuple[int, ...]]]] = defaultdict(list)
        for place, ranks in self._seated(replicas):
            members_of_kind[tuple(sorted(self._kind(rank)[1] for rank in ranks))].append((place, ranks))
        idle = set(self._situation.available).difference(*(replica.ranks for replica in replicas))
        rank_of_seat = [0] * self._bytes.shape[1]
        least: dict[tuple[tuple[int, ...], int], int] = {}
        for speeds, members in members_of_kind.items():
            groups = [ranks for _, ranks in members] + self._idle_groups(speeds, idle)
            pools = [self._like(ranks) for ranks in groups]
            for pool in dict.fromkeys(pools):
                for place, _ in members:
                    least[pool, place.first] = self._least(place, pool)
            cost = np.array([[least[pool, place.first] for pool in pools] for place, _ in members])
            place_indices, group_indices = assigned(cost)
            for i, j in zip(place_indices.tolist(), group_indices.tolist(), strict=True):
                place = members[i][0]
                rank_of_seat[place.first : place.first + place.tp] = groups[j]
            idle.update(*(ranks for _, ranks in members))
            idle.difference_update(*(groups[j] for j in group_indices.tolist()))
        return self._with(replicas, rank_of_seat)

    def _idle_groups(self, speeds: tuple[float, ...], idle: set[int]) -> list[tuple[int, ...]]:
        """Return groups of standby ranks with exactly these speeds, as many as each node can form."""
        groups = []
        for node in sorted({self._situation.nodes[rank] for rank in idle}):
            ranks_of_speed = {
                speed: [rank for rank in self._at.get((node, speed), ()) if rank in idle]
                for speed in dict.fromkeys(speeds)
            }
            while all(len(ranks_of_speed[speed]) >= speeds.count(speed) for speed in ranks_of_speed):
                groups.append(tuple(ranks_of_speed[speed].pop(0) for speed in speeds))
        return groups

    def _in_place(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        return self._within_groups(self._within_nodes(self._within_groups(replicas)))

    def _within_groups(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Choose the order of the ranks within each group."""
        rank_of_seat: list[int] = []
        for place, ranks in self._seated(replicas):
            rank_of_seat += ranks if place.tp == 1 else self._assigned(self._seats(place), ranks)[1]
        return self._with(replicas, rank_of_seat)

    def _seats(self, place: _Place) -> range:
        return range(place.first, place.first + place.tp)

    def _like(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return all ranks on the same nodes and with the same speeds as these ranks."""
        return tuple(dict.fromkeys(rank for own in ranks for rank in self._at[self._kind(own)]))

    def _within_nodes(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        """Assign all ranks of one node and one speed to the seats that such ranks have now."""
        seats: defaultdict[tuple[str, float], list[int]] = defaultdict(list)
        rank_of_seat = [0] * self._bytes.shape[1]
        for place, ranks in self._seated(replicas):
            for t, rank in enumerate(ranks):
                seats[self._kind(rank)].append(place.first + t)
        for kind, kind_seats in seats.items():
            for seat, rank in zip(kind_seats, self._assigned(kind_seats, self._at[kind])[1], strict=True):
                rank_of_seat[seat] = rank
        return self._with(replicas, rank_of_seat)

    def _with(self, replicas: tuple[Replica, ...], rank_of_seat: list[int]) -> tuple[Replica, ...]:
        """Return the replicas with the given rank in each seat."""
        ranks = {
            (place.replica, place.stage): tuple(rank_of_seat[place.first : place.first + place.tp])
            for place in self._places
        }
        return tuple(
            Replica(tuple(Stage(ranks.get((d, s), ()), stage.chunks) for s, stage in enumerate(replica.stages)))
            for d, replica in enumerate(replicas)
        )
