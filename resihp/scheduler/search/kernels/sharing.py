"""Decides how many micro-batches each pipeline gets. Pure.

The last pipeline ends as early as possible, and no pipeline gets more micro-batches than its memory allows. The module
never changes a pipeline. Called by `layouts`, for the score of a layout.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import MAX_COUNT, PACE, RAMP, TIME_TOLERANCE, Floats, Ints, Tables
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.own_orders import pipeline_seconds


@machine_code
def share_out(
    total: int, rows: Ints, tables: Tables, split: bool, own: bool, below: float, counts: Ints
) -> tuple[float, float]:
    """Write the number of micro-batches of each pipeline into `counts`, such that the last pipeline ends as early as
    possible.

    The sum of `counts` is `total`. Return the end of the last pipeline, and the common end of all pipelines if
    micro-batches were divisible. Both are infinite if memory does not suffice, or if the time is clearly not below
    `below`.

    `rows`: rows of the pipelines in the tables; `own`: whether pipelines may have orders of their own.
    """
    pipes, max_counts = rows.size, tables.row[:, MAX_COUNT]
    usual, begin, slope = np.empty(pipes, np.int64), np.empty(pipes), np.empty(pipes)
    if not write_time_lines(total, rows, tables, split, own, below, usual, begin, slope):
        return np.inf, np.inf
    divisible_s = divisible_seconds(total, rows, max_counts, usual, begin, slope)
    if (
        divisible_s == np.inf
        or divisible_s > below
        or not write_rounded_counts(total, divisible_s, rows, max_counts, usual, begin, slope, counts)
    ):
        return np.inf, np.inf
    ends = np.empty(pipes)
    for d in range(pipes):
        ends[d] = pipeline_seconds(rows[d], counts[d], tables, split, own)
    while True:  # exact: the last pipeline gives a micro-batch away while another finishes it earlier
        last = 0
        for d in range(1, pipes):
            if ends[d] >= ends[last]:
                last = d
        receiver, first = -1, ends[last] * (1.0 - 1e-12)
        for d in range(pipes):
            if d != last and tables.row_s[rows[d], RAMP] + (counts[d] + 1) * slope[d] < first:
                then = pipeline_seconds(rows[d], counts[d] + 1, tables, split, own)
                if then < first:
                    receiver, first = d, then
        if counts[last] == 1 or receiver < 0:
            return ends[last], max(divisible_s, 0.0)
        fewer = pipeline_seconds(rows[last], counts[last] - 1, tables, split, own)
        if fewer >= ends[last]:  # own orders may be slower for fewer micro-batches; prevents endless exchanges
            return ends[last], max(divisible_s, 0.0)
        counts[last] -= 1
        counts[receiver] += 1
        ends[receiver], ends[last] = first, fewer


@machine_code
def write_time_lines(
    total: int,
    rows: Ints,
    tables: Tables,
    split: bool,
    own: bool,
    below: float,
    usual: Ints,
    begin: Floats,
    slope: Floats,
) -> bool:
    """Write a straight line for each pipeline's time: `begin` for `usual` micro-batches, and `slope` for each further
    one.

    Return False if memory does not suffice, or if the time is clearly not below `below`.
    """
    pipes, max_counts = rows.size, tables.row[:, MAX_COUNT]
    done, paces = float(total), 0.0
    for d in range(pipes):
        usual[d] = min(max(1, total // pipes), max_counts[rows[d]])
        slope[d] = tables.row_s[rows[d], PACE]
        if usual[d] < 1 or not (np.isfinite(slope[d]) and slope[d] > 0.0):
            return False
        done += tables.row_s[rows[d], RAMP] / slope[d]
        paces += 1.0 / slope[d]
    for d in range(pipes):  # replace the lower bound by a line through a played time
        if done / paces > below:
            return False
        begin[d] = pipeline_seconds(rows[d], usual[d], tables, split, own)
        done += begin[d] / slope[d] - usual[d] - tables.row_s[rows[d], RAMP] / slope[d]
    return not done / paces > below


@machine_code
def divisible_seconds(total: int, rows: Ints, max_counts: Ints, usual: Ints, begin: Floats, slope: Floats) -> float:
    """Return the common end of all pipelines if micro-batches were divisible.

    Pipelines limited by memory take as many micro-batches as they can, the other pipelines the rest. Infinite if some
    micro-batches remain.
    """
    full = np.zeros(rows.size, np.bool_)
    while True:
        pace = done = 0.0
        remaining = total
        for d in range(rows.size):
            if full[d]:
                remaining -= max_counts[rows[d]]
            else:
                pace += 1.0 / slope[d]
                done += begin[d] / slope[d] - usual[d]
        if pace == 0.0:
            return np.inf if remaining > 0 else (begin + slope).max()
        divisible_s = (remaining + done) / pace
        has_changed = False
        for d in range(rows.size):
            if not full[d] and usual[d] + (divisible_s - begin[d]) / slope[d] > max_counts[rows[d]] + TIME_TOLERANCE:
                full[d] = has_changed = True
        if not has_changed:
            return divisible_s


@machine_code
def write_rounded_counts(
    total: int,
    divisible_s: float,
    rows: Ints,
    max_counts: Ints,
    usual: Ints,
    begin: Floats,
    slope: Floats,
    counts: Ints,
) -> bool:
    """Write whole numbers of micro-batches into `counts`, by the lines of `write_time_lines`.

    Return False if memory does not suffice.
    """
    given = 0
    for d in range(rows.size):
        counts[d] = max(1, min(int(usual[d] + (divisible_s - begin[d]) / slope[d]), max_counts[rows[d]], total))
        given += counts[d]
    while given != total:
        step = 1 if given < total else -1
        best, first = -1, np.inf
        for d in range(rows.size):
            if step > 0 and counts[d] < max_counts[rows[d]]:
                then = begin[d] + (counts[d] + 1 - usual[d]) * slope[d]
            elif step < 0 and counts[d] > 1:
                then = -(begin[d] + (counts[d] - usual[d]) * slope[d])
            else:
                continue
            if then < first:
                best, first = d, then
        if best < 0:
            return False
        counts[best] += step
        given += step
    return True
