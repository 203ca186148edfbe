"""Creates groups for the layout being tried, of given ranks or of idle ranks. Pure.

The module decides which idle ranks form a group: the fastest ones of a node. It never puts a group into a layout.
Called by `moves`.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import CANDIDATE, SIZE, STAGES, Ints, Job, Layouts, Tables
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.random_numbers import random_index
from resihp.scheduler.search.kernels.tables import group_number


@machine_code
def sort_ranks(job: Job, pool: Ints, count: int, by_speed: bool) -> None:
    """Sort the first `count` ranks of `pool` in place: in ascending order, or the fastest first."""
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
    """Append to `pool` the ranks of a node that the layout being tried leaves idle; ranks of all nodes if `node` is
    negative.

    Return the new number of ranks in the pool.
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
    """Return how many allowed degrees are at most `most`."""
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
    """Return a group of the fastest idle ranks of a random node; -1 if no group is possible.

    Its degree is the largest possible one or the next smaller one.
    """
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
