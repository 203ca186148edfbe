"""Reads the output of `resihp run`, as copied from a terminal or from the output file of a Slurm job. Pure.

    11-25 17:09:01 iteration 12  loss 4.0312  18.2k tokens/s  0.45 s

At most one line a second is printed, with the time of that single iteration. All other lines are ignored.
"""

from __future__ import annotations

import math
import re

from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.recordings.recording import (
    Recording,
    counted,
    numbered_lines,
    split_runs,
    text_of,
)
from resihp.detector.offline.series import TimedRun

ITERATION_LINE = re.compile(
    r"(?:^|\d\d:\d\d:\d\d |[\w\]]: ?)iteration (\d{1,15})  loss (?:nan|-?inf|-?\d+\.\d{4})(?=  |\s*$)(.*)$"
)
"""An iteration, behind its time and any prefix from srun or a log collector."""
DURATION_WORDS = re.compile(
    r"  \S+ tokens/s  (?:(\d+(?:\.\d+)?) (s|ms|µs)|(\d+) (min|h|d) (\d\d) (?:s|min|h))(?=  |\s*$)"
)
"""A duration as `resihp.wrapper.output.render.duration` writes it."""
SMALL_S = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
LARGE_S = {"min": (60.0, 1.0), "h": (3600.0, 60.0), "d": (86400.0, 3600.0)}


def is_ours(line: str) -> bool:
    return "  loss " in line and ITERATION_LINE.search(line) is not None


def read_console(content: bytes) -> Recording:
    """Read the output of `resihp run`. A falling iteration begins a new run, as after a requeue into the same file."""
    points: list[Point] = []
    bad: list[int] = []
    for number, line in numbered_lines(text_of(content)):
        if (match := ITERATION_LINE.search(line)) is None:
            continue
        seconds = _seconds(match[2])
        if math.isfinite(seconds) and seconds > 0:
            points.append(Point(int(match[1]), seconds))
        else:
            bad.append(number)
    runs, repeated = split_runs(points)
    remarks = counted(bad, "iteration without a usable time")
    if repeated:
        remarks.append(f"{repeated} repeated iteration{'s' * (repeated > 1)} left out")
    missing = sum(run[-1].iteration - run[0].iteration + 1 - len(run) for run in runs)
    if missing:
        remarks.append(
            f"{missing} iteration{'s are' if missing > 1 else ' is'} missing: at most one line a second is printed; "
            "all are in the ledger: resihp history iterations JOB --json | resihp analyze -"
        )
    return Recording("resihp-log", tuple(TimedRun(points=run) for run in runs), tuple(remarks))


def _seconds(rest: str) -> float:
    """Parse `0.45 s`, `3.1 ms`, `4 min 05 s`, `2 h 03 min`; NaN without a time."""
    match = DURATION_WORDS.match(rest)
    if match is None:
        return math.nan
    if match[1]:
        return float(match[1]) * SMALL_S[match[2]]
    large_s, small_s = LARGE_S[match[4]]
    return int(match[3]) * large_s + int(match[5]) * small_s
