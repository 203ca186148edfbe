"""How well the detector predicts, and what it finds: the tables of simulated jobs (`simulated_jobs`).

    python benchmarks/detector.py [prediction ...] [--jobs N] [--json FILE]

**prediction.** Long-tailed real document lengths in micro-batches of 8K, 16K and 32K tokens; 4 and 8 of them a replica;
1F1B and zero-bubble; TP2 PP2 DP2 and TP2 PP4 DP2 in turn. The predictor learns from a job's first iterations and is
tested on the rest, chunk by chunk on every rank (Eq. 1) and iteration by iteration (Eq. 2). It gets what workers report
and no more: transfers, synchronisation and step are medians of the warm-up. The oracle knows the true coefficients and
the true transfers, synchronisation and step; both face the same noise.

Expected iterations are longer than the critical path of expected chunks, for chunks end with the slowest of a
tensor-parallel group and the longest of several paths counts. Ours learns this as one factor in the warm-up, the oracle
does not know of it; `without` is ours without that factor. MAPE is relative to what was measured.

**slow.** What is found in jobs with one persistent fail-slow, and in healthy ones: `slow_jobs`.

**cost.** Milliseconds that judging an iteration takes: `monitor_cost`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks.monitor_cost import cost
from benchmarks.simulated_jobs import BUDGETS, Job, NoLengths, Setting, simulate
from benchmarks.slow_jobs import slow
from resihp.detector.observation import Floats
from resihp.detector.online.predictor import Predictor, keys
from resihp.pipeline.compiled import PRIMITIVE_KINDS

WARM_UP = 40
"""Iterations; the predictor's default."""
ITERATIONS = 400
LIMIT = 1.05
"""Most that ours may be worse than the oracle."""

# --- prediction -----------------------------------------------------------------------------------------------------


def prediction(console: Console, jobs: int) -> list[dict[str, Any]]:
    """Errors of Eq. 1 and Eq. 2, ours and the oracle's, over `jobs` jobs a setting."""
    table = Table(title=f"Prediction of healthy times: MAPE in %, {jobs} jobs of {ITERATIONS} iterations a setting")
    for name in ("micro-batches", "schedule", "known after"):
        table.add_column(name)
    for name in ("chunk: ours", "oracle", "ratio", "iteration: ours", "oracle", "ratio", "without", "ratio"):
        table.add_column(name, justify="right")
    rows: list[dict[str, Any]] = []
    seeds = itertools.count()
    for budget in BUDGETS:
        for micro_batches in (4, 8):
            for schedule in ("1f1b", "zero-bubble"):
                errors = []
                known = []
                for i in range(jobs):
                    setting = Setting(
                        budget=budget, micro_batches=micro_batches, schedule=schedule, pp=4 if i % 2 else 2
                    )
                    job = simulate(setting, next(seeds), ITERATIONS)
                    predictor = Predictor(warm_up=WARM_UP)
                    known.append(learn(predictor, job, WARM_UP))
                    errors.append(prediction_errors(predictor, job))
                ours, oracle, iteration, iteration_oracle, without = np.mean(errors, axis=0) * 100.0
                rows.append(
                    {
                        "tokens": budget,
                        "micro_batches": micro_batches,
                        "schedule": schedule,
                        "known_after": float(np.median(known)),
                        "chunk": [ours, oracle],
                        "iteration": [iteration, iteration_oracle],
                        "iteration_without_factor": without,
                    }
                )
                table.add_row(
                    f"{micro_batches} x {budget // 1024}K",
                    schedule,
                    f"{np.median(known):.0f} (at most {max(known)})",
                    *(f"{value:.2f}" for value in (ours, oracle)),
                    f"{ours / oracle:.3f}",
                    *(f"{value:.2f}" for value in (iteration, iteration_oracle)),
                    f"{iteration / iteration_oracle:.3f}",
                    f"{without:.2f}",
                    f"{without / iteration_oracle:.3f}",
                )
    console.print(table)
    worst = max(max(row["chunk"][0] / row["chunk"][1], row["iteration"][0] / row["iteration"][1]) for row in rows)
    console.print(f"worst ratio to the oracle {worst:.3f}, limit {LIMIT}; published errors 1.2-1.6 % and 2.8-5.1 %")
    return rows


def learn(predictor: Predictor, job: Job, iterations: int) -> int:
    """Have `predictor` observe the first iterations of a job; returns after how many of them it knew all keys."""
    key_of = keys(job.plan.layout)
    groups = _groups(job)
    known = 0
    for i in range(iterations):
        for (stop, kind), slots in groups.items():
            m = job.compiled.micro_batch[slots]
            for t in range(job.setting.tp):
                predictor.observe(
                    key_of[stop],
                    kind,
                    job.tokens[i, m],
                    job.squares[i, m],
                    job.compute[i, slots, t],
                    rank=job.rank(stop.replica, stop.stage, t),
                    iteration=i,
                )
        if not known and all(predictor.ready(key_of[stop], kind) for stop, kind in groups):
            known = i + 1
    return known or iterations


def predicted_chunks(predictor: Predictor, job: Job) -> Floats:
    """(iterations, slots), seconds."""
    key_of = keys(job.plan.layout)
    chunks = np.empty((job.iterations, job.compiled.size))
    for (stop, kind), slots in _groups(job).items():
        m = job.compiled.micro_batch[slots]
        seconds = predictor.predict(key_of[stop], kind, job.tokens[:, m], job.squares[:, m])
        assert seconds is not None, f"{key_of[stop]} {kind} is not known"
        chunks[:, slots] = seconds
    return chunks


def prediction_errors(predictor: Predictor, job: Job) -> tuple[float, float, float, float, float]:
    """MAPE after the warm-up: chunks ours, oracle; iterations ours, oracle, ours without the warm-up's factor."""
    chunks, warm, rest = predicted_chunks(predictor, job), slice(0, WARM_UP), slice(WARM_UP, None)
    ends = job.starts + job.spans
    source, target = job.compiled.edges
    last = np.stack([ends[:, job.compiled.slots(*lane)[-1], 0] for lane in job.compiled.lanes], axis=-1)
    before = np.concatenate([ends[:, :, 0], np.zeros((job.iterations, 1))], axis=1)[:, job.compiled.previous]
    waited = job.starts[warm][:, target] > before[warm][:, target, None]
    arrived = (job.starts[:, target] - ends[:, source])[warm][waited]
    transfer_s = float(np.median(arrived)) if arrived.size else 0.0
    synchronisation_s = float(np.median(job.reduced[warm].max(axis=1) - last[warm].max(axis=1)))
    step_s = float(np.median(job.seconds[warm] - job.reduced[warm].max(axis=1)))
    iterations = job.compiled.iteration_seconds(
        chunks, transfer_s, synchronisation_s=synchronisation_s, optimizer_s=step_s
    )
    factor = float(np.exp(np.mean(np.log(job.seconds[warm] / iterations[warm]))))
    true = job.true_chunks
    return (
        mape(chunks[rest, :, None], job.compute[rest]),
        mape(true[rest, :, None], job.compute[rest]),
        mape(iterations[rest] * factor, job.seconds[rest]),
        mape(job.priced(true)[rest], job.seconds[rest]),
        mape(iterations[rest], job.seconds[rest]),
    )


def mape(predicted: Floats, measured: Floats) -> float:
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def _groups(job: Job) -> dict[tuple[Any, str], Any]:
    """Slots by stop and kind."""
    compiled = job.compiled
    return {
        (stop, PRIMITIVE_KINDS[kind]): np.flatnonzero((compiled.stop == i) & (compiled.kind == kind))
        for i, stop in enumerate(compiled.stops)
        for kind in np.unique(compiled.kind[compiled.stop == i])
    }


# --------------------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[Callable[[Console, int], list[dict[str, Any]]], int]] = {
    "prediction": (prediction, 100),
    "slow": (slow, 1000),
    "cost": (cost, 100),
}
"""By name: what prints it, and its jobs (a setting), or iterations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"all, unless named: {', '.join(SECTIONS)}")
    parser.add_argument("--jobs", type=int, help="instead of as many as each section has")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; choose {', '.join(SECTIONS)}")
    console = Console(width=160)
    figures = {}
    for name in arguments.sections or SECTIONS:
        section, jobs = SECTIONS[name]
        try:
            figures[name] = section(console, arguments.jobs or jobs)
        except NoLengths as error:
            sys.exit(str(error))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
