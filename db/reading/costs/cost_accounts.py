"""Where the time of a job went, in seconds and GPU-hours, from the rows of its ledger. Pure; reads nothing.

A job *holds* its GPUs from its start to its end (now, while it runs; its last entry, if it is known to have died; one
day after its last entry, if nobody has recorded its death). The time held is the sum of

=============  ========================================================================================================
`useful`       committed iterations, minus their parts counted as `slow`, `idle`, `capacity` and `rollback`
`start`        from the job's start until the first committed iteration begins; all of it if none was committed
`detect`       from a failure until it was noticed, both from the failure's row (`failed_at`, `noticed_at`); for several
               failures that one change of plan ended, from the first failure to the first notice
`redo`         discarded work on the interrupted iteration: from the last commit to the failure. Zero if the iteration
               counted, or none was under way
`reconfigure`  from the notice to the first commit after it, minus the iterations committed meanwhile: park, plan,
               groups, state. Until the end for a failure that was never recovered from
`rollback`     the useful part of committed iterations that a later attempt of the same run committed again. Known only
               once that attempt exists: a stored account keeps it apart (`RolledBack`), together with the iterations
               concerned, and it is computed anew if these have changed
`slow`         excess time of iterations while something slow was at work: a `fail-slow` failure, from its first slow
               iteration to its end, except under plans that give it no work (`db.reading.plans.idle_epochs`). The
               excess is the time, without `idle` and `capacity`, over the healthy time. The healthy time is the
               detector's prediction for the plan and the workload, scaled by the ratio of actual to predicted time
               while nothing was slow if that ratio is far from 1, as on a busy machine. Under a later plan, which has
               already adapted to the slow device, it is the time per token of healthy iterations on as many devices,
               if there are any
`idle`         iterations' time on fewer devices than requested (`asked_devices`), multiplied by the share of requested
               devices that exist but stand by: in it they would have done their part. They failed the start's probe,
               are slow, or the plan has no stage for them
`capacity`     the same for devices that are missing: dead, lost with their node, or never come. It is the cost of
               waiting for nodes. For GPU-hours, both count only devices that are held: a node that was given back costs
               time, but no GPU-hours
`checkpoint`   pauses between a checkpointed iteration and the next one, beyond the usual pause
`other`        the rest: the usual pauses between iterations, winding down after the last one, clock differences, and
               unrecorded time
=============  ========================================================================================================

*Wall time* begins with the first committed iteration (with the first plan if none is committed) and ends with the job;
for a completed job, with its last commit. *Goodput* = committed iterations, minus `idle` and `capacity`, / wall time:
the time that they would have taken in the requested layout with all its devices. It counts slow iterations, and those
committed again, as work done. *ETTR* has the same numerator over the time held (Kokolis et al., "Revisiting reliability
in large-scale ML clusters"). Spare nodes are not part of the layout: standing by is their purpose, and their hours are
included in every line. *GPU-hours* are times multiplied by the devices held at that moment: the allocation's from the
job's start, a lost node's until it is given back. *Useful share* = useful GPU-hours / GPU-hours held. *MTBF* is time
held per root cause, or per root cause of hardware, both also as failures in 1,000 GPU-days held; *MTTR* is the mean
time from the failure to the first commit after it, `detect` included.

`db.reading.costs.goodput` defines the clock of commits, `db.reading.costs.timeline` attributes the time on it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec
import numpy as np

from db.reading.costs.goodput import Course, Floats, Interruption, course, devices_of, interruptions
from db.reading.costs.timeline import (
    CAUSES,
    GOODPUT_SHARES,
    ITERATION_SHARES,
    NEWER_CAUSES,
    SHARES,
    Again,
    HeldDevices,
    HeldTime,
    held_devices,
    laid_out,
    spread_evenly,
)
from db.reading.iterations.excess import MAX_TRUSTED_RATIO, MIN_ITERATIONS
from db.reading.plans.idle_epochs import idle_epochs
from resihp.record.recovery import Moments, recovery

Row = dict[str, Any]

OF_FAILURES = frozenset({"detect", "reconfigure", "redo", "rollback", "slow", "idle", "capacity"})
"""Causes attributed to failures, to unfit devices, and to the changes of plan that they lead to."""
OF_HARDWARE = frozenset({"device", "node", "link", "process"})
"""Components that count as hardware if a failure does not say whether it was: those of `db.reading.health`."""
GPU_DAYS = 1000.0
MAX_SILENCE = timedelta(days=1)
"""Time after its last entry at which a job recorded as running counts as dead, if nobody has looked: a ledger on a
server is updated only by commands run in the job's home."""
RECENT_ITERATIONS = 20
"""Number of recent iterations from which the usual time of one is computed."""
MAX_HELD_S = 1e9
"""Largest plausible time for which a job holds devices: imported rows may say anything."""
MIN_ITERATION_S = 1e-6
"""Shortest time of an iteration."""


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """Useful time of a job that is over which later attempts did again, in the iterations `again`."""

    again: tuple[tuple[int, int], ...]
    seconds: float
    gpu_hours: float


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Account of a job; see the module's docstring. `lost_s`, `lost_gpu_hours`: by `CAUSES`; with `useful_s` they add
    up to `held_s`, with `useful_gpu_hours` to `gpu_hours`. Fields with a default are missing in accounts of older
    versions, which covered only the wall time."""

    wall_s: float
    useful_s: float
    committed_s: float
    """Seconds of committed iterations, slow or not, on the requested devices: goodput's numerator."""
    goodput: float | None
    ettr: float | None
    lost_s: dict[str, float]
    gpu_hours: float
    lost_gpu_hours: dict[str, float]
    devices: float
    """Number of devices held, on average."""
    failures: int
    mtbf_s: float | None
    mttr_s: float | None
    held_s: float = 0.0
    useful_gpu_hours: float = 0.0
    hardware_failures: int = 0
    repairs: int = 0
    """Number of failures that ended with a recovery; `mttr_s` is their mean time."""
    in_proportion: int = 0
    """Number of jobs whose causes were taken in proportion to their wall time, because they were cut and their rows
    thinned."""
    rolled_back: RolledBack | None = None
    """Present only in an account stored in a job's row, whose other figures exclude later attempts; None if there are
    none, or if it has yet to be computed."""

    @property
    def failure_gpu_hours(self) -> float:
        """GPU-hours lost to failures."""
        return sum(self.lost_gpu_hours[cause] for cause in OF_FAILURES)

    @property
    def useful_share(self) -> float | None:
        """Share of the GPU-hours held."""
        return self.useful_gpu_hours / self.gpu_hours if self.gpu_hours > 0 else None

    @property
    def hardware_mtbf_s(self) -> float | None:
        return self.held_s / self.hardware_failures if self.hardware_failures and self.held_s > 0 else None

    @property
    def failure_rate(self) -> float | None:
        """Failures in 1,000 GPU-days."""
        return _in_gpu_days(self.failures, self.gpu_hours)

    @property
    def hardware_failure_rate(self) -> float | None:
        """Hardware failures in 1,000 GPU-days."""
        return _in_gpu_days(self.hardware_failures, self.gpu_hours)


def _in_gpu_days(number: int, gpu_hours: float) -> float | None:
    return GPU_DAYS * number / (gpu_hours / 24.0) if gpu_hours > 0 else None


def of_hardware(failure: Row) -> bool:
    """Decide whether a failure indicates hardware; an injected one never does."""
    if failure["detect_seconds"] is not None:  # only injected failures have it
        return False
    if failure["hardware"] is not None:
        return bool(failure["hardware"])
    return failure["kind"] in ("fail-stop", "fail-slow") and failure["component"] in OF_HARDWARE


def stored_account(job: Row) -> Account | None:
    """Return the account stored in the row of a job that is over; None while it runs, and if it is missing, malformed
    or lacks causes."""
    account = stored_account_of_any_version(job)
    return account if account is not None and _is_complete(account) else None


def _is_complete(account: Account, but: Set[str] = frozenset()) -> bool:
    """Decide whether the account covers a plausible time, and has all causes except those in `but`."""
    causes = set(CAUSES) - but
    return 0.0 <= account.held_s <= MAX_HELD_S and all(
        losses.keys() >= causes for losses in (account.lost_s, account.lost_gpu_hours)
    )


def stored_account_with(job: Row, again: Again) -> Account | None:
    """Return the stored account, including the iterations that later attempts committed again; None if that part has
    yet to be computed, or was computed for other iterations."""
    account = stored_account(job)
    if account is None:
        return None
    before, account = _rolled_back(account, again), msgspec.structs.replace(account, rolled_back=None)
    if before is None:
        return None if again else account
    lost_s = account.lost_s | {"rollback": account.lost_s["rollback"] + before.seconds}
    hours = account.lost_gpu_hours | {"rollback": account.lost_gpu_hours["rollback"] + before.gpu_hours}
    return msgspec.structs.replace(
        account,
        useful_s=account.useful_s - before.seconds,
        lost_s=lost_s,
        useful_gpu_hours=account.useful_gpu_hours - before.gpu_hours,
        lost_gpu_hours=hours,
    )


def _rolled_back(account: Account, again: Again) -> RolledBack | None:
    """Return the stored rollback of these iterations, if it fits within the useful time."""
    rolled = account.rolled_back
    if rolled is None or not again or rolled.again != tuple(again):
        return None
    return rolled if _fits_within(account, rolled) else None


def _fits_within(account: Account, rolled: RolledBack) -> bool:
    return 0.0 <= rolled.seconds <= account.useful_s and 0.0 <= rolled.gpu_hours <= account.useful_gpu_hours


def is_malformed(job: Row) -> bool:
    """Decide whether the stored account of a job that is over is malformed or implausible: it is then ignored, and
    computed anew from the rows. Accounts of older versions are not malformed."""
    if job["state"] == "running" or not job.get("account"):
        return False
    account = stored_account_of_any_version(job)
    if account is None or not 0.0 <= account.held_s <= MAX_HELD_S:
        return True
    rolled = account.rolled_back
    return rolled is not None and not _fits_within(account, rolled)


def account_to_store(alone: Account, whole: Account, again: Again) -> Account:
    """Return the account to store for a job that is over: the one without later attempts, plus the rollback that
    `whole`, the one with them, has."""
    if not again:
        return msgspec.structs.replace(alone, rolled_back=None)
    rolled = RolledBack(
        again=tuple(again),
        seconds=min(max(whole.lost_s["rollback"], 0.0), alone.useful_s),
        gpu_hours=min(max(whole.lost_gpu_hours["rollback"], 0.0), alone.useful_gpu_hours),
    )
    return msgspec.structs.replace(alone, rolled_back=rolled)


def stored_account_of_any_version(job: Row) -> Account | None:
    """Return the stored account, even in the format of versions that had fewer causes, or covered only the wall
    time."""
    if job["state"] == "running" or not job.get("account"):
        return None
    try:
        return msgspec.json.decode(job["account"], type=Account)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


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
    """Return the timeline of a job from its rows, iterations in order. `checkpoints`: iterations that were saved;
    `again`: iterations that later attempts committed again. For a job that is over and whose rows were thinned, the
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
        _work_by_iteration(job, clock, iterations, failures, plans, again),
        _work_by_iteration(job, clock, iterations, failures, plans, again, _held_meanwhile(clock, devices_held)),
        devices_held,
        failures=tuple((at(row), of_hardware(row)) for row in failures),
        repairs=tuple((at(row), took) for row in failures if (took := _recovered_s(row, mended)) is not None),
    )
    if (before := stored_account_of_any_version(job)) is None or not _is_thinned(clock):
        return laid
    lost_s = {cause: before.lost_s.get(cause, 0.0) for cause in CAUSES}
    if not _is_complete(before, NEWER_CAUSES):
        return spread_evenly(laid, before.wall_s, before.useful_s, lost_s)
    lost_s |= {"start": 0.0, "other": max(lost_s["other"] - clock.after_s, 0.0)}
    rolled = _rolled_back(before, again)
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
    """Return the seconds from a failure to the first commit after it, as in its row (`tables.with_times`)."""
    row = mended.get(failure["recovered_epoch"])
    if row is None:
        return None
    moments = Moments.of_times(failure["failed_at"], failure["noticed_at"])
    return recovery(moments, row["finished_at"].timestamp()).seconds_to_recover


def between(held_time: HeldTime, since_s: float = -np.inf, until_s: float = np.inf) -> Account:
    """Return the account of a part of a job, from `since_s` on and before `until_s`, in seconds since the job's
    start."""
    every_s, every_h = (amounts.tolist() for amounts in held_time.between(since_s, until_s))
    seconds, hours = dict(zip(SHARES, every_s, strict=True)), dict(zip(SHARES, every_h, strict=True))
    held_s, gpu_hours = sum(every_s), sum(every_h)
    wall_s = max(min(held_time.wall[1], until_s) - max(held_time.wall[0], since_s), 0.0)
    committed_s = min(sum(seconds[share] for share in GOODPUT_SHARES), wall_s)
    failures = [hardware for at, hardware in held_time.failures if since_s <= at < until_s]
    repairs = [took for at, took in held_time.repairs if since_s <= at < until_s]
    cut = since_s > 0.0 or until_s < held_time.held_s
    return Account(
        wall_s=wall_s,
        useful_s=seconds.pop("useful"),
        committed_s=committed_s,
        goodput=committed_s / wall_s if held_time.trained and wall_s > 0 else None,
        ettr=min(committed_s / held_s, 1.0) if held_time.trained and held_s > 0 else None,
        lost_s=seconds,
        gpu_hours=gpu_hours,
        lost_gpu_hours={cause: hours[cause] for cause in CAUSES},
        devices=gpu_hours * 3600.0 / held_s if held_s > 0 else 0.0,
        failures=len(failures),
        mtbf_s=held_s / len(failures) if failures and held_s > 0 else None,
        mttr_s=statistics.fmean(repairs) if repairs else None,
        held_s=held_s,
        useful_gpu_hours=hours["useful"],
        hardware_failures=sum(failures),
        repairs=len(repairs),
        in_proportion=int(held_time.in_proportion and cut),
    )


def added(parts: Iterable[Account]) -> Account:
    """Add up the accounts of many jobs, or of parts of them."""
    accounts = list(parts)

    def total(name: str) -> Any:
        return sum(getattr(account, name) for account in accounts)

    wall_s, held_s, committed_s, gpu_hours = map(total, ("wall_s", "held_s", "committed_s", "gpu_hours"))
    failures, repairs = total("failures"), total("repairs")
    trained = any(account.goodput is not None for account in accounts)
    return Account(
        wall_s=wall_s,
        useful_s=total("useful_s"),
        committed_s=committed_s,
        goodput=committed_s / wall_s if trained and wall_s > 0 else None,
        ettr=committed_s / held_s if trained and held_s > 0 else None,
        lost_s={cause: sum(account.lost_s[cause] for account in accounts) for cause in CAUSES},
        gpu_hours=gpu_hours,
        lost_gpu_hours={cause: sum(account.lost_gpu_hours[cause] for account in accounts) for cause in CAUSES},
        devices=gpu_hours * 3600.0 / held_s if held_s > 0 else 0.0,
        failures=failures,
        mtbf_s=held_s / failures if failures and held_s > 0 else None,
        mttr_s=sum((account.mttr_s or 0.0) * account.repairs for account in accounts) / repairs if repairs else None,
        held_s=held_s,
        useful_gpu_hours=total("useful_gpu_hours"),
        hardware_failures=total("hardware_failures"),
        repairs=repairs,
        in_proportion=total("in_proportion"),
    )


def _is_thinned(clock: Course) -> bool:
    return bool(clock.iterations) and clock.iterations[-1] - clock.iterations[0] >= len(clock.iterations)


def _pauses(clock: Course, spans: Sequence[Interruption], checkpoints: Iterable[int]) -> dict[int, float]:
    """Return the pauses after checkpointed iterations beyond the usual ones, by the index of the commit after them."""
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


def _onsets(iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> list[int | None]:
    """Return, for each iteration, the first iteration of the oldest slowness that affected it, None if nothing was
    slow."""
    slow = [row for row in failures if row["kind"] == "fail-slow"]
    idle = idle_epochs(slow, plans)
    coming = sorted(slow, key=lambda row: row["iteration"], reverse=True)
    present: list[Row] = []
    """Failures that may be slow now, the oldest first."""
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
    """Return the healthy time of each iteration that something slow affected, by its number.

    Iterations for which it is unknown are left out.
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
    there are too few iterations. `why` uses the same rule (`db.reading.iterations.excess`)."""
    ratios = [row["seconds"] / row["predicted_seconds"] for row in well if row["seconds"] and row["predicted_seconds"]]
    ratio = statistics.median(ratios) if len(ratios) >= MIN_ITERATIONS else 1.0
    return 1.0 if 1.0 / MAX_TRUSTED_RATIO <= ratio <= MAX_TRUSTED_RATIO else ratio


def asked_devices(job: Row) -> int:
    """Return the number of devices in the requested layout, from a job's row."""
    try:
        configuration = json.loads(job.get("configuration") or "{}")
    except ValueError:
        configuration = {}
    return devices_of(job["nodes"], job["gpus_per_node"], configuration)


def _work_by_iteration(
    job: Row,
    clock: Course,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    plans: Sequence[Row],
    again: Again = (),
    devices_held: Floats | None = None,
) -> Floats:
    """Return the seconds of each committed iteration, by `ITERATION_SHARES`: useful, lost to something slow, to devices
    that stand by and to missing ones, and the part that would be useful if nobody had committed the iteration again.

    `held`: devices held meanwhile, for GPU-hours: requested devices that were given back, or have not come yet, cannot
    be lost.
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
    idle, capacity = took * unused  # taken off first, so that goodput does not depend on verdicts of slowness
    slow *= 1.0 - unused.sum(axis=0)
    useful = np.maximum(took - slow - idle - capacity, 0.0)
    last = np.array(clock.iterations, dtype=np.int64)
    former = np.concatenate((last[:1] - 1, last[:-1]))  # a row stands for all iterations since the row before
    repeated = np.zeros(len(took))
    for low, high in again:
        repeated += np.maximum(np.minimum(last, high) - np.maximum(former, low - 1), 0)
    rollback = useful * repeated / np.maximum(last - former, 1)
    return np.stack((useful - rollback, slow, idle, capacity, rollback), axis=1)


def _unused(job: Row, clock: Course, plans: Sequence[Row], devices_held: Floats | None) -> Floats:
    """Return, for each committed iteration, the shares of the requested devices that stood by under its plan, and that
    were missing."""
    requested = float(asked_devices(job))
    full = np.full(len(clock.epochs), requested) if devices_held is None else np.minimum(devices_held, requested)
    counts = {row["epoch"]: (row["active"], row["standby"]) for row in plans}
    active, standby = np.array([counts.get(epoch, (requested, 0)) for epoch in clock.epochs]).reshape(-1, 2).T
    missing = np.maximum(full - active, 0.0)
    idle = np.minimum(missing, standby)
    return np.stack((idle, missing - idle)) / np.maximum(full, 1.0)


def _held_meanwhile(clock: Course, devices_held: HeldDevices) -> Floats:
    """Return the average number of devices held during each iteration."""
    ends, took = clock.before_s + np.array(clock.ends_s), np.maximum(np.array(clock.took_s), MIN_ITERATION_S)
    return np.asarray((devices_held.until(ends) - devices_held.until(ends - took)) / took, dtype=np.float64)


def summarise(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    now: datetime,
) -> Row:
    """Return the figures of a job from its rows. Times and shares are as in `between`, except that `useful_seconds`
    includes slow iterations (of which `slow_seconds` are beyond their healthy time), and `lost_seconds` is by the kind
    of the failure that interrupted training, plus `idle` and `capacity`. For a job that is over, the stored account is
    used: its rows may have been thinned since."""
    clock = course(job, iterations, plans, now)
    if (stored := stored_account(job)) is not None:
        unused, wall_s, useful_s, goodput, ettr = (
            stored.lost_s,
            stored.wall_s,
            stored.committed_s,
            stored.goodput,
            stored.ettr,
        )
    else:
        work = _work_by_iteration(job, clock, iterations, failures, plans).sum(axis=0).tolist()
        unused, wall_s = dict(zip(ITERATION_SHARES, work, strict=True)), clock.wall_s
        useful_s = max(clock.committed_s - unused["idle"] - unused["capacity"], 0.0)
        goodput, ettr = clock.shares_of(useful_s)
    lost_s = {cause: unused[cause] for cause in ("idle", "capacity") if unused[cause] > 0.0}
    for interruption in interruptions(job, clock, failures, reconfigurations):
        lost_s[interruption.kind] = lost_s.get(interruption.kind, 0.0) + interruption.lost_s
    lost_s["other"] = max(wall_s - useful_s - sum(lost_s.values()), 0.0)
    last = iterations[-1] if iterations else None
    recent = [row["seconds"] for row in iterations[-RECENT_ITERATIONS:] if row["seconds"] is not None]
    return {
        "job": job["name"],
        "host": job["host"],
        "owner": job["owner"],
        "state": job["state"],
        "exit_code": job["exit_code"],
        "reason": job["reason"],
        "started_at": job["started_at"],
        "ended_at": job["ended_at"],
        "epoch": plans[-1]["epoch"] if plans else None,
        "iteration": last["iteration"] if last else 0,
        "loss": last["loss"] if last else None,
        "committed_iterations": last["iteration"] - iterations[0]["iteration"] + 1 if last else 0,
        "iteration_seconds": statistics.median(recent) if recent else None,
        "failures": len(failures),
        "useful_seconds": useful_s,
        "slow_seconds": unused.get("slow", 0.0),
        "wall_seconds": wall_s,
        "goodput": goodput,
        "ettr": ettr,
        "lost_seconds": lost_s,
    }
