"""Trials of a search: simulated annealing, one change after another. Pure.

The module decides whether a change is kept, and from which layout a cycle starts. It never reads a clock: trials are
counted. Called by `resihp.scheduler.search.annealing`.
"""

from __future__ import annotations

import numpy as np

from resihp.scheduler.search.kernels.arrays import (
    BEST,
    CANDIDATE,
    CURRENT,
    CYCLE,
    CYCLES,
    FORMER,
    FORMER_COUNT,
    FORMER_KEPT,
    NEXT_START,
    ROW,
    SHAKES_LEFT,
    SHARE,
    STARTS_LEFT,
    TRIAL,
    Ints,
    Job,
    Layouts,
    Tables,
)
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.layouts import copy_layout, copy_pipeline, energy, is_better, write_score
from resihp.scheduler.search.kernels.moves import make_candidate, shift_layer
from resihp.scheduler.search.kernels.random_numbers import random_share
from resihp.scheduler.search.kernels.tables import has_room, is_full

START_TEMPERATURE = 0.005
"""Approximate share of the best time by which a change may be worse at the beginning of a cycle. For 58 random jobs,
searched for a second: on average 0.4 % above the best of five searches; 0.8 % with a share of 0.02."""
OTHER_START_TEMPERATURE = 0.0075
"""Share of the best time, as `START_TEMPERATURE`, for a cycle that starts from a layout other than the best one."""
SHAKE_TRIALS = 15
"""Number of random changes, of any cost, that are made to the best layout when a cycle starts from another layout."""
LAYER_MOVE_PROBABILITY = 0.1
"""Probability that a trial moves a layer from one stage to another."""
MAX_UNGROUPED_REPLICAS = 4
"""Maximum number of replicas for which it does not matter which of them are equal."""
MAX_NEW_GROUPS = 8
"""Maximum number of groups that a single trial may create."""


@machine_code
def accept_candidate(layouts: Layouts, flags: Ints, odd: Ints) -> None:
    """Make the tried layout the present one. `flags`: nonzero for replicas that changed.

    `odd` gets the number of replicas that differ from most, if most are equal, and then their indices.
    """
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
def reject_candidate(layouts: Layouts, flags: Ints) -> None:
    """Make the present layout the tried one again. `flags`: nonzero for replicas that changed."""
    layouts.pipes[CANDIDATE] = layouts.pipes[CURRENT]
    for d in range(layouts.pipes[CURRENT]):
        if flags[d]:
            copy_pipeline(layouts, CURRENT, d, CANDIDATE, d)


@machine_code
def random_max_energy(layouts: Layouts, turn: Ints, drawn: Ints) -> float:
    """Return the highest energy at which the tried layout is accepted: the present energy plus a random increase
    (Metropolis)."""
    max_energy, best_s = energy(layouts, CURRENT), layouts.score[BEST, 0]
    if best_s < np.inf:  # a random increase; its mean falls during the cycle
        temperature = OTHER_START_TEMPERATURE if turn[CYCLES] % 2 else START_TEMPERATURE
        max_energy += temperature * best_s * (1.0 - turn[TRIAL] / turn[CYCLE]) ** 2 * -np.log(1.0 - random_share(drawn))
    return float(max_energy)


@machine_code
def begin_cycle(layouts: Layouts, turn: Ints) -> None:
    """Copy the layout from which the cycle starts to the layout being tried: the best layout in every second cycle."""
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
    """Try `trials` changes. Return how many of them remain if the tables became full, else 0."""
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
            max_energy = random_max_energy(layouts, turn, drawn)
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
            reject_candidate(layouts, flags)
    return 0
