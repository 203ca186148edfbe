"""The best layout by looking at all of them, for a few devices: what the planner is measured against.

All: every way to form tensor-parallel groups of 2^q <= `tp` live devices of one node, or to leave devices out; every
way to make pipelines of at most `pp` + 1 stages of them, in every order; every contiguous partition of the layers that
fits into memory; every distribution of the micro-batches. Equal devices are told apart by nothing, so what differs
only by their names is looked at once; nothing else is left out. Times are the timeline's, for 1F1B.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.pipeline.compiled import CompiledOrders, compile_orders
from resihp.pipeline.schedules import orders_of
from resihp.scheduler.cost import memory
from resihp.scheduler.situation import Situation

Group = tuple[int, float]
"""A tensor-parallel group: degree, and the speed of its slowest device."""


class Exhaustive:
    """One situation; remembers every pipeline that it has looked at."""

    def __init__(self, situation: Situation) -> None:
        assert situation.schedule == "1f1b"
        assert situation.chunks == 1
        self._s = situation
        self._pipelines: dict[tuple[Group, ...], np.ndarray] = {}

    def best_seconds(self) -> float:
        """Predicted time of an iteration of the best layout; infinite if there is none."""
        best = math.inf
        seen: set[tuple[Group, ...]] = set()
        by_node: dict[str, list[float]] = {}
        for rank in self._s.available:
            by_node.setdefault(self._s.nodes[rank], []).append(self._s.speeds.get(rank, 1.0))
        choices = [set(self._groupings(tuple(sorted(p for p in speeds if p > 0)))) for speeds in by_node.values()]
        for parts in itertools.product(*[sorted(choice) for choice in choices]):
            groups = tuple(sorted(itertools.chain(*parts)))
            if groups and groups not in seen:
                seen.add(groups)
                best = self._best_of(groups, best)
        return best

    def _groupings(self, speeds: tuple[float, ...]) -> Iterator[tuple[Group, ...]]:
        """Ways to form groups of some of a node's devices, in ascending order of speed."""
        if not speeds:
            yield ()
            return
        slowest, rest = speeds[0], speeds[1:]
        yield from self._groupings(rest)
        size = 1
        while size <= min(self._s.tp, len(speeds)):
            if self._s.model.tensor_parallel_obstacle(size) is None:
                for others in set(itertools.combinations(rest, size - 1)):
                    left = tuple(sorted((Counter(rest) - Counter(others)).elements()))
                    for more in self._groupings(left):
                        yield tuple(sorted(((size, slowest), *more)))
            size *= 2

    def _best_of(self, groups: tuple[Group, ...], best: float) -> float:
        """The best that can be made of all of these groups, if it is better than `best`."""
        power = sum(size * speed for size, speed in groups)
        times = self._s.times
        work = times.span(0, self._s.model.layers - 1).total * self._s.micro_batches
        if work / power >= best:
            return best  # not even perfectly balanced
        for parts in self._partitions(groups):
            if len(parts) <= self._s.micro_batches:
                best = min(best, self._share([self._pipeline(part) for part in parts], best))
        return best

    def _partitions(self, groups: tuple[Group, ...]) -> Iterator[tuple[tuple[Group, ...], ...]]:
        """Ways to distribute groups over pipelines, each once."""
        seen: set[tuple[tuple[Group, ...], ...]] = set()

        def extend(i: int, parts: list[list[Group]]) -> Iterator[tuple[tuple[Group, ...], ...]]:
            if i == len(groups):
                found = tuple(sorted(tuple(sorted(part)) for part in parts))
                if found not in seen:
                    seen.add(found)
                    yield found
                return
            tried = set()
            for part in parts:
                key = tuple(part)
                if len(part) <= self._s.pp and key not in tried:
                    tried.add(key)
                    part.append(groups[i])
                    yield from extend(i + 1, parts)
                    part.pop()
            parts.append([groups[i]])
            yield from extend(i + 1, parts)
            parts.pop()

        yield from extend(0, [])

    def _share(self, pipelines: list[np.ndarray], best: float) -> float:
        """The smallest longest time over all distributions of the micro-batches; `pipelines[i][m]` of m of them."""
        total = self._s.micro_batches
        if sum(int((table[1:] < best).sum()) for table in pipelines) < total:
            return math.inf
        reach = pipelines[0]
        reach = np.where(np.arange(total + 1) >= 1, reach, math.inf)
        for table in pipelines[1:]:
            after = np.full(total + 1, math.inf)
            for m in range(1, total + 1):
                after[m:] = np.minimum(after[m:], np.maximum(reach[: total + 1 - m], table[m]))
            reach = after
        return float(reach[total])

    def _pipeline(self, groups: tuple[Group, ...]) -> np.ndarray:
        """Least seconds of a pipeline of these groups for 0, 1, ... micro-batches, over all orders and partitions."""
        found = self._pipelines.get(groups)
        if found is None:
            found = np.full(self._s.micro_batches + 1, math.inf)
            for m in range(1, self._s.micro_batches + 1):
                for order in sorted(set(itertools.permutations(groups))):
                    found[m] = min(found[m], self._seconds(order, m))
            self._pipelines[groups] = found
        return found

    def _seconds(self, order: tuple[Group, ...], m: int) -> float:
        layers, stages = self._s.model.layers, len(order)
        limits = [layers] * stages
        if self._s.memory_bytes is not None:
            posts = [
                memory.StageSetup(
                    stage=s, stages=stages, tp=size, micro_batches=m, sequence_parallel=self._s.sequence_parallel
                )
                for s, (size, _) in enumerate(order)
            ]
            limits = [memory.capacity(self._s.model, p, self._s.memory_bytes, self._s.tokens) for p in posts]
        cuts = _compositions(layers, stages)
        cuts = cuts[(cuts <= np.array(limits)).all(axis=1)]
        if not len(cuts):
            return math.inf
        times = self._s.times
        ends = np.cumsum(cuts, axis=1)
        per_layer = np.array([[0.0, 0.0, 0.0], *([t.f, t.b, t.w] for t in times.layers)]).cumsum(axis=0)
        table = per_layer[ends] - per_layer[ends - cuts]  # (cuts, stages, kinds)
        table[:, 0] += (times.embedding.f, times.embedding.b, times.embedding.w)
        table[:, -1] += (times.head.f, times.head.b, times.head.w)
        table = table / np.array([size * speed for size, speed in order])[:, None]
        both = np.stack([table[..., 0], table[..., 1] + table[..., 2]], axis=-1)
        compiled, index = _compiled(stages, m)
        return float(compiled.iteration_seconds(both.reshape(len(cuts), -1).take(index, axis=1)).min())


@cache
def _compositions(layers: int, stages: int) -> np.ndarray:
    """All (n, stages) partitions of the layers, each stage at least one."""
    inner = itertools.combinations(range(1, layers), stages - 1)
    return np.array([np.diff((0, *cut, layers)) for cut in inner], dtype=np.intp).reshape(-1, stages)


@cache
def _compiled(stages: int, m: int) -> tuple[CompiledOrders, np.ndarray]:
    """1F1B, and where each slot finds its seconds in (stages, F or B)."""
    replica = Replica(tuple(Stage((s,), ((s, s),)) for s in range(stages)))
    plan = Plan(epoch=1, layout=Layout((replica,)), assignment=(tuple(range(m)),))
    compiled = compile_orders(plan, orders_of(plan))
    return compiled, compiled.stage * 2 + compiled.kind
