"""JSON lines, behind whatever a launcher puts before them, and JSON documents, as rows of named fields. Pure.

    0: {"step": 1, "step_time": 1.25}
    INFO:root:{'step': 1, 'step_time': 1.25, 'loss': nan}
    {"schema": 1, "rows": [{"iteration": 1, "seconds": 1.25}, ...]}

Each object is parsed once. Only what rows are read by is kept, as the rest is most of a large file; the first rows are
kept whole, so that an error can list what they have. What is no object is left out and counted. Rows become those of
`fields`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from resihp.detector.offline.recordings.fields import NamedRow, read_rows
from resihp.detector.offline.recordings.names import RANK, has_iteration, has_time, is_known, usual_name
from resihp.detector.offline.recordings.recording import Recording, counted, one_speaker, short, speaker_of
from resihp.errors import UsageError

HISTORY_KEYS = ("rows", "log_history")
"""In a JSON document that is an object, the list of its rows."""
ROWS_KEPT_WHOLE = 100
MAX_LITERAL_CHARS = 20_000


class JsonRows(msgspec.Struct):
    """All objects of a file."""

    rows: list[NamedRow]
    history: str = ""
    """Of a document, the name of the list that its rows are in."""
    speakers: Mapping[int, str] | None = None
    """Of lines, what stands for a rank or host before the object, by the line's number. None: a document."""
    broken: Sequence[tuple[int, str]] = ()
    """Lines that begin like an object and are none, and why."""
    other: Sequence[int] = ()
    """All other lines."""

    def has_iterations(self) -> bool:
        return any(has_iteration(row.fields) for row in self.rows)

    def has_timed_iterations(self) -> bool:
        return any(has_iteration(row.fields) and has_time(row.fields) for row in self.rows)


def read_json(found: JsonRows) -> Recording:
    """Raises UsageError, naming the line, where more lines are broken than not, or none has what is needed."""
    if found.speakers is None:
        return read_rows(found.rows)
    rows, broken = found.rows, found.broken
    if broken and len(broken) > len(rows):
        line, why = broken[0]
        raise UsageError(f"line {line} is no JSON object: {why}; {len(broken)} of {len(broken) + len(rows)} are not")
    speakers = found.speakers
    if speakers and not any(name in row.fields for row in rows for name in RANK):
        rows = one_speaker(rows, lambda row: speakers.get(row.line, ""))
    recording = read_rows(rows, "line")
    remarks = list(recording.remarks)
    if broken:
        line, why = broken[0]
        several = len(broken) > 1
        words = f"{len(broken)} lines that are no JSON" if several else "1 line that is no JSON"
        remarks.insert(0, f"{words} left out, {'the first is ' if several else ''}line {line}: {why}")
    remarks += counted(found.other, "line without JSON")
    if len(rows) < len(found.rows):
        count = len(found.rows) - len(rows)
        remarks.append(f"{count} line{'s' * (count > 1)} of other ranks left out")
    return msgspec.structs.replace(recording, remarks=tuple(remarks))


def rows_of_lines(numbered: Iterable[tuple[int, str]]) -> JsonRows:
    """Parse the object in each line that has one."""
    rows: list[NamedRow] = []
    broken: list[tuple[int, str]] = []
    other: list[int] = []
    speakers: dict[int, str] = {}
    for number, line in numbered:
        if "{" not in line or (start := _object_start(line)) < 0:
            other += [number] if line.strip() else []
            continue
        try:
            rows.append(NamedRow(number, _named(_object_of(line[start:]), whole=len(rows) < ROWS_KEPT_WHOLE)))
        except (ValueError, RecursionError) as error:
            broken.append((number, f"{_reason(error)}: `{short(line)}`"))
            continue
        if start and (speaker := speaker_of(line[:start])):
            speakers[number] = speaker
    return JsonRows(rows, speakers=speakers, broken=broken, other=other)


def rows_of_document(text: str) -> JsonRows | None:
    """Parse a file that is one JSON document: a list of objects, or an object with `rows`, as ours have, or with
    `log_history`, as Hugging Face's trainer_state.json. None of any other file."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    objects = 0

    def smaller(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal objects
        objects += 1
        if objects <= ROWS_KEPT_WHOLE:
            return found
        return {
            name: value
            for name, value in found.items()
            if name in HISTORY_KEYS or isinstance(value, dict) or is_known(usual_name(name))
        }

    try:
        whole = json.loads(text, object_hook=smaller)
    except (ValueError, RecursionError):
        return None
    found, history = whole, ""
    if isinstance(whole, dict):
        history = next((name for name in HISTORY_KEYS if isinstance(whole.get(name), list)), "")
        found = whole.get(history)
    if not isinstance(found, list):
        return None
    rows = [row for row in found if isinstance(row, dict)]
    del whole, found
    rows.reverse()
    numbers = range(1, len(rows) + 1)
    return JsonRows(
        [NamedRow(number, _named(rows.pop(), whole=number <= ROWS_KEPT_WHOLE)) for number in numbers], history
    )


_HEAD = re.compile(r"[^{}\"']{0,120}(?=\{[\"'])")


def _object_start(line: str) -> int:
    """Where a line's JSON object, or Python's dict, begins: behind what a launcher or a logger puts before it. -1
    without any."""
    if line.lstrip().startswith("{"):
        return len(line) - len(line.lstrip())
    head = _HEAD.match(line)
    return head.end() if head is not None and line.rstrip().endswith("}") else -1


def _object_of(text: str) -> dict[str, Any]:
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


def _named(row: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Return its fields by their usual names, and those one level down where no other has that name; those that rows
    are read by alone unless it is to be kept whole."""
    found = {}
    for name, value in row.items():
        usual = usual_name(name)
        if isinstance(value, dict) or not usual or not (whole or is_known(usual)):
            continue
        if usual == name.lower():
            found[usual] = value
        else:
            found.setdefault(usual, value)
    for value in row.values():
        if isinstance(value, dict):
            for name, inner in value.items():
                usual = usual_name(str(name))
                if usual and (whole or is_known(usual)):
                    found.setdefault(usual, inner)
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
    if str(error) == "no dict of Python's":
        return str(error)
    return "nested too deep" if isinstance(error, RecursionError) else "a number is too long"
