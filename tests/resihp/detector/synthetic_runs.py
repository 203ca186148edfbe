"""Synthetic iteration times, harsher than real ones, and how often slow-downs in them are found: the operating curve.

    python tests/resihp/detector/synthetic_runs.py 40

prints, for each kind and size of noise, false alarms per 1,000 iterations, and of slow-downs of each size the share of
onsets and of recoveries found within three iterations. A number behind it sets the bound on false alarms.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from resihp.detector.offline.analysis import SpeedChange
from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.series import FALSE_ALARMS_PER, SeriesDetector

Floats = npt.NDArray[np.float64]

KINDS = (
    ("gaussian", 0.0),
    ("gaussian", 0.3),
    ("gaussian", 0.6),
    ("laplace", 0.0),
    ("student", 0.2),
    ("log-normal", 0.0),
)
"""Noise and its lag-one correlation."""
NOISES = (0.015, 0.03, 0.05, 0.08, 0.11)
CHANGES = (0.2, 0.5, 1.0, 2.5)
WITHIN = 3


class SlowDown(msgspec.Struct, frozen=True):
    """Iterations from `first` up to, but without, `end`."""

    first: int
    end: int


class Tally(msgspec.Struct):
    """Counts over runs. A late alarm is neither a hit nor false."""

    iterations: int = 0
    slow_downs: int = 0
    onsets: int = 0
    recoveries: int = 0
    false_alarms: int = 0

    @property
    def per_thousand(self) -> float:
        return 1000 * self.false_alarms / max(self.iterations, 1)


def noise(rng: np.random.Generator, kind: str, count: int, deviation: float, correlation: float = 0.0) -> Floats:
    """Values of standard deviation `deviation`, AR(1) with innovations of the given kind."""
    if kind == "laplace":
        values = rng.laplace(size=count) / math.sqrt(2)
    elif kind == "student":
        values = rng.standard_t(4, count) / math.sqrt(2)
    elif kind == "log-normal":
        spread = 0.6**2
        values = np.exp(rng.standard_normal(count) * 0.6)
        values = (values - math.exp(spread / 2)) / math.sqrt(math.expm1(spread) * math.exp(spread))
    else:
        values = rng.standard_normal(count)
    for i in range(1, count):
        values[i] = correlation * values[i - 1] + math.sqrt(1 - correlation**2) * values[i]
    return deviation * values


def run(
    rng: np.random.Generator, kind: str, correlation: float, deviation: float, change: float, number: int
) -> tuple[Floats, list[SlowDown]]:
    """Seconds of 500 to 900 iterations with slow-downs of 40 to 100.

    By its number, a run also has a slow start, spikes (2 to 10 times as long, every 100 or every 37 iterations), a
    drift of 1.5 % in 300 iterations, or times rounded to hundredths.
    """
    count = int(rng.integers(500, 900))
    logs = noise(rng, kind, count, deviation, correlation)
    slow: list[SlowDown] = []
    at = int(rng.integers(40, 150))
    while at < count - 130:
        end = at + int(rng.integers(40, 100))
        slow.append(SlowDown(at, end))
        logs[at:end] += math.log1p(change)
        at = end + int(rng.integers(60, 200))
    late = int(rng.integers(0, 6))
    logs[:late] += np.log(rng.uniform(2, 6, late))
    period = (0, 100, 37, 0)[number % 4]
    if period:
        logs[period - 1 :: period] += np.log(rng.uniform(2, 10, len(logs[period - 1 :: period])))
    logs += (0, 0, 0.015, -0.015)[number // 4 % 4] * np.arange(count) / 300
    seconds = 1.234 * np.exp(logs)
    return (np.round(seconds, 2) if number % 3 == 2 else seconds), slow


def events(seconds: Floats, false_alarms_per: int = FALSE_ALARMS_PER) -> list[SpeedChange]:
    detector = SeriesDetector(false_alarms_per=false_alarms_per)
    for iteration, value in enumerate(seconds.tolist()):
        detector.update(Point(iteration, value))
    return detector.events


def judge(found: Sequence[SpeedChange], slow: Sequence[SlowDown], tally: Tally) -> None:
    """Add a run to the tally. Each slow-down and recovery accounts for one event at most; `workload` is no alarm."""
    left = [event for event in found if event.verdict != "workload"]

    def take(verdict: str, first: int, end: int) -> SpeedChange | None:
        taken = next((e for e in left if e.verdict == verdict and first <= e.detected_at < end), None)
        if taken is not None:
            left.remove(taken)
        return taken

    for part in slow:
        tally.slow_downs += 1
        onset = take("fail-slow", part.first, part.end)
        recovery = take("recovered", part.end, part.end + 40)
        tally.onsets += onset is not None and onset.detected_at <= part.first + WITHIN
        tally.recoveries += recovery is not None and recovery.detected_at <= part.end + WITHIN
    tally.false_alarms += len(left)


def tallies(
    kind: str, correlation: float, deviation: float, runs: int, false_alarms_per: int = FALSE_ALARMS_PER
) -> Iterator[tuple[float, Tally]]:
    """For each size of slow-down, what became of `runs` runs."""
    for change in CHANGES:
        rng = np.random.default_rng(zlib.crc32(f"{kind} {correlation} {deviation} {change}".encode()))
        tally = Tally()
        for number in range(runs):
            seconds, slow = run(rng, kind, correlation, deviation, change, number)
            judge(events(seconds, false_alarms_per), slow, tally)
            tally.iterations += len(seconds)
        yield change, tally


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    bound = int(sys.argv[2]) if len(sys.argv) > 2 else FALSE_ALARMS_PER
    print("onsets/recoveries found within 3 iterations, for slow-downs of 20, 50, 100, 250 %; false alarms per 1,000")
    for deviation in NOISES:
        whole = Tally()
        for kind, correlation in KINDS:
            shown, false_alarms, iterations = [], 0, 0
            for _, tally in tallies(kind, correlation, deviation, runs, bound):
                shown.append(f"{tally.onsets / tally.slow_downs:.2f}/{tally.recoveries / tally.slow_downs:.2f}")
                false_alarms += tally.false_alarms
                iterations += tally.iterations
            whole.false_alarms += false_alarms
            whole.iterations += iterations
            label = f"{deviation:6.1%} {kind} {correlation:.1f}"
            print(f"{label:24} {'  '.join(shown)}   {1000 * false_alarms / iterations:.2f}", flush=True)
        print(f"{deviation:6.1%} all                                                      {whole.per_thousand:.2f}")


if __name__ == "__main__":
    main()
