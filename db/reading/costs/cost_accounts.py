"""Where the time of a job went, in seconds and GPU-hours, from the rows of its ledger. Pure; reads nothing.

A job *holds* its GPUs from its start to its end (now, while it runs; its last sign of life, of one that died; a day
after it, of one of which nobody has said so). That is the sum of

=============  ========================================================================================================
`useful`       committed iterations, less what `slow`, `idle`, `capacity` and `rollback` take of them
`start`        from the job's start until the first committed iteration begins; all of it where none was committed
`detect`       from a failure to its being noticed, both as the failure's row has them (`failed_at`, `noticed_at`); of
               several that one change of plan mended, from the first failure to the first notice
`redo`         work on the interrupted iteration that was thrown away: from the last commit to the failure. Nothing
               where the iteration counted, or none was under way
`reconfigure`  from the notice to the first commit after it, less the iterations committed meanwhile: park, plan,
               groups, state. Of a failure that nobody mended, until the end
`rollback`     committed iterations that a later attempt of the same run committed again: what would be `useful` of
               them. Known only once that attempt is there: an account that was kept has it apart (`RolledBack`), with
               the iterations that it is of, and where these are others by now it is reckoned anew
`slow`         while something slow was at work (a `fail-slow` failure, from its first slow iteration to its end, but
               under plans that have no work for it, `db.reading.plans.idle_epochs`): iterations' time, less `idle`
               and `capacity`, beyond what they take where all is well. That is the detector's prediction, which knows
               the plan and the workload, times what iterations took for theirs while nothing was slow, where that is
               far from it, as on a busy machine; under a plan made since, which already makes do with the slow device,
               it is the time per token of healthy iterations on as many devices, where there are any
`idle`         iterations' time on fewer devices than the job was asked to have (`asked_devices`), as far as devices
               that are there stand by: the share that these are of those asked for, in which they would have done
               their part. They failed the start's probe, are slow, or the plan has no stage for them
`capacity`     the same for devices that are not there: dead, lost with their node, or never come. What waiting for
               nodes costs. In GPU-hours those that are held count, of both: who was given back costs time, and no
               GPU-hours
`checkpoint`   between a checkpointed iteration and the next one, beyond what usually lies between two
`other`        the rest: the usual pauses between iterations, winding down after the last one, clocks, and what nobody
               noted
=============  ========================================================================================================

*Wall time* begins with the first committed iteration (with the first plan where none is committed) and ends with the
job, of a completed one with its last commit. *Goodput* = committed iterations, less `idle` and `capacity`, / wall time:
what they would have taken in the layout that was asked for, with all its devices. It counts slow iterations, and those
that were committed again, as work done; *ETTR* has the same numerator and is over the time held
(Kokolis et al., "Revisiting reliability in large-scale ML clusters"). Spare nodes are no part of the layout: that they
stand by is what they were asked for, and their hours are in every line. *GPU-hours* are times by the devices held just
then: the allocation's from the job's start, a lost node until it is given back. *Useful share* = useful GPU-hours /
GPU-hours held. *MTBF* is time held per root cause, the hardware's per one that says something of hardware, both also
as failures in 1,000 GPU-days held; *MTTR* the mean from the failure to the first commit after it, `detect` included.

`db.reading.costs.goodput` says how commits are put on one clock, `db.reading.costs.timeline` what happens within it.
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
    DONE,
    SHARES,
    UNTOLD,
    WORK,
    Again,
    HeldDevices,
    HeldTime,
    held_devices,
    laid_out,
    spread_evenly,
)
from db.reading.iterations.excess import FEW, TRUSTED
from db.reading.plans.idle_epochs import idle_epochs
from resihp.record.recovery import Moments, recovery

Row = dict[str, Any]

OF_FAILURES = frozenset({"detect", "reconfigure", "redo", "rollback", "slow", "idle", "capacity"})
"""What failures cost, devices that are not fit, and the changes of plan that they lead to."""
OF_HARDWARE = frozenset({"device", "node", "link", "process"})
"""Components that may have failed for their hardware, where a failure does not say whether it was that: those of
`db.reading.health`."""
GPU_DAYS = 1000.0
SILENCE = timedelta(days=1)
"""After its last entry a job that is said to run has died, and nobody has looked: a server's ledger is told by those
who ask in its home."""
RECENT = 20
"""Iterations that tell how long one usually takes."""
LONGEST_S = 1e9
"""No job holds devices for longer: what was imported may say anything."""
SHORTEST_S = 1e-6
"""What an iteration takes at least."""


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """Useful time of a job that is over which was done again by later attempts: that of the iterations `again`."""

    again: tuple[tuple[int, int], ...]
    seconds: float
    gpu_hours: float


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring. `lost_s`, `lost_gpu_hours`: by `CAUSES`; with `useful_s` they add up to `held_s`,
    with `useful_gpu_hours` to `gpu_hours`. What has a default is not in accounts of before, which told the wall time
    only."""

    wall_s: float
    useful_s: float
    committed_s: float
    """Of committed iterations, slow or not, on the devices asked for: goodput's numerator."""
    goodput: float | None
    ettr: float | None
    lost_s: dict[str, float]
    gpu_hours: float
    lost_gpu_hours: dict[str, float]
    devices: float
    """Held, on average."""
    failures: int
    mtbf_s: float | None
    mttr_s: float | None
    held_s: float = 0.0
    useful_gpu_hours: float = 0.0
    hardware_failures: int = 0
    repairs: int = 0
    """Failures that were mended: `mttr_s` is their mean."""
    in_proportion: int = 0
    """Jobs that were cut, and whose rows had been thinned: of their wall time, causes are taken in proportion."""
    rolled_back: RolledBack | None = None
    """Of one that is kept in a job's row, whose own figures are those without later attempts; None of none, and where
    it has yet to be reckoned."""

    @property
    def failure_gpu_hours(self) -> float:
        """What failures cost."""
        return sum(self.lost_gpu_hours[cause] for cause in OF_FAILURES)

    @property
    def useful_share(self) -> float | None:
        """Of the GPU-hours held."""
        return self.useful_gpu_hours / self.gpu_hours if self.gpu_hours > 0 else None

    @property
    def hardware_mtbf_s(self) -> float | None:
        return self.held_s / self.hardware_failures if self.hardware_failures and self.held_s > 0 else None

    @property
    def failure_rate(self) -> float | None:
        """In 1,000 GPU-days."""
        return _in_gpu_days(self.failures, self.gpu_hours)

    @property
    def hardware_failure_rate(self) -> float | None:
        """In 1,000 GPU-days."""
        return _in_gpu_days(self.hardware_failures, self.gpu_hours)


def _in_gpu_days(number: int, gpu_hours: float) -> float | None:
    return GPU_DAYS * number / (gpu_hours / 24.0) if gpu_hours > 0 else None


def of_hardware(failure: Row) -> bool:
    """Whether a failure says something of hardware; what was injected on purpose never does."""
    if failure["detect_seconds"] is not None:  # known of injected ones only
        return False
    if failure["hardware"] is not None:
        return bool(failure["hardware"])
    return failure["kind"] in ("fail-stop", "fail-slow") and failure["component"] in OF_HARDWARE


def kept(job: Row) -> Account | None:
    """The account in the row of a job that is over; None while it runs, and where it is none, or not of all causes."""
    found = kept_once(job)
    return found if found is not None and _is_whole(found) else None


def _is_whole(of: Account, but: Set[str] = frozenset()) -> bool:
    """Whether it is of a time that can be, and tells of all causes `but` these."""
    causes = set(CAUSES) - but
    return 0.0 <= of.held_s <= LONGEST_S and all(told.keys() >= causes for told in (of.lost_s, of.lost_gpu_hours))


def kept_with(job: Row, again: Again) -> Account | None:
    """The same, with what later attempts committed again; None where that has yet to be reckoned, or was of other
    iterations."""
    found = kept(job)
    if found is None:
        return None
    before, found = _rolled_back(found, again), msgspec.structs.replace(found, rolled_back=None)
    if before is None:
        return None if again else found
    lost_s = found.lost_s | {"rollback": found.lost_s["rollback"] + before.seconds}
    hours = found.lost_gpu_hours | {"rollback": found.lost_gpu_hours["rollback"] + before.gpu_hours}
    return msgspec.structs.replace(
        found,
        useful_s=found.useful_s - before.seconds,
        lost_s=lost_s,
        useful_gpu_hours=found.useful_gpu_hours - before.gpu_hours,
        lost_gpu_hours=hours,
    )


def _rolled_back(of: Account, again: Again) -> RolledBack | None:
    """What was kept of these iterations, if it is a part of what was useful."""
    found = of.rolled_back
    if found is None or not again or found.again != tuple(again):
        return None
    return found if _fits(of, found) else None


def _fits(of: Account, rolled: RolledBack) -> bool:
    return 0.0 <= rolled.seconds <= of.useful_s and 0.0 <= rolled.gpu_hours <= of.useful_gpu_hours


def is_malformed(job: Row) -> bool:
    """Whether what stands in the row of a job that is over is no account, or one of what cannot be: it is left out, and
    reckoned anew from the rows that there are. What versions of before kept is none of these."""
    if job["state"] == "running" or not job.get("account"):
        return False
    found = kept_once(job)
    if found is None or not 0.0 <= found.held_s <= LONGEST_S:
        return True
    rolled = found.rolled_back
    return rolled is not None and not _fits(found, rolled)


def to_keep(alone: Account, whole: Account, again: Again) -> Account:
    """What is kept of a job that is over: its account without later attempts, and what `whole`, with them, has more of
    what was rolled back."""
    if not again:
        return msgspec.structs.replace(alone, rolled_back=None)
    rolled = RolledBack(
        again=tuple(again),
        seconds=min(max(whole.lost_s["rollback"], 0.0), alone.useful_s),
        gpu_hours=min(max(whole.lost_gpu_hours["rollback"], 0.0), alone.useful_gpu_hours),
    )
    return msgspec.structs.replace(alone, rolled_back=rolled)


def kept_once(job: Row) -> Account | None:
    """The same, also as it was kept by versions that knew of fewer causes, of the wall time only."""
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
    """Rows of one job, iterations in order; `checkpoints`: iterations that were saved; `again`: what later attempts
    committed again. Of a job that is over and whose rows were thinned, what was kept of it counts."""
    clock = course(job, iterations, plans, min(now, job["last_entry_at"] + SILENCE))
    spans = interruptions(job, clock, failures, reconfigurations)
    mended = {row["epoch"]: row for row in reconfigurations}

    held_s = clock.before_s + clock.wall_s + clock.after_s

    def at(row: Row) -> float:
        return float(np.clip((row["noticed_at"] - job["started_at"]).total_seconds(), 0.0, held_s))

    held = held_devices(job, nodes, held_s)
    found = laid_out(
        clock,
        spans,
        _pauses(clock, spans, checkpoints),
        _work(job, clock, iterations, failures, plans, again),
        _work(job, clock, iterations, failures, plans, again, _held_meanwhile(clock, held)),
        held,
        failures=tuple((at(row), of_hardware(row)) for row in failures),
        repairs=tuple((at(row), took) for row in failures if (took := _recovered_s(row, mended)) is not None),
    )
    if (before := kept_once(job)) is None or not _is_thinned(clock):
        return found
    lost_s = {cause: before.lost_s.get(cause, 0.0) for cause in CAUSES}
    if not _is_whole(before, UNTOLD):
        return spread_evenly(found, before.wall_s, before.useful_s, lost_s)
    lost_s |= {"start": 0.0, "other": max(lost_s["other"] - clock.after_s, 0.0)}
    rolled = _rolled_back(before, again)
    evenly = spread_evenly(found, before.wall_s, before.useful_s, lost_s, None if rolled is None else rolled.seconds)
    _, hours = evenly.between(-np.inf, np.inf)
    told = np.array([before.useful_gpu_hours, *(before.lost_gpu_hours.get(cause, 0.0) for cause in CAUSES)])
    rollback = SHARES.index("rollback")
    both = hours[0] + hours[rollback]
    told[rollback] = told[0] * (hours[rollback] / both if both > 0.0 else 0.0)
    if rolled is not None:
        told[rollback] = rolled.gpu_hours
    told[0] -= told[rollback]
    scale = np.divide(told, hours, out=np.ones_like(hours), where=hours > 0.0)
    return replace(evenly, hours_scale=scale)


def _recovered_s(failure: Row, mended: Mapping[int, Row]) -> float | None:
    """Return the seconds from a failure to the first commit after it, as its row has them (`tables.with_times`)."""
    row = mended.get(failure["recovered_epoch"])
    if row is None:
        return None
    moments = Moments.of_times(failure["failed_at"], failure["noticed_at"])
    return recovery(moments, row["finished_at"].timestamp()).seconds_to_recover


def between(of: HeldTime, since_s: float = -np.inf, until_s: float = np.inf) -> Account:
    """The account of a part of a job, from `since_s` on and before `until_s`, since the job's start."""
    every_s, every_h = (each.tolist() for each in of.between(since_s, until_s))
    seconds, hours = dict(zip(SHARES, every_s, strict=True)), dict(zip(SHARES, every_h, strict=True))
    held_s, gpu_hours = sum(every_s), sum(every_h)
    wall_s = max(min(of.wall[1], until_s) - max(of.wall[0], since_s), 0.0)
    committed_s = min(sum(seconds[share] for share in DONE), wall_s)
    failures = [hardware for at, hardware in of.failures if since_s <= at < until_s]
    repairs = [took for at, took in of.repairs if since_s <= at < until_s]
    cut = since_s > 0.0 or until_s < of.held_s
    return Account(
        wall_s=wall_s,
        useful_s=seconds.pop("useful"),
        committed_s=committed_s,
        goodput=committed_s / wall_s if of.trained and wall_s > 0 else None,
        ettr=min(committed_s / held_s, 1.0) if of.trained and held_s > 0 else None,
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
        in_proportion=int(of.in_proportion and cut),
    )


def added(found: Iterable[Account]) -> Account:
    """Of many jobs, or parts of them, together."""
    each = list(found)

    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in each)

    wall_s, held_s, committed_s, gpu_hours = map(total, ("wall_s", "held_s", "committed_s", "gpu_hours"))
    failures, repairs = total("failures"), total("repairs")
    trained = any(one.goodput is not None for one in each)
    return Account(
        wall_s=wall_s,
        useful_s=total("useful_s"),
        committed_s=committed_s,
        goodput=committed_s / wall_s if trained and wall_s > 0 else None,
        ettr=committed_s / held_s if trained and held_s > 0 else None,
        lost_s={cause: sum(one.lost_s[cause] for one in each) for cause in CAUSES},
        gpu_hours=gpu_hours,
        lost_gpu_hours={cause: sum(one.lost_gpu_hours[cause] for one in each) for cause in CAUSES},
        devices=gpu_hours * 3600.0 / held_s if held_s > 0 else 0.0,
        failures=failures,
        mtbf_s=held_s / failures if failures and held_s > 0 else None,
        mttr_s=sum((one.mttr_s or 0.0) * one.repairs for one in each) / repairs if repairs else None,
        held_s=held_s,
        useful_gpu_hours=total("useful_gpu_hours"),
        hardware_failures=total("hardware_failures"),
        repairs=repairs,
        in_proportion=total("in_proportion"),
    )


def _is_thinned(clock: Course) -> bool:
    return bool(clock.iterations) and clock.iterations[-1] - clock.iterations[0] >= len(clock.iterations)


def _pauses(clock: Course, spans: Sequence[Interruption], checkpoints: Iterable[int]) -> dict[int, float]:
    """Pauses after checkpointed iterations beyond the usual ones, by the index of the commit after them."""
    taken = set(checkpoints)
    if not taken or len(clock.ends_s) < 2:
        return {}
    interrupted = {index for one in spans for index in range(one.before + 1, one.after + 1)}
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
    """For each iteration, the first one of the oldest slowness that it suffered from, None where all was well."""
    slow = [row for row in failures if row["kind"] == "fail-slow"]
    idle = idle_epochs(slow, plans)
    coming = sorted(slow, key=lambda row: row["iteration"], reverse=True)
    present: list[Row] = []
    """What may be slow, the oldest first."""
    next_end, epoch, onset = sys.maxsize, None, None
    found: list[int | None] = []
    for row in iterations:
        begins = bool(coming) and coming[-1]["iteration"] <= row["iteration"]
        if begins or row["iteration"] >= next_end or row["epoch"] != epoch:
            while coming and coming[-1]["iteration"] <= row["iteration"]:
                present.append(coming.pop())
            present = [one for one in present if (one["ended_iteration"] or sys.maxsize) > row["iteration"]]
            next_end = min((one["ended_iteration"] or sys.maxsize for one in present), default=sys.maxsize)
            epoch = row["epoch"]
            at_work = (one["iteration"] for one in present if epoch not in idle.get(one["failure"], ()))
            onset = next(at_work, None)
        found.append(onset)
    return found


def healthy_seconds(iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> dict[int, float]:
    """What each iteration that suffered from something slow would have taken where all is well, by its number.

    Left out where nobody can tell.
    """
    onsets = _onsets(iterations, failures, plans)
    active = {row["epoch"]: row["active"] for row in plans}
    epoch_at = {row["iteration"]: row["epoch"] for row in iterations}
    rates: dict[int | None, list[float]] = {}
    for row, onset in zip(iterations, onsets, strict=True):
        if onset is None and row["seconds"] and row["tokens"]:
            rates.setdefault(active.get(row["epoch"]), []).append(row["seconds"] / row["tokens"])
    usual = {devices: statistics.median(each) for devices, each in rates.items()}
    off = _off([row for row, onset in zip(iterations, onsets, strict=True) if onset is None])
    found: dict[int, float] = {}
    for row, onset in zip(iterations, onsets, strict=True):
        if onset is None:
            continue
        predicted = row["predicted_seconds"]
        rate = usual.get(active.get(row["epoch"]))
        same_plan = epoch_at.get(onset, row["epoch"]) == row["epoch"]
        if predicted is not None and (same_plan or rate is None):
            found[row["iteration"]] = predicted * off
        elif rate is not None and row["tokens"]:
            found[row["iteration"]] = rate * row["tokens"]
    return found


def _off(well: Sequence[Row]) -> float:
    """Times what was predicted for them these iterations took, in which nothing was slow: 1 where that is little, or
    they are few. As `why` has it (`db.reading.excess`)."""
    ratios = [row["seconds"] / row["predicted_seconds"] for row in well if row["seconds"] and row["predicted_seconds"]]
    ratio = statistics.median(ratios) if len(ratios) >= FEW else 1.0
    return 1.0 if 1.0 / TRUSTED <= ratio <= TRUSTED else ratio


def asked_devices(job: Row) -> int:
    """Devices of the layout that was asked for, by a job's row."""
    try:
        configuration = json.loads(job.get("configuration") or "{}")
    except ValueError:
        configuration = {}
    return devices_of(job["nodes"], job["gpus_per_node"], configuration)


def _work(
    job: Row,
    clock: Course,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    plans: Sequence[Row],
    again: Again = (),
    held: Floats | None = None,
) -> Floats:
    """Seconds of each committed iteration, by `WORK`: useful, lost to something slow, to devices that stand by and to
    missing ones, and those that would be useful if nobody had committed the iteration again.

    `held`: devices that were held meanwhile, for GPU-hours: of those asked for, those that were given back, or not come
    yet, are not there to be lost.
    """
    healthy = healthy_seconds(iterations, failures, plans)
    took = np.array(clock.took_s)
    excess = took - np.array([healthy.get(i, each) for i, each in zip(clock.iterations, clock.took_s, strict=True)])
    slower = np.clip(excess, 0.0, took)
    some = float(slower.sum())
    slow = slower * (max(float(excess.sum()), 0.0) / some if some > 0.0 else 0.0)  # some were faster than healthy
    unused = _unused(job, clock, plans, held)
    idle, capacity = took * unused  # first, so that goodput does not hang on what was found slow
    slow *= 1.0 - unused.sum(axis=0)
    useful = np.maximum(took - slow - idle - capacity, 0.0)
    last = np.array(clock.iterations, dtype=np.int64)
    former = np.concatenate((last[:1] - 1, last[:-1]))  # a row stands for all since the one before
    repeated = np.zeros(len(took))
    for low, high in again:
        repeated += np.maximum(np.minimum(last, high) - np.maximum(former, low - 1), 0)
    rollback = useful * repeated / np.maximum(last - former, 1)
    return np.stack((useful - rollback, slow, idle, capacity, rollback), axis=1)


def _unused(job: Row, clock: Course, plans: Sequence[Row], held: Floats | None) -> Floats:
    """Of each committed iteration, the shares of the devices asked for that stood by under its plan, and that were not
    there."""
    asked = float(asked_devices(job))
    full = np.full(len(clock.epochs), asked) if held is None else np.minimum(held, asked)
    known = {row["epoch"]: (row["active"], row["standby"]) for row in plans}
    active, standby = np.array([known.get(epoch, (asked, 0)) for epoch in clock.epochs]).reshape(-1, 2).T
    missing = np.maximum(full - active, 0.0)
    idle = np.minimum(missing, standby)
    return np.stack((idle, missing - idle)) / np.maximum(full, 1.0)


def _held_meanwhile(clock: Course, held: HeldDevices) -> Floats:
    """Devices that were held while each iteration took place, on average."""
    ends, took = clock.before_s + np.array(clock.ends_s), np.maximum(np.array(clock.took_s), SHORTEST_S)
    return np.asarray((held.until(ends) - held.until(ends - took)) / took, dtype=np.float64)


def summarise(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    now: datetime,
) -> Row:
    """Figures of a job from its rows. Times and shares as of `between`, but `useful_seconds` counts slow iterations,
    too (`slow_seconds` of them are beyond their healthy time), and `lost_seconds` is by the kind of the failure that
    interrupted training, `idle` and `capacity` as there. What was kept of a job that is over holds: its rows may have
    been thinned since."""
    clock = course(job, iterations, plans, now)
    if (of := kept(job)) is not None:
        unused, wall_s, useful_s, goodput, ettr = of.lost_s, of.wall_s, of.committed_s, of.goodput, of.ettr
    else:
        work = _work(job, clock, iterations, failures, plans).sum(axis=0).tolist()
        unused, wall_s = dict(zip(WORK, work, strict=True)), clock.wall_s
        useful_s = max(clock.committed_s - unused["idle"] - unused["capacity"], 0.0)
        goodput, ettr = clock.shares_of(useful_s)
    lost = {cause: unused[cause] for cause in ("idle", "capacity") if unused[cause] > 0.0}
    for one in interruptions(job, clock, failures, reconfigurations):
        lost[one.kind] = lost.get(one.kind, 0.0) + one.lost_s
    lost["other"] = max(wall_s - useful_s - sum(lost.values()), 0.0)
    last = iterations[-1] if iterations else None
    recent = [row["seconds"] for row in iterations[-RECENT:] if row["seconds"] is not None]
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
        "lost_seconds": lost,
    }
