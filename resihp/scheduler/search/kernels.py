"""Pipelines played and cut, micro-batches shared out, as machine code: the inner loops of the search. Pure.

What an order means is said by `resihp.pipeline.timeline`, and a pipeline takes here, to rounding, what it takes there:
`played` walks the orders of 1F1B and zero-bubble (`resihp.pipeline.schedules`) in a sequence in which whatever a
primitive needs has been done before. Numba compiles the functions when they are first called and keeps the result on
disk, beside this file or in the user's cache; where neither can be written, it compiles again in each process. Without
numba, everything works as plain Python, a hundred times slower. All of it is in one module, as that cache notices a
change of a function's own file, and of no other.

Called by `resihp.scheduler.search.pipelines`. Nothing else may import this module: numba takes a quarter of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
P = ParamSpec("P")
R = TypeVar("R")

SLACK = 1e-9
"""Relative difference below which two times are the same."""
WORTH = 1e-3
"""Relative gain for which a pipeline gets orders of its own."""
RULES = ((-1, 0.0), (1, 0.5), (2, 0.5))
"""How these are made: see `limited`, and `patience` of `scheduled`. Measured: a third of a promille is left on average
to what many more rules find."""


class Costs(NamedTuple):
    """Of the model and the schedule."""

    sums: Floats
    """(3, layers + 1): seconds of F, B, W of the layers before each."""
    ends: Floats
    """(2, 3): of what comes before the first layer, and after the last."""
    split: bool
    """Whether W is apart from B."""
    parts: int
    """In which a stage's gradients are summed, at most."""


class PipeKind(NamedTuple):
    """What counts of a pipeline for its time, by stage."""

    speeds: Floats
    late: Floats
    """Seconds to the next stage, and back; 0 from the last."""
    each: Floats
    """Seconds in which a layer's gradients are summed."""
    bucket: Ints
    """Layers of a part at least."""


class Tables(NamedTuple):
    """What is known of pipelines, by row; by row and stage unless it says otherwise."""

    stages: Ints
    """By row: how many."""
    most: Ints
    """By row: micro-batches that there is memory for."""
    f: Floats
    """Seconds of a micro-batch; `b` has those of `w` in it where they are not apart."""
    b: Floats
    w: Floats
    late: Floats
    caps: Ints
    """Micro-batches that there is memory for at once."""
    held: Ints
    """Layers."""
    each: Floats
    bucket: Ints
    homes: Ints
    """Number of the node, -1 for several."""
    exposed: Floats
    """By row: seconds of the sums of gradients after the last backward, over healthy links."""
    ramp: Floats
    """By row: with so many times `pace`, no number of micro-batches takes less, whatever the orders."""
    pace: Floats
    times: Floats
    """(rows, micro-batches): what was played, NaN where nothing was."""


def machine_code(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, compiled when it is first called."""
    try:
        from numba import njit
    except ImportError:
        return function
    try:
        compiled: Callable[P, R] = njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no place for its cache
        compiled = njit(error_model="numpy")(function)
    return compiled


@machine_code
def played(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Seconds of a pipeline for `count` micro-batches, 1F1B, or ZB-H1 where `split`; `late[s]` is the way from stage s
    to the next one and back. All by stage; without `split`, `b` has the gradients of weights in it.

    In turn t stage s begins the forward of micro-batch t and the backward that follows it there, of micro-batch
    t - (stages - 1 - s): what that needs of stage s + 1 was done in the turn before.
    """
    end, sent = np.zeros(stages), np.zeros(stages)
    for t in range(count + stages - 1):
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
    last = 0.0
    for s in range(stages):
        at = end[s]
        if split:
            for _ in range(min(s, count)):
                at += w[s]
        last = max(last, at)
    return last


@machine_code
def least(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """A lower bound of `played`: every stage waits for its first forward, for its first backward as long as it has no
    further forward to do until then, and its last backward passes through all stages before it."""
    beyond = 0.0
    for s in range(stages):
        beyond += f[s] + b[s] + 2.0 * late[s]
    forth = both = found = 0.0
    for s in range(stages):
        beyond -= f[s] + b[s]
        ahead = min(stages - 1 - s, count - 1)
        work = count * (f[s] + b[s]) + max(0.0, beyond - ahead * f[s])
        beyond -= 2.0 * late[s]
        if split:
            found = max(found, forth + work + count * w[s], both + work + max(0, count - 1 - s) * w[s])
        else:
            found = max(found, both + work)
        forth += f[s] + late[s]
        both += f[s] + b[s] + 2.0 * late[s]
    return found


@machine_code
def price(counts: Ints, speeds: Floats, costs: Costs, f: Floats, b: Floats, w: Floats) -> None:
    """Into `f`, `b`, `w`: seconds of each stage."""
    sums, ends = costs.sums, costs.ends
    first, layers = 0, sums.shape[1] - 1
    for s in range(counts.size):
        after = first + counts[s]
        one = sums[0, after] - sums[0, first]
        two = sums[1, after] - sums[1, first]
        three = sums[2, after] - sums[2, first]
        if first == 0:
            one, two, three = one + ends[0, 0], two + ends[0, 1], three + ends[0, 2]
        if after == layers:
            one, two, three = one + ends[1, 0], two + ends[1, 1], three + ends[1, 2]
        f[s], b[s], w[s] = one / speeds[s], two / speeds[s], three / speeds[s]
        if not costs.split:
            b[s] += w[s]
        first = after


@machine_code
def exposed(counts: Ints, work: Floats, each: Floats, bucket: Ints, slowed: Floats, split: bool, parts: int) -> float:
    """Seconds of a pipeline's sums of gradients after its last backward (`resihp.scheduler.cost.gradient_sync`).
    `work`: seconds beside which they are summed; `slowed`: by how much they take longer, by stage."""
    longest = earlier = 0.0
    for s in range(counts.size):
        held = counts[s]
        of = max(1, held // max(-(-held // parts), bucket[s]))
        seconds = held * each[s] * slowed[s]
        left = max(seconds / of, seconds - work[s] * (of - 1) / of)
        longest = max(longest, left - earlier)
        if not split:
            earlier += work[s]
    return longest


@machine_code
def offered(bound: float, layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints) -> bool:
    """Into `counts`: as many layers as the slowest stage may take on the fastest ones; False where they do not fit."""
    stages = speeds.size
    left = layers - stages
    room = 0
    for s in range(stages):
        most = min(limits[s], int(bound * speeds[s] * (1.0 + SLACK) - extra[s]))
        if most < 1:
            return False
        room += most
        counts[s] = 1
    if room < layers:
        return False
    while left > 0:
        best = -1
        for s in range(stages):
            most = min(limits[s], int(bound * speeds[s] * (1.0 + SLACK) - extra[s]))
            if counts[s] == 1 and most > 1 and (best < 0 or speeds[s] > speeds[best]):
                best = s
        if best < 0:
            return False
        most = min(limits[best], int(bound * speeds[best] * (1.0 + SLACK) - extra[best]))
        more = min(left, most - 1)
        counts[best] += more
        left -= more
    return True


@machine_code
def partitioned(count: int, kind: PipeKind, limits: Ints, costs: Costs, offers: int, counts: Ints) -> float:
    """Into `counts`: how many layers each stage holds, so that the pipeline is fast for `count` micro-batches; what it
    takes, infinite where memory does not suffice. `limits`: most layers of each stage.

    The best of some partitions that may be best for some number of micro-batches (`layouts.layers.trade_offs`), then
    layers from one stage to another as long as that helps.
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
    whole = costs.sums[:, layers].sum() / layers
    extra[0] += costs.ends[0].sum() / whole
    extra[stages - 1] += costs.ends[1].sum() / whole
    now = np.empty(stages, np.int64)
    bound = even(layers, speeds, extra, limits, now)
    found = np.inf
    for _ in range(offers):
        if offered(bound, layers, speeds, extra, limits, now):
            seconds = taken(now, count, kind, costs, found)
            if seconds < found:
                found = seconds
                counts[:] = now
        further = np.inf
        for s in range(stages):
            fits = int(bound * speeds[s] * (1.0 + SLACK) - extra[s])
            if fits < limits[s]:
                further = min(further, (fits + 1 + extra[s]) / speeds[s])
        if further == np.inf:
            break
        bound = further
    better = True
    while better:
        better = False
        now[:] = counts
        for i in range(stages * stages):
            give, take = i // stages, i % stages
            if give != take and now[give] > 1 and now[take] < limits[take]:
                now[give] -= 1
                now[take] += 1
                seconds = taken(now, count, kind, costs, found * (1.0 - SLACK))
                if seconds < found * (1.0 - SLACK):
                    found, better = seconds, True
                    counts[:] = now
                now[give] += 1
                now[take] -= 1
    return found


@machine_code
def even(layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints) -> float:
    """Time of the slowest stage if that is as short as it can be: one layer after the other goes where it is done
    first. `extra`: what stages do besides, in layers."""
    bound = 0.0
    for s in range(speeds.size):
        counts[s] = 1
        bound = max(bound, (1 + extra[s]) / speeds[s])
    for _ in range(layers - speeds.size):
        best, first = -1, np.inf
        for s in range(speeds.size):
            then = (counts[s] + 1 + extra[s]) / speeds[s]
            if counts[s] < limits[s] and then < first:
                best, first = s, then
        counts[best] += 1
        bound = max(bound, first)
    return bound


@machine_code
def taken(counts: Ints, count: int, kind: PipeKind, costs: Costs, below: float) -> float:
    """Seconds of a pipeline, the sums of its gradients included; infinite if it cannot be less than `below`."""
    stages, split = counts.size, costs.split
    f, b, w = np.empty(stages), np.empty(stages), np.empty(stages)
    price(counts, kind.speeds, costs, f, b, w)
    after = exposed(counts, w if split else b, kind.each, kind.bucket, np.ones(stages), split, costs.parts)
    if least(stages, count, f, b, w, kind.late, split) + after >= below:
        return np.inf
    return played(stages, count, f, b, w, kind.late, split) + after


@machine_code
def scheduled(
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
    order: Ints,
) -> float:
    """Seconds of a pipeline whose stages take what is ready, a B before an F before a W; into `order` (stages,
    primitives), unless it is empty, 3 times the micro-batch and 0, 1, 2 for F, B, W.

    `limits`: most micro-batches of each stage between F and B; `caps`: most between F and W. A W does not begin if
    something else comes before `patience` of it has passed. Whoever can begin first does: so all that may come to a
    stage until then has been sent.
    """
    forth, back = np.full((stages, count + 1), np.inf), np.full((stages, count + 1), np.inf)
    done = np.zeros((stages, 3), np.int64)
    end, start, what = np.zeros(stages), np.full(stages, np.inf), np.zeros(stages, np.int64)
    forth[0, :count] = 0.0
    start[0] = 0.0
    last = 0.0
    for _ in range(stages * count * (3 if split else 2)):
        s = 0
        for i in range(1, stages):
            if start[i] < start[s]:
                s = i
        kind, m = what[s], done[s, what[s]]
        at = start[s] + (f[s] if kind == 0 else b[s] if kind == 1 else w[s])
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
            begun, now = done[i, 0], end[i]
            b_at = back[i, done[i, 1]]
            kept = begun - done[i, 2 if split else 1]
            f_at = forth[i, begun] if begun - done[i, 1] < limits[i] and kept < caps[i] else np.inf
            if split and done[i, 2] < done[i, 1] and min(b_at, f_at) > now + patience * w[i]:
                what[i], start[i] = 2, now
            elif b_at <= max(f_at, now):
                what[i], start[i] = 1, max(b_at, now)
            else:
                what[i], start[i] = 0, max(f_at, now)
    return last


@machine_code
def limited(stages: int, count: int, further: int, limits: Ints) -> None:
    """Into `limits`: so many micro-batches more between F and B than 1F1B has; as many as there are if negative."""
    for s in range(stages):
        limits[s] = count if further < 0 else stages - s + further


@machine_code
def eager_least(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """A lower bound of `scheduled`, whatever the rules: every stage waits for its first forward, and its last backward
    passes through all stages before it."""
    forth = both = found = 0.0
    for s in range(stages):
        work = count * (f[s] + b[s])
        found = max(found, both + work, forth + work + count * w[s] if split else 0.0)
        forth += f[s] + late[s]
        both += f[s] + b[s] + 2.0 * late[s]
    return found


@machine_code
def line(stages: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> tuple[float, float]:
    """`eager_least` of the stage that has the most to do for each micro-batch: of none, and of one more."""
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
def at(row: int, count: int, tables: Tables, split: bool, own: bool) -> float:
    """Seconds of a pipeline for so many micro-batches, played unless they are known."""
    if count > tables.most[row] or count >= tables.times.shape[1]:
        return np.inf
    found: float = tables.times[row, count]
    if np.isnan(found):
        stages, f, b, w, late = tables.stages[row], tables.f[row], tables.b[row], tables.w[row], tables.late[row]
        found = played(stages, count, f, b, w, late, split)
        if own and stages > 1:
            goal = found * (1.0 - WORTH)
            if eager_least(stages, count, f, b, w, late, split) < goal:
                none = np.empty((0, 0), np.int64)
                limits = np.empty(stages, np.int64)
                for further, patience in RULES:
                    limited(stages, count, further, limits)
                    seconds = scheduled(stages, count, f, b, w, late, split, limits, tables.caps[row], patience, none)
                    if seconds < goal:
                        found = goal = seconds
        tables.times[row, count] = found
    return found


@machine_code
def shared(
    total: int, rows: Ints, tables: Tables, split: bool, own: bool, below: float, counts: Ints
) -> tuple[float, float]:
    """Into `counts`: micro-batches of each pipeline, `total` in all, so that the last one is done as early as it can
    be. When that is, and when all would be done if micro-batches could be shared out in parts; infinite where there is
    no memory for it, and where that is clearly not `below`.

    `rows`: the pipelines, of the tables; `own`: in orders of their own where these are faster.
    """
    pipes, most = rows.size, tables.most
    done, paces = float(total), 0.0
    for d in range(pipes):
        done += tables.ramp[rows[d]] / tables.pace[rows[d]]
        paces += 1.0 / tables.pace[rows[d]]
    if done / paces > below:
        return np.inf, np.inf
    usual, begin, slope = np.empty(pipes, np.int64), np.empty(pipes), np.empty(pipes)
    for d in range(pipes):  # a line through two times that were played
        r = rows[d]
        usual[d] = min(max(1, total // pipes), most[r])
        if usual[d] < 1:
            return np.inf, np.inf
        begin[d] = at(r, usual[d], tables, split, own)
        further = at(r, usual[d] + 1, tables, split, own)
        if further < np.inf:
            slope[d] = further - begin[d]
        elif usual[d] > 1:
            slope[d] = begin[d] - at(r, usual[d] - 1, tables, split, own)
        else:
            slope[d] = begin[d]
        if not (np.isfinite(slope[d]) and slope[d] > 0.0):
            return np.inf, np.inf
    parts = in_parts(total, rows, most, usual, begin, slope)
    if parts == np.inf or not guessed(total, parts, rows, most, usual, begin, slope, counts):
        return np.inf, np.inf
    ends = np.empty(pipes)
    for d in range(pipes):
        ends[d] = at(rows[d], counts[d], tables, split, own)
    while True:  # exactly: the last one gives one away as long as somebody finishes it earlier
        last = 0
        for d in range(1, pipes):
            if ends[d] >= ends[last]:
                last = d
        to, first = -1, np.inf
        for d in range(pipes):
            if d != last:
                then = at(rows[d], counts[d] + 1, tables, split, own)
                if then < first:
                    to, first = d, then
        if counts[last] == 1 or to < 0 or first >= ends[last] * (1.0 - 1e-12):
            return ends[last], max(parts, 0.0)
        counts[last] -= 1
        counts[to] += 1
        ends[to] = first
        ends[last] = at(rows[last], counts[last], tables, split, own)


@machine_code
def in_parts(total: int, rows: Ints, most: Ints, usual: Ints, begin: Floats, slope: Floats) -> float:
    """When all are done if micro-batches can be shared out in parts: those that have memory for no more take what they
    can, the others the rest. Infinite if that is not all."""
    full = np.zeros(rows.size, np.bool_)
    while True:
        pace = done = 0.0
        left = total
        for d in range(rows.size):
            if full[d]:
                left -= most[rows[d]]
            else:
                pace += 1.0 / slope[d]
                done += begin[d] / slope[d] - usual[d]
        if pace == 0.0:
            return np.inf if left > 0 else (begin + slope).max()
        parts = (left + done) / pace
        again = False
        for d in range(rows.size):
            if not full[d] and usual[d] + (parts - begin[d]) / slope[d] > most[rows[d]] + SLACK:
                full[d] = again = True
        if not again:
            return parts


@machine_code
def guessed(
    total: int, parts: float, rows: Ints, most: Ints, usual: Ints, begin: Floats, slope: Floats, counts: Ints
) -> bool:
    """Into `counts`: whole micro-batches, by the lines through what was played; False if there is no memory for all."""
    given = 0
    for d in range(rows.size):
        counts[d] = max(1, min(int(usual[d] + (parts - begin[d]) / slope[d]), most[rows[d]], total))
        given += counts[d]
    while given != total:
        step = 1 if given < total else -1
        best, first = -1, np.inf
        for d in range(rows.size):
            if step > 0 and counts[d] < most[rows[d]]:
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


@machine_code
def exposed_over_links(rows: Ints, tables: Tables, costs: Costs, links: Floats) -> float:
    """Seconds of the sums of gradients after the last backward, of the pipeline that has the most: each stage over its
    slowest link to one of another pipeline that holds some of its layers. `links`: speeds between nodes. Negative if a
    stage is on several nodes."""
    longest = 0.0
    for d in range(rows.size):
        r = rows[d]
        stages = tables.stages[r]
        slowed = np.ones(stages)
        first = 0
        for s in range(stages):
            if tables.homes[r, s] < 0:
                return -1.0
            after = first + tables.held[r, s]
            link = 1.0
            for e in range(rows.size):
                q = rows[e]
                begin = 0
                for u in range(tables.stages[q] if e != d else 0):
                    end = begin + tables.held[q, u]
                    if begin < after and first < end and tables.homes[q, u] >= 0:
                        link = min(link, links[tables.homes[r, s], tables.homes[q, u]])
                    begin = end
            slowed[s] = 1.0 / link
            first = after
        work = tables.w[r, :stages] if costs.split else tables.b[r, :stages]
        held, each, bucket = tables.held[r, :stages], tables.each[r, :stages], tables.bucket[r, :stages]
        longest = max(longest, exposed(held, work, each, bucket, slowed, costs.split, costs.parts))
    return longest
