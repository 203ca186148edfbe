"""Layouts changed, cut, played and kept or not, as machine code: all that a search does again and again. Pure.

What an order means is said by `resihp.pipeline.timeline`, and a pipeline takes here, to rounding, what it takes there:
`played` walks the orders of 1F1B and zero-bubble (`resihp.pipeline.schedules`) in a sequence in which whatever a
primitive needs has been done before. Numba compiles the functions when they are first called and keeps the result on
disk, beside this file or in the user's cache, and never where a file in the current folder says; where neither can be
written, it compiles again in each process. Without numba, everything works as plain Python, a hundred times slower. All
of it is in one module, as that cache notices a change of a function's own file, and of no other. In this order:
pipelines played and cut, what is known of them (`Tables`), layouts, moves, annealing.

Called by `resihp.scheduler.search.pipelines`. Nothing else may import this module: numba takes a quarter of a second.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
P = ParamSpec("P")
R = TypeVar("R")

CACHE_VARIABLES = ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES")
"""Where numba keeps compiled functions, and who finds the place."""
SLACK = 1e-9
"""Relative difference below which two times are the same."""
WORTH = 1e-3
"""Relative gain for which a pipeline gets orders of its own."""
RULES = ((-1, 0.0), (1, 0.5), (2, 0.5))
"""How these are made: see `limited`, and `patience` of `scheduled`. Measured: a third of a promille is left on average
to what many more rules find."""
OFFERS = 5
"""Partitions of a pipeline whose neighbours are looked at."""
DEPTHS = (-1, 0, 1, 2, 3, 4, 5, 6, 7)
PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a plan's orders, instead of `RULES`."""

HOT = 0.005
"""Share of the best time by which a change may be worse at the beginning of a cycle, about. Of 58 random jobs, in a
second: 0.4 % off the best of five searches on average, and 0.8 % with 0.02."""
HOTTER = 0.0075
"""The same where a cycle begins elsewhere."""
SHAKEN = 15
"""Changes that are made to the best layout, whatever they cost, where a cycle begins elsewhere."""
SMOOTH = 0.5
"""Weight of the time of micro-batches that could be shared out in parts."""
TWICE = 0.25
"""How often two changes are tried as one."""
BY_HAND = 0.1
"""How often a layer goes from one stage to another."""
FEW_ALIKE = 4
"""Replicas up to which it does not matter which are alike."""
ODD = 0.7
"""How often a replica that is not as most are is chosen, where most are alike."""
MOST_NEW = 8
"""Groups that a trial may be the first to have."""
MOVES = (3.0, 3.0, 2.0, 3.0, 1.5, 2.5, 1.0, 0.7, 0.5, 0.7, 0.5, 0.3, 0.3)
"""How often each is tried, see `moved`."""

# Columns, by what they belong to.
STAGES, ROW, SHARE = range(3)
"""Of a pipeline: how many; its row in the tables; its micro-batches."""
SIZE, SLOWEST, HOME, BESIDE = range(4)
"""Of a group: ranks, number of the lowest speed, number of the node or -1 for several, and from there on most layers
beside what its ranks hold, of a stage that is neither first nor last, last, first, or both."""
MOST, RULE = 1, 2
"""Of a row, beside `STAGES`: micro-batches that there is memory for; which of `RULES` is best, from 1 on, 0 where that
is not known yet and -1 where none is worth it."""
EXPOSED, RAMP, PACE = range(3)
"""Of a row: seconds of the sums of gradients after the last backward, over healthy links; and with so many times `PACE`
beside `RAMP` no number of micro-batches takes less, whatever the orders."""
F, B, W, LATE, EACH = range(5)
"""Of a stage, in seconds: a micro-batch, `B` with `W` in it where they are not apart; the way to the next stage, or
back; the sums of a layer's gradients."""
CAP, HELD, BUCKET = range(3)
"""Of a stage: micro-batches that there is memory for at once, layers, layers of a part of the sums at least."""
NOW, TRIED, BEST, ASKED, FORMER = range(5)
"""Layouts: where the search is, one beside it, the best one, one that is asked about, and the first of those that were
the best before; beyond them those where cycles are still to begin."""
TRIAL, CYCLE, CYCLES, SHAKE, BEFORE, KEPT, ELSEWHERE, LEFT = range(8)
"""Of a search: trials of this cycle, and how many it has; cycles; trials that are left to shake; how many were the best
before, and how many of them are kept; where the next cycle begins elsewhere, and in how many places after that."""


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


class Job(NamedTuple):
    """A situation. Ranks, nodes and speeds by their number: the higher a speed's, the lower it is."""

    costs: Costs
    speed: Ints
    """By rank: the number of its speed."""
    speeds: Floats
    node: Ints
    """By rank."""
    links: Floats
    """Speeds between nodes."""
    ways: Ints
    """Between nodes: the number of what a way takes."""
    late: Floats
    """By that: seconds."""
    degrees: Ints
    """Of groups, ascending."""
    each: Floats
    """By degree: seconds in which a layer's gradients are summed."""
    bucket: Ints
    """By degree: layers of a part at least."""
    state: Ints
    """By replicas: the number of what a parameter's state takes."""
    needs: Ints
    """By that, degree and 1 for a last stage, 2 for a first one, 3 for both: bytes beside the layers, of a layer's
    state, and of its activations of a micro-batch."""
    left: Ints
    """By rank: bytes beside what it holds."""
    seat: Ints
    """By rank: its place in the group that it was in, and of how many ranks that was, 0 where it holds nothing; first
    and last layer; whether it holds what is before and after the layers."""
    carried: Ints
    """By degree and kind of stage, as `needs`: bytes that come beside that, without layers and for each."""
    stays: float
    """How much less they are for what is there already."""
    room: int
    """Bytes of a device."""
    micro_batches: int
    step_s: float
    linked: bool
    """Whether sums of gradients go over slow links."""
    beside: bool
    """Whether there must be room beside what is held."""
    own: bool
    """Whether pipelines may have orders of their own."""


class Tables(NamedTuple):
    """What is known of groups, of pipelines that are to be cut, and of those that are: rows."""

    used: Ints
    """How many of each."""
    group_index: Ints
    ranks: Ints
    """(groups, ranks), in ascending order; -1 beyond the last."""
    group: Ints
    cut_index: Ints
    cut_keys: Ints
    cut_row: Ints
    """-1 for what does not fit."""
    row_index: Ints
    row_keys: Ints
    row: Ints
    row_s: Floats
    stage: Ints
    """(rows, columns, stages), as `stage_s`."""
    stage_s: Floats
    times: Floats
    """(rows, micro-batches): what was played, 0 where nothing was."""


class Layouts(NamedTuple):
    """Several, side by side: the first index is the layout's."""

    pipes: Ints
    """How many."""
    pipe: Ints
    """(layouts, pipes, columns)."""
    groups: Ints
    """(layouts, pipes, stages): numbers of groups."""
    score: Floats
    """(layouts, 2): seconds of an iteration, and what they were if micro-batches could be shared out in parts."""


def machine_code(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, compiled when it is first called."""
    with _cache_of_the_environment():
        try:
            from numba import njit
        except Exception:  # noqa: BLE001 - not installed, or a file of settings here that it cannot read
            return function
        compiled: Any = njit(error_model="numpy", nogil=True)(function)
        try:
            compiled._cache = _lasting_cache()(function)
        except (ImportError, AttributeError):  # another numba, whose cache is made otherwise
            compiled = njit(cache=True, error_model="numpy", nogil=True)(function)
        except RuntimeError:  # there is no place for it
            pass
        return cast("Callable[P, R]", compiled)


@contextmanager
def _cache_of_the_environment() -> Iterator[None]:
    """Have numba choose the place of its cache by environment variables alone.

    It also takes settings from `.numba_config.yaml` in the current folder, which may be anybody's, and unpickles what
    it finds in the cache. A variable that is there, be it empty, overrules that file.
    """
    absent = [name for name in CACHE_VARIABLES if name not in os.environ]
    os.environ |= dict.fromkeys(absent, "")
    try:
        _reload_settings()
        yield
    finally:
        for name in absent:
            del os.environ[name]
        _reload_settings()


def _reload_settings() -> None:
    """Have numba look at the variables again, where it has been imported."""
    if (config := sys.modules.get("numba.core.config")) is not None:
        with suppress(Exception):  # settings of the current folder that cannot be read
            config.reload_config()


def _lasting_cache() -> Callable[..., Any]:
    """Numba's, which a full disk does not end, nor half a file that a crash left: what cannot be read is compiled, and
    kept if it can be. Numba ignores such errors on Windows alone. Raises ImportError."""
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        @contextmanager
        def _guard_against_spurious_io_errors(self) -> Iterator[None]:
            try:
                yield
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                with suppress(OSError):
                    self.flush()  # type: ignore[no-untyped-call]

    return cast("Callable[..., Any]", Cache)


@machine_code
def played(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Seconds of a pipeline for `count` micro-batches, 1F1B, or ZB-H1 where `split`; `late[s]` is the way from stage s
    to the next one and back. All by stage; without `split`, `b` has the gradients of weights in it.

    In turn t stage s begins the forward of micro-batch t and the backward that follows it there, of micro-batch
    t - (stages - 1 - s): what that needs of stage s + 1 was done in the turn before. Where a turn puts all stages off
    by the same, so do those that follow, as long as there are further forwards.
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
    most = np.empty(stages, np.int64)
    room = 0
    for s in range(stages):
        most[s] = min(limits[s], int(bound * speeds[s] * (1.0 + SLACK) - extra[s]))
        if most[s] < 1:
            return False
        room += most[s]
        counts[s] = 1
    left = layers - stages
    while left > 0 and room >= layers:
        best = -1
        for s in range(stages):
            if counts[s] < most[s] and (best < 0 or speeds[s] > speeds[best]):
                best = s
        more = min(left, most[best] - 1)
        counts[best] += more
        left -= more
    return left == 0


@machine_code
def partitioned(count: int, kind: PipeKind, limits: Ints, costs: Costs, offers: int, counts: Ints) -> float:
    """Into `counts`: how many layers each stage holds, so that the pipeline is fast for `count` micro-batches; what it
    takes, infinite where memory does not suffice. `limits`: most layers of each stage.

    The best of some partitions that may be best for some number of micro-batches (`layouts.layers.trade_offs`), then a
    layer from one stage to another, where that promises the most, as long as it helps.
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
    times = np.ones((4, stages))
    for _ in range(offers):
        if offered(bound, layers, speeds, extra, limits, now):
            seconds = taken(now, count, kind, costs, found, times, True)
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
    if found == np.inf:
        return found
    load, more = np.empty(stages), np.empty(stages)
    while True:
        now[:] = counts
        slowest = 0
        for s in range(stages):
            load[s], more[s] = (now[s] + extra[s]) / speeds[s], (now[s] + 1 + extra[s]) / speeds[s]
            slowest = s if load[s] > load[slowest] else slowest
        best, to, below = -1, -1, found * (1.0 - SLACK)
        only = slowest if count * whole * load[slowest] >= below else -1
        for give in range(stages):
            for take in range(stages if now[give] > 1 and (only < 0 or give == only) else 0):
                if give == take or now[take] >= limits[take] or count * whole * more[take] >= below:
                    continue
                if speeds[take] <= speeds[give] and more[take] > load[give]:
                    continue  # a stage that is no faster has more to do then than this one has now
                now[give] -= 1
                now[take] += 1
                bound = taken(now, count, kind, costs, below, times, False)
                if bound < below:
                    best, to, below = give, take, bound
                now[give] += 1
                now[take] -= 1
        if best < 0:
            return found
        now[best] -= 1
        now[to] += 1
        seconds = taken(now, count, kind, costs, found, times, True)
        if seconds >= found * (1.0 - SLACK):
            return found
        found = seconds
        counts[:] = now


@machine_code
def even(layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints) -> float:
    """Time of the slowest stage if that is as short as it can be: one layer after the other goes where it is done
    first. `extra`: what stages do besides, in layers."""
    bound = paces = 0.0
    outside, left = float(layers), layers
    for s in range(speeds.size):
        outside += extra[s]
        paces += speeds[s]
    for s in range(speeds.size):  # what is done before the last one can be, if layers could be cut
        counts[s] = max(1, min(limits[s], int(outside / paces * speeds[s] * (1.0 - SLACK) - extra[s])))
        left -= counts[s]
    for s in range(speeds.size):
        counts[s] = counts[s] if left >= 0 else 1
        bound = max(bound, (counts[s] + extra[s]) / speeds[s])
    for _ in range(left if left >= 0 else layers - speeds.size):
        best, first = -1, np.inf
        for s in range(speeds.size):
            then = (counts[s] + 1 + extra[s]) / speeds[s]
            if counts[s] < limits[s] and then < first:
                best, first = s, then
        counts[best] += 1
        bound = max(bound, first)
    return bound


@machine_code
def taken(counts: Ints, count: int, kind: PipeKind, costs: Costs, below: float, times: Floats, exactly: bool) -> float:
    """Seconds of a pipeline, the sums of its gradients included, or a bound of that; infinite if it cannot be less than
    `below`. `times`: room for those of its stages, and ones."""
    stages, split = counts.size, costs.split
    f, b, w = times[0], times[1], times[2]
    price(counts, kind.speeds, costs, f, b, w)
    bound = least(stages, count, f, b, w, kind.late, split)
    if bound >= below:
        return np.inf
    after = exposed(counts, w if split else b, kind.each, kind.bucket, times[3], split, costs.parts)
    if bound + after >= below:
        return np.inf
    return (played(stages, count, f, b, w, kind.late, split) if exactly else bound) + after


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
    goal: float,
    order: Ints,
) -> float:
    """Seconds of a pipeline whose stages take what is ready, a B before an F before a W, infinite if that is not less
    than `goal`; into `order` (stages, primitives), unless it is empty, 3 times the micro-batch and 0, 1, 2 for F, B, W.

    `limits`: most micro-batches of each stage between F and B; `caps`: most between F and W. A W does not begin if
    something else comes before `patience` of it has passed. Whoever can begin first does: so all that may come to a
    stage until then has been sent.
    """
    forth, back = np.full((stages, count + 1), np.inf), np.full((stages, count + 1), np.inf)
    done = np.zeros((stages, 3), np.int64)
    end, start, what = np.zeros(stages), np.full(stages, np.inf), np.zeros(stages, np.int64)
    left = np.empty(stages)
    """What a stage has to do, and for what is not apart from B, those before it after that."""
    before = 0.0
    for s in range(stages):
        left[s] = count * (f[s] + b[s] + (w[s] if split else 0.0)) + before
        before += 0.0 if split else b[s] + late[s]
    forth[0, :count] = 0.0
    start[0] = 0.0
    last = 0.0
    for _ in range(stages * count * (3 if split else 2)):
        s = 0
        for i in range(1, stages):
            if start[i] < start[s]:
                s = i
        kind, m = what[s], done[s, what[s]]
        took = f[s] if kind == 0 else b[s] if kind == 1 else w[s]
        at = start[s] + took
        left[s] -= took
        if at + left[s] >= goal:
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
    if count > tables.row[row, MOST] or count >= tables.times.shape[1]:
        return np.inf
    found: float = tables.times[row, count]
    if found > 0.0:
        return found
    stages, f, b, w = tables.row[row, STAGES], tables.stage_s[row, F], tables.stage_s[row, B], tables.stage_s[row, W]
    late = tables.stage_s[row, LATE]
    found = played(stages, count, f, b, w, late, split)
    best = tables.row[row, RULE]
    if own and stages > 1 and best >= 0:
        goal = found * (1.0 - WORTH)
        enough = eager_least(stages, count, f, b, w, late, split) * (1.0 + WORTH)
        if enough < goal:
            none = np.empty((0, 0), np.int64)
            limits = np.empty(stages, np.int64)
            caps = tables.stage[row, CAP]
            for i, (further, patience) in enumerate(RULES):
                if goal > enough and (best == 0 or best == i + 1):
                    limited(stages, count, further, limits)
                    seconds = scheduled(stages, count, f, b, w, late, split, limits, caps, patience, goal, none)
                    if seconds < goal:
                        found = goal = seconds
                        tables.row[row, RULE] = i + 1
        if tables.row[row, RULE] == 0:
            tables.row[row, RULE] = -1
    tables.times[row, count] = found
    return found


@machine_code
def ordered(row: int, count: int, tables: Tables, split: bool, own: bool, order: Ints) -> tuple[float, bool]:
    """Seconds of a pipeline in the best orders of its own, into `order` as `scheduled` has it; in those of the
    schedule where these are as good, and False."""
    stages, f, b, w = tables.row[row, STAGES], tables.stage_s[row, F], tables.stage_s[row, B], tables.stage_s[row, W]
    late = tables.stage_s[row, LATE]
    usual = played(stages, count, f, b, w, late, split)
    best, found = usual * (1.0 - WORTH), False
    tried, limits = np.empty_like(order), np.empty(stages, np.int64)
    for further in DEPTHS:
        limited(stages, count, further, limits)
        for patience in PATIENCE:
            if own and stages > 1 and (split or patience == 0.0):
                caps = tables.stage[row, CAP]
                seconds = scheduled(stages, count, f, b, w, late, split, limits, caps, patience, best, tried)
                if seconds < best:
                    best, found = seconds, True
                    order[:] = tried
    return (best if found else usual), found


@machine_code
def shared(
    total: int, rows: Ints, tables: Tables, split: bool, own: bool, below: float, counts: Ints
) -> tuple[float, float]:
    """Into `counts`: micro-batches of each pipeline, `total` in all, so that the last one is done as early as it can
    be. When that is, and when all would be done if micro-batches could be shared out in parts; infinite where there is
    no memory for it, and where that is clearly not `below`.

    `rows`: the pipelines, of the tables; `own`: in orders of their own where these are faster.
    """
    pipes, most = rows.size, tables.row[:, MOST]
    done, paces = float(total), 0.0
    usual, begin, slope = np.empty(pipes, np.int64), np.empty(pipes), np.empty(pipes)
    for d in range(pipes):
        usual[d] = min(max(1, total // pipes), most[rows[d]])
        slope[d] = tables.row_s[rows[d], PACE]
        if usual[d] < 1 or not (np.isfinite(slope[d]) and slope[d] > 0.0):
            return np.inf, np.inf
        done += tables.row_s[rows[d], RAMP] / slope[d]
        paces += 1.0 / slope[d]
    for d in range(pipes):  # a line through a time that was played, instead of what is no time less
        if done / paces > below:
            return np.inf, np.inf
        begin[d] = at(rows[d], usual[d], tables, split, own)
        done += begin[d] / slope[d] - usual[d] - tables.row_s[rows[d], RAMP] / slope[d]
    if done / paces > below:
        return np.inf, np.inf
    parts = in_parts(total, rows, most, usual, begin, slope)
    if parts == np.inf or parts > below or not guessed(total, parts, rows, most, usual, begin, slope, counts):
        return np.inf, np.inf
    ends = np.empty(pipes)
    for d in range(pipes):
        ends[d] = at(rows[d], counts[d], tables, split, own)
    while True:  # exactly: the last one gives one away as long as somebody finishes it earlier
        last = 0
        for d in range(1, pipes):
            if ends[d] >= ends[last]:
                last = d
        to, first = -1, ends[last] * (1.0 - 1e-12)
        for d in range(pipes):
            if d != last and tables.row_s[rows[d], RAMP] + (counts[d] + 1) * slope[d] < first:
                then = at(rows[d], counts[d] + 1, tables, split, own)
                if then < first:
                    to, first = d, then
        if counts[last] == 1 or to < 0:
            return ends[last], max(parts, 0.0)
        fewer = at(rows[last], counts[last] - 1, tables, split, own)
        if fewer >= ends[last]:  # orders of its own may be worse for fewer: who takes turns at that would not end
            return ends[last], max(parts, 0.0)
        counts[last] -= 1
        counts[to] += 1
        ends[to], ends[last] = first, fewer


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


# --- what is known ----------------------------------------------------------------------------------------------------


@machine_code
def lookup(index: Ints, keys: Ints, key: Ints, length: int) -> tuple[int, int]:
    """Where a key is in a hash table, or would be; and its number, -1 where it is not there."""
    prime = 2147483647
    mixed = 0
    for i in range(length):
        mixed = (mixed * 69069 + key[i] % prime + 1) % prime
    place = mixed % index.size
    while index[place] > 0:
        number = index[place] - 1
        same = True
        for i in range(length):
            if keys[number, i] != key[i]:
                same = False
                break
        if same:
            return place, number
        place = (place + 1) % index.size
    return place, -1


@machine_code
def full(tables: Tables, pipes: int, groups: int) -> bool:
    """Whether another trial, or layout, of so many pipelines and new groups may have no place."""
    rows = tables.used[2] + 2 * pipes + 8 > tables.row.shape[0] or tables.used[1] + pipes + 8 > tables.cut_row.size
    return bool(rows or tables.used[0] + groups > tables.group.shape[0])


@machine_code
def group_of(job: Job, tables: Tables, ranks: Ints, size: int) -> int:
    """The number of a group."""
    key = np.full(tables.ranks.shape[1], -1, np.int64)
    for t in range(size):
        key[t] = ranks[t]
    place, number = lookup(tables.group_index, tables.ranks, key, key.size)
    if number >= 0:
        return number
    number = tables.used[0]
    tables.used[0] += 1
    tables.group_index[place] = number + 1
    tables.ranks[number] = key
    tables.group[number, SIZE] = size
    tables.group[number, SLOWEST] = 0
    tables.group[number, HOME] = job.node[ranks[0]]
    for kind in range(4):
        tables.group[number, BESIDE + kind] = job.costs.sums.shape[1] - 1
    for t in range(size):
        rank = ranks[t]
        tables.group[number, SLOWEST] = max(tables.group[number, SLOWEST], job.speed[rank])
        if job.node[rank] != job.node[ranks[0]]:
            tables.group[number, HOME] = -1
        if job.beside and job.seat[rank, 1] > 0 and not (job.seat[rank, 0] == t and job.seat[rank, 1] == size):
            for kind in range(4):
                without, each = job.carried[size, kind, 0], job.carried[size, kind, 1]
                fits = max(0, (job.left[rank] - without) // each)
                tables.group[number, BESIDE + kind] = min(tables.group[number, BESIDE + kind], fits)
    return int(number)


@machine_code
def link(job: Job, tables: Tables, a: int, b: int) -> float:
    """Speed of the slowest link between two groups."""
    mine, theirs = tables.group[a, HOME], tables.group[b, HOME]
    if mine >= 0 and theirs >= 0:
        return float(job.links[mine, theirs])
    found = 1.0
    for t in range(tables.group[a, SIZE]):
        for u in range(tables.group[b, SIZE]):
            found = min(found, job.links[job.node[tables.ranks[a, t]], job.node[tables.ranks[b, u]]])
    return found


@machine_code
def on_nodes_of(job: Job, tables: Tables, a: int, b: int) -> bool:
    """Whether a group is on no other nodes than another one."""
    for t in range(tables.group[a, SIZE]):
        here = False
        for u in range(tables.group[b, SIZE]):
            here |= job.node[tables.ranks[a, t]] == job.node[tables.ranks[b, u]]
        if not here:
            return False
    return True


@machine_code
def way(job: Job, tables: Tables, a: int, b: int) -> int:
    """Number of what the way between two groups takes."""
    mine, theirs = tables.group[a, HOME], tables.group[b, HOME]
    if mine >= 0 and theirs >= 0:
        return int(job.ways[mine, theirs])
    node = job.node[tables.ranks[a, 0]]
    found = job.ways[node, node]
    if on_nodes_of(job, tables, a, b) and on_nodes_of(job, tables, b, a):
        return int(found)
    longest = -1.0
    for t in range(tables.group[a, SIZE]):
        for u in range(tables.group[b, SIZE]):
            mine, theirs = job.node[tables.ranks[a, t]], job.node[tables.ranks[b, u]]
            if mine != theirs and job.late[job.ways[mine, theirs]] > longest:
                found = job.ways[mine, theirs]
                longest = job.late[found]
    return int(found)


@machine_code
def described(job: Job, tables: Tables, groups: Ints, stages: int, key: Ints) -> None:
    """Into `key`, from 1 on: a number for each stage, the same for pipelines that take the same time and memory."""
    for s in range(stages):
        g = groups[s]
        number = tables.group[g, SIZE] * 4096 + tables.group[g, SLOWEST]
        number = number * 16384 + (way(job, tables, g, groups[s + 1]) if s + 1 < stages else 0)
        number = number * 8192 + (tables.group[g, HOME] + 1 if job.linked else 0)
        kind = 2 * (s == 0) + (s == stages - 1)
        key[1 + s] = number * 65536 + (tables.group[g, BESIDE + kind] if job.beside else 0)


@machine_code
def kind_of(job: Job, tables: Tables, groups: Ints, stages: int) -> PipeKind:
    speeds, late, each = np.empty(stages), np.zeros(stages), np.empty(stages)
    bucket = np.empty(stages, np.int64)
    for s in range(stages):
        g = groups[s]
        size = tables.group[g, SIZE]
        speeds[s] = size * job.speeds[tables.group[g, SLOWEST]]
        each[s], bucket[s] = job.each[size], job.bucket[size]
        if s + 1 < stages:
            late[s] = job.late[way(job, tables, g, groups[s + 1])]
    return PipeKind(speeds, late, each, bucket)


@machine_code
def capacity(job: Job, s: int, stages: int, size: int, count: int, state: int) -> int:
    """Most layers of a stage (`cost.memory.capacity`)."""
    alive = min(count, stages if job.costs.split else stages - s)
    needs = job.needs[state, size, 2 * (s == 0) + (s == stages - 1)]
    return int(max(0, (job.room - needs[0]) // (needs[1] + alive * needs[2])))


@machine_code
def cut(job: Job, tables: Tables, groups: Ints, stages: int, count: int, replicas: int) -> int:
    """The row of a pipeline with the layers that make it fastest for about so many micro-batches, one of so many
    replicas; -1 where they do not fit, or a group stands still."""
    step = 1
    while count >= 8 * step:
        step *= 2
    count = max(count // step * step, min(count, stages))
    state = job.state[replicas]
    key = np.empty(stages + 1, np.int64)
    key[0] = (state * (job.micro_batches + 2) + count) * (tables.stage.shape[2] + 1) + stages
    described(job, tables, groups, stages, key)
    place, number = lookup(tables.cut_index, tables.cut_keys, key, stages + 1)
    if number >= 0:
        return int(tables.cut_row[number])
    number = tables.used[1]
    tables.used[1] += 1
    tables.cut_index[place] = number + 1
    for i in range(stages + 1):
        tables.cut_keys[number, i] = key[i]
    kind = kind_of(job, tables, groups, stages)
    limits, counts = np.empty(stages, np.int64), np.empty(stages, np.int64)
    for s in range(stages):
        limits[s] = capacity(job, s, stages, tables.group[groups[s], SIZE], min(count, stages), state)
        beside = tables.group[groups[s], BESIDE + 2 * (s == 0) + (s == stages - 1)]
        limits[s] = min(limits[s], beside if job.beside else limits[s])
    row = -1
    if np.isfinite(partitioned(count, kind, limits, job.costs, OFFERS, counts)):
        row = row_of(job, tables, groups, stages, counts, replicas)
    tables.cut_row[number] = row
    return row


@machine_code
def row_of(job: Job, tables: Tables, groups: Ints, stages: int, counts: Ints, replicas: int) -> int:
    """The row of a pipeline with so many layers on each stage."""
    state = job.state[replicas]
    key = np.empty(2 * stages + 1, np.int64)
    key[0] = state * (tables.stage.shape[2] + 1) + stages
    described(job, tables, groups, stages, key)
    for s in range(stages):
        key[1 + stages + s] = counts[s]
    place, row = lookup(tables.row_index, tables.row_keys, key, key.size)
    if row >= 0:
        return row
    row = tables.used[2]
    tables.used[2] += 1
    tables.row_index[place] = row + 1
    for i in range(key.size):
        tables.row_keys[row, i] = key[i]
    kind = kind_of(job, tables, groups, stages)
    most = stages
    for s in range(stages):
        g = groups[s]
        size, held = tables.group[g, SIZE], counts[s]
        while most > 0 and held > capacity(job, s, stages, size, most, state):
            most -= 1
        if job.beside and held > tables.group[g, BESIDE + 2 * (s == 0) + (s == stages - 1)]:
            most = 0
        needs = job.needs[state, size, 2 * (s == 0) + (s == stages - 1)]
        alive = job.micro_batches
        if needs[2] > 0:
            alive = min(alive, max(0, (job.room - needs[0] - held * needs[1]) // (needs[2] * held)))
        tables.stage[row, CAP, s], tables.stage[row, HELD, s] = alive, held
        tables.stage[row, BUCKET, s] = kind.bucket[s]
        tables.stage_s[row, LATE, s], tables.stage_s[row, EACH, s] = kind.late[s], kind.each[s]
    f, b, w = tables.stage_s[row, F], tables.stage_s[row, B], tables.stage_s[row, W]
    split = job.costs.split
    price(counts, kind.speeds, job.costs, f, b, w)
    for s in range(stages):
        if not np.isfinite(f[s] + b[s] + w[s]):  # it stands still
            most = 0
    tables.row[row, STAGES], tables.row[row, RULE] = stages, 0
    tables.row[row, MOST] = job.micro_batches if most == stages else most
    work = w if split else b
    tables.row_s[row, EXPOSED] = exposed(counts, work, kind.each, kind.bucket, np.ones(stages), split, job.costs.parts)
    tables.row_s[row, RAMP], tables.row_s[row, PACE] = line(stages, f, b, w, kind.late, split)
    tables.times[row] = 0.0
    return int(row)


@machine_code
def has_room(job: Job, tables: Tables, groups: Ints, row: int) -> bool:
    """Whether the ranks of a pipeline have room beside what each of them held (`cost.transition_memory.beside`)."""
    first, stages = 0, tables.row[row, STAGES]
    for s in range(stages):
        size, held = tables.group[groups[s], SIZE], tables.stage[row, HELD, s]
        carried = job.carried[size, 2 * (s == 0) + (s == stages - 1)]
        comes = carried[0] + held * carried[1]
        for t in range(size):
            rank = tables.ranks[groups[s], t]
            seat = job.seat[rank]
            stays = 0
            if seat[0] == t and seat[1] == size:
                stays = max(0, min(first + held, seat[3] + 1) - max(first, seat[2])) * carried[1]
                stays += job.carried[size, 2, 0] if s == 0 and seat[4] else 0
                stays += job.carried[size, 1, 0] if s == stages - 1 and seat[5] else 0
            changed = stays < comes or seat[3] - seat[2] + 1 != held
            if seat[1] > 0 and changed and comes - job.stays * stays > job.left[rank]:
                return False
        first += held
    return True


# --- a layout ---------------------------------------------------------------------------------------------------------


@machine_code
def exposed_over_links(job: Job, tables: Tables, layouts: Layouts, k: int) -> float:
    """Seconds of the sums of gradients after the last backward, of the pipeline that has the most: each stage over its
    slowest link to one of another pipeline that holds some of its layers."""
    longest = 0.0
    for d in range(layouts.pipes[k]):
        r, stages = layouts.pipe[k, d, ROW], layouts.pipe[k, d, STAGES]
        slowed = np.ones(stages)
        first = 0
        for s in range(stages):
            after = first + tables.stage[r, HELD, s]
            slowest = 1.0
            for e in range(layouts.pipes[k]):
                q = layouts.pipe[k, e, ROW]
                begin = 0
                for u in range(layouts.pipe[k, e, STAGES] if e != d else 0):
                    end = begin + tables.stage[q, HELD, u]
                    if begin < after and first < end:
                        slowest = min(slowest, link(job, tables, layouts.groups[k, d, s], layouts.groups[k, e, u]))
                    begin = end
            slowed[s] = 1.0 / slowest
            first = after
        held, bucket = tables.stage[r, HELD, :stages], tables.stage[r, BUCKET, :stages]
        work, each = tables.stage_s[r, W if job.costs.split else B], tables.stage_s[r, EACH]
        longest = max(longest, exposed(held, work, each, bucket, slowed, job.costs.split, job.costs.parts))
    return longest


@machine_code
def after_s(job: Job, tables: Tables, layouts: Layouts, k: int) -> float:
    """Seconds after the last backward: of sums of gradients, and of the step."""
    longest = 0.0
    if job.linked and layouts.pipes[k] > 1:
        longest = exposed_over_links(job, tables, layouts, k)
    for d in range(layouts.pipes[k] if layouts.pipes[k] > 1 else 0):
        longest = max(longest, tables.row_s[layouts.pipe[k, d, ROW], EXPOSED])
    return longest + job.step_s


@machine_code
def score(job: Job, tables: Tables, layouts: Layouts, k: int, below: float, counts: Ints) -> None:
    """Into `layouts.score`, infinite where there is no memory for it; into `counts`: micro-batches of each replica.
    `below`: what clearly takes more is not looked at any further, and infinite."""
    pipes = layouts.pipes[k]
    layouts.score[k] = np.inf
    if pipes == 0 or pipes > job.micro_batches:
        return
    rows = layouts.pipe[k, :pipes, ROW]
    after = after_s(job, tables, layouts, k)
    seconds, parts_s = shared(job.micro_batches, rows, tables, job.costs.split, job.own, below - after, counts)
    layouts.score[k, 0], layouts.score[k, 1] = seconds + after, parts_s + after


@machine_code
def energy(layouts: Layouts, k: int) -> float:
    """Of annealing: micro-batches are whole, but what makes replicas faster is a step even if none changes hands."""
    return float(SMOOTH * layouts.score[k, 1] + (1.0 - SMOOTH) * layouts.score[k, 0])


@machine_code
def better(layouts: Layouts, k: int, than: int) -> bool:
    """By time, then by how soon all replicas are done."""
    seconds, other = layouts.score[k, 0], layouts.score[than, 0]
    if seconds < other * (1.0 - SLACK):
        return True
    return bool(seconds <= other and layouts.score[k, 1] < layouts.score[than, 1] * (1.0 - SLACK))


@machine_code
def copied(layouts: Layouts, a: int, d: int, b: int, e: int) -> None:
    """Pipeline `d` of layout `a` to `e` of `b`."""
    for column in range(3):
        layouts.pipe[b, e, column] = layouts.pipe[a, d, column]
    for s in range(layouts.pipe[a, d, STAGES]):
        layouts.groups[b, e, s] = layouts.groups[a, d, s]


@machine_code
def copy(layouts: Layouts, a: int, b: int) -> None:
    layouts.pipes[b] = layouts.pipes[a]
    layouts.score[b] = layouts.score[a]
    for d in range(layouts.pipes[a]):
        copied(layouts, a, d, b, d)


@machine_code
def laid(job: Job, tables: Tables, layouts: Layouts, k: int, sizes: Ints, ranks: Ints, held: Ints) -> bool:
    """Layout `k`, of groups of so many ranks (pipelines, stages), 0 beyond the last, with so many layers: as many as
    make it fastest where that is 0. Whether it is one, and has its score."""
    replicas = sizes.shape[0]
    counts = np.zeros(replicas, np.int64)
    layouts.pipes[k] = replicas
    layouts.score[k] = np.inf
    usual = max(1, job.micro_batches // max(1, replicas))
    for d in range(replicas):
        stages = 0
        while stages < sizes.shape[1] and sizes[d, stages] > 0:
            layouts.groups[k, d, stages] = group_of(job, tables, ranks[d, stages], sizes[d, stages])
            stages += 1
        groups = layouts.groups[k, d]
        if held[d, 0] > 0:
            row = row_of(job, tables, groups, stages, held[d, :stages], replicas)
        else:
            row = cut(job, tables, groups, stages, usual, replicas)
        layouts.pipe[k, d, STAGES], layouts.pipe[k, d, ROW] = stages, row
        if row < 0:
            return False
    score(job, tables, layouts, k, np.inf, counts)
    layouts.pipe[k, :replicas, SHARE] = counts
    return True


# --- moves: groups change places, replicas and sizes ------------------------------------------------------------------


@machine_code
def chance(drawn: Ints) -> float:
    """From 0 to 1, the next one of a sequence (L'Ecuyer, 1988, two generators combined)."""
    drawn[0] = 40014 * drawn[0] % 2147483563
    drawn[1] = 40692 * drawn[1] % 2147483399
    return float((drawn[0] - drawn[1]) % 2147483562 / 2147483562.0)


@machine_code
def one_of(n: int, drawn: Ints) -> int:
    return int(chance(drawn) * n)


@machine_code
def a_replica(layouts: Layouts, odd: Ints, drawn: Ints) -> int:
    """Of the layout that is tried; rather one that is not as most are."""
    if odd[0] > 0 and chance(drawn) < ODD:
        d = odd[1 + one_of(odd[0], drawn)]
        if d < layouts.pipes[TRIED]:
            return int(d)
    return one_of(layouts.pipes[TRIED], drawn)


@machine_code
def sort(job: Job, pool: Ints, count: int, by_speed: bool) -> None:
    """Ranks in ascending order, or the fastest first."""
    for i in range(1, count):
        rank = pool[i]
        key = job.speed[rank] if by_speed else 0
        j = i
        while j > 0 and (
            (by_speed and job.speed[pool[j - 1]] > key)
            or ((not by_speed or job.speed[pool[j - 1]] == key) and pool[j - 1] > rank)
        ):
            pool[j] = pool[j - 1]
            j -= 1
        pool[j] = rank


@machine_code
def new_group(job: Job, tables: Tables, pool: Ints, size: int) -> int:
    ranks = pool[:size].copy()
    sort(job, ranks, size, False)
    return group_of(job, tables, ranks, size)


@machine_code
def add_idle(job: Job, tables: Tables, layouts: Layouts, node: int, pool: Ints, count: int) -> int:
    """Ranks of a node, or of any where it is negative, that the layout that is tried has no use for, after those that
    are in the pool; how many it has then."""
    busy = np.zeros(job.node.size, np.bool_)
    for d in range(layouts.pipes[TRIED]):
        for s in range(layouts.pipe[TRIED, d, STAGES]):
            g = layouts.groups[TRIED, d, s]
            for t in range(tables.group[g, SIZE]):
                busy[tables.ranks[g, t]] = True
    for rank in range(busy.size):
        if not busy[rank] and (node < 0 or job.node[rank] == node):
            pool[count] = rank
            count += 1
    return count


@machine_code
def able(job: Job, most: int) -> int:
    """How many degrees there are of at most so many ranks."""
    found = 0
    for size in job.degrees:
        found += size <= most
    return found


@machine_code
def is_degree(job: Job, size: int) -> bool:
    found = able(job, size)
    return found > 0 and job.degrees[found - 1] == size


@machine_code
def idle_group(job: Job, tables: Tables, layouts: Layouts, drawn: Ints) -> int:
    """The fastest idle ranks of a node, as many as can be or the next smaller degree; -1 where there are none."""
    pool = np.empty(job.node.size, np.int64)
    count = add_idle(job, tables, layouts, -1, pool, 0)
    if count == 0:
        return -1
    node = job.node[pool[one_of(count, drawn)]]
    mine = 0
    for i in range(count):
        if job.node[pool[i]] == node:
            pool[mine] = pool[i]
            mine += 1
    sort(job, pool, mine, True)
    sizes = able(job, mine)
    if sizes == 0:
        return -1
    fewest = max(0, sizes - 2)
    return new_group(job, tables, pool, job.degrees[fewest + one_of(sizes - fewest, drawn)])


@machine_code
def insert(layouts: Layouts, d: int, s: int, group: int) -> None:
    """A further stage of a replica that is tried."""
    stages, groups = layouts.pipe[TRIED, d, STAGES], layouts.groups[TRIED, d]
    for i in range(stages, s, -1):
        groups[i] = groups[i - 1]
    groups[s] = group
    layouts.pipe[TRIED, d, STAGES] = stages + 1


@machine_code
def remove(layouts: Layouts, d: int, s: int) -> int:
    """A stage less; returns its group."""
    stages, groups = layouts.pipe[TRIED, d, STAGES], layouts.groups[TRIED, d]
    found = groups[s]
    for i in range(s, stages - 1):
        groups[i] = groups[i + 1]
    layouts.pipe[TRIED, d, STAGES] = stages - 1
    return int(found)


@machine_code
def at_home(tables: Tables, layouts: Layouts, home: int, which: int) -> tuple[int, int, int]:
    """How many groups are on a node and on no other; replica and stage of one of them, by its number."""
    found, replica, stage = 0, -1, -1
    for d in range(layouts.pipes[TRIED]):
        for s in range(layouts.pipe[TRIED, d, STAGES]):
            if tables.group[layouts.groups[TRIED, d, s], HOME] == home:
                if found == which:
                    replica, stage = d, s
                found += 1
    return found, replica, stage


@machine_code
def placed(layouts: Layouts, move: int, most: int, d: int, a: int, odd: Ints, drawn: Ints) -> int:
    """Groups get other places, in a replica or in two: which other one is changed, -1 if nothing is."""
    n, mine = layouts.pipe[TRIED, d, STAGES], layouts.groups[TRIED, d]
    if move == 0:  # two groups of a replica in each other's places, or one in another place
        b = one_of(n, drawn)
        if a == b:
            return -1
        if chance(drawn) < 0.5:
            mine[a], mine[b] = mine[b], mine[a]
        else:
            insert(layouts, d, b, remove(layouts, d, a))
        return d
    e = a_replica(layouts, odd, drawn)
    theirs, m = layouts.groups[TRIED, e], layouts.pipe[TRIED, e, STAGES]
    if d == e:
        return -1
    if move == 1:  # groups of two replicas
        b = one_of(m, drawn)
        mine[a], theirs[b] = theirs[b], mine[a]
    else:  # a group goes to another replica
        if m == most:
            return -1
        insert(layouts, e, one_of(m + 1, drawn), remove(layouts, d, a))
    return e


@machine_code
def alike(tables: Tables, layouts: Layouts, d: int, e: int) -> bool:
    """A replica's groups in the order of those of another one, as far as they are alike."""
    n, mine = layouts.pipe[TRIED, d, STAGES], layouts.groups[TRIED, d]
    left, order, changed = mine[:n].copy(), np.full(n, -1, np.int64), False
    for s in range(min(n, layouts.pipe[TRIED, e, STAGES])):
        other = layouts.groups[TRIED, e, s]
        for i in range(n):
            same = left[i] >= 0 and tables.group[left[i], SIZE] == tables.group[other, SIZE]
            if same and tables.group[left[i], SLOWEST] == tables.group[other, SLOWEST]:
                order[s], left[i] = left[i], -1
                break
    i = 0
    for s in range(n):
        if order[s] < 0:
            while left[i] < 0:
                i += 1
            order[s], left[i] = left[i], -1
        changed |= order[s] != mine[s]
        mine[s] = order[s]
    return changed


@machine_code
def resized(job: Job, tables: Tables, layouts: Layouts, move: int, d: int, a: int, drawn: Ints) -> int:
    """Groups of a node become other ones: the other replica that is changed, -1 if nothing is."""
    mine = layouts.groups[TRIED, d, a]
    size, home = tables.group[mine, SIZE], tables.group[mine, HOME]
    if home < 0:
        return -1
    pool = np.empty(job.node.size, np.int64)
    for t in range(size):
        pool[t] = tables.ranks[mine, t]
    if move == 9:  # a group becomes two stages: its faster ranks, and the others
        half = size // 2
        if not is_degree(job, half) or layouts.pipe[TRIED, d, STAGES] == layouts.groups.shape[2]:
            return -1
        sort(job, pool, size, True)
        layouts.groups[TRIED, d, a] = new_group(job, tables, pool, half)
        insert(layouts, d, a + 1, new_group(job, tables, pool[half:], half))
        return d
    places, _, _ = at_home(tables, layouts, home, -1)
    _, e, b = at_home(tables, layouts, home, one_of(places, drawn))
    same = d == e and a == b
    if not same:
        theirs = layouts.groups[TRIED, e, b]
        for t in range(tables.group[theirs, SIZE]):
            pool[size] = tables.ranks[theirs, t]
            size += 1
    if move == 6:  # two groups become one
        if same or not is_degree(job, size):
            return -1
        layouts.groups[TRIED, d, a] = new_group(job, tables, pool, size)
        remove(layouts, e, b)
        return e
    # Ranks of a node change between a group, those that are idle, and another group.
    count = add_idle(job, tables, layouts, home, pool, size)
    sort(job, pool, count, True)
    if able(job, count) == 0:
        return -1
    first = job.degrees[one_of(able(job, count), drawn)]
    sizes = able(job, count - first)
    second, late = 0, False
    if not same and sizes > 0:
        fewest = max(0, sizes - 2)
        second = job.degrees[fewest + one_of(sizes - fewest, drawn)]
        late = chance(drawn) < 0.5
    one = new_group(job, tables, pool, first)
    other = new_group(job, tables, pool[first:], second) if second > 0 else -1
    if late:
        one, other = other, one
    changed = one != mine or (not same and other != layouts.groups[TRIED, e, b])
    layouts.groups[TRIED, d, a] = one
    if not same:
        layouts.groups[TRIED, e, b] = other
        if other < 0:
            remove(layouts, e, b)
    return e if changed else -1


@machine_code
def moved(job: Job, tables: Tables, layouts: Layouts, odd: Ints, drawn: Ints, flags: Ints) -> bool:
    """Something is changed in the layout that is tried, whose replicas may be left without groups then; by `flags`,
    which of them are not what they were. Whether anything is."""
    move, left = 0, chance(drawn) * sum(MOVES)
    while move < len(MOVES) - 1 and left >= MOVES[move]:
        left -= MOVES[move]
        move += 1
    most = layouts.groups.shape[2]
    pipes = layouts.pipes[TRIED]
    d = a_replica(layouts, odd, drawn)
    e, n = d, layouts.pipe[TRIED, d, STAGES]
    a = one_of(n, drawn)
    if move in (0, 1, 4):
        e = placed(layouts, move, most, d, a, odd, drawn)
    elif move in (5, 6, 9):
        e = resized(job, tables, layouts, move, d, a, drawn)
    elif move == 2:  # without one of its groups
        if n == 1:
            return False
        remove(layouts, d, a)
    elif move == 3:  # with a group of idle ranks
        group = idle_group(job, tables, layouts, drawn)
        if group < 0 or n == most:
            return False
        insert(layouts, d, one_of(n + 1, drawn), group)
    elif move == 7:
        e = one_of(pipes, drawn)
        if d == e or not alike(tables, layouts, d, e):
            return False
        e = d
    elif move == 8:  # without a replica
        if pipes == 1:
            return False
        layouts.pipe[TRIED, d, STAGES] = 0
    elif move == 12:  # one replica of two's groups
        e = one_of(pipes, drawn)
        if d == e or n + layouts.pipe[TRIED, e, STAGES] > most:
            return False
        for s in range(layouts.pipe[TRIED, e, STAGES]):
            layouts.groups[TRIED, d, n + s] = layouts.groups[TRIED, e, s]
        layouts.pipe[TRIED, d, STAGES] += layouts.pipe[TRIED, e, STAGES]
        layouts.pipe[TRIED, e, STAGES] = 0
    else:  # a replica of idle ranks, or of some of the groups of one
        group = idle_group(job, tables, layouts, drawn) if move == 10 else -1
        if pipes == layouts.pipe.shape[1] or (move == 10 and group < 0):
            return False
        e = pipes
        layouts.pipes[TRIED], layouts.pipe[TRIED, e, STAGES] = pipes + 1, 0
        layouts.pipe[TRIED, e, SHARE] = max(1, job.micro_batches // (pipes + 1))
        if move == 10:
            insert(layouts, e, 0, group)
            d = e
        for s in range(n - 1 if move == 11 else -1, -1, -1):
            if chance(drawn) < 0.5:
                insert(layouts, e, 0, remove(layouts, d, s))
    if e < 0:
        return False
    flags[d] = flags[e] = 2
    return True


@machine_code
def neighbour(job: Job, tables: Tables, layouts: Layouts, odd: Ints, drawn: Ints, flags: Ints) -> bool:
    """The layout that is tried becomes another one: one change, or two, and layers that follow. Whether it is one.
    By `flags`, 1 or 2 for replicas that are not what they are in the present layout."""
    if not moved(job, tables, layouts, odd, drawn, flags):
        return False
    whole = True
    for d in range(layouts.pipes[TRIED]):
        whole &= layouts.pipe[TRIED, d, STAGES] > 0
    if chance(drawn) < TWICE and whole:
        moved(job, tables, layouts, odd, drawn, flags)
    for d in range(layouts.pipes[TRIED] - 1, -1, -1):
        if layouts.pipe[TRIED, d, STAGES] == 0:
            last = layouts.pipes[TRIED] - 1
            if d != last:
                copied(layouts, TRIED, last, TRIED, d)
                flags[d], flags[last] = max(1, flags[last]), 1
            layouts.pipes[TRIED] = last
    replicas = layouts.pipes[TRIED]
    if replicas == 0 or replicas > job.micro_batches:
        return False
    same = replicas == layouts.pipes[NOW]
    anew = job.state[replicas] != job.state[layouts.pipes[NOW]]
    for d in range(replicas):
        if flags[d] == 2 or anew:
            flags[d] = 2
            count = layouts.pipe[TRIED, d, SHARE] if same else job.micro_batches // replicas
            stages = layouts.pipe[TRIED, d, STAGES]
            row = cut(job, tables, layouts.groups[TRIED, d], stages, max(1, count), replicas)
            if row < 0:
                return False
            layouts.pipe[TRIED, d, ROW] = row
    return True


@machine_code
def shifted(job: Job, tables: Tables, layouts: Layouts, drawn: Ints, flags: Ints) -> bool:
    """A layer of a replica from one stage to another."""
    d = one_of(layouts.pipes[TRIED], drawn)
    stages, row = layouts.pipe[TRIED, d, STAGES], layouts.pipe[TRIED, d, ROW]
    a, b = one_of(stages, drawn), one_of(stages, drawn)
    if a == b or tables.stage[row, HELD, a] == 1:
        return False
    counts = tables.stage[row, HELD, :stages].copy()
    counts[a] -= 1
    counts[b] += 1
    flags[d] = 2
    groups, replicas = layouts.groups[TRIED, d], layouts.pipes[TRIED]
    layouts.pipe[TRIED, d, ROW] = row_of(job, tables, groups, stages, counts, replicas)
    return True


# --- annealing --------------------------------------------------------------------------------------------------------


@machine_code
def settle(layouts: Layouts, flags: Ints, odd: Ints) -> None:
    """What was tried is where the search is. `flags`: replicas that are not what they were."""
    pipes = layouts.pipes[TRIED]
    layouts.pipes[NOW] = pipes
    layouts.score[NOW] = layouts.score[TRIED]
    for d in range(pipes):
        if flags[d]:
            copied(layouts, TRIED, d, NOW, d)
        layouts.pipe[NOW, d, SHARE] = layouts.pipe[TRIED, d, SHARE]
    odd[0] = 0
    if pipes > FEW_ALIKE:  # what most are, if most are alike (Boyer and Moore)
        usual, votes = -1, 0
        for d in range(pipes):
            row = layouts.pipe[NOW, d, ROW]
            if votes == 0:
                usual = row
            votes += 1 if row == usual else -1
        others = 0
        for d in range(pipes):
            if layouts.pipe[NOW, d, ROW] != usual:
                others += 1
                odd[others] = d
        if pipes - others > FEW_ALIKE:
            odd[0] = others


@machine_code
def begin_cycle(layouts: Layouts, turn: Ints) -> None:
    """The layout to begin with is that to be tried: every other time the best one, else one elsewhere."""
    turn[CYCLES] += 1
    turn[TRIAL] = turn[SHAKE] = 0
    begin = BEST
    if turn[CYCLES] % 2 == 0:
        turn[CYCLE] *= 2
    elif turn[LEFT] > 0:
        begin = turn[ELSEWHERE]
        turn[ELSEWHERE] += 1
        turn[LEFT] -= 1
    else:
        turn[SHAKE] = SHAKEN
    copy(layouts, begin, TRIED)


@machine_code
def anneal(job: Job, tables: Tables, layouts: Layouts, turn: Ints, odd: Ints, drawn: Ints, trials: int) -> int:
    """So many changes tried; how many are left where the tables are full."""
    most = layouts.pipe.shape[1]
    flags, counts = np.zeros(most, np.int64), np.empty(most, np.int64)
    for done in range(trials):
        if full(tables, most, MOST_NEW):
            return trials - done
        turn[TRIAL] += 1
        if turn[TRIAL] >= turn[CYCLE]:
            begin_cycle(layouts, turn)
            flags[:] = 1
            settle(layouts, flags, odd)
        flags[:] = 0
        shaking = turn[SHAKE] > 0
        turn[SHAKE] -= shaking
        if not shaking and chance(drawn) < BY_HAND:
            found = shifted(job, tables, layouts, drawn, flags)
        else:
            found = neighbour(job, tables, layouts, odd, drawn, flags)
        if found:
            borne, best_s = energy(layouts, NOW), layouts.score[BEST, 0]
            if best_s < np.inf:  # by how much more, on average: then chance bears it as Metropolis has it
                hot = HOTTER if turn[CYCLES] % 2 else HOT
                borne += hot * best_s * (1.0 - turn[TRIAL] / turn[CYCLE]) ** 2 * -np.log(1.0 - chance(drawn))
            if shaking:
                borne = np.inf
            score(job, tables, layouts, TRIED, borne, counts)
            found = layouts.score[TRIED, 0] < np.inf and energy(layouts, TRIED) <= borne
            for d in range(layouts.pipes[TRIED] if job.beside and found else 0):
                if flags[d] == 2:
                    found &= has_room(job, tables, layouts.groups[TRIED, d], layouts.pipe[TRIED, d, ROW])
        if found:
            for d in range(layouts.pipes[TRIED]):
                layouts.pipe[TRIED, d, SHARE] = counts[d]
            settle(layouts, flags, odd)
            best = better(layouts, NOW, BEST)
            for d in range(layouts.pipes[NOW] if job.beside and best else 0):
                best &= has_room(job, tables, layouts.groups[NOW, d], layouts.pipe[NOW, d, ROW])
            if best:
                if layouts.score[BEST, 0] < np.inf:
                    copy(layouts, BEST, FORMER + turn[BEFORE] % turn[KEPT])
                    turn[BEFORE] += 1
                copy(layouts, NOW, BEST)
        else:
            layouts.pipes[TRIED] = layouts.pipes[NOW]
            for d in range(layouts.pipes[NOW]):
                if flags[d]:
                    copied(layouts, NOW, d, TRIED, d)
    return 0
