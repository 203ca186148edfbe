"""Changes the layout being tried: groups change places, replicas and sizes, and layers change stages. Pure.

Random numbers determine the change. The module never decides whether the changed layout is kept. Called by `trials`.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import (
    CANDIDATE,
    CURRENT,
    HOME,
    LAYERS,
    ROW,
    SHARE,
    SIZE,
    SLOWEST,
    STAGES,
    Ints,
    Job,
    Layouts,
    Tables,
)
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.groups import (
    add_idle,
    degree_count_up_to,
    is_degree,
    new_group,
    random_idle_group,
    sort_ranks,
)
from resihp.scheduler.search.kernels.layouts import copy_pipeline
from resihp.scheduler.search.kernels.random_numbers import random_index, random_share
from resihp.scheduler.search.kernels.tables import cut_pipeline, row_number

TWO_CHANGES_PROBABILITY = 0.25
"""Probability that two changes are tried as one."""
ODD_REPLICA_PROBABILITY = 0.7
"""Probability that, if most replicas are equal, one that differs from them is chosen."""
MOVE_WEIGHTS = (3.0, 3.0, 2.0, 3.0, 1.5, 2.5, 1.0, 0.7, 0.5, 0.7, 0.5, 0.3, 0.3)
"""Relative frequency of each move of `make_move`."""


@machine_code
def random_replica(layouts: Layouts, odd: Ints, drawn: Ints) -> int:
    """Return a random replica of the layout being tried; if most are equal, preferably one that differs from them."""
    if odd[0] > 0 and random_share(drawn) < ODD_REPLICA_PROBABILITY:
        d = odd[1 + random_index(odd[0], drawn)]
        if d < layouts.pipes[CANDIDATE]:
            return int(d)
    return random_index(layouts.pipes[CANDIDATE], drawn)


@machine_code
def insert_stage(layouts: Layouts, d: int, s: int, group: int) -> None:
    """Insert a group as stage `s` of replica `d` of the layout being tried."""
    stages, groups = layouts.pipe[CANDIDATE, d, STAGES], layouts.groups[CANDIDATE, d]
    for i in range(stages, s, -1):
        groups[i] = groups[i - 1]
    groups[s] = group
    layouts.pipe[CANDIDATE, d, STAGES] = stages + 1


@machine_code
def remove_stage(layouts: Layouts, d: int, s: int) -> int:
    """Remove stage `s` of replica `d` of the layout being tried, and return its group."""
    stages, groups = layouts.pipe[CANDIDATE, d, STAGES], layouts.groups[CANDIDATE, d]
    group = groups[s]
    for i in range(s, stages - 1):
        groups[i] = groups[i + 1]
    layouts.pipe[CANDIDATE, d, STAGES] = stages - 1
    return int(group)


@machine_code
def groups_at_home(tables: Tables, layouts: Layouts, home: int, number: int) -> tuple[int, int, int]:
    """Return the number of groups that are entirely on node `home`, and the replica and stage of the `number`-th of
    them.

    Replica and stage are -1 if there is no such group.
    """
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
    """Exchange or move groups within one replica or between two. Return the other changed replica, -1 if nothing
    changes."""
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
    """Sort the groups of replica `d` into the order of the equal groups of replica `e`. Return whether the order
    changed."""
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
def split_group(job: Job, tables: Tables, layouts: Layouts, pool: Ints, size: int, d: int, a: int) -> int:
    """Split a group, given by its ranks in `pool`, into two stages: its faster half and its slower half.

    Return the changed replica, -1 if nothing changes.
    """
    half = size // 2
    if not is_degree(job, half) or layouts.pipe[CANDIDATE, d, STAGES] == layouts.groups.shape[2]:
        return -1
    sort_ranks(job, pool, size, True)
    layouts.groups[CANDIDATE, d, a] = new_group(job, tables, pool, half)
    insert_stage(layouts, d, a + 1, new_group(job, tables, pool[half:], half))
    return d


@machine_code
def regroup_node(job: Job, tables: Tables, layouts: Layouts, move: int, d: int, a: int, drawn: Ints) -> int:
    """Form other groups of the ranks of a node. Return the other changed replica, -1 if nothing changes."""
    own_group = layouts.groups[CANDIDATE, d, a]
    size, home = tables.group[own_group, SIZE], tables.group[own_group, HOME]
    if home < 0:
        return -1
    pool = np.empty(job.node.size, np.int64)
    for t in range(size):
        pool[t] = tables.ranks[own_group, t]
    if move == 9:
        return split_group(job, tables, layouts, pool, size, d, a)
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
def add_replica(job: Job, tables: Tables, layouts: Layouts, from_idle: bool, d: int, drawn: Ints) -> int:
    """Add a replica, made of a group of idle ranks or of some groups of replica `d`.

    Return the new replica, -1 if nothing changes.
    """
    e = layouts.pipes[CANDIDATE]
    group = random_idle_group(job, tables, layouts, drawn) if from_idle else -1
    if e == layouts.pipe.shape[1] or (from_idle and group < 0):
        return -1
    layouts.pipes[CANDIDATE], layouts.pipe[CANDIDATE, e, STAGES] = e + 1, 0
    layouts.pipe[CANDIDATE, e, SHARE] = max(1, job.micro_batches // (e + 1))
    if from_idle:
        insert_stage(layouts, e, 0, group)
        return int(e)
    for s in range(layouts.pipe[CANDIDATE, d, STAGES] - 1, -1, -1):
        if random_share(drawn) < 0.5:
            insert_stage(layouts, e, 0, remove_stage(layouts, d, s))
    return int(e)


@machine_code
def random_move(drawn: Ints) -> int:
    """Return the number of a random move of `make_move`, with frequencies `MOVE_WEIGHTS`."""
    move, remaining = 0, random_share(drawn) * sum(MOVE_WEIGHTS)
    while move < len(MOVE_WEIGHTS) - 1 and remaining >= MOVE_WEIGHTS[move]:
        remaining -= MOVE_WEIGHTS[move]
        move += 1
    return move


@machine_code
def make_move(job: Job, tables: Tables, layouts: Layouts, odd: Ints, drawn: Ints, flags: Ints) -> bool:
    """Make one random change of the layout being tried, which may leave replicas without groups. Return whether it
    changed.

    `flags` marks the changed replicas.
    """
    move = random_move(drawn)
    most = layouts.groups.shape[2]
    pipes = layouts.pipes[CANDIDATE]
    d = random_replica(layouts, odd, drawn)
    e, n = d, layouts.pipe[CANDIDATE, d, STAGES]
    a = random_index(n, drawn)
    if move in (0, 1, 4):
        e = exchange_places(layouts, move, most, d, a, odd, drawn)
    elif move in (5, 6, 9):
        e = regroup_node(job, tables, layouts, move, d, a, drawn)
    elif move == 2:  # remove one of the replica's groups
        if n == 1:
            return False
        remove_stage(layouts, d, a)
    elif move == 3:  # add a group of idle ranks
        group = random_idle_group(job, tables, layouts, drawn)
        if group < 0 or n == most:
            return False
        insert_stage(layouts, d, random_index(n + 1, drawn), group)
    elif move == 7:
        e = random_index(pipes, drawn)
        if d == e or not match_order(tables, layouts, d, e):
            return False
        e = d
    elif move == 8:  # remove the replica
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
    else:  # add a replica of idle ranks (move 10), or of some groups of replica d
        e = add_replica(job, tables, layouts, move == 10, d, drawn)
        if move == 10:
            d = e
    if e < 0:
        return False
    flags[d] = flags[e] = 2
    return True


@machine_code
def make_candidate(job: Job, tables: Tables, layouts: Layouts, odd: Ints, drawn: Ints, flags: Ints) -> bool:
    """Change the layout being tried once or twice, and choose the layers of changed replicas. Return whether it is
    possible.

    `flags` is set to 1 or 2 for replicas that differ from the present layout.
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
    """Move a layer of a random replica from one stage to another. Return whether anything changed."""
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
