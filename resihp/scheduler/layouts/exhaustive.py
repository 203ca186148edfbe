"""Small jobs looked at as a whole: all ways to form groups, pipelines and shares of a few devices. Pure.

The progressive planner changes as little as it can; with a handful of devices, beginning anew may be much better, and
everything can be tried. Devices of equal speed on a node are alike, in a group only the slowest counts, and a group
of faster devices is never worse: so groups are runs of a node's devices in descending order of speed, and what
remains at the end of the run stands by. Pipelines of the same groups have one solution. What a bound excludes is not
played; what remains goes the most promising first, until enough was played: counted, so that it is the same on every
machine. Only where the devices' memory is known: nothing else keeps a device from holding the whole model.

Called by `resihp.scheduler.planner`, whose other candidates it competes with.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from resihp.parallelism.layout import LayerSpan, Replica, Stage
from resihp.scheduler.cost import memory
from resihp.scheduler.cost.prices import Priced, Prices
from resihp.scheduler.cost.profile import Times
from resihp.scheduler.layouts import layers, shares
from resihp.scheduler.layouts.labels import assigned
from resihp.scheduler.situation import Situation

MOST_DEVICES = 8
"""More are not looked at as a whole: the number of possibilities grows beyond any time that there is."""

BEAM = 4
"""Pipelines of the same groups whose neighbours are looked at."""

MOST_SLOTS = 200_000
"""Of pipelines that are played: turns of their stages. What remains then is less promising than what was looked at."""

TOLD_APART = 16
"""Micro-batches of a pipeline up to which its layers are looked for by themselves; further ones change them little."""

NEAR = 0.002
"""Relative error of a time that is read off a line through two played ones."""

TIGHT = 1.25
"""Of the least time that a slowest stage could take: where memory keeps layers from where they belong, about."""

Kind = tuple[int, float]
"""What counts of a group: degree, and the speed of its slowest device."""


class _Laid(msgspec.Struct, frozen=True):
    """A pipeline in the making: groups in order, and the layers of each."""

    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]


def replicas(situation: Situation, prices: Prices, below: float) -> list[Priced] | None:
    """The best replicas there can be, if an iteration takes them less than `below`; None if it does not.

    None as well for jobs that are too large, whose devices' memory is not known, or to which nothing has happened.
    """
    if not (
        situation.lost or situation.speeds or situation.links or set(situation.available) - {*situation.base.active}
    ):
        return None
    if situation.memory_bytes is None or len(situation.available) > MOST_DEVICES or situation.chunks > 1:
        return None
    return _ExhaustiveSearch(situation, prices).best(below)


class _ExhaustiveSearch:
    def __init__(self, situation: Situation, prices: Prices) -> None:
        self._s, self._prices = situation, prices
        self._times = situation.times
        self._pipelines: dict[tuple[tuple[Kind, ...], int, int | None], tuple[float, _Laid | None]] = {}
        self._lines: dict[tuple[Kind, ...], tuple[float, float]] = {}
        self._work = self._times.span(0, situation.model.layers - 1).total
        self._slots = 0
        self._usual_bytes = situation.state_bytes_of(len(situation.base.replicas))
        self._limits: dict[tuple[int, int, int, int, int | None], int] = {}
        base = situation.base
        self._held = {
            rank: (d, s, stage)
            for d, r in enumerate(base.replicas)
            for s, stage in enumerate(r.stages)
            for rank in stage.ranks
        }
        self._by_node: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(situation.available, key=self._order):
            if self._p(rank) > 0:
                self._by_node[situation.nodes[rank]].append(rank)

    def best(self, below: float) -> list[Priced] | None:
        """The most promising first, until all others must take longer, or enough was played."""
        found: tuple[tuple[tuple[Kind, ...], ...], tuple[int, ...]] | None = None
        for _, parts in self._promising(below):
            if self._slots > MOST_SLOTS:
                break
            shared = self._share(parts, below)
            if shared is not None:
                below, found = shared[0], (parts, shared[1])
        return None if found is None else self._named(*found)

    def _promising(self, below: float) -> list[tuple[float, tuple[tuple[Kind, ...], ...]]]:
        """All ways to form pipelines that could take less than `below`, by what an iteration of each takes, about."""
        nodes = [
            sorted(set(_runs([self._p(r) for r in ranks], self._degrees))) for _, ranks in sorted(self._by_node.items())
        ]
        everything = {tuple(sorted(itertools.chain(*parts))) for parts in itertools.product(*nodes)}
        found: dict[tuple[tuple[Kind, ...], ...], float] = {}
        for kinds in sorted(everything, key=lambda kinds: (-_power(kinds), kinds)):
            if not kinds or self._work * self._s.micro_batches / _power(kinds) >= below:
                continue  # not even balanced perfectly
            for parts in _parts(kinds, self._s.most_stages, self._s.micro_batches):
                if parts not in found:
                    found[parts] = self._about(parts)
        return sorted((seconds, parts) for parts, seconds in found.items())

    def _about(self, parts: Sequence[tuple[Kind, ...]]) -> float:
        """Seconds of an iteration, if pipelines took their slowest stage's time for each micro-batch, and once all."""
        lines = [self._line(kinds) for kinds in parts]
        counts = shares.lines_split(self._s.micro_batches, lines)
        return max(ramp + m * pace for (ramp, pace), m in zip(lines, counts, strict=True))

    def _line(self, kinds: tuple[Kind, ...]) -> tuple[float, float]:
        """Seconds of ramps, and of each micro-batch."""
        found = self._lines.get(kinds)
        if found is None:
            order = tuple(reversed(kinds))
            usual = max(1, self._s.micro_batches * len(kinds) // max(1, len(self._s.available)))
            counts = next(
                layers.trade_offs(self._times, [k * p for k, p in order], self._room(order, usual, self._usual_bytes)),
                None,
            )
            if counts is None:  # memory does not suffice in this order
                pace = TIGHT * self._bottleneck(kinds)
                found = ((len(kinds) - 1) * pace, pace)
            else:
                times = [one.total for one in self._shape(_Laid(order, counts))]
                found = (sum(times) - max(times), max(times))
            self._lines[kinds] = found
        return found

    @property
    def _degrees(self) -> tuple[int, ...]:
        powers = {1 << q for q in range(self._s.tp.bit_length())} | {self._s.tp}
        return tuple(k for k in sorted(powers) if k <= self._s.tp and not self._s.model.tensor_parallel_obstacle(k))

    def _share(self, parts: Sequence[tuple[Kind, ...]], below: float) -> tuple[float, tuple[int, ...]] | None:
        """Time of an iteration and micro-batches of each pipeline, if it takes less than `below`."""
        if sum(below // self._bottleneck(kinds) for kinds in parts) < self._s.micro_batches:
            return None
        guess = shares.lines_split(self._s.micro_batches, [self._line(kinds) for kinds in parts])
        clocks = {kinds: (lambda m, kinds=kinds: self._pipeline(kinds, m, len(parts))[0]) for kinds in set(parts)}
        lines = [self._played_line(kinds, m, len(parts)) for kinds, m in zip(parts, guess, strict=True)]
        if shares.lines_done(self._s.micro_batches, lines) >= below * (1 + NEAR):
            return None
        counts = shares.improved(shares.lines_split(self._s.micro_batches, lines), [clocks[kinds] for kinds in parts])
        seconds = max(clocks[kinds](m) for kinds, m in zip(parts, counts, strict=True))
        return (seconds, counts) if seconds < below else None

    def _played_line(self, kinds: tuple[Kind, ...], m: int, replicas: int) -> tuple[float, float]:
        """As `_line`, through two times that were played about `m`."""
        begin, laid = self._pipeline(kinds, m, replicas)
        if laid is None:
            return self._line(kinds)
        pace = (self._play([laid], m + len(kinds))[0] - begin) / len(kinds)  # of a period
        return begin - m * pace, pace

    def _bottleneck(self, kinds: tuple[Kind, ...]) -> float:
        """Least time of the slowest stage for one micro-batch, at least."""
        return self._work / _power(kinds)

    def _pipeline(self, kinds: tuple[Kind, ...], m: int, replicas: int) -> tuple[float, _Laid | None]:
        """The best pipeline of these groups, of so many in all, for so many micro-batches: many are not told apart when
        it is laid out."""
        state_bytes = self._s.state_bytes_of(replicas)
        found = self._pipelines.get((kinds, m, state_bytes))
        if found is None:
            usual = _round(m)
            found = self._laid_out(kinds, m, state_bytes) if usual == m else self._pipeline(kinds, usual, replicas)
            if usual != m and found[1] is not None:
                found = self._play([found[1]], m)[0], found[1]
            self._pipelines[kinds, m, state_bytes] = found
        return found

    def _laid_out(self, kinds: tuple[Kind, ...], m: int, state_bytes: int | None) -> tuple[float, _Laid | None]:
        """Every order, and the partitions worth it."""
        found: tuple[float, _Laid | None] = (math.inf, None)
        tried: set[_Laid] = set()
        offers = self._first_offers(kinds, m, state_bytes)
        while offers:  # downhill, from the best of all to its neighbours
            tried.update(offers)
            seconds = self._play(offers, m)
            ranked = sorted(range(len(offers)), key=seconds.__getitem__)[:BEAM]
            if seconds[ranked[0]] >= found[0]:
                break
            found = (seconds[ranked[0]], offers[ranked[0]])
            near = {other for i in ranked for other in self._nearby(offers[i], m, state_bytes)}
            offers = sorted(near - tried, key=lambda laid: (laid.kinds, laid.counts))
        return found

    def _play(self, laid: Sequence[_Laid], m: int) -> list[float]:
        stages = len(laid[0].kinds)
        self._slots += len(laid) * stages * min(m, 2 * stages)  # further micro-batches cost little
        return self._prices.shapes_seconds([self._shape(one) for one in laid], m)

    def _first_offers(self, kinds: tuple[Kind, ...], m: int, state_bytes: int | None) -> list[_Laid]:
        """Each group last in turn, where the head is, the others by strength, strong ones first or last."""
        found: dict[_Laid, None] = {}
        for last in sorted(set(kinds)):
            rest = sorted(kinds)
            rest.remove(last)
            for order in ((*rest, last), (*reversed(rest), last)):
                speeds = [k * p for k, p in order]
                for counts in layers.trade_offs(self._times, speeds, self._room(order, m, state_bytes)):
                    found[_Laid(order, counts)] = None
        return list(found)

    def _nearby(self, laid: _Laid, m: int, state_bytes: int | None) -> Iterator[_Laid]:
        """One layer elsewhere, or two neighbours in each other's place."""
        for counts in layers.nearby(laid.counts, self._room(laid.kinds, m, state_bytes)):
            yield _Laid(laid.kinds, counts)
        for s in range(len(laid.kinds) - 1):
            order = [*range(s), s + 1, s, *range(s + 2, len(laid.kinds))]
            other = _Laid(tuple(laid.kinds[i] for i in order), tuple(laid.counts[i] for i in order))
            if all(n <= most for n, most in zip(other.counts, self._room(other.kinds, m, state_bytes), strict=True)):
                yield other

    def _room(self, order: tuple[Kind, ...], m: int, state_bytes: int | None) -> list[int]:
        return [self._limit(s, len(order), k, m, state_bytes) for s, (k, _) in enumerate(order)]

    def _shape(self, laid: _Laid) -> list[Times]:
        return [
            self._times.span(first, last).at(k * p)
            for (k, p), (first, last) in zip(laid.kinds, _spans(laid.counts), strict=True)
        ]

    def _limit(self, s: int, stages: int, k: int, m: int, state_bytes: int | None) -> int:
        assert self._s.room_bytes is not None
        key = (s, stages, k, min(m, stages), state_bytes)
        found = self._limits.get(key)
        if found is None:
            post = memory.Post(
                stage=s,
                stages=stages,
                tp=k,
                schedule=self._s.schedule,
                micro_batches=m,
                sequence_parallel=self._s.sequence_parallel,
                state_bytes=state_bytes,
            )
            found = memory.capacity(self._s.model, post, self._s.room_bytes, self._s.tokens)
            self._limits[key] = found
        return found

    # Which ranks these are.

    def _named(self, parts: tuple[tuple[Kind, ...], ...], counts: tuple[int, ...]) -> list[Priced]:
        """Replicas of real ranks: whoever holds most of what a place needs goes there."""
        laid = [self._pipeline(kinds, m, len(parts))[1] for kinds, m in zip(parts, counts, strict=True)]
        places = [
            (i, s, kind, span)
            for i, one in enumerate(laid)
            if one is not None
            for s, (kind, span) in enumerate(zip(one.kinds, _spans(one.counts), strict=True))
        ]
        groups = self._groups(sorted(kind for _, _, kind, _ in places))
        kept = np.array(
            [
                [self._kept(ranks, span) if kind == mine else -1e9 for ranks, mine in groups]
                for _, _, kind, span in places
            ]
        )
        at, which = assigned(kept, maximize=True)
        stages: dict[int, dict[int, Stage]] = defaultdict(dict)
        for place, group in zip(at.tolist(), which.tolist(), strict=True):
            i, s, _, span = places[place]
            stages[i][s] = Stage(groups[group][0], (span,))
        found = [Replica(tuple(stage for _, stage in sorted(own.items()))) for own in stages.values()]
        found.sort(key=lambda replica: min((*self._held.get(rank, (math.inf,))[:1], rank) for rank in replica.ranks))
        return [self._prices.priced(replica) for replica in found]

    def _groups(self, wanted: list[Kind]) -> list[tuple[tuple[int, ...], Kind]]:
        """Real groups of these kinds: some node's runs that together are just them."""
        names = sorted(self._by_node)
        options = [[run for run in _named_runs(self._by_node[name], self._p, self._degrees)] for name in names]

        def fit(i: int, left: list[Kind]) -> list[tuple[tuple[int, ...], Kind]] | None:
            if i == len(names):
                return [] if not left else None
            for run in options[i]:
                rest = list(left)
                try:
                    for _, kind in run:
                        rest.remove(kind)
                except ValueError:
                    continue
                more = fit(i + 1, rest)
                if more is not None:
                    return [*run, *more]
            return None

        found = fit(0, wanted)
        assert found is not None
        return found

    def _kept(self, ranks: tuple[int, ...], span: LayerSpan) -> float:
        """Layers that the ranks hold already, each by the part that it needs of them."""
        needed = set(range(span[0], span[1] + 1))
        return sum(
            len(needed.intersection(held[2].layers)) / len(ranks)
            for rank in ranks
            if (held := self._held.get(rank)) is not None
        )

    def _p(self, rank: int) -> float:
        return self._s.speeds.get(rank, 1.0)

    def _order(self, rank: int) -> tuple[float, float, float, int]:
        """Fast ones first; of equal ones those of one stage together."""
        place = self._held.get(rank)
        return (-self._p(rank), *(place[:2] if place else (math.inf, math.inf)), rank)


def _runs(speeds: Sequence[float], degrees: Sequence[int]) -> Iterator[tuple[Kind, ...]]:
    """Ways to cut devices, fast ones first, into groups; those at the end may be left out."""
    yield ()
    for k in degrees:
        if k <= len(speeds):
            for rest in _runs(speeds[k:], degrees):
                yield tuple(sorted(((k, speeds[k - 1]), *rest)))


def _named_runs(
    ranks: Sequence[int], p: Callable[[int], float], degrees: Sequence[int]
) -> Iterator[list[tuple[tuple[int, ...], Kind]]]:
    yield []
    for k in degrees:
        if k <= len(ranks):
            for rest in _named_runs(ranks[k:], p, degrees):
                yield [(tuple(sorted(ranks[:k])), (k, p(ranks[k - 1]))), *rest]


def _parts(kinds: tuple[Kind, ...], most: int, pipelines: int) -> Iterator[tuple[tuple[Kind, ...], ...]]:
    """Ways to distribute groups over at most so many pipelines of at most `most` stages; some come twice."""

    def extend(i: int, parts: list[tuple[Kind, ...]]) -> Iterator[tuple[tuple[Kind, ...], ...]]:
        if i == len(kinds):
            yield tuple(sorted(parts))
            return
        for part in sorted({part for part in parts if len(part) < most}):
            at = parts.index(part)
            yield from extend(i + 1, [*parts[:at], (*part, kinds[i]), *parts[at + 1 :]])
        if len(parts) < pipelines:
            yield from extend(i + 1, [*parts, (kinds[i],)])

    return extend(0, [])


def _power(kinds: Sequence[Kind]) -> float:
    return sum(k * p for k, p in kinds)


def _round(micro_batches: int) -> int:
    """To one of two numbers in each doubling, where there are many."""
    if micro_batches <= TOLD_APART:
        return micro_batches
    step = 1 << (micro_batches.bit_length() - 2)
    return micro_batches // step * step


def _spans(counts: Sequence[int]) -> list[LayerSpan]:
    ends = list(itertools.accumulate(counts))
    return [(end - count, end - 1) for end, count in zip(ends, counts, strict=True)]
