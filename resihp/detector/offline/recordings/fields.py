"""Rows of named fields, as programs log them: JSON lines, a JSON document of rows, a Parquet table. Pure.

Each row has an iteration and what it took, how many there were in a second, or the moment when it was through; names
are those that are usual, in any case, also one level down or behind `train/` and its like. What is no row of that kind
is left out and counted; the first such line is named.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from statistics import median
from typing import Any, NamedTuple

import msgspec

from resihp.detector.offline.recordings.recording import Recording, counted, numbered_lines, short, text_of
from resihp.detector.offline.recordings.tables import Measured, recording_of
from resihp.errors import UsageError

ITERATION = (
    *("iteration", "global_step", "global_steps", "trainer/global_step", "train/global_step", "iteration_number"),
    *(
        "step",
        "train_step",
        "global_step/max_steps",
        "iter",
        "current_steps",
        "num_updates",
        "training_step",
        "step_num",
        "_step",
    ),
)
"""Those that count on through epochs first."""
EPOCH = ("epoch",)
SECONDS = (
    *("seconds", "iteration_seconds", "step_seconds", "iteration_time", "iter_time", "step_time", "train_step_time"),
    *("time_per_iteration", "time_per_step", "seconds_per_iteration", "seconds_per_step", "sec_per_step", "s_per_it"),
    *("iteration_time_s", "step_time_s", "elapsed_seconds", "elapsed_s", "duration_s", "duration_seconds", "time_s"),
    *("step_time_seconds", "step_duration", "step_duration_s", "time_per_iter", "sec_per_iter", "s/it", "sec/step"),
    *(
        "timing_s/step",
        "train_step_timing in s",
        "train_step_timing",
        "end_to_end(s)",
        "seconds/step",
        "iter_time_s",
        "sec/iter",
    ),
    *("elapsed time per iteration (s)", "iteration-time", "duration", "time", "elapsed"),
)
MILLISECONDS = (
    *("milliseconds", "ms", "iteration_ms", "step_ms", "iteration_time_ms", "iter_time_ms", "step_time_ms", "time_ms"),
    *("elapsed time per iteration (ms)", "elapsed_time_per_iteration_ms", "duration_ms", "elapsed_ms", "ms_per_step"),
    *("ms/step", "ms/it", "dt_ms", "step_duration_ms"),
)
WINDOW_SECONDS = ("train_wall",)
"""What all iterations since the row before took."""
PER_SECOND = (
    *("steps_per_second", "steps_per_sec", "iterations_per_second", "iters_per_sec", "its_per_sec", "it/s", "steps/s"),
    *("steps/sec", "iter/s", "iters/s", "ups", "batches_per_second", "batches_per_sec", "global_step/sec"),
)
MOMENT = (
    *("timestamp", "_timestamp", "finished_at", "created_at", "@timestamp", "datetime", "date", "ts", "at"),
    *("wall time", "wall_time", "walltime", "_runtime", "wall", "elapsed_time"),
    *("relative time (process)", "relative time (wall)"),
)
EITHER = ("time", "elapsed")
"""What an iteration took, or a clock: one that never goes back is a clock."""
TOKENS = ("tokens", "num_tokens", "n_tokens", "tokens_per_step", "tokens_per_iteration")
SQUARES = ("sum_squared_lengths",)
RANK = ("rank", "global_rank")
JOB = ("job_uuid", "job")
OF_COMPUTING = "compute_seconds"
"""Of ranks, which all take as long as the slowest."""
TIMES = (*SECONDS, *MILLISECONDS, *WINDOW_SECONDS, *PER_SECOND, *MOMENT)
COLUMNS = (*ITERATION, *TIMES, *TOKENS, *SQUARES, *RANK, *JOB, *EPOCH, OF_COMPUTING)
USED = frozenset(COLUMNS)
OF_TRAINING = frozenset(
    (
        *("train", "training", "trainer", "perf", "performance", "timing", "timings", "time", "timers", "throughput"),
        *("speed", "stats", "metrics", "time_metrics", "iteration-time", "progress", "log"),
    )
)
"""What may stand before a name and a slash: `perf/step_time` is a step's time, `eval/step_time` is not."""
HISTORIES = ("rows", "log_history")
"""In a JSON document that is an object, the list of its rows."""
LEAST_MOMENTS = 8
LATE_ITERATIONS = 2
SINCE_1970_S, IN_MILLISECONDS = 1e8, 1e11
COARSE_CLOCK_WINDOW_S = 20.0
"""Moments in whole seconds are compared over windows that long, so that rounding is at most 5 % of a time."""
CLOCK_FACTOR = 3.0
"""Times that disagree with the clock by more than this are in another unit than their name says."""
SUSPICIOUS_SECONDS = 300.0
"""Where no clock is there, seconds longer than this may be milliseconds."""
MAX_LITERAL_CHARS = 20_000


class NamedRow(NamedTuple):
    line: int
    fields: Mapping[str, Any]


def read_json(content: bytes) -> Recording:
    """Raises UsageError, naming the line, where more lines are broken than not, or none has what is needed."""
    text = text_of(content)
    try:
        return _read(text, USED)
    except UsageError:
        return _read(text, None)  # what is missing is told with all that there is instead


def _read(text: str, used: Collection[str] | None) -> Recording:
    """`used`: names of fields that are kept, all if left out; others are most of what a large file has."""
    if (document := _document(text, used)) is not None:
        try:
            return read_rows(document)
        except UsageError:
            if _is_trainer_state(text):
                raise UsageError(
                    "trainer_state.json of Hugging Face's Trainer: its log_history has steps and losses, no times; "
                    "give what the run printed, with progress bars, or its TensorBoard or Weights & Biases export "
                    "as CSV"
                ) from None
            raise
    rows, broken, other = _rows_of(text, used)
    if broken and len(broken) > len(rows):
        line, why = broken[0]
        raise UsageError(f"line {line} is no JSON object: {why}; {len(broken)} of {len(broken) + len(rows)} are not")
    found = read_rows(rows, "line")
    remarks = list(found.remarks)
    if broken:
        line, why = broken[0]
        several = len(broken) > 1
        words = f"{len(broken)} lines that are no JSON" if several else "1 line that is no JSON"
        remarks.insert(0, f"{words} left out, {'the first is ' if several else ''}line {line}: {why}")
    return msgspec.structs.replace(found, remarks=(*remarks, *counted(other, "line without JSON")))


def read_rows(rows: Sequence[NamedRow], unit: str = "row") -> Recording:
    """Rows of one job, or of several one after the other; `unit`: what they are numbered by.

    Raises UsageError naming what is missing, and where.
    """
    usable, counts, iteration, name, factor = _time_of(rows, unit)
    job = counts.column(JOB, text=True)
    rank, tokens, squares = (counts.column(names) for names in (RANK, TOKENS, SQUARES))
    remarks: list[str] = []
    usable, epochs = _counted_on(usable, iteration, counts.column(EPOCH), rank, job)
    if epochs > 1:
        remarks.append(f"`{iteration}` begins again in each of {epochs} epochs, and is counted on")
    if rank and counts.column((OF_COMPUTING,)) and name == "seconds":
        name = OF_COMPUTING
        remarks.append(f"times are `{OF_COMPUTING}`: what ranks take as a whole is as long as the slowest of them")
    of_job: dict[str, list[Measured]] = {}
    without: list[int] = []
    clock = name in MOMENT or (name in EITHER and _never_back(usable, iteration, name, rank))
    coarse = clock and all(_in_whole_seconds(fields[name]) for _, fields in usable if fields.get(name) is not None)
    if not clock:
        usable, factor, words = _in_seconds(usable, counts, iteration, name, factor, (rank, job))
        remarks += words
    for line, fields in usable:
        if fields.get(name) is None or fields.get(iteration) is None:
            without.append(line)
            continue
        of_job.setdefault(str(fields.get(job)), []).append(
            Measured(
                line,
                _number(fields[iteration]),
                _moment(fields[name]) if clock else _number(fields[name]) * factor,
                _number(fields.get(rank, 0)) if rank else 0.0,
                _least_0(fields.get(tokens)),
                _least_0(fields.get(squares)),
            )
        )
    if clock:
        of_job = {of: _between(_apart(measured) if coarse else measured) for of, measured in of_job.items()}
        seconds_apart = f" at least {COARSE_CLOCK_WINDOW_S:g} s apart" if coarse else ""
        remarks.append(f"times are those between two lines{seconds_apart}, by `{name}`, with all that came in between")
    found = [recording_of(measured, by_rank=bool(rank), unit=unit) for measured in of_job.values()]
    if len(found) > 1:
        remarks.append(f"of {len(found)} jobs, each a run")
    remarks += [remark for each in found for remark in each.remarks]
    remarks += counted(without, "row without its time", unit)
    remarks += counted(
        [row.line for row in rows if row.fields.get(iteration) is None], "row without its iteration", unit
    )
    return Recording("series", tuple(run for each in found for run in each.runs), tuple(remarks))


def _in_seconds(
    rows: Sequence[NamedRow], counts: _Counts, iteration: str, name: str, factor: float, series: tuple[str, str]
) -> tuple[Sequence[NamedRow], float, list[str]]:
    """Rows whose times are those of one iteration, what makes seconds of these, and what a reader must know of that."""
    moment = counts.column(MOMENT, text=True)
    scaled = _scaled(rows, iteration, name, factor, moment, series)
    if scaled is not None:
        rows, words = scaled
        return rows, 1.0, [words]
    if name in WINDOW_SECONDS or name in PER_SECOND:
        return _per_iteration(rows, iteration, name, series), 1.0, [f"times are reckoned from `{name}`"]
    if factor == 1.0 and not moment and name not in _UNIT_IN_NAME:
        values = [_number(fields.get(name)) for _, fields in rows]
        values = [value for value in values if math.isfinite(value)]
        if values and median(values) > SUSPICIOUS_SECONDS:
            return rows, factor, [f"`{name}` was taken for seconds; if it is milliseconds, rename it to `milliseconds`"]
    return rows, factor, []


class _Counts:
    """Of rows, how many have each field, and how many a number there."""

    def __init__(self, rows: Iterable[NamedRow]) -> None:
        self._any: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        for _, fields in rows:
            for name, value in fields.items():
                if value is not None and name in USED:
                    self._any[name] += 1
                    if name in EITHER or math.isfinite(_number(value)):
                        self._numbers[name] += 1

    def often(self, names: Sequence[str]) -> list[str]:
        """Of these names those that hold numbers in nine tenths of the rows that the most frequent is in, in order."""
        most = max(self._numbers[name] for name in names) or max(self._any[name] for name in names)
        counts = self._numbers if max(self._numbers[name] for name in names) else self._any
        return [name for name in names if most and 10 * counts[name] >= 9 * most]

    def column(self, names: Sequence[str], *, text: bool = False) -> str:
        """Of these names the one that most rows have, the first of those; empty where none has any."""
        counts = self._any if text else self._numbers
        best = max(names, key=lambda name: counts[name])
        return best if counts[best] else ""


def _time_of(rows: Sequence[NamedRow], unit: str) -> tuple[Sequence[NamedRow], _Counts, str, str, float]:
    """Rows that have an iteration, and their counts; the names of their iterations and times, and what makes seconds of
    these. Raises UsageError."""
    counts = _Counts(rows)
    iteration = _iteration_of(rows, counts)
    usable = [row for row in rows if iteration and row.fields.get(iteration) is not None]
    if not usable:
        raise UsageError(_lacking(rows, unit, "iteration", ("iteration", "iter", "step", "global_step")))
    if len(usable) < len(rows):
        counts = _Counts(usable)
    units = ((SECONDS, 1.0), (MILLISECONDS, 1e-3), (WINDOW_SECONDS, 1.0), (PER_SECOND, 1.0), (MOMENT, 1.0))
    for names, factor in units:
        if name := counts.column(names, text=names is MOMENT):
            return usable, counts, iteration, name, factor
    raise UsageError(_lacking(usable, unit, "time", ("seconds", "step_time", "milliseconds", "timestamp")))


def _iteration_of(rows: Sequence[NamedRow], counts: _Counts) -> str:
    """The name of the field that numbers iterations; empty where there is none.

    An epoch's counter begins again and again: of the fields that nine tenths of the rows with any have, the first, in
    the order of `ITERATION`, that has nine tenths of the different values that any of them has.
    """
    present = counts.often(ITERATION)
    if len(present) < 2:
        return present[0] if present else ""
    different = {name: len({str(row.fields.get(name)) for row in rows}) for name in present}
    return next(name for name in present if 10 * different[name] >= 9 * max(different.values()))


def _counted_on(
    rows: Sequence[NamedRow], iteration: str, epoch: str, rank: str, job: str
) -> tuple[Sequence[NamedRow], int]:
    """Rows whose counter begins again with each epoch, numbered on through all of them, and how many epochs there are;
    1 where the counter does so anyway, and where it falls for another reason."""
    if not epoch:
        return rows, 1
    counters: dict[tuple[str, str], _Counter] = {}
    labels = []
    for row in rows:
        counter = counters.setdefault((str(row.fields.get(rank)), str(row.fields.get(job))), _Counter())
        label = counter.take(_number(row.fields[iteration]), _number(row.fields.get(epoch)))
        if label is None:
            return rows, 1
        labels.append(label)
    if not any(counter.offset for counter in counters.values()):
        return rows, 1
    numbered = [row._replace(fields={**row.fields, iteration: label}) for row, label in zip(rows, labels, strict=True)]
    return numbered, len({_number(row.fields.get(epoch)) for row in rows})


class _Counter:
    """One rank's counter of iterations within epochs."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._first = self._last = self._rise = self._epoch = math.nan

    def take(self, label: float, epoch: float) -> float | None:
        """The iteration's number in all epochs; None where the counter falls and no epoch begins."""
        if math.isnan(self._first):
            self._first = label
        elif label < self._last:
            if epoch != self._epoch + 1 or label > self._first or math.isnan(self._rise):
                return None
            self.offset += self._last + self._rise - label
        elif label > self._last:
            self._rise = label - self._last
        self._last, self._epoch = label, epoch
        return label + self.offset


_UNIT_IN_NAME = frozenset(name for name in SECONDS if re.search(r"sec|_s$|\(s\)|in s$|s/it", name))


def _steps(
    rows: Sequence[NamedRow], iteration: str, series: tuple[str, str]
) -> Iterable[tuple[int, NamedRow, NamedRow, float]]:
    """Neighbours of one rank and job whose iteration rises: the place of the later, both, and by how much it rises."""
    last: dict[tuple[str, str], NamedRow] = {}
    for place, row in enumerate(rows):
        key = str(row.fields.get(series[0])), str(row.fields.get(series[1]))
        before = last.get(key)
        last[key] = row
        if before is not None:
            rise = _number(row.fields[iteration]) - _number(before.fields[iteration])
            if rise > 0:
                yield place, before, row, rise


def _scaled(
    rows: Sequence[NamedRow], iteration: str, name: str, factor: float, moment: str, series: tuple[str, str]
) -> tuple[Sequence[NamedRow], str] | None:
    """Rows with the times that the clock beside them says they are, and in words what they were; None where they agree
    with the clock, or neither unit nor window explains why they do not."""
    if not moment or name in PER_SECOND:
        return None
    ratios, rises = [], []
    for _, before, row, rise in _steps(rows, iteration, series):
        passed_s = _moment(row.fields.get(moment)) - _moment(before.fields.get(moment))
        seconds = _number(row.fields.get(name)) * factor
        if passed_s > 0 and seconds > 0 and math.isfinite(passed_s + seconds):
            ratios.append(seconds * rise / passed_s)
            rises.append(rise)
    if len(ratios) < LEAST_MOMENTS:
        return None
    ratio, rise = median(ratios), median(rises)
    if 1 / CLOCK_FACTOR < ratio < CLOCK_FACTOR:
        return None
    readings = [(1e3, f"`{name}` holds milliseconds, as `{moment}` shows", False)]
    readings.append((1e-3, f"`{name}` holds seconds, as `{moment}` shows", False))
    if rise > 1:
        readings.append((rise, f"`{name}` is the time of all {rise:g} iterations since the row before", True))
        readings.append(
            (1e3 * rise, f"`{name}` holds milliseconds of all {rise:g} iterations since the row before", True)
        )
    scale, words, window = min(readings, key=lambda reading: abs(math.log(ratio / reading[0])))
    if not 1 / CLOCK_FACTOR < ratio / scale < CLOCK_FACTOR:
        return None
    unit_s = factor / (scale / rise if window else scale)
    rows = [row._replace(fields={**row.fields, name: _number(row.fields.get(name)) * unit_s}) for row in rows]
    return (_per_iteration(rows, iteration, name, series) if window else rows), words


def _per_iteration(rows: Sequence[NamedRow], iteration: str, name: str, series: tuple[str, str]) -> list[NamedRow]:
    """Rows with the seconds of one iteration, made of a rate or of what all since the row before took."""
    if name in PER_SECOND:
        rates = ((row, _number(row.fields.get(name))) for row in rows)
        return [row._replace(fields={**row.fields, name: 1 / rate if rate else math.nan}) for row, rate in rates]
    made = []
    for _, _, row, rise in _steps(rows, iteration, series):
        made.append(row._replace(fields={**row.fields, name: _number(row.fields.get(name)) / rise}))
    return made


def _lacking(rows: Sequence[NamedRow], unit: str, what: str, names: Sequence[str]) -> str:
    where = f"{unit} {rows[0].line}" if rows else "the file"
    keys = list(rows[0].fields) if rows else []
    near = [key for key in keys if difflib.get_close_matches(key, names, 1, 0.8)]
    hint = f"; is it `{short(near[0])}`? Rename that" if near else ""
    return (
        f"{where} has no field for the {what} ({', '.join(names[:4])}, ...); it has "
        f"{', '.join(f'`{short(key)}`' for key in keys[:12]) or 'none'}{hint}"
    )


def _never_back(rows: Sequence[NamedRow], iteration: str, name: str, rank: str) -> bool:
    """Whether `time` is a clock: a text, seconds since 1970, or what only grows from one iteration to the next."""
    values = [fields[name] for _, fields in rows if fields.get(name) is not None]
    if not all(math.isfinite(_number(value)) for value in values) or _number(values[-1]) > SINCE_1970_S:
        return True
    last: dict[str, tuple[float, float]] = {}
    for _, fields in rows:
        if fields.get(name) is None:
            continue
        of, at, now = str(fields.get(rank)), _number(fields[iteration]), _number(fields[name])
        before = last.get(of, (-math.inf, -math.inf))
        if at > before[0] and now < before[1]:
            return False
        last[of] = (at, now)
    return len(values) >= LEAST_MOMENTS and _number(values[-1]) > 2 * _number(values[0])


def _between(measured: Sequence[Measured]) -> list[Measured]:
    """Rows with moments, as rows with what one iteration took since the row before of the same rank.

    A row that repeats the iteration before, or is late by one or two, comes from another rank: it is passed over.
    """
    found = []
    last: dict[float, Measured] = {}
    for row in measured:
        before = last.get(row.rank)
        if before is not None and 0 <= before.label - row.label <= LATE_ITERATIONS:
            continue
        last[row.rank] = row
        if before is not None and row.label > before.label:
            found.append(row._replace(seconds=(row.seconds - before.seconds) / (row.label - before.label)))
    return found


def _apart(measured: Sequence[Measured]) -> list[Measured]:
    """Of rows with moments in whole seconds those that are far enough apart, in steps of equal size."""
    kept: list[Measured] = []
    for first, end in _rising(measured):
        part = measured[first:end]
        labels, seconds = part[-1].label - part[0].label, part[-1].seconds - part[0].seconds
        if not (labels > 0 and seconds > 0):
            kept += part
            continue
        stride = max(1, math.ceil(COARSE_CLOCK_WINDOW_S * labels / seconds))
        due = -math.inf
        for row in part:
            if row.label >= due:
                kept.append(row)
                due = (row.label // stride + 1) * stride
    return kept


def _rising(measured: Sequence[Measured]) -> Iterable[tuple[int, int]]:
    """Parts in which the iteration never falls by more than what ranks are late by."""
    first = 0
    for place in range(1, len(measured) + 1):
        if place == len(measured) or measured[place].label < measured[place - 1].label - LATE_ITERATIONS:
            yield first, place
            first = place


# --- values ---------------------------------------------------------------------------------------------------------


def _rows_of(text: str, used: Collection[str] | None) -> tuple[list[NamedRow], list[tuple[int, str]], list[int]]:
    """Objects, lines that begin like one and are none, with why, and numbers of all other lines."""
    rows: list[NamedRow] = []
    broken: list[tuple[int, str]] = []
    other: list[int] = []
    for number, line in numbered_lines(text):
        if (start := object_start(line)) < 0:
            other += [number] if line.strip() else []
            continue
        try:
            rows.append(NamedRow(number, named(object_of(line[start:]), used)))
        except (ValueError, RecursionError) as error:
            broken.append((number, f"{_reason(error)}: `{short(line)}`"))
    return rows, broken, other


_HEAD = re.compile(r"[^{}\"']{0,120}(?=\{[\"'])")


def object_start(line: str) -> int:
    """Where a line's JSON object, or Python's dict, begins: behind what a launcher or a logger puts before it. -1
    without any."""
    if line.lstrip().startswith("{"):
        return len(line) - len(line.lstrip())
    head = _HEAD.match(line)
    return head.end() if head is not None and line.rstrip().endswith("}") else -1


def object_of(text: str) -> dict[str, Any]:
    """A JSON object, or a dict as Python prints it. Raises ValueError, RecursionError."""
    if not re.match(r"\s*\{\s*'", text):
        loaded: dict[str, Any] = json.loads(text)
        return loaded
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError("too long")
    try:
        found = ast.literal_eval(re.sub(r"(?<=[:\s\[(,-])(?:nan|inf)\b", "None", text.strip()))
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError("no dict of Python's") from error
    if not isinstance(found, dict):
        raise ValueError("no dict of Python's")
    return {str(name): value for name, value in found.items()}


def _document(text: str, used: Collection[str] | None) -> list[NamedRow] | None:
    """Rows of a file that is one JSON document: a list of objects, or an object with `rows`, as ours have, or with
    `log_history`, as Hugging Face's trainer_state.json."""
    if not text.lstrip().startswith(("[", "{")):
        return None

    kept = {*HISTORIES, *(used or ())}

    def smaller(found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in found.items()
            if name in kept or isinstance(value, dict) or usual_name(name) in kept
        }

    try:
        whole = json.loads(text, object_hook=None if used is None else smaller)
    except (ValueError, RecursionError):
        return None
    found = whole
    if isinstance(whole, dict):
        found = next((whole[name] for name in HISTORIES if isinstance(whole.get(name), list)), None)
    if not isinstance(found, list):
        return None
    rows = [row for row in found if isinstance(row, dict)]
    del whole, found
    rows.reverse()
    return [NamedRow(number, named(rows.pop(), used)) for number in range(1, len(rows) + 1)]


def _is_trainer_state(text: str) -> bool:
    return '"log_history"' in text and '"global_step"' in text


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
    if str(error) == "no dict of Python's":
        return str(error)
    return "nested too deep" if isinstance(error, RecursionError) else "a number is too long"


def named(row: Mapping[str, Any], used: Collection[str] | None = None) -> dict[str, Any]:
    """Its fields by their names in lower case, and those one level down where no other has that name; `used`: of these
    names alone."""
    found = {}
    for name, value in row.items():
        usual = usual_name(name)
        if isinstance(value, dict) or (used is not None and usual not in used):
            continue
        if usual == name.lower():
            found[usual] = value
        else:
            found.setdefault(usual, value)
    for value in row.values():
        if isinstance(value, dict):
            for name, inner in value.items():
                usual = usual_name(str(name))
                if used is None or usual in used:
                    found.setdefault(usual, inner)
    return found


def usual_name(name: str) -> str:
    """`step_time` of `Perf/Step_Time`; a name that means nothing without what stands before it keeps that."""
    lower = name.strip().lower()
    if lower in USED:
        return lower
    head, slash, tail = lower.partition("/")
    if slash and head in OF_TRAINING and (usual := usual_name(tail)) in USED:
        return usual
    joined = re.sub(r"[ -]+", "_", lower)
    if joined in USED:
        return joined
    if (unit := _UNIT.fullmatch(joined)) is not None and unit[1] in SECONDS:
        return unit[1] if unit[2].startswith("s") else "milliseconds"
    return lower


_UNIT = re.compile(r"(.+?)_*[(\[](s|sec|secs|seconds|ms|msec|milliseconds)[)\]]")
"""`step_time(ms)`, `Step Time [s]`, with blanks joined."""


def _number(value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        of_total = _OF_TOTAL.fullmatch(value) if isinstance(value, str) else None
        return math.nan if of_total is None else float(of_total[1])


_OF_TOTAL = re.compile(r"\s*(\d{1,15})\s*/\s*\d{1,15}\s*")
"""`5/100`, as some write an iteration."""


def _least_0(value: object) -> float | None:
    number = _number(value)
    return number if math.isfinite(number) and number >= 0 else None


def _moment(value: object) -> float:
    """Seconds, from some time on."""
    if isinstance(value, datetime):
        return value.timestamp()
    number = _number(value)
    if math.isfinite(number):
        return number / 1e3 if number > IN_MILLISECONDS else number
    text = str(value).strip()
    if (passed := _PASSED.fullmatch(text) or (_PASSED_IN_WORDS.fullmatch(text) if text else None)) is not None:
        days, hours, minutes, seconds = (float(part or 0) for part in passed.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    try:
        return datetime.fromisoformat(text.replace(",", ".").replace("/", "-")).timestamp()
    except (ValueError, OverflowError, OSError):
        return math.nan


_PASSED = re.compile(r"(?:(\d{1,5}) days?, )?(?:(\d{1,6}):)?(\d{1,2}):(\d{2}(?:\.\d+)?)")
"""`1 day, 2:03:04`, `2:03:04`, `03:04.5`: time that has passed, as Python and progress bars write it."""


_PASSED_IN_WORDS = re.compile(r"(?:(\d{1,5})d ?)?(?:(\d{1,6})h ?)?(?:(\d{1,3})m(?:in)? ?)?(?:(\d{1,6}(?:\.\d+)?)s)?")
"""`1h 2m 3s`."""


def _in_whole_seconds(value: object) -> bool:
    if isinstance(value, str):
        text = value.strip()
        return not math.isfinite(_number(text)) and not re.search(r"\d[.,]\d+s?(?:$|[+Z-])", text)
    return isinstance(value, int) and not isinstance(value, bool) and value < IN_MILLISECONDS
