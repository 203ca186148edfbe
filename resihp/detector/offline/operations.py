"""Finds the slow ranks of a per-operation trace, with the steps in which they are slow. Pure.

For each rank, a series of its slowness without the effect of the workload (`resihp.detector.offline.peer_slowness`) is
tested sequentially (`resihp.detector.offline.slow_runs`); a slow-down must last for several steps. The part of each
step's time that computation does not explain (`resihp.detector.offline.what_if`) is tested as well
(`resihp.detector.sequential.changes`), to find slow communication and slow hosts. Long steps that computation explains,
although no rank is slow, are reported as workload. A stage that takes longer than others on every replica is no
failure, but a result of the partitioning; it shows in the what-if figures.

Called by `resihp analyze`; reads no file.
"""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
import pandas as pd

from resihp.detector.offline.analysis import Analysis, RankScore, SpeedChange, Where
from resihp.detector.offline.peer_slowness import Series, by_micro_batch, by_quickest, by_replica, computation
from resihp.detector.offline.slow_runs import Slowness, noises, runs
from resihp.detector.offline.traces import Flags, Floats, Trace, read
from resihp.detector.offline.what_if import WhatIf, what_if
from resihp.detector.sequential.changes import ChangeDetector
from resihp.words import count_of

MIN_SHIFT = 0.05
"""Smallest reported slow-down, log units: healthy devices of one kind differ by less. A rank that is slow in all steps
must exceed its peers by twice this."""
MIN_QUICKEST_SHIFT = 0.10
"""As `MIN_SHIFT`, if only the quickest micro-batch of each step is compared, because its time scatters more."""
MIN_EXCESS = 0.10
"""Smallest excess over the usual time at which the raw rule raises an alarm, or a step is reported as workload."""
RUNNING_MEDIAN_STEPS = 20
"""Number of steps in the running median of the raw rule."""
SAME_ONSET_STEPS = 3
"""Tensor-parallel peers that become slow within this many steps of each other have the same cause."""
DISTINCT_RATIO = 1.5
"""Of such peers, the slowest is named if its slow-down is at least this many times the next one's."""


class Alarms(msgspec.Struct, frozen=True, kw_only=True):
    """Alarms of the raw rule, a detector without prediction (`raw_alarms`)."""

    steps: tuple[int, ...]
    """Labels of the steps with a time above the running median."""
    rank_steps: int
    """Number of pairs of a rank and a step in which the rank's computation took longer than its peers' median."""
    ranks: int
    """Number of ranks in at least one of these pairs."""


def analyse(frame: pd.DataFrame) -> Analysis:
    """Return the analysis of a per-operation trace. Required columns: `resihp.detector.offline.traces.COLUMNS`.

    Raises UsageError for any other frame.
    """
    trace = read(frame)
    cost = what_if(trace)
    slow = list(slow_ranks(trace))
    slow += (
        [
            slow_step
            for slow_step in slow_steps(trace, cost)
            if not any(_at_once(slow_step, slow_part) for slow_part in slow)
        ]
        if cost
        else []
    )
    events = [event for slowness in slow for event in _events(trace, slowness)]
    if cost:
        events += _workload(trace, cost, slow)
    return Analysis(
        kind="operations",
        runs=1,
        iterations=len(trace.steps),
        healthy_seconds=healthy_seconds(trace, slow),
        events=tuple(sorted(events, key=lambda event: (event.iteration, -event.change))),
        ranks=_scores(cost) if cost else (),
        slowdown=cost.slowdown if cost else None,
        ideal_seconds=cost.ideal_s if cost else None,
        mw=cost.mw if cost else None,
        ms=cost.ms if cost else None,
        known="peers",
        remarks=_remarks(trace, cost),
    )


def slow_ranks(trace: Trace) -> tuple[Slowness, ...]:
    """Return the slow-downs of ranks, and of whole replicas, sorted by onset."""
    if len(trace.stages) > 1 and len(trace.dps) > 1:
        whole = _tested(trace, by_replica(trace), MIN_QUICKEST_SHIFT)
        single = _grouped(_tested(trace, by_micro_batch(trace), MIN_SHIFT))
        slow_downs = whole + [slow for slow in single if not any(_part_of(slow, replica) for replica in whole)]
    else:
        slow_downs = _grouped(_tested(trace, by_quickest(trace), MIN_QUICKEST_SHIFT))
    return tuple(sorted(slow_downs, key=lambda slow: (slow.onset, -slow.change)))


def slow_steps(trace: Trace, cost: WhatIf) -> tuple[Slowness, ...]:
    """Return the lasting slow-downs of whole steps that computation does not explain; their `where` is None.

    Empty if the trace obviously lacks replicas or stages, because other ranks may then wait for missing ranks.
    """
    if trace.dps != tuple(range(len(trace.dps))) or trace.stages != tuple(range(len(trace.stages))):
        return ()
    observed = step_seconds(trace)[cost.steps]
    sound = (observed > 0.0) & (cost.explained_s > 0.0)
    steps, residuals = cost.steps[sound], np.log(observed[sound] / cost.explained_s[sound])
    slow_downs = []
    for slow in _changes(residuals, MIN_SHIFT):
        if float(np.median(residuals[slow.onset : slow.end])) >= MIN_SHIFT:
            places = {
                name: int(steps[place])
                for name in ("onset", "detected", "end", "known_over")
                if (place := getattr(slow, name)) is not None
            }
            slow_downs.append(msgspec.structs.replace(slow, **places))
    return tuple(slow_downs)


def healthy_seconds(trace: Trace, slow: list[Slowness]) -> float:
    """Return the median seconds of a step in which no rank is slow.

    If some rank is slow in every step, return the median of steps that are simulated without the slow-downs.
    """
    healthy = ~_covered(trace, slow)
    if healthy.any():
        return float(np.median(step_seconds(trace)[healthy]))
    seconds = trace.seconds.copy()
    for slowness in slow:
        seconds[trace.is_compute & _at(trace, slowness)] /= 1.0 + slowness.change
    cost = what_if(msgspec.structs.replace(trace, seconds=seconds))
    return float(np.median(cost.explained_s)) if cost else float(np.median(step_seconds(trace)))


def raw_alarms(trace: Trace, excess: float = MIN_EXCESS) -> Alarms:
    """Return the alarms of the raw rule: a step, or a rank in a step, takes `excess` longer than usual.

    A step is compared with the running median of steps, a rank with the median of its peers.
    """
    seconds = step_seconds(trace)
    above = seconds > (1.0 + excess) * running_median(seconds)
    sums = _sums(trace)
    peers = sums.groupby(["step", "stage"])["seconds"].transform("median")
    late = sums[sums["seconds"] > (1.0 + excess) * peers]
    return Alarms(
        steps=tuple(trace.steps[i] for i in np.flatnonzero(above)),
        rank_steps=len(late),
        ranks=len(late.drop_duplicates(["dp", "stage", "rank"])),
    )


def _sums(trace: Trace) -> pd.DataFrame:
    """Return each rank's seconds of computation in each step."""
    return computation(trace).groupby(["step", "dp", "stage", "rank"])["seconds"].sum().reset_index()


def step_seconds(trace: Trace) -> Floats:
    """Return (steps,): seconds from the first start to the last end."""
    first, last = np.full(len(trace.steps), np.inf), np.full(len(trace.steps), -np.inf)
    np.minimum.at(first, trace.step, trace.start)
    np.maximum.at(last, trace.step, trace.end)
    return cast(Floats, last - first)


def running_median(values: Floats) -> Floats:
    """Return, for each value, the median of up to RUNNING_MEDIAN_STEPS values before it; for the first, the value
    itself."""
    return np.array(
        [np.median(values[max(0, i - RUNNING_MEDIAN_STEPS) : i]) if i else values[0] for i in range(values.size)]
    )


def _tested(trace: Trace, series: Series, least: float) -> list[Slowness]:
    """Return the slow-downs in all series, of `least` (log units) or more."""
    # Quicker than its peers is not a finding: if two stages are compared, a slow one makes the other look quick.
    peered = np.bincount(series.peers)[series.peers] > 1
    values = np.where(peered & (series.values < -MIN_SHIFT / 2), -MIN_SHIFT / 2, series.values)
    if values.shape[1] == 1:
        return [msgspec.structs.replace(slow, where=_where(trace, series, 0)) for slow in _changes(values[:, 0], least)]
    slow_downs = []
    for unit, noise in enumerate(noises(values, series.peers).tolist()):
        if np.isfinite(values[:, unit]).any():
            past = runs(values[:, unit], noise, least, peered=bool(peered[unit]), series=values.shape[1])
            slow_downs += [msgspec.structs.replace(slow, where=_where(trace, series, unit)) for slow in past]
    return slow_downs


def _changes(values: Floats, least: float) -> list[Slowness]:
    """Return the slow-downs of a series without peers, relative to its own past."""
    detector = ChangeDetector(least=least)
    slow_downs: list[Slowness] = []
    healthy = 0.0
    for index, value in enumerate(values):
        change = detector.update(index, float(value))
        if change is None:
            continue
        running = bool(slow_downs) and slow_downs[-1].end is None
        healthy = healthy if running else change.before
        above = change.after - healthy
        if not running and above >= least:
            slow_downs.append(Slowness(onset=change.onset, detected=change.detected, change=float(np.expm1(above))))
        elif running and above < least:
            slow_downs[-1] = msgspec.structs.replace(slow_downs[-1], end=change.onset, known_over=change.detected)
    return slow_downs


def _grouped(slow_downs: list[Slowness]) -> list[Slowness]:
    """Merge the slow-downs of tensor-parallel peers that begin together, because these peers wait for each other.

    The merged slow-down names the slowest rank if that is clearly slower, else only the stage.
    """
    kept: list[Slowness] = []
    for slow in sorted(slow_downs, key=lambda slow: -slow.change):
        for i, slower in enumerate(kept):
            same = _stage(slow) == _stage(slower) and abs(slow.onset - slower.onset) <= SAME_ONSET_STEPS
            if same and slow.where and slower.where:
                if slower.change < DISTINCT_RATIO * slow.change:
                    kept[i] = msgspec.structs.replace(slower, where=Where(dp=slower.where.dp, stage=slower.where.stage))
                break
        else:
            kept.append(slow)
    return kept


def _part_of(slow: Slowness, whole: Slowness) -> bool:
    """Return whether the slow-down `slow` of a stage is part of the slow-down `whole` of its replica.

    A smaller one at the same time is, because comparisons between stages are imprecise.
    """
    same = slow.where is not None and whole.where is not None and slow.where.dp == whole.where.dp
    meanwhile = whole.onset - SAME_ONSET_STEPS <= slow.onset and (whole.end is None or slow.onset <= whole.end)
    return same and meanwhile and slow.change < whole.change


def _at_once(part: Slowness, whole: Slowness) -> bool:
    """Return whether `part` begins when `whole` begins or ends, and therefore belongs to it."""
    turns = [whole.onset] if whole.end is None else [whole.onset, whole.end]
    return any(abs(part.onset - turn) <= SAME_ONSET_STEPS for turn in turns)


def _stage(slow: Slowness) -> tuple[int | None, int | None] | None:
    return (slow.where.dp, slow.where.stage) if slow.where else None


def _where(trace: Trace, series: Series, unit: int) -> Where:
    stage, rank = int(series.stage[unit]), int(series.rank[unit])
    return Where(
        dp=trace.dps[series.dp[unit]],
        stage=trace.stages[stage] if stage >= 0 else None,
        rank=rank if rank >= 0 else None,
    )


def _at(trace: Trace, slow: Slowness) -> Flags:
    """Return (n,): whether each row of the trace belongs to the ranks and steps of a slow-down."""
    rows = (trace.step >= slow.onset) & (trace.step < (len(trace.steps) if slow.end is None else slow.end))
    where = slow.where or Where()
    if where.dp is not None:
        rows &= trace.dp == trace.dps.index(where.dp)
    if where.stage is not None:
        rows &= trace.stage == trace.stages.index(where.stage)
    if where.rank is not None:
        rows &= trace.rank == where.rank
    return rows


def _covered(trace: Trace, slow: list[Slowness]) -> Flags:
    """Return (steps,): whether any of the slow-downs includes the step."""
    covered = np.zeros(len(trace.steps), dtype=np.bool_)
    for slowness in slow:
        covered[slowness.onset : slowness.end] = True
    return covered


def _events(trace: Trace, slow: Slowness) -> list[SpeedChange]:
    begun = SpeedChange(
        run=0,
        iteration=trace.steps[slow.onset],
        detected_at=trace.steps[slow.detected],
        end=None if slow.end is None else trace.steps[slow.end],
        change=slow.change,
        verdict="fail-slow",
        where=slow.where,
    )
    if slow.end is None or slow.known_over is None:
        return [begun]
    over = SpeedChange(
        run=0,
        iteration=trace.steps[slow.end],
        detected_at=trace.steps[slow.known_over],
        change=1.0 / (1.0 + slow.change) - 1.0,
        verdict="recovered",
        where=slow.where,
    )
    return [begun, over]


def _workload(trace: Trace, cost: WhatIf, slow: list[Slowness]) -> list[SpeedChange]:
    """Return workload events: steps with an alarm of the raw rule that computation explains, although no rank is
    slow."""
    seconds, covered = step_seconds(trace), _covered(trace, slow)
    usual, explained = running_median(seconds), np.full(len(trace.steps), np.nan)
    explained[cost.steps] = cost.explained_s / np.maximum(running_median(cost.explained_s), 1e-12)
    above = (seconds > (1.0 + MIN_EXCESS) * usual) & ~covered & (explained > 1.0 + MIN_EXCESS / 2)
    sums = _sums(trace)
    order = sums.sort_values("seconds").drop_duplicates("step", keep="last")
    longest = dict(zip(order["step"], order["dp"], strict=True))
    return [
        SpeedChange(
            run=0,
            iteration=trace.steps[i],
            detected_at=trace.steps[i],
            end=trace.steps[i + 1] if i + 1 < len(trace.steps) else None,
            change=float(seconds[i] / usual[i] - 1.0),
            verdict="workload",
            where=Where(dp=trace.dps[int(longest[i])]) if i in longest else None,
        )
        for i in np.flatnonzero(above).tolist()
    ]


def _scores(cost: WhatIf) -> tuple[RankScore, ...]:
    """Return the slow-down of each rank in the trace, the worst first."""
    scores = [
        RankScore(dp=cost.dps[dp], stage=cost.stages[stage], slowdown=float(cost.scores[dp, stage]))
        for dp, stage in np.argwhere(cost.present).tolist()
    ]
    return tuple(sorted(scores, key=lambda score: (-score.slowdown, score.dp, score.stage)))


def _remarks(trace: Trace, cost: WhatIf | None) -> tuple[str, ...]:
    remarks = []
    if trace.left_out:
        remarks.append(f"{count_of(trace.left_out, 'row')} without place, start or known optype, or repeated, left out")
    unknown = int((~trace.known).sum())
    if unknown:
        rows = count_of(unknown, "row")
        remarks.append(f"{rows} without a valid duration; what-if figures use the median of similar operations")
    if cost is None:
        remarks.append("no step could be simulated from its operations; no what-if figures")
    elif cost.steps.size < len(trace.steps):
        remarks.append(f"{len(trace.steps) - cost.steps.size} steps lack ranks or contradict themselves; not simulated")
    return tuple(remarks)
