"""What judging an iteration costs the controller. Called by `detector.py` (section `cost`).

64 ranks (TP4 PP4 DP4, 8 micro-batches a replica) report every chunk: `Monitor.observe` after decoding. 16,384 ranks
(TP8 PP16 DP128, 64 micro-batches) report sums: `Monitor.observe_stacked`; a few of them have reported chunks in the
warm-up. Both compile the plan, test all ranks and links, and predict the iteration (Eq. 1 and Eq. 2).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulated_jobs import Setting, simulate
from resihp.detector.observation import Observation, RankTimes
from resihp.detector.online.monitor import Monitor
from resihp.detector.online.plan_arrays import Sums
from resihp.parallelism.layout import Layout
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.schedules import orders_of

MODEL = ModelSpec(layers=64, hidden=8192, heads=64, kv_groups=8, ffn_hidden=28672, vocab=128_000, sequence=8192)
SECONDS = {"F": (0.002, 1e-6, 1e-11), "B": (0.003, 2e-6, 2.5e-11)}
"""c, alpha, beta of a chunk of the large job."""
WARM_UP = 40
LIMITS_MS = {"64": 1.0, "16,384": 20.0}


def cost(console: Console, iterations: int) -> list[dict[str, Any]]:
    """Milliseconds for one iteration, median and 90th percentile of `iterations`."""
    table = Table(title=f"One prediction and test, milliseconds on one core, {iterations} iterations")
    for name in ("ranks", "links", "primitives", "adopt a plan", "median", "90 %", "limit"):
        table.add_column(name, justify="right")
    rows = []
    for name, measured in (("64", _chunks(iterations)), ("16,384", _sums(iterations))):
        times, adopting_ms, monitor = measured
        assert monitor.stacked is not None
        assert monitor.links is not None
        middle, high = statistics.median(times), float(np.quantile(times, 0.9))
        size = monitor.stacked.compiled.size
        table.add_row(
            name,
            f"{monitor.links.size:,}",
            f"{size:,}",
            f"{adopting_ms:,.0f}",
            f"{middle:.2f}",
            f"{high:.2f}",
            f"{LIMITS_MS[name]:.0f}",
        )
        rows.append({"ranks": name, "median_ms": middle, "p90_ms": high, "adopt_ms": adopting_ms})
    console.print(table)
    return rows


def _chunks(iterations: int) -> tuple[list[float], float, Monitor]:
    job = simulate(Setting(tp=4, pp=4, dp=4, micro_batches=8), 1, WARM_UP + 20 + iterations)
    monitor = Monitor()
    began = time.perf_counter()
    monitor.adopt(job.plan, job.model, job.orders)
    adopting_ms = (time.perf_counter() - began) * 1e3
    times = []
    for observation in job.observations():
        began = time.perf_counter()
        assessment = monitor.observe(observation)
        if observation.iteration >= WARM_UP + 20:
            times.append((time.perf_counter() - began) * 1e3)
            assert assessment.predicted_s is not None
    return times, adopting_ms, monitor


def _sums(iterations: int) -> tuple[list[float], float, Monitor]:
    layout = Layout.uniform(tp=8, pp=16, dp=128, layers=MODEL.layers)
    plan = Plan(epoch=1, layout=layout, assignment=spread(64 * 128, 128))
    orders = orders_of(plan)
    monitor = Monitor()
    began = time.perf_counter()
    monitor.adopt(plan, MODEL, orders)
    adopting_ms = (time.perf_counter() - began) * 1e3
    stacked, links = monitor.stacked, monitor.links
    assert stacked is not None
    assert links is not None
    rng = np.random.default_rng(0)
    compiled = stacked.compiled
    laws = np.array([SECONDS["F"], SECONDS["B"], (0.0, 0.0, 0.0)])
    times = []
    for i in range(WARM_UP + 20 + iterations):
        tokens = rng.integers(6000, 8193, compiled.micro_batches).astype(np.float64)
        squares = tokens * rng.uniform(500, 4000, compiled.micro_batches)
        law, m = laws[compiled.kind], compiled.micro_batch
        seconds = law[:, 0] + law[:, 1] * tokens[m] + law[:, 2] * squares[m]
        seconds *= float(np.exp(0.03 * rng.standard_normal()))
        if i < WARM_UP:
            reports = {}
            for d in range(4):
                for s, stage in enumerate(layout.replicas[d].stages):
                    slots = compiled.slots(d, s)
                    own = compiled.micro_batch[slots]
                    for rank in stage.ranks:
                        compute = seconds[slots] * np.exp(0.015 * rng.standard_normal(slots.size))
                        ends = np.cumsum(compute)
                        rows = np.stack([ends - compute, compute, compute, tokens[own], squares[own]])
                        reports[rank] = RankTimes(rank=rank, seconds=1.0, chunks=rows, reduced=1.0)
            monitor.learn(Observation(iteration=i, epoch=1, seconds=1.0, times=reports))
        sums = Sums(
            tokens=tokens,
            squares=squares,
            compute=stacked.totals(seconds) * np.exp(0.002 * rng.standard_normal(stacked.ranks.size)),
            delays=0.001 * np.exp(0.01 * rng.standard_normal(links.size)),
            delay_tokens=np.full(links.size, 8000.0),
            delay_counts=np.full(links.size, 4.0),
            busy_s=float(compiled.iteration_seconds(seconds, 0.001)),
        )
        began = time.perf_counter()
        assessment = monitor.observe_stacked(i, 1, sums.busy_s + 0.1, sums)
        if i >= WARM_UP + 20:
            times.append((time.perf_counter() - began) * 1e3)
            assert assessment.predicted_s is not None
    return times, adopting_ms, monitor
