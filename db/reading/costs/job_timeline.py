"""The timeline of a job from its rows: how each moment of the time held was spent. Pure; reads nothing.

Decides which rows count at which moment, and when the stored account is used in place of rows that were thinned;
`cost_accounts` defines the causes. Called by `accounts`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np

from resihp.db.reading.costs.cost_accounts import Row, of_hardware
from resihp.db.reading.costs.goodput import Course, Interruption, course, interruptions
from resihp.db.reading.costs.iteration_shares import held_meanwhile, work_by_iteration
from resihp.db.reading.costs.stored_accounts import (
    is_complete,
    rolled_back,
    stored_account_of_any_version,
)
from resihp.db.reading.costs.timeline import (
    CAUSES,
    NEWER_CAUSES,
    SHARES,
    Again,
    HeldTime,
    held_devices,
    laid_out,
    spread_evenly,
)
from resihp.record.recovery import Moments, recovery

MAX_SILENCE = timedelta(days=1)
"""A job that is recorded as running counts as dead this long after its last entry. A ledger on a server is updated only
by commands that are run in the job's home, so perhaps no command has noticed the job's death."""


def timeline(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    checkpoints: Iterable[int],
    nodes: Sequence[Row],
    now: datetime,
    again: Again = (),
) -> HeldTime:
    """Return the timeline of a job from its rows; iterations must be in order. `checkpoints`: iterations that were
    saved. `again`: iterations that later attempts committed again. If the job is over and its rows were thinned, its
    stored account is used."""
    clock = course(job, iterations, plans, min(now, job["last_entry_at"] + MAX_SILENCE))
    spans = interruptions(job, clock, failures, reconfigurations)
    mended = {row["epoch"]: row for row in reconfigurations}

    held_s = clock.before_s + clock.wall_s + clock.after_s

    def at(row: Row) -> float:
        return float(np.clip((row["noticed_at"] - job["started_at"]).total_seconds(), 0.0, held_s))

    devices_held = held_devices(job, nodes, held_s)
    laid = laid_out(
        clock,
        spans,
        _pauses(clock, spans, checkpoints),
        work_by_iteration(job, clock, iterations, failures, plans, again),
        work_by_iteration(job, clock, iterations, failures, plans, again, held_meanwhile(clock, devices_held)),
        devices_held,
        failures=tuple((at(row), of_hardware(row)) for row in failures),
        repairs=tuple((at(row), took) for row in failures if (took := _recovered_s(row, mended)) is not None),
    )
    if (before := stored_account_of_any_version(job)) is None or not _is_thinned(clock):
        return laid
    lost_s = {cause: before.lost_s.get(cause, 0.0) for cause in CAUSES}
    if not is_complete(before, NEWER_CAUSES):
        return spread_evenly(laid, before.wall_s, before.useful_s, lost_s)
    lost_s |= {"start": 0.0, "other": max(lost_s["other"] - clock.after_s, 0.0)}
    rolled = rolled_back(before, again)
    evenly = spread_evenly(laid, before.wall_s, before.useful_s, lost_s, None if rolled is None else rolled.seconds)
    _, hours = evenly.between(-np.inf, np.inf)
    stored_hours = np.array([before.useful_gpu_hours, *(before.lost_gpu_hours.get(cause, 0.0) for cause in CAUSES)])
    rollback = SHARES.index("rollback")
    both = hours[0] + hours[rollback]
    stored_hours[rollback] = stored_hours[0] * (hours[rollback] / both if both > 0.0 else 0.0)
    if rolled is not None:
        stored_hours[rollback] = rolled.gpu_hours
    stored_hours[0] -= stored_hours[rollback]
    scale = np.divide(stored_hours, hours, out=np.ones_like(hours), where=hours > 0.0)
    return replace(evenly, hours_scale=scale)


def _recovered_s(failure: Row, mended: Mapping[int, Row]) -> float | None:
    """Return the seconds from a failure to the first commit after it, as `tables.with_times` computes them; None
    without a recovery."""
    row = mended.get(failure["recovered_epoch"])
    if row is None:
        return None
    moments = Moments.of_times(failure["failed_at"], failure["noticed_at"])
    return recovery(moments, row["finished_at"].timestamp()).seconds_to_recover


def _is_thinned(clock: Course) -> bool:
    return bool(clock.iterations) and clock.iterations[-1] - clock.iterations[0] >= len(clock.iterations)


def _pauses(clock: Course, spans: Sequence[Interruption], checkpoints: Iterable[int]) -> dict[int, float]:
    """Return the time of pauses after checkpointed iterations beyond the usual pause, by the index of the following
    commit."""
    taken = set(checkpoints)
    if not taken or len(clock.ends_s) < 2:
        return {}
    interrupted = {index for span in spans for index in range(span.before + 1, span.after + 1)}
    usual: list[float] = []
    after: dict[int, float] = {}
    for index in range(1, len(clock.ends_s)):
        if index in interrupted:
            continue
        pause = max(clock.ends_s[index] - clock.ends_s[index - 1] - clock.took_s[index], 0.0)
        if clock.iterations[index - 1] in taken:
            after[index] = pause
        else:
            usual.append(pause)
    typical = statistics.median(usual) if usual else 0.0
    return {index: pause - typical for index, pause in after.items() if pause > typical}
