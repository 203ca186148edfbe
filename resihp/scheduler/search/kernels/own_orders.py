"""Decides whether a pipeline gets orders of its own, and which. Pure.

The orders follow rules: a stage begins a ready primitive, within limits on micro-batches and on memory. A pipeline
never gets orders that gain less than `MIN_ORDER_GAIN`. Called by `sharing` and `tables`, and by
`resihp.scheduler.search.pipelines`, which reads the orders of a plan.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import (
    LATE,
    MAX_ALIVE,
    MAX_COUNT,
    RULE,
    STAGES,
    B,
    F,
    Floats,
    Ints,
    Tables,
    W,
)
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.pipeline_times import play_pipeline

MIN_ORDER_GAIN = 1e-3
"""Relative gain above which a pipeline gets orders of its own."""
ORDER_RULES = ((-1, 0.0), (1, 0.5), (2, 0.5))
"""Rules for a pipeline's own orders during a search: `further` of `write_limits`, and `patience` of
`schedule_pipeline`. Many more rules gain only another third of a promille on average (measured)."""
EXTRA_DEPTHS = (-1, 0, 1, 2, 3, 4, 5, 6, 7)
PATIENCE_VALUES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Rules for the orders of a plan, in place of `ORDER_RULES`: each of `EXTRA_DEPTHS` with each of these values."""


@machine_code
def schedule_pipeline(
    stages: int,
    count: int,
    f: Floats,
    b: Floats,
    w: Floats,
    late: Floats,
    split: bool,
    limits: Ints,
    caps: Ints,
    patience: float,
    goal: float,
    order: Ints,
) -> float:
    """Return the seconds of a pipeline if each stage begins a ready primitive, a B before an F before a W.

    Infinite if the time is not less than `goal`. Unless `order` is empty, each primitive is written into `order`
    (stages, primitives) as 3 times the micro-batch plus 0, 1 or 2 for F, B or W. `limits`: maximum number of
    micro-batches of each stage between F and B; `caps`: maximum between F and W. A W does not begin if another
    primitive arrives before the share `patience` of it would have passed. In each step, the stage that can begin first
    begins: by then, every input that arrives before that moment has been sent.
    """
    forth, back = np.full((stages, count + 1), np.inf), np.full((stages, count + 1), np.inf)
    done = np.zeros((stages, 3), np.int64)
    end, start, next_kind = np.zeros(stages), np.full(stages, np.inf), np.zeros(stages, np.int64)
    remaining_s = np.empty(stages)
    write_remaining_seconds(count, f, b, w, late, split, remaining_s)
    forth[0, :count] = 0.0
    start[0] = 0.0
    last = 0.0
    for _ in range(stages * count * (3 if split else 2)):
        s = first_stage_to_start(stages, start)
        kind, m = next_kind[s], done[s, next_kind[s]]
        duration = f[s] if kind == 0 else b[s] if kind == 1 else w[s]
        at = start[s] + duration
        remaining_s[s] -= duration
        if at + remaining_s[s] >= goal:
            return np.inf
        if order.size:
            order[s, done[s].sum()] = 3 * m + kind
        done[s, kind] += 1
        end[s] = at
        last = max(last, at)
        low, high = s, s + 1
        if kind == 0:
            if s + 1 < stages:
                forth[s + 1, m] = at + late[s]
                high = s + 2
            else:
                back[s, m] = at
        elif kind == 1 and s > 0:
            back[s - 1, m] = at + late[s - 1]
            low = s - 1
        for i in range(low, high):
            begun_count, now = done[i, 0], end[i]
            b_at = back[i, done[i, 1]]
            alive_count = begun_count - done[i, 2 if split else 1]
            f_at = forth[i, begun_count] if begun_count - done[i, 1] < limits[i] and alive_count < caps[i] else np.inf
            if split and done[i, 2] < done[i, 1] and min(b_at, f_at) > now + patience * w[i]:
                next_kind[i], start[i] = 2, now
            elif b_at <= max(f_at, now):
                next_kind[i], start[i] = 1, max(b_at, now)
            else:
                next_kind[i], start[i] = 0, max(f_at, now)
    return last


@machine_code
def write_remaining_seconds(
    count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool, remaining_s: Floats
) -> None:
    """Write a lower bound of the remaining seconds into `remaining_s`, for each stage: all of its work.

    If W is not separate, the backward passes of the stages before it, which come after that work, are added.
    """
    before = 0.0
    for s in range(remaining_s.size):
        remaining_s[s] = count * (f[s] + b[s] + (w[s] if split else 0.0)) + before
        before += 0.0 if split else b[s] + late[s]


@machine_code
def first_stage_to_start(stages: int, start: Floats) -> int:
    """Return the stage with the earliest possible start."""
    first = 0
    for i in range(1, stages):
        if start[i] < start[first]:
            first = i
    return first


@machine_code
def write_limits(stages: int, count: int, further: int, limits: Ints) -> None:
    """Write 1F1B's limits on micro-batches between F and B, plus `further`, into `limits`; no limit if `further` is
    negative."""
    for s in range(stages):
        limits[s] = count if further < 0 else stages - s + further


@machine_code
def schedule_lower_bound(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Return a lower bound of `schedule_pipeline` under any rules.

    Every stage waits for its first forward, and its last backward pass then passes all stages before it.
    """
    forth = both = bound = 0.0
    for s in range(stages):
        work = count * (f[s] + b[s])
        bound = max(bound, both + work, forth + work + count * w[s] if split else 0.0)
        forth += f[s] + late[s]
        both += f[s] + b[s] + 2.0 * late[s]
    return bound


@machine_code
def lower_bound_line(stages: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> tuple[float, float]:
    """Return the line of `schedule_lower_bound` for the stage with most work per micro-batch: its ramp and its pace."""
    forth = both = ramp = pace = 0.0
    for s in range(stages):
        work, before = f[s] + b[s], both
        if split:
            work, before = work + w[s], forth
        if work > pace:
            ramp, pace = before, work
        forth += f[s] + late[s]
        both += f[s] + b[s] + 2.0 * late[s]
    return ramp, pace


@machine_code
def pipeline_seconds(row: int, count: int, tables: Tables, split: bool, own: bool) -> float:
    """Return the seconds of a pipeline for `count` micro-batches, from the tables or by playing it."""
    if count > tables.row[row, MAX_COUNT] or count >= tables.times.shape[1]:
        return np.inf
    seconds_found: float = tables.times[row, count]
    if seconds_found > 0.0:
        return seconds_found
    stages, f, b, w = tables.row[row, STAGES], tables.stage_s[row, F], tables.stage_s[row, B], tables.stage_s[row, W]
    late = tables.stage_s[row, LATE]
    seconds_found = play_pipeline(stages, count, f, b, w, late, split)
    best = tables.row[row, RULE]
    if own and stages > 1 and best >= 0:
        goal = seconds_found * (1.0 - MIN_ORDER_GAIN)
        enough = schedule_lower_bound(stages, count, f, b, w, late, split) * (1.0 + MIN_ORDER_GAIN)
        if enough < goal:
            no_order = np.empty((0, 0), np.int64)
            limits = np.empty(stages, np.int64)
            caps = tables.stage[row, MAX_ALIVE]
            for i, (further, patience) in enumerate(ORDER_RULES):
                if goal > enough and (best == 0 or best == i + 1):
                    write_limits(stages, count, further, limits)
                    seconds = schedule_pipeline(
                        stages, count, f, b, w, late, split, limits, caps, patience, goal, no_order
                    )
                    if seconds < goal:
                        seconds_found = goal = seconds
                        tables.row[row, RULE] = i + 1
        if tables.row[row, RULE] == 0:
            tables.row[row, RULE] = -1
    tables.times[row, count] = seconds_found
    return seconds_found


@machine_code
def write_best_order(row: int, count: int, tables: Tables, split: bool, own: bool, order: Ints) -> tuple[float, bool]:
    """Return the seconds of a pipeline in its best own orders, and True; the orders are written as by
    `schedule_pipeline`.

    If the schedule's orders are as good, return their seconds and False.
    """
    stages, f, b, w = tables.row[row, STAGES], tables.stage_s[row, F], tables.stage_s[row, B], tables.stage_s[row, W]
    late = tables.stage_s[row, LATE]
    schedule_s = play_pipeline(stages, count, f, b, w, late, split)
    best, is_better = schedule_s * (1.0 - MIN_ORDER_GAIN), False
    candidate, limits = np.empty_like(order), np.empty(stages, np.int64)
    for further in EXTRA_DEPTHS:
        write_limits(stages, count, further, limits)
        for patience in PATIENCE_VALUES:
            if own and stages > 1 and (split or patience == 0.0):
                caps = tables.stage[row, MAX_ALIVE]
                seconds = schedule_pipeline(
                    stages, count, f, b, w, late, split, limits, caps, patience, best, candidate
                )
                if seconds < best:
                    best, is_better = seconds, True
                    order[:] = candidate
    return (best if is_better else schedule_s), is_better
