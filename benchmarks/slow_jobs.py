"""What the monitor finds in simulated jobs with one persistent fail-slow, and in healthy ones; and what others find.

Called by `detector.py` (section `slow`). Three detectors see the same jobs, as `[detect] mode` has them
(`resihp.detector.modes`): **sequential**, ours; **paper**, the ResiHP paper's with our prediction; **greyhound**. All
get what workers report and no more. The last two never say who is slow. Nobody answers what they find, as probes would.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulated_jobs import BUDGETS, SLOWDOWNS, Job, Setting, simulate
from resihp.detector import modes
from resihp.detector.findings import Finding
from resihp.settings import Detection, Mode

ITERATIONS = 600
LIMITS = {0.05: 40, 0.10: 10, 0.20: 3, 0.35: 3, 0.55: 3, 0.70: 3}
"""Iterations within which a slow-down of a size is to be found, its first one counted."""
NAMES: tuple[Mode, ...] = ("sequential", "paper", "greyhound")
OURS = NAMES[0]


@dataclass(frozen=True)
class Alarm:
    """Raised in iteration `at`."""

    at: int
    finding: Finding


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
        alarms = {OURS: watch(job, OURS)}
        observing += time.process_time() - started
        alarms |= {mode: watch(job, mode) for mode in NAMES if mode != OURS}
        onset = ITERATIONS if job.failure is None else job.failure.onset
        healthy[job.setting] += onset
        for name in NAMES:
            tally = tallies[name, kind or "healthy", slowdown if kind else 0.0]
            before = [alarm for alarm in alarms[name] if alarm.at < onset]
            after = [alarm for alarm in alarms[name] if alarm.at >= onset]
            false[name, job.setting] += len(before)
            tally.jobs += 1
            tally.correct += not before and bool(after) == (kind is not None)
            if name == OURS and before:
                odd += [f"job {i}, {kind} from {onset}: {alarm.finding}" for alarm in before]
            if after:
                tally.found += 1
                tally.delays.append(after[0].at - onset + 1)
                tally.once += len(after) == 1
                tally.named += _names(job, after[0])
                if name == OURS and not _names(job, after[0]):
                    odd.append(f"job {i}, {job.failure}: {after[0].finding}")
            elif name == OURS and kind:
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


def watch(job: Job, mode: Mode) -> list[Alarm]:
    """Alarms of one detector."""
    detector = modes.detector(Detection(mode=mode, patience=500))
    detector.adopt(job.plan, job.model, job.orders)
    return [
        Alarm(observation.iteration, one)
        for observation in job.observations()
        for one in detector.observe(observation).findings
        if one.kind == "fail-slow"
    ]


def _names(job: Job, alarm: Alarm) -> bool:
    """Whether the right device, or link, is named first."""
    finding, failure = alarm.finding, job.failure
    if failure is None:
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
    for name in (OURS, "delay", "named", "one finding", "paper", "delay", "greyhound", "delay"):
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
                if name == OURS:
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
            + (f"; right device or link named in {named:.4f}" if name == OURS else "")
        )
