"""Decides how many layers each stage of a pipeline gets. Pure.

No stage gets more layers than its memory allows. The module considers one pipeline at a time. Called by `tables`, which
stores the result.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import TIME_TOLERANCE, Costs, Floats, Ints, PipeKind
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.pipeline_times import (
    exposed_sums_s,
    play_lower_bound,
    play_pipeline,
    write_stage_seconds,
)


@machine_code
def write_best_partition(count: int, kind: PipeKind, limits: Ints, costs: Costs, offers: int, counts: Ints) -> float:
    """Write the number of layers of each stage into `counts`, such that the pipeline is fast for `count` micro-batches.

    Return its seconds, infinite if memory does not suffice. `limits`: maximum number of layers of each stage. The
    partition is the best of several that may be best for some number of micro-batches (`layouts.layers.trade_offs`),
    improved by moving single layers between stages, most promising move first, as long as that helps.
    """
    speeds = kind.speeds
    stages, layers = speeds.size, costs.sums.shape[1] - 1
    room = 0
    for s in range(stages):
        if limits[s] < 1 or speeds[s] <= 0.0:
            return np.inf
        room += min(limits[s], layers)
    if room < layers or layers < stages:
        return np.inf
    extra = np.zeros(stages)
    layer_s = costs.sums[:, layers].sum() / layers
    extra[0] += costs.ends[0].sum() / layer_s
    extra[stages - 1] += costs.ends[1].sum() / layer_s
    current = np.empty(stages, np.int64)
    bound = write_even_partition(layers, speeds, extra, limits, current)
    best_s = np.inf
    times = np.ones((4, stages))
    for _ in range(offers):
        if write_bounded_partition(bound, layers, speeds, extra, limits, current):
            seconds = pipeline_seconds_or_bound(current, count, kind, costs, best_s, times, True)
            if seconds < best_s:
                best_s = seconds
                counts[:] = current
        further = np.inf
        for s in range(stages):
            fits = int(bound * speeds[s] * (1.0 + TIME_TOLERANCE) - extra[s])
            if fits < limits[s]:
                further = min(further, (fits + 1 + extra[s]) / speeds[s])
        if further == np.inf:
            break
        bound = further
    if best_s == np.inf:
        return best_s
    return improve_partition(count, kind, limits, costs, extra, best_s, times, counts)


@machine_code
def improve_partition(
    count: int,
    kind: PipeKind,
    limits: Ints,
    costs: Costs,
    extra: Floats,
    best_s: float,
    times: Floats,
    counts: Ints,
) -> float:
    """Move single layers between stages, most promising move first, as long as that helps. Return the seconds.

    `extra`: other work of the stages, in units of a layer's time; `best_s`: seconds of the partition in `counts`;
    `times`: work space.
    """
    speeds = kind.speeds
    stages, layers = speeds.size, costs.sums.shape[1] - 1
    layer_s = costs.sums[:, layers].sum() / layers
    current = np.empty(stages, np.int64)
    load, more = np.empty(stages), np.empty(stages)
    while True:
        current[:] = counts
        slowest = 0
        for s in range(stages):
            load[s], more[s] = (current[s] + extra[s]) / speeds[s], (current[s] + 1 + extra[s]) / speeds[s]
            slowest = s if load[s] > load[slowest] else slowest
        best, receiver, below = -1, -1, best_s * (1.0 - TIME_TOLERANCE)
        only = slowest if count * layer_s * load[slowest] >= below else -1
        for give in range(stages):
            for take in range(stages if current[give] > 1 and (only < 0 or give == only) else 0):
                if give == take or current[take] >= limits[take] or count * layer_s * more[take] >= below:
                    continue
                if speeds[take] <= speeds[give] and more[take] > load[give]:
                    continue  # stage `take`, which is not faster, would take longer than `give` does now
                current[give] -= 1
                current[take] += 1
                bound = pipeline_seconds_or_bound(current, count, kind, costs, below, times, False)
                if bound < below:
                    best, receiver, below = give, take, bound
                current[give] += 1
                current[take] -= 1
        if best < 0:
            return best_s
        current[best] -= 1
        current[receiver] += 1
        seconds = pipeline_seconds_or_bound(current, count, kind, costs, best_s, times, True)
        if seconds >= best_s * (1.0 - TIME_TOLERANCE):
            return best_s
        best_s = seconds
        counts[:] = current


@machine_code
def write_bounded_partition(
    bound: float, layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints
) -> bool:
    """Write the partition in which no stage takes longer than `bound`, with as many layers as possible on the fastest
    stages.

    Return whether the layers fit.
    """
    stages = speeds.size
    max_layers = np.empty(stages, np.int64)
    room = 0
    for s in range(stages):
        max_layers[s] = min(limits[s], int(bound * speeds[s] * (1.0 + TIME_TOLERANCE) - extra[s]))
        if max_layers[s] < 1:
            return False
        room += max_layers[s]
        counts[s] = 1
    layers_left = layers - stages
    while layers_left > 0 and room >= layers:
        best = -1
        for s in range(stages):
            if counts[s] < max_layers[s] and (best < 0 or speeds[s] > speeds[best]):
                best = s
        more = min(layers_left, max_layers[best] - 1)
        counts[best] += more
        layers_left -= more
    return layers_left == 0


@machine_code
def write_even_partition(layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints) -> float:
    """Return the shortest possible time of the slowest stage, and write a partition that reaches it into `counts`.

    Layers are added one by one, each to the stage that would finish it first. `extra`: other work of the stages, in
    units of a layer's time.
    """
    bound = paces = 0.0
    outside, layers_left = float(layers), layers
    for s in range(speeds.size):
        outside += extra[s]
        paces += speeds[s]
    for s in range(speeds.size):  # start from the whole layers of a division into fractions
        counts[s] = max(1, min(limits[s], int(outside / paces * speeds[s] * (1.0 - TIME_TOLERANCE) - extra[s])))
        layers_left -= counts[s]
    for s in range(speeds.size):
        counts[s] = counts[s] if layers_left >= 0 else 1
        bound = max(bound, (counts[s] + extra[s]) / speeds[s])
    for _ in range(layers_left if layers_left >= 0 else layers - speeds.size):
        best, first = -1, np.inf
        for s in range(speeds.size):
            then = (counts[s] + 1 + extra[s]) / speeds[s]
            if counts[s] < limits[s] and then < first:
                best, first = s, then
        counts[best] += 1
        bound = max(bound, first)
    return bound


@machine_code
def pipeline_seconds_or_bound(
    counts: Ints, count: int, kind: PipeKind, costs: Costs, below: float, times: Floats, exactly: bool
) -> float:
    """Return the seconds of a pipeline with its gradient sums if `exactly`, else a lower bound.

    Infinite if it cannot be less than `below`. `times`: work space for the stages' times in three rows, and a row of
    ones.
    """
    stages, split = counts.size, costs.split
    f, b, w = times[0], times[1], times[2]
    write_stage_seconds(counts, kind.speeds, costs, f, b, w)
    bound = play_lower_bound(stages, count, f, b, w, kind.late, split)
    if bound >= below:
        return np.inf
    after = exposed_sums_s(counts, w if split else b, kind.layer_sum_s, kind.bucket, times[3], split, costs.parts)
    if bound + after >= below:
        return np.inf
    return (play_pipeline(stages, count, f, b, w, kind.late, split) if exactly else bound) + after
