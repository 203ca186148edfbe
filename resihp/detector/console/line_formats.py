"""Defines the lines that trainers print for each iteration, or every few, behind any prefix of a launcher. Pure.

    [titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384  memory: ...  tps: 5,856  ...
    iteration: 991 / 1000 | consumed_tokens: 634K | elapsed_time_per_iteration_ms: 35.7 | ...
      12%|#2        | 60/500 [01:40<12:13,  1.67s/it]

`LINE_FORMATS` lists, for each trainer, how a line gives its iteration and its time. Used by
`resihp.detector.offline.recordings.text_logs`, for whole files, and by `printed_progress`, while a job prints.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NUMBER_PATTERN = r"\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?"
TIMESTAMP_PATTERN = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
UNIT_MULTIPLES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "ms": 1e-3}


class LineFormat(NamedTuple):
    """The form of one trainer's lines."""

    tool: str
    needle: str
    """Text that every such line contains; searching for it is faster than the patterns."""
    iteration: re.Pattern[str]
    """Its group is the number; named groups `epoch` and `length` if the number begins again in each epoch, `epoch0` for
    epochs that count from 0."""
    time: re.Pattern[str] | None
    """Its group is a number, the next one a K, M or ms behind it if there is one; None: use the line's moment."""
    field: str = "timestamp"
    """The field of `fields` that the time becomes."""


def _format(tool: str, needle: str, iteration: str, time: str | None = None, field: str = "timestamp") -> LineFormat:
    return LineFormat(tool, needle, re.compile(iteration), None if time is None else re.compile(time), field)


LINE_FORMATS = (
    _format(
        *("NeMo", "train_step_timing in s", r"\bglobal_step\s*[:=]\s*(\d{1,15})(?:\.0*)?\b"),
        *(rf"\btrain_step_timing in s\s*[:=]\s*({NUMBER_PATTERN})", "seconds"),
    ),
    _format(
        *("nanotron", "elapsed_time_per_iteration_ms", r"\biteration:\s*(\d{1,15})\s*/"),
        *(rf"\belapsed_time_per_iteration_ms:\s*({NUMBER_PATTERN})([KMGB]?)", "milliseconds"),
    ),
    _format(
        *("MaxText", "completed step:", r"\bcompleted step:\s*(\d{1,15})"),
        *(rf"\bseconds:\s*({NUMBER_PATTERN})", "seconds"),
    ),
    _format(
        *("nanoGPT", " time", r"\biter (\d{1,15})(?: step \d{1,15})?: loss"),
        *(rf"\btime:?\s*({NUMBER_PATTERN})\s*ms", "milliseconds"),
    ),
    _format(
        "GPT-2 in PyTorch", "dt:", r"\bstep\s+(\d{1,15})\s*\|", rf"\bdt:\s*({NUMBER_PATTERN})\s*ms", "milliseconds"
    ),
    _format(
        *("nanochat", "dt:", r"\bstep\s+(\d{1,15})/\d{1,15} \([\d.]{1,9}%\)\s*\|"),
        *(rf"\bdt:\s*({NUMBER_PATTERN})\s*ms", "milliseconds"),
    ),
    _format(
        *("modded-nanogpt", "train_time:", r"\bstep:(\d{1,15})/\d{1,15}\s"),
        *(rf"\btrain_time:({NUMBER_PATTERN})(ms)", "elapsed_time"),
    ),
    _format("llm.c", " ms |", r"\bstep\s+(\d{1,15})/\d+\s*\|", rf"\|\s*({NUMBER_PATTERN}) ms\s*\|", "milliseconds"),
    _format("LitGPT", "iter time:", r"\biter (\d{1,15})\b", rf"\biter time:\s*({NUMBER_PATTERN})\s*ms", "milliseconds"),
    _format(
        *("MMEngine", "(train)", r"\bIter\(train\)\s*\[\s*(\d{1,15})/\d+\]"),
        *(rf"\btime:\s*({NUMBER_PATTERN})", "seconds"),
    ),
    _format(
        "MMEngine",
        "(train)",
        r"\bEpoch\(train\)\s*\[(?P<epoch>\d{1,9})\]\[\s*(\d{1,15})/(?P<length>\d{1,15})\]",
        rf"\btime:\s*({NUMBER_PATTERN})",
        "seconds",
    ),
    _format(
        *("mmcv", ", time: ", r"\bEpoch \[(?P<epoch>\d{1,9})\]\[(\d{1,15})/(?P<length>\d{1,15})\]\s"),
        *(rf", time: ({NUMBER_PATTERN})", "seconds"),
    ),
    _format("mmcv", ", time: ", r"\bIter \[(\d{1,15})/\d{1,15}\]\s", rf", time: ({NUMBER_PATTERN})", "seconds"),
    _format(
        *("detectron2", "last_time:", r"\biter: (\d{1,15})\s+total_loss:"),
        *(rf"\btime: ({NUMBER_PATTERN})\s+last_time:", "seconds"),
    ),
    _format(
        "timm",
        "Train: ",
        r"\bTrain: (?P<epoch0>\d{1,9}) \[\s*(\d{1,15})/(?P<length>\d{1,15})\s",
        rf"\bTime: ({NUMBER_PATTERN})s",
        "seconds",
    ),
    _format(
        "PyTorch's ImageNet example",
        "Time ",
        r"\bEpoch: \[(?P<epoch0>\d{1,9})\]\[\s*(\d{1,15})/(?P<length>\d{1,15})\]\s+Time\s",
        rf"\bTime\s+({NUMBER_PATTERN}) \(",
        "seconds",
    ),
    _format(
        "MetricLogger",
        "  time: ",
        r"\bEpoch: \[(?P<epoch0>\d{1,9})(?:/\d{1,9})?\]\s+\[\s*(\d{1,15})/(?P<length>\d{1,15})\]\s",
        rf"  time: ({NUMBER_PATTERN})",
        "seconds",
    ),
    _format("MLX", "It/sec", r"\bIter (\d{1,15}): Train loss", rf"\bIt/sec ({NUMBER_PATTERN})", "steps_per_second"),
    _format(
        *("TensorFlow", "sec/step)", r"\bglobal step (\d{1,15}): loss"),
        *(rf"\(({NUMBER_PATTERN}) sec/step\)", "seconds"),
    ),
    _format("fairseq", "num_updates=", r"\bnum_updates=(\d{1,15})\b", rf"\bups=({NUMBER_PATTERN})", "ups"),
    _format("verl", "timing_s/step:", r"\bstep:(\d{1,15}) - ", rf"\btiming_s/step:({NUMBER_PATTERN})", "seconds"),
    _format(
        *("PaddleNLP", "interval_steps_per_second:", r"\bglobal_step: (\d{1,15})\b"),
        *(rf"\binterval_steps_per_second: ({NUMBER_PATTERN})", "steps_per_second"),
    ),
    _format(
        "MindFormers",
        "per_step_time:",
        r"\bEpoch:\s*\[\s*(?P<epoch>\d{1,9})/\s*\d+\],\s*step:\s*\[\s*(\d{1,15})/\s*(?P<length>\d{1,15})\]",
        rf"\bper_step_time:\s*({NUMBER_PATTERN})\s*ms",
        "milliseconds",
    ),
    _format("InternLM", "tgs (tokens/gpu/second)", r"\bstep=(\d{1,15})\b"),
    _format("OLMo", "[step=", r"\[step=(\d{1,15})/\d+"),
    _format("Composer", "[batch=", r"\[batch=(\d{1,15})/\d+\]"),
    _format("torchtitan", "loss:", r"\bstep:\s*(\d{1,15})\s+loss:"),
    _format(
        *("DeepSpeed", "iter time (s):", r"\bsteps: (\d{1,15}) loss:"),
        *(rf"\biter time \(s\): ({NUMBER_PATTERN})", "seconds"),
    ),
    _format("DeepSpeed", "SamplesPerSec", r"\bglobal_step=(\d{1,15})\b"),
    _format("DeepSpeed", "SamplesPerSec", r"\s\d+/(\d{1,15}), (?:RunningAvg)?SamplesPerSec="),
    _format("DeepSpeed", "skipped=", r"\bstep=(\d{1,15}), skipped="),
)

MEGATRON_FORMATS = (
    _format(
        *("Megatron-LM", "(ms)", r"\biteration\s+(\d{1,15})\s*/\s*\d{1,15}\s*\|"),
        *(r"\belapsed time per iteration \(ms\):\s*(\d+(?:\.\d+)?)(?=\s|\|)", "milliseconds"),
    ),
    _format(
        *("Megatron-LM", "(s)", r"\biteration\s+(\d{1,15})\s*/\s*\d{1,15}\s*\|"),
        *(r"\belapsed time per iteration \(s\):\s*(\d+(?:\.\d+)?)(?=\s|\|)", "seconds"),
    ),
)
"""Used while a job prints. For whole files, `resihp.detector.offline.recordings.megatron_log` knows more variants."""

_NO_EVALUATION = r"(?i)^(?!.*\b(?:val|valid|validation|eval|evaluation|test)\b)"
_NUMBERED_STEP = r"(?<![\w/])(?:global[ _]?step|iteration|iter|step|batch)\s*[:=#]?\s*\[?\s*(\d{1,15})\b(?!\.\d)"
HOMEMADE_FORMATS = (
    _format(
        "script", "oss", r"\bEpoch:? ?\[(?P<epoch>\d{1,9})/\d{1,9}\],? Step:? ?\[(\d{1,15})/(?P<length>\d{1,15})\]"
    ),
    _format("script", "oss", rf"{_NO_EVALUATION}.*?{_NUMBERED_STEP}"),
)
"""Lines of loops that people write themselves, with a step or iteration and a loss. Used while a job prints, after all
other formats."""

_PASSED = r"(?P<passed>(?:\d{1,5} days?, )?\d{1,6}(?::\d\d){1,2})"
_BAR_UNIT = r"(?:it|iter|step|steps|batch|batches)"
_PACE = rf"(?:s/ ?{_BAR_UNIT}|{_BAR_UNIT}/s)\b"
BAR_PATTERN = re.compile(rf"\|\s*(?P<done>\d{{1,15}})/(?P<total>\d{{1,15}}|\?)\s*\[{_PASSED}<[^\]]{{0,200}}?{_PACE}")
BAR_WITHOUT_TOTAL = re.compile(rf"(?:^|\s)(?P<done>\d{{1,15}}) ?{_BAR_UNIT} \[{_PASSED}, [^\]]{{0,200}}?{_PACE}")
BAR_OF_EPOCHS = re.compile(r"\bepoch:?\s*(\d{1,9})", re.IGNORECASE)


class BarLine(NamedTuple):
    """A line of a progress bar."""

    head: str
    """Text before the bar, without numbers."""
    total: str
    """Number of iterations; `?` if unknown."""
    done: int
    passed: str


def match_of(format: LineFormat, line: str) -> re.Match[str] | None:
    """Return where a line states its iteration; None if the line is not of this format."""
    return format.iteration.search(line) if format.needle in line else None


def label_of(match: re.Match[str]) -> int:
    """Return the iteration that a line states, counted on over epochs."""
    groups = match.groupdict()
    label = int(next(group for name, group in _groups(match) if name not in groups))
    if groups:
        epoch = int(groups["epoch0"]) if "epoch0" in groups else int(groups["epoch"]) - 1
        label += epoch * int(groups["length"])
    return label


def fields_of(format: LineFormat, line: str) -> dict[str, object] | None:
    """Return the iteration and the time that a line states, under names of `resihp.detector.offline.recordings.names`;
    None if the line is not of this format."""
    if (match := match_of(format, line)) is None:
        return None
    label = label_of(match)
    if format.time is None:
        moment = TIMESTAMP_PATTERN.search(line)
        return None if moment is None else {"iteration": label, "timestamp": moment[0]}
    time = format.time.search(line)
    if time is None:
        return None
    multiple = UNIT_MULTIPLES[time[2]] if len(time.groups()) > 1 else 1.0
    return {"iteration": label, format.field: float(time[1].replace(",", ".")) * multiple}


def _groups(match: re.Match[str]) -> list[tuple[str, str]]:
    """Return the groups of a match with their names, empty for those without."""
    names = {number: name for name, number in match.re.groupindex.items()}
    return [(names.get(number, ""), group) for number, group in enumerate(match.groups(), 1)]


def bar_of(line: str) -> BarLine | None:
    """Return the progress bar on a line, as tqdm prints it; None if there is none."""
    if "[" not in line:
        return None
    if "<" in line and (match := BAR_PATTERN.search(line)) is not None:
        head, total, done = line[: match.start()].partition("|")[0], match["total"], int(match["done"])
        if (epoch := BAR_OF_EPOCHS.search(head)) is not None and total != "?":
            done += int(epoch[1]) * int(total)
    elif "/" in line and (match := BAR_WITHOUT_TOTAL.search(line)) is not None:
        head, total, done = line[: match.start()], "?", int(match["done"])
    else:
        return None
    return BarLine(re.sub(r"[\d%\s]+", " ", head).strip(), total, done, match["passed"])
