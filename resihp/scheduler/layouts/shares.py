"""Number of micro-batches of each replica, such that the last replica finishes as early as possible. Pure.

The only property of a replica used here is its time as a function of the number of micro-batches.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence

from resihp.errors import PlanError

Seconds = Callable[[int], float]
"""Time of a replica as a function of its number of micro-batches; the function never decreases."""


def estimate(stages: int, slowest: float) -> Seconds:
    """Return the time of a pipeline without gaps except fill and drain: (m + stages - 1) times its slowest stage."""
    return lambda m: (m + stages - 1) * slowest


def split(micro_batches: int, replicas: Sequence[Seconds]) -> tuple[int, ...]:
    """Return the number of micro-batches of each replica, at least one, that exactly minimises the longest replica's
    time.

    Micro-batches are given out one by one, each to the replica that would finish it first. Equal replicas get the
    result of `resihp.parallelism.plan.spread`. Raises PlanError if a replica would get none.
    """
    if not replicas or micro_batches < len(replicas):
        raise PlanError(f"{micro_batches} micro-batches an iteration cannot feed {len(replicas)} replicas")
    counts = [1] * len(replicas)
    queue = [(seconds(2), d) for d, seconds in enumerate(replicas)]
    heapq.heapify(queue)
    for _ in range(micro_batches - len(replicas)):
        _, d = queue[0]
        counts[d] += 1
        heapq.heapreplace(queue, (replicas[d](counts[d] + 1), d))
    return tuple(counts)


def improved(counts: Sequence[int], replicas: Sequence[Seconds]) -> tuple[int, ...]:
    """Return the minimum of `split`, starting from the guess `counts`, with few evaluations, which may be expensive.

    The slowest replica gives a micro-batch away as long as another replica would finish it earlier. If no replica
    would, no other distribution is better: in it, the slowest replica would have fewer micro-batches and some other
    replica more. Equal replicas should be the same object, so that their times are evaluated once.
    """
    members_of: dict[tuple[int, int], list[int]] = {}
    for d, (seconds, m) in enumerate(zip(replicas, counts, strict=True)):
        members_of.setdefault((id(seconds), m), []).append(d)  # ascending
    current_counts = list(counts)
    while True:
        times = {key: replicas[members[0]](key[1]) for key, members in members_of.items()}
        longest = max(times.values())
        slowest = max(members_of[key][-1] for key, time in times.items() if time == longest)
        seconds_with_one_more: dict[int, float] = {}
        for members in members_of.values():
            candidates = [d for d in members[:2] if d != slowest]
            if candidates:
                seconds_with_one_more[candidates[0]] = replicas[candidates[0]](current_counts[candidates[0]] + 1)
        receiver = min(seconds_with_one_more, key=lambda d: (seconds_with_one_more[d], d), default=slowest)
        if (
            current_counts[slowest] == 1
            or receiver == slowest
            or seconds_with_one_more[receiver] >= longest * (1 - 1e-12)
        ):
            return tuple(current_counts)
        for d, step in ((slowest, -1), (receiver, 1)):
            key = (id(replicas[d]), current_counts[d])
            members_of[key].remove(d)
            if not members_of[key]:
                del members_of[key]
            current_counts[d] += step
            insort(members_of.setdefault((id(replicas[d]), current_counts[d]), []), d)


Line = tuple[float, float]
"""Seconds of a replica's ramps, and seconds of each micro-batch."""


def lines_done(micro_batches: int, lines: Sequence[Line]) -> float:
    """Return the time at which replicas with these lines would all finish if micro-batches were divisible."""
    return (micro_batches + sum(ramp / pace for ramp, pace in lines)) / sum(1.0 / pace for _, pace in lines)


def lines_split(micro_batches: int, lines: Sequence[Line]) -> tuple[int, ...]:
    """Return the result of `split` for replicas with these lines, quickly even for many micro-batches.

    It starts from the numbers with which all replicas would finish together. Each replica gets at least one
    micro-batch.
    """
    done = lines_done(micro_batches, lines)
    counts = [max(1, int((done - ramp) / pace)) for ramp, pace in lines]
    while (missing := micro_batches - sum(counts)) != 0:
        if missing > 0:
            counts[min(range(len(lines)), key=lambda d: lines[d][0] + (counts[d] + 1) * lines[d][1])] += 1
        else:
            reducible = [d for d, m in enumerate(counts) if m > 1]
            counts[max(reducible, key=lambda d: lines[d][0] + counts[d] * lines[d][1])] -= 1
    return tuple(counts)


def contiguous(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return shares of the global batch with these numbers of micro-batches, one after the other."""
    shares: list[tuple[int, ...]] = []
    first = 0
    for count in counts:
        shares.append(tuple(range(first, first + count)))
        first += count
    return tuple(shares)
