"""Placement of layers with different times on stages: routes over stages, and cuts along a route. Pure.

A *route* names the stage of each virtual stage, in the order in which a micro-batch passes them: (0, 1, 0, 1) is
Megatron's interleaving of two stages with two chunks each, (0, 1, 1, 0) is a V. A *cut* is the number of layers of each
virtual stage. This module considers only how evenly a cut loads the stages; the timeline computes the time of a cut.

Called by `resihp.scheduler.orders.tuner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan
from resihp.scheduler.cost.profile import Profile

Route = tuple[int, ...]
Cut = tuple[int, ...]

_TIME_TOLERANCE = 1e-9
"""Relative difference below which two times count as equal."""


def routes(stages: int, layers: int, most_chunks: int) -> Iterator[Route]:
    """Yield regular routes: 1 to `most_chunks` rounds over the stages, always in one direction or back and forth.

    Routes in which the last stage, which has the head, takes part only in the last rounds are included.
    """
    yielded: set[Route] = set()
    for rounds in range(1, most_chunks + 1):
        for absent in range(rounds if stages > 1 else 1):
            for back_and_forth in (False, True) if rounds > 1 and stages > 1 else (False,):
                route: list[int] = []
                for r in range(rounds):
                    round_stages = range(stages - (r < absent))
                    route += reversed(round_stages) if back_and_forth and (rounds - 1 - r) % 2 else round_stages
                if len(route) <= layers and tuple(route) not in yielded:
                    yielded.add(tuple(route))
                    yield tuple(route)


def chunks_of(route: Route, cut: Cut, stages: int) -> tuple[tuple[LayerSpan, ...], ...]:
    """Return the spans of layers of each stage, for a cut along a route."""
    spans_of_stage: list[list[LayerSpan]] = [[] for _ in range(stages)]
    first = 0
    for s, count in zip(route, cut, strict=True):
        spans_of_stage[s].append((first, first + count - 1))
        first += count
    return tuple(tuple(spans) for spans in spans_of_stage)


class Loads:
    """Time of each stage of a pipeline for one micro-batch (F, B and W together), at its group's speed."""

    def __init__(self, profile: Profile, speeds: Sequence[float]) -> None:
        self.layers, self.speeds = len(profile.layers), tuple(speeds)
        items = [profile.span(i, i).total for i in range(self.layers)]
        self._sums = [0.0, *itertools.accumulate(items)]
        self._known: dict[Route, Cut] = {}
        """The cut with the fastest slowest stage, for each route with one chunk a stage."""

    def chunk(self, first: int, last: int) -> float:
        """Return the time of layers `first` to `last` at speed 1, plus embedding for the first layer and head for the
        last."""
        return self._sums[last + 1] - self._sums[first]

    def slowest(self, route: Route, cut: Cut) -> float:
        """Return the time of the slowest stage for one micro-batch."""
        return self._badness(route, cut)[0]

    def balanced(self, route: Route, cut: Cut | None = None, full: frozenset[int] = frozenset()) -> Cut:
        """Return a cut along `route` that makes the slowest stage as fast as possible, and then is as even as possible.

        With one chunk on each stage, the cut is optimal, by dynamic programming. Otherwise layers move between virtual
        stages as long as that helps, starting from an even cut and towards chunks of equal size, or starting from `cut`
        without regard to the sizes of chunks. Virtual stages in `full` get no more layers. Raises PlanError if there
        are fewer layers than virtual stages.
        """
        if len(route) > self.layers:
            raise PlanError(f"{self.layers} layers are too few for {len(route)} virtual stages")
        if len(set(route)) == len(route):
            if route not in self._known:
                self._known[route] = self._fastest(route)
            return self._known[route]
        current = cut or self._even(len(route))
        counted = 3 if cut is None else 2
        least = self._badness(route, current)[:counted]
        while True:
            best = current
            for a, b in itertools.permutations(range(len(route)), 2):
                if current[a] > 1 and b not in full:
                    neighbour = moved(current, a, b)
                    badness = self._badness(route, neighbour)[:counted]
                    if badness < least:
                        least, best = badness, neighbour
            if best is current:
                return current
            current = best

    def quick_to_fill(self, route: Route) -> Cut:
        """Return a cut with one layer on the first virtual stage of each stage, so that the last stage gets its first
        work early."""
        firsts = {s: v for v, s in reversed([*enumerate(route)])}
        later = [v for v, s in enumerate(route) if firsts[s] != v]
        if not later:
            return self.balanced(route)
        counts = [1] * len(route)
        for i in range(self.layers - len(route)):
            counts[later[i % len(later)]] += 1
        return self.balanced(route, tuple(counts), frozenset(firsts.values()))

    def _even(self, parts: int) -> Cut:
        return tuple(self.layers // parts + (v < self.layers % parts) for v in range(parts))

    def _badness(self, route: Route, cut: Cut) -> tuple[float, float, float]:
        """Return three measures of unevenness: time of the slowest stage, sum of squares over stages, sum of squares
        over chunks."""
        loads = [0.0] * len(self.speeds)
        squares, first = 0.0, 0
        for s, count in zip(route, cut, strict=True):
            seconds = (self._sums[first + count] - self._sums[first]) / self.speeds[s]
            first += count
            loads[s] += seconds
            squares += seconds * seconds
        # Rounded, so that sums that differ only in the order of their terms are equal.
        return tuple(float(f"{x:.9g}") for x in (max(loads), sum(x * x for x in loads), squares))  # type: ignore[return-value]

    def _fastest(self, route: Route) -> Cut:
        """Return the cut with the fastest slowest stage, then the least sum of squares.

        The method is dynamic programming over (virtual stage, first layer).
        """
        after: dict[int, tuple[float, float, Cut]] = {self.layers: (0.0, 0.0, ())}
        for v in reversed(range(len(route))):
            entries: dict[int, tuple[float, float, Cut]] = {}
            for first in range(v, self.layers - (len(route) - 1 - v)):
                for end, (slowest, squares, cut) in after.items():
                    if end <= first:
                        continue
                    seconds = self.chunk(first, end - 1) / self.speeds[route[v]]
                    worst = max(slowest, float(f"{seconds:.9g}"))
                    if first in entries and worst > entries[first][0]:
                        continue
                    entry = (
                        worst,
                        float(f"{squares + seconds * seconds:.9g}"),
                        (end - first, *cut),
                    )
                    if first not in entries or entry < entries[first]:
                        entries[first] = entry
            after = entries
        return after[0][2]


def moved(cut: Cut, a: int, b: int) -> Cut:
    """Return the cut with one layer more on virtual stage b and one less on a; the layers between them shift."""
    counts = list(cut)
    counts[a] -= 1
    counts[b] += 1
    return tuple(counts)
