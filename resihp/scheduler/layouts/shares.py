"""How many micro-batches each replica computes: so that the last one to finish is done as early as it can be. Pure.

Replicas are known here only by how long they take for a number of micro-batches.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Sequence

from resihp.errors import PlanError

Seconds = Callable[[int], float]
"""Time of a replica for so many micro-batches; never less for more."""


def estimate(stages: int, slowest: float) -> Seconds:
    """Of a pipeline without gaps but those of filling and draining it: (m + stages - 1) times its slowest stage."""
    return lambda m: (m + stages - 1) * slowest


def split(micro_batches: int, replicas: Sequence[Seconds]) -> tuple[int, ...]:
    """Micro-batches of each replica, at least one, that minimise the longest of their times; exactly.

    One after the other goes where it is done first. Equal replicas get what `resihp.parallelism.plan.spread` gives
    them. Raises PlanError when a replica would get none.
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
    """The same minimum, from a guess: for times that are costly to know, it asks for few of them.

    The replica that takes longest gives one away as long as somebody finishes it earlier. If nobody does, no other
    distribution is better: the longest would have to get fewer there, and somebody else more. Replicas that are
    equal should be the same object: they are asked once.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for d, (seconds, m) in enumerate(zip(replicas, counts, strict=True)):
        alike.setdefault((id(seconds), m), []).append(d)  # ascending
    now = list(counts)
    while True:
        times = {key: replicas[members[0]](key[1]) for key, members in alike.items()}
        longest = max(times.values())
        last = max(alike[key][-1] for key, time in times.items() if time == longest)
        more: dict[int, float] = {}
        for members in alike.values():
            others = [d for d in members[:2] if d != last]
            if others:
                more[others[0]] = replicas[others[0]](now[others[0]] + 1)
        to = min(more, key=lambda d: (more[d], d), default=last)
        if now[last] == 1 or to == last or more[to] >= longest * (1 - 1e-12):
            return tuple(now)
        for d, step in ((last, -1), (to, 1)):
            key = (id(replicas[d]), now[d])
            alike[key].remove(d)
            if not alike[key]:
                del alike[key]
            now[d] += step
            insort(alike.setdefault((id(replicas[d]), now[d]), []), d)


Line = tuple[float, float]
"""Seconds of a replica's ramps, and of each micro-batch."""


def lines_done(micro_batches: int, lines: Sequence[Line]) -> float:
    """When replicas of these times were done if micro-batches could be shared out in parts."""
    return (micro_batches + sum(ramp / pace for ramp, pace in lines)) / sum(1.0 / pace for _, pace in lines)


def lines_split(micro_batches: int, lines: Sequence[Line]) -> tuple[int, ...]:
    """As `split`, for many micro-batches: begins where all are done at once. At least as many as there are replicas."""
    done = lines_done(micro_batches, lines)
    counts = [max(1, int((done - ramp) / pace)) for ramp, pace in lines]
    while (left := micro_batches - sum(counts)) != 0:
        if left > 0:
            counts[min(range(len(lines)), key=lambda d: lines[d][0] + (counts[d] + 1) * lines[d][1])] += 1
        else:
            more = [d for d, m in enumerate(counts) if m > 1]
            counts[max(more, key=lambda d: lines[d][0] + counts[d] * lines[d][1])] -= 1
    return tuple(counts)


def contiguous(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Shares of the global batch, one after the other."""
    shares: list[tuple[int, ...]] = []
    first = 0
    for count in counts:
        shares.append(tuple(range(first, first + count)))
        first += count
    return tuple(shares)
