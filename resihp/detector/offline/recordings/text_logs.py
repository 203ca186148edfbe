"""Reads lines that trainers print for each iteration, or every few, behind any prefix of a launcher. Pure.

    [titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384  memory: ...  tps: 5,856  ...
    iteration: 991 / 1000 | consumed_tokens: 634K | elapsed_time_per_iteration_ms: 35.7 | ...
      12%|#2        | 60/500 [01:40<12:13,  1.67s/it]

`LINE_FORMATS` lists, for each trainer, how a line gives its iteration and its time. For lines without a time, but with
the moment of printing, an iteration took the difference of two lines. A progress bar gives elapsed time in whole
seconds. Rows become those of `fields`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from resihp.detector.offline.recordings.fields import NamedRow, read_rows
from resihp.detector.offline.recordings.recording import Recording, one_speaker, short, speaker_of
from resihp.detector.offline.recordings.values import moment_in
from resihp.detector.sequential.changes import WARM_UP

NUMBER_PATTERN = r"\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?"
TIMESTAMP_PATTERN = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
UNIT_MULTIPLES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "ms": 1e-3}
MIN_LINES = 2
"""Lines that a format needs: a single line may look like a trainer's and be something else."""


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

_PASSED = r"(?P<passed>(?:\d{1,5} days?, )?\d{1,6}(?::\d\d){1,2})"
_BAR_UNIT = r"(?:it|iter|step|steps|batch|batches)"
_PACE = rf"(?:s/ ?{_BAR_UNIT}|{_BAR_UNIT}/s)\b"
BAR_PATTERN = re.compile(rf"\|\s*(?P<done>\d{{1,15}})/(?P<total>\d{{1,15}}|\?)\s*\[{_PASSED}<[^\]]{{0,200}}?{_PACE}")
BAR_WITHOUT_TOTAL = re.compile(rf"(?:^|\s)(?P<done>\d{{1,15}}) ?{_BAR_UNIT} \[{_PASSED}, [^\]]{{0,200}}?{_PACE}")
BAR_OF_EPOCHS = re.compile(r"\bepoch:?\s*(\d{1,9})", re.IGNORECASE)


class _BarLine(NamedTuple):
    """A line of a progress bar."""

    head: str
    """Text before the bar, without numbers."""
    total: str
    """Number of iterations; `?` if unknown."""
    done: int
    passed: str


class _Bar:
    """A progress bar: its lines, and its elapsed time."""

    def __init__(self) -> None:
        self.rows: list[NamedRow] = []
        self.passed_s = 0.0
        """Seconds that elapsed while the bar was present, in total."""
        self._last_s = math.inf

    def take(self, number: int, line: _BarLine) -> None:
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
    bars = sum(_bar_line(line) is not None for _, line in numbered)
    return partial(_read_bars, numbered) if bars >= MIN_LINES else None


def _read_lines(numbered: Sequence[tuple[int, str]], format: LineFormat) -> Recording:
    rows = []
    for number, line in numbered:
        if (fields := _fields(format, line)) is not None:
            match = format.iteration.search(line)
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
        {place: sum(_fields(format, line) is not None for line in lines) for place, format in enumerate(LINE_FORMATS)}
    )
    [(place, count)] = counts.most_common(1)
    return (LINE_FORMATS[place], count) if count else (None, 0)


def _fields(format: LineFormat, line: str) -> dict[str, object] | None:
    if format.needle not in line or (match := format.iteration.search(line)) is None:
        return None
    groups = match.groupdict()
    label = int(next(group for name, group in _groups(match) if name not in groups))
    if groups:
        epoch = int(groups["epoch0"]) if "epoch0" in groups else int(groups["epoch"]) - 1
        label += epoch * int(groups["length"])
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


def _bar_line(line: str) -> _BarLine | None:
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
    return _BarLine(re.sub(r"[\d%\s]+", " ", head).strip(), total, done, match["passed"])


def _read_bars(numbered: Sequence[tuple[int, str]]) -> Recording:
    """Read the progress bar of training, whose clock runs longest. A bar of epochs around it has too few lines."""
    bars: dict[tuple[str, str], _Bar] = {}
    for number, line in numbered:
        if (bar_line := _bar_line(line)) is not None:
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
