"""Machine code of the search: changes, cuts, plays and accepts layouts, again and again. Pure.

`resihp.pipeline.timeline` defines the meaning of an order, and a pipeline takes the same time here, to rounding:
`play_pipeline` walks the orders of 1F1B and zero-bubble (`resihp.pipeline.schedules`) in a sequence in which all
predecessors of a primitive have been done before. Numba compiles the functions when they are first called and keeps the
result on disk, beside this file or in the user's cache, and never where a file in the current folder says; where
neither can be written, it compiles again in each process. Without numba, everything works as plain Python, a hundred
times slower. All of it is in one module, because that cache notices changes of a function's own file only. In this
order: pipelines played and cut, tables of known facts (`Tables`), layouts, moves, annealing.

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
"""Environment variables with the place of numba's compiled functions, and the class that locates it."""
TIME_TOLERANCE = 1e-9
"""Relative difference below which two times count as equal."""
MIN_ORDER_GAIN = 1e-3
"""Relative gain that is required for a pipeline to get orders of its own."""
ORDER_RULES = ((-1, 0.0), (1, 0.5), (2, 0.5))
"""Rules for such orders: `write_limits`, and `patience` of `schedule_pipeline`. Measured: many more rules gain another
third of a promille on average."""
PARTITION_OFFERS = 5
"""Partitions of a pipeline whose neighbours are considered."""
EXTRA_DEPTHS = (-1, 0, 1, 2, 3, 4, 5, 6, 7)
PATIENCE_VALUES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Rules for the orders of a plan, in place of `ORDER_RULES`."""

START_TEMPERATURE = 0.005
"""Share of the best time by which a change may be worse at the beginning of a cycle, about. Of 58 random jobs, in a
second: 0.4 % above the best of five searches on average, and 0.8 % with 0.02."""
OTHER_START_TEMPERATURE = 0.0075
"""The same share for a cycle that starts from another layout."""
SHAKE_TRIALS = 15
"""Changes of any cost that are made to the best layout if a cycle starts from another layout."""
DIVISIBLE_WEIGHT = 0.5
"""Weight of the time that divisible micro-batches would take."""
TWO_CHANGES_PROBABILITY = 0.25
"""Probability that two changes are tried as one."""
LAYER_MOVE_PROBABILITY = 0.1
"""Probability that a layer moves from one stage to another."""
MAX_UNGROUPED_REPLICAS = 4
"""Most replicas for which it does not matter which are equal."""
ODD_REPLICA_PROBABILITY = 0.7
"""Probability of choosing a replica that differs from most, if most are equal."""
MAX_NEW_GROUPS = 8
"""Most groups that a single trial may create."""
MOVE_WEIGHTS = (3.0, 3.0, 2.0, 3.0, 1.5, 2.5, 1.0, 0.7, 0.5, 0.7, 0.5, 0.3, 0.3)
"""Relative frequency of each move, see `make_move`."""

# Columns of the tables, by the table's subject.
STAGES, ROW, SHARE = range(3)
"""Columns of a pipeline: number of stages; its row in the tables; its micro-batches."""
SIZE, SLOWEST, HOME, MAX_BESIDE = range(4)
"""Columns of a group: ranks, number of the lowest speed, number of the node or -1 for several, and then the most layers
beside its ranks' state, as a stage that is neither first nor last, last, first, or both."""
MAX_COUNT, RULE = 1, 2
"""Columns of a row, besides `STAGES`: micro-batches that memory allows; the best of `ORDER_RULES`, from 1 on, 0 if not
yet known, -1 if none is worth it."""
EXPOSED, RAMP, PACE = range(3)
"""Columns of a row: seconds of the gradient sums after the last backward, over healthy links; and `RAMP` plus `PACE`
for each micro-batch, a lower bound of the time under any orders."""
F, B, W, LATE, LAYER_SUM_S = range(5)
"""Columns of a stage, in seconds: F, B (including W if not separate) and W of a micro-batch; the transfer to the next
stage, or back; the gradient sums of a layer."""
MAX_ALIVE, LAYERS, BUCKET = range(3)
"""Columns of a stage: micro-batches alive at once that memory allows, layers, least layers of a part of the sums."""
CURRENT, CANDIDATE, BEST, QUERIED, FORMER = range(5)
"""Layouts: the present one of the search, the one being tried, the best one, one that the caller asked about, and the
first of the former best ones; after them the starting layouts of cycles to come."""
TRIAL, CYCLE, CYCLES, SHAKES_LEFT, FORMER_COUNT, FORMER_KEPT, NEXT_START, STARTS_LEFT = range(8)
"""Counters of a search: trials of this cycle, and its length; cycles; remaining trials of random changes; number of
former best layouts, and of those kept; index of the next starting layout, and how many are left."""


class Costs(NamedTuple):
    """Costs of the model under the schedule."""

    sums: Floats
    """(3, layers + 1): seconds of F, B, W of all layers before each layer."""
    ends: Floats
    """(2, 3): seconds of the embedding, and of the head."""
    split: bool
    """Whether W is separate from B."""
    parts: int
    """Most parts in which a stage's gradients are summed."""


class PipeKind(NamedTuple):
    """Facts that decide a pipeline's time, by stage."""

    speeds: Floats
    late: Floats
    """Seconds to the next stage, and back; 0 for the last stage."""
    layer_sum_s: Floats
    """Seconds in which a layer's gradients are summed."""
    bucket: Ints
    """Least layers of a part of the sums."""


class Job(NamedTuple):
    """A situation. Ranks, nodes and speeds are numbers; a higher number of a speed is a lower speed."""

    costs: Costs
    speed: Ints
    """Number of the speed, by rank."""
    speeds: Floats
    node: Ints
    """Number of the node, by rank."""
    links: Floats
    """Speeds of links between nodes."""
    transfers: Ints
    """Number of the transfer time, by pair of nodes."""
    late: Floats
    """Seconds of a transfer, by the number in `transfers`."""
    degrees: Ints
    """Allowed degrees of groups, ascending."""
    layer_sum_s: Floats
    """Seconds in which a layer's gradients are summed, by degree."""
    bucket: Ints
    """Least layers of a part of the sums, by degree."""
    state: Ints
    """Number of the state's size per parameter, by number of replicas."""
    needs: Ints
    """Bytes by number in `state`, degree and kind of stage (1 last, 2 first, 3 both): besides the layers, of a layer's
    state, and of a layer's activations of a micro-batch."""
    left_bytes: Ints
    """Bytes left beside its present state, by rank."""
    seat: Ints
    """Present place, by rank: index in its group and the size of that group, 0 if it holds nothing; first and last
    layer; whether it holds the embedding and the head."""
    carried: Ints
    """Bytes of new state by degree and kind of stage, as in `needs`: without layers, and for each layer."""
    kept_factor: float
    """Factor on the bytes of new state that the rank already holds."""
    room: int
    """Bytes of a device."""
    micro_batches: int
    step_s: float
    linked: bool
    """Whether gradient sums use slow links."""
    beside: bool
    """Whether there must be room beside the present state."""
    own: bool
    """Whether pipelines may have orders of their own."""


class Tables(NamedTuple):
    """Known facts about groups, about pipelines to be cut, and about cut pipelines (rows)."""

    used: Ints
    """Number of entries of each table."""
    group_index: Ints
    ranks: Ints
    """(groups, ranks), in ascending order; -1 after the last."""
    group: Ints
    cut_index: Ints
    cut_keys: Ints
    cut_row: Ints
    """Row of a cut pipeline, -1 if it does not fit."""
    row_index: Ints
    row_keys: Ints
    row: Ints
    row_s: Floats
    stage: Ints
    """(rows, columns, stages), like `stage_s`."""
    stage_s: Floats
    times: Floats
    """(rows, micro-batches): played seconds, 0 if not played."""


class Layouts(NamedTuple):
    """Several layouts side by side; the first index is the layout's."""

    pipes: Ints
    """Number of pipelines."""
    pipe: Ints
    """(layouts, pipes, columns)."""
    groups: Ints
    """(layouts, pipes, stages): numbers of groups."""
    score: Floats
    """(layouts, 2): seconds of an iteration, and the seconds if micro-batches were divisible."""


def machine_code(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, compiled when it is first called."""
    with _cache_of_the_environment():
        try:
            from numba import njit
        except Exception:  # noqa: BLE001 - not installed, or an unreadable file of settings in this folder
            return function
        compiled: Any = njit(error_model="numpy", nogil=True)(function)
        try:
            compiled._cache = _lasting_cache()(function)
        except (ImportError, AttributeError):  # another version of numba, with a different cache
            compiled = njit(cache=True, error_model="numpy", nogil=True)(function)
        except RuntimeError:  # no place for the cache can be written
            pass
        return cast("Callable[P, R]", compiled)


@contextmanager
def _cache_of_the_environment() -> Iterator[None]:
    """Make numba choose the place of its cache by environment variables alone.

    It also takes settings from `.numba_config.yaml` in the current folder, which may be anybody's, and unpickles the
    files that it finds in the cache. A variable that is set, even to an empty value, overrules that file.
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
    """Make numba read the variables again, if it has been imported."""
    if (config := sys.modules.get("numba.core.config")) is not None:
        with suppress(Exception):  # unreadable settings in the current folder
            config.reload_config()


def _lasting_cache() -> Callable[..., Any]:
    """Return numba's cache class, made robust against a full disk and truncated files.

    Entries that cannot be read are compiled, and kept if possible. Numba ignores such errors on Windows only. Raises
    ImportError.
    """
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
def play_pipeline(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Return the seconds of a pipeline for `count` micro-batches, under 1F1B, or ZB-H1 if `split`.

    `late[s]`: the transfer from stage s to the next one and back. All arguments are by stage; without `split`, `b`
    includes the gradients of weights.

    In turn t stage s begins the forward of micro-batch t and the backward that follows it there, of micro-batch t -
    (stages - 1 - s): its predecessor on stage s + 1 was done in the turn before. If a turn delays all stages by the
    same time, so do those that follow, as long as there are further forwards.
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

    Every stage waits for its first forward, and for its first backward after it has no further forward to do before it,
    and its last backward passes through all stages before it.
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
    """Write the seconds of each stage into `f`, `b`, `w`."""
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
    """Return the seconds of a pipeline's gradient sums after its last backward (`resihp.scheduler.cost.gradient_sync`).

    `work`: seconds of computation during which they are summed; `slowed`: factor on the sums' time, by stage.
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


@machine_code
def write_bounded_partition(
    bound: float, layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints
) -> bool:
    """Write the partition within `bound` into `counts`, with most layers on the fastest stages; False if they do not
    fit."""
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
def write_best_partition(count: int, kind: PipeKind, limits: Ints, costs: Costs, offers: int, counts: Ints) -> float:
    """Write the layers of each stage into `counts` so that the pipeline is fast for `count` micro-batches.

    Returns the seconds, infinite if memory does not suffice. `limits`: most layers of each stage. The partition is the
    best of some that may be best for some number of micro-batches (`layouts.layers.trade_offs`), improved by moving a
    layer from one stage to another, where that promises most, as long as it helps.
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
                    continue  # a stage that is not faster would then have more to do than this one has now
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
def write_even_partition(layers: int, speeds: Floats, extra: Floats, limits: Ints, counts: Ints) -> float:
    """Return the shortest possible time of the slowest stage: one layer after the other goes where it is done first.

    `extra`: other work of the stages, in layers.
    """
    bound = paces = 0.0
    outside, layers_left = float(layers), layers
    for s in range(speeds.size):
        outside += extra[s]
        paces += speeds[s]
    for s in range(speeds.size):  # layers that are done before the last one can be, if layers were divisible
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
    """Return the seconds of a pipeline with its gradient sums, or a lower bound unless `exactly`.

    Infinite if it cannot be less than `below`. `times`: work space for the stages' times, and ones.
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
    """Return the seconds of a pipeline whose stages take what is ready, a B before an F before a W.

    Infinite if that is not less than `goal`. Writes into `order` (stages, primitives), unless it is empty, 3 times the
    micro-batch plus 0, 1, 2 for F, B, W. `limits`: most micro-batches of each stage between F and B; `caps`: most
    between F and W. A W does not begin if another primitive arrives before `patience` of it has passed. The stage that
    can begin first does so: then every arrival at a stage until that moment has been sent.
    """
    forth, back = np.full((stages, count + 1), np.inf), np.full((stages, count + 1), np.inf)
    done = np.zeros((stages, 3), np.int64)
    end, start, next_kind = np.zeros(stages), np.full(stages, np.inf), np.zeros(stages, np.int64)
    remaining_s = np.empty(stages)
    """Remaining work of a stage, and, if W is not separate, the backwards of the stages before it after that."""
    before = 0.0
    for s in range(stages):
        remaining_s[s] = count * (f[s] + b[s] + (w[s] if split else 0.0)) + before
        before += 0.0 if split else b[s] + late[s]
    forth[0, :count] = 0.0
    start[0] = 0.0
    last = 0.0
    for _ in range(stages * count * (3 if split else 2)):
        s = 0
        for i in range(1, stages):
            if start[i] < start[s]:
                s = i
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
def write_limits(stages: int, count: int, further: int, limits: Ints) -> None:
    """Write the limits of 1F1B plus `further` micro-batches between F and B into `limits`; no limit if negative."""
    for s in range(stages):
        limits[s] = count if further < 0 else stages - s + further


@machine_code
def schedule_lower_bound(stages: int, count: int, f: Floats, b: Floats, w: Floats, late: Floats, split: bool) -> float:
    """Return a lower bound of `schedule_pipeline` under any rules.

    Every stage waits for its first forward, and its last backward passes through all stages before it.
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
    """Return `schedule_lower_bound` of the stage with most work per micro-batch, as a ramp and a pace."""
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
    """Return the seconds of a pipeline for so many micro-batches, played unless known."""
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
    """Return the seconds of a pipeline in the best orders of its own, written into `order` like `schedule_pipeline`.

    If the schedule's orders are as good, returns their seconds, and False.
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


@machine_code
def share_out(
    total: int, rows: Ints, tables: Tables, split: bool, own: bool, below: float, counts: Ints
) -> tuple[float, float]:
    """Write the micro-batches of each pipeline into `counts`, so that the last pipeline ends as early as possible.

    The sum of `counts` is `total`. Returns that end, and when all would end if micro-batches were divisible; infinite
    if memory does not suffice, or if the time is clearly not below `below`.

    `rows`: the pipelines' rows in the tables; `own`: with orders of their own if these are faster.
    """
    pipes, max_counts = rows.size, tables.row[:, MAX_COUNT]
    done, paces = float(total), 0.0
    usual, begin, slope = np.empty(pipes, np.int64), np.empty(pipes), np.empty(pipes)
    for d in range(pipes):
        usual[d] = min(max(1, total // pipes), max_counts[rows[d]])
        slope[d] = tables.row_s[rows[d], PACE]
        if usual[d] < 1 or not (np.isfinite(slope[d]) and slope[d] > 0.0):
            return np.inf, np.inf
        done += tables.row_s[rows[d], RAMP] / slope[d]
        paces += 1.0 / slope[d]
    for d in range(pipes):  # a line through a played time, instead of the lower bound
        if done / paces > below:
            return np.inf, np.inf
        begin[d] = pipeline_seconds(rows[d], usual[d], tables, split, own)
        done += begin[d] / slope[d] - usual[d] - tables.row_s[rows[d], RAMP] / slope[d]
    if done / paces > below:
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
    while True:  # exactly: the last one gives one away as long as another finishes it earlier
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
        if fewer >= ends[last]:  # its own orders may be worse for fewer, and then this exchange would not end
            return ends[last], max(divisible_s, 0.0)
        counts[last] -= 1
        counts[receiver] += 1
        ends[receiver], ends[last] = first, fewer


@machine_code
def divisible_seconds(total: int, rows: Ints, max_counts: Ints, usual: Ints, begin: Floats, slope: Floats) -> float:
    """Return when all end if micro-batches are divisible.

    Pipelines without memory for more take what they can, the others the rest. Infinite if some are left over.
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
    """Write whole micro-batches into `counts`, by the lines through played times; False if memory does not suffice."""
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


# --- tables of known facts --------------------------------------------------------------------------------------------


@machine_code
def lookup(index: Ints, keys: Ints, key: Ints, length: int) -> tuple[int, int]:
    """Return the place of a key in a hash table, present or not; and its number, -1 if it is not present."""
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
def is_full(tables: Tables, pipes: int, groups: int) -> bool:
    """Return whether another trial, or layout, of so many pipelines and new groups might have no place."""
    rows = tables.used[2] + 2 * pipes + 8 > tables.row.shape[0] or tables.used[1] + pipes + 8 > tables.cut_row.size
    return bool(rows or tables.used[0] + groups > tables.group.shape[0])


@machine_code
def group_number(job: Job, tables: Tables, ranks: Ints, size: int) -> int:
    """Return the number of a group."""
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
        tables.group[number, MAX_BESIDE + kind] = job.costs.sums.shape[1] - 1
    for t in range(size):
        rank = ranks[t]
        tables.group[number, SLOWEST] = max(tables.group[number, SLOWEST], job.speed[rank])
        if job.node[rank] != job.node[ranks[0]]:
            tables.group[number, HOME] = -1
        if job.beside and job.seat[rank, 1] > 0 and not (job.seat[rank, 0] == t and job.seat[rank, 1] == size):
            for kind in range(4):
                outside_bytes, per_layer = job.carried[size, kind, 0], job.carried[size, kind, 1]
                fits = max(0, (job.left_bytes[rank] - outside_bytes) // per_layer)
                tables.group[number, MAX_BESIDE + kind] = min(tables.group[number, MAX_BESIDE + kind], fits)
    return int(number)


@machine_code
def slowest_link(job: Job, tables: Tables, a: int, b: int) -> float:
    """Return the speed of the slowest link between two groups."""
    own_node, other_node = tables.group[a, HOME], tables.group[b, HOME]
    if own_node >= 0 and other_node >= 0:
        return float(job.links[own_node, other_node])
    slowest = 1.0
    for t in range(tables.group[a, SIZE]):
        for u in range(tables.group[b, SIZE]):
            slowest = min(slowest, job.links[job.node[tables.ranks[a, t]], job.node[tables.ranks[b, u]]])
    return slowest


@machine_code
def is_on_nodes_of(job: Job, tables: Tables, a: int, b: int) -> bool:
    """Return whether a group is on no other nodes than another one."""
    for t in range(tables.group[a, SIZE]):
        is_shared = False
        for u in range(tables.group[b, SIZE]):
            is_shared |= job.node[tables.ranks[a, t]] == job.node[tables.ranks[b, u]]
        if not is_shared:
            return False
    return True


@machine_code
def transfer_number(job: Job, tables: Tables, a: int, b: int) -> int:
    """Return the number of the transfer time between two groups."""
    own_node, other_node = tables.group[a, HOME], tables.group[b, HOME]
    if own_node >= 0 and other_node >= 0:
        return int(job.transfers[own_node, other_node])
    node = job.node[tables.ranks[a, 0]]
    number = job.transfers[node, node]
    if is_on_nodes_of(job, tables, a, b) and is_on_nodes_of(job, tables, b, a):
        return int(number)
    longest = -1.0
    for t in range(tables.group[a, SIZE]):
        for u in range(tables.group[b, SIZE]):
            own_node, other_node = job.node[tables.ranks[a, t]], job.node[tables.ranks[b, u]]
            if own_node != other_node and job.late[job.transfers[own_node, other_node]] > longest:
                number = job.transfers[own_node, other_node]
                longest = job.late[number]
    return int(number)


@machine_code
def write_key(job: Job, tables: Tables, groups: Ints, stages: int, key: Ints) -> None:
    """Write a number for each stage into `key`, from 1 on: equal for pipelines with equal time and memory."""
    for s in range(stages):
        g = groups[s]
        number = tables.group[g, SIZE] * 4096 + tables.group[g, SLOWEST]
        number = number * 16384 + (transfer_number(job, tables, g, groups[s + 1]) if s + 1 < stages else 0)
        number = number * 8192 + (tables.group[g, HOME] + 1 if job.linked else 0)
        kind = 2 * (s == 0) + (s == stages - 1)
        key[1 + s] = number * 65536 + (tables.group[g, MAX_BESIDE + kind] if job.beside else 0)


@machine_code
def pipe_kind(job: Job, tables: Tables, groups: Ints, stages: int) -> PipeKind:
    speeds, late, layer_sum_s = np.empty(stages), np.zeros(stages), np.empty(stages)
    bucket = np.empty(stages, np.int64)
    for s in range(stages):
        g = groups[s]
        size = tables.group[g, SIZE]
        speeds[s] = size * job.speeds[tables.group[g, SLOWEST]]
        layer_sum_s[s], bucket[s] = job.layer_sum_s[size], job.bucket[size]
        if s + 1 < stages:
            late[s] = job.late[transfer_number(job, tables, g, groups[s + 1])]
    return PipeKind(speeds, late, layer_sum_s, bucket)


@machine_code
def capacity(job: Job, s: int, stages: int, size: int, count: int, state: int) -> int:
    """Return the most layers of a stage (`cost.memory.capacity`)."""
    alive = min(count, stages if job.costs.split else stages - s)
    needs = job.needs[state, size, 2 * (s == 0) + (s == stages - 1)]
    return int(max(0, (job.room - needs[0]) // (needs[1] + alive * needs[2])))


@machine_code
def cut_pipeline(job: Job, tables: Tables, groups: Ints, stages: int, count: int, replicas: int) -> int:
    """Return the row of a pipeline with the layers that make it fastest for about so many micro-batches.

    It is one of so many replicas. -1 if the layers do not fit, or a group has stopped.
    """
    step = 1
    while count >= 8 * step:
        step *= 2
    count = max(count // step * step, min(count, stages))
    state = job.state[replicas]
    key = np.empty(stages + 1, np.int64)
    key[0] = (state * (job.micro_batches + 2) + count) * (tables.stage.shape[2] + 1) + stages
    write_key(job, tables, groups, stages, key)
    place, number = lookup(tables.cut_index, tables.cut_keys, key, stages + 1)
    if number >= 0:
        return int(tables.cut_row[number])
    number = tables.used[1]
    tables.used[1] += 1
    tables.cut_index[place] = number + 1
    for i in range(stages + 1):
        tables.cut_keys[number, i] = key[i]
    kind = pipe_kind(job, tables, groups, stages)
    limits, counts = np.empty(stages, np.int64), np.empty(stages, np.int64)
    for s in range(stages):
        limits[s] = capacity(job, s, stages, tables.group[groups[s], SIZE], min(count, stages), state)
        beside = tables.group[groups[s], MAX_BESIDE + 2 * (s == 0) + (s == stages - 1)]
        limits[s] = min(limits[s], beside if job.beside else limits[s])
    row = -1
    if np.isfinite(write_best_partition(count, kind, limits, job.costs, PARTITION_OFFERS, counts)):
        row = row_number(job, tables, groups, stages, counts, replicas)
    tables.cut_row[number] = row
    return row


@machine_code
def row_number(job: Job, tables: Tables, groups: Ints, stages: int, counts: Ints, replicas: int) -> int:
    """Return the row of a pipeline with so many layers on each stage."""
    state = job.state[replicas]
    key = np.empty(2 * stages + 1, np.int64)
    key[0] = state * (tables.stage.shape[2] + 1) + stages
    write_key(job, tables, groups, stages, key)
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
    kind = pipe_kind(job, tables, groups, stages)
    max_count = stages
    for s in range(stages):
        g = groups[s]
        size, layers = tables.group[g, SIZE], counts[s]
        while max_count > 0 and layers > capacity(job, s, stages, size, max_count, state):
            max_count -= 1
        if job.beside and layers > tables.group[g, MAX_BESIDE + 2 * (s == 0) + (s == stages - 1)]:
            max_count = 0
        needs = job.needs[state, size, 2 * (s == 0) + (s == stages - 1)]
        alive = job.micro_batches
        if needs[2] > 0:
            alive = min(alive, max(0, (job.room - needs[0] - layers * needs[1]) // (needs[2] * layers)))
        tables.stage[row, MAX_ALIVE, s], tables.stage[row, LAYERS, s] = alive, layers
        tables.stage[row, BUCKET, s] = kind.bucket[s]
        tables.stage_s[row, LATE, s], tables.stage_s[row, LAYER_SUM_S, s] = kind.late[s], kind.layer_sum_s[s]
    f, b, w = tables.stage_s[row, F], tables.stage_s[row, B], tables.stage_s[row, W]
    split = job.costs.split
    write_stage_seconds(counts, kind.speeds, job.costs, f, b, w)
    for s in range(stages):
        if not np.isfinite(f[s] + b[s] + w[s]):  # the stage has stopped
            max_count = 0
    tables.row[row, STAGES], tables.row[row, RULE] = stages, 0
    tables.row[row, MAX_COUNT] = job.micro_batches if max_count == stages else max_count
    work = w if split else b
    tables.row_s[row, EXPOSED] = exposed_sums_s(
        counts, work, kind.layer_sum_s, kind.bucket, np.ones(stages), split, job.costs.parts
    )
    tables.row_s[row, RAMP], tables.row_s[row, PACE] = lower_bound_line(stages, f, b, w, kind.late, split)
    tables.times[row] = 0.0
    return int(row)


@machine_code
def has_room(job: Job, tables: Tables, groups: Ints, row: int) -> bool:
    """Return whether the ranks of a pipeline have room beside their present state (`cost.transition_memory.beside`)."""
    first, stages = 0, tables.row[row, STAGES]
    for s in range(stages):
        size, layers = tables.group[groups[s], SIZE], tables.stage[row, LAYERS, s]
        carried = job.carried[size, 2 * (s == 0) + (s == stages - 1)]
        new_bytes = carried[0] + layers * carried[1]
        for t in range(size):
            rank = tables.ranks[groups[s], t]
            seat = job.seat[rank]
            kept_bytes = 0
            if seat[0] == t and seat[1] == size:
                kept_bytes = max(0, min(first + layers, seat[3] + 1) - max(first, seat[2])) * carried[1]
                kept_bytes += job.carried[size, 2, 0] if s == 0 and seat[4] else 0
                kept_bytes += job.carried[size, 1, 0] if s == stages - 1 and seat[5] else 0
            changed = kept_bytes < new_bytes or seat[3] - seat[2] + 1 != layers
            if seat[1] > 0 and changed and new_bytes - job.kept_factor * kept_bytes > job.left_bytes[rank]:
                return False
        first += layers
    return True


# --- a layout ---------------------------------------------------------------------------------------------------------


@machine_code
def exposed_over_links_s(job: Job, tables: Tables, layouts: Layouts, k: int) -> float:
    """Return the seconds of the gradient sums after the last backward, of the pipeline with the longest.

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
    """Return the seconds after the last backward: of gradient sums, and of the step."""
    longest = 0.0
    if job.linked and layouts.pipes[k] > 1:
        longest = exposed_over_links_s(job, tables, layouts, k)
    for d in range(layouts.pipes[k] if layouts.pipes[k] > 1 else 0):
        longest = max(longest, tables.row_s[layouts.pipe[k, d, ROW], EXPOSED])
    return longest + job.step_s


@machine_code
def write_score(job: Job, tables: Tables, layouts: Layouts, k: int, below: float, counts: Ints) -> None:
    """Write the score into `layouts.score`, infinite if memory does not suffice, and the replicas' micro-batches into
    `counts`.

    `below`: a layout that clearly takes longer is not examined further, and infinite.
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
    """Return the energy for annealing: micro-batches are whole, but a faster replica counts even if none changes
    hands."""
    return float(DIVISIBLE_WEIGHT * layouts.score[k, 1] + (1.0 - DIVISIBLE_WEIGHT) * layouts.score[k, 0])


@machine_code
def is_better(layouts: Layouts, k: int, than: int) -> bool:
    """Return whether a layout is better, by time, then by how soon all replicas end."""
    seconds, other_seconds = layouts.score[k, 0], layouts.score[than, 0]
    if seconds < other_seconds * (1.0 - TIME_TOLERANCE):
        return True
    return bool(seconds <= other_seconds and layouts.score[k, 1] < layouts.score[than, 1] * (1.0 - TIME_TOLERANCE))


@machine_code
def copy_pipeline(layouts: Layouts, a: int, d: int, b: int, e: int) -> None:
    """Copy pipeline `d` of layout `a` to `e` of `b`."""
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
    """Write layout `k`. Return whether it is possible; then it has its score.

    `sizes`, `layer_counts`: ranks and layers of each group (pipelines, stages), 0 after the last; for 0 layers, the
    fastest partition is chosen.
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


# --- moves: groups change places, replicas and sizes ------------------------------------------------------------------


@machine_code
def random_share(drawn: Ints) -> float:
    """Return the next number of a sequence from 0 to 1 (L'Ecuyer, 1988, two generators combined)."""
    drawn[0] = 40014 * drawn[0] % 2147483563
    drawn[1] = 40692 * drawn[1] % 2147483399
    return float((drawn[0] - drawn[1]) % 2147483562 / 2147483562.0)


@machine_code
def random_index(n: int, drawn: Ints) -> int:
    return int(random_share(drawn) * n)


@machine_code
def random_replica(layouts: Layouts, odd: Ints, drawn: Ints) -> int:
    """Return a random replica of the layout being tried, preferably one that differs from most."""
    if odd[0] > 0 and random_share(drawn) < ODD_REPLICA_PROBABILITY:
        d = odd[1 + random_index(odd[0], drawn)]
        if d < layouts.pipes[CANDIDATE]:
            return int(d)
    return random_index(layouts.pipes[CANDIDATE], drawn)


@machine_code
def sort_ranks(job: Job, pool: Ints, count: int, by_speed: bool) -> None:
    """Sort ranks in ascending order, or the fastest first."""
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
    sort_ranks(job, ranks, size, False)
    return group_number(job, tables, ranks, size)


@machine_code
def add_idle(job: Job, tables: Tables, layouts: Layouts, node: int, pool: Ints, count: int) -> int:
    """Append ranks of a node that the layout being tried leaves idle, of any node if negative, to the pool.

    Returns the new number of ranks in the pool.
    """
    busy = np.zeros(job.node.size, np.bool_)
    for d in range(layouts.pipes[CANDIDATE]):
        for s in range(layouts.pipe[CANDIDATE, d, STAGES]):
            g = layouts.groups[CANDIDATE, d, s]
            for t in range(tables.group[g, SIZE]):
                busy[tables.ranks[g, t]] = True
    for rank in range(busy.size):
        if not busy[rank] and (node < 0 or job.node[rank] == node):
            pool[count] = rank
            count += 1
    return count


@machine_code
def degree_count_up_to(job: Job, most: int) -> int:
    """Return the number of degrees up to so many ranks."""
    degree_count = 0
    for size in job.degrees:
        degree_count += size <= most
    return degree_count


@machine_code
def is_degree(job: Job, size: int) -> bool:
    degree_count = degree_count_up_to(job, size)
    return degree_count > 0 and job.degrees[degree_count - 1] == size


@machine_code
def random_idle_group(job: Job, tables: Tables, layouts: Layouts, drawn: Ints) -> int:
    """Return a group of the fastest idle ranks of a node, of the largest possible degree or the next smaller; -1 if
    none."""
    pool = np.empty(job.node.size, np.int64)
    count = add_idle(job, tables, layouts, -1, pool, 0)
    if count == 0:
        return -1
    node = job.node[pool[random_index(count, drawn)]]
    own_count = 0
    for i in range(count):
        if job.node[pool[i]] == node:
            pool[own_count] = pool[i]
            own_count += 1
    sort_ranks(job, pool, own_count, True)
    sizes = degree_count_up_to(job, own_count)
    if sizes == 0:
        return -1
    fewest = max(0, sizes - 2)
    return new_group(job, tables, pool, job.degrees[fewest + random_index(sizes - fewest, drawn)])


@machine_code
def insert_stage(layouts: Layouts, d: int, s: int, group: int) -> None:
    """Insert a stage into a replica of the layout being tried."""
    stages, groups = layouts.pipe[CANDIDATE, d, STAGES], layouts.groups[CANDIDATE, d]
    for i in range(stages, s, -1):
        groups[i] = groups[i - 1]
    groups[s] = group
    layouts.pipe[CANDIDATE, d, STAGES] = stages + 1


@machine_code
def remove_stage(layouts: Layouts, d: int, s: int) -> int:
    """Remove a stage, and return its group."""
    stages, groups = layouts.pipe[CANDIDATE, d, STAGES], layouts.groups[CANDIDATE, d]
    group = groups[s]
    for i in range(s, stages - 1):
        groups[i] = groups[i + 1]
    layouts.pipe[CANDIDATE, d, STAGES] = stages - 1
    return int(group)


@machine_code
def groups_at_home(tables: Tables, layouts: Layouts, home: int, number: int) -> tuple[int, int, int]:
    """Return the number of groups that are on this node only; and replica and stage of the group with number
    `number`."""
    group_count, replica, stage = 0, -1, -1
    for d in range(layouts.pipes[CANDIDATE]):
        for s in range(layouts.pipe[CANDIDATE, d, STAGES]):
            if tables.group[layouts.groups[CANDIDATE, d, s], HOME] == home:
                if group_count == number:
                    replica, stage = d, s
                group_count += 1
    return group_count, replica, stage


@machine_code
def exchange_places(layouts: Layouts, move: int, most: int, d: int, a: int, odd: Ints, drawn: Ints) -> int:
    """Exchange or move groups in one replica or two. Return the other changed replica, -1 if nothing changes."""
    n, own_groups = layouts.pipe[CANDIDATE, d, STAGES], layouts.groups[CANDIDATE, d]
    if move == 0:  # exchange two groups of a replica, or move one of them
        b = random_index(n, drawn)
        if a == b:
            return -1
        if random_share(drawn) < 0.5:
            own_groups[a], own_groups[b] = own_groups[b], own_groups[a]
        else:
            insert_stage(layouts, d, b, remove_stage(layouts, d, a))
        return d
    e = random_replica(layouts, odd, drawn)
    other_groups, m = layouts.groups[CANDIDATE, e], layouts.pipe[CANDIDATE, e, STAGES]
    if d == e:
        return -1
    if move == 1:  # exchange groups of two replicas
        b = random_index(m, drawn)
        own_groups[a], other_groups[b] = other_groups[b], own_groups[a]
    else:  # move a group to another replica
        if m == most:
            return -1
        insert_stage(layouts, e, random_index(m + 1, drawn), remove_stage(layouts, d, a))
    return e


@machine_code
def match_order(tables: Tables, layouts: Layouts, d: int, e: int) -> bool:
    """Put a replica's groups into the order of those of another one, as far as they are equal."""
    n, own_groups = layouts.pipe[CANDIDATE, d, STAGES], layouts.groups[CANDIDATE, d]
    unused, order, changed = own_groups[:n].copy(), np.full(n, -1, np.int64), False
    for s in range(min(n, layouts.pipe[CANDIDATE, e, STAGES])):
        other_group = layouts.groups[CANDIDATE, e, s]
        for i in range(n):
            is_equal = unused[i] >= 0 and tables.group[unused[i], SIZE] == tables.group[other_group, SIZE]
            if is_equal and tables.group[unused[i], SLOWEST] == tables.group[other_group, SLOWEST]:
                order[s], unused[i] = unused[i], -1
                break
    i = 0
    for s in range(n):
        if order[s] < 0:
            while unused[i] < 0:
                i += 1
            order[s], unused[i] = unused[i], -1
        changed |= order[s] != own_groups[s]
        own_groups[s] = order[s]
    return changed


@machine_code
def regroup_node(job: Job, tables: Tables, layouts: Layouts, move: int, d: int, a: int, drawn: Ints) -> int:
    """Turn groups of a node into other ones. Return the other changed replica, -1 if nothing changes."""
    own_group = layouts.groups[CANDIDATE, d, a]
    size, home = tables.group[own_group, SIZE], tables.group[own_group, HOME]
    if home < 0:
        return -1
    pool = np.empty(job.node.size, np.int64)
    for t in range(size):
        pool[t] = tables.ranks[own_group, t]
    if move == 9:  # split a group into two stages: its faster ranks, and the others
        half = size // 2
        if not is_degree(job, half) or layouts.pipe[CANDIDATE, d, STAGES] == layouts.groups.shape[2]:
            return -1
        sort_ranks(job, pool, size, True)
        layouts.groups[CANDIDATE, d, a] = new_group(job, tables, pool, half)
        insert_stage(layouts, d, a + 1, new_group(job, tables, pool[half:], half))
        return d
    places, _, _ = groups_at_home(tables, layouts, home, -1)
    _, e, b = groups_at_home(tables, layouts, home, random_index(places, drawn))
    is_same = d == e and a == b
    if not is_same:
        other_group = layouts.groups[CANDIDATE, e, b]
        for t in range(tables.group[other_group, SIZE]):
            pool[size] = tables.ranks[other_group, t]
            size += 1
    if move == 6:  # join two groups
        if is_same or not is_degree(job, size):
            return -1
        layouts.groups[CANDIDATE, d, a] = new_group(job, tables, pool, size)
        remove_stage(layouts, e, b)
        return e
    # Ranks of a node move between a group, idle ranks, and another group.
    count = add_idle(job, tables, layouts, home, pool, size)
    sort_ranks(job, pool, count, True)
    if degree_count_up_to(job, count) == 0:
        return -1
    first = job.degrees[random_index(degree_count_up_to(job, count), drawn)]
    sizes = degree_count_up_to(job, count - first)
    second, is_swapped = 0, False
    if not is_same and sizes > 0:
        fewest = max(0, sizes - 2)
        second = job.degrees[fewest + random_index(sizes - fewest, drawn)]
        is_swapped = random_share(drawn) < 0.5
    first_group = new_group(job, tables, pool, first)
    second_group = new_group(job, tables, pool[first:], second) if second > 0 else -1
    if is_swapped:
        first_group, second_group = second_group, first_group
    changed = first_group != own_group or (not is_same and second_group != layouts.groups[CANDIDATE, e, b])
    layouts.groups[CANDIDATE, d, a] = first_group
    if not is_same:
        layouts.groups[CANDIDATE, e, b] = second_group
        if second_group < 0:
            remove_stage(layouts, e, b)
    return e if changed else -1


@machine_code
def make_move(job: Job, tables: Tables, layouts: Layouts, odd: Ints, drawn: Ints, flags: Ints) -> bool:
    """Change the layout being tried; replicas may be left without groups. Return whether anything changed.

    `flags` marks the changed replicas."""
    move, remaining = 0, random_share(drawn) * sum(MOVE_WEIGHTS)
    while move < len(MOVE_WEIGHTS) - 1 and remaining >= MOVE_WEIGHTS[move]:
        remaining -= MOVE_WEIGHTS[move]
        move += 1
    most = layouts.groups.shape[2]
    pipes = layouts.pipes[CANDIDATE]
    d = random_replica(layouts, odd, drawn)
    e, n = d, layouts.pipe[CANDIDATE, d, STAGES]
    a = random_index(n, drawn)
    if move in (0, 1, 4):
        e = exchange_places(layouts, move, most, d, a, odd, drawn)
    elif move in (5, 6, 9):
        e = regroup_node(job, tables, layouts, move, d, a, drawn)
    elif move == 2:  # without one of its groups
        if n == 1:
            return False
        remove_stage(layouts, d, a)
    elif move == 3:  # with a group of idle ranks
        group = random_idle_group(job, tables, layouts, drawn)
        if group < 0 or n == most:
            return False
        insert_stage(layouts, d, random_index(n + 1, drawn), group)
    elif move == 7:
        e = random_index(pipes, drawn)
        if d == e or not match_order(tables, layouts, d, e):
            return False
        e = d
    elif move == 8:  # without a replica
        if pipes == 1:
            return False
        layouts.pipe[CANDIDATE, d, STAGES] = 0
    elif move == 12:  # join the groups of two replicas
        e = random_index(pipes, drawn)
        if d == e or n + layouts.pipe[CANDIDATE, e, STAGES] > most:
            return False
        for s in range(layouts.pipe[CANDIDATE, e, STAGES]):
            layouts.groups[CANDIDATE, d, n + s] = layouts.groups[CANDIDATE, e, s]
        layouts.pipe[CANDIDATE, d, STAGES] += layouts.pipe[CANDIDATE, e, STAGES]
        layouts.pipe[CANDIDATE, e, STAGES] = 0
    else:  # a new replica of idle ranks, or of some groups of another one
        group = random_idle_group(job, tables, layouts, drawn) if move == 10 else -1
        if pipes == layouts.pipe.shape[1] or (move == 10 and group < 0):
            return False
        e = pipes
        layouts.pipes[CANDIDATE], layouts.pipe[CANDIDATE, e, STAGES] = pipes + 1, 0
        layouts.pipe[CANDIDATE, e, SHARE] = max(1, job.micro_batches // (pipes + 1))
        if move == 10:
            insert_stage(layouts, e, 0, group)
            d = e
        for s in range(n - 1 if move == 11 else -1, -1, -1):
            if random_share(drawn) < 0.5:
                insert_stage(layouts, e, 0, remove_stage(layouts, d, s))
    if e < 0:
        return False
    flags[d] = flags[e] = 2
    return True


@machine_code
def make_candidate(job: Job, tables: Tables, layouts: Layouts, odd: Ints, drawn: Ints, flags: Ints) -> bool:
    """Change the layout being tried once or twice, with the layers to follow. Return whether the result is possible.

    `flags`: 1 or 2 for replicas that differ from the present layout.
    """
    if not make_move(job, tables, layouts, odd, drawn, flags):
        return False
    whole = True
    for d in range(layouts.pipes[CANDIDATE]):
        whole &= layouts.pipe[CANDIDATE, d, STAGES] > 0
    if random_share(drawn) < TWO_CHANGES_PROBABILITY and whole:
        make_move(job, tables, layouts, odd, drawn, flags)
    for d in range(layouts.pipes[CANDIDATE] - 1, -1, -1):
        if layouts.pipe[CANDIDATE, d, STAGES] == 0:
            last = layouts.pipes[CANDIDATE] - 1
            if d != last:
                copy_pipeline(layouts, CANDIDATE, last, CANDIDATE, d)
                flags[d], flags[last] = max(1, flags[last]), 1
            layouts.pipes[CANDIDATE] = last
    replicas = layouts.pipes[CANDIDATE]
    if replicas == 0 or replicas > job.micro_batches:
        return False
    same_replica_count = replicas == layouts.pipes[CURRENT]
    state_changed = job.state[replicas] != job.state[layouts.pipes[CURRENT]]
    for d in range(replicas):
        if flags[d] == 2 or state_changed:
            flags[d] = 2
            count = layouts.pipe[CANDIDATE, d, SHARE] if same_replica_count else job.micro_batches // replicas
            stages = layouts.pipe[CANDIDATE, d, STAGES]
            row = cut_pipeline(job, tables, layouts.groups[CANDIDATE, d], stages, max(1, count), replicas)
            if row < 0:
                return False
            layouts.pipe[CANDIDATE, d, ROW] = row
    return True


@machine_code
def shift_layer(job: Job, tables: Tables, layouts: Layouts, drawn: Ints, flags: Ints) -> bool:
    """Move a layer of a replica from one stage to another."""
    d = random_index(layouts.pipes[CANDIDATE], drawn)
    stages, row = layouts.pipe[CANDIDATE, d, STAGES], layouts.pipe[CANDIDATE, d, ROW]
    a, b = random_index(stages, drawn), random_index(stages, drawn)
    if a == b or tables.stage[row, LAYERS, a] == 1:
        return False
    counts = tables.stage[row, LAYERS, :stages].copy()
    counts[a] -= 1
    counts[b] += 1
    flags[d] = 2
    groups, replicas = layouts.groups[CANDIDATE, d], layouts.pipes[CANDIDATE]
    layouts.pipe[CANDIDATE, d, ROW] = row_number(job, tables, groups, stages, counts, replicas)
    return True


# --- annealing --------------------------------------------------------------------------------------------------------


@machine_code
def accept_candidate(layouts: Layouts, flags: Ints, odd: Ints) -> None:
    """Make the tried layout the present one. `flags`: replicas that changed."""
    pipes = layouts.pipes[CANDIDATE]
    layouts.pipes[CURRENT] = pipes
    layouts.score[CURRENT] = layouts.score[CANDIDATE]
    for d in range(pipes):
        if flags[d]:
            copy_pipeline(layouts, CANDIDATE, d, CURRENT, d)
        layouts.pipe[CURRENT, d, SHARE] = layouts.pipe[CANDIDATE, d, SHARE]
    odd[0] = 0
    if pipes > MAX_UNGROUPED_REPLICAS:  # the most frequent row, if most are equal (Boyer and Moore)
        majority, votes = -1, 0
        for d in range(pipes):
            row = layouts.pipe[CURRENT, d, ROW]
            if votes == 0:
                majority = row
            votes += 1 if row == majority else -1
        odd_count = 0
        for d in range(pipes):
            if layouts.pipe[CURRENT, d, ROW] != majority:
                odd_count += 1
                odd[odd_count] = d
        if pipes - odd_count > MAX_UNGROUPED_REPLICAS:
            odd[0] = odd_count


@machine_code
def begin_cycle(layouts: Layouts, turn: Ints) -> None:
    """Copy the layout that the cycle starts from to the one being tried: every second time the best one."""
    turn[CYCLES] += 1
    turn[TRIAL] = turn[SHAKES_LEFT] = 0
    begin = BEST
    if turn[CYCLES] % 2 == 0:
        turn[CYCLE] *= 2
    elif turn[STARTS_LEFT] > 0:
        begin = turn[NEXT_START]
        turn[NEXT_START] += 1
        turn[STARTS_LEFT] -= 1
    else:
        turn[SHAKES_LEFT] = SHAKE_TRIALS
    copy_layout(layouts, begin, CANDIDATE)


@machine_code
def anneal(job: Job, tables: Tables, layouts: Layouts, turn: Ints, odd: Ints, drawn: Ints, trials: int) -> int:
    """Try `trials` changes. Return how many are left if the tables are full."""
    most = layouts.pipe.shape[1]
    flags, counts = np.zeros(most, np.int64), np.empty(most, np.int64)
    for done in range(trials):
        if is_full(tables, most, MAX_NEW_GROUPS):
            return trials - done
        turn[TRIAL] += 1
        if turn[TRIAL] >= turn[CYCLE]:
            begin_cycle(layouts, turn)
            flags[:] = 1
            accept_candidate(layouts, flags, odd)
        flags[:] = 0
        shaking = turn[SHAKES_LEFT] > 0
        turn[SHAKES_LEFT] -= shaking
        if not shaking and random_share(drawn) < LAYER_MOVE_PROBABILITY:
            accepted = shift_layer(job, tables, layouts, drawn, flags)
        else:
            accepted = make_candidate(job, tables, layouts, odd, drawn, flags)
        if accepted:
            max_energy, best_s = energy(layouts, CURRENT), layouts.score[BEST, 0]
            if best_s < np.inf:  # accept an increase by chance, on average by this much, like Metropolis
                temperature = OTHER_START_TEMPERATURE if turn[CYCLES] % 2 else START_TEMPERATURE
                max_energy += (
                    temperature * best_s * (1.0 - turn[TRIAL] / turn[CYCLE]) ** 2 * -np.log(1.0 - random_share(drawn))
                )
            if shaking:
                max_energy = np.inf
            write_score(job, tables, layouts, CANDIDATE, max_energy, counts)
            accepted = layouts.score[CANDIDATE, 0] < np.inf and energy(layouts, CANDIDATE) <= max_energy
            for d in range(layouts.pipes[CANDIDATE] if job.beside and accepted else 0):
                if flags[d] == 2:
                    accepted &= has_room(job, tables, layouts.groups[CANDIDATE, d], layouts.pipe[CANDIDATE, d, ROW])
        if accepted:
            for d in range(layouts.pipes[CANDIDATE]):
                layouts.pipe[CANDIDATE, d, SHARE] = counts[d]
            accept_candidate(layouts, flags, odd)
            best = is_better(layouts, CURRENT, BEST)
            for d in range(layouts.pipes[CURRENT] if job.beside and best else 0):
                best &= has_room(job, tables, layouts.groups[CURRENT, d], layouts.pipe[CURRENT, d, ROW])
            if best:
                if layouts.score[BEST, 0] < np.inf:
                    copy_layout(layouts, BEST, FORMER + turn[FORMER_COUNT] % turn[FORMER_KEPT])
                    turn[FORMER_COUNT] += 1
                copy_layout(layouts, CURRENT, BEST)
        else:
            layouts.pipes[CANDIDATE] = layouts.pipes[CURRENT]
            for d in range(layouts.pipes[CURRENT]):
                if flags[d]:
                    copy_pipeline(layouts, CURRENT, d, CANDIDATE, d)
    return 0
