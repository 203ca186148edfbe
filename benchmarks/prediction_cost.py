"""What it costs to price an iteration: compiled orders against the scalar timeline, on one core.

    python benchmarks/prediction_cost.py [--repeats 50] [--json FILE]

TP8 PP16 DP128 (16,384 GPUs, 64 micro-batches a replica), TP8 PP4 DP8 (256, 16) and TP4 PP4 DP4 (64, 8), each under
1F1B and ZB-H1. `compile` is once for a plan; `table` looks up each primitive's seconds by kind of chunk and
micro-batch; `play` gives all starts and ends; `iteration` adds the slowest replica, `of 16` is one of 16 candidates
priced together; `scalar` is `timeline.play` with the same durations from a dictionary. Medians, in milliseconds;
compile and scalar of three runs. Both must agree to the last bit, else nothing is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from rich.console import Console
from rich.table import Table

from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Plan, spread
from resihp.pipeline.compiled import PRIMITIVE_KINDS, compile_orders
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Timeline, play

TRANSFER_S = 0.001
CANDIDATES = 16
SHAPES = ((4, 4, 4, 8), (8, 4, 8, 16), (8, 16, 128, 64))
"""TP, PP, DP, micro-batches of a replica."""


@dataclass(frozen=True)
class Cost:
    gpus: int
    schedule: str
    primitives: int
    levels: int
    compile_ms: float
    table_ms: float
    play_ms: float
    iteration_ms: float
    of_16_ms: float
    scalar_ms: float


def cost(tp: int, pp: int, dp: int, micro_batches: int, schedule: str, repeats: int) -> Cost:
    layout = Layout.uniform(tp=tp, pp=pp, dp=dp, layers=2 * pp)
    plan = Plan(epoch=1, layout=layout, assignment=spread(micro_batches * dp, dp), schedule=schedule)
    orders = orders_of(plan)
    compiled = compile_orders(plan, orders)
    rng = np.random.default_rng(1)
    alike = [(stop.stage > 0) + (stop.stage == pp - 1) for stop in compiled.stops]  # with embedding, plain, with head
    table = rng.uniform(0.01, 0.03, (3, len(PRIMITIVE_KINDS), compiled.micro_batches))
    index = compiled.index(alike)
    seconds = table.reshape(-1).take(index)
    candidates = seconds * rng.uniform(0.9, 1.1, (CANDIDATES, compiled.size))

    row = {(stop.replica, stop.stage): kind for stop, kind in zip(compiled.stops, alike, strict=True)}
    held = {
        (r, k, m): float(table[r, c, m]) for r in range(3) for c, k in enumerate(PRIMITIVE_KINDS) for m in plan.paths()
    }

    def scalar() -> Timeline:
        return play(plan, orders, lambda o, p: held[row[o.replica, o.stage], p.kind, p.micro_batch], TRANSFER_S)

    _, ends = compiled.play(seconds, TRANSFER_S)
    if ends[compiled.in_order].tolist() != [end for replica in scalar().ends for stage in replica for end in stage]:
        raise SystemExit(f"{plan.layout.describe()} {schedule}: compiled and scalar timeline disagree")
    return Cost(
        gpus=tp * pp * dp,
        schedule=schedule,
        primitives=compiled.size,
        levels=len(compiled.levels),
        compile_ms=median_ms(lambda: compile_orders(plan, orders), 3),
        table_ms=median_ms(lambda: table.reshape(-1).take(index), repeats),
        play_ms=median_ms(lambda: compiled.play(seconds, TRANSFER_S), repeats),
        iteration_ms=median_ms(lambda: compiled.iteration_seconds(seconds, TRANSFER_S), repeats),
        of_16_ms=median_ms(lambda: compiled.iteration_seconds(candidates, TRANSFER_S), 5) / CANDIDATES,
        scalar_ms=median_ms(scalar, 3),
    )


def median_ms(run: Callable[[], object], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        spent.append(1e3 * (time.perf_counter() - began))
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    costs = [cost(*shape, schedule, arguments.repeats) for shape in SHAPES for schedule in ("1f1b", "zero-bubble")]
    table = Table(
        "GPUs", "schedule", "primitives", "levels", "compile", "table", "play", "iteration", "of 16", "scalar"
    )
    for row in costs:
        figures = (row.compile_ms, row.table_ms, row.play_ms, row.iteration_ms, row.of_16_ms, row.scalar_ms)
        shown = [f"{ms:,.3f}" if ms < 10 else f"{ms:,.0f}" for ms in figures]
        table.add_row(f"{row.gpus:,}", row.schedule, f"{row.primitives:,}", f"{row.levels}", *shown)
    console = Console(width=120)
    console.print(table)
    console.print("median milliseconds; table + iteration is what one prediction costs")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in costs], indent=1))


if __name__ == "__main__":
    main()
