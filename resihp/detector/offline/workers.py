"""Merges slow-downs of several ranks that have the same cause, and names ranks without peers. Pure.

Ranks that share a node, a switch or a storage server become slow at the same time, by about the same factor. Called by
`resihp.detector.offline.series`, which finds the slow-downs of each rank; finds none itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from resihp.detector.offline.analysis import SpeedChange
from resihp.detector.offline.iteration_model import Point

MAX_ONSET_DISTANCE = 3.0
"""Largest distance between the onsets, and between the ends, of slow-downs with the same cause, in iterations."""
MILD_ONSET_DISTANCE = 1.0
"""As `MAX_ONSET_DISTANCE`, times the size of the slow-down in log units: noise hides the onset of mild slow-downs."""
MAX_SIZE_DIFFERENCE = 0.25
"""Largest difference between the sizes of slow-downs with the same cause, relative to the larger size in log units."""
NOISE_FLOOR = 0.01
"""Lower bound of the spread of the ranks' times, log units."""
MIN_COMMON_SHARE = 0.5
"""Share of a rank's iterations for which other ranks must have times as well, so that it can be compared with them."""


def together(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Return the events, with events of several ranks that have the same cause merged into one that names all ranks.

    The recoveries of merged slow-downs are merged as well.
    """
    slow = sorted((event for event in events if event.verdict == "fail-slow"), key=lambda event: event.iteration)
    groups: list[list[SpeedChange]] = []
    for event in slow:
        mine = next((group for group in groups if all(_alike(event, member) for member in group)), None)
        if mine is None:
            groups.append([event])
        else:
            mine.append(event)
    several = [group for group in groups if len(group) > 1]
    of_group = {_name(event) for group in several for event in group}
    ends = {(event.where, event.end) for group in several for event in group}
    alone = [
        event
        for event in events
        if _name(event) not in of_group
        and not (event.verdict == "recovered" and (event.where, event.iteration) in ends)
    ]
    return alone + [event for group in several for event in _as_one(group, events)]


def common_of_healthy(rows: Mapping[int, Mapping[int, float]], events: Sequence[SpeedChange]) -> dict[int, float]:
    """Return the common part, log units, of the times of healthy ranks, for iterations with at least two healthy ranks.

    `rows`: for each iteration, the log of each rank's time relative to its usual time.
    """
    slow = [
        (event.where.rank, event.iteration, math.inf if event.end is None else event.end)
        for event in events
        if event.verdict == "fail-slow" and event.where is not None
    ]
    common: dict[int, float] = {}
    for iteration, row in rows.items():
        now = {rank for rank, first, end in slow if first <= iteration < end}
        values = np.array([value for rank, value in row.items() if rank not in now])
        if values.size < 2:
            continue
        middle = float(np.median(values))
        reach = 3.0 * max(1.4826 * float(np.median(np.abs(values - middle))), NOISE_FLOOR)
        common[iteration] = float(np.clip(values, middle - reach, middle + reach).mean())
    return common


def without_peers(iterations: Mapping[int, Collection[int]]) -> list[str]:
    """Return a remark for each rank that has hardly any iteration in common with others. `iterations`: by rank."""
    if len(iterations) == 1:
        (rank,) = iterations
        return [f"rank {rank} is the only rank with times: it can be compared with its own past only"]
    counts: dict[int, int] = {}
    for own in iterations.values():
        for iteration in own:
            counts[iteration] = counts.get(iteration, 0) + 1
    lonely = [
        rank
        for rank, own in iterations.items()
        if own and sum(counts[iteration] > 1 for iteration in own) < MIN_COMMON_SHARE * len(own)
    ]
    return [
        f"rank {rank} has hardly any iteration in common with others: it cannot be compared and is not judged"
        for rank in lonely
    ]


def _alike(first: SpeedChange, second: SpeedChange) -> bool:
    if first.where == second.where:
        return False
    sizes = math.log1p(first.change), math.log1p(second.change)
    near = max(MAX_ONSET_DISTANCE, MILD_ONSET_DISTANCE / min(sizes))
    if abs(first.iteration - second.iteration) > near or (first.end is None) != (second.end is None):
        return False
    if first.end is not None and second.end is not None and abs(first.end - second.end) > near:
        return False
    return abs(sizes[0] - sizes[1]) <= MAX_SIZE_DIFFERENCE * max(sizes)


def _name(event: SpeedChange) -> tuple[object, ...]:
    return event.verdict, event.where, event.iteration


def _as_one(group: Sequence[SpeedChange], events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Merge the slow-downs of a group, and their recoveries. The result is detected when the earliest one was.

    Its cost is the mean, because all ranks wait for the slow ones at the same time.
    """
    first = min(group, key=lambda event: event.detected_at)
    ranks = tuple(
        sorted(event.where.rank for event in group if event.where is not None and event.where.rank is not None)
    )
    costs = [event.cost_seconds for event in group if event.cost_seconds is not None]
    whole = msgspec.structs.replace(
        first,
        iteration=sorted(event.iteration for event in group)[len(group) // 2],
        end=None if first.end is None else sorted(event.end or 0 for event in group)[len(group) // 2],
        change=sum(event.change for event in group) / len(group),
        where=None,
        cost_seconds=sum(costs) / len(costs) if costs else None,
        sizes=(),
        ranks=ranks,
    )
    if whole.end is None:
        return [whole]
    over = [
        event
        for event in events
        if event.verdict == "recovered"
        and any((event.where, event.iteration) == (member.where, member.end) for member in group)
    ]
    if not over:
        return [whole]
    last = max(over, key=lambda event: event.detected_at)
    return [whole, msgspec.structs.replace(last, iteration=whole.end, where=None, ranks=ranks)]


def log_times_of_ranks(ranks: Mapping[int, Sequence[Point]]) -> dict[int, dict[int, float]]:
    """Return the logs of all usable times, by iteration and rank."""
    rows: dict[int, dict[int, float]] = {}
    for rank, points in ranks.items():
        for point in points:
            if math.isfinite(point.seconds) and point.seconds > 0:
                rows.setdefault(point.iteration, {})[rank] = math.log(point.seconds)
    return rows
