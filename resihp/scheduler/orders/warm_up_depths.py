"""1F1B with other numbers of warm-up forwards, within a millisecond. Pure.

If stages differ, the schedule's own warm-up, one forward more for each stage behind, leaves some of them waiting that
have memory for more. `resihp.scheduler.orders.warm_up` makes orders of any kind and plays them; here the order remains
that of 1F1B, which takes microseconds to time, and only its depths are raised, those of a stage and of all stages
before it together. Called by `resihp.scheduler.orders.refinement` where an answer must not take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp.parallelism.plan import Order, Primitive
from resihp.scheduler.cost.prices import Priced

MAX_ROUNDS = 6
"""Most times that depths are raised."""
MIN_GAIN = 1e-4
"""Relative gain below which more depth is not worth the memory."""


def deepened(priced: Priced, micro_batches: int, most_alive: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """Return the warm-up forwards of each stage, at least 1F1B's, and the resulting time.

    For replicas of one chunk a stage. `most_alive`: micro-batches that each stage has memory for.
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
    """Return the order of a stage: `depth` forwards, then one forward and one backward in turn, then the remaining
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
    """Compute Eq. 2 turn by turn: F of a micro-batch on all stages, then the B that follows it on each, last stage
    first.

    `depths` do not ascend from stage to stage, so that the predecessors of a B were done in this turn or before.
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
