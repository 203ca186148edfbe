"""How many layers each stage of a replica holds: in proportion to its speed (the paper's layer repartition). Pure.

One replica at a time, so that replicas may differ. The embedding and the head take time like some fraction of a layer,
which counts for the stages that hold them. Which ranks form the stages is not decided here.
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

_SLACK = 1e-9
"""Relative difference below which two times are the same."""

_MOST_TRADE_OFFS = 8
"""Partitions that are looked at between the fastest slowest stage and the smallest sum."""


class Ends(msgspec.Struct, frozen=True):
    """Time of what comes before the first layer and after the last, in layers."""

    embedding: float = 0.0
    head: float = 0.0


def ends_of(times: Profile) -> Ends:
    """Of a profile, in layers of mean duration."""
    layer = sum(layer.total for layer in times.layers) / len(times.layers)
    return Ends(times.embedding.total / layer, times.head.total / layer)


def fitting(layers: int, speeds: Sequence[float], chunks: int = 1) -> tuple[int, ...]:
    """Indices of the stages that can stay when each needs a layer for each of its chunks: the slowest go first."""
    stay = list(range(len(speeds)))
    while len(stay) > 1 and len(stay) * chunks > layers:
        stay.remove(min(stay, key=lambda s: (speeds[s], -s)))
    return tuple(stay)


def slowest(spans: Sequence[Chunks], speeds: Sequence[float], ends: Ends) -> float:
    """Time that the slowest stage needs for one micro-batch one way, in layers of a healthy device."""
    return max(_seconds(s, _count(held), speeds, ends) for s, held in enumerate(spans))


def partition(
    layers: int,
    speeds: Sequence[float],
    *,
    chunks: int = 1,
    ends: Ends | None = None,
    before: Sequence[Chunks] = (),
    limits: Sequence[int] | None = None,
) -> tuple[Chunks, ...]:
    """Layers of each stage, in `chunks` spans each, that make the slowest stage as fast as it can be.

    `speeds` are the stages' in healthy devices. `before` says what each stage holds now, () for one that holds
    nothing; `limits` how many layers each has memory for. Stages hold at least one layer in each chunk. Of the
    partitions that are equally good the one is taken that moves the fewest layers, then the most even one, then that
    which gives more to earlier stages. With several chunks, it is the present partition if that is as good as any,
    else an even cut of each stage's layers. Raises PlanError if there are not enough layers, or too many.
    """
    ends = ends or Ends()
    most = [layers] * len(speeds) if limits is None else list(limits)
    counts = _fastest(layers, speeds, chunks, ends, most)
    bound = max(_seconds(s, n, speeds, ends) for s, n in enumerate(counts)) * (1 + _SLACK)
    if _is_partition(before, layers, len(speeds), chunks) and all(
        _count(held) <= most[s] and _seconds(s, _count(held), speeds, ends) <= bound for s, held in enumerate(before)
    ):
        return tuple(before)
    if chunks == 1:
        counts = _nearest(layers, speeds, ends, before, most, bound)
    return _cut(counts, chunks, ends)


def trade_offs(times: Profile, speeds: Sequence[float], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Partitions that may be best for some number of micro-batches, the one with the fastest slowest stage first.

    What a pipeline takes is about the time of all its stages, and that of the slowest once for each further
    micro-batch. So of each bound on the slowest stage there is one candidate, that with the smallest sum: as many
    layers as the bound allows on the fastest stages. Layers count as equal. Nothing if memory does not suffice.
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
    seen: set[tuple[int, ...]] = set()
    for bound in bounds:
        most = [
            min(limit, int(bound * v * (1 + _SLACK) - x)) for v, x, limit in zip(speeds, extra, limits, strict=True)
        ]
        if min(most) < 1 or sum(most) < layers:
            continue
        counts = [1] * len(speeds)
        left = layers - len(speeds)
        for s in sorted(range(len(speeds)), key=lambda s: (-speeds[s], s)):
            more = min(left, most[s] - 1)
            counts[s] += more
            left -= more
        if tuple(counts) in seen:
            continue
        seen.add(tuple(counts))
        yield tuple(counts)
        if len(seen) == _MOST_TRADE_OFFS:
            return


def nearby(counts: Sequence[int], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Partitions that differ by one layer, taken from one stage and given to another."""
    for a, b in itertools.permutations(range(len(counts)), 2):
        if counts[a] > 1 and counts[b] < limits[b]:
            yield tuple(n - (s == a) + (s == b) for s, n in enumerate(counts))


def _count(held: Chunks) -> int:
    return sum(last - first + 1 for first, last in held)


def _seconds(s: int, count: int, speeds: Sequence[float], ends: Ends) -> float:
    extra = (ends.embedding if s == 0 else 0.0) + (ends.head if s == len(speeds) - 1 else 0.0)
    return (count + extra) / speeds[s]


def _fastest(layers: int, speeds: Sequence[float], chunks: int, ends: Ends, most: list[int]) -> list[int]:
    """Layers of each stage. One layer after the other goes where it is done first: optimal, as layers are equal."""
    counts = [chunks] * len(speeds)
    left = layers - sum(counts)
    if left < 0:
        raise PlanError(f"{layers} layers are too few for {len(speeds)} stages of {chunks} chunks")
    if any(chunks > limit for limit in most) or sum(most) < layers:
        raise PlanError(f"{layers} layers do not fit the memory of {len(speeds)} stages: at most {most}")
    queue = [(_seconds(s, chunks + 1, speeds, ends), s) for s in range(len(speeds)) if most[s] > chunks]
    heapq.heapify(queue)
    for _ in range(left):
        _, s = heapq.heappop(queue)
        counts[s] += 1
        if counts[s] < most[s]:
            heapq.heappush(queue, (_seconds(s, counts[s] + 1, speeds, ends), s))
    return counts


def _nearest(
    layers: int, speeds: Sequence[float], ends: Ends, before: Sequence[Chunks], most: list[int], bound: float
) -> list[int]:
    """Counts within `bound` that move the fewest layers, by dynamic programming from the last stage to the first."""
    held = [set(itertools.chain.from_iterable(range(a, b + 1) for a, b in chunk)) for chunk in before]
    held += [set()] * (len(speeds) - len(held))
    times = [
        [*itertools.takewhile(bound.__ge__, (_seconds(s, n, speeds, ends) for n in range(1, min(layers, limit) + 1)))]
        for s, limit in enumerate(most)
    ]
    room = [*map(len, times)]
    reach = [0, *itertools.accumulate(room)]
    best: list[dict[int, tuple[int, int, int]]] = [{} for _ in speeds]
    after: dict[int, tuple[int, int]] = {layers: (0, 0)}
    for s in reversed(range(len(speeds))):
        here = best[s]
        # Whole numbers, so that equal sums are equal in whatever order they are added.
        uneven = [round((time / bound) ** 2 * 1e9) for time in times[s]]
        # Earlier stages hold at least one layer each and no more than they have room for; so do this and later ones.
        for first in range(max(s, layers - (reach[-1] - reach[s])), min(reach[s], layers - (len(speeds) - s)) + 1):
            moves = 0
            for n in range(1, min(room[s], layers - first) + 1):
                moves += first + n - 1 not in held[s]
                rest = after.get(first + n)
                if rest is None:
                    continue
                value = (moves + rest[0], uneven[n - 1] + rest[1], -n)
                if first not in here or value < here[first]:
                    here[first] = value
        after = {first: (moves, squares) for first, (moves, squares, _) in here.items()}
    counts: list[int] = []
    for stage in best:
        counts.append(-stage[sum(counts)][2])
    return counts


def _cut(counts: Sequence[int], chunks: int, ends: Ends) -> tuple[Chunks, ...]:
    """Spans in pipeline order: the first chunk of every stage, then the second of every stage."""
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
    return tuple(tuple(held) for held in spans)


def _is_partition(before: Sequence[Chunks], layers: int, stages: int, chunks: int) -> bool:
    if len(before) != stages or any(len(held) != chunks for held in before):
        return False
    spans = [held[c] for c in range(chunks) for held in before]
    held = [layer for first, last in spans for layer in range(first, last + 1)]
    return held == list(range(layers)) and all(first <= last for first, last in spans)
