"""Changes of whole layouts, and annealing by them, compiled: the search of the reference planner.

A move changes the tried state and marks the pipes whose layers have to be laid anew. Ranks that no group has are idle.
Equal ranks of a node are told apart by nothing but their number. Which moves found what was best is counted.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.reference_kernel import BEST, NOW, TRIED, copy, forget, jit, lay, score

MOVES = (
    "layers between stages",
    "two stages change places",
    "groups of two replicas exchanged",
    "a group leaves",
    "idle ranks become a stage",
    "a group goes to another replica",
    "ranks of a node regrouped",
    "a group becomes two stages",
    "two groups become one",
    "idle ranks become a replica",
    "a replica is dealt out to others",
    "two replicas dealt anew",
    "replicas of different depth",
)
WEIGHTS = (6.0, 3.0, 3.0, 1.5, 2.5, 2.0, 3.0, 1.0, 1.0, 0.3, 0.3, 0.5, 0.5)


@jit
def remove(state, k, d, s):
    for i in range(s, state.stages[k, d] - 1):
        state.size[k, d, i] = state.size[k, d, i + 1]
        state.layers[k, d, i] = state.layers[k, d, i + 1]
        state.ranks[k, d, i] = state.ranks[k, d, i + 1]
    state.stages[k, d] -= 1


@jit
def insert(state, k, d, s, ranks, size):
    for i in range(state.stages[k, d], s, -1):
        state.size[k, d, i] = state.size[k, d, i - 1]
        state.layers[k, d, i] = state.layers[k, d, i - 1]
        state.ranks[k, d, i] = state.ranks[k, d, i - 1]
    state.size[k, d, s] = size
    state.ranks[k, d, s] = ranks
    state.layers[k, d, s] = 1
    state.stages[k, d] += 1


@jit
def drop_pipe(state, k, d, dirty):
    last = state.pipes[k] - 1
    if d != last:
        n = state.stages[k, last]
        state.stages[k, d] = n
        state.size[k, d, :n] = state.size[k, last, :n]
        state.layers[k, d, :n] = state.layers[k, last, :n]
        state.ranks[k, d, :n] = state.ranks[k, last, :n]
        state.times[k, d] = state.times[k, last]
        state.lacking[k, d] = state.lacking[k, last]
        dirty[d] = dirty[last]
    dirty[last] = 0
    state.pipes[k] = last


@jit
def idle_of(job, state, k):
    """1 for each idle rank that works."""
    idle = np.ones(job.speed.size, np.int64)
    for d in range(state.pipes[k]):
        for s in range(state.stages[k, d]):
            for t in range(state.size[k, d, s]):
                idle[state.ranks[k, d, s, t]] = 0
    for r in range(idle.size):
        if job.speed[r] <= 0.0:
            idle[r] = 0
    return idle


@jit
def sorted_pool(job, pool, count):
    """The fastest first; ties, and now and then all of them, by chance."""
    shuffled = np.random.permutation(count)
    any_order = np.random.random() < 0.1
    keys = np.empty(count)
    for i in range(count):
        keys[i] = 0.0 if any_order else -job.speed[pool[shuffled[i]]]
    order = np.argsort(keys, kind="mergesort")
    found = np.empty(count, np.int64)
    for i in range(count):
        found[i] = pool[shuffled[order[i]]]
    return found


@jit
def a_degree(job, most):
    """A degree of at most so many ranks, often the largest; 0 where there is none."""
    able = 0
    for size in job.degrees:
        able += size <= most
    if able == 0:
        return 0
    return job.degrees[able - 1 if np.random.random() < 0.6 else np.random.randint(able)]


@jit
def idle_group(job, state, k, ranks):
    """A group of idle ranks of one node, into `ranks`; returns its size, 0 for none."""
    idle = idle_of(job, state, k)
    there = np.flatnonzero(idle)
    if there.size == 0:
        return 0
    node = job.node[there[np.random.randint(there.size)]]
    pool, count = np.empty(there.size, np.int64), 0
    for r in there:
        if job.node[r] == node:
            pool[count] = r
            count += 1
    pool = sorted_pool(job, pool, count)
    size = a_degree(job, count)
    for t in range(size):
        ranks[t] = pool[t]
    return size


@jit
def regroup(job, state, k, d, s, e, q, dirty):
    """Ranks of two groups of a node and its idle ones, or of one group and the idle ones (`e` < 0), grouped anew."""
    node = job.node[state.ranks[k, d, s, 0]]
    pool, count = np.empty(job.speed.size, np.int64), 0
    for t in range(state.size[k, d, s]):
        pool[count] = state.ranks[k, d, s, t]
        count += 1
    if e >= 0:
        for t in range(state.size[k, e, q]):
            pool[count] = state.ranks[k, e, q, t]
            count += 1
    idle = idle_of(job, state, k)
    for r in range(idle.size):
        if idle[r] and job.node[r] == node:
            pool[count] = r
            count += 1
    pool = sorted_pool(job, pool, count)
    first = a_degree(job, count)
    second = a_degree(job, count - first) if e >= 0 else 0
    if first == 0 or (e >= 0 and second == 0):
        return False
    at = 0
    if e >= 0 and np.random.random() < 0.5:
        at = second
    for t in range(first):
        state.ranks[k, d, s, t] = pool[at + t]
    state.size[k, d, s] = first
    dirty[d] = 1
    if e >= 0:
        begin = 0 if at else first
        for t in range(second):
            state.ranks[k, e, q, t] = pool[begin + t]
        state.size[k, e, q] = second
        dirty[e] = 1
    return True


@jit
def at_home(job, state, k, d, s):
    """Another group of the same node, by chance; (-1, -1) for none."""
    node, seen = job.node[state.ranks[k, d, s, 0]], 0
    found = (-1, -1)
    for e in range(state.pipes[k]):
        for q in range(state.stages[k, e]):
            if (e != d or q != s) and job.node[state.ranks[k, e, q, 0]] == node:
                seen += 1
                if np.random.randint(seen) == 0:
                    found = (e, q)
    return found


@jit
def resized(job, state, k, d, s, move, dirty):
    """Moves that change groups: regroup, split, join."""
    if move == 6:
        e, q = at_home(job, state, k, d, s)
        if np.random.random() < 0.3:
            e, q = -1, -1
        return regroup(job, state, k, d, s, e, q, dirty)
    if move == 7:
        half = state.size[k, d, s] // 2
        able = False
        for size in job.degrees:
            able |= size == half
        e = d if np.random.random() < 0.6 else np.random.randint(state.pipes[k])
        if not able or state.stages[k, e] >= job.most_stages:
            return False
        ranks = state.ranks[k, d, s].copy()
        pool = sorted_pool(job, ranks, 2 * half)
        for t in range(half):
            state.ranks[k, d, s, t] = pool[t]
            ranks[t] = pool[half + t]
        state.size[k, d, s] = half
        insert(state, k, e, np.random.randint(state.stages[k, e] + 1), ranks, half)
        dirty[d] = dirty[e] = 1
        return True
    e, q = at_home(job, state, k, d, s)
    if e < 0 or state.stages[k, e] == 1:
        return False
    joined = state.size[k, d, s] + state.size[k, e, q]
    size = 0
    for able in job.degrees:
        if able <= joined:
            size = able
    if size <= state.size[k, d, s]:
        return False
    for t in range(size - state.size[k, d, s]):
        state.ranks[k, d, s, state.size[k, d, s] + t] = state.ranks[k, e, q, t]
    state.size[k, d, s] = size
    remove(state, k, e, q)
    dirty[d] = dirty[e] = 1
    return True


@jit
def deal(job, state, k, move, dirty):
    """Moves of whole replicas: a new one, one given to others, two dealt anew, stages moved until depths differ."""
    pipes = state.pipes[k]
    ranks = np.zeros(8, np.int64)
    if move == 9:
        if pipes + 1 > min(job.micro_batches, state.stages.shape[1] - 1):
            return False
        size = idle_group(job, state, k, ranks)
        if size == 0:
            return False
        state.pipes[k] += 1
        state.stages[k, pipes] = 0
        insert(state, k, pipes, 0, ranks, size)
        while state.stages[k, pipes] < job.most_stages and np.random.random() < 0.9:
            size = idle_group(job, state, k, ranks)
            if size == 0:
                break
            insert(state, k, pipes, np.random.randint(state.stages[k, pipes] + 1), ranks, size)
        dirty[pipes] = 1
        return True
    if pipes < 2:
        return False
    d = np.random.randint(pipes)
    e = (d + 1 + np.random.randint(pipes - 1)) % pipes
    if move == 10:
        for s in range(state.stages[k, d]):
            e = (d + 1 + np.random.randint(pipes - 1)) % pipes
            if state.stages[k, e] < job.most_stages and np.random.random() < 0.9:
                at = np.random.randint(state.stages[k, e] + 1)
                insert(state, k, e, at, state.ranks[k, d, s].copy(), state.size[k, d, s])
                dirty[e] = 1
        drop_pipe(state, k, d, dirty)
        return True
    a, b = state.stages[k, d], state.stages[k, e]
    total = a + b
    groups, sizes = np.zeros((total, 8), np.int64), np.zeros(total, np.int64)
    for i in range(total):
        groups[i] = state.ranks[k, d, i] if i < a else state.ranks[k, e, i - a]
        sizes[i] = state.size[k, d, i] if i < a else state.size[k, e, i - a]
    order = np.random.permutation(total) if move == 11 else np.arange(total)
    first = a if move == 11 and np.random.random() < 0.5 else 1 + np.random.randint(total - 1)
    if max(first, total - first) > job.most_stages:
        return False
    state.stages[k, d] = state.stages[k, e] = 0
    for i in range(total):
        to = d if i < first else e
        insert(state, k, to, state.stages[k, to], groups[order[i]], sizes[order[i]])
    dirty[d] = dirty[e] = 1
    return True


@jit
def moved(job, state, k, move, dirty):
    """Carry out a move; whether it could be."""
    pipes = state.pipes[k]
    if move >= 9:
        return deal(job, state, k, move, dirty)
    d = np.random.randint(pipes)
    n = state.stages[k, d]
    s = np.random.randint(n)
    ranks = np.zeros(8, np.int64)
    if 6 <= move <= 8:
        return resized(job, state, k, d, s, move, dirty)
    if move == 0:
        q = np.random.randint(n)
        if q == s or state.layers[k, d, s] == 1 or dirty[d]:
            return False
        state.layers[k, d, s] -= 1
        state.layers[k, d, q] += 1
        forget(state, k, d)
        return True
    if move == 4:
        size = idle_group(job, state, k, ranks)
        if size == 0 or n >= job.most_stages:
            return False
        insert(state, k, d, np.random.randint(n + 1), ranks, size)
        dirty[d] = 1
        return True
    if move == 3:
        if n == 1:
            return False
        remove(state, k, d, s)
        dirty[d] = 1
        return True
    if move == 1:
        q = np.random.randint(n)
        if q == s:
            return False
        ranks[:] = state.ranks[k, d, s]
        size = state.size[k, d, s]
        if np.random.random() < 0.5:
            remove(state, k, d, s)
            insert(state, k, d, q, ranks, size)
        else:
            state.ranks[k, d, s], state.size[k, d, s] = state.ranks[k, d, q], state.size[k, d, q]
            state.ranks[k, d, q], state.size[k, d, q] = ranks, size
        dirty[d] = 1
        return True
    e = np.random.randint(pipes)
    if e == d:
        return False
    q = np.random.randint(state.stages[k, e])
    ranks[:] = state.ranks[k, d, s]
    size = state.size[k, d, s]
    if move == 2:
        state.ranks[k, d, s], state.size[k, d, s] = state.ranks[k, e, q], state.size[k, e, q]
        state.ranks[k, e, q], state.size[k, e, q] = ranks, size
    else:
        if state.stages[k, e] >= job.most_stages or n == 1:
            return False
        remove(state, k, d, s)
        insert(state, k, e, np.random.randint(state.stages[k, e] + 1), ranks, size)
    dirty[d] = dirty[e] = 1
    return True


@jit
def settle(job, state, k, dirty, noise):
    """Lay the marked pipes anew; False where one has more stages than layers."""
    total = job.sums.shape[1] - 1
    usual = max(1, job.micro_batches // max(1, state.pipes[k]))
    for d in range(state.pipes[k]):
        if dirty[d]:
            n = state.stages[k, d]
            if n > total:
                return False
            lay(job, state, k, d, usual, noise, 3 * n)
    return True


@jit
def anneal(job, state, seed, trials, hot, smooth, bound, won):
    """From state NOW on; the best goes to BEST, its seconds are returned. `bound`: only faster ones count as found.

    `won` (moves, 2): how often each move found a new best, and how much that gained, relative.
    """
    np.random.seed(seed)
    seconds, energy = score(job, state, NOW, smooth)
    scale = energy if energy < 1e6 else 0.0
    best = seconds
    copy(state, NOW, BEST)
    found = best
    dirty = np.zeros(state.stages.shape[1], np.int64)
    sums = np.cumsum(won[:, 2])
    for trial in range(trials):
        copy(state, NOW, TRIED)
        dirty[:] = 0
        done, move = False, 0
        for _ in range(1 if np.random.random() < 0.75 else 2):
            move = np.searchsorted(sums, np.random.random() * sums[-1])
            done |= moved(job, state, TRIED, move, dirty)
        if not done or not settle(job, state, TRIED, dirty, 0.1 if np.random.random() < 0.5 else 0.0):
            continue
        seconds, tried = score(job, state, TRIED, smooth)
        left = 1.0 - trial / trials
        heat = hot * (scale if tried < 1e6 else 1e4) * left * left + 1e-12
        if tried > energy and np.random.random() >= math.exp(-(tried - energy) / heat):
            continue
        copy(state, TRIED, NOW)
        energy = tried
        if scale == 0.0 and tried < 1e6:
            scale = tried
        if seconds < found * (1.0 - 1e-9):
            if found < math.inf and found < bound:
                won[move, 0] += 1
                won[move, 1] += 1.0 - seconds / found
            found = seconds
            copy(state, NOW, BEST)
    return found
