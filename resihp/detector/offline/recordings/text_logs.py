"""Lines of text that trainers print for each iteration, or each few, behind whatever a launcher puts before them. Pure.

    [titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384  memory: ...  tps: 5,856  ...
    iteration: 991 / 1000 | consumed_tokens: 634K | elapsed_time_per_iteration_ms: 35.7 | ...
     12%|#2        | 60/500 [01:40<12:13,  1.67s/it]

`FORMATS` is the list: how a line numbers its iteration, and how it tells the time. Where it tells none but begins with
the moment at which it was printed, an iteration took what lies between two lines. A progress bar tells whole seconds
that have passed. Rows become those of `fields`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from resihp.detector.offline.recordings.fields import NamedRow, object_of, object_start, read_rows
from resihp.detector.offline.recordings.recording import Recording, numbered_lines, one_speaker, speaker_of, text_of
from resihp.errors import UsageError

NUMBER = r"\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?"
TIMESTAMP = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
MULTIPLES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
MIN_LINES = 2
"""One line may look like one of a trainer and be something else."""


class LineFormat(NamedTuple):
    """How one trainer's lines look."""

    tool: str
    needle: str
    """What every such line contains: quicker than the patterns."""
    iteration: re.Pattern[str]
    """Its group is the number; named groups `epoch` and `length` where that begins again in each epoch."""
    time: re.Pattern[str] | None
    """Its group is a number, the next one a K or M behind it if there is one; None: the line's moment tells."""
    field: str = "timestamp"
    """The field of `fields` that it is."""


def _format(tool: str, needle: str, iteration: str, time: str | None = None, field: str = "timestamp") -> LineFormat:
    return LineFormat(tool, needle, re.compile(iteration), None if time is None else re.compile(time), field)


FORMATS = (
    _format(
        *("NeMo", "train_step_timing in s", r"\bglobal_step\s*[:=]\s*(\d{1,15})(?:\.0*)?\b"),
        *(rf"\btrain_step_timing in s\s*[:=]\s*({NUMBER})", "seconds"),
    ),
    _format(
        *("nanotron", "elapsed_time_per_iteration_ms", r"\biteration:\s*(\d{1,15})\s*/"),
        *(rf"\belapsed_time_per_iteration_ms:\s*({NUMBER})([KMGB]?)", "milliseconds"),
    ),
    _format(
        *("MaxText", "completed step:", r"\bcompleted step:\s*(\d{1,15})"),
        *(rf"\bseconds:\s*({NUMBER})", "seconds"),
    ),
    _format(
        *("nanoGPT", " time", r"\biter (\d{1,15})(?: step \d{1,15})?: loss"),
        *(rf"\btime:?\s*({NUMBER})\s*ms", "milliseconds"),
    ),
    _format("GPT-2 in PyTorch", "dt:", r"\bstep\s+(\d{1,15})\s*\|", rf"\bdt:\s*({NUMBER})\s*ms", "milliseconds"),
    _format("llm.c", " ms |", r"\bstep\s+(\d{1,15})/\d+\s*\|", rf"\|\s*({NUMBER}) ms\s*\|", "milliseconds"),
    _format("LitGPT", "iter time:", r"\biter (\d{1,15})\b", rf"\biter time:\s*({NUMBER})\s*ms", "milliseconds"),
    _format(
        *("MMEngine", "(train)", r"\bIter\(train\)\s*\[\s*(\d{1,15})/\d+\]"),
        *(rf"\btime:\s*({NUMBER})", "seconds"),
    ),
    _format(
        "MMEngine",
        "(train)",
        r"\bEpoch\(train\)\s*\[(?P<epoch>\d{1,9})\]\[\s*(\d{1,15})/(?P<length>\d{1,15})\]",
        rf"\btime:\s*({NUMBER})",
        "seconds",
    ),
    _format(
        *("TensorFlow", "sec/step)", r"\bglobal step (\d{1,15}): loss"),
        *(rf"\(({NUMBER}) sec/step\)", "seconds"),
    ),
    _format("fairseq", "num_updates=", r"\bnum_updates=(\d{1,15})\b", rf"\bups=({NUMBER})", "ups"),
    _format("verl", "timing_s/step:", r"\bstep:(\d{1,15}) - ", rf"\btiming_s/step:({NUMBER})", "seconds"),
    _format(
        *("PaddleNLP", "interval_steps_per_second:", r"\bglobal_step: (\d{1,15})\b"),
        *(rf"\binterval_steps_per_second: ({NUMBER})", "steps_per_second"),
    ),
    _format(
        "MindFormers",
        "per_step_time:",
        r"\bEpoch:\s*\[\s*(?P<epoch>\d{1,9})/\s*\d+\],\s*step:\s*\[\s*(\d{1,15})/\s*(?P<length>\d{1,15})\]",
        rf"\bper_step_time:\s*({NUMBER})\s*ms",
        "milliseconds",
    ),
    _format("InternLM", "tgs (tokens/gpu/second)", r"\bstep=(\d{1,15})\b"),
    _format("OLMo", "[step=", r"\[step=(\d{1,15})/\d+"),
    _format("Composer", "[batch=", r"\[batch=(\d{1,15})/\d+\]"),
    _format("torchtitan", "loss:", r"\bstep:\s*(\d{1,15})\s+loss:"),
    _format("DeepSpeed", "SamplesPerSec", r"\bglobal_step=(\d{1,15})\b"),
    _format("DeepSpeed", "SamplesPerSec", r"\s\d+/(\d{1,15}), (?:RunningAvg)?SamplesPerSec="),
    _format("DeepSpeed", "skipped=", r"\bstep=(\d{1,15}), skipped="),
)

BAR = re.compile(
    r"\|\s*(?P<done>\d{1,15})/(?P<total>\d{1,15}|\?)\s*"
    r"\[(?P<passed>(?:\d{1,5} days?, )?\d{1,6}(?::\d\d){1,2})<"
    r"[^\]]{0,200}?(?:s/it|it/s|s/step|step/s|s/batch|batch/s)"
)
BAR_OF_EPOCHS = re.compile(r"\bepoch:?\s*(\d{1,9})", re.IGNORECASE)

WITHOUT_TIMES = (
    (
        "Hugging Face's Trainer",
        frozenset({"loss", "learning_rate", "epoch"}),
        "its dicts have neither step nor time; keep its progress bars in the log (stderr), or give its TensorBoard or "
        "Weights & Biases export as CSV",
    ),
)


class _Read(NamedTuple):
    speaker: str
    row: NamedRow


def tool_of(lines: Sequence[str]) -> str:
    """The trainer that printed most of these lines, `progress bars` where none did and they are there; empty if it is
    no log of any."""
    format, count = _best(lines)
    if format is not None and count >= MIN_LINES:
        return format.tool
    bars = sum(BAR.search(line) is not None for line in lines if "[" in line and "<" in line)
    return "progress bars" if bars >= MIN_LINES else ""


def read_text_log(content: bytes) -> Recording:
    """Rows of the trainer that most lines are of, or of progress bars. Raises UsageError where none can be used."""
    numbered = list(numbered_lines(text_of(content)))
    format, count = _best([line for _, line in numbered])
    if format is None or count < MIN_LINES:
        return _named("progress bars", read_rows(_bars(numbered), "line"))
    rows = []
    for number, line in numbered:
        if (fields := _fields(format, line)) is not None:
            match = format.iteration.search(line)
            assert match is not None
            rows.append(_Read(speaker_of(line[: match.start()]), NamedRow(number, fields)))
    heard = one_speaker(rows, lambda row: row.speaker)
    recording = _named(format.tool, read_rows([read.row for read in heard], "line"))
    others = len(rows) - len(heard)
    if others:
        remark = f"{others} line{'s' * (others > 1)} of other ranks left out"
        recording = msgspec.structs.replace(recording, remarks=(*recording.remarks, remark))
    return recording


def lines_without_times(lines: Sequence[str]) -> str:
    """Why lines of a trainer that tells no times cannot be read, and what to give instead; empty for all others."""
    for line in lines:
        if "{" not in line or (start := object_start(line)) < 0:
            continue
        try:
            names = object_of(line[start:]).keys()
        except (ValueError, RecursionError):
            continue
        for tool, wanted, advice in WITHOUT_TIMES:
            if wanted <= names:
                return f"lines of {tool}: {advice}"
    return ""


def _named(tool: str, recording: Recording) -> Recording:
    return msgspec.structs.replace(recording, remarks=(f"read as {tool}", *recording.remarks))


def _best(lines: Sequence[str]) -> tuple[LineFormat | None, int]:
    """The format that most lines have, and how many; the first of equals."""
    counts = Counter(
        {place: sum(_fields(format, line) is not None for line in lines) for place, format in enumerate(FORMATS)}
    )
    [(place, count)] = counts.most_common(1)
    return (FORMATS[place], count) if count else (None, 0)


def _fields(format: LineFormat, line: str) -> dict[str, object] | None:
    if format.needle not in line or (match := format.iteration.search(line)) is None:
        return None
    groups = match.groupdict()
    label = int(next(group for name, group in _groups(match) if name not in groups))
    if groups:
        label += (int(groups["epoch"]) - 1) * int(groups["length"])
    if format.time is None:
        moment = TIMESTAMP.search(line)
        return None if moment is None else {"iteration": label, "timestamp": moment[0]}
    time = format.time.search(line)
    if time is None:
        return None
    multiple = MULTIPLES[time[2]] if len(time.groups()) > 1 else 1.0
    return {"iteration": label, format.field: float(time[1].replace(",", ".")) * multiple}


def _groups(match: re.Match[str]) -> list[tuple[str, str]]:
    """Groups of a match with their names, empty for those without."""
    names = {number: name for name, number in match.re.groupindex.items()}
    return [(names.get(number, ""), group) for number, group in enumerate(match.groups(), 1)]


def _bars(numbered: Sequence[tuple[int, str]]) -> list[NamedRow]:
    """Of several progress bars that of training: it lasts longest. Raises UsageError where there is none."""
    series: dict[tuple[str, str], list[NamedRow]] = {}
    span: Counter[tuple[str, str]] = Counter()
    for number, line in numbered:
        if "<" not in line or (match := BAR.search(line)) is None:
            continue
        done, total = int(match["done"]), match["total"]
        head = line[: match.start()].partition("|")[0]
        key = re.sub(r"[\d%\s]+", " ", head).strip(), total
        if (epoch := BAR_OF_EPOCHS.search(head)) is not None and total != "?":
            done += int(epoch[1]) * int(total)
        series.setdefault(key, []).append(NamedRow(number, {"iteration": done, "elapsed_time": match["passed"]}))
        span[key] += 1
    if not series:
        raise UsageError("has no progress bar of iterations")
    longest = max(series, key=lambda key: span[key])
    return series[longest]
