"""Defines the result of reading a file of iteration times, and functions that all readers use. Pure."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.recordings.values import ANSI_ESCAPE, number_in
from resihp.detector.offline.series import TimedRun

SPEAKER_MARK = re.compile(r"\[\s*(?:default|rank)\s*(\d+)|^\s*(\d+)\s*:\s|^\s*([A-Za-z][\w.-]*)\s*:\s", re.IGNORECASE)
"""Matches the mark of a rank or host before a line: torchrun's `[default7]:` or `[rank7]:`, `[Rank 7 | ...]`, srun's
`7: `, `host: `."""


class Recording(msgspec.Struct, frozen=True):
    """The runs in a file, and remarks about how they were read."""

    kind: Literal["megatron-log", "resihp-log", "series"]
    runs: tuple[TimedRun, ...]
    remarks: tuple[str, ...] = ()


def split_runs(points: Sequence[Point]) -> tuple[list[tuple[Point, ...]], int]:
    """Return the runs of a file, and the number of points that repeat an iteration.

    A falling iteration begins a new run; a single late line does not.
    """
    runs: list[list[Point]] = []
    repeated = 0
    for number, point in enumerate(points):
        last = runs[-1][-1].iteration if runs else -1
        if not runs or point.iteration < last:
            following = points[number + 1].iteration if number + 1 < len(points) else -1
            if runs and following > last and last - point.iteration <= 2 and following - point.iteration > 1:
                repeated += 1
                continue
            runs.append([point])
        elif point.iteration == last:
            repeated += 1
        else:
            runs[-1].append(point)
    return [tuple(run) for run in runs], repeated


def log_interval(points: Sequence[Point]) -> int:
    """Return the log interval: the usual number of iterations between two lines; 1 if there is no usual one."""
    if len(points) < 3:
        return 1
    steps = Counter(after.iteration - before.iteration for before, after in itertools.pairwise(points))
    step, times = steps.most_common(1)[0]
    return step if 2 * times > len(points) - 1 else 1


def interval_remarks(runs: Sequence[TimedRun]) -> list[str]:
    """Return a remark if times are means over several iterations; else nothing."""
    intervals = sorted({run.interval for run in runs if run.interval > 1})
    if not intervals:
        return []
    intervals_text = " or ".join(map(str, intervals))
    return [f"each time is a mean over {intervals_text} iterations (log interval); onsets are known no better"]


def speaker_of(head: str) -> str:
    """Return the rank or host that the marks before a line name; empty without marks."""
    return " ".join("".join(mark) for mark in SPEAKER_MARK.findall(head))


_Line = TypeVar("_Line")


def one_speaker(lines: Sequence[_Line], speaker: Callable[[_Line], str]) -> list[_Line]:
    """Return the lines of one speaker (rank or host) at a time.

    If the lines of two speakers interleave, only those of the speaker with more lines are kept.
    """
    spans: dict[str, list[int]] = {}
    for position, line in enumerate(lines):
        spans.setdefault(speaker(line), []).append(position)
    chosen: set[str] = set()
    taken: list[tuple[int, int]] = []
    for name in sorted(spans, key=lambda name: -len(spans[name])):
        span = spans[name][0], spans[name][-1]
        place = bisect_left(taken, span)
        is_before_next = place == len(taken) or span[1] < taken[place][0]
        is_after_last = place == 0 or taken[place - 1][1] < span[0]
        if is_before_next and is_after_last:
            taken.insert(place, span)
            chosen.add(name)
    return [line for line in lines if speaker(line) in chosen]


def missing_iterations(runs: Sequence[TimedRun]) -> list[str]:
    missing = 0
    for run in runs:
        for before, after in itertools.pairwise(run.points):
            missing += max(0, (after.iteration - before.iteration) // run.interval - 1)
    if not missing:
        return []
    return [f"{missing} iterations are missing" if missing > 1 else "1 iteration is missing"]


def text_of(content: bytes) -> str:
    """Decode bytes as UTF-8, or as UTF-16 with a byte order mark; invalid bytes become replacement characters."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    return content.decode("utf-8-sig", errors="replace").replace("\0", "")


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text), with line numbers from 1. Carriage returns separate texts of the same line."""
    for number, whole in enumerate(ANSI_ESCAPE.sub("", text).split("\n"), 1):
        for line in whole.split("\r"):
            if line:
                yield number, line


def optional_in(text: str | None) -> float | None:
    number = math.nan if text is None else number_in(text)
    return number if math.isfinite(number) and number >= 0 else None


def counted(lines: Sequence[int], description: str, unit: str = "line") -> list[str]:
    """Return a remark about the lines of these numbers, as `3 torn log lines left out, the first is line 17`; empty for
    none. `unit`: the word for a number."""
    if not lines:
        return []
    count = len(lines)
    head, _, tail = description.partition(" ")
    if tail.startswith(("of", "without", "cut")):
        head += "s" * (count > 1)
    elif count > 1:
        tail += "s"
    where = f"the first is {unit} {lines[0]}" if count > 1 else f"{unit} {lines[0]}"
    return [f"{count} {head} {tail} left out, {where}"]


def short(line: str) -> str:
    printable = "".join(c if c.isprintable() else "?" for c in line.strip())
    return printable if len(printable) <= 80 else printable[:77] + "..."
