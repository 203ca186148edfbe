"""16,384 healthy ranks past the detector, with noise that is independent, and with noise that nodes have in common.

Called by `worlds` (section `fleet`). TP8 PP16 DP128, 64 micro-batches a replica; ranks report sums
(`Monitor.observe_stacked`), a few of them chunks while healthy times are learnt. Each alarm is followed by a probe that
finds nothing, as it would be.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from resihp.detector.findings import Finding
from resihp.detector.observation import Floats, Observation, RankTimes
from resihp.detector.online.monitor import Monitor
from resihp.detector.online.plan_arrays import Stacked, Sums
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.compiled import PRIMITIVE_KINDS
from resihp.pipeline.schedules import orders_of
from resihp.settings import Detection

MODEL = ModelSpec(layers=64, hidden=8192, heads=64, kv_groups=8, ffn_hidden=28672, vocab=128_000, sequence=8192)
LAWS = {"F": (0.002, 1e-6, 1e-11), "B": (0.003, 2e-6, 2.5e-11), "W": (0.0, 0.0, 0.0)}
"""c, alpha, beta of a chunk."""
DEVICES = 8
"""Of a node."""
WARM_UP = 40
CHUNK_NOISE, SUM_NOISE, ITERATION_NOISE = 0.015, 0.002, 0.03
CORRELATION, DEVIATION, SWING, PERIODS = 0.98, 0.01, 0.015, (120, 480)
"""Of a node's AR(1) level; and of the thermal swing of each device, its amplitude and its period in iterations."""
Levels = Callable[[int], Floats]
"""(ranks,): how long each rank takes over healthy, in an iteration; asked for one after the other."""


def independent(ranks: int) -> Levels:
    ones = np.ones(ranks)
    return lambda _: ones


def correlated(ranks: int) -> Levels:
    """Nodes wander, devices swing."""
    rng = np.random.default_rng(1)
    node = DEVIATION * rng.standard_normal(ranks // DEVICES)
    period, phase = rng.uniform(*PERIODS, ranks), rng.uniform(0.0, 2.0 * np.pi, ranks)

    def levels(i: int) -> Floats:
        nonlocal node
        node = CORRELATION * node + DEVIATION * np.sqrt(1 - CORRELATION**2) * rng.standard_normal(node.size)
        swing = 1.0 + SWING * np.sin(2.0 * np.pi * i / period + phase)
        return np.asarray(np.exp(np.repeat(node, DEVICES)) * swing)

    return levels


def fleet(console: Console, iterations: int, dp: int = 128) -> list[dict[str, Any]]:
    """Alarms, and milliseconds that judging takes, in `iterations` healthy ones after the warm-up; a table of both."""
    layout = Layout.uniform(tp=8, pp=16, dp=dp, layers=MODEL.layers)
    plan = Plan(epoch=1, layout=layout, assignment=spread(64 * dp, dp))
    count = len(layout.active)
    shown = Table(title=f"{count:,} healthy ranks, {iterations} iterations")
    for name in ("noise", "alarms", "per 10,000", "ranks named", "ms, median"):
        shown.add_column(name, justify="left" if name == "noise" else "right")
    rows = []
    for name, levels in (("independent", independent(count)), ("nodes AR(.98) 1 %, swing 1.5 %", correlated(count))):
        found, times = watch(plan, levels, iterations)
        rate = 1e4 * len(found) / iterations
        named = len({rank for finding in found for rank in finding.ranks})
        shown.add_row(name, str(len(found)), f"{rate:.0f}", str(named), f"{statistics.median(times):.1f}")
        rows.append({"noise": name, "alarms": len(found), "per 10,000": rate, "median_ms": statistics.median(times)})
    console.print(shown)
    return rows


def watch(plan: Plan, levels: Levels, iterations: int) -> tuple[list[Finding], list[float]]:
    """What the detector finds, and the milliseconds of each iteration."""
    monitor = Monitor(patience=Detection().patience)
    nodes = {rank: rank // DEVICES for rank in plan.layout.active}
    monitor.adopt(plan, MODEL, orders_of(plan), nodes)
    stacked, links = monitor.stacked, monitor.links
    assert stacked is not None
    assert links is not None
    rng = np.random.default_rng(0)
    compiled = stacked.compiled
    law = np.array([LAWS[kind] for kind in PRIMITIVE_KINDS])[compiled.kind]
    of_slot = np.empty(compiled.size, dtype=np.intp)  # the first row of a slot's group
    for i, place in enumerate(stacked.places):
        of_slot[compiled.slots(*place)] = stacked.first_row[i]
    found: list[Finding] = []
    times = []
    for i in range(WARM_UP + iterations):
        tokens = rng.integers(6000, 8193, compiled.micro_batches).astype(np.float64)
        squares = tokens * rng.uniform(500, 4000, compiled.micro_batches)
        at = compiled.micro_batch
        seconds = law[:, 0] + law[:, 1] * tokens[at] + law[:, 2] * squares[at]
        seconds *= float(np.exp(ITERATION_NOISE * rng.standard_normal()))
        level = levels(i)
        if i < WARM_UP:
            monitor.learn(
                Observation(
                    iteration=i,
                    epoch=1,
                    seconds=1.0,
                    times=_reports(rng, plan, stacked, level, seconds, tokens, squares),
                )
            )
        slowest = level[of_slot[:, None] + np.arange(plan.layout.replicas[0].stages[0].tp)].max(axis=1)
        busy_s = float(compiled.iteration_seconds(seconds * slowest, 0.001))
        sums = Sums(
            tokens=tokens,
            squares=squares,
            compute=stacked.totals(seconds) * level * np.exp(SUM_NOISE * rng.standard_normal(level.size)),
            delays=0.001 * np.exp(0.01 * rng.standard_normal(links.size)),
            delay_tokens=np.full(links.size, 8000.0),
            delay_counts=np.full(links.size, 4.0),
            busy_s=busy_s,
        )
        began = time.perf_counter()
        assessment = monitor.observe_stacked(i, 1, busy_s + 0.1, sums)
        if i < WARM_UP:
            continue
        times.append((time.perf_counter() - began) * 1e3)
        for finding in assessment.findings:
            if finding.kind == "fail-slow":
                found.append(finding)
                for rank in finding.ranks:
                    monitor.cleared(rank)
    return found, times


def _reports(
    rng: np.random.Generator,
    plan: Plan,
    stacked: Stacked,
    level: Floats,
    seconds: Floats,
    tokens: Floats,
    squares: Floats,
) -> dict[int, RankTimes]:
    """Chunks of the first four replicas."""
    compiled, reports = stacked.compiled, {}
    for d in range(min(4, len(plan.layout.replicas))):
        for s, stage in enumerate(plan.layout.replicas[d].stages):
            slots = compiled.slots(d, s)
            own = compiled.micro_batch[slots]
            for rank in stage.ranks:
                noise = np.exp(CHUNK_NOISE * rng.standard_normal(slots.size))
                compute = seconds[slots] * level[stacked.row[rank]] * noise
                ends = np.cumsum(compute)
                rows = np.stack([ends - compute, compute, compute, tokens[own], squares[own]])
                reports[rank] = RankTimes(rank=rank, seconds=1.0, chunks=rows, reduced=1.0)
    return reports
