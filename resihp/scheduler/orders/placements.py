"""Which stage holds which layers, for layers of different times: routes over stages, and how to cut along one. Pure.

A *route* names the stage of each virtual stage, in the order in which a micro-batch passes them: (0, 1, 0, 1) is
Megatron's interleaving of two stages with two chunks each, (0, 1, 1, 0) a V. A *cut* says how many layers each virtual
stage holds. What a cut costs an iteration is the timeline's to say; here counts only how evenly it loads the stages.

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

_SLACK = 1e-9
"""Relative difference below which two times are the same."""


def routes(stages: int, layers: int, most_chunks: int) -> Iterator[Route]:
    """Regular routes: 1 to `most_chunks` rounds over the stages, all the same way or to and fro.

    And those in which the last stage, which has the head, takes part in the last rounds only.
    """
    seen: set[Route] = set()
    for rounds in range(1, most_chunks + 1):
        for absent in range(rounds if stages > 1 else 1):
            for to_and_fro in (False, True) if rounds > 1 and stages > 1 else (False,):
                route: list[int] = []
                for r in range(rounds):
                    way = range(stages - (r < absent))
                    route += reversed(way) if to_and_fro and (rounds - 1 - r) % 2 else way
                if len(route) <= layers and tuple(route) not in seen:
                    seen.add(tuple(route))
                    yield tuple(route)


def chunks_of(route: Route, cut: Cut, stages: int) -> tuple[tuple[LayerSpan, ...], ...]:
    """Spans of layers of each stage."""
    held: list[list[LayerSpan]] = [[] for _ in range(stages)]
    first = 0
    for s, count in zip(route, cut, strict=True):
        held[s].append((first, first + count - 1))
        first += count
    return tuple(tuple(spans) for spans in held)


class Loads:
    """Times of the stages of one pipeline for one micro-batch, all of F, B and W, at their groups' speeds."""

    def __init__(self, profile: Profile, speeds: Sequence[float]) -> None:
        self.layers, self.speeds = len(profile.layers), tuple(speeds)
        items = [profile.span(i, i).total for i in range(self.layers)]
        self._sums = [0.0, *itertools.accumulate(items)]
        self._known: dict[Route, Cut] = {}
        """The fastest cuts along routes of one chunk a stage."""

    def chunk(self, first: int, last: int) -> float:
        """Time of layers `first` to `last` at speed 1, with the embedding and the head where they belong to these."""
        return self._sums[last + 1] - self._sums[first]

    def slowest(self, route: Route, cut: Cut) -> float:
        """Time of the slowest stage."""
        return self._badness(route, cut)[0]

    def balanced(self, route: Route, cut: Cut | None = None, full: frozenset[int] = frozenset()) -> Cut:
        """A cut along `route` whose slowest stage is as fast as can be found, then one as even as can be.

        Where each stage has one chunk, the best there is, by dynamic programming. Else layers go from one virtual stage
        to another as long as that helps: from an even cut, towards chunks of one size; or from `cut`, with no regard to
        the sizes of chunks. `full`: virtual stages that get no more. Raises PlanError if there are too few layers.
        """
        if len(route) > self.layers:
            raise PlanError(f"{self.layers} layers are too few for {len(route)} virtual stages")
        if len(set(route)) == len(route):
            if route not in self._known:
                self._known[route] = self._fastest(route)
            return self._known[route]
        found = cut or self._even(len(route))
        counted = 3 if cut is None else 2
        least = self._badness(route, found)[:counted]
        while True:
            best = found
            for a, b in itertools.permutations(range(len(route)), 2):
                if found[a] > 1 and b not in full:
                    other = moved(found, a, b)
                    badness = self._badness(route, other)[:counted]
                    if badness < least:
                        least, best = badness, other
            if best is found:
                return found
            found = best

    def quick_to_fill(self, route: Route) -> Cut:
        """A cut whose stages get one layer at first, so that the last of them does not wait long for its first work."""
        firsts = {s: v for v, s in reversed([*enumerate(route)])}
        later = [v for v, s in enumerate(route) if firsts[s] != v]
        if not later:
            return self.balanced(route)
        found = [1] * len(route)
        for i in range(self.layers - len(route)):
            found[later[i % len(later)]] += 1
        return self.balanced(route, tuple(found), frozenset(firsts.values()))

    def _even(self, parts: int) -> Cut:
        return tuple(self.layers // parts + (v < self.layers % parts) for v in range(parts))

    def _badness(self, route: Route, cut: Cut) -> tuple[float, float, float]:
        """Of the slowest stage, of all stages, of all chunks."""
        loads = [0.0] * len(self.speeds)
        squares, first = 0.0, 0
        for s, count in zip(route, cut, strict=True):
            seconds = (self._sums[first + count] - self._sums[first]) / self.speeds[s]
            first += count
            loads[s] += seconds
            squares += seconds * seconds
        # Rounded, so that sums that are equal but for the order of their terms are equal.
        return tuple(float(f"{x:.9g}") for x in (max(loads), sum(x * x for x in loads), squares))  # type: ignore[return-value]

    def _fastest(self, route: Route) -> Cut:
        """Dynamic programming over (stage, first layer): least bottleneck, then least sum of squares."""
        after: dict[int, tuple[float, float, Cut]] = {self.layers: (0.0, 0.0, ())}
        for v in reversed(range(len(route))):
            here: dict[int, tuple[float, float, Cut]] = {}
            for first in range(v, self.layers - (len(route) - 1 - v)):
                for end, (slowest, squares, cut) in after.items():
                    if end <= first:
                        continue
                    seconds = self.chunk(first, end - 1) / self.speeds[route[v]]
                    worst = max(slowest, float(f"{seconds:.9g}"))
                    if first in here and worst > here[first][0]:
                        continue
                    entry = (
                        worst,
                        float(f"{squares + seconds * seconds:.9g}"),
                        (end - first, *cut),
                    )
                    if first not in here or entry < here[first]:
                        here[first] = entry
            after = here
        return after[0][2]


def moved(cut: Cut, a: int, b: int) -> Cut:
    """A layer more for virtual stage b, one less for a; the layers of those between shift."""
    found = list(cut)
    found[a] -= 1
    found[b] += 1
    return tuple(found)
