"""A recorded per-operation trace: what-if figures against the published ones, verdicts against raw alarms.

    python benchmarks/trace.py [TRACE.parquet [MW.json MS.json]] [--slowed N] [--json FILE]

Without arguments, ByteDance's trace of uneven sequence lengths from ../shared/data: 128 healthy GPUs, so that every
alarm is false. `raw` counts steps 10 % above the running median of 20 steps, and ranks whose computation in a step is
10 % above their peers' median. `--slowed N` multiplies the computation of one rank by 1.2 to 3.5 in N copies of the
trace, from some step until another, lets the peers wait, and counts what is found: the right rank and no other, onset
and recovery within 3 steps. CPU time of one core, reading of the file excluded.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from resihp.detector.offline.analysis import Analysis
from resihp.detector.offline.operations import analyse, raw_alarms
from resihp.detector.offline.traces import Trace, read
from resihp.detector.offline.what_if import Graph, what_if

DATA = Path(__file__).parents[2] / "shared" / "data"
FACTORS = (1.2, 1.3, 1.5, 2.0, 2.5, 3.5)
SHORTEST = 8
"""Steps that an injected slow-down lasts at least."""
CLOSE = 3
"""Steps that onset and recovery may be off."""


def slowed(frame: pd.DataFrame, trace: Trace, rank: int, factor: float, onset: int, end: int) -> pd.DataFrame:
    """`frame` with one rank's computation `factor` times as long from step index `onset` until `end`."""
    graph = Graph.from_trace(trace)
    slow = trace.is_compute & (trace.rank == rank) & (trace.step >= onset) & (trace.step < end)
    seconds = np.where(slow, factor * graph.seconds, graph.seconds)
    rows = frame.sort_values(["step", "dp_rank", "stage", "rank", "start_ts", "seq_id"], kind="stable")
    return rows.assign(start_ts=graph.ends(seconds) - seconds, duration=seconds)


def found(analysis: Analysis, steps: tuple[int, ...], rank: int, onset: int, end: int) -> dict[str, bool]:
    events = [event for event in analysis.events if event.verdict == "fail-slow"]
    right = [event for event in events if event.where is not None and event.where.rank == rank]
    ends = [len(steps) if event.end is None else steps.index(event.end) for event in right]
    return {
        "rank named": bool(right),
        "no other": len(events) == len(right) <= 1,
        "onset": bool(right) and abs(steps.index(right[0].iteration) - onset) <= CLOSE,
        "known within": bool(right) and steps.index(right[0].detected_at) - onset <= CLOSE,
        "recovery": bool(right) and abs(ends[-1] - end) <= CLOSE,
    }


def injections(frame: pd.DataFrame, count: int) -> dict[str, dict[str, float]]:
    """Share of injected slow-downs for which each holds, by factor."""
    trace = read(frame)
    rng = np.random.default_rng(1)
    shares: dict[str, list[dict[str, bool]]] = {}
    for i in range(count):
        factor = FACTORS[i % len(FACTORS)]
        rank = int(rng.choice(np.unique(trace.rank)))
        onset = int(rng.integers(1, len(trace.steps) - SHORTEST))
        end = int(rng.integers(onset + SHORTEST, len(trace.steps) + 1))
        analysis = analyse(slowed(frame, trace, rank, factor, onset, end))
        shares.setdefault(f"{factor:g}", []).append(found(analysis, trace.steps, rank, onset, end))
    return {
        factor: {name: float(np.mean([one[name] for one in outcomes])) for name in outcomes[0]}
        for factor, outcomes in shares.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, default=DATA / "bytedance_trace_SE.parquet")
    parser.add_argument("mw", nargs="?", type=Path)
    parser.add_argument("ms", nargs="?", type=Path)
    parser.add_argument("--slowed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    golden = (options.mw, options.ms)
    if options.trace == DATA / "bytedance_trace_SE.parquet":
        golden = (DATA / "bytedance_mw_SE.json", DATA / "bytedance_ms_SE.json")
    frame = pd.read_parquet(options.trace)

    begun = time.process_time()
    analysis = analyse(frame)
    seconds = time.process_time() - begun
    trace = read(frame)
    cost, raw = what_if(trace), raw_alarms(trace)
    published = {
        key: value for path in golden if path is not None for key, value in json.loads(path.read_text()).items()
    }
    figures = {} if cost is None else {"tori": cost.original_s, "tideal": cost.ideal_s, "Mw": cost.mw, "Ms": cost.ms}
    verdicts = [event for event in analysis.events if event.verdict == "fail-slow"]
    alarms = {
        "steps": len(trace.steps),
        "ranks": len(np.unique(trace.rank)),
        "fail-slow verdicts": len(verdicts),
        "workload": sum(event.verdict == "workload" for event in analysis.events),
        "raw, steps": len(raw.steps),
        "raw, ranks in steps": raw.rank_steps,
        "raw, ranks ever": raw.ranks,
    }
    shares = injections(frame, options.slowed) if options.slowed else {}

    console = Console(width=120)
    table = Table("", "published", "ours", "difference", title=f"{options.trace.name}: what if, seconds and shares")
    for name, value in figures.items():
        known = published.get(name)
        difference = "" if known is None or value is None else f"{value - known:+.1e}"
        table.add_row(name, "" if known is None else f"{known:.5f}", f"{value}"[:8], difference)
    console.print(table)
    table = Table("", "count", title=f"Alarms; {len(frame)} rows analysed in {seconds:.1f} s")
    for name, count in alarms.items():
        table.add_row(name, str(count))
    console.print(table)
    if shares:
        names = list(next(iter(shares.values())))
        table = Table("factor", *names, title=f"{options.slowed} injected slow-downs of one rank, shares")
        for factor, share in shares.items():
            table.add_row(factor, *(f"{share[name]:.2f}" for name in names))
        console.print(table)
    if options.json:
        told = {"figures": figures, "published": published, "alarms": alarms, "seconds": seconds, "slowed": shares}
        options.json.write_text(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
