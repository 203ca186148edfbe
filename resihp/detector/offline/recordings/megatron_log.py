"""A Megatron-LM log's lines, in the forms of its versions and forks, behind whatever a launcher puts before them. Pure.

    [default7]: [2024-05-01 12:00:00] iteration       10/  500000 | consumed samples: ... |
        elapsed time per iteration (ms): 1234.5 | ... | global batch size:   128 | ... (one line)

Milliseconds or seconds; the time is a mean over the iterations since the line before (`--log-interval`). Lines that
are torn, of several ranks, repeated, or without a usable time are left out and counted: `Recording.remarks` says so.
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
    number_in,
    numbered_lines,
    one_speaker,
    speaker_of,
    split_runs,
    text_of,
)
from resihp.detector.offline.series import TimedRun

HEAD = re.compile(r"\biteration\s+(\d{1,15})\s*/\s*(\d{1,15})\s*\|", re.IGNORECASE)
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)"
ELAPSED = re.compile(
    rf"\belapsed\s+time\s+per\s+iteration\s*\(\s*(ms|s)\s*\)\s*:\s*({NUMBER})(?=\s|\||$)", re.IGNORECASE
)
BATCH = re.compile(r"\b(?:global|gloabl) batch size:\s*(\d+)\s*(?:\||$)", re.IGNORECASE)
LENGTH = re.compile(r"\b(?:actual|curriculum) seqlen:\s*(\d+)\s*(?:\||$)", re.IGNORECASE)


class _Line(msgspec.Struct, frozen=True):
    number: int
    speaker: str
    point: Point
    closed: bool
    """A bar follows the time, so that the number is whole."""


def read_log(content: bytes) -> Recording:
    """Runs of a Megatron-LM log: where the iteration number falls, a new one begins.

    One rank speaks, as a rule. Where several speak at the same time, the one with most lines is heard: all measure the
    same iteration. Where the global batch size varies, it is the workload (`Point.tokens`, up to a factor).
    """
    found: list[_Line] = []
    torn: list[int] = []
    bad: list[int] = []
    for number, line in numbered_lines(text_of(content)):
        heads = list(HEAD.finditer(line))
        if not heads:
            continue
        # Lines of two ranks may stand in one: each part reaches to the next head.
        for head, end in zip(heads, [h.start() for h in heads[1:]] + [len(line)], strict=True):
            part = line[head.end() : end]
            elapsed = ELAPSED.search(part)
            if elapsed is None:
                torn.append(number)
                continue
            seconds = number_in(elapsed[2]) / (1000 if elapsed[1].lower() == "ms" else 1)
            iteration = int(head[1])
            if not (math.isfinite(seconds) and seconds > 0):
                bad.append(number)
                continue
            batch, length = BATCH.search(part), LENGTH.search(part)
            tokens = None if batch is None else float(batch[1]) * (1.0 if length is None else float(length[1]))
            speaker = speaker_of(line[: heads[0].start()])
            found.append(_Line(number, speaker, Point(iteration, seconds, tokens=tokens), "|" in part[elapsed.end() :]))
    if 2 * sum(line.closed for line in found) > len(found):
        torn = sorted([*torn, *(line.number for line in found if not line.closed)])
        found = [line for line in found if line.closed]
    heard = one_speaker(found, lambda line: line.speaker)
    runs, repeated = split_runs([line.point for line in heard])
    made = tuple(TimedRun(points=points, interval=log_interval(points)) for points in runs)
    speakers = {line.speaker for line in heard}
    remarks = [
        *counted(torn, "torn log line"),
        *counted(bad, "iteration without a usable time"),
        *counted([line.number for line in found if line.speaker not in speakers], "line of other ranks"),
    ]
    if repeated:
        remarks.append(f"{repeated} repeated iteration{'s' * (repeated > 1)} left out")
    remarks += interval_remarks(made)
    return Recording("megatron-log", made, tuple(remarks + missing_iterations(made)))
