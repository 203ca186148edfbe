"""Where the time of a job went, in seconds and GPU-hours, from the rows of its ledger. Pure; reads nothing.

*Wall time* runs from the start of the first committed iteration to the end (now, while the job runs; of a completed
one to its last commit: winding down is as little training as starting up). It is the sum of

=============  ========================================================================================================
`useful`       committed iterations, less what `slow` and `capacity` take of them
`detect`       from a fault to its being noticed. The moment of the fault is known of injected ones only; of others it
               is what went by since the last commit beyond a usual iteration's time, in which nothing can have been
               computed
`redo`         work on the interrupted iteration that was thrown away: from the last commit to the fault. Nothing where
               the iteration counted, or none was under way
`reconfigure`  from there to the first commit after it, less the iterations committed meanwhile: park, plan, groups,
               state. Of a failure that nobody mended, until the end
`slow`         while something was slow (a `fail-slow` failure, from its first slow iteration to its end): iterations'
               time beyond what they take where all is well. That is the detector's prediction, which knows the plan and
               the workload; under a plan made since, which already makes do with the slow device, it is the time per
               token of healthy iterations on as many devices, where there are any
`capacity`     iterations' time on fewer devices than the first plan's: the share that these are fewer, in which the
               missing ones would have done their part. What waiting for nodes costs
`checkpoint`   between a checkpointed iteration and the next one, beyond what usually lies between two
`other`        the rest: the usual pauses between iterations, clocks, and what nobody noted
=============  ========================================================================================================

*Goodput* = committed iterations / wall time, which therefore counts slow iterations as work done; ETTR has the same
numerator and counts from the job's start (Kokolis et al., "Revisiting reliability in large-scale ML clusters").
*GPU-hours* are the same times by the devices held meanwhile, on average: a lost node is paid until it is given back.
*MTBF* is wall time per root cause, *MTTR* the mean from noticing to the first commit after it.
`db.reading.goodput` says how commits are put on one clock.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from heapq import heappop, heappush
from typing import Any

import msgspec

from db.reading.goodput import RECENT, Course, Interruption, course, interruptions

Row = dict[str, Any]

CAUSES = ("detect", "reconfigure", "redo", "slow", "capacity", "checkpoint", "other")
OF_FAILURES = frozenset({"detect", "reconfigure", "redo", "slow", "capacity"})
"""What failures cost, and the changes of plan that they lead to."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's docstring. `lost_s`, `lost_gpu_hours`: by `CAUSES`; with `useful_s` they add up to `wall_s`."""

    wall_s: float
    useful_s: float
    committed_s: float
    """Of committed iterations, slow or not: goodput's numerator."""
    goodput: float | None
    ettr: float | None
    lost_s: dict[str, float]
    gpu_hours: float
    lost_gpu_hours: dict[str, float]
    devices: float
    """Held, on average over the wall time."""
    failures: int
    mtbf_s: float | None
    mttr_s: float | None

    @property
    def failure_gpu_hours(self) -> float:
        """What failures cost."""
        return sum(self.lost_gpu_hours[cause] for cause in OF_FAILURES)


def kept(job: Row) -> Account | None:
    """The account in the row of a job that is over; None while it runs, in ledgers of before, and where it is none."""
    if job["state"] == "running" or not job.get("account"):
        return None
    try:
        return msgspec.json.decode(job["account"], type=Account)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def account(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    events: Sequence[Row],
    nodes: Sequence[Row],
    now: datetime,
) -> Account:
    """Rows of one job, iterations in order; of `events` only those of kind `CheckpointCommitted` are looked at."""
    clock = course(job, iterations, plans, now)
    lost = dict.fromkeys(CAUSES, 0.0)
    spans = interruptions(job, clock, failures, reconfigurations)
    for one in spans:
        lost["detect"] += one.detect_s
        lost["redo"] += one.redo_s
        lost["reconfigure"] += one.reconfigure_s
    lost["checkpoint"] = _checkpointing(clock, spans, events)
    between = max(clock.wall_s - clock.committed_s, 0.0)
    explained = sum(lost.values())
    if explained > between:  # rounded times, or commits that came late: never more than there is
        lost = {cause: seconds * between / explained for cause, seconds in lost.items()}
        explained = between
    lost["other"] = between - explained
    scale = clock.committed_s / total if (total := sum(clock.took_s)) > 0 else 0.0
    lost["slow"], lost["capacity"] = (scale * seconds for seconds in _within(clock, iterations, failures, plans))
    devices = _devices(job, nodes, clock)
    mended = {row["epoch"]: row["seconds"] for row in reconfigurations}
    repairs = [mended[row["recovered_epoch"]] for row in failures if row["recovered_epoch"] in mended]
    return Account(
        wall_s=clock.wall_s,
        useful_s=max(clock.committed_s - lost["slow"] - lost["capacity"], 0.0),
        committed_s=clock.committed_s,
        goodput=clock.goodput,
        ettr=clock.ettr,
        lost_s=lost,
        gpu_hours=clock.wall_s * devices / 3600.0,
        lost_gpu_hours={cause: seconds * devices / 3600.0 for cause, seconds in lost.items()},
        devices=devices,
        failures=len(failures),
        mtbf_s=clock.wall_s / len(failures) if failures and clock.wall_s > 0 else None,
        mttr_s=statistics.fmean(repairs) if repairs else None,
    )


def _checkpointing(clock: Course, spans: Sequence[Interruption], events: Sequence[Row]) -> float:
    """Pauses after checkpointed iterations, beyond the usual ones."""
    taken = {row["iteration"] for row in events if row["kind"] == "CheckpointCommitted"}
    if not taken or len(clock.ends_s) < 2:
        return 0.0
    interrupted = {index for one in spans for index in range(one.before + 1, one.after + 1)}
    usual: list[float] = []
    after: list[float] = []
    for index in range(1, len(clock.ends_s)):
        if index in interrupted:
            continue
        pause = max(clock.ends_s[index] - clock.ends_s[index - 1] - clock.took_s[index], 0.0)
        (after if clock.iterations[index - 1] in taken else usual).append(pause)
    typical = statistics.median(usual) if usual else 0.0
    return sum(max(pause - typical, 0.0) for pause in after)


def _onsets(iterations: Sequence[Row], failures: Sequence[Row]) -> list[int | None]:
    """For each iteration, the first one of the oldest slowness that it suffered from, None where all was well."""
    coming = sorted(
        ((row["iteration"], row["ended_iteration"] or sys.maxsize) for row in failures if row["kind"] == "fail-slow"),
        reverse=True,
    )
    present: list[tuple[int, int]] = []
    found: list[int | None] = []
    for row in iterations:
        while coming and coming[-1][0] <= row["iteration"]:
            heappush(present, coming.pop())
        while present and present[0][1] <= row["iteration"]:
            heappop(present)
        found.append(present[0][0] if present else None)
    return found


def healthy_seconds(iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]) -> dict[int, float]:
    """What each iteration that suffered from something slow would have taken where all is well, by its number.

    Left out where nobody can tell.
    """
    onsets = _onsets(iterations, failures)
    active = {row["epoch"]: row["active"] for row in plans}
    epoch_at = {row["iteration"]: row["epoch"] for row in iterations}
    rates: dict[int | None, list[float]] = {}
    for row, onset in zip(iterations, onsets, strict=True):
        if onset is None and row["seconds"] and row["tokens"]:
            rates.setdefault(active.get(row["epoch"]), []).append(row["seconds"] / row["tokens"])
    usual = {devices: statistics.median(each) for devices, each in rates.items()}
    found: dict[int, float] = {}
    for row, onset in zip(iterations, onsets, strict=True):
        if onset is None:
            continue
        predicted = row["predicted_seconds"]
        rate = usual.get(active.get(row["epoch"]))
        same_plan = epoch_at.get(onset, row["epoch"]) == row["epoch"]
        if predicted is not None and (same_plan or rate is None):
            found[row["iteration"]] = predicted
        elif rate is not None and row["tokens"]:
            found[row["iteration"]] = rate * row["tokens"]
    return found


def first_devices(plans: Sequence[Row]) -> int | None:
    """Devices that worked under the first plan, None without one."""
    taken = [row for row in plans if row["in_effect_at"] is not None] or list(plans)
    return int(min(taken, key=lambda row: row["epoch"])["active"]) if taken else None


def _within(
    clock: Course, iterations: Sequence[Row], failures: Sequence[Row], plans: Sequence[Row]
) -> tuple[float, float]:
    """Seconds of committed iterations that were lost to something slow, and to missing devices."""
    healthy = healthy_seconds(iterations, failures, plans)
    full = first_devices(plans)
    missing: Mapping[int, float] = {row["epoch"]: max(1.0 - row["active"] / full, 0.0) for row in plans if full}
    slow = capacity = 0.0
    for i, epoch, took in zip(clock.iterations, clock.epochs, clock.took_s, strict=True):
        excess = took - healthy[i] if i in healthy else 0.0
        slow += excess
        capacity += missing.get(epoch, 0.0) * (took - min(max(excess, 0.0), took))
    return max(slow, 0.0), capacity


def _devices(job: Row, nodes: Sequence[Row], clock: Course) -> float:
    """Held on average over the wall time; a node until it was given back, lost or not."""
    if not nodes or clock.begin is None or clock.wall_s <= 0:
        return float(job["nodes"] * job["gpus_per_node"])
    held = 0.0
    for node in nodes:
        if node["joined_at"] is None:
            continue  # it never came, and nobody knows what it has
        since = max((node["joined_at"] - clock.begin).total_seconds(), 0.0)
        back = node["released_at"]
        until = clock.wall_s if back is None else min((back - clock.begin).total_seconds(), clock.wall_s)
        held += node["devices"] * max(until - since, 0.0)
    return held / clock.wall_s


def summarise(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    now: datetime,
) -> Row:
    """Figures of a job from its rows. Times and shares as of `account`, but `useful_seconds` counts slow iterations,
    too, and `lost_seconds` is by the kind of the failure that interrupted training. What was kept of a job that is
    over holds: its rows may have been thinned since."""
    clock = course(job, iterations, plans, now)
    of = kept(job) or clock
    lost: dict[str, float] = {}
    for one in interruptions(job, clock, failures, reconfigurations):
        lost[one.kind] = lost.get(one.kind, 0.0) + one.lost_s
    lost["other"] = max(of.wall_s - of.committed_s - sum(lost.values()), 0.0)
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
        "useful_seconds": of.committed_s,
        "wall_seconds": of.wall_s,
        "goodput": of.goodput,
        "ettr": of.ettr,
        "lost_seconds": lost,
    }
