"""A better layout within milliseconds: sets of pipelines by rough times, downhill, then layers by the timeline. Pure.

What the progressive planner changes one significant step at a time is here changed group by group: an idle group
becomes a stage, groups go to another pipeline or change places, ranks of a node form other groups. A set of pipelines
is judged by what it would take if micro-batches could be shared out in parts, too, so that of replicas that are alike
damaged the first one mended counts. A pipeline is judged by its slowest stage and its ramps, its layers as even as can
be, weak groups last; the best sets are then laid out and played. Trials are counted: the same question has the same
answer.

Called by `resihp.scheduler.planner`, after all else. One chunk a stage, groups on one node each.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from resihp.parallelism.layout import Replica, Stage
from resihp.scheduler.cost import memory, steady_state
from resihp.scheduler.cost.prices import Priced, Prices
from resihp.scheduler.cost.profile import Profile
from resihp.scheduler.layouts import layers, tp_groups
from resihp.scheduler.layouts.shares import lines_done, lines_split
from resihp.scheduler.situation import Situation

MOST_DEVICES = 96
"""More are not looked at: what fails is a small part of them."""
MORE_STAGES = 2
"""Of a pipeline than the job was started with."""
TRIALS = 5000
"""Sets of pipelines that are judged from each beginning, times devices: larger ones take longer."""
LAID_OUT = 3
"""Of the last sets of each way."""
PARTITIONS = 3
"""Of layers, whose neighbours are looked at."""

Ranks = tuple[int, ...]
Pipe = tuple[Ranks, ...]
"""Groups of a replica, in pipeline order."""
Kind = tuple[int, float]
"""Degree, and speed of a group."""
Kinds = tuple[Kind, ...]


class PipelineTime(msgspec.Struct, frozen=True):
    """What a pipeline takes, about."""

    ramp: float
    pace: float


class Descent:
    """Of one situation; where its replicas were before makes no difference."""

    def __init__(self, situation: Situation, prices: Prices) -> None:
        self._situation, self._prices = situation, prices
        self._speeds = {rank: situation.speeds.get(rank, 1.0) for rank in situation.available}
        self._degrees = tp_groups.degrees(
            situation.tp, 1, started_with=situation.tp, obstacle=situation.model.tensor_parallel_obstacle
        )
        self._most = situation.pp + MORE_STAGES
        self._ends = layers.ends_of(situation.times)
        whole = situation.times.span(0, situation.model.layers - 1)
        mean = [sum(getattr(one, kind) for one in situation.times.layers) for kind in ("f", "b", "w")]
        self._layer = sum(mean) / situation.model.layers
        split = situation.schedule == "zero-bubble"
        self._ramp = (mean[0] + mean[1] - mean[2]) / sum(mean) if split and whole.total else 1.0
        """Part of a stage's time that passes until the next one begins and after it ends."""
        self._sums = _sums(situation.times)
        self._anew: list[list[Priced]] | None = None
        self._kinds_of: dict[Pipe, Kinds] = {}
        self._speed_of: dict[Ranks, float] = {}
        self._lines: dict[tuple[Kinds, int | None], PipelineTime | None] = {}
        self._rooms: dict[tuple[int, int, int, int | None], int] = {}
        self._laid: dict[tuple[Kinds, tuple[float, ...], int, int], tuple[int, ...] | None] = {}
        self._improved: dict[tuple[Replica, ...], list[Priced] | None] = {}

    def improved(self, replicas: tuple[Replica, ...]) -> list[Priced] | None:
        """Replicas that take less than these, or None where none were found or nothing is to be looked for."""
        situation = self._situation
        stages = [stage for replica in replicas for stage in replica.stages]
        if situation.memory_bytes is None or situation.chunks > 1 or len(situation.available) > MOST_DEVICES:
            return None
        if any(not stage.ranks or len({situation.nodes[rank] for rank in stage.ranks}) > 1 for stage in stages):
            return None
        if replicas not in self._improved:
            self._improved[replicas] = self._run(replicas)
        return self._improved[replicas]

    def _run(self, replicas: tuple[Replica, ...]) -> list[Priced] | None:
        begin = [tuple(stage.ranks for stage in replica.stages) for replica in replicas]
        best, found = math.inf, None
        if replicas:
            best = self._prices.iteration([self._prices.priced(one) for one in replicas])[1]
        if self._anew is None:
            self._anew = [laid for start in self._dealt() for laid in self._downhill(start)]
        for laid in (*(self._downhill(begin) if begin else ()), *self._anew):
            seconds = self._prices.iteration(laid)[1]
            if seconds < best * (1.0 - 1e-9):
                best, found = seconds, laid
        if found is not None:
            self._improved[tuple(priced.replica for priced in found)] = None  # further down there is nothing
        return found

    # --- judged roughly -------------------------------------------------------------------------------------------

    def _kinds(self, pipe: Pipe) -> Kinds:
        """Strong groups first."""
        found = self._kinds_of.get(pipe)
        if found is None:
            kinds = [(len(ranks), self._speed(ranks)) for ranks in pipe]
            found = self._kinds_of[pipe] = tuple(sorted(kinds, key=lambda kind: (-kind[1], kind)))
        return found

    def _speed(self, ranks: Ranks) -> float:
        found = self._speed_of.get(ranks)
        if found is None:
            found = self._speed_of[ranks] = len(ranks) * min(self._speeds[rank] for rank in ranks)
        return found

    def _line(self, kinds: Kinds, replicas: int) -> PipelineTime | None:
        """None where memory does not suffice."""
        key = kinds, self._situation.state_bytes_of(replicas)
        if key not in self._lines:
            counts = self._even(kinds, replicas)
            self._lines[key] = None
            if counts is not None:
                extra = self._extra(len(kinds))
                loads = [(n + x) * self._layer / v for n, x, (_, v) in zip(counts, extra, kinds, strict=True)]
                pace = max(loads)
                ramp = self._ramp * (sum(loads) - pace) + 2 * (len(kinds) - 1) * self._situation.times.transfer_s
                self._lines[key] = PipelineTime(ramp, pace)
        return self._lines[key]

    def _extra(self, stages: int) -> list[float]:
        found = [0.0] * stages
        found[0] += self._ends.embedding
        found[-1] += self._ends.head
        return found

    def _even(self, kinds: Kinds, replicas: int) -> tuple[int, ...] | None:
        """Layers of each stage, one at least: none is faster for another's sake. None where memory does not suffice."""
        total, stages = self._situation.model.layers, len(kinds)
        room = [self._room(s, stages, k, replicas) for s, (k, _) in enumerate(kinds)]
        if stages > total or min(room) < 1 or sum(room) < total:
            return None
        extra = self._extra(stages)
        pace = (total + sum(extra)) / sum(v for _, v in kinds)
        counts = [
            max(1, min(most, int(pace * v - x + 1e-9))) for most, x, (_, v) in zip(room, extra, kinds, strict=True)
        ]
        while (left := total - sum(counts)) != 0:
            able = [s for s in range(stages) if (counts[s] < room[s] if left > 0 else counts[s] > 1)]
            if left > 0:
                counts[min(able, key=lambda s: (counts[s] + 1 + extra[s]) / kinds[s][1])] += 1
            else:
                counts[max(able, key=lambda s: (counts[s] + extra[s]) / kinds[s][1])] -= 1
        return tuple(counts)

    def _room(self, s: int, stages: int, tp: int, replicas: int) -> int:
        situation = self._situation
        if situation.room_bytes is None:
            return situation.model.layers
        key = s, stages, tp, situation.state_bytes_of(replicas)
        found = self._rooms.get(key)
        if found is None:
            post = situation.post(s, stages, tp, replicas)
            found = self._rooms[key] = memory.capacity(situation.model, post, situation.room_bytes, situation.tokens)
        return found

    def _energy(self, key: Sequence[Kinds]) -> float:
        if not 0 < len(key) <= self._situation.micro_batches:
            return math.inf
        lines = []
        for kinds in key:
            line = self._line(kinds, len(key))
            if line is None:
                return math.inf
            lines.append(line)
        shared = [(line.ramp, line.pace) for line in lines]
        counts = lines_split(self._situation.micro_batches, shared)
        whole = max(ramp + m * pace for (ramp, pace), m in zip(shared, counts, strict=True))
        return 0.5 * (whole + lines_done(self._situation.micro_batches, shared))

    # --- downhill -------------------------------------------------------------------------------------------------

    def _dealt(self) -> Iterator[list[Pipe]]:
        """All ranks dealt out anew, over the pipelines that there are ranks and work for, and one that lacks some."""
        groups = [group for ranks in self._idle(()).values() for group in self._grouped(ranks)]
        groups.sort(key=lambda ranks: (-self._speed(ranks), ranks))
        size = self._situation.tp * self._situation.pp
        ranks = len(self._situation.available)
        most = self._situation.micro_batches
        for count in sorted({min(most, max(1, ranks // size)), min(most, -(-ranks // size))}):
            dealt: list[list[Ranks]] = [[] for _ in range(count)]
            for ranks_of_one in groups:
                short = [pipe for pipe in dealt if len(pipe) < self._most]
                if short:
                    min(short, key=lambda pipe: sum(map(self._speed, pipe))).append(ranks_of_one)
            if dealt and all(dealt):
                yield [tuple(pipe) for pipe in dealt]

    def _downhill(self, pipes: list[Pipe]) -> list[list[Priced]]:
        """The last sets of pipelines on the way, laid out."""
        keys = [self._kinds(pipe) for pipe in pipes]
        least = self._energy(keys)
        way, seen, trials = [pipes], {tuple(sorted(keys))}, 0
        while trials * len(self._situation.available) < TRIALS:
            best: tuple[float, list[Pipe]] | None = None
            for changed in self._changes(pipes):
                new = [pipe for d, old in enumerate(pipes) if (pipe := changed.get(d, old))]
                name = tuple(sorted(map(self._kinds, new)))
                if name in seen:
                    continue
                seen.add(name)
                trials += 1
                energy = self._energy(name)
                if energy < (least if best is None else best[0]) * (1.0 - 1e-6):
                    best = energy, new
            if best is None:
                break
            least, pipes = best
            way.append(pipes)
        return [laid for one in way[-LAID_OUT:] if (laid := self._lay(one)) is not None]

    def _changes(self, pipes: list[Pipe]) -> Iterator[dict[int, Pipe]]:
        """Single changes, of pipelines and groups that are alike the first ones."""
        unlike = [*{self._kinds(pipe): d for d, pipe in reversed([*enumerate(pipes)])}.values()]
        idle = self._idle(pipes)
        fresh = [group for ranks in idle.values() for group in self._some(ranks)]
        for d in unlike:
            pipe, places = pipes[d], self._places(pipes[d])
            if len(pipe) < self._most:
                yield from ({d: (*pipe, group)} for group in fresh)
            for a in places:
                rest = (*pipe[:a], *pipe[a + 1 :])
                yield {d: rest}
                yield from ({d: (*pipe[:a], *new, *pipe[a + 1 :])} for new in self._regrouped(pipe[a], idle))
            for e in unlike if len(unlike) > 1 else ():
                if e != d:
                    yield from self._exchanges(pipes, d, e)

    def _exchanges(self, pipes: list[Pipe], d: int, e: int) -> Iterator[dict[int, Pipe]]:
        mine, theirs = pipes[d], pipes[e]
        for a in self._places(mine):
            rest = (*mine[:a], *mine[a + 1 :])
            if len(theirs) < self._most:
                yield {d: rest, e: (*theirs, mine[a])}
            for b in self._places(theirs) if d < e else ():
                if len(mine[a]) != len(theirs[b]) or self._speed(mine[a]) != self._speed(theirs[b]):
                    yield {
                        d: (*mine[:a], theirs[b], *mine[a + 1 :]),
                        e: (*theirs[:b], mine[a], *theirs[b + 1 :]),
                    }

    def _places(self, pipe: Pipe) -> list[int]:
        """One of each kind and node with idle ranks."""
        found: dict[object, int] = {}
        for a, ranks in enumerate(pipe):
            found.setdefault((len(ranks), self._speed(ranks)), a)
        return [*found.values()]

    def _regrouped(self, ranks: Ranks, idle: dict[str, list[int]]) -> Iterator[tuple[Ranks, ...]]:
        """Other groups of a group's ranks and of idle ones of its node: one, or two."""
        pool = self._fastest((*ranks, *idle.get(self._situation.nodes[ranks[0]], ())))
        for k in self._degrees:
            if k <= len(pool):
                if k != len(ranks) or set(pool[:k]) != set(ranks):
                    yield (tuple(sorted(pool[:k])),)
                yield from (
                    (tuple(sorted(pool[:k])), tuple(sorted(pool[k : k + j])))
                    for j in self._degrees
                    if j <= k and k + j <= len(pool)
                )

    def _idle(self, pipes: Iterable[Pipe]) -> dict[str, list[int]]:
        used = {rank for pipe in pipes for ranks in pipe for rank in ranks}
        found: defaultdict[str, list[int]] = defaultdict(list)
        for rank in self._situation.available:
            if rank not in used and self._speeds[rank] > 0.0:
                found[self._situation.nodes[rank]].append(rank)
        return found

    def _some(self, ranks: Sequence[int]) -> Iterator[Ranks]:
        pool = self._fastest(ranks)
        yield from (tuple(sorted(pool[:k])) for k in [k for k in self._degrees if k <= len(pool)][-2:])

    def _grouped(self, ranks: Sequence[int]) -> Iterator[Ranks]:
        """All ranks of a node: a group is as fast as can be, of equally fast ones the smallest."""
        pool = self._fastest(ranks)
        while degrees := [k for k in self._degrees if k <= len(pool)]:
            k = max(degrees, key=lambda k: (k * self._speeds[pool[k - 1]], -k))
            yield tuple(sorted(pool[:k]))
            pool = pool[k:]

    def _fastest(self, ranks: Iterable[int]) -> list[int]:
        return sorted(ranks, key=lambda rank: (-self._speeds[rank], rank))

    # --- laid out -------------------------------------------------------------------------------------------------

    def _lay(self, pipes: Sequence[Pipe]) -> list[Priced] | None:
        usual = max(1, round(self._situation.micro_batches / len(pipes)))
        found = []
        for pipe in pipes:
            order = tuple(sorted(pipe, key=lambda ranks: -self._speed(ranks)))  # of equal ones as they were
            counts = self._counts(order, usual, len(pipes))
            if counts is None:
                return None
            ends = [0, *itertools.accumulate(counts)]
            stages = [
                Stage(ranks, ((a, b - 1),)) for ranks, (a, b) in zip(order, itertools.pairwise(ends), strict=True)
            ]
            found.append(self._prices.priced(Replica(tuple(stages))))
        return found

    def _counts(self, pipe: Pipe, usual: int, replicas: int) -> tuple[int, ...] | None:
        """Layers, by the timeline."""
        late = [self._situation.transfer_s(a, b) for a, b in itertools.pairwise(pipe)]
        kinds = tuple((len(ranks), self._speed(ranks)) for ranks in pipe)
        key = (kinds, tuple(late), usual, replicas)
        if key not in self._laid:
            self._laid[key] = self._settled(kinds, late, usual, replicas)
        return self._laid[key]

    def _settled(self, kinds: Kinds, late: Sequence[float], usual: int, replicas: int) -> tuple[int, ...] | None:
        room = [self._room(s, len(kinds), k, replicas) for s, (k, _) in enumerate(kinds)]
        speeds = [speed for _, speed in kinds]
        offers = [*itertools.islice(layers.trade_offs(self._situation.times, speeds, room), PARTITIONS)]
        best, least = None, math.inf
        while offers:
            played = self._play(speeds, offers, late, usual)
            at = min(played)
            if at >= least * (1.0 - 1e-9):
                break
            best, least = offers[played.index(at)], at
            offers = [*layers.nearby(best, room)]
        return best

    def _play(
        self, speeds: Sequence[float], offers: Sequence[tuple[int, ...]], late: Sequence[float], usual: int
    ) -> list[float]:
        held = np.array(offers).T
        last = np.cumsum(held, axis=0)
        table = (self._sums[:, last] - self._sums[:, last - held]) / np.array(speeds)[:, None]
        split = self._situation.schedule == "zero-bubble"
        if not split:
            table[1] += table[2]
        forward, backward, weights = table
        found: list[float] = steady_state.many_seconds(
            forward, backward, weights if split else None, np.array(late).reshape(-1, 1), usual
        ).tolist()
        return found


def _sums(times: Profile) -> npt.NDArray[np.float64]:
    """(3, layers + 1): F, B and W of the layers before each, embedding and head with the first and the last one."""
    each = [*times.layers]
    each[0] += times.embedding
    each[-1] += times.head
    sums = np.zeros((3, len(each) + 1))
    sums[:, 1:] = np.cumsum([(one.f, one.b, one.w) for one in each], axis=0).T
    return sums
