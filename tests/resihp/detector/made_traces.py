"""Per-operation traces made from the project's own timeline, with everything that a profiler would record."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, Primitive, Stop
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import play

DATA = Path(__file__).parents[4] / "shared" / "data"
"""Recorded traces; tests that need them skip where the folder is absent."""

FORWARD_S, BACKWARD_S, TRANSFER_S, COLLECTIVE_S = 0.10, 0.20, 0.004, 0.05

Slow = Callable[[int, int, int, int], float]
"""Factor of computation by step (index), replica, stage and rank within the stage."""


def steady(step: int, dp: int, stage: int, shard: int) -> float:
    return 1.0


def slowed(
    dp: int, stage: int | None, factor: float, onset: int = 0, end: int = 10**9, shard: int | None = None
) -> Slow:
    """One rank (all of a replica without `stage`, all of a stage's without `shard`) slower from `onset` until `end`."""

    def at(step: int, d: int, s: int, r: int) -> float:
        hit = d == dp and stage in (None, s) and shard in (None, r) and onset <= step < end
        return factor if hit else 1.0

    return at


def made_plan(dps: int, stages: int, chunks: int, micro_batches: int) -> Plan:
    order = [(s, c) for c in range(chunks) for s in range(stages)]
    spans = {place: (v, v) for v, place in enumerate(order)}
    replicas = tuple(
        Replica(tuple(Stage((d * stages + s,), tuple(spans[s, c] for c in range(chunks))) for s in range(stages)))
        for d in range(dps)
    )
    share = [tuple(range(d * micro_batches, (d + 1) * micro_batches)) for d in range(dps)]
    return Plan(epoch=1, layout=Layout(replicas), assignment=tuple(share), schedule="1f1b")


def made_trace(
    *,
    dps: int = 4,
    stages: int = 2,
    chunks: int = 1,
    micro_batches: int = 4,
    steps: int = 30,
    tp: int = 1,
    slow: Slow = steady,
    spread: float = 0.0,
    noise: float = 0.01,
    head: float = 1.0,
    transfer_s: float = TRANSFER_S,
    collective_s: Callable[[int], float] = lambda step: COLLECTIVE_S,
    idle_rows: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """A trace of all steps.

    `spread`: standard deviation of the log of a micro-batch's work; `noise` of each duration; `head`: factor of the
    last virtual stage. `idle_rows` records transfers that never went out, as profilers do with virtual stages.
    """
    rng = np.random.default_rng(seed)
    plan = made_plan(dps, stages, chunks, micro_batches)
    orders = orders_of(plan)
    last = stages * chunks - 1
    rows: list[tuple[object, ...]] = []
    for step in range(steps):
        work = np.exp(spread * rng.standard_normal(dps * micro_batches))
        taken: dict[tuple[int, int, Primitive], list[float]] = {}
        for d, s in itertools.product(range(dps), range(stages)):
            for p in orders[d][s]:
                v = p.chunk * stages + s
                base = (FORWARD_S if p.kind == "F" else BACKWARD_S) * work[p.micro_batch] * (head if v == last else 1.0)
                taken[d, s, p] = [
                    base * slow(step, d, s, r) * float(np.exp(noise * rng.standard_normal())) for r in range(tp)
                ]

        def seconds(stop: Stop, p: Primitive, taken: dict[tuple[int, int, Primitive], list[float]] = taken) -> float:
            return max(taken[stop.replica, stop.stage, p])

        timeline = play(plan, orders, seconds, transfer_s)
        finish = [max(timeline.ends[d][s][-1] for d in range(dps)) for s in range(stages)]
        made = {
            (d, p.kind, p.micro_batch, p.chunk * stages + s): end
            for d, s in itertools.product(range(dps), range(stages))
            for p, end in zip(orders[d][s], timeline.ends[d][s], strict=True)
        }
        for d, s, r in itertools.product(range(dps), range(stages), range(tp)):
            rank = (d * stages + s) * tp + r
            place = (d, s, rank, 100 + 3 * step)
            ends: dict[str, float] = {"F": 0.0, "B": 0.0}
            counts: dict[str, int] = {}

            def add(
                optype: str,
                start: float,
                duration: float,
                mc: int = -1,
                mb: int = -1,
                gmc: int = -1,
                place: tuple[int, int, int, int] = place,
                counts: dict[str, int] = counts,
            ) -> None:
                counts[optype] = counts.get(optype, -1) + 1
                rows.append((*place, optype, start, duration, counts[optype], mc, mb, gmc))

            starts = zip(orders[d][s], timeline.starts[d][s], timeline.ends[d][s], strict=True)
            for p, start, end in starts:
                v = p.chunk * stages + s
                word = "forward" if p.kind == "F" else "backward"
                source, target = (v > 0, v < last) if p.kind == "F" else (v < last, v > 0)
                if stages > 1 and (source or idle_rows):
                    posted, arrived = ends[p.kind], ends[p.kind] + transfer_s
                    if source:
                        arrived = made[d, p.kind, p.micro_batch, v + (-1 if p.kind == "F" else 1)] + transfer_s
                        posted = min(posted, arrived - transfer_s)
                    add(f"{word}-recv", posted, arrived - posted)
                add(f"{word}-compute", start, taken[d, s, p][r], p.chunk, p.micro_batch - d * micro_batches, v)
                if stages > 1 and (target or idle_rows):
                    add(f"{word}-send", end, transfer_s)
                ends[p.kind] = end
            own = timeline.ends[d][s][-1]
            add("gc", own, 0.0, mb=0)
            add("grads-reduce-scatter", own, finish[s] - own + collective_s(step), mc=0)
            add("optimizer", finish[s] + collective_s(step), 0.01)
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc"]
    return pd.DataFrame(rows, columns=names)
