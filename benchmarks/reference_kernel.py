"""What a layout takes, compiled: the reference planner's own model of pipelines, shares and layers.

Nothing of the planner's search is used here. A state lies in arrays (`State`): for each pipe its groups of ranks, in
pipeline order, and how many layers each holds; two states side by side, the one that is and the one that is tried,
and a third one, the best so far. Times are those of 1F1B and of ZB-H1 with transfers between stages, played in closed
form: a few operations for each micro-batch and stage. `benchmarks.reference_planner` fills `Job` and checks, with the
product's own `iteration_seconds`, that both models say the same.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np

jit = numba.njit(cache=True, fastmath=False)

NOW, TRIED, BEST = 0, 1, 2
"""The states."""


class Job(NamedTuple):
    """A situation as numbers. Ranks and nodes by their index."""

    speed: Any
    """(ranks,)"""
    node: Any
    """(ranks,)"""
    sums: Any
    """(3, layers + 1): F, B, W of the layers before each."""
    outside: Any
    """(2, 3): F, B, W of the embedding and of the head."""
    inside_s: float
    transfer_s: float
    link: Any
    """(nodes, nodes): speeds of links."""
    room: Any
    """(replicas, stages, stage, degree, micro-batches up to `stages`): most layers; see `rooms_of`."""
    degrees: Any
    """Of tensor-parallel groups, ascending."""
    gradient_s: float
    bucket_layers: float
    """Layers, uncut, whose gradients fill a bucket."""
    step_s: float
    split: int
    """1 where W is apart from B."""
    micro_batches: int
    most_stages: int
    slow_links: int
    """1 where there are any."""


class State(NamedTuple):
    """Three of them, by the first index."""

    pipes: Any
    """(3,)"""
    stages: Any
    """(3, pipes)"""
    size: Any
    """(3, pipes, stages): ranks of a group."""
    ranks: Any
    """(3, pipes, stages, 8)"""
    layers: Any
    """(3, pipes, stages)"""
    lacking: Any
    """(3, pipes): layers that a pipe has no room for."""
    times: Any
    """(3, pipes, micro-batches + 2): of a pipe for so many; -1 where it is not known yet."""
    share: Any
    """(3, pipes): micro-batches."""


@jit
def group_speed(job, ranks, size):
    least = job.speed[ranks[0]]
    for t in range(1, size):
        least = min(least, job.speed[ranks[t]])
    return least * size


@jit
def late_s(job, a, b):
    if job.node[a] == job.node[b]:
        return job.inside_s
    return job.transfer_s / job.link[job.node[a], job.node[b]]


@jit
def pipe_seconds(job, state, k, d, m):
    """Of pipe d of state k for m micro-batches. On a stage's clock: the end of the last thing that it did.

    F of micro-batch u - s at stage s, then B of micro-batch u - stages + 1, for u = 0, 1, ...: that is 1F1B, every
    stage in its order, and everybody has what it needs when its turn comes.
    """
    n = state.stages[k, d]
    f, b, w = np.empty(n), np.empty(n), np.empty(n)
    late, clock, forward = np.zeros(n), np.zeros(n), np.zeros(n)
    first = 0
    for s in range(n):
        ranks = state.ranks[k, d, s]
        speed = group_speed(job, ranks, state.size[k, d, s])
        last = first + state.layers[k, d, s]
        f[s] = job.sums[0, last] - job.sums[0, first]
        b[s] = job.sums[1, last] - job.sums[1, first]
        w[s] = job.sums[2, last] - job.sums[2, first]
        for end in range(2):
            if (end == 0 and s == 0) or (end == 1 and s == n - 1):
                f[s] += job.outside[end, 0]
                b[s] += job.outside[end, 1]
                w[s] += job.outside[end, 2]
        if not job.split:
            b[s] += w[s]
        f[s], b[s], w[s] = f[s] / speed, b[s] / speed, w[s] / speed
        if s:
            late[s] = late_s(job, state.ranks[k, d, s - 1, 0], ranks[0])
        first = last
    for u in range(m + n - 1):
        for s in range(min(n - 1, u), max(-1, u - m), -1):
            begin = clock[s]
            if s and forward[s - 1] + late[s] > begin:
                begin = forward[s - 1] + late[s]
            forward[s] = clock[s] = begin + f[s]
        j = u - n + 1
        if j < 0:
            continue
        arrived = 0.0
        for s in range(n - 1, -1, -1):
            arrived = max(clock[s], arrived) + b[s]
            clock[s] = arrived
            if job.split and j >= s:
                clock[s] += w[s]
            arrived += late[s]
    end = 0.0
    for s in range(n):
        end = max(end, clock[s] + (min(m, s) * w[s] if job.split else 0.0))
    return end


@jit
def room_of(job, pipes, stages, s, size, m):
    return job.room[min(pipes, job.room.shape[0] - 1), stages, s, size, min(m, stages)]


@jit
def time_of(job, state, k, d, m):
    """The same, remembered; infinite where memory is lacking."""
    n = state.stages[k, d]
    for s in range(n):  # not remembered: with fewer pipes there may be less room
        if state.layers[k, d, s] > room_of(job, state.pipes[k], n, s, state.size[k, d, s], m):
            return math.inf
    found = state.times[k, d, m]
    if found >= 0.0:
        return found
    found = pipe_seconds(job, state, k, d, m)
    state.times[k, d, m] = found
    return found


@jit
def forget(state, k, d):
    state.times[k, d, :] = -1.0


@jit
def lay(job, state, k, d, m, noise, tries):
    """Layers of a pipe anew: one after the other to where it is done first, then moved while that gains.

    `noise`: how far the first guess is off what balances. `state.lacking`: what there is no room for.
    """
    n, total = state.stages[k, d], job.sums.shape[1] - 1
    each = (job.sums[0, total] + job.sums[1, total] + job.sums[2, total]) / total
    forget(state, k, d)
    state.lacking[k, d] = 0
    rate, load = np.empty(n), np.zeros(n)
    room = np.empty(n, np.int64)
    for s in range(n):
        rate[s] = (
            each / group_speed(job, state.ranks[k, d, s], state.size[k, d, s]) * math.exp(noise * np.random.normal())
        )
        room[s] = room_of(job, state.pipes[k], n, s, state.size[k, d, s], m)
        state.layers[k, d, s] = 1
        state.lacking[k, d] += room[s] < 1
        for end in range(2):
            if (end == 0 and s == 0) or (end == 1 and s == n - 1):
                load[s] += job.outside[end].sum() / each * rate[s]
        load[s] += rate[s]
    for _ in range(total - n):
        best = -1
        for s in range(n):
            if state.layers[k, d, s] < room[s] and (best < 0 or load[s] + rate[s] < load[best] + rate[best]):
                best = s
        if best < 0:
            best = n - 1
            state.lacking[k, d] += 1
        state.layers[k, d, best] += 1
        load[best] += rate[best]
    if state.lacking[k, d] or n == 1:
        return
    least = pipe_seconds(job, state, k, d, m)
    for _ in range(tries):
        a, b = np.random.randint(n), np.random.randint(n)
        if a == b or state.layers[k, d, a] == 1 or state.layers[k, d, b] >= room[b]:
            continue
        state.layers[k, d, a] -= 1
        state.layers[k, d, b] += 1
        at = pipe_seconds(job, state, k, d, m)
        if at <= least:
            least = at
        else:
            state.layers[k, d, a] += 1
            state.layers[k, d, b] -= 1


@jit
def share_out(job, state, k):
    """Micro-batches, whole and exactly best: from a guess, the longest gives one away while somebody is done earlier.

    Returns the longest time, and what it were could they be shared out in parts; infinite where memory is lacking.
    """
    pipes, total = state.pipes[k], job.micro_batches
    usual = max(1, total // pipes)
    pace = offset = 0.0
    for d in range(pipes):
        at = time_of(job, state, k, d, usual)
        slope = time_of(job, state, k, d, usual + 1) - at
        if not slope < math.inf:
            slope = at - time_of(job, state, k, d, usual - 1) if usual > 1 else at
        if not (at < math.inf and slope > 0.0):
            return math.inf, math.inf
        pace += 1.0 / slope
        offset += at / slope - usual
    even = (total + offset) / pace
    given = 0
    for d in range(pipes):
        at = time_of(job, state, k, d, usual)
        slope = max(time_of(job, state, k, d, usual + 1) - at, 1e-12)
        m = usual + (even - at) / slope if slope < math.inf else usual
        state.share[k, d] = min(max(1, int(m)), total - (pipes - 1))
        given += state.share[k, d]
    while given != total:
        best, step = -1, 1 if given < total else -1
        for d in range(pipes):
            if step < 0 and state.share[k, d] == 1:
                continue
            if best < 0:
                best = d
                continue
            mine = time_of(job, state, k, d, state.share[k, d] + (step > 0))
            theirs = time_of(job, state, k, best, state.share[k, best] + (step > 0))
            if (mine < theirs) == (step > 0) and mine != theirs:
                best = d
        state.share[k, best] += step
        given += step
    while True:
        last, longest = 0, -1.0
        for d in range(pipes):
            at = time_of(job, state, k, d, state.share[k, d])
            if at > longest:
                last, longest = d, at
        to, least = -1, math.inf
        for d in range(pipes):
            if d != last:
                at = time_of(job, state, k, d, state.share[k, d] + 1)
                if at < least:
                    to, least = d, at
        if to < 0 or state.share[k, last] == 1 or least >= longest * (1.0 - 1e-12):
            return longest, even
        state.share[k, last] -= 1
        state.share[k, to] += 1


@jit
def after_s(job, state, k):
    """What is left of sums of gradients after the last backward, beside which they begin, and the step.

    That backward is cut into parts of at least an eighth of the layers, and of what fills a bucket."""
    pipes = state.pipes[k]
    slowest = 0.0
    if pipes < 2 or job.gradient_s <= 0.0:
        return job.step_s
    for d in range(pipes):
        first, earlier = 0, 0.0
        n = state.stages[k, d]
        for s in range(n):
            size, layers = state.size[k, d, s], state.layers[k, d, s]
            last = first + layers
            sums = layers * job.gradient_s / size
            if job.slow_links:
                sums /= slowest_peer(job, state, k, d, state.ranks[k, d, s, 0], first, last)
            work = job.sums[2, last] - job.sums[2, first]
            if not job.split:
                work += job.sums[1, last] - job.sums[1, first]
            for end in range(2):
                if (end == 0 and s == 0) or (end == 1 and s == n - 1):
                    work += job.outside[end, 2] + (0.0 if job.split else job.outside[end, 1])
            work /= group_speed(job, state.ranks[k, d, s], size)
            parts = max(1, layers // max((layers + 7) // 8, math.ceil(size * job.bucket_layers)))
            slowest = max(slowest, max(sums / parts, sums - work * (parts - 1) / parts) - earlier)
            if not job.split:
                earlier += work
            first = last
    return slowest + job.step_s


@jit
def slowest_peer(job, state, k, d, rank, first, last):
    """Speed of the slowest link to a group of another pipe that holds some of the layers from `first` until `last`."""
    least = 1.0
    for e in range(state.pipes[k]):
        begin = 0
        for s in range(state.stages[k, e] if e != d else 0):
            end = begin + state.layers[k, e, s]
            if begin < last and first < end:
                least = min(least, job.link[job.node[rank], job.node[state.ranks[k, e, s, 0]]])
            begin = end
    return least


@jit
def score(job, state, k, smooth):
    """Seconds of an iteration, and the energy of annealing: a share `smooth` of it for micro-batches in parts.

    Where there is no room, seconds are infinite, and the energy is far above, the higher the more layers are lacking.
    """
    pipes = state.pipes[k]
    lacking = 0
    for d in range(pipes):
        lacking += state.lacking[k, d]
    if lacking or pipes == 0 or pipes > job.micro_batches:
        return math.inf, 1e6 * (1.0 + lacking)
    longest, even = share_out(job, state, k)
    if not longest < math.inf:
        return math.inf, 1e6
    after = after_s(job, state, k)
    return longest + after, smooth * even + (1.0 - smooth) * longest + after


@jit
def copy(state, source, target):
    state.pipes[target] = state.pipes[source]
    for d in range(state.pipes[source]):
        n = state.stages[source, d]
        state.stages[target, d] = n
        state.lacking[target, d] = state.lacking[source, d]
        state.share[target, d] = state.share[source, d]
        state.times[target, d] = state.times[source, d]
        state.size[target, d, :n] = state.size[source, d, :n]
        state.layers[target, d, :n] = state.layers[source, d, :n]
        state.ranks[target, d, :n] = state.ranks[source, d, :n]
