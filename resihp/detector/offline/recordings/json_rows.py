"""Reads JSON lines, behind any prefix of a launcher, and JSON documents, as rows of named fields. Pure.

    0: {"step": 1, "step_time": 1.25}
    INFO:root:{'step': 1, 'step_time': 1.25, 'loss': nan}
    {"schema": 1, "rows": [{"iteration": 1, "seconds": 1.25}, ...]}

Each object is parsed once. Only fields that `fields` uses are kept, because the other fields are most of a large file;
of the first rows all fields are kept, so that an error can list them. Lines without an object are left out and counted.
The rows are read by `fields`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from resihp.detector.offline.recordings.fields import NamedRow, read_rows
from resihp.detector.offline.recordings.names import RANK_NAMES, has_iteration, has_time, is_known, usual_name
from resihp.detector.offline.recordings.recording import Recording, counted, one_speaker, short, speaker_of
from resihp.errors import UsageError

HISTORY_KEYS = ("rows", "log_history")
"""Names of the list of rows in a JSON document that is an object."""
ROWS_KEPT_WHOLE = 100
MAX_LITERAL_CHARS = 20_000


class JsonRows(msgspec.Struct):
    """All JSON objects of a file, as rows."""

    rows: list[NamedRow]
    history: str = ""
    """For a JSON document: the name of the list that contains the rows; empty if the document is a list."""
    speakers: Mapping[int, str] | None = None
    """For JSON lines: the mark of a rank or host before the object, by line number. None for a JSON document."""
    broken: Sequence[tuple[int, str]] = ()
    """Lines that begin like an object but are not valid, and the reason."""
    other_lines: Sequence[int] = ()
    """All other lines."""

    def has_iterations(self) -> bool:
        return any(has_iteration(row.fields) for row in self.rows)

    def has_timed_iterations(self) -> bool:
        return any(has_iteration(row.fields) and has_time(row.fields) for row in self.rows)


def read_json(json_rows: JsonRows) -> Recording:
    """Return the recording of the rows. Raises UsageError if most lines are broken, or no row has the needed fields."""
    if json_rows.speakers is None:
        return read_rows(json_rows.rows)
    rows, broken = json_rows.rows, json_rows.broken
    if broken and len(broken) > len(rows):
        line, why = broken[0]
        raise UsageError(f"line {line} is not a JSON object: {why}; {len(broken)} of {len(broken) + len(rows)} are not")
    speakers = json_rows.speakers
    if speakers and not any(name in row.fields for row in rows for name in RANK_NAMES):
        rows = one_speaker(rows, lambda row: speakers.get(row.line, ""))
    recording = read_rows(rows, "line")
    remarks = list(recording.remarks)
    if broken:
        line, why = broken[0]
        several = len(broken) > 1
        words = f"{len(broken)} lines that are not JSON" if several else "1 line that is not JSON"
        remarks.insert(0, f"{words} left out, {'the first is ' if several else ''}line {line}: {why}")
    remarks += counted(json_rows.other_lines, "line without JSON")
    if len(rows) < len(json_rows.rows):
        count = len(json_rows.rows) - len(rows)
        remarks.append(f"{count} line{'s' * (count > 1)} of other ranks left out")
    return msgspec.structs.replace(recording, remarks=tuple(remarks))


def rows_of_lines(numbered: Iterable[tuple[int, str]]) -> JsonRows:
    """Return the JSON object, or Python dict, of each line that contains one."""
    rows: list[NamedRow] = []
    broken: list[tuple[int, str]] = []
    other_lines: list[int] = []
    speakers: dict[int, str] = {}
    for number, line in numbered:
        if "{" not in line or (start := _object_start(line)) < 0:
            other_lines += [number] if line.strip() else []
            continue
        try:
            rows.append(NamedRow(number, _named(_object_of(line[start:]), whole=len(rows) < ROWS_KEPT_WHOLE)))
        except (ValueError, RecursionError) as error:
            broken.append((number, f"{_reason(error)}: `{short(line)}`"))
            continue
        if start and (speaker := speaker_of(line[:start])):
            speakers[number] = speaker
    return JsonRows(rows, speakers=speakers, broken=broken, other_lines=other_lines)


def rows_of_document(text: str) -> JsonRows | None:
    """Parse a file that is one JSON document: a list of objects, or an object with `rows`, as in ours, or with
    `log_history`, as in Hugging Face's trainer_state.json. None for any other file."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    objects = 0

    def smaller(fields: dict[str, Any]) -> dict[str, Any]:
        nonlocal objects
        objects += 1
        if objects <= ROWS_KEPT_WHOLE:
            return fields
        return {
            name: value
            for name, value in fields.items()
            if name in HISTORY_KEYS or isinstance(value, dict) or is_known(usual_name(name))
        }

    try:
        whole = json.loads(text, object_hook=smaller)
    except (ValueError, RecursionError):
        return None
    history_rows, history = whole, ""
    if isinstance(whole, dict):
        history = next((name for name in HISTORY_KEYS if isinstance(whole.get(name), list)), "")
        history_rows = whole.get(history)
    if not isinstance(history_rows, list):
        return None
    rows = [row for row in history_rows if isinstance(row, dict)]
    del whole, history_rows
    rows.reverse()
    numbers = range(1, len(rows) + 1)
    return JsonRows(
        [NamedRow(number, _named(rows.pop(), whole=number <= ROWS_KEPT_WHOLE)) for number in numbers], history
    )


_HEAD = re.compile(r"[^{}\"']{0,120}(?=\{[\"'])")


def _object_start(line: str) -> int:
    """Return the position of a line's JSON object or Python dict, after any prefix of a launcher; -1 without one."""
    if line.lstrip().startswith("{"):
        return len(line) - len(line.lstrip())
    head = _HEAD.match(line)
    return head.end() if head is not None and line.rstrip().endswith("}") else -1


def _object_of(text: str) -> dict[str, Any]:
    """Parse a JSON object, or a dict as Python prints it. Raises ValueError, RecursionError."""
    if not re.match(r"\s*\{\s*'", text):
        loaded: dict[str, Any] = json.loads(text)
        return loaded
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError("too long")
    try:
        parsed = ast.literal_eval(re.sub(r"(?<=[:\s\[(,-])(?:nan|inf)\b", "None", text.strip()))
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError("not a Python dict") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a Python dict")
    return {str(name): value for name, value in parsed.items()}


def _named(row: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return a row's fields by their usual names; nested fields one level down if no other has that name. Unless
    `whole`, only the fields that rows are read by."""
    fields = {}
    for name, value in row.items():
        usual = usual_name(name)
        if isinstance(value, dict) or not usual or not (whole or is_known(usual)):
            continue
        if usual == name.lower():
            fields[usual] = value
        else:
            fields.setdefault(usual, value)
    for value in row.values():
        if isinstance(value, dict):
            for name, inner in value.items():
                usual = usual_name(str(name))
                if usual and (whole or is_known(usual)):
                    fields.setdefault(usual, inner)
    return fields


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
    if str(error) == "not a Python dict":
        return str(error)
    return "nested too deep" if isinstance(error, RecursionError) else "a number is too long"
