"""A layout made better step by step, for as long as there is time: simulated annealing over whole layouts. Pure.

The instant planner changes one thing at a time and stops where no single change gains. Here groups change their
places, replicas and sizes, also where nothing is gained at once; layers follow, to what the timeline says is best for
them. Trials are counted, not timed: the same seed and number of trials give the same layout. Kirkpatrick et al.,
1983; cooled and heated again in cycles, of which every other one begins elsewhere: in a layout of all ranks dealt out
anew, over fewer or more replicas, or in the best one shaken. Where memory is tight, no way of single changes leads
there. Two cycles are of one length, the next two twice as long. What it takes to get there is not weighed.

Called by `resihp.scheduler.anytime`. One chunk a stage, whose ranks are on one node.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import msgspec

from resihp.parallelism.layout import Replica
from resihp.parallelism.plan import Order
from resihp.scheduler.layouts.shares import contiguous
from resihp.scheduler.search.moves import Changed, Moves
from resihp.scheduler.search.pipelines import WORST, Laid, Pipelines, Score
from resihp.scheduler.situation import Situation

CYCLE = 150
"""Trials of the first cycle."""
HOT = 0.005
"""Share of the best time by which a change may be worse at the beginning of a cycle, about. Of 58 random jobs, in a
second: 0.4 % off the best of five searches on average, and 0.8 % with 0.02."""
HOTTER = 0.0075
"""The same where a cycle begins elsewhere."""
SHAKEN = 15
"""Changes that are made to the best layout, whatever they cost, before a cycle that begins elsewhere."""
FEWER_REPLICAS = 3
"""Than there are now, and one more: so many are all ranks dealt out over."""
MORE_STAGES = 4
"""Of a replica than the job was started with."""
SMOOTH = 0.5
"""Weight of the time of micro-batches that could be shared out in parts."""
TWICE = 0.25
"""How often two changes are tried as one."""
BY_HAND = 0.1
"""How often a layer goes from one stage to another."""
FORMER = 12
"""Layouts that were the best before and are remembered, for where there is no way to the best one."""
FEW_ALIKE = 4
"""Replicas up to which it does not matter which are alike."""


class Layouted(msgspec.Struct, frozen=True):
    """A layout, what it takes, and who computes what in which order."""

    replicas: tuple[Replica, ...]
    seconds: float
    """Infinite where there is no memory for it; then the rest is empty."""
    shares: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[Order, ...] | None, ...]
    """Of each replica: its own, None for those of the schedule."""


class Search:
    """`starts`: layouts to begin with; ranks dealt out anew if there are none. `beside`: only layouts for which ranks
    have room beside what they hold. `seconds`: of the best so far."""

    def __init__(
        self, situation: Situation, starts: Sequence[Sequence[Replica]], seed: int = 0, *, beside: bool = False
    ) -> None:
        self._situation, self._random = situation, random.Random(seed)
        longest = max((len(replica.stages) for start in starts for replica in start), default=0)
        self._pipelines = Pipelines(situation, max(situation.pp + MORE_STAGES, longest), beside=beside)
        self._moves = Moves(situation, self._random)
        self._zero_1 = situation.zero_1
        self._former: deque[tuple[list[Laid], Score]] = deque(maxlen=FORMER)
        self._trial, self._cycle, self._cycles = 0, CYCLE, 0
        self._hot = HOT
        around = situation.tp * situation.pp
        self._best: list[Laid] = []
        laid = [self._begun(start) for start in starts] or self._dealt(max(1, len(situation.available) // around))
        scores = [self._pipelines.score(start) for start in laid]
        first = min(range(len(laid)), key=lambda i: (_rank(scores[i]), i), default=None)
        self._best, self._best_score = ([], WORST) if first is None else (laid[first], scores[first])
        self._elsewhere: list[list[Laid]] | None = None
        """Where cycles are still to begin; None before the first of them."""
        self._go_to(self._best, self._best_score)

    @property
    def seconds(self) -> float:
        """Predicted for an iteration."""
        return self._best_score.seconds

    def best(self) -> Layouted:
        """The best so far."""
        return self._told(self._best, self._best_score)

    def former(self) -> Iterator[Layouted]:
        """Those that were the best before, the last one first."""
        for pipes, score in reversed(self._former):
            yield self._told(pipes, score)

    def priced(self, replicas: Sequence[Replica]) -> Layouted:
        """Any layout, at what it would be here."""
        pipes = self._begun(replicas)
        return self._told(pipes, self._pipelines.score(pipes))

    def seconds_of(self, replicas: Sequence[Replica]) -> float:
        """About what any layout would take here."""
        return self._pipelines.score(self._begun(replicas)).seconds

    def _told(self, pipes: list[Laid], score: Score) -> Layouted:
        shares = contiguous(score.counts)
        replicas = tuple(pipe.replica for pipe in pipes)
        if not shares:
            return Layouted(replicas, math.inf, (), ())
        orders, ends = zip(*map(self._pipelines.orders, pipes, shares), strict=True)
        return Layouted(replicas, self._pipelines.seconds(pipes, ends), shares, orders)

    def run(self, trials: int) -> bool:
        """Try so many changes; whether something better was found."""
        before = _rank(self._best_score)
        for _ in range(trials):
            if self._pipelines.full:
                self._forget()
            self._trial += 1
            if self._trial >= self._cycle:
                self._begin_cycle()
            self._try()
        return _rank(self._best_score) < before

    def _begin_cycle(self) -> None:
        self._cycles, self._trial = self._cycles + 1, 0
        if self._cycles % 2 == 0:
            self._cycle, self._hot = 2 * self._cycle, HOT
            self._go_to(self._best, self._best_score)
            return
        self._hot = HOTTER
        if self._elsewhere is None:
            self._elsewhere = self._dealt(len(self._best))
        if self._elsewhere:
            pipes = self._elsewhere.pop(0)
            self._go_to(pipes, self._pipelines.score(pipes))
            return
        self._go_to(self._best, self._best_score)
        for _ in range(SHAKEN):
            found = self._neighbour()
            if found is not None and math.isfinite((score := self._pipelines.score(found[0])).seconds):
                self._go_to(found[0], score, found[1])

    def _dealt(self, replicas: int) -> list[list[Laid]]:
        """All ranks over about so many replicas, each of groups as large as they may be, as evenly as can be; those for
        which there is memory, the fastest first."""
        groups, most = self._moves.largest_groups(), self._pipelines.most_stages
        found: list[tuple[tuple[float, float], int, list[Laid]]] = []
        for count in range(max(1, replicas - FEWER_REPLICAS), replicas + 2):
            usual = self._situation.micro_batches // count
            dealt: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
            for group in groups:
                short = [pipe for pipe in dealt if len(pipe) < most]
                if short:
                    min(short, key=len).append(group)
            laid = [self._pipelines.cut(tuple(pipe), usual, count) for pipe in dealt] if usual and all(dealt) else []
            pipes = [pipe for pipe in laid if pipe is not None]
            if pipes and len(pipes) == count:
                found.append((_rank(self._pipelines.score(pipes)), count, pipes))
        return [pipes for rank, _, pipes in sorted(found, key=lambda one: one[:2]) if math.isfinite(rank[0])]

    def _try(self) -> None:
        found = self._shifted() if self._random.random() < BY_HAND else self._neighbour()
        if found is None:
            return
        new, idle = found
        borne = _energy(self._score) + self._heat() * -math.log(1.0 - self._random.random())
        score = self._pipelines.score(new, borne)
        if math.isfinite(score.seconds) and _energy(score) <= borne:
            self._go_to(new, score, idle)
            if _rank(score) < _rank(self._best_score):
                if math.isfinite(self._best_score.seconds):
                    self._former.append((self._best, self._best_score))
                self._best, self._best_score = new, score

    def _heat(self) -> float:
        """By how much a change may be worse, on average: then chance bears it as Metropolis has it."""
        best_s = self._best_score.seconds
        return self._hot * best_s * (1.0 - self._trial / self._cycle) ** 2 if math.isfinite(best_s) else 0.0

    def _go_to(self, pipes: list[Laid], score: Score, idle: list[int] | None = None) -> None:
        self._now, self._score = pipes, score
        if idle is None:
            used = {rank for pipe in pipes for ranks in pipe.groups for rank in ranks}
            idle = [rank for rank in self._situation.available if rank not in used]
        self._idle = idle
        rows = [pipe.row for pipe in pipes]
        usual = Counter(rows).most_common(1)[0] if len(rows) > FEW_ALIKE else (0, 0)
        self._moves.odd = [d for d, row in enumerate(rows) if row != usual[0]] if usual[1] > FEW_ALIKE else ()

    def _begun(self, replicas: Sequence[Replica]) -> list[Laid]:
        return [
            self._pipelines.kept(
                tuple(stage.ranks for stage in one.stages),
                tuple(len(stage.layers) for stage in one.stages),
                len(replicas),
            )
            for one in replicas
        ]

    def _forget(self) -> None:
        """Tables begun anew, with what is still needed."""
        self._pipelines.clear()
        self._former.clear()
        self._now, self._best, *elsewhere = (
            [self._pipelines.kept(one.groups, one.counts, len(pipes)) for one in pipes]
            for pipes in (self._now, self._best, *(self._elsewhere or ()))
        )
        self._elsewhere = None if self._elsewhere is None else elsewhere

    # --- what else it could be ------------------------------------------------------------------------------------

    def _neighbour(self) -> tuple[list[Laid], list[int]] | None:
        pipes = [laid.groups for laid in self._now]
        found = self._moves.another(pipes, self._idle)
        if found is None:
            return None
        changed, idle = found
        if self._random.random() < TWICE:
            pipes = _with(pipes, changed)
            further = self._moves.another(pipes, idle) if all(pipes) else None
            if further is not None:
                more, idle = further
                changed |= more
        pipes = _with([laid.groups for laid in self._now], changed)
        new: list[Laid] = []
        replicas = sum(1 for groups in pipes if groups)
        usual = max(1, self._situation.micro_batches // max(1, replicas))
        anew = self._zero_1 and replicas != len(self._now)
        for d, groups in enumerate(pipes):
            if not groups:
                continue
            if d not in changed and not anew:
                new.append(self._now[d])
                continue
            count = self._score.counts[d] if d < len(self._now) and replicas == len(self._now) else usual
            laid = self._pipelines.cut(groups, count, replicas)
            if laid is None:
                return None
            new.append(laid)
        return (new, idle) if new else None

    def _shifted(self) -> tuple[list[Laid], list[int]] | None:
        """A layer from one stage to another."""
        d = int(self._random.random() * len(self._now))
        counts = [*self._now[d].counts]
        a, b = (int(self._random.random() * len(counts)) for _ in range(2))
        if a == b or counts[a] == 1:
            return None
        counts[a] -= 1
        counts[b] += 1
        laid = self._pipelines.kept(self._now[d].groups, tuple(counts), len(self._now))
        return [*self._now[:d], laid, *self._now[d + 1 :]], self._idle


def _with(pipes: list[tuple[tuple[int, ...], ...]], changed: Changed) -> list[tuple[tuple[int, ...], ...]]:
    found = [*pipes]
    for d in sorted(changed):
        if d < len(found):
            found[d] = changed[d]
        else:
            found.append(changed[d])
    return found


def _rank(score: Score) -> tuple[float, float]:
    """Of two layouts the better one: by time, then by how soon all replicas are done."""
    return round(score.seconds, 9), round(score.parts_s, 9)


def _energy(score: Score) -> float:
    """Of annealing: micro-batches are whole, but what makes replicas faster is a step even if none changes hands."""
    return SMOOTH * score.parts_s + (1.0 - SMOOTH) * score.seconds
