"""Number of layers of each stage of a replica, in proportion to its speed (the paper's layer repartition). Pure.

Each replica is partitioned separately, so replicas may differ. Embedding and head count as fractions of a layer on the
stages that hold them. The module never decides which ranks form the stages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import msgspec

from resihp.errors import PlanError
from resihp.parallelism.layout import LayerSpan
from resihp.scheduler.cost.profile import Profile

Chunks = tuple[LayerSpan, ...]

_TIME_TOLERANCE = 1e-9
"""Relative difference below which two times count as equal."""

_MAX_TRADE_OFFS = 8
"""Maximum number of partitions considered between the one with the fastest slowest stage and the one with the least
total time."""


class Ends(msgspec.Struct, frozen=True):
    """Time of the embedding and of the head, in units of a layer's time."""

    embedding: float = 0.0
    head: float = 0.0


def ends_of(times: Profile) -> Ends:
    """Return the times of embedding and head in a profile, in units of the mean layer's time."""
    layer = sum(layer.total for layer in times.layers) / len(times.layers)
    return Ends(times.embedding.total / layer, times.head.total / layer)


def fitting(layers: int, speeds: Sequence[float], chunks: int = 1) -> tuple[int, ...]:
    """Return the indices of the stages that remain if each stage needs one layer per chunk; the slowest are dropped
    first."""
    stay = list(range(len(speeds)))
    while len(stay) > 1 and len(stay) * chunks > layers:
        stay.remove(min(stay, key=lambda s: (speeds[s], -s)))
    return tuple(stay)


def slowest(spans: Sequence[Chunks], speeds: Sequence[float], ends: Ends) -> float:
    """Return the time of the slowest stage for one micro-batch, in units of a layer's time on a healthy device."""
    return max(_seconds(s, _count(chunks), speeds, ends) for s, chunks in enumerate(spans))


def partition(
    layers: int,
    speeds: Sequence[float],
    *,
    chunks: int = 1,
    ends: Ends | None = None,
    before: Sequence[Chunks] = (),
    limits: Sequence[int] | None = None,
) -> tuple[Chunks, ...]:
    """Return the layers of each stage, in `chunks` spans each, that make the slowest stage as fast as possible.

    `speeds`: speed of each stage in healthy devices. `before`: the layers that each stage holds now, () for none.
    `limits`: the number of layers that each stage has memory for. Every chunk gets at least one layer. Among equally
    good partitions, the one that moves the fewest layers is chosen, then the most even one, then the one with more
    layers on earlier stages. With several chunks, the present partition is kept if none is better; otherwise each
    stage's layers are cut evenly. Raises PlanError if there are too few layers, or too many for the memory.
    """
    ends = ends or Ends()
    max_counts = [layers] * len(speeds) if limits is None else list(limits)
    counts = _fastest(layers, speeds, chunks, ends, max_counts)
    bound = max(_seconds(s, n, speeds, ends) for s, n in enumerate(counts)) * (1 + _TIME_TOLERANCE)
    if _is_partition(before, layers, len(speeds), chunks) and all(
        _count(spans) <= max_counts[s] and _seconds(s, _count(spans), speeds, ends) <= bound
        for s, spans in enumerate(before)
    ):
        return tuple(before)
    if chunks == 1:
        counts = _nearest(layers, speeds, ends, before, max_counts, bound)
    return _cut(counts, chunks, ends)


def trade_offs(times: Profile, speeds: Sequence[float], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield partitions that may be best for some number of micro-batches, the one with the fastest slowest stage first.

    A pipeline takes about the time of all its stages, plus the time of the slowest stage for each further micro-batch.
    So for each bound on the slowest stage, one partition is a candidate: the one with the least total time, which puts
    as many layers on the fastest stages as the bound allows. All layers count as equal. Yields nothing if memory does
    not suffice.
    """
    layers, ends = len(times.layers), ends_of(times)
    limits = [min(limit, layers) for limit in limits]
    extra = [
        (ends.embedding if s == 0 else 0.0) + (ends.head if s == len(speeds) - 1 else 0.0) for s in range(len(speeds))
    ]
    if any(limit < 1 for limit in limits) or sum(limits) < layers or layers < len(speeds) or min(speeds) <= 0:
        return
    bounds = sorted(
        {(n + x) / v for v, x, limit in zip(speeds, extra, limits, strict=True) for n in range(1, limit + 1)}
    )
    yielded: set[tuple[int, ...]] = set()
    for bound in bounds:
        max_counts = [
            min(limit, int(bound * v * (1 + _TIME_TOLERANCE) - x))
            for v, x, limit in zip(speeds, extra, limits, strict=True)
        ]
        if min(max_counts) < 1 or sum(max_counts) < layers:
            continue
        counts = [1] * len(speeds)
        layers_left = layers - len(speeds)
        for s in sorted(range(len(speeds)), key=lambda s: (-speeds[s], s)):
            more = min(layers_left, max_counts[s] - 1)
            counts[s] += more
            layers_left -= more
        if tuple(counts) in yielded:
            continue
        yielded.add(tuple(counts))
        yield tuple(counts)
        if len(yielded) == _MAX_TRADE_OFFS:
            return


def nearby(counts: Sequence[int], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the partitions in which one layer has moved from one stage to another."""
    for a, b in itertools.permutations(range(len(counts)), 2):
        if counts[a] > 1 and counts[b] < limits[b]:
            yield tuple(n - (s == a) + (s == b) for s, n in enumerate(counts))


def _count(chunks: Chunks) -> int:
    return sum(last - first + 1 for first, last in chunks)


def _seconds(s: int, count: int, speeds: Sequence[float], ends: Ends) -> float:
    extra = (ends.embedding if s == 0 else 0.0) + (ends.head if s == len(speeds) - 1 else 0.0)
    return (count + extra) / speeds[s]


def _fastest(layers: int, speeds: Sequence[float], chunks: int, ends: Ends, max_counts: list[int]) -> list[int]:
    """Return the number of layers of each stage that minimises the slowest stage's time; optimal if layers are equal.

    Layers are added one by one, each to the stage that would finish it first.
    """
    counts = [chunks] * len(speeds)
    layers_left = layers - sum(counts)
    if layers_left < 0:
        raise PlanError(f"{layers} layers are too few for {len(speeds)} stages of {chunks} chunks")
    if any(chunks > limit for limit in max_counts) or sum(max_counts) < layers:
        raise PlanError(f"{layers} layers do not fit the memory of {len(speeds)} stages: at most {max_counts}")
    queue = [(_seconds(s, chunks + 1, speeds, ends), s) for s in range(len(speeds)) if max_counts[s] > chunks]
    heapq.heapify(queue)
    for _ in range(layers_left):
        _, s = heapq.heappop(queue)
        counts[s] += 1
        if counts[s] < max_counts[s]:
            heapq.heappush(queue, (_seconds(s, counts[s] + 1, speeds, ends), s))
    return counts


def _nearest(
    layers: int, speeds: Sequence[float], ends: Ends, before: Sequence[Chunks], max_counts: list[int], bound: float
) -> list[int]:
    """Return numbers of layers that keep every stage within `bound` and move the fewest layers.

    The method is dynamic programming from the last stage to the first.
    """
    layers_before = [set(itertools.chain.from_iterable(range(a, b + 1) for a, b in chunk)) for chunk in before]
    layers_before += [set()] * (len(speeds) - len(layers_before))
    times = [
        [*itertools.takewhile(bound.__ge__, (_seconds(s, n, speeds, ends) for n in range(1, min(layers, limit) + 1)))]
        for s, limit in enumerate(max_counts)
    ]
    room = [*map(len, times)]
    reach = [0, *itertools.accumulate(room)]
    best: list[dict[int, tuple[int, int, int]]] = [{} for _ in speeds]
    after: dict[int, tuple[int, int]] = {layers: (0, 0)}
    for s in reversed(range(len(speeds))):
        entries = best[s]
        # Whole numbers, so that equal sums are equal in any order of addition.
        uneven = [round((time / bound) ** 2 * 1e9) for time in times[s]]
        # Earlier stages hold at least one layer each and no more than they have room for, and so do this and later
        # stages.
        for first in range(max(s, layers - (reach[-1] - reach[s])), min(reach[s], layers - (len(speeds) - s)) + 1):
            moves = 0
            for n in range(1, min(room[s], layers - first) + 1):
                moves += first + n - 1 not in layers_before[s]
                tail = after.get(first + n)
                if tail is None:
                    continue
                value = (moves + tail[0], uneven[n - 1] + tail[1], -n)
                if first not in entries or value < entries[first]:
                    entries[first] = value
        after = {first: (moves, squares) for first, (moves, squares, _) in entries.items()}
    counts: list[int] = []
    for stage in best:
        counts.append(-stage[sum(counts)][2])
    return counts


def _cut(counts: Sequence[int], chunks: int, ends: Ends) -> tuple[Chunks, ...]:
    """Return the spans of each stage, dealt in pipeline order: the first chunk of every stage, then the second of every
    stage."""
    sizes: list[list[int]] = []
    for s, count in enumerate(counts):
        extra = [0.0] * chunks
        extra[0] += ends.embedding if s == 0 else 0.0
        extra[-1] += ends.head if s == len(counts) - 1 else 0.0
        size = [1] * chunks
        for _ in range(count - chunks):
            size[min(range(chunks), key=lambda c: (size[c] + extra[c], c))] += 1
        sizes.append(size)
    spans: list[list[LayerSpan]] = [[] for _ in counts]
    first = 0
    for c in range(chunks):
        for s, size in enumerate(sizes):
            spans[s].append((first, first + size[c] - 1))
            first += size[c]
    return tuple(tuple(chunk_spans) for chunk_spans in spans)


def _is_partition(before: Sequence[Chunks], layers: int, stages: int, chunks: int) -> bool:
    if len(before) != stages or any(len(all_layers) != chunks for all_layers in before):
        return False
    all_spans = [all_layers[c] for c in range(chunks) for all_layers in before]
    all_layers = [layer for first, last in all_spans for layer in range(first, last + 1)]
    return all_layers == list(range(layers)) and all(first <= last for first, last in all_spans)
