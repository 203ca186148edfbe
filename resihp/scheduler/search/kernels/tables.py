"""Tables of known facts about groups, about pipelines to be cut, and about cut pipelines. Pure.

The module gives each group and each pipeline a number, and computes its facts once. Two pipelines with equal times and
equal memory have the same number. No fact is ever removed: `resihp.scheduler.search.pipelines` rebuilds tables that are
full. Called by `layouts`, `groups`, `moves` and `trials`.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import (
    BUCKET,
    EXPOSED,
    HOME,
    LATE,
    LAYER_SUM_S,
    LAYERS,
    MAX_ALIVE,
    MAX_BESIDE,
    MAX_COUNT,
    PACE,
    RAMP,
    RULE,
    SIZE,
    SLOWEST,
    STAGES,
    B,
    F,
    Ints,
    Job,
    PipeKind,
    Tables,
    W,
)
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.own_orders import lower_bound_line
from resihp.scheduler.search.kernels.partitions import write_best_partition
from resihp.scheduler.search.kernels.pipeline_times import exposed_sums_s, write_stage_seconds

PARTITION_OFFERS = 5
"""Number of partitions of a pipeline that are played; the best of them is improved."""


@machine_code
def lookup(index: Ints, keys: Ints, key: Ints, length: int) -> tuple[int, int]:
    """Return the place of a key in a hash table, whether the key is present or not, and its number, -1 if it is not
    present."""
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
    """Return whether the tables may lack room for another trial or layout of `pipes` pipelines and `groups` new
    groups."""
    rows = tables.used[2] + 2 * pipes + 8 > tables.row.shape[0] or tables.used[1] + pipes + 8 > tables.cut_row.size
    return bool(rows or tables.used[0] + groups > tables.group.shape[0])


@machine_code
def group_number(job: Job, tables: Tables, ranks: Ints, size: int) -> int:
    """Return the number of a group of ranks; a new group is added to the tables."""
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
    """Return whether group `a` is only on nodes on which group `b` is as well."""
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
    """Write one number for each stage into `key`, from index 1 on; equal keys have equal times and equal memory."""
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
    """Return the most layers that a stage has memory for (`cost.memory.capacity`)."""
    alive = min(count, stages if job.costs.split else stages - s)
    needs = job.needs[state, size, 2 * (s == 0) + (s == stages - 1)]
    return int(max(0, (job.room - needs[0]) // (needs[1] + alive * needs[2])))


@machine_code
def cut_pipeline(job: Job, tables: Tables, groups: Ints, stages: int, count: int, replicas: int) -> int:
    """Return the row of a pipeline with the layers that make it fastest for about `count` micro-batches.

    The layout has `replicas` replicas. -1 if the layers do not fit, or a group has stopped.
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
    """Return the row of a pipeline with `counts` layers on its stages; a new row is added to the tables."""
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
