"""Reads lines that trainers print for each iteration, or every few, behind any prefix of a launcher. Pure.

    [titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384  memory: ...  tps: 5,856  ...
    iteration: 991 / 1000 | consumed_tokens: 634K | elapsed_time_per_iteration_ms: 35.7 | ...
      12%|#2        | 60/500 [01:40<12:13,  1.67s/it]

`resihp.detector.console.line_formats` lists, for each trainer, how a line gives its iteration and its time. For lines
without a time, but with the moment of printing, an iteration took the difference of two lines. A progress bar gives
elapsed time in whole seconds. Rows become those of `fields`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from resihp.detector.console.line_formats import (
    LINE_FORMATS,
    BarLine,
    LineFormat,
    bar_of,
    fields_of,
    match_of,
)
from resihp.detector.offline.recordings.fields import NamedRow, read_rows
from resihp.detector.offline.recordings.recording import Recording, one_speaker, short, speaker_of
from resihp.detector.offline.recordings.values import moment_in
from resihp.detector.sequential.changes import WARM_UP

MIN_LINES = 2
"""Lines that a format needs: a single line may look like a trainer's and be something else."""


class _Bar:
    """A progress bar: its lines, and its elapsed time."""

    def __init__(self) -> None:
        self.rows: list[NamedRow] = []
        self.passed_s = 0.0
        """Seconds that elapsed while the bar was present, in total."""
        self._last_s = math.inf

    def take(self, number: int, line: BarLine) -> None:
        self.rows.append(NamedRow(number, {"iteration": line.done, "elapsed_time": line.passed}))
        now_s = moment_in(line.passed)
        self.passed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s


class _Read(NamedTuple):
    speaker: str
    row: NamedRow


def reader_of(numbered: Sequence[tuple[int, str]]) -> Callable[[], Recording] | None:
    """Return a reader of these lines: for the trainer that printed most of them, or for progress bars if none did. None
    if there is neither. The reader raises UsageError if nothing is usable."""
    format, count = _best([line for _, line in numbered])
    if format is not None and count >= MIN_LINES:
        return partial(_read_lines, numbered, format)
    bars = sum(bar_of(line) is not None for _, line in numbered)
    return partial(_read_bars, numbered) if bars >= MIN_LINES else None


def _read_lines(numbered: Sequence[tuple[int, str]], format: LineFormat) -> Recording:
    rows = []
    for number, line in numbered:
        if (fields := fields_of(format, line)) is not None:
            match = match_of(format, line)
            assert match is not None
            rows.append(_Read(speaker_of(line[: match.start()]), NamedRow(number, fields)))
    rank_lines = one_speaker(rows, lambda row: row.speaker)
    recording = _named(format.tool, read_rows([read.row for read in rank_lines], "line"))
    other_lines = len(rows) - len(rank_lines)
    if other_lines:
        remark = f"{other_lines} line{'s' * (other_lines > 1)} of other ranks left out"
        recording = msgspec.structs.replace(recording, remarks=(*recording.remarks, remark))
    return recording


def _named(tool: str, recording: Recording) -> Recording:
    return msgspec.structs.replace(recording, remarks=(f"read as {tool}", *recording.remarks))


def _best(lines: Sequence[str]) -> tuple[LineFormat | None, int]:
    """Return the format that most lines have, and their number; the first of equals."""
    counts = Counter(
        {place: sum(fields_of(format, line) is not None for line in lines) for place, format in enumerate(LINE_FORMATS)}
    )
    [(place, count)] = counts.most_common(1)
    return (LINE_FORMATS[place], count) if count else (None, 0)


def _read_bars(numbered: Sequence[tuple[int, str]]) -> Recording:
    """Read the progress bar of training, whose clock runs longest. A bar of epochs around it has too few lines."""
    bars: dict[tuple[str, str], _Bar] = {}
    for number, line in numbered:
        if (bar_line := bar_of(line)) is not None:
            bars.setdefault((bar_line.head, bar_line.total), _Bar()).take(number, bar_line)
    key = max(bars, key=lambda key: (len(bars[key].rows) >= WARM_UP, bars[key].passed_s))
    recording = _named("progress bars", read_rows(bars[key].rows, "line"))
    if len(bars) == 1:
        return recording
    head, total = key
    name = f" `{short(head)}`" if head else ""
    iterations = f" of {total} iterations" if total != "?" else ""
    remark = f"{len(bars)} progress bars in the file; used{name or ' that'}{iterations}, whose elapsed time is longest"
    return msgspec.structs.replace(recording, remarks=(recording.remarks[0], remark, *recording.remarks[1:]))
