"""What another layout there is beside one: groups change places, replicas and sizes. Pure; chance is the caller's.

A layout is here the groups of each replica in pipeline order; who holds which layers is not decided here. Called by
`resihp.scheduler.search.annealing`.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence

from resihp.scheduler.layouts import tp_groups
from resihp.scheduler.search.pipelines import Pipe, Ranks
from resihp.scheduler.situation import Situation

Pipes = list[Pipe]
Changed = dict[int, Pipe]
"""By number of the replica: its groups, none for one that is given up; a further number is a new replica."""

ODD = 0.7
"""How often a replica that is not as most are is chosen, where most are alike."""


class Moves:
    """`odd`: replicas that are worth more attention; the caller's to set."""

    def __init__(self, situation: Situation, chance: random.Random) -> None:
        self._situation, self._random = situation, chance
        self._speeds, self._nodes = situation.speeds, situation.nodes
        self._degrees = tp_groups.degrees(
            situation.tp, 1, started_with=situation.tp, obstacle=situation.model.tensor_parallel_obstacle
        )
        self.odd: Sequence[int] = ()
        weighted: tuple[tuple[float, Callable[[Pipes, list[int]], Changed | None]], ...] = (
            (3.0, self._turned),
            (3.0, self._exchanged),
            (2.0, self._shorter),
            (3.0, self._longer),
            (1.5, self._passed_on),
            (2.5, self._regrouped),
            (1.0, self._joined),
            (0.7, self._alike),
            (0.5, self._given_up),
            (0.7, self._split),
            (0.5, self._fresh),
            (0.3, self._cut_in_two),
            (0.3, self._strung),
        )
        self._moves = [move for _, move in weighted]
        self._weights = [*itertools.accumulate(weight for weight, _ in weighted)]

    def another(self, pipes: Pipes, idle: list[int]) -> tuple[Changed, list[int]] | None:
        """Some change, and who is idle then."""
        move = self._moves[bisect(self._weights, self._random.random() * self._weights[-1])]
        changed = move(pipes, idle)
        if changed is None:
            return None
        before = {rank for d in changed if d < len(pipes) for ranks in pipes[d] for rank in ranks}
        after = {rank for groups in changed.values() for ranks in groups for rank in ranks}
        if before == after:
            return changed, idle
        return changed, [*(rank for rank in idle if rank not in after), *sorted(before.difference(after))]

    def largest_groups(self) -> list[Ranks]:
        """Of all ranks, each node's in groups of their own, the strongest first."""
        at: dict[str, list[int]] = {}
        for rank in self._fastest(self._situation.available):
            at.setdefault(self._nodes[rank], []).append(rank)
        found: list[Ranks] = []
        for ranks in at.values():
            while ranks:
                size = max(k for k in self._degrees if k <= len(ranks))
                found.append(tuple(sorted(ranks[:size])))
                ranks = ranks[size:]
        return sorted(found, key=lambda ranks: (-self._situation.speed(ranks), ranks))

    def _below(self, n: int) -> int:
        return int(self._random.random() * n)

    def _replica(self, pipes: Pipes) -> int:
        if self.odd and self._random.random() < ODD:
            d = self.odd[self._below(len(self.odd))]
            if d < len(pipes):
                return d
        return self._below(len(pipes))

    def _place(self, pipes: Pipes) -> tuple[int, int]:
        d = self._replica(pipes)
        return d, self._below(len(pipes[d]))

    # --- places and replicas --------------------------------------------------------------------------------------

    def _turned(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Two groups of a replica in each other's places, or one in another place."""
        d, a = self._place(pipes)
        groups = [*pipes[d]]
        b = self._below(len(groups))
        if a == b:
            return None
        if self._random.random() < 0.5:
            groups[a], groups[b] = groups[b], groups[a]
        else:
            groups.insert(b, groups.pop(a))
        return {d: tuple(groups)}

    def _exchanged(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Groups of two replicas."""
        (d, a), (e, b) = self._place(pipes), self._place(pipes)
        if d == e:
            return None
        mine, theirs = [*pipes[d]], [*pipes[e]]
        mine[a], theirs[b] = theirs[b], mine[a]
        return {d: tuple(mine), e: tuple(theirs)}

    def _passed_on(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """A group goes to another replica."""
        (d, a), e = self._place(pipes), self._replica(pipes)
        if d == e:
            return None
        mine, theirs = pipes[d], pipes[e]
        at = self._below(len(theirs) + 1)
        return {d: (*mine[:a], *mine[a + 1 :]), e: (*theirs[:at], mine[a], *theirs[at:])}

    def _alike(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """A replica's groups in the order of those of another one, as far as they are alike."""
        d, e = self._replica(pipes), self._below(len(pipes))
        if d == e:
            return None
        left = [*pipes[d]]
        order: list[Ranks | None] = []
        for model in pipes[e]:
            kind = self._kind(model)
            same = next((ranks for ranks in left if self._kind(ranks) == kind), None)
            if same is not None:
                left.remove(same)
            order.append(same)
        found = [ranks if ranks is not None else left.pop(0) if left else None for ranks in order]
        groups = (*(ranks for ranks in found if ranks is not None), *left)
        return None if groups == pipes[d] else {d: groups}

    def _kind(self, ranks: Ranks) -> tuple[int, float]:
        return len(ranks), min(self._speeds.get(rank, 1.0) for rank in ranks)

    # --- fewer and more -------------------------------------------------------------------------------------------

    def _shorter(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Without one of its groups."""
        d, a = self._place(pipes)
        groups = pipes[d]
        return {d: (*groups[:a], *groups[a + 1 :])} if len(groups) > 1 else None

    def _longer(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """With a group of idle ranks."""
        group = self._idle_group(idle)
        if group is None:
            return None
        d = self._replica(pipes)
        at = self._below(len(pipes[d]) + 1)
        return {d: (*pipes[d][:at], group, *pipes[d][at:])}

    def _fresh(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """A replica of idle ranks."""
        group = self._idle_group(idle)
        return None if group is None else {len(pipes): (group,)}

    def _given_up(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Without a replica."""
        return {self._replica(pipes): ()} if len(pipes) > 1 else None

    def _cut_in_two(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Two replicas of one's groups."""
        d = self._replica(pipes)
        first = [self._random.random() < 0.5 for _ in pipes[d]]
        parts = [tuple(itertools.compress(pipes[d], part)) for part in (first, [not one for one in first])]
        return {d: parts[0], len(pipes): parts[1]} if all(parts) else None

    def _strung(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """One replica of two's groups."""
        d, e = self._replica(pipes), self._below(len(pipes))
        return {d: (*pipes[d], *pipes[e]), e: ()} if d != e else None

    # --- sizes ----------------------------------------------------------------------------------------------------

    def _split(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """A group becomes two stages: its faster ranks, and the others."""
        d, a = self._place(pipes)
        groups = pipes[d]
        half = len(groups[a]) // 2
        if half not in self._degrees or len({self._nodes[rank] for rank in groups[a]}) > 1:
            return None
        ranks = self._fastest(groups[a])
        parts = [tuple(sorted(part)) for part in (ranks[:half], ranks[half : 2 * half])]
        return {d: (*groups[:a], *parts, *groups[a + 1 :])}

    def _joined(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Two groups of a node become one."""
        d, a = self._place(pipes)
        places = self._at_home(pipes, d, a)
        if len(places) < 2:
            return None
        e, b = places[self._below(len(places))]
        if (d, a) == (e, b):
            return None
        ranks = tuple(sorted((*pipes[d][a], *pipes[e][b])))
        if len(ranks) not in self._degrees:
            return None
        changed = {i: [*pipes[i]] for i in {d, e}}
        changed[d][a], changed[e][b] = ranks, ()
        return {i: tuple(filter(None, groups)) for i, groups in changed.items()}

    def _regrouped(self, pipes: Pipes, idle: list[int]) -> Changed | None:
        """Ranks of a node change between a group, those that are idle, and another group."""
        d, a = self._place(pipes)
        places = self._at_home(pipes, d, a)
        if not places:
            return None
        node = self._nodes[pipes[d][a][0]]
        e, b = places[self._below(len(places))]
        other = None if (e, b) == (d, a) else (e, b)
        pool = [*pipes[d][a], *(rank for rank in idle if self._nodes[rank] == node)]
        if other is not None:
            pool += pipes[e][b]
        pool = self._fastest(pool)
        sizes = [k for k in self._degrees if k <= len(pool)]
        size = self._random.choice(sizes)
        mine, left = tuple(sorted(pool[:size])), pool[size:]
        changed = {i: [*pipes[i]] for i in {d, e}}
        if other is None:
            changed[d][a] = mine
        else:
            sizes = [k for k in self._degrees if k <= len(left)][-2:]
            theirs = tuple(sorted(left[: self._random.choice(sizes)])) if sizes else ()
            if theirs and self._random.random() < 0.5:
                mine, theirs = theirs, mine
            changed[d][a] = mine
            changed[e][b] = theirs
        found = {i: tuple(ranks for ranks in groups if ranks) for i, groups in changed.items()}
        return None if all(groups == pipes[i] for i, groups in found.items()) else found

    def _at_home(self, pipes: Pipes, d: int, a: int) -> list[tuple[int, int]]:
        """Groups that are on the node of one, and on no other; none if it is on several itself."""
        nodes = self._nodes
        node = nodes[pipes[d][a][0]]
        found = [
            (e, b)
            for e, groups in enumerate(pipes)
            for b, ranks in enumerate(groups)
            if nodes[ranks[0]] == node and (len(ranks) == 1 or all(nodes[rank] == node for rank in ranks))
        ]
        return found if (d, a) in found else []

    def _idle_group(self, idle: list[int]) -> Ranks | None:
        if not idle:
            return None
        node = self._nodes[idle[self._below(len(idle))]]
        mine = self._fastest(rank for rank in idle if self._nodes[rank] == node)
        sizes = [k for k in self._degrees if k <= len(mine)][-2:]
        return tuple(sorted(mine[: self._random.choice(sizes)])) if sizes else None

    def _fastest(self, ranks: Iterable[int]) -> list[int]:
        return sorted(ranks, key=lambda rank: (-self._speeds.get(rank, 1.0), rank))
