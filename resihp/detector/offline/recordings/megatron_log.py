"""Reads Megatron-LM logs, in the forms of its versions and forks, behind any prefix of a launcher. Pure.

    [default7]: [2024-05-01 12:00:00] iteration       10/  500000 | consumed samples: ... |
        elapsed time per iteration (ms): 1234.5 | ... | global batch size:   128 | ... (one line)

Times are milliseconds or seconds, and means over the iterations since the previous line (`--log-interval`). Lines that
are torn, of several ranks, repeated, or without a usable time are left out and counted in `Recording.remarks`.
"""

from __future__ import annotations

import math
import re

import msgspec

from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.recordings.recording import (
    Recording,
    counted,
    interval_remarks,
    log_interval,
    missing_iterations,
    numbered_lines,
    one_speaker,
    speaker_of,
    split_runs,
    text_of,
)
from resihp.detector.offline.recordings.values import number_in
from resihp.detector.offline.series import TimedRun

ITERATION_HEAD = re.compile(r"\biteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|", re.IGNORECASE)
NUMBER_PATTERN = r"[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)"
ELAPSED_TIME = re.compile(
    rf"\belapsed\s+time\s+per\s+iteration\s*\(\s*(ms|s)\s*\)\s*:\s*({NUMBER_PATTERN})(?=\s|\||$)", re.IGNORECASE
)
BATCH_SIZE = re.compile(r"\b(?:global|gloabl) batch size:\s*(\d+)\s*(?:\||$)", re.IGNORECASE)
SEQUENCE_LENGTH = re.compile(r"\b(?:actual|curriculum) seqlen:\s*(\d+)\s*(?:\||$)", re.IGNORECASE)


class _Line(msgspec.Struct, frozen=True):
    number: int
    speaker: str
    point: Point
    closed: bool
    """Whether a bar follows the time, which shows that the number is complete."""


def _lines_of(content: bytes) -> tuple[list[_Line], list[int], list[int]]:
    """Return the lines with a time, and the numbers of torn lines and of lines without a usable time."""
    lines: list[_Line] = []
    torn: list[int] = []
    bad: list[int] = []
    for number, line in numbered_lines(text_of(content)):
        heads = list(ITERATION_HEAD.finditer(line))
        if not heads:
            continue
        # Lines of two ranks may be joined into one: each part reaches to the next head.
        for head, end in zip(heads, [h.start() for h in heads[1:]] + [len(line)], strict=True):
            part = line[head.end() : end]
            elapsed = ELAPSED_TIME.search(part)
            if elapsed is None:
                torn.append(number)
                continue
            seconds = number_in(elapsed[2]) / (1000 if elapsed[1].lower() == "ms" else 1)
            iteration = int(head[1])
            if not (math.isfinite(seconds) and seconds > 0):
                bad.append(number)
                continue
            batch, length = BATCH_SIZE.search(part), SEQUENCE_LENGTH.search(part)
            tokens = None if batch is None else float(batch[1]) * (1.0 if length is None else float(length[1]))
            speaker = speaker_of(line[: heads[0].start()])
            lines.append(_Line(number, speaker, Point(iteration, seconds, tokens=tokens), "|" in part[elapsed.end() :]))
    return lines, torn, bad


def read_log(content: bytes) -> Recording:
    """Read the runs of a Megatron-LM log; a falling iteration number begins a new run.

    Usually one rank writes. If several write at the same time, the one with most lines is read, since all measure the
    same iteration. If the global batch size varies, it is the workload (`Point.tokens`, up to a factor).
    """
    lines, torn, bad = _lines_of(content)
    if 2 * sum(line.closed for line in lines) > len(lines):
        torn = sorted([*torn, *(line.number for line in lines if not line.closed)])
        lines = [line for line in lines if line.closed]
    rank_lines = one_speaker(lines, lambda line: line.speaker)
    runs, repeated = split_runs([line.point for line in rank_lines])
    made = tuple(TimedRun(points=points, interval=log_interval(points)) for points in runs)
    speakers = {line.speaker for line in rank_lines}
    remarks = [
        *counted(torn, "torn log line"),
        *counted(bad, "iteration without a usable time"),
        *counted([line.number for line in lines if line.speaker not in speakers], "line of other ranks"),
    ]
    if repeated:
        remarks.append(f"{repeated} repeated iteration{'s' * (repeated > 1)} left out")
    remarks += interval_remarks(made)
    return Recording("megatron-log", made, tuple(remarks + missing_iterations(made)))
