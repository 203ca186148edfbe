"""Duration of a pipeline with one chunk a stage under 1F1B or ZB-H1, without making its orders. Pure.

Over these orders, Eq. 2 is a recurrence from micro-batch to micro-batch. With w = stages - stage - 1 warm-up forwards,
turn m of a stage is F of micro-batch m, then B of micro-batch m - w, then, if W is separate, the W that is `stage`
micro-batches behind. A turn waits only for the same turn of the stage before it and for the previous turn of the stage
after it. Once a turn ends later than an earlier turn by the same time on all stages, the following turns repeat with
that shift (max and plus commute with a shift), and need not be played: for many micro-batches, playing takes hardly
longer than for few. The period of the repetition is the length of the limiting cycle: one turn if one stage is the
slowest, as many turns as stages if all stages wait for each other.

The times equal those of `resihp.pipeline.timeline` over `resihp.pipeline.schedules`, up to rounding. Called by
`resihp.scheduler.cost.prices`, which handles all other orders, and by searches over many pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_EQUAL_STEP_TOLERANCE = 1e-12
"""Difference, relative to the time so far, below which two stages have advanced by the same time."""


def seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    weights: Sequence[float] | None,
    late: Sequence[float],
    micro_batches: int,
) -> float:
    """Return the seconds of one pipeline, given the times of a micro-batch on each stage.

    `forward`: F. `backward`: B, including W if `weights` is None. `weights`: separate W. `late`: seconds of a transfer
    from each stage to the next, and back.
    """
    stages = len(forward)
    ends = [0.0] * stages
    """End of the last work of each stage."""
    sent = [0.0] * (stages + 1)
    """Arrival of each stage's last B at the stage before it."""
    lag = [*late, 0.0]
    skipped, past, since = 0.0, ends, 0
    turn, last_turn = 0, micro_batches
    while turn < last_turn:
        arrival = 0.0
        first = stages - 1 - turn
        for s in range(stages):
            now = ends[s]
            if arrival > now:
                now = arrival
            now += forward[s]
            arrival = now + lag[s]
            if s >= first:
                gradient = sent[s + 1]
                if gradient > now:
                    now = gradient
                now += backward[s]
                sent[s] = now + lag[s - 1] if s else now
                if weights is not None and first <= 0:
                    now += weights[s]
            ends[s] = now
        turn += 1
        if first > 0 or skipped:
            continue
        if since:
            step, tolerance = ends[0] - past[0], _EQUAL_STEP_TOLERANCE * ends[0]
            if abs(ends[-1] - past[stages - 1] - step) <= tolerance and all(
                abs(now - then - step) <= tolerance for now, then in zip((*ends, *sent[:-1]), past, strict=True)
            ):
                periods = (last_turn - turn) // (turn - since)
                skipped = periods * step
                last_turn -= periods * (turn - since)
        if not since or turn - since == stages:
            past, since = [*ends, *sent[:-1]], turn
    _drain(ends, sent, backward, weights, lag, last_turn)
    if weights is not None:
        ends = [end + min(s, micro_batches) * weights[s] for s, end in enumerate(ends)]
    return max(ends) + skipped


def _drain(
    ends: list[float],
    sent: list[float],
    backward: Sequence[float],
    weights: Sequence[float] | None,
    lag: Sequence[float],
    micro_batches: int,
) -> None:
    """Play the last turns, which have no forwards."""
    stages = len(ends)
    for behind in range(1, stages):
        turn = micro_batches - 1 + behind
        for s in range(max(0, stages - 1 - turn), stages - behind):
            now = max(ends[s], sent[s + 1]) + backward[s]
            sent[s] = now + lag[s - 1] if s else now
            if weights is not None and turn >= stages - 1:
                now += weights[s]
            ends[s] = now


def many_seconds(forward: Floats, backward: Floats, weights: Floats | None, late: Floats, micro_batches: int) -> Floats:
    """Return the seconds of many pipelines with equally many stages: (pipelines,).

    Arguments as in `seconds`, each (stages, pipelines); `late`: (stages - 1, pipelines) or (stages - 1, 1). Each
    stage's turn begins half a turn after the same turn of the stage before it, so that all work of a half turn is
    independent: F on every second stage, B on the stages between.
    """
    stages, pipelines = forward.shape
    state = np.zeros((2 * stages, pipelines))
    ends, sent = state[:stages], state[stages:]
    past, skipped, since = state, np.zeros(pipelines), 0
    last_turn, half = micro_batches, 0
    while half <= 2 * (last_turn + stages) - 3:
        _forwards(ends, forward, late, _every_second(half - 2 * (last_turn - 1), half, half, stages))
        first = 2 * stages - 1 - half
        on = _every_second(first, first + 2 * last_turn - 2, half + 1, stages)
        _backwards(ends, sent, backward, weights, late, on, half)
        half += 1
        turn = half // 2
        if half % 2 or half < 3 * stages or turn >= last_turn - 1 or since < 0:
            continue
        if since:
            step = state - past
            if np.ptp(step, axis=0).max() <= _EQUAL_STEP_TOLERANCE * ends.max():
                periods = (last_turn - turn) // (turn - since)
                skipped = periods * step[0]
                last_turn -= periods * (turn - since)
                since = -1
                continue
        if not since or turn - since == stages:
            past, since = state.copy(), turn
    if weights is not None:
        ends += np.minimum(np.arange(stages), micro_batches)[:, None] * weights
    return np.asarray(ends.max(axis=0) + skipped)


def _every_second(first: int, last: int, parity: int, stages: int) -> slice:
    """Return the stages from `first` to `last` that are even, or odd, like `parity`."""
    begin = max(0, first)
    return slice(begin + (parity - begin) % 2, max(0, min(stages - 1, last) + 1), 2)


def _forwards(ends: Floats, forward: Floats, late: Floats, on: slice) -> None:
    if on.start >= on.stop:
        return
    begin = ends[on]
    waiting = begin[1:] if on.start == 0 else begin  # the first stage waits for no other
    source = slice(on.start + 1 if on.start == 0 else on.start - 1, on.stop - 1, 2)
    if len(waiting):
        np.maximum(waiting, ends[source] + late[source], out=waiting)
    begin += forward[on]


def _backwards(
    ends: Floats, sent: Floats, backward: Floats, weights: Floats | None, late: Floats, on: slice, half: int
) -> None:
    if on.start >= on.stop:
        return
    stages = len(ends)
    begin = ends[on]
    source = slice(on.start + 1, min(on.stop + 1, stages), 2)
    count = len(range(*source.indices(stages)))
    if count:  # the last stage waits for no other
        waiting, wait = begin[:count], slice(on.start, on.start + 2 * count - 1, 2)
        np.maximum(waiting, sent[source] + late[wait], out=waiting)
    begin += backward[on]
    sent[on] = begin
    if weights is not None:
        ready = slice(on.start, max(0, min(on.stop, half - 2 * stages + 2)), 2)
        ends[ready] += weights[ready]
