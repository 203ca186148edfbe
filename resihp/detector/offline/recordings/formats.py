"""What a file of iteration times is, told by its content, and who reads it. Pure functions of bytes; no files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from resihp.detector.offline.recordings.console_log import is_ours, read_console
from resihp.detector.offline.recordings.fields import ITERATION, TIMES, named, object_of, object_start, read_json
from resihp.detector.offline.recordings.megatron_log import ELAPSED, HEAD, read_log
from resihp.detector.offline.recordings.named_tables import is_table, read_table, without_times
from resihp.detector.offline.recordings.recording import Recording, numbered_lines, short, text_of
from resihp.detector.offline.recordings.tables import columns_told, header_of, read_csv
from resihp.detector.offline.recordings.text_logs import lines_without_times, read_text_log, tool_of
from resihp.errors import UsageError

PARQUET = b"PAR1"

Format = Literal["parquet", "megatron-log", "resihp-log", "csv", "table", "text-log", "json"]


def recognise(content: bytes) -> Format:
    """Raises UsageError with what was expected and the nearest thing found."""
    if content[:4] == PARQUET:
        return "parquet"
    text = text_of(content)
    if not text.strip():
        raise UsageError(
            "the file is empty; expected a log of Megatron-LM or resihp, JSON lines, a CSV of iteration times, or a "
            "parquet trace"
        )
    header = header_of(text)
    if "iteration" in header and ("seconds" in header or "milliseconds" in header):
        return "csv"
    lines = [line for _, line in numbered_lines(text)]
    if any("|" in line and HEAD.search(line) and ELAPSED.search(line) for line in lines):
        return "megatron-log"
    if any(map(is_ours, lines)):
        return "resihp-log"
    if is_table(header):
        return "table"
    is_document = re.match(r"\s*(\{\s*\"|\[\s*\{)", text) is not None
    if not is_document and any(map(_is_timed_row, lines)):
        return "json"
    if tool_of(lines):
        return "text-log"
    if is_document or any(map(_is_row, lines)):
        return "json"
    if why := without_times(header) or lines_without_times(lines):
        raise UsageError(why)
    raise UsageError(
        "neither a Megatron-LM log (`iteration N/ M | ... elapsed time per iteration (ms): X | ...`), nor one of NeMo, "
        "DeepSpeed, torchtitan, nanotron or MaxText, nor progress bars, nor what resihp run prints, nor JSON lines "
        "with an iteration and a time, nor a CSV with columns `iteration` and `seconds` or `milliseconds`, nor a "
        "parquet trace; " + _nearest(text, header)
    )


def read(content: bytes) -> Recording:
    """A text of any of these. Raises UsageError where it is none, or holds no usable iteration time."""
    kind = recognise(content)
    if kind == "parquet":
        raise UsageError("a parquet file is no text; it is read as a table")
    readers = {
        "megatron-log": read_log,
        "resihp-log": read_console,
        "csv": read_csv,
        "table": read_table,
        "text-log": read_text_log,
        "json": read_json,
    }
    return usable(readers[kind](content))


def usable(recording: Recording) -> Recording:
    """Raises UsageError where no iteration has a time."""
    if not any(run.points or run.ranks for run in recording.runs):
        raise UsageError(f"no iteration has a usable time: {'; '.join(recording.remarks) or 'nothing was read'}")
    return recording


def _is_row(line: str) -> bool:
    row = _row_in(line)
    return any(name in row for name in ITERATION)


def _is_timed_row(line: str) -> bool:
    row = _row_in(line)
    return any(name in row for name in ITERATION) and any(name in row for name in TIMES)


def _row_in(line: str) -> dict[str, Any]:
    """Fields of the object in a line, if it is one."""
    if "{" not in line or (start := object_start(line)) < 0:
        return {}
    try:
        return named(object_of(line[start:]))
    except (ValueError, RecursionError):
        return {}


def _nearest(text: str, header: Sequence[str]) -> str:
    """What comes closest to something readable."""
    lines = list(numbered_lines(text))
    for pattern, lacks in ((ELAPSED, "no `iteration N/ M |` before it"), (HEAD, "no `elapsed time per iteration`")):
        near = next((each for each in lines if pattern.search(each[1])), None)
        if near is not None:
            return f"nearest: line {near[0]}, `{short(near[1])}`, with {lacks}"
    near = next((each for each in lines if re.search(r"\b(iter|step)\w*\b", each[1], re.IGNORECASE)), None)
    if len(header) > 1 and (near is None or near[1].strip().lower().startswith(header[0])):
        return columns_told(header)
    number, line = near if near is not None else next(each for each in lines if each[1].strip())
    return f"nearest: line {number}, `{short(line)}`"
