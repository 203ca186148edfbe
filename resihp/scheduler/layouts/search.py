"""A layout made better step by step, for as long as there is time: simulated annealing over whole layouts. Pure.

The instant planner changes one thing at a time and stops where no single change gains. Here groups change their places,
replicas and sizes, also where nothing is gained at once; layers follow, to what the timeline says is best for them.
Trials are counted, not timed: the same seed and number of trials give the same layout. Kirkpatrick et al., 1983; cooled
and heated again in cycles, each twice as long. What it takes to get there is not weighed.

Called by `resihp.scheduler.anytime`. One chunk a stage, whose ranks are on one node.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence

import msgspec

from resihp.parallelism.layout import Replica, Stage
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Prices, after_backward_s
from resihp.scheduler.layouts import layers, shares, tp_groups
from resihp.scheduler.situation import Situation

CYCLE = 250
"""Trials of the first cycle."""
HOT = 0.02
"""Share of the best time by which a change may be worse at the beginning of a cycle, about."""
MORE_STAGES = 2
"""Of a replica than the job was started with."""
PARTITIONS = 5
"""Of layers, whose neighbours are looked at."""

MOST_REMEMBERED = 200_000
"""Times of pipelines."""

Ranks = tuple[int, ...]
Pipe = tuple[Ranks, ...]
"""The groups of a replica, in pipeline order."""
Kind = tuple[tuple[tuple[int, float], ...], tuple[float, ...]]
"""What counts of a pipe: degree and speed of each group, seconds from each to the next."""
Score = tuple[float, ...]
"""Seconds of an iteration, what they were if micro-batches could be shared out in parts, and those of all replicas but
the slowest, the longest first."""

SMOOTH = 0.5
"""Weight of the time of micro-batches that could be shared out in parts."""

WORST: Score = (math.inf,)


class Laid(msgspec.Struct, frozen=True):
    """A replica: its groups, and how many layers each holds."""

    groups: Pipe
    counts: tuple[int, ...]

    @property
    def replica(self) -> Replica:
        first, stages = 0, []
        for ranks, count in zip(self.groups, self.counts, strict=True):
            stages.append(Stage(ranks, ((first, first + count - 1),)))
            first += count
        return Replica(tuple(stages))


class Search:
    """`replicas`: where it begins. `seconds` and `found` are the best so far."""

    def __init__(self, situation: Situation, prices: Prices, replicas: Sequence[Replica], seed: int = 0) -> None:
        self._situation, self._prices, self._random = situation, prices, random.Random(seed)
        self._degrees = tp_groups.degrees(
            situation.tp, 1, started_with=situation.tp, obstacle=situation.model.tensor_parallel_obstacle
        )
        self._most = max(situation.pp + MORE_STAGES, *(len(replica.stages) for replica in replicas))
        self._clocks: dict[tuple[Kind, tuple[int, ...], int, int | None], float] = {}
        self._settled: dict[tuple[Kind, int, int | None], tuple[int, ...] | None] = {}
        self._room: dict[tuple[int, int, int, int, int | None], int] = {}
        self._moves: tuple[tuple[float, Callable[[list[Laid]], dict[int, Pipe] | None]], ...] = (
            (3.0, self._turned),
            (3.0, self._exchanged),
            (2.0, self._shorter),
            (3.0, self._longer),
            (1.5, self._passed_on),
            (2.0, self._regrouped),
            (0.5, self._given_up),
            (0.5, self._split),
            (0.5, self._fresh),
        )
        self._now = [
            Laid(tuple(stage.ranks for stage in one.stages), tuple(len(stage.layers) for stage in one.stages))
            for one in replicas
        ]
        self._score = self._scored(self._now)
        self._best, self._best_score = self._now, self._score
        self._trial, self._cycle = 0, CYCLE

    @property
    def seconds(self) -> float:
        """Predicted for an iteration."""
        return self._best_score[0]

    @property
    def found(self) -> tuple[Replica, ...]:
        return tuple(laid.replica for laid in self._best)

    def run(self, trials: int) -> bool:
        """Try so many changes; whether something better was found."""
        before = self._best_score
        for _ in range(trials):
            if len(self._clocks) > MOST_REMEMBERED:
                self._clocks.clear()
                self._settled.clear()
            self._trial += 1
            if self._trial >= self._cycle:
                self._trial, self._cycle = 0, 2 * self._cycle
                self._now, self._score = self._best, self._best_score
            new = self._neighbour()
            if new is None:
                continue
            score = self._scored(new)
            if self._bears(_energy(score) - _energy(self._score)):
                self._now, self._score = new, score
                if score < self._best_score:
                    self._best, self._best_score = new, score
        return self._best_score < before

    def _bears(self, worse: float) -> bool:
        heat = HOT * self._best_score[0] * (1.0 - self._trial / self._cycle) ** 2
        return worse <= 0.0 or (math.isfinite(worse) and self._random.random() < math.exp(-worse / max(heat, 1e-12)))

    # --- what a layout takes --------------------------------------------------------------------------------------

    def _scored(self, pipes: Sequence[Laid]) -> Score:
        total = self._situation.micro_batches
        if not pipes or len(pipes) > total:
            return WORST
        keys = [(self._kind(one.groups), one.counts) for one in pipes]
        clocks = {key: self._clock(*key, len(pipes)) for key in keys}
        played = [clocks[key] for key in keys]
        usual = max(1, total // len(pipes))
        begin = [clock(usual) for clock in played]
        slopes = [_slope(clock, usual, at) for clock, at in zip(played, begin, strict=True)]
        if not all(math.isfinite(slope) and slope > 0.0 for slope in slopes):
            return WORST
        lines = [_line(at, usual, slope) for at, slope in zip(begin, slopes, strict=True)]
        counts = shares.improved(shares.split(total, lines), played)
        times = sorted((clock(m) for clock, m in zip(played, counts, strict=True)), reverse=True)
        if math.isinf(times[0]):
            return WORST
        after = after_backward_s([one.replica for one in pipes], self._situation)
        pace = sum(1.0 / slope for slope in slopes)
        shared = (total + sum(at / slope - usual for at, slope in zip(begin, slopes, strict=True))) / pace
        return (round(times[0] + after, 9), shared + after, *(round(time, 9) for time in times[1:]))

    def _clock(self, kind: Kind, counts: tuple[int, ...], replicas: int) -> shares.Seconds:
        state_bytes = self._situation.state_bytes_of(replicas)

        def seconds(micro_batches: int) -> float:
            found = self._clocks.get((kind, counts, micro_batches, state_bytes))
            return self._play(kind, [counts], micro_batches, replicas)[0] if found is None else found

        return seconds

    def _play(self, kind: Kind, counts: Sequence[tuple[int, ...]], micro_batches: int, replicas: int) -> list[float]:
        state = self._situation.state_bytes_of(replicas)
        new = [one for one in counts if (kind, one, micro_batches, state) not in self._clocks]
        room = self._rooms(kind, micro_batches, replicas)
        fits = [one for one in new if all(n <= most for n, most in zip(one, room, strict=True))]
        self._clocks |= {(kind, one, micro_batches, state): math.inf for one in new}
        if fits:
            speeds = [speed for _, speed in kind[0]]
            seconds = self._prices.pipelines_seconds(speeds, fits, kind[1], micro_batches)
            self._clocks |= {(kind, one, micro_batches, state): at for one, at in zip(fits, seconds, strict=True)}
        return [self._clocks[kind, one, micro_batches, state] for one in counts]

    def _kind(self, groups: Pipe) -> Kind:
        situation = self._situation
        late = tuple(situation.transfer_s(a, b) for a, b in itertools.pairwise(groups))
        return tuple((len(ranks), situation.speed(ranks)) for ranks in groups), late

    def _rooms(self, kind: Kind, micro_batches: int, replicas: int) -> list[int]:
        situation = self._situation
        if situation.room_bytes is None:
            return [situation.model.layers] * len(kind[0])
        found = []
        state_bytes = situation.state_bytes_of(replicas)
        for s, (tp, _) in enumerate(kind[0]):
            key = (s, len(kind[0]), tp, min(micro_batches, len(kind[0])), state_bytes)
            if key not in self._room:
                post = situation.post(s, len(kind[0]), tp, replicas)
                post = msgspec.structs.replace(post, micro_batches=micro_batches)
                self._room[key] = memory.capacity(situation.model, post, situation.room_bytes, situation.tokens)
            found.append(self._room[key])
        return found

    def _settle(self, groups: Pipe, micro_batches: int, replicas: int) -> Laid | None:
        """With the layers that make it fastest; None where they do not fit, or a group stands still."""
        kind = self._kind(groups)
        key = (kind, micro_batches, self._situation.state_bytes_of(replicas))
        if key not in self._settled:
            self._settled[key] = self._layers(kind, micro_batches, replicas)
        counts = self._settled[key]
        return None if counts is None else Laid(groups, counts)

    def _layers(self, kind: Kind, micro_batches: int, replicas: int) -> tuple[int, ...] | None:
        speeds = [speed for _, speed in kind[0]]
        room = self._rooms(kind, micro_batches, replicas)
        if min(speeds) <= 0.0:
            return None
        offers: list[tuple[int, ...]] = []
        for counts in layers.trade_offs(self._situation.times, speeds, room):
            offers.append(counts)
            if len(offers) == PARTITIONS:
                break
        best, least = None, math.inf
        while offers:
            played = self._play(kind, offers, micro_batches, replicas)
            at = min(played)
            if at >= least * (1.0 - 1e-9):
                break
            best, least = offers[played.index(at)], at
            offers = [*layers.nearby(best, room)]
        return best

    # --- what else it could be ------------------------------------------------------------------------------------

    def _neighbour(self) -> list[Laid] | None:
        usual = max(1, self._situation.micro_batches // len(self._now))
        if self._random.random() < 0.25:
            return self._shifted()
        (move,) = self._random.choices([move for _, move in self._moves], [weight for weight, _ in self._moves])
        changed = move(self._now)
        if changed is None:
            return None
        found: list[Laid] = []
        pipes = {d: one.groups for d, one in enumerate(self._now)} | changed
        count = sum(bool(groups) for groups in pipes.values())
        tighter = self._situation.zero_1 and count < len(self._now)
        for d, groups in sorted(pipes.items()):
            if d not in changed and not tighter:
                found.append(self._now[d])
            elif groups:
                laid = self._settle(groups, usual, count) if len(groups) <= self._most else None
                if laid is None:
                    return None
                found.append(laid)
        return found or None

    def _shifted(self) -> list[Laid] | None:
        """A layer from one stage to another."""
        d = self._random.randrange(len(self._now))
        counts = [*self._now[d].counts]
        if len(counts) < 2:
            return None
        a, b = self._random.sample(range(len(counts)), 2)
        if counts[a] == 1:
            return None
        counts[a] -= 1
        counts[b] += 1
        return [*self._now[:d], Laid(self._now[d].groups, tuple(counts)), *self._now[d + 1 :]]

    def _place(self, pipes: Sequence[Laid]) -> tuple[int, int]:
        d = self._random.randrange(len(pipes))
        return d, self._random.randrange(len(pipes[d].groups))

    def _turned(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """Two groups of a replica in each other's places, or one in another place."""
        d, a = self._place(pipes)
        groups = [*pipes[d].groups]
        b = self._random.randrange(len(groups))
        if a == b:
            return None
        if self._random.random() < 0.5:
            groups[a], groups[b] = groups[b], groups[a]
        else:
            groups.insert(b, groups.pop(a))
        return {d: tuple(groups)}

    def _exchanged(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """Groups of two replicas."""
        (d, a), (e, b) = self._place(pipes), self._place(pipes)
        if d == e:
            return None
        mine, theirs = [*pipes[d].groups], [*pipes[e].groups]
        mine[a], theirs[b] = theirs[b], mine[a]
        return {d: tuple(mine), e: tuple(theirs)}

    def _shorter(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """Without one of its groups."""
        d, a = self._place(pipes)
        groups = pipes[d].groups
        return {d: (*groups[:a], *groups[a + 1 :])} if len(groups) > 1 else None

    def _longer(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """With a group of idle ranks."""
        group = self._idle_group(pipes)
        if group is None:
            return None
        d = self._random.randrange(len(pipes))
        at = self._random.randrange(len(pipes[d].groups) + 1)
        return {d: (*pipes[d].groups[:at], group, *pipes[d].groups[at:])}

    def _fresh(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """A replica of idle ranks."""
        group = self._idle_group(pipes)
        return None if group is None else {len(pipes): (group,)}

    def _passed_on(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """A group goes to another replica."""
        (d, a), e = self._place(pipes), self._random.randrange(len(pipes))
        if d == e:
            return None
        mine, theirs = pipes[d].groups, pipes[e].groups
        at = self._random.randrange(len(theirs) + 1)
        return {d: (*mine[:a], *mine[a + 1 :]), e: (*theirs[:at], mine[a], *theirs[at:])}

    def _given_up(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """Without a replica."""
        return {self._random.randrange(len(pipes)): ()} if len(pipes) > 1 else None

    def _split(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """A group becomes two stages: its faster ranks, and the others."""
        d, a = self._place(pipes)
        groups = pipes[d].groups
        half = len(groups[a]) // 2
        if half not in self._degrees or len({self._situation.nodes[rank] for rank in groups[a]}) > 1:
            return None
        ranks = self._fastest(groups[a])
        parts = [tuple(sorted(part)) for part in (ranks[:half], ranks[half : 2 * half])]
        return {d: (*groups[:a], *parts, *groups[a + 1 :])}

    def _regrouped(self, pipes: list[Laid]) -> dict[int, Pipe] | None:
        """Ranks of a node change between a group, those that are idle, and another group."""
        nodes, (d, a) = self._situation.nodes, self._place(pipes)
        node = nodes[pipes[d].groups[a][0]]
        at_home = [
            (e, b)
            for e, pipe in enumerate(pipes)
            for b, ranks in enumerate(pipe.groups)
            if all(nodes[rank] == node for rank in ranks)
        ]
        if (d, a) not in at_home:
            return None
        others = [place for place in at_home if place != (d, a)]
        other = self._random.choice([None, *others])
        pool = [*pipes[d].groups[a], *(rank for rank in self._idle(pipes) if nodes[rank] == node)]
        if other is not None:
            pool += pipes[other[0]].groups[other[1]]
        pool = self._fastest(pool)
        sizes = [k for k in self._degrees if k <= len(pool)]
        size = self._random.choice(sizes)
        mine, left = tuple(sorted(pool[:size])), pool[size:]
        changed = {e: [*pipes[e].groups] for e in {d, d if other is None else other[0]}}
        if other is None:
            changed[d][a] = mine
        else:
            sizes = [k for k in self._degrees if k <= len(left)][-2:]
            theirs = tuple(sorted(left[: self._random.choice(sizes)])) if sizes else ()
            if theirs and self._random.random() < 0.5:
                mine, theirs = theirs, mine
            changed[d][a] = mine
            changed[other[0]][other[1]] = theirs
        return {e: tuple(ranks for ranks in groups if ranks) for e, groups in changed.items()}

    def _idle(self, pipes: Iterable[Laid]) -> list[int]:
        used = {rank for pipe in pipes for ranks in pipe.groups for rank in ranks}
        return [rank for rank in self._situation.available if rank not in used]

    def _idle_group(self, pipes: Iterable[Laid]) -> Ranks | None:
        idle, nodes = self._idle(pipes), self._situation.nodes
        if not idle:
            return None
        node = nodes[self._random.choice(idle)]
        mine = self._fastest(rank for rank in idle if nodes[rank] == node)
        sizes = [k for k in self._degrees if k <= len(mine)][-2:]
        return tuple(sorted(mine[: self._random.choice(sizes)])) if sizes else None

    def _fastest(self, ranks: Iterable[int]) -> list[int]:
        return sorted(ranks, key=lambda rank: (-self._situation.speeds.get(rank, 1.0), rank))


def _energy(score: Score) -> float:
    """Of annealing: micro-batches are whole, but what makes replicas faster is a step even if none changes hands."""
    return SMOOTH * score[1] + (1.0 - SMOOTH) * score[0] if len(score) > 1 else math.inf


def _slope(clock: shares.Seconds, usual: int, at: float) -> float:
    """Seconds of a further micro-batch; of the last one, where there is no memory for a further one."""
    more = clock(usual + 1) - at
    if math.isfinite(more):
        return more
    return at - clock(usual - 1) if usual > 1 else at


def _line(begin: float, usual: int, slope: float) -> shares.Seconds:
    return lambda m: begin + (m - usual) * slope
