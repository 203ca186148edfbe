"""Seconds of a pipeline under 1F1B and zero-bubble, and of its stages and gradient sums. Pure.

`resihp.pipeline.timeline` defines the meaning of an order, and the times here equal those of the timeline up to
rounding. `play_pipeline` walks through the orders of 1F1B and zero-bubble (`resihp.pipeline.schedules`) in a sequence
in which all predecessors of a primitive come earlier. The module never chooses layers or orders. Called by
`partitions`, `own_orders`, `tables` and `layouts`.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import Costs, Floats, Ints
from resihp.scheduler.search.kernels.compilation import machine_code


@machine_code
def play_pipeline(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Return the seconds of a pipeline for `count` micro-batches under 1F1B, or under ZB-H1 if `split`.

    `f`, `b`, `w`: seconds of F, B and W on each stage; without `split`, `b` includes the weight gradients. `late[s]`:
    the transfer from stage s to the next stage, or back.

    In turn t, stage s begins the forward of micro-batch t, and then the backward of micro-batch t - (stages - 1 - s).
    The predecessor of that backward, on stage s + 1, was done in the turn before. If a turn delays all stages by the
    same time, the following turns do so, too, as long as there are further forwards.
    """
    end, sent, before = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    t = -1
    while t + 1 < count + stages - 1:
        t += 1
        arrived = 0.0
        for s in range(stages):
            at = end[s]
            if t < count:
                at = max(at, arrived) + f[s]
                arrived = at + late[s]
            m = t - (stages - 1 - s)
            if 0 <= m < count:
                if s + 1 < stages:
                    at = max(at, sent[s + 1] + late[s])
                at += b[s]
                sent[s] = at
                if split and m >= s:
                    at += w[s]
            end[s] = at
        if stages <= t < count - 1:
            pace = end[0] - before[0]
            steady = True
            for s in range(1, stages):
                if abs(end[s] - before[s] - pace) > 1e-12 * end[s]:
                    steady = False
                    break
            if steady:
                for s in range(stages):
                    end[s] += (count - 1 - t) * pace
                    sent[s] += (count - 1 - t) * pace
                t = count - 1
        for s in range(stages):
            before[s] = end[s]
    last = 0.0
    for s in range(stages):
        at = end[s]
        if split:
            for _ in range(min(s, count)):
                at += w[s]
        last = max(last, at)
    return last


@machine_code
def play_lower_bound(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Return a lower bound of `play_pipeline`.

    Every stage waits for its first forward, and for its first backward once no further forward comes before it; and its
    last backward pass then passes all stages before it.
    """
    beyond = 0.0
    for s in range(stages):
        beyond += f[s] + b[s] + 2.0 * late[s]
    forth = both = best_bound = 0.0
    for s in range(stages):
        beyond -= f[s] + b[s]
        ahead = min(stages - 1 - s, count - 1)
        work = count * (f[s] + b[s]) + max(0.0, beyond - ahead * f[s])
        beyond -= 2.0 * late[s]
        if split:
            best_bound = max(best_bound, forth + work + count * w[s], both + work + max(0, count - 1 - s) * w[s])
        else:
            best_bound = max(best_bound, both + work)
        forth += f[s] + late[s]
        both += f[s] + b[s] + 2.0 * late[s]
    return best_bound


@machine_code
def write_stage_seconds(counts: Ints, speeds: Floats, costs: Costs, f: Floats, b: Floats, w: Floats) -> None:
    """Write the seconds of each stage for one micro-batch into `f`, `b` and `w`."""
    sums, ends = costs.sums, costs.ends
    first, layers = 0, sums.shape[1] - 1
    for s in range(counts.size):
        after = first + counts[s]
        f_s = sums[0, after] - sums[0, first]
        b_s = sums[1, after] - sums[1, first]
        w_s = sums[2, after] - sums[2, first]
        if first == 0:
            f_s, b_s, w_s = f_s + ends[0, 0], b_s + ends[0, 1], w_s + ends[0, 2]
        if after == layers:
            f_s, b_s, w_s = f_s + ends[1, 0], b_s + ends[1, 1], w_s + ends[1, 2]
        f[s], b[s], w[s] = f_s / speeds[s], b_s / speeds[s], w_s / speeds[s]
        if not costs.split:
            b[s] += w[s]
        first = after


@machine_code
def exposed_sums_s(
    counts: Ints, work: Floats, layer_sum_s: Floats, bucket: Ints, slowed: Floats, split: bool, parts: int
) -> float:
    """Return the seconds of a pipeline's gradient sums after its last backward pass
    (`resihp.scheduler.cost.gradient_sync`).

    `work`: seconds of computation of each stage during which gradients are summed; `slowed`: factor on the time of each
    stage's sums.
    """
    longest = earlier = 0.0
    for s in range(counts.size):
        layers = counts[s]
        part_count = max(1, layers // max(-(-layers // parts), bucket[s]))
        seconds = layers * layer_sum_s[s] * slowed[s]
        remaining = max(seconds / part_count, seconds - work[s] * (part_count - 1) / part_count)
        longest = max(longest, remaining - earlier)
        if not split:
            earlier += work[s]
    return longest
