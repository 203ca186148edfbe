"""Which ranks of a per-operation trace are slow, since when and until when, and which slowness is only workload. Pure.

Series from which the workload is taken out (`resihp.detector.offline.peer_slowness`) are tested sequentially
(`resihp.detector.offline.slow_runs`): a verdict needs persistence over steps. Of the whole step, what its computation
does not explain (`resihp.detector.offline.what_if`) is tested as well (`resihp.detector.sequential.changes`):
communication or the host became slower, though no rank computes slowly. A stage that takes longer than others on every
replica is partitioning, not a fault, and is left to the what-if figures.

Called by `resihp analyze`. It reads no file and changes nothing.
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

LEAST = 0.05
"""Smallest lasting shift that is a verdict, log units: healthy devices of one kind differ by less. Ranks that are slow
in all steps must exceed their peers by twice that."""
LEAST_QUICKEST = 0.10
"""The same where only the quickest micro-batch of a step is compared, which scatters more."""
EXCESS = 0.10
"""By how much a step or a rank must exceed the usual for the raw rule, and a step to be called workload."""
RUNNING = 20
"""Steps that the raw rule's running median covers."""
SAME_ONSET = 3
"""Tensor-parallel peers that become slow within so many steps of each other are slow for one reason."""
DISTINCT = 1.5
"""One of them is named if it is slower by this factor of the next one's slow-down."""


class Alarms(msgspec.Struct, frozen=True, kw_only=True):
    """What a detector without prediction cries: by steps, and by ranks in a step."""

    steps: tuple[int, ...]
    """Labels of the steps that exceed the running median."""
    rank_steps: int
    """How often a rank's computation in a step exceeded its peers' median."""
    ranks: int
    """How many ranks did so at least once."""


def analyse(frame: pd.DataFrame) -> Analysis:
    """All that a trace of per-operation rows (columns: `resihp.detector.offline.traces.COLUMNS`) says.

    Raises UsageError for a frame that is no such trace.
    """
    trace = read(frame)
    cost = what_if(trace)
    slow = list(slow_ranks(trace))
    slow += [one for one in slow_steps(trace, cost) if not any(_at_once(one, other) for other in slow)] if cost else []
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
    """Slow-downs of ranks, or of whole replicas, by onset."""
    if len(trace.stages) > 1 and len(trace.dps) > 1:
        whole = _tested(trace, by_replica(trace), LEAST_QUICKEST)
        single = _grouped(_tested(trace, by_micro_batch(trace), LEAST))
        found = whole + [slow for slow in single if not any(_part_of(slow, other) for other in whole)]
    else:
        found = _grouped(_tested(trace, by_quickest(trace), LEAST_QUICKEST))
    return tuple(sorted(found, key=lambda slow: (slow.onset, -slow.change)))


def slow_steps(trace: Trace, cost: WhatIf) -> tuple[Slowness, ...]:
    """Lasting slow-downs of the whole step that its computation does not explain; they have no `where`.

    None where replicas or stages are plainly absent from the trace: what the others waited for cannot be told then.
    """
    if trace.dps != tuple(range(len(trace.dps))) or trace.stages != tuple(range(len(trace.stages))):
        return ()
    observed = step_seconds(trace)[cost.steps]
    sound = (observed > 0.0) & (cost.explained_s > 0.0)
    steps, residuals = cost.steps[sound], np.log(observed[sound] / cost.explained_s[sound])
    found = []
    for slow in _changes(residuals, LEAST):
        if float(np.median(residuals[slow.onset : slow.end])) >= LEAST:
            places = {
                name: int(steps[place])
                for name in ("onset", "detected", "end", "known_over")
                if (place := getattr(slow, name)) is not None
            }
            found.append(msgspec.structs.replace(slow, **places))
    return tuple(found)


def healthy_seconds(trace: Trace, slow: list[Slowness]) -> float:
    """Median step while nothing is slow; if something always is, as simulated without the slow ranks' excess."""
    healthy = ~_covered(trace, slow)
    if healthy.any():
        return float(np.median(step_seconds(trace)[healthy]))
    seconds = trace.seconds.copy()
    for one in slow:
        seconds[trace.is_compute & _at(trace, one)] /= 1.0 + one.change
    cost = what_if(msgspec.structs.replace(trace, seconds=seconds))
    return float(np.median(cost.explained_s)) if cost else float(np.median(step_seconds(trace)))


def raw_alarms(trace: Trace, excess: float = EXCESS) -> Alarms:
    """What staring at times gives: steps `excess` above the running median, ranks as much above their peers'."""
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
    """Each rank's seconds of computation in each step."""
    return computation(trace).groupby(["step", "dp", "stage", "rank"])["seconds"].sum().reset_index()


def step_seconds(trace: Trace) -> Floats:
    """(steps,): from the first start to the last end."""
    first, last = np.full(len(trace.steps), np.inf), np.full(len(trace.steps), -np.inf)
    np.minimum.at(first, trace.step, trace.start)
    np.maximum.at(last, trace.step, trace.end)
    return cast(Floats, last - first)


def running_median(values: Floats) -> Floats:
    """Median of up to RUNNING values before each; of the first value itself, as nothing was before it."""
    return np.array([np.median(values[max(0, i - RUNNING) : i]) if i else values[0] for i in range(values.size)])


def _tested(trace: Trace, series: Series, least: float) -> list[Slowness]:
    """Runs of steps in which a rank is slow, by `least` (log units) or more."""
    # What is quicker than its peers is no news: where two stages are compared, a slow one makes the other look quick.
    peered = np.bincount(series.peers)[series.peers] > 1
    values = np.where(peered & (series.values < -LEAST / 2), -LEAST / 2, series.values)
    if values.shape[1] == 1:
        return [msgspec.structs.replace(slow, where=_where(trace, series, 0)) for slow in _changes(values[:, 0], least)]
    found = []
    for unit, noise in enumerate(noises(values, series.peers).tolist()):
        if np.isfinite(values[:, unit]).any():
            past = runs(values[:, unit], noise, least, peered=bool(peered[unit]), series=values.shape[1])
            found += [msgspec.structs.replace(slow, where=_where(trace, series, unit)) for slow in past]
    return found


def _changes(values: Floats, least: float) -> list[Slowness]:
    """Runs in which a series without peers is slower than it was before."""
    detector = ChangeDetector(least=least)
    found: list[Slowness] = []
    healthy = 0.0
    for index, value in enumerate(values):
        change = detector.update(index, float(value))
        if change is None:
            continue
        running = bool(found) and found[-1].end is None
        healthy = healthy if running else change.before
        above = change.after - healthy
        if not running and above >= least:
            found.append(Slowness(onset=change.onset, detected=change.detected, change=float(np.expm1(above))))
        elif running and above < least:
            found[-1] = msgspec.structs.replace(found[-1], end=change.onset, known_over=change.detected)
    return found


def _grouped(found: list[Slowness]) -> list[Slowness]:
    """Tensor-parallel peers that become slow together wait for each other: the slowest is named if it stands out."""
    kept: list[Slowness] = []
    for slow in sorted(found, key=lambda slow: -slow.change):
        for i, other in enumerate(kept):
            same = _stage(slow) == _stage(other) and abs(slow.onset - other.onset) <= SAME_ONSET
            if same and slow.where and other.where:
                if other.change < DISTINCT * slow.change:
                    kept[i] = msgspec.structs.replace(other, where=Where(dp=other.where.dp, stage=other.where.stage))
                break
        else:
            kept.append(slow)
    return kept


def _part_of(slow: Slowness, whole: Slowness) -> bool:
    """What a stage seems slower by than others of a replica that is slow as a whole: stages compare inexactly."""
    same = slow.where is not None and whole.where is not None and slow.where.dp == whole.where.dp
    meanwhile = whole.onset - SAME_ONSET <= slow.onset and (whole.end is None or slow.onset <= whole.end)
    return same and meanwhile and slow.change < whole.change


def _at_once(one: Slowness, other: Slowness) -> bool:
    """Whether the one begins as the other begins or ends, and so is a part of it."""
    turns = [other.onset] if other.end is None else [other.onset, other.end]
    return any(abs(one.onset - turn) <= SAME_ONSET for turn in turns)


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
    """Rows of the trace that a slow-down concerns."""
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
    """(steps,): whether anything is slow."""
    covered = np.zeros(len(trace.steps), dtype=np.bool_)
    for one in slow:
        covered[one.onset : one.end] = True
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
    """Steps that the raw rule would call slow and that their computation explains, though no rank is slow."""
    seconds, covered = step_seconds(trace), _covered(trace, slow)
    usual, explained = running_median(seconds), np.full(len(trace.steps), np.nan)
    explained[cost.steps] = cost.explained_s / np.maximum(running_median(cost.explained_s), 1e-12)
    above = (seconds > (1.0 + EXCESS) * usual) & ~covered & (explained > 1.0 + EXCESS / 2)
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
    """Worst first."""
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
