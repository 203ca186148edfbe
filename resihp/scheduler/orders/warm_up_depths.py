"""1F1B with other numbers of warm-up forwards, found within a millisecond. Pure.

1F1B's own warm-up has one more forward for each stage that follows. If stages differ, this leaves some stages waiting
although they have memory for more micro-batches. Here the order remains 1F1B, because its time takes only microseconds
to compute, and only the number of warm-up forwards (the depth) is raised, for a stage and all stages before it
together. `resihp.scheduler.orders.warm_up` makes and plays orders of any kind. Called by
`resihp.scheduler.orders.refinement` where an answer must not take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.parallelism.plan import Order, Primitive
from resihp.scheduler.cost.prices import Priced

MAX_ROUNDS = 6
"""Maximum number of times that depths are raised."""
MIN_GAIN = 1e-4
"""Relative gain below which more depth is not worth the memory."""


def deepened(priced: Priced, micro_batches: int, most_alive: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """Return the number of warm-up forwards of each stage, at least that of 1F1B, and the resulting time.

    The replica must have one chunk a stage. `most_alive`: the number of micro-batches that each stage has memory for.
    """
    stages = len(priced.shape)
    forward = [times.f for (times,) in priced.shape]
    backward = [times.b + times.w for (times,) in priced.shape]
    late = [priced.late[s][s + 1] for s in range(stages - 1)] if priced.late else [0.0] * (stages - 1)
    max_depths = [micro_batches if room >= micro_batches else room - 1 for room in most_alive]
    depths = [min(stages - 1 - s, micro_batches) for s in range(stages)]
    least_s = _seconds(forward, backward, late, depths, micro_batches)
    for _ in range(MAX_ROUNDS):
        offers = []
        for last in range(stages):
            for more in (1, 2):
                deeper = [min(depth + more, micro_batches) if s <= last else depth for s, depth in enumerate(depths)]
                if deeper != depths and all(depth <= room for depth, room in zip(deeper, max_depths, strict=True)):
                    offers.append((_seconds(forward, backward, late, deeper, micro_batches), deeper))
        if not offers or min(offers)[0] >= least_s * (1.0 - MIN_GAIN):
            break
        least_s, depths = min(offers)
    return tuple(depths), least_s


def order(depth: int, share: Sequence[int]) -> Order:
    """Return the order of a stage: `depth` forwards, then one forward and one backward alternately, then the remaining
    backwards."""
    primitives = [Primitive("F", m) for m in share[:depth]]
    for m, done in zip(share[depth:], share, strict=False):
        primitives += [Primitive("F", m), Primitive("B", done)]
    return (*primitives, *(Primitive("B", m) for m in share[max(0, len(share) - depth) :]))


def _seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    late: Sequence[float],
    depths: Sequence[int],
    micro_batches: int,
) -> float:
    """Return the time by Eq. 2, turn by turn: F of a micro-batch on all stages, then on each stage the B that follows
    it.

    The Bs of a turn go from the last stage to the first. `depths` must not increase from stage to stage, so that the
    predecessors of each B were done in the same turn or earlier.
    """
    stages = len(forward)
    ends = [0.0] * stages
    done: list[list[float]] = [[] for _ in range(stages)]
    backwards = range(stages - 1, -1, -1)
    for turn in range(micro_batches + depths[0]):
        if turn < micro_batches:
            arrival = 0.0
            for s in range(stages):
                now = ends[s]
                if arrival > now:
                    now = arrival
                now += forward[s]
                ends[s] = now
                if s < stages - 1:
                    arrival = now + late[s]
        for s in backwards:
            m = turn - depths[s]
            if m < 0:
                break
            if m >= micro_batches:
                continue
            now = ends[s]
            if s < stages - 1:
                gradient = done[s + 1][m] + late[s]
                if gradient > now:
                    now = gradient
            now += backward[s]
            done[s].append(now)
            ends[s] = now
    return max(ends)
