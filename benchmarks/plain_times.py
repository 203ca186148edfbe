"""What `resihp analyze` finds in plain iteration times whose noise is nasty: slow-downs found, false alarms, by family.

    python benchmarks/plain_times.py [times | workers ...] [--runs N] [--json FILE]

**times.** Iteration times at 9 % noise (standard deviation of the logarithm) in the families of FAMILIES, with two
slow-downs of 30 % of 40 to 100 iterations a run; a column with tokens that says nothing stands in every other run. *in
5*: share of slow-downs found with the fifth slow iteration at the latest. *false*: fail-slow events per 1,000
iterations that are no slow-down, and repeated ones. *mild*: share of slow-downs of 12 % that last 300 iterations and
are found before they end. *healthy*: false events per 1,000 iterations of runs of 3,500 where nothing happens, with
their settling starts.

**workers.** Times of 8, 16 and 64 workers, of which two become slower for good, one lot shifts together by one factor
and all have noise of a kind. *first two*: the two that cost most are the two that are slow. *lot*: the lot is one event
with its workers. *blamed*: events of workers that nothing happened to, a run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from resihp.detector.offline.analysis import SpeedChange
from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.series import detect, detect_ranks

Floats = npt.NDArray[np.float64]
NOISE = 0.09
SLOWER, MILD = 1.30, 1.12
WITHIN = 5
LONG = 3_500


def levels(rng: np.random.Generator, count: int) -> Floats:
    """White noise at three levels: each iteration falls on one of three, whichever came before."""
    return np.asarray(NOISE * (rng.choice([-1.2, 0.0, 1.2], count) + 0.2 * rng.standard_normal(count)))


def autoregressive(rng: np.random.Generator, count: int) -> Floats:
    values = rng.standard_normal(count)
    for i in range(1, count):
        values[i] = 0.5 * values[i - 1] + math.sqrt(0.75) * values[i]
    return np.asarray(NOISE * values)


def heavy(rng: np.random.Generator, count: int) -> Floats:
    return np.asarray(NOISE * rng.standard_t(3, count) / math.sqrt(3))


def bimodal(rng: np.random.Generator, count: int) -> Floats:
    """Two modes, the slower one in three of ten iterations."""
    high = rng.random(count) < 0.3
    return np.asarray(NOISE * (2.1 * (high - 0.3) + 0.25 * rng.standard_normal(count)))


def checkpoints(rng: np.random.Generator, count: int) -> Floats:
    period, times = int(rng.integers(20, 51)), float(rng.uniform(1.5, 4.0))
    values = NOISE * rng.standard_normal(count)
    values[period - 1 :: period] += math.log(times)
    return np.asarray(values)


FAMILIES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "white, three levels": levels,
    "AR(1), 0.5": autoregressive,
    "heavy tails, t3": heavy,
    "bimodal": bimodal,
    "checkpoints": checkpoints,
}


def made(logs: Floats, rng: np.random.Generator, *, tokens: bool) -> list[Point]:
    """Points, numbered from 1. With `tokens`, a workload that varies and explains nothing of it."""
    seconds = 7.3 * np.exp(logs)
    work = rng.normal(1e6, 1e4, len(logs)) if tokens else None
    return [Point(i + 1, float(s), None if work is None else float(work[i])) for i, s in enumerate(seconds)]


def slow_run(
    family: str, rng: np.random.Generator, factor: float, length: tuple[int, int]
) -> tuple[Floats, list[tuple[int, int]]]:
    """Logs of a run, and its two slow-downs, first and end."""
    spans: list[tuple[int, int]] = []
    at = int(rng.integers(60, 160))
    for _ in range(2):
        end = at + int(rng.integers(*length))
        spans.append((at, end))
        at = end + int(rng.integers(100, 200))
    logs = FAMILIES[family](rng, at)
    for first, end in spans:
        logs[first:end] += math.log(factor)
    return logs, spans


def judged(found: Sequence[SpeedChange], spans: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """Slow-downs found in time, found at all, and events of fail-slow that are none or repeated."""
    left = [event for event in found if event.verdict == "fail-slow"]
    quick = at_all = 0
    for first, end in spans:
        mine = [
            event
            for event in left
            if event.iteration - 1 < end and (event.end is None or event.end - 1 > first + WITHIN)
        ]
        mine = [event for event in mine if event.iteration - 1 > first - (end - first) / 3]
        quick += any(event.detected_at - 1 < first + WITHIN for event in mine)
        at_all += bool(mine)
        if mine:
            left.remove(mine[0])
    return quick, at_all, len(left)


def times(console: Console, runs: int) -> list[dict[str, Any]]:
    table = Table(title=f"Plain times, {NOISE:.0%} noise, {runs} runs a family")
    for name in ("family", "in 5", "at all", "false", "mild", "mild: false", "healthy"):
        table.add_column(name, justify="left" if name == "family" else "right")
    rows: list[dict[str, Any]] = []
    for family in FAMILIES:
        counts = dict.fromkeys(("n", "quick", "all", "false", "its", "mild", "mild_false", "mild_its", "h", "h_its"), 0)
        for number in range(runs):
            rng = np.random.default_rng([number, zlib.crc32(family.encode())])
            logs, spans = slow_run(family, rng, SLOWER, (40, 100))
            quick, at_all, false = judged(detect(made(logs, rng, tokens=bool(number % 2)))[0], spans)
            for key, value in (("n", 2), ("quick", quick), ("all", at_all), ("false", false), ("its", len(logs))):
                counts[key] += value
            logs, spans = slow_run(family, rng, MILD, (300, 301))
            _, at_all, false = judged(detect(made(logs, rng, tokens=False))[0], spans)
            for key, value in (("mild", at_all), ("mild_false", false), ("mild_its", len(logs))):
                counts[key] += value
            if number % 4 == 0:
                logs = FAMILIES[family](rng, LONG)
                settling = int(rng.integers(3, 7))
                logs[:settling] += np.linspace(math.log(rng.uniform(1.3, 3)), math.log(1.3), settling)
                counts["h"] += judged(detect(made(logs, rng, tokens=bool(number % 8)))[0], ())[2]
                counts["h_its"] += LONG
        row = {
            "family": family,
            "in 5": counts["quick"] / counts["n"],
            "at all": counts["all"] / counts["n"],
            "false": 1000 * counts["false"] / counts["its"],
            "mild": counts["mild"] / counts["n"],
            "mild: false": 1000 * counts["mild_false"] / counts["mild_its"],
            "healthy": 1000 * counts["h"] / counts["h_its"],
        }
        rows.append(row)
        table.add_row(*(value if isinstance(value, str) else f"{value:.3f}" for value in row.values()))
    console.print(table)
    return rows


KINDS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda rng, count: np.asarray(NOISE * rng.standard_normal(count)),
    "heavy tails": heavy,
    "bimodal": bimodal,
}


def workers(console: Console, runs: int) -> list[dict[str, Any]]:
    table = Table(title=f"Times of workers, {NOISE:.0%} noise each, {runs} runs a row")
    for name in ("workers", "noise", "events", "first two", "lot", "blamed"):
        table.add_column(name, justify="left" if name == "noise" else "right")
    rows: list[dict[str, Any]] = []
    for size in (8, 16, 64):
        for kind, draw in KINDS.items():
            first_two = lots = blamed = events = 0
            for number in range(runs):
                rng = np.random.default_rng([number, size, zlib.crc32(kind.encode())])
                count = 500
                ranks = {rank: draw(rng, count) + rng.normal(0, 0.1) for rank in range(size)}
                chosen = rng.permutation(size)
                slow, lot = set(chosen[:2].tolist()), set(chosen[2 : 2 + min(4, size // 4)].tolist())
                for rank in slow:
                    first = int(rng.integers(100, 200))
                    ranks[rank][first:] += math.log(rng.uniform(1.4, 2.0))
                for rank in lot:
                    ranks[rank][300:380] += math.log(1.3)
                found, _ = detect_ranks(
                    {rank: [Point(i, float(s)) for i, s in enumerate(np.exp(logs))] for rank, logs in ranks.items()}
                )
                told = [event for event in found if event.verdict == "fail-slow"]
                events += len(told)
                named = [named_ranks(event) for event in by_cost(told)]
                first_two += len(named) > 1 and named[0] | named[1] == slow
                lots += any(ranks_of == lot for ranks_of in named)
                blamed += sum(not ranks_of <= slow | lot for ranks_of in named)
            row = {
                "workers": size,
                "noise": kind,
                "events": events / runs,
                "first two": first_two / runs,
                "lot": lots / runs,
                "blamed": blamed / runs,
            }
            rows.append(row)
            table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    return rows


def by_cost(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    return sorted(events, key=lambda event: -(getattr(event, "cost_seconds", 0.0) or 0.0))


def named_ranks(event: SpeedChange) -> set[int]:
    together = getattr(event, "ranks", ())
    return set(together) or ({event.where.rank} if event.where is not None and event.where.rank is not None else set())


TABLES = {"times": times, "workers": workers}


def main() -> None:
    parser = argparse.ArgumentParser(description="What analyze finds in plain times.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all by default")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=110)
    results = {name: TABLES[name](console, options.runs) for name in options.tables or TABLES}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
