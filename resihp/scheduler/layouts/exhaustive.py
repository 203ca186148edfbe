"""Exhaustive planning of small jobs: tries all groups, pipelines and shares of a few devices. Pure.

The progressive planner changes as little as possible. With a handful of devices, an entirely new layout may be much
better, and all layouts can be tried. Three facts reduce their number. Devices of equal speed on one node are
interchangeable. Only the slowest device of a group counts, and a group of faster devices is never worse: so groups are
runs of a node's devices in descending order of speed, and the devices at the end are on standby. Pipelines of equal
groups have one solution. Layouts that a bound excludes are not played. The others are played in order of promise, up to
a maximum number of plays, so that the result is the same on every machine. The search requires that the devices' memory
is known: nothing else keeps a device from holding the whole model.

Called by `resihp.scheduler.planner`, which compares the result with its other candidates.
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

MAX_DEVICES = 8
"""Maximum number of devices of an exhaustive search; with more it would take too long."""

BEAM_WIDTH = 4
"""Number of the best pipelines of equal groups around which the hill climb continues."""

MAX_PLAYED_SLOTS = 200_000
"""Maximum number of turns of stages that are played in total; the most promising layouts come first."""

MAX_EXACT_MICRO_BATCHES = 16
"""Maximum number of micro-batches of a pipeline for which its layers are optimised for the exact number. Beyond it, one
more or less changes the best layers little."""

LINE_TOLERANCE = 0.002
"""Relative error of a time that is interpolated between two played times."""

TIGHT_MEMORY_FACTOR = 1.25
"""Approximate time of the slowest stage, relative to its lower bound, if memory prevents the best distribution of
layers."""

Kind = tuple[int, float]
"""The properties of a group that matter: its degree, and the speed of its slowest device."""


class _Laid(msgspec.Struct, frozen=True):
    """A pipeline under construction: its groups in order, and the number of layers of each."""

    kinds: tuple[Kind, ...]
    counts: tuple[int, ...]


def replicas(situation: Situation, prices: Prices, below: float) -> list[Priced] | None:
    """Return the best replicas if an iteration takes them less than `below`; None otherwise.

    Also None if the job is too large, if the devices' memory is unknown, or if nothing has changed.
    """
    if not (
        situation.lost or situation.speeds or situation.links or set(situation.available) - {*situation.base.active}
    ):
        return None
    if situation.memory_bytes is None or len(situation.available) > MAX_DEVICES or situation.chunks > 1:
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
        """Return the replicas of the fastest layout found; None if no layout takes less than `below`.

        The most promising layouts are played first. The search ends when all others must take longer, or enough was
        played.
        """
        best_parts_and_counts: tuple[tuple[tuple[Kind, ...], ...], tuple[int, ...]] | None = None
        for _, parts in self._promising(below):
            if self._slots > MAX_PLAYED_SLOTS:
                break
            time_and_counts = self._share(parts, below)
            if time_and_counts is not None:
                below, best_parts_and_counts = time_and_counts[0], (parts, time_and_counts[1])
        return None if best_parts_and_counts is None else self._named(*best_parts_and_counts)

    def _promising(self, below: float) -> list[tuple[float, tuple[tuple[Kind, ...], ...]]]:
        """Return all ways to form pipelines that could take less than `below`, sorted by an estimate of the iteration
        time."""
        nodes = [
            sorted(set(_runs([self._p(r) for r in ranks], self._degrees))) for _, ranks in sorted(self._by_node.items())
        ]
        all_kinds = {tuple(sorted(itertools.chain(*parts))) for parts in itertools.product(*nodes)}
        seconds_of_parts: dict[tuple[tuple[Kind, ...], ...], float] = {}
        for kinds in sorted(all_kinds, key=lambda kinds: (-_power(kinds), kinds)):
            if not kinds or self._work * self._s.micro_batches / _power(kinds) >= below:
                continue  # too slow even if perfectly balanced
            for parts in _parts(kinds, self._s.most_stages, self._s.micro_batches):
                if parts not in seconds_of_parts:
                    seconds_of_parts[parts] = self._about(parts)
        return sorted((seconds, parts) for parts, seconds in seconds_of_parts.items())

    def _about(self, parts: Sequence[tuple[Kind, ...]]) -> float:
        """Estimate the seconds of an iteration: for each pipeline, its slowest stage per micro-batch, plus all its
        stages once."""
        lines = [self._line(kinds) for kinds in parts]
        counts = shares.lines_split(self._s.micro_batches, lines)
        return max(ramp + m * pace for (ramp, pace), m in zip(lines, counts, strict=True))

    def _line(self, kinds: tuple[Kind, ...]) -> tuple[float, float]:
        """Return the estimated seconds of a pipeline's ramps, and of each micro-batch."""
        line = self._lines.get(kinds)
        if line is None:
            order = tuple(reversed(kinds))
            usual = max(1, self._s.micro_batches * len(kinds) // max(1, len(self._s.available)))
            counts = next(
                layers.trade_offs(self._times, [k * p for k, p in order], self._room(order, usual, self._usual_bytes)),
                None,
            )
            if counts is None:  # memory does not suffice in this order
                pace = TIGHT_MEMORY_FACTOR * self._bottleneck(kinds)
                line = ((len(kinds) - 1) * pace, pace)
            else:
                times = [chunk_times.total for chunk_times in self._shape(_Laid(order, counts))]
                line = (sum(times) - max(times), max(times))
            self._lines[kinds] = line
        return line

    @property
    def _degrees(self) -> tuple[int, ...]:
        powers = {1 << q for q in range(self._s.tp.bit_length())} | {self._s.tp}
        return tuple(k for k in sorted(powers) if k <= self._s.tp and not self._s.model.tensor_parallel_obstacle(k))

    def _share(self, parts: Sequence[tuple[Kind, ...]], below: float) -> tuple[float, tuple[int, ...]] | None:
        """Return the time of an iteration and each pipeline's micro-batches; None if it is not less than `below`."""
        if sum(below // self._bottleneck(kinds) for kinds in parts) < self._s.micro_batches:
            return None
        guess = shares.lines_split(self._s.micro_batches, [self._line(kinds) for kinds in parts])
        clocks = {kinds: (lambda m, kinds=kinds: self._pipeline(kinds, m, len(parts))[0]) for kinds in set(parts)}
        lines = [self._played_line(kinds, m, len(parts)) for kinds, m in zip(parts, guess, strict=True)]
        if shares.lines_done(self._s.micro_batches, lines) >= below * (1 + LINE_TOLERANCE):
            return None
        counts = shares.improved(shares.lines_split(self._s.micro_batches, lines), [clocks[kinds] for kinds in parts])
        seconds = max(clocks[kinds](m) for kinds, m in zip(parts, counts, strict=True))
        return (seconds, counts) if seconds < below else None

    def _played_line(self, kinds: tuple[Kind, ...], m: int, replicas: int) -> tuple[float, float]:
        """Return ramps and pace as `_line` does, but from two played times near `m` micro-batches."""
        begin, laid = self._pipeline(kinds, m, replicas)
        if laid is None:
            return self._line(kinds)
        pace = (self._play([laid], m + len(kinds))[0] - begin) / len(kinds)  # mean over one period
        return begin - m * pace, pace

    def _bottleneck(self, kinds: tuple[Kind, ...]) -> float:
        """Return a lower bound of the time of the slowest stage for one micro-batch."""
        return self._work / _power(kinds)

    def _pipeline(self, kinds: tuple[Kind, ...], m: int, replicas: int) -> tuple[float, _Laid | None]:
        """Return the best pipeline of these groups for `m` micro-batches, and its time, in a layout of `replicas`
        replicas.

        With many micro-batches, the layers are optimised for a rounded number.
        """
        state_bytes = self._s.state_bytes_of(replicas)
        best = self._pipelines.get((kinds, m, state_bytes))
        if best is None:
            rounded_m = _round(m)
            best = (
                self._laid_out(kinds, m, state_bytes) if rounded_m == m else self._pipeline(kinds, rounded_m, replicas)
            )
            if rounded_m != m and best[1] is not None:
                best = self._play([best[1]], m)[0], best[1]
            self._pipelines[kinds, m, state_bytes] = best
        return best

    def _laid_out(self, kinds: tuple[Kind, ...], m: int, state_bytes: int | None) -> tuple[float, _Laid | None]:
        """Return the best pipeline over all orders of the groups, and over the partitions that a hill climb reaches."""
        best: tuple[float, _Laid | None] = (math.inf, None)
        tried: set[_Laid] = set()
        offers = self._first_offers(kinds, m, state_bytes)
        while offers:  # hill climbing, from the best of all to its neighbours
            tried.update(offers)
            seconds = self._play(offers, m)
            ranked = sorted(range(len(offers)), key=seconds.__getitem__)[:BEAM_WIDTH]
            if seconds[ranked[0]] >= best[0]:
                break
            best = (seconds[ranked[0]], offers[ranked[0]])
            neighbours = {neighbour for i in ranked for neighbour in self._nearby(offers[i], m, state_bytes)}
            offers = sorted(neighbours - tried, key=lambda laid: (laid.kinds, laid.counts))
        return best

    def _play(self, laid: Sequence[_Laid], m: int) -> list[float]:
        stages = len(laid[0].kinds)
        self._slots += len(laid) * stages * min(m, 2 * stages)  # further micro-batches add little work
        return self._prices.shapes_seconds([self._shape(pipeline) for pipeline in laid], m)

    def _first_offers(self, kinds: tuple[Kind, ...], m: int, state_bytes: int | None) -> list[_Laid]:
        """Return the pipelines from which the hill climb starts.

        Each kind of group in turn is last, where the head is; the others are sorted by strength, ascending or
        descending.
        """
        offers: dict[_Laid, None] = {}
        for last in sorted(set(kinds)):
            other_kinds = sorted(kinds)
            other_kinds.remove(last)
            for order in ((*other_kinds, last), (*reversed(other_kinds), last)):
                speeds = [k * p for k, p in order]
                for counts in layers.trade_offs(self._times, speeds, self._room(order, m, state_bytes)):
                    offers[_Laid(order, counts)] = None
        return list(offers)

    def _nearby(self, laid: _Laid, m: int, state_bytes: int | None) -> Iterator[_Laid]:
        """Yield the pipelines in which one layer is on another stage, or two neighbouring stages are exchanged."""
        for counts in layers.nearby(laid.counts, self._room(laid.kinds, m, state_bytes)):
            yield _Laid(laid.kinds, counts)
        for s in range(len(laid.kinds) - 1):
            order = [*range(s), s + 1, s, *range(s + 2, len(laid.kinds))]
            neighbour = _Laid(tuple(laid.kinds[i] for i in order), tuple(laid.counts[i] for i in order))
            if all(
                n <= most for n, most in zip(neighbour.counts, self._room(neighbour.kinds, m, state_bytes), strict=True)
            ):
                yield neighbour

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
        limit = self._limits.get(key)
        if limit is None:
            setup = memory.StageSetup(
                stage=s,
                stages=stages,
                tp=k,
                schedule=self._s.schedule,
                micro_batches=m,
                sequence_parallel=self._s.sequence_parallel,
                state_bytes=state_bytes,
            )
            limit = memory.capacity(self._s.model, setup, self._s.room_bytes, self._s.tokens)
            self._limits[key] = limit
        return limit

    # Assignment of real ranks.

    def _named(self, parts: tuple[tuple[Kind, ...], ...], counts: tuple[int, ...]) -> list[Priced]:
        """Return replicas of real ranks: each place gets the ranks that hold most of the layers that the place
        needs."""
        laid = [self._pipeline(kinds, m, len(parts))[1] for kinds, m in zip(parts, counts, strict=True)]
        places = [
            (i, s, kind, span)
            for i, pipeline in enumerate(laid)
            if pipeline is not None
            for s, (kind, span) in enumerate(zip(pipeline.kinds, _spans(pipeline.counts), strict=True))
        ]
        groups = self._groups(sorted(kind for _, _, kind, _ in places))
        kept = np.array(
            [
                [self._kept(ranks, span) if kind == own_kind else -1e9 for ranks, own_kind in groups]
                for _, _, kind, span in places
            ]
        )
        place_indices, group_indices = assigned(kept, maximize=True)
        stages: dict[int, dict[int, Stage]] = defaultdict(dict)
        for place, group in zip(place_indices.tolist(), group_indices.tolist(), strict=True):
            i, s, _, span = places[place]
            stages[i][s] = Stage(groups[group][0], (span,))
        replicas = [Replica(tuple(stage for _, stage in sorted(own.items()))) for own in stages.values()]
        replicas.sort(key=lambda replica: min((*self._held.get(rank, (math.inf,))[:1], rank) for rank in replica.ranks))
        return [self._prices.priced(replica) for replica in replicas]

    def _groups(self, wanted: list[Kind]) -> list[tuple[tuple[int, ...], Kind]]:
        """Return real groups of exactly the kinds `wanted`: the groups of one run of each node's devices."""
        names = sorted(self._by_node)
        options = [[run for run in _named_runs(self._by_node[name], self._p, self._degrees)] for name in names]

        def fit(i: int, missing_kinds: list[Kind]) -> list[tuple[tuple[int, ...], Kind]] | None:
            if i == len(names):
                return [] if not missing_kinds else None
            for run in options[i]:
                still_missing = list(missing_kinds)
                try:
                    for _, kind in run:
                        still_missing.remove(kind)
                except ValueError:
                    continue
                other_groups = fit(i + 1, still_missing)
                if other_groups is not None:
                    return [*run, *other_groups]
            return None

        groups = fit(0, wanted)
        assert groups is not None
        return groups

    def _kept(self, ranks: tuple[int, ...], span: LayerSpan) -> float:
        """Return the number of layers of `span` that the ranks already hold, each weighted by a rank's share of the
        layer."""
        needed = set(range(span[0], span[1] + 1))
        return sum(
            len(needed.intersection(held_state[2].layers)) / len(ranks)
            for rank in ranks
            if (held_state := self._held.get(rank)) is not None
        )

    def _p(self, rank: int) -> float:
        return self._s.speeds.get(rank, 1.0)

    def _order(self, rank: int) -> tuple[float, float, float, int]:
        """Return a sort key of ranks: fast ranks first, equally fast ranks by their stage."""
        place = self._held.get(rank)
        return (-self._p(rank), *(place[:2] if place else (math.inf, math.inf)), rank)


def _runs(speeds: Sequence[float], degrees: Sequence[int]) -> Iterator[tuple[Kind, ...]]:
    """Yield the ways to cut devices, the fastest first, into groups; devices at the end may be left out."""
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
    """Yield ways to distribute groups over at most `pipelines` pipelines of at most `most` stages, some twice."""

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
    """Round a large number of micro-batches down to a power of two, or to 1.5 times a power of two."""
    if micro_batches <= MAX_EXACT_MICRO_BATCHES:
        return micro_batches
    step = 1 << (micro_batches.bit_length() - 2)
    return micro_batches // step * step


def _spans(counts: Sequence[int]) -> list[LayerSpan]:
    ends = list(itertools.accumulate(counts))
    return [(end - count, end - 1) for end, count in zip(ends, counts, strict=True)]
