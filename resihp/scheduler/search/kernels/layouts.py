"""Scores of layouts, and copies of layouts. Pure.

The module decides which of two layouts is better. It never changes the groups of a layout. Called by `moves` and
`trials`, and by `resihp.scheduler.search`, which writes the layouts from which a search starts.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import (
    BUCKET,
    EXPOSED,
    LAYER_SUM_S,
    LAYERS,
    ROW,
    SHARE,
    STAGES,
    TIME_TOLERANCE,
    B,
    Ints,
    Job,
    Layouts,
    Tables,
    W,
)
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.pipeline_times import exposed_sums_s
from resihp.scheduler.search.kernels.sharing import share_out
from resihp.scheduler.search.kernels.tables import cut_pipeline, group_number, row_number, slowest_link

DIVISIBLE_WEIGHT = 0.5
"""Weight of the time that an iteration would take if micro-batches were divisible."""


@machine_code
def exposed_over_links_s(job: Job, tables: Tables, layouts: Layouts, k: int) -> float:
    """Return the longest time of a pipeline's gradient sums after its last backward pass, in seconds.

    Each stage sums over its slowest link to a stage of another pipeline that holds some of its layers.
    """
    longest = 0.0
    for d in range(layouts.pipes[k]):
        r, stages = layouts.pipe[k, d, ROW], layouts.pipe[k, d, STAGES]
        slowed = np.ones(stages)
        first = 0
        for s in range(stages):
            after = first + tables.stage[r, LAYERS, s]
            slowest = 1.0
            for e in range(layouts.pipes[k]):
                q = layouts.pipe[k, e, ROW]
                begin = 0
                for u in range(layouts.pipe[k, e, STAGES] if e != d else 0):
                    end = begin + tables.stage[q, LAYERS, u]
                    if begin < after and first < end:
                        slowest = min(
                            slowest, slowest_link(job, tables, layouts.groups[k, d, s], layouts.groups[k, e, u])
                        )
                    begin = end
            slowed[s] = 1.0 / slowest
            first = after
        layers, bucket = tables.stage[r, LAYERS, :stages], tables.stage[r, BUCKET, :stages]
        work, layer_sum_s = tables.stage_s[r, W if job.costs.split else B], tables.stage_s[r, LAYER_SUM_S]
        longest = max(
            longest, exposed_sums_s(layers, work, layer_sum_s, bucket, slowed, job.costs.split, job.costs.parts)
        )
    return longest


@machine_code
def after_s(job: Job, tables: Tables, layouts: Layouts, k: int) -> float:
    """Return the seconds after the last backward pass: the rest of the gradient sums, and the optimizer's step."""
    longest = 0.0
    if job.linked and layouts.pipes[k] > 1:
        longest = exposed_over_links_s(job, tables, layouts, k)
    for d in range(layouts.pipes[k] if layouts.pipes[k] > 1 else 0):
        longest = max(longest, tables.row_s[layouts.pipe[k, d, ROW], EXPOSED])
    return longest + job.step_s


@machine_code
def write_score(job: Job, tables: Tables, layouts: Layouts, k: int, below: float, counts: Ints) -> None:
    """Write the score into `layouts.score`, infinite if memory does not suffice, and the micro-batches of each replica
    into `counts`.

    `below`: a layout that clearly takes longer than this is not examined further, and gets an infinite score.
    """
    pipes = layouts.pipes[k]
    layouts.score[k] = np.inf
    if pipes == 0 or pipes > job.micro_batches:
        return
    rows = layouts.pipe[k, :pipes, ROW]
    after = after_s(job, tables, layouts, k)
    seconds, parts_s = share_out(job.micro_batches, rows, tables, job.costs.split, job.own, below - after, counts)
    layouts.score[k, 0], layouts.score[k, 1] = seconds + after, parts_s + after


@machine_code
def energy(layouts: Layouts, k: int) -> float:
    """Return the energy of a layout for annealing.

    Micro-batches are whole, but part of the energy is the time with divisible ones, so that a faster replica counts
    even if no micro-batch moves.
    """
    return float(DIVISIBLE_WEIGHT * layouts.score[k, 1] + (1.0 - DIVISIBLE_WEIGHT) * layouts.score[k, 0])


@machine_code
def is_better(layouts: Layouts, k: int, than: int) -> bool:
    """Return whether layout `k` is better than layout `than`: by its time, then by its time with divisible
    micro-batches."""
    seconds, other_seconds = layouts.score[k, 0], layouts.score[than, 0]
    if seconds < other_seconds * (1.0 - TIME_TOLERANCE):
        return True
    return bool(seconds <= other_seconds and layouts.score[k, 1] < layouts.score[than, 1] * (1.0 - TIME_TOLERANCE))


@machine_code
def copy_pipeline(layouts: Layouts, a: int, d: int, b: int, e: int) -> None:
    """Copy pipeline `d` of layout `a` to pipeline `e` of layout `b`."""
    for column in range(3):
        layouts.pipe[b, e, column] = layouts.pipe[a, d, column]
    for s in range(layouts.pipe[a, d, STAGES]):
        layouts.groups[b, e, s] = layouts.groups[a, d, s]


@machine_code
def copy_layout(layouts: Layouts, a: int, b: int) -> None:
    layouts.pipes[b] = layouts.pipes[a]
    layouts.score[b] = layouts.score[a]
    for d in range(layouts.pipes[a]):
        copy_pipeline(layouts, a, d, b, d)


@machine_code
def write_layout(
    job: Job, tables: Tables, layouts: Layouts, k: int, sizes: Ints, ranks: Ints, layer_counts: Ints
) -> bool:
    """Write layout `k`, and its score if it is possible. Return whether it is possible.

    `sizes`, `layer_counts`: number of ranks and of layers of each group (pipelines, stages), 0 after the last group. If
    the numbers of layers are 0, the fastest partition is chosen.
    """
    replicas = sizes.shape[0]
    counts = np.zeros(replicas, np.int64)
    layouts.pipes[k] = replicas
    layouts.score[k] = np.inf
    usual = max(1, job.micro_batches // max(1, replicas))
    for d in range(replicas):
        stages = 0
        while stages < sizes.shape[1] and sizes[d, stages] > 0:
            layouts.groups[k, d, stages] = group_number(job, tables, ranks[d, stages], sizes[d, stages])
            stages += 1
        groups = layouts.groups[k, d]
        if layer_counts[d, 0] > 0:
            row = row_number(job, tables, groups, stages, layer_counts[d, :stages], replicas)
        else:
            row = cut_pipeline(job, tables, groups, stages, usual, replicas)
        layouts.pipe[k, d, STAGES], layouts.pipe[k, d, ROW] = stages, row
        if row < 0:
            return False
    write_score(job, tables, layouts, k, np.inf, counts)
    layouts.pipe[k, :replicas, SHARE] = counts
    return True
