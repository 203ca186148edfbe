"""Rows of named fields, as programs log them: JSON lines, a JSON document of rows, a Parquet table. Pure.

Each row has an iteration and what it took, or the moment when it was through; names are those that are usual, in any
case, also one level down. What is no row of that kind is left out and counted; the first such line is named.
"""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from resihp.detector.offline.recordings.recording import Recording, counted, numbered_lines, short, text_of
from resihp.detector.offline.recordings.tables import Measured, recording_of
from resihp.errors import UsageError

ITERATION = (
    *("iteration", "iter", "step", "global_step", "global_steps", "train_step", "trainer/global_step"),
    *("train/global_step", "_step", "step_num", "iteration_number"),
)
SECONDS = (
    *("seconds", "iteration_seconds", "step_seconds", "iteration_time", "iter_time", "step_time", "train_step_time"),
    *("time_per_iteration", "time_per_step", "seconds_per_iteration", "seconds_per_step", "sec_per_step", "s_per_it"),
    *("iteration_time_s", "step_time_s", "elapsed_seconds", "elapsed_s", "duration_s", "duration_seconds", "time_s"),
    *("elapsed time per iteration (s)", "iteration-time", "duration", "time", "elapsed"),
)
MILLISECONDS = (
    *("milliseconds", "ms", "iteration_ms", "step_ms", "iteration_time_ms", "iter_time_ms", "step_time_ms", "time_ms"),
    *("elapsed time per iteration (ms)", "elapsed_time_per_iteration_ms", "duration_ms", "elapsed_ms", "ms_per_step"),
)
MOMENT = (
    "timestamp",
    "_timestamp",
    "finished_at",
    "created_at",
    "@timestamp",
    "datetime",
    "date",
    "ts",
    "at",
    "_runtime",
)
EITHER = ("time", "elapsed")
"""What an iteration took, or a clock: one that never goes back is a clock."""
TOKENS = ("tokens", "num_tokens", "n_tokens", "tokens_per_step", "tokens_per_iteration")
SQUARES = ("sum_squared_lengths",)
RANK = ("rank", "global_rank")
JOB = ("job_uuid", "job")
OF_COMPUTING = "compute_seconds"
"""Of ranks, which all take as long as the slowest."""
COLUMNS = (*ITERATION, *SECONDS, *MILLISECONDS, *MOMENT, *TOKENS, *SQUARES, *RANK, *JOB, OF_COMPUTING)
USED = frozenset(COLUMNS)
LEAST_MOMENTS = 8
SINCE_1970_S, IN_MILLISECONDS = 1e8, 1e11


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
        return read_rows(document)
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
    usable, counts, name, factor = _time_of(rows, unit)
    iteration = counts.column(ITERATION)
    job = counts.column(JOB, text=True)
    rank, tokens, squares = (counts.column(names) for names in (RANK, TOKENS, SQUARES))
    remarks: list[str] = []
    if rank and counts.column((OF_COMPUTING,)) and name == "seconds":
        name = OF_COMPUTING
        remarks.append(f"times are `{OF_COMPUTING}`: what ranks take as a whole is as long as the slowest of them")
    of_job: dict[str, list[Measured]] = {}
    without: list[int] = []
    clock = name in MOMENT or (name in EITHER and _never_back(usable, iteration, name, rank))
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
        of_job = {of: _between(measured) for of, measured in of_job.items()}
        remarks.append(f"times are those between two lines, by `{name}`, with all that came in between")
    found = [recording_of(measured, by_rank=bool(rank), unit=unit) for measured in of_job.values()]
    if len(found) > 1:
        remarks.append(f"of {len(found)} jobs, each a run")
    remarks += [remark for each in found for remark in each.remarks]
    remarks += counted(without, "row without its time", unit)
    remarks += counted(
        [row.line for row in rows if row.fields.get(iteration) is None], "row without its iteration", unit
    )
    return Recording("series", tuple(run for each in found for run in each.runs), tuple(remarks))


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

    def column(self, names: Sequence[str], *, text: bool = False) -> str:
        """Of these names the one that most rows have, the first of those; empty where none has any."""
        counts = self._any if text else self._numbers
        best = max(names, key=lambda name: counts[name])
        return best if counts[best] else ""


def _time_of(rows: Sequence[NamedRow], unit: str) -> tuple[Sequence[NamedRow], _Counts, str, float]:
    """Rows that have an iteration, and their counts; the name of their times, and what makes seconds of them. Raises
    UsageError."""
    counts = _Counts(rows)
    iteration = counts.column(ITERATION)
    usable = [row for row in rows if iteration and row.fields.get(iteration) is not None]
    if not usable:
        raise UsageError(_lacking(rows, unit, "iteration", ITERATION))
    if len(usable) < len(rows):
        counts = _Counts(usable)
    for names, factor in ((SECONDS, 1.0), (MILLISECONDS, 1e-3), (MOMENT, 1.0)):
        if name := counts.column(names, text=names is MOMENT):
            return usable, counts, name, factor
    raise UsageError(_lacking(usable, unit, "time", ("seconds", "step_time", "milliseconds", "timestamp")))


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
    """Rows with moments, as rows with what one iteration took since the row before of the same rank."""
    found = []
    last: dict[float, Measured] = {}
    for row in measured:
        before = last.get(row.rank)
        last[row.rank] = row
        if before is not None and row.label > before.label:
            found.append(row._replace(seconds=(row.seconds - before.seconds) / (row.label - before.label)))
    return found


# --- values ---------------------------------------------------------------------------------------------------------


def _rows_of(text: str, used: Collection[str] | None) -> tuple[list[NamedRow], list[tuple[int, str]], list[int]]:
    """Objects, lines that begin like one and are none, with why, and numbers of all other lines."""
    rows: list[NamedRow] = []
    broken: list[tuple[int, str]] = []
    other: list[int] = []
    for number, line in numbered_lines(text):
        if not line.lstrip().startswith("{"):
            other += [number] if line.strip() else []
            continue
        try:
            rows.append(NamedRow(number, named(json.loads(line), used)))
        except (ValueError, RecursionError) as error:
            broken.append((number, f"{_reason(error)}: `{short(line)}`"))
    return rows, broken, other


def _document(text: str, used: Collection[str] | None) -> list[NamedRow] | None:
    """Rows of a file that is one JSON document: a list of objects, or an object with `rows`, as ours have."""
    if not text.lstrip().startswith(("[", "{")):
        return None

    kept = {"rows", *(used or ())}

    def smaller(found: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in found.items()
            if name in kept or isinstance(value, dict) or name.lower() in kept
        }

    try:
        whole = json.loads(text, object_hook=None if used is None else smaller)
    except (ValueError, RecursionError):
        return None
    found = whole.get("rows") if isinstance(whole, dict) else whole
    if not isinstance(found, list):
        return None
    rows = [row for row in found if isinstance(row, dict)]
    del whole, found
    rows.reverse()
    return [NamedRow(number, named(rows.pop(), used)) for number in range(1, len(rows) + 1)]


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
    return "nested too deep" if isinstance(error, RecursionError) else "a number is too long"


def named(row: Mapping[str, Any], used: Collection[str] | None = None) -> dict[str, Any]:
    """Its fields by their names in lower case, and those one level down where no other has that name; `used`: of these
    names alone."""
    found = {}
    for name, value in row.items():
        if not isinstance(value, dict) and (used is None or name.lower() in used):
            found[name.lower()] = value
    for value in row.values():
        if isinstance(value, dict):
            for name, inner in value.items():
                if used is None or name.lower() in used:
                    found.setdefault(name.lower(), inner)
    return found


def _number(value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


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
    try:
        return datetime.fromisoformat(str(value).strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        return math.nan
