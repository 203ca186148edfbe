"""Replicas under construction, and the changes that extend or reduce them. Pure.

A draft starts from the continuation of the replicas in effect (`resihp.scheduler.layouts.groups`). Idle groups then
become further stages of replicas that lack some, or new replicas. Stages and replicas are given up if they take more
time than the work that they save the others. Each change must be a significant improvement.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from resihp.errors import PlanError
from resihp.scheduler.cost.held_state import HeldState
from resihp.scheduler.cost.prices import Priced, Prices
from resihp.scheduler.layouts.groups import SIGNIFICANT_GAIN, Group, Pipe, idle_groups, lay, regroup, untouched
from resihp.scheduler.situation import Situation

MAX_JOINTLY_PRICED_REPLICAS = 8
"""Maximum number of replicas for which every single change is evaluated by the time of a whole iteration."""


class Draft:
    """A set of replicas under construction. `pipes` maps each replica, in order, to its layers and price; `seconds` is
    the predicted iteration time.

    Replicas in `given_up` (indices in the base) leave their ranks to the others. If the layers of replicas do not fit
    into memory, these replicas are added to `given_up`, the weakest first. `vacant_first`: whether stages without ranks
    choose ranks first. `beside`: the state that ranks hold before the change, if the new state needs room beside it,
    else None.
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
        """Priced replicas by pipe and bytes of state per parameter (which depend on the number of replicas that share
        state); None for a pipe that does not fit."""
        self.given_up, self._beside = set(given_up), beside
        while True:
            pipes = regroup(situation, self.given_up, vacant_first=vacant_first)
            unfit = self._unfit(pipes)
            if unfit is None:
                break
            self.given_up.add(unfit)
        self.pipes: dict[Pipe, Priced] = self._all(pipes) or {}
        self.seconds = self._seconds(self.pipes)

    def improve(self) -> None:
        """Apply the best single change, and repeat this as long as it is a significant improvement.

        With many replicas, a change of a single replica has little effect on the iteration time: then each replica is
        improved by itself first, and after that only changes of the number of replicas are compared.
        """
        while True:
            if len(self.pipes) > MAX_JOINTLY_PRICED_REPLICAS:
                self._improve_each()
            best, pipes = math.inf, self.pipes
            for offer in self._offers():
                seconds = self._seconds(offer)
                if seconds < best:
                    best, pipes = seconds, offer
            if math.isinf(best) or best >= self.seconds * (1 - SIGNIFICANT_GAIN):
                return
            self.seconds, self.pipes = best, pipes

    def _improve_each(self) -> None:
        """Give each replica more stages or fewer if that makes the replica itself faster; the weakest replica chooses
        first.

        For equal replicas with equal choices, the result is computed once.
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
                distinct_groups = self._unlike(groups, now)
                question = (priced.shape, priced.late, len(now.groups), frozenset(distinct_groups))
                if question in settled:
                    break
                count = len(self.pipes)
                seconds = self._prices.seconds(priced, share, count)
                offers = [*self._changed(now, distinct_groups)]
                offer_seconds = [self._prices.seconds(changed_priced, share, count) for _, changed_priced in offers]
                best = min(offer_seconds, default=math.inf)
                if best >= seconds * (1 - SIGNIFICANT_GAIN):
                    settled.add(question)
                    break
                changed, changed_priced = offers[offer_seconds.index(best)]
                idle |= set(priced.replica.ranks)
                idle -= set(changed_priced.replica.ranks)
                groups = idle_groups(self._situation, idle)
                self.pipes = {
                    (changed if old == now else old): (changed_priced if old == now else p)
                    for old, p in self.pipes.items()
                }
                now = changed
        if self.pipes != before:
            seconds = self._seconds(self.pipes)
            if seconds > self.seconds:
                self.pipes = before
            else:
                self.seconds = seconds

    def _unlike(self, groups: Iterable[Group], pipe: Pipe) -> dict[tuple[float, bool], Group]:
        """Return one idle group for each speed, separately for groups on a node of the replica and for groups
        elsewhere."""
        own_nodes = {self._situation.nodes[rank] for group in pipe.groups for rank in group.ranks}
        group_of_kind: dict[tuple[float, bool], Group] = {}
        for group in groups:
            at_home = self._situation.nodes[group.ranks[0]] in own_nodes
            group_of_kind.setdefault((self._situation.speed(group.ranks), at_home), group)
        return group_of_kind

    def _changed(
        self, pipe: Pipe, distinct_groups: Mapping[tuple[float, bool], Group]
    ) -> Iterator[tuple[Pipe, Priced]]:
        """Yield the variants of a replica with one group more or one group less; groups on the replica's own nodes are
        preferred."""
        variants: list[Pipe | None] = []
        room = self._situation.pp if untouched(self._situation, pipe) else self._situation.most_stages
        if len(pipe.groups) < room:
            at_home = {speed for speed, home in distinct_groups if home}
            variants += [
                self._longer(pipe, group)
                for (speed, home), group in distinct_groups.items()
                if home or speed not in at_home
            ]
            variants += [self._longer(shrunk, remainder) for shrunk, remainder in self._shrunk(pipe)]
        variants.append(self._without_drag(pipe))
        for variant in variants:
            priced = None if variant is None else self._priced(variant, len(self.pipes))
            if variant is not None and priced is not None:
                yield variant, priced

    @property
    def weak(self) -> int | None:
        """Index in the base of the weakest replica that continues with less than half of its initial speed; None if
        there is none.

        Always None unless ranks joined: after that the lost capacity is back, and may make better use of the replica's
        ranks.
        """
        if set(self._situation.available).issubset(self._situation.base.ranks):
            return None
        weak = [pipe for pipe in self.pipes if pipe.base is not None and self._strength(pipe)[0] < self._half]
        return min(weak, key=self._strength).base if weak else None

    @property
    def _half(self) -> float:
        """Half of a replica's initial speed, which is the minimum for a new replica.

        Fewer ranks are more useful on standby, for the groups that they came from.
        """
        return self._situation.tp * self._situation.pp / 2

    def _strength(self, pipe: Pipe) -> tuple[float, int]:
        return sum(self._situation.speed(group.ranks) for group in pipe.groups), -(pipe.base or 0)

    def _priced(self, pipe: Pipe, replicas: int) -> Priced | None:
        """Return a replica with its layers, in a layout of `replicas` replicas; None if the layers do not fit."""
        key = pipe, self._situation.state_bytes_of(replicas)
        if key not in self._laid:
            try:
                self._laid[key] = self._prices.priced(lay(self._situation, pipe, replicas, self._beside))
            except PlanError:
                self._laid[key] = None
        return self._laid[key]

    def _all(self, pipes: Collection[Pipe]) -> dict[Pipe, Priced] | None:
        """Return exactly these replicas with their layers; None if the layers of some replica do not fit."""
        priced_or_none = {pipe: self._priced(pipe, len(pipes)) for pipe in pipes}
        laid = {pipe: priced for pipe, priced in priced_or_none.items() if priced is not None}
        return laid if len(laid) == len(priced_or_none) else None

    def _seconds(self, pipes: dict[Pipe, Priced]) -> float:
        if not pipes or len(pipes) > self._situation.micro_batches:
            return math.inf
        return self._prices.iteration([*pipes.values()])[1]

    def _unfit(self, pipes: Collection[Pipe]) -> int | None:
        """Return the index in the base of the replica to give up next; None if all replicas can run and have
        micro-batches."""
        laid = {pipe: self._priced(pipe, len(pipes)) for pipe in pipes}
        unfit = [pipe for pipe, priced in laid.items() if priced is None]
        if not unfit and len(laid) > self._situation.micro_batches:
            unfit = [*laid]
        return min(unfit, key=self._strength).base if unfit else None

    def _offers(self) -> Iterator[dict[Pipe, Priced]]:
        """Yield the drafts that differ by a single change; of equal changes, only one."""
        used = {rank for priced in self.pipes.values() for rank in priced.replica.ranks}
        idle = idle_groups(self._situation, set(self._situation.available).difference(used))
        if len(self.pipes) <= MAX_JOINTLY_PRICED_REPLICAS:
            pipe_of_kind = {
                (priced.shape, priced.late, len(pipe.groups)): pipe for pipe, priced in reversed(self.pipes.items())
            }
            for pipe in reversed(pipe_of_kind.values()):
                for variant, laid in self._changed(pipe, self._unlike(idle, pipe)):
                    yield {(variant if p == pipe else p): (laid if p == pipe else q) for p, q in self.pipes.items()}
        yield from self._with_fresh(idle)
        count = len(self.pipes)
        if count > 1:
            slowest = max(self.pipes, key=lambda pipe: self._prices.seconds(self.pipes[pipe], 1, count))
            fewer = self._all([pipe for pipe in self.pipes if pipe != slowest])
            if fewer is not None:
                yield fewer

    def _with_fresh(self, idle: Sequence[Group]) -> Iterator[dict[Pipe, Priced]]:
        """Yield the draft with one more replica of idle groups.

        The only replica of a draft may have any speed, and more stages than at the start of the job if needed.
        """
        has_offer = False
        for count in range(1, len(idle) + 1):
            if count > self._situation.pp and (self.pipes or has_offer or self._situation.room_bytes is None):
                return
            fresh = Pipe(tuple(sorted(idle[:count], key=self._position)))
            if not self.pipes or self._strength(fresh)[0] >= self._half:
                more = self._all([*self.pipes, fresh])
                if more is not None:
                    has_offer = True
                    yield more

    def _longer(self, pipe: Pipe, group: Group) -> Pipe | None:
        """Return the pipe with one more stage, at the position where the slowest stage is fastest.

        Among equally good positions, the one that moves the fewest layers is chosen. The positions tried are both ends,
        and next to groups on the same node. None if the layers fit nowhere.
        """
        offers: list[tuple[float, int, int, Pipe]] = []
        home = self._situation.nodes[group.ranks[0]]
        positions = [i for i, g in enumerate(pipe.groups) if self._situation.nodes[g.ranks[0]] == home]
        for i in sorted({0, len(pipe.groups), *positions, *(i + 1 for i in positions)}):
            longer = Pipe((*pipe.groups[:i], group, *pipe.groups[i:]), pipe.base)
            priced = self._priced(longer, len(self.pipes))
            if priced is not None:
                held_layers = {g.ranks: {x for a, b in g.held for x in range(a, b + 1)} for g in longer.groups}
                moves = sum(len(set(stage.layers) - held_layers[stage.ranks]) for stage in priced.replica.stages)
                offers.append((priced.slowest, moves, i, longer))
        return min(offers, key=lambda entry: entry[:3])[3] if offers else None

    def _shrunk(self, pipe: Pipe) -> Iterator[tuple[Pipe, Group]]:
        """Yield the pipe with only fast ranks in a group that has a slow rank, and a group of the remaining fast ranks.

        By itself this change gains nothing (Eq. 4 would have found it): the remaining ranks must work elsewhere.
        """
        for s, group in enumerate(pipe.groups):
            speeds = [self._situation.speeds.get(rank, 1.0) for rank in group.ranks]
            if min(speeds) == max(speeds):
                continue
            fast = [rank for rank, p in zip(group.ranks, speeds, strict=True) if p > min(speeds)]
            k = 1 << (len(fast).bit_length() - 1)
            kept_ranks, remainder = tuple(fast[:k]), tuple(fast[k:])
            remainder = remainder[: 1 << (len(remainder).bit_length() - 1)] if remainder else ()
            if remainder and not any(
                self._situation.model.tensor_parallel_obstacle(len(part)) for part in (kept_ranks, remainder)
            ):
                smaller = Group(kept_ranks, group.held)
                yield Pipe((*pipe.groups[:s], smaller, *pipe.groups[s + 1 :]), pipe.base), Group(remainder)

    def _without_drag(self, pipe: Pipe) -> Pipe | None:
        """Return the pipe without its slowest stage, if that stage has as few layers as possible; None otherwise."""
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
