"""What the monitor finds in simulated jobs with one persistent fail-slow, and in healthy ones; and what others find.

Called by `detector.py` (section `slow`). Three detectors see the same jobs:

**ours**: `resihp.detector.online.monitor`, which gets what workers report and no more.

**raw**: change points of raw iteration times, verified by a shift of their mean of at least 10 % (as Greyhound does).

**25 %**: the same change points, at which the iteration has taken more than 1.25 times what is predicted for its
workload (the paper's rule, with our prediction).

Change points are those of Adams & MacKay (2007), exactly: Student's t predictive, run lengths up to LONGEST, a change
expected once in 250 iterations; there is one when the most probable run is shorter than before.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from scipy.special import gammaln
from simulated_jobs import BUDGETS, SLOWDOWNS, Job, Setting, simulate

from resihp.detector.online.monitor import Finding, Monitor

Floats = npt.NDArray[np.float64]

ITERATIONS = 600
LIMITS = {0.05: 40, 0.10: 10, 0.20: 3, 0.35: 3, 0.55: 3, 0.70: 3}
"""Iterations within which a slow-down of a size is to be found, its first one counted."""
HAZARD = 1 / 250
LONGEST = 200
LATEST = 10
"""Iterations after a change point in which it may be verified."""
NAMES = ("ours", "raw", "25 %")


@dataclass(frozen=True)
class Alarm:
    """Raised in iteration `at`."""

    at: int
    finding: Finding | None = None


@dataclass
class Tally:
    """What one detector did in jobs of one kind."""

    jobs: int = 0
    found: int = 0
    delays: list[int] = field(default_factory=list)
    named: int = 0
    once: int = 0
    correct: int = 0
    """Jobs judged rightly: no false alarm, and the failure found."""


def slow(console: Console, jobs: int) -> list[dict[str, Any]]:
    """Run `jobs` jobs past all detectors; half of them fail."""
    settings = [
        Setting(budget=budget, micro_batches=micro_batches, schedule=schedule)
        for budget in BUDGETS
        for micro_batches in (4, 8)
        for schedule in ("1f1b", "zero-bubble")
    ]
    tallies: dict[tuple[str, str, float], Tally] = defaultdict(Tally)
    healthy: dict[Setting, int] = defaultdict(int)
    false: dict[tuple[str, Setting], int] = defaultdict(int)
    odd: list[str] = []
    began, observing = time.process_time(), 0.0
    for i in range(jobs):
        turn = i // len(settings)
        kind = (None, "device", None, "link")[turn % 4]
        slowdown = SLOWDOWNS[turn // 4 % 6]
        job = simulate(settings[i % len(settings)], 10_000 + i, ITERATIONS, kind, slowdown=slowdown)
        started = time.process_time()
        ours, predicted = watch(job)
        observing += time.process_time() - started
        alarms = {"ours": ours, **others(job, predicted)}
        onset = ITERATIONS if job.failure is None else job.failure.onset
        healthy[job.setting] += onset
        for name in NAMES:
            tally = tallies[name, kind or "healthy", slowdown if kind else 0.0]
            before = [alarm for alarm in alarms[name] if alarm.at < onset]
            after = [alarm for alarm in alarms[name] if alarm.at >= onset]
            false[name, job.setting] += len(before)
            tally.jobs += 1
            tally.correct += not before and bool(after) == (kind is not None)
            if name == "ours" and before:
                odd += [f"job {i}, {kind} from {onset}: {alarm.finding}" for alarm in before]
            if after:
                tally.found += 1
                tally.delays.append(after[0].at - onset + 1)
                tally.once += len(after) == 1
                tally.named += _names(job, after[0])
                if name == "ours" and not _names(job, after[0]):
                    odd.append(f"job {i}, {job.failure}: {after[0].finding}")
            elif name == "ours" and kind:
                odd.append(f"job {i}, {job.failure}: not found")
    total = time.process_time() - began
    rows = _by_size(console, tallies)
    _by_setting(console, settings, healthy, false)
    _accuracy(console, tallies)
    for line in odd[:20]:
        console.print(f"[dim]{line}[/dim]")
    count = jobs * ITERATIONS
    console.print(
        f"{jobs} jobs, {count:,} iterations, {sum(healthy.values()):,} of them healthy; {total:.0f} s of one core, "
        f"{observing:.0f} s of it ours: {observing / count * 1e3:.2f} ms an iteration on 8 ranks"
    )
    return rows


def watch(job: Job) -> tuple[list[Alarm], Floats]:
    """Alarms of the monitor, and what it predicted (iterations,); NaN while it did not know."""
    monitor = Monitor()
    monitor.adopt(job.plan, job.model, job.orders)
    alarms: list[Alarm] = []
    predicted = np.full(job.iterations, np.nan)
    for observation in job.observations():
        assessment = monitor.observe(observation)
        if assessment.predicted_s is not None:
            predicted[observation.iteration] = assessment.predicted_s
        alarms += [Alarm(observation.iteration, one) for one in assessment.findings if one.kind == "fail-slow"]
    return alarms, predicted


def others(job: Job, predicted: Floats) -> dict[str, list[Alarm]]:
    """Alarms of the two rules that begin with a change point of raw iteration times."""
    seconds = job.seconds
    raw: list[Alarm] = []
    ruled: list[Alarm] = []
    run = runs(seconds)
    first, start = 0, 0
    done = {"raw": -1, "25 %": -1}
    for t in range(1, len(seconds)):
        now = t + 1 - int(run[t])
        if run[t] <= run[t - 1] and now > start:
            first, start = start, now
        if not start or t - start >= LATEST:
            continue
        before = seconds[first:start]
        if done["raw"] != start and t - start >= 2 and seconds[start : t + 1].mean() > 1.1 * before.mean():
            raw.append(Alarm(t))
            done["raw"] = start
        if done["25 %"] != start and seconds[t] > 1.25 * predicted[t]:
            ruled.append(Alarm(t))
            done["25 %"] = start
    return {"raw": raw, "25 %": ruled}


def runs(values: Floats) -> npt.NDArray[np.int64]:
    """(n,): the most probable number of values since the last change, after each."""
    scaled = (values - values[:10].mean()) / values[:10].std()
    mean, kappa, alpha, beta = np.zeros(1), np.full(1, 0.1), np.full(1, 1.0), np.full(1, 1.0)
    prior = tuple(array.copy() for array in (mean, kappa, alpha, beta))
    log_run = np.zeros(1)
    best = np.zeros(len(values), dtype=np.int64)
    for t, x in enumerate(scaled.tolist()):
        spread = beta * (kappa + 1) / (alpha * kappa)
        log_density = (
            gammaln(alpha + 0.5)
            - gammaln(alpha)
            - 0.5 * np.log(2 * alpha * math.pi * spread)
            - (alpha + 0.5) * np.log1p((x - mean) ** 2 / (2 * alpha * spread))
        )
        joint = log_run + log_density
        most = joint.max()
        total = most + math.log(float(np.exp(joint - most).sum()))
        log_run = np.concatenate([[total + math.log(HAZARD)], joint + math.log(1 - HAZARD)]) - total
        beta = np.concatenate([prior[3], beta + kappa * (x - mean) ** 2 / (2 * (kappa + 1))])
        mean = np.concatenate([prior[0], (kappa * mean + x) / (kappa + 1)])
        kappa = np.concatenate([prior[1], kappa + 1])
        alpha = np.concatenate([prior[2], alpha + 0.5])
        if len(log_run) > LONGEST:
            log_run, mean, kappa, alpha, beta = (a[:LONGEST] for a in (log_run, mean, kappa, alpha, beta))
        best[t] = int(log_run.argmax())
    return best


def _names(job: Job, alarm: Alarm) -> bool:
    """Whether the right device, or link, is named first."""
    finding, failure = alarm.finding, job.failure
    if finding is None or failure is None:
        return False
    if failure.kind == "link":
        return finding.link == failure.link
    return finding.link is None and finding.ranks[:1] == (failure.rank,)


def _by_size(console: Console, tallies: dict[tuple[str, str, float], Tally]) -> list[dict[str, Any]]:
    table = Table(
        title="One persistent fail-slow: found within the limit, and after how many iterations (median, most)"
    )
    for name in ("what", "speed lower by", "jobs", "within"):
        table.add_column(name, justify="right")
    for name in ("ours", "delay", "named", "one finding", "raw 10 %", "delay", "25 % rule", "delay"):
        table.add_column(name, justify="right")
    rows = []
    for kind in ("device", "link"):
        for slowdown, limit in LIMITS.items():
            shown: list[str] = []
            row: dict[str, Any] = {"what": kind, "slowdown": slowdown, "limit": limit}
            for name in NAMES:
                tally = tallies[name, kind, slowdown]
                if not tally.jobs:
                    continue
                within = sum(delay <= limit for delay in tally.delays) / tally.jobs
                middle = f"{np.median(tally.delays):.0f}, {max(tally.delays)}" if tally.delays else "-"
                shown += [f"{within:.3f}", middle]
                if name == "ours":
                    row["jobs"] = tally.jobs
                    shown += [f"{part / max(tally.found, 1):.3f}" for part in (tally.named, tally.once)]
                row[name] = {"within": within, "found": tally.found / tally.jobs, "delays": sorted(tally.delays)}
            if "jobs" in row:
                table.add_row(kind, f"{slowdown:.0%}", str(row["jobs"]), str(limit), *shown)
                rows.append(row)
    console.print(table)
    return rows


def _by_setting(
    console: Console, settings: list[Setting], healthy: dict[Setting, int], false: dict[tuple[str, Setting], int]
) -> None:
    table = Table(title="False alarms per 10,000 healthy iterations")
    for name in ("micro-batches", "schedule", "healthy iterations", *NAMES):
        table.add_column(name, justify="right")
    for setting in settings:
        if healthy[setting]:
            rates = [f"{false[name, setting] / healthy[setting] * 1e4:.2f}" for name in NAMES]
            label = f"{setting.micro_batches} x {setting.budget // 1024}K"
            table.add_row(label, setting.schedule, f"{healthy[setting]:,}", *rates)
    total = sum(healthy.values())
    rates = [f"{sum(false[name, setting] for setting in settings) / total * 1e4:.2f}" for name in NAMES]
    table.add_row("all", "", f"{total:,}", *rates)
    console.print(table)


def _accuracy(console: Console, tallies: dict[tuple[str, str, float], Tally]) -> None:
    """Jobs judged rightly, of those that are healthy or slow by 10 % and more."""
    for name in NAMES:
        judged = [tally for (who, _, slowdown), tally in tallies.items() if who == name and slowdown != 0.05]
        right, jobs = sum(tally.correct for tally in judged), sum(tally.jobs for tally in judged)
        found = [tally for (who, _, slowdown), tally in tallies.items() if who == name and slowdown >= 0.1]
        named = sum(tally.named for tally in found) / max(sum(tally.found for tally in found), 1)
        console.print(
            f"{name}: accuracy {right / jobs:.4f} over {jobs} jobs, healthy or slower by 10 % and more"
            + (f"; right device or link named in {named:.4f}" if name == "ours" else "")
        )
