"""A set of replicas in the making, and what to add to it or leave out of it. Pure.

Starts from what `resihp.scheduler.layouts.groups` makes of the replicas that were there; then idle groups become
further stages of replicas that are short of some, or new replicas, and stages and replicas that are slower than the
work they take off the others are given up. Each change must be significantly better than none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from resihp.errors import PlanError
from resihp.scheduler.cost.held_state import HeldState
from resihp.scheduler.cost.prices import Priced, Prices
from resihp.scheduler.layouts.groups import SIGNIFICANT, Group, Pipe, idle_groups, lay, regroup, untouched
from resihp.scheduler.situation import Situation

FEW = 8
"""Replicas up to which every single change is weighed by the time of a whole iteration."""


class Draft:
    """`pipes` are the replicas, in order, with their layers and prices; `seconds` the predicted time of an iteration.

    Replicas of the base that are `given_up` leave their ranks to the others; so do those whose layers do not fit into
    memory, the weakest first. `beside`: what ranks hold before the change, where layers are to have room beside that.
    """

    def __init__(
        self,
        situation: Situation,
        prices: Prices,
        given_up: Iterable[int] = (),
        *,
        vacant_first: bool = True,
        beside: Mapping[int, HeldState] | None = None,
    ) -> None:
        self._situation, self._prices = situation, prices
        self._laid: dict[tuple[Pipe, int | None], Priced | None] = {}
        """By the pipe, and what each parameter's state takes where so many replicas share it."""
        self.given_up, self._beside = set(given_up), beside
        while True:
            found = regroup(situation, self.given_up, vacant_first=vacant_first)
            unfit = self._unfit(found)
            if unfit is None:
                break
            self.given_up.add(unfit)
        self.pipes: dict[Pipe, Priced] = self._all(found) or {}
        self.seconds = self._seconds(self.pipes)

    def improve(self) -> None:
        """Make the best of all single changes, as long as it is significantly better.

        Where there are many replicas, none of them matters much: then each is improved by itself, and after that
        changes to their number are compared.
        """
        while True:
            if len(self.pipes) > FEW:
                self._improve_each()
            best, pipes = math.inf, self.pipes
            for offer in self._offers():
                seconds = self._seconds(offer)
                if seconds < best:
                    best, pipes = seconds, offer
            if math.isinf(best) or best >= self.seconds * (1 - SIGNIFICANT):
                return
            self.seconds, self.pipes = best, pipes

    def _improve_each(self) -> None:
        """Give replicas more stages, or fewer, where that makes them faster by themselves; the weakest chooses first.

        Replicas that are alike, with the same to choose from, come to the same answer: only one of them looks for it.
        """
        share = max(1, round(self._situation.micro_batches / max(1, len(self.pipes))))
        used = {rank for priced in self.pipes.values() for rank in priced.replica.ranks}
        idle = set(self._situation.available).difference(used)
        groups = idle_groups(self._situation, idle)
        settled: set[object] = set()
        before = dict(self.pipes)
        for pipe in sorted(self.pipes, key=self._strength):
            now = pipe
            while True:
                priced = self.pipes[now]
                unlike = self._unlike(groups, now)
                question = (priced.shape, priced.late, len(now.groups), frozenset(unlike))
                if question in settled:
                    break
                count = len(self.pipes)
                seconds = self._prices.seconds(priced, share, count)
                offers = [*self._changed(now, unlike)]
                played = [self._prices.seconds(found, share, count) for _, found in offers]
                best = min(played, default=math.inf)
                if best >= seconds * (1 - SIGNIFICANT):
                    settled.add(question)
                    break
                changed, found = offers[played.index(best)]
                idle |= set(priced.replica.ranks)
                idle -= set(found.replica.ranks)
                groups = idle_groups(self._situation, idle)
                self.pipes = {
                    (changed if old == now else old): (found if old == now else p) for old, p in self.pipes.items()
                }
                now = changed
        if self.pipes != before:
            seconds = self._seconds(self.pipes)
            if seconds > self.seconds:
                self.pipes = before
            else:
                self.seconds = seconds

    def _unlike(self, groups: Iterable[Group], pipe: Pipe) -> dict[tuple[float, bool], Group]:
        """Of idle groups one of each speed, at home with a replica's other groups or elsewhere."""
        mine = {self._situation.nodes[rank] for group in pipe.groups for rank in group.ranks}
        found: dict[tuple[float, bool], Group] = {}
        for group in groups:
            at_home = self._situation.nodes[group.ranks[0]] in mine
            found.setdefault((self._situation.speed(group.ranks), at_home), group)
        return found

    def _changed(self, pipe: Pipe, unlike: Mapping[tuple[float, bool], Group]) -> Iterator[tuple[Pipe, Priced]]:
        """What else a replica could be, with one group more or less; at home before elsewhere."""
        found: list[Pipe | None] = []
        room = self._situation.pp if untouched(self._situation, pipe) else self._situation.most_stages
        if len(pipe.groups) < room:
            at_home = {speed for speed, home in unlike if home}
            found += [
                self._longer(pipe, group) for (speed, home), group in unlike.items() if home or speed not in at_home
            ]
            found += [self._longer(shrunk, left) for shrunk, left in self._shrunk(pipe)]
        found.append(self._without_drag(pipe))
        for other in found:
            priced = None if other is None else self._priced(other, len(self.pipes))
            if other is not None and priced is not None:
                yield other, priced

    @property
    def weak(self) -> int | None:
        """The weakest replica of the base that goes on with less than half of what one was started with, or None.

        Only where ranks have come: they may make better use of its ranks than itself, for what it had lost is back.
        """
        if set(self._situation.available).issubset(self._situation.base.ranks):
            return None
        weak = [pipe for pipe in self.pipes if pipe.base is not None and self._strength(pipe)[0] < self._half]
        return min(weak, key=self._strength).base if weak else None

    @property
    def _half(self) -> float:
        """Half of what a replica was started with. New ones must have as much: less serves better as standby, for the
        groups that it came from.
        """
        return self._situation.tp * self._situation.pp / 2

    def _strength(self, pipe: Pipe) -> tuple[float, int]:
        return sum(self._situation.speed(group.ranks) for group in pipe.groups), -(pipe.base or 0)

    def _priced(self, pipe: Pipe, replicas: int) -> Priced | None:
        """A replica, of so many in all, with its layers; None if these do not fit."""
        key = pipe, self._situation.state_bytes_of(replicas)
        if key not in self._laid:
            try:
                self._laid[key] = self._prices.priced(lay(self._situation, pipe, replicas, self._beside))
            except PlanError:
                self._laid[key] = None
        return self._laid[key]

    def _all(self, pipes: Collection[Pipe]) -> dict[Pipe, Priced] | None:
        """These replicas and no others, with their layers; None if some do not fit."""
        found = {pipe: self._priced(pipe, len(pipes)) for pipe in pipes}
        laid = {pipe: priced for pipe, priced in found.items() if priced is not None}
        return laid if len(laid) == len(found) else None

    def _seconds(self, pipes: dict[Pipe, Priced]) -> float:
        if not pipes or len(pipes) > self._situation.micro_batches:
            return math.inf
        return self._prices.iteration([*pipes.values()])[1]

    def _unfit(self, pipes: Collection[Pipe]) -> int | None:
        """The replica of the base to give up next; None if all can run and there is work for each."""
        laid = {pipe: self._priced(pipe, len(pipes)) for pipe in pipes}
        unfit = [pipe for pipe, priced in laid.items() if priced is None]
        if not unfit and len(laid) > self._situation.micro_batches:
            unfit = [*laid]
        return min(unfit, key=self._strength).base if unfit else None

    def _offers(self) -> Iterator[dict[Pipe, Priced]]:
        """Every single change, but for those that are like another one before it."""
        used = {rank for priced in self.pipes.values() for rank in priced.replica.ranks}
        idle = idle_groups(self._situation, set(self._situation.available).difference(used))
        if len(self.pipes) <= FEW:
            alike = {
                (priced.shape, priced.late, len(pipe.groups)): pipe for pipe, priced in reversed(self.pipes.items())
            }
            for pipe in reversed(alike.values()):
                for other, laid in self._changed(pipe, self._unlike(idle, pipe)):
                    yield {(other if p == pipe else p): (laid if p == pipe else q) for p, q in self.pipes.items()}
        yield from self._with_fresh(idle)
        count = len(self.pipes)
        if count > 1:
            slowest = max(self.pipes, key=lambda pipe: self._prices.seconds(self.pipes[pipe], 1, count))
            fewer = self._all([pipe for pipe in self.pipes if pipe != slowest])
            if fewer is not None:
                yield fewer

    def _with_fresh(self, idle: Sequence[Group]) -> Iterator[dict[Pipe, Priced]]:
        """With one more replica. The only one may be as weak as it likes, and longer than any was if it has to be."""
        found = False
        for count in range(1, len(idle) + 1):
            if count > self._situation.pp and (self.pipes or found or self._situation.room_bytes is None):
                return
            fresh = Pipe(tuple(sorted(idle[:count], key=self._position)))
            if not self.pipes or self._strength(fresh)[0] >= self._half:
                more = self._all([*self.pipes, fresh])
                if more is not None:
                    found = True
                    yield more

    def _longer(self, pipe: Pipe, group: Group) -> Pipe | None:
        """With one more stage, where the slowest stage becomes fastest, then where the fewest layers move.

        Looked at are both ends, and the places beside groups of the same node.
        """
        found: list[tuple[float, int, int, Pipe]] = []
        home = self._situation.nodes[group.ranks[0]]
        beside = [i for i, g in enumerate(pipe.groups) if self._situation.nodes[g.ranks[0]] == home]
        for i in sorted({0, len(pipe.groups), *beside, *(i + 1 for i in beside)}):
            longer = Pipe((*pipe.groups[:i], group, *pipe.groups[i:]), pipe.base)
            priced = self._priced(longer, len(self.pipes))
            if priced is not None:
                held = {g.ranks: {x for a, b in g.held for x in range(a, b + 1)} for g in longer.groups}
                moves = sum(len(set(stage.layers) - held[stage.ranks]) for stage in priced.replica.stages)
                found.append((priced.slowest, moves, i, longer))
        return min(found, key=lambda entry: entry[:3])[3] if found else None

    def _shrunk(self, pipe: Pipe) -> Iterator[tuple[Pipe, Group]]:
        """With the fast ranks of a group alone, where a slow one holds it up, and what its other fast ranks could be.

        That alone gains nothing (Eq. 4 would have done it): what is left over has to work elsewhere.
        """
        for s, group in enumerate(pipe.groups):
            speeds = [self._situation.speeds.get(rank, 1.0) for rank in group.ranks]
            if min(speeds) == max(speeds):
                continue
            fast = [rank for rank, p in zip(group.ranks, speeds, strict=True) if p > min(speeds)]
            k = 1 << (len(fast).bit_length() - 1)
            kept, left = tuple(fast[:k]), tuple(fast[k:])
            left = left[: 1 << (len(left).bit_length() - 1)] if left else ()
            if left and not any(self._situation.model.tensor_parallel_obstacle(len(part)) for part in (kept, left)):
                smaller = Group(kept, group.held)
                yield Pipe((*pipe.groups[:s], smaller, *pipe.groups[s + 1 :]), pipe.base), Group(left)

    def _without_drag(self, pipe: Pipe) -> Pipe | None:
        """Without the stage that holds all others up although it has as few layers as a stage can have."""
        priced = self.pipes[pipe]
        if len(priced.replica.stages) < max(2, len(pipe.groups)) or untouched(self._situation, pipe):
            return None
        times = [sum(chunk.total for chunk in chunks) for chunks in priced.shape]
        s = times.index(max(times))
        if len(priced.replica.stages[s].layers) > self._situation.chunks:
            return None
        return Pipe((*pipe.groups[:s], *pipe.groups[s + 1 :]), pipe.base)

    def _position(self, group: Group) -> tuple[str, tuple[int, ...]]:
        return self._situation.nodes[group.ranks[0]], group.ranks
