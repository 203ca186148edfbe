"""How the time of each committed iteration is divided: useful, lost to slow components, lost to missing devices. Pure.

Decides how long a healthy iteration would have taken, and how many devices were requested; never judges a device.
Called by `job_timeline`, `summary` and `resihp.db.reading.iterations.why`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from resihp.db.reading.costs.goodput import Course, Floats, devices_of
from resihp.db.reading.costs.timeline import (
    Again,
    HeldDevices,
)
from resihp.db.reading.iterations.excess import MAX_TRUSTED_RATIO, MIN_ITERATIONS
from resihp.db.reading.plans.idle_epochs import idle_epochs
from resihp.db.reading.tables import object_in

Row = dict[str, Any]


MIN_ITERATION_S = 1e-6
"""Shortest time of an iteration."""


def _onsets(iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> list[int | None]:
    """Return, for each iteration, the iteration at which the oldest slowness that affects it began; None if nothing was
    slow."""
    slow = [row for row in failures if row["kind"] == "fail-slow"]
    idle = idle_epochs(slow, plans)
    coming = sorted(slow, key=lambda row: row["iteration"], reverse=True)
    present: list[Row] = []
    """Failures that may still be slow at this iteration, oldest first."""
    next_end, epoch, onset = sys.maxsize, None, None
    onsets: list[int | None] = []
    for row in iterations:
        begins = bool(coming) and coming[-1]["iteration"] <= row["iteration"]
        if begins or row["iteration"] >= next_end or row["epoch"] != epoch:
            while coming and coming[-1]["iteration"] <= row["iteration"]:
                present.append(coming.pop())
            present = [failure for failure in present if (failure["ended_iteration"] or sys.maxsize) > row["iteration"]]
            next_end = min((failure["ended_iteration"] or sys.maxsize for failure in present), default=sys.maxsize)
            epoch = row["epoch"]
            at_work = (failure["iteration"] for failure in present if epoch not in idle.get(failure["failure"], ()))
            onset = next(at_work, None)
        onsets.append(onset)
    return onsets


def healthy_seconds(iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> dict[int, float]:
    """Return the healthy time, in seconds, of each iteration that was affected by something slow, by its number.

    Iterations with unknown healthy time are omitted.
    """
    onsets = _onsets(iterations, failures, plans)
    active = {row["epoch"]: row["active"] for row in plans}
    epoch_at = {row["iteration"]: row["epoch"] for row in iterations}
    rates: dict[int | None, list[float]] = {}
    for row, onset in zip(iterations, onsets, strict=True):
        if onset is None and row["seconds"] and row["tokens"]:
            rates.setdefault(active.get(row["epoch"]), []).append(row["seconds"] / row["tokens"])
    usual = {devices: statistics.median(devices_rates) for devices, devices_rates in rates.items()}
    off = _prediction_ratio([row for row, onset in zip(iterations, onsets, strict=True) if onset is None])
    healthy: dict[int, float] = {}
    for row, onset in zip(iterations, onsets, strict=True):
        if onset is None:
            continue
        predicted = row["predicted_seconds"]
        rate = usual.get(active.get(row["epoch"]))
        same_plan = epoch_at.get(onset, row["epoch"]) == row["epoch"]
        if predicted is not None and (same_plan or rate is None):
            healthy[row["iteration"]] = predicted * off
        elif rate is not None and row["tokens"]:
            healthy[row["iteration"]] = rate * row["tokens"]
    return healthy


def _prediction_ratio(well: Sequence[Row]) -> float:
    """Return the ratio of actual to predicted time over iterations in which nothing was slow; 1 if it is near 1, or if
    there are too few iterations. `why` uses the same rule (`resihp.db.reading.iterations.excess`)."""
    ratios = [row["seconds"] / row["predicted_seconds"] for row in well if row["seconds"] and row["predicted_seconds"]]
    ratio = statistics.median(ratios) if len(ratios) >= MIN_ITERATIONS else 1.0
    return 1.0 if 1.0 / MAX_TRUSTED_RATIO <= ratio <= MAX_TRUSTED_RATIO else ratio


def asked_devices(job: Row) -> int:
    """Return the number of devices in the requested layout, from a job's row."""
    return devices_of(job["nodes"], job["gpus_per_node"], object_in(job.get("configuration")))


def work_by_iteration(
    job: Row,
    clock: Course,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    plans: Sequence[Row],
    again: Again = (),
    devices_held: Floats | None = None,
) -> Floats:
    """Return the seconds of each committed iteration, divided by `ITERATION_SHARES`: useful, lost to something slow,
    lost to devices on standby, lost to missing devices, and repeated by later attempts (this part would otherwise be
    useful).

    `again`: iterations that later attempts committed again. `devices_held`: devices held during each iteration, for
    GPU-hours: requested devices that were given back, or that have not come yet, cannot be lost. None to count all
    requested devices.
    """
    healthy = healthy_seconds(iterations, failures, plans)
    took = np.array(clock.took_s)
    excess = took - np.array([healthy.get(i, took_s) for i, took_s in zip(clock.iterations, clock.took_s, strict=True)])
    slower = np.clip(excess, 0.0, took)
    some = float(slower.sum())
    slow = slower * (
        max(float(excess.sum()), 0.0) / some if some > 0.0 else 0.0
    )  # some iterations were faster than the healthy time
    unused = _unused(job, clock, plans, devices_held)
    idle, capacity = took * unused  # subtracted first, so that goodput does not depend on verdicts of slowness
    slow *= 1.0 - unused.sum(axis=0)
    useful = np.maximum(took - slow - idle - capacity, 0.0)
    last = np.array(clock.iterations, dtype=np.int64)
    former = np.concatenate((last[:1] - 1, last[:-1]))  # a row represents all iterations since the previous row
    repeated = np.zeros(len(took))
    for low, high in again:
        repeated += np.maximum(np.minimum(last, high) - np.maximum(former, low - 1), 0)
    rollback = useful * repeated / np.maximum(last - former, 1)
    return np.stack((useful - rollback, slow, idle, capacity, rollback), axis=1)


def _unused(job: Row, clock: Course, plans: Sequence[Row], devices_held: Floats | None) -> Floats:
    """Return, for each committed iteration, two shares of the requested devices: those on standby under its plan, and
    those missing."""
    requested = float(asked_devices(job))
    full = np.full(len(clock.epochs), requested) if devices_held is None else np.minimum(devices_held, requested)
    counts = {row["epoch"]: (row["active"], row["standby"]) for row in plans}
    active, standby = np.array([counts.get(epoch, (requested, 0)) for epoch in clock.epochs]).reshape(-1, 2).T
    missing = np.maximum(full - active, 0.0)
    idle = np.minimum(missing, standby)
    return np.stack((idle, missing - idle)) / np.maximum(full, 1.0)


def held_meanwhile(clock: Course, devices_held: HeldDevices) -> Floats:
    """Return the average number of devices held during each iteration."""
    ends, took = clock.before_s + np.array(clock.ends_s), np.maximum(np.array(clock.took_s), MIN_ITERATION_S)
    return np.asarray((devices_held.until(ends) - devices_held.until(ends - took)) / took, dtype=np.float64)
