"""Recognises the format of iteration times by their content, and chooses the reader. Takes bytes, opens no file.
Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from resihp.detector.offline.recordings.console_log import is_ours, read_console
from resihp.detector.offline.recordings.json_rows import JsonRows, read_json, rows_of_document, rows_of_lines
from resihp.detector.offline.recordings.megatron_log import ELAPSED_TIME, ITERATION_HEAD, read_log
from resihp.detector.offline.recordings.named_tables import export_without_times, is_table, read_table
from resihp.detector.offline.recordings.names import JOB_NAMES
from resihp.detector.offline.recordings.recording import Recording, numbered_lines, short, text_of
from resihp.detector.offline.recordings.tables import describe_columns, header_of, read_csv
from resihp.detector.offline.recordings.text_logs import reader_of
from resihp.errors import UsageError

PARQUET_MAGIC = b"PAR1"
COMPRESSED_FORMATS = (
    (b"\x1f\x8b", "gzip", "zcat"),
    (b"\xfd7zXZ\x00", "xz", "xzcat"),
    (b"BZh", "bzip2", "bzcat"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"),
)
"""First bytes, name, and the command that prints the text."""
EVENT_FILE_MARK = b"brain.Event:"
"""Occurs in the first record of a TensorBoard event file."""
SQLITE_HEADER = b"SQLite format 3\x00"
TRAINER_FIELDS = frozenset({"loss", "learning_rate", "epoch"})
"""Fields of each dict that Hugging Face's Trainer prints."""

Format = Literal["parquet", "megatron-log", "resihp-log", "csv", "table", "text-log", "json"]


class _Source(NamedTuple):
    """A file's format and its reader; the reader raises UsageError."""

    format: Format
    read: Callable[[], Recording]


def recognise(content: bytes) -> Format:
    """Return the format of a file. Raises UsageError for an unknown one, with the expected formats and a hint."""
    return _source_of(content).format


def read(content: bytes) -> Recording:
    """Read a text of any known format. Raises UsageError for other formats, and if no iteration has a usable time."""
    return usable(_source_of(content).read())


def _source_of(content: bytes) -> _Source:
    if content[:4] == PARQUET_MAGIC:
        return _Source("parquet", _refuse_parquet)
    if why := _no_text(content):
        raise UsageError(why)
    text = text_of(content)
    if not text.strip():
        raise UsageError(
            "the file is empty; expected a log of Megatron-LM or resihp, JSON lines, a CSV of iteration times, or a "
            "parquet trace"
        )
    header = header_of(text)
    if _is_our_table(header):
        return _Source("csv", partial(read_csv, content))
    numbered = list(numbered_lines(text))
    if any("|" in line and ITERATION_HEAD.search(line) and ELAPSED_TIME.search(line) for _, line in numbered):
        return _Source("megatron-log", partial(read_log, content))
    if any(is_ours(line) for _, line in numbered):
        return _Source("resihp-log", partial(read_console, content))
    if is_table(header):
        return _Source("table", partial(read_table, content))
    return _source_of_rows(text, header, numbered)


def _source_of_rows(text: str, header: Sequence[str], numbered: Sequence[tuple[int, str]]) -> _Source:
    """Return the source of a text that is a trainer's log or JSON. Raises UsageError for any other text."""
    # A trainer's log may contain a line of JSON.
    begins_as_json = re.match(r"\s*(\{\s*\"|\[\s*\{)", text) is not None
    rows = None if begins_as_json else rows_of_lines(numbered)
    if rows is not None and rows.has_timed_iterations():
        return _Source("json", partial(_read_json, rows))
    if (reader := reader_of(numbered)) is not None:
        return _Source("text-log", reader)
    if rows is None:
        rows = rows_of_document(text) or rows_of_lines(numbered)
    if begins_as_json or rows.has_iterations():
        return _Source("json", partial(_read_json, rows))
    if why := export_without_times(header) or _trainer_without_times(rows):
        raise UsageError(why)
    raise UsageError(
        "neither a Megatron-LM log (`iteration N/ M | ... elapsed time per iteration (ms): X | ...`), nor one of NeMo, "
        "DeepSpeed, torchtitan, nanotron or MaxText, nor progress bars, nor output of resihp run, nor JSON lines "
        "with an iteration and a time, nor a CSV with columns `iteration` and `seconds` or `milliseconds`, nor a "
        "parquet trace; " + _nearest(numbered, header)
    )


def _is_our_table(header: Sequence[str]) -> bool:
    """Return whether a CSV has resihp's own column names, and no column for jobs."""
    has_time = "seconds" in header or "milliseconds" in header
    return "iteration" in header and has_time and not any(name in JOB_NAMES for name in header)


def _refuse_parquet() -> Recording:
    raise UsageError("a parquet file is not text; it is read as a table")


def _no_text(content: bytes) -> str:
    """Return the reason why a binary file cannot be read, with the command to type instead; empty for other files."""
    for magic, name, command in COMPRESSED_FORMATS:
        if content.startswith(magic):
            return f"is compressed with {name}; type: {command} FILE | resihp analyze -"
    if EVENT_FILE_MARK in content[:64]:
        return "is TensorBoard's event file: export the scalar as CSV (its download link), and analyze that"
    if content.startswith(SQLITE_HEADER):
        return (
            "is an SQLite database; if it is a resihp ledger: resihp history iterations JOB --json | resihp analyze -"
        )
    return ""


def _read_json(rows: JsonRows) -> Recording:
    try:
        return read_json(rows)
    except UsageError:
        if why := _trainer_without_times(rows):
            raise UsageError(why) from None
        raise


def _trainer_without_times(rows: JsonRows) -> str:
    """Return the reason why rows of Hugging Face's Trainer cannot be read, with the alternative; empty for other
    rows."""
    if rows.history == "log_history":
        trainer_output = "trainer_state.json of Hugging Face's Trainer: its log_history has steps and losses, no times"
    elif any(row.fields.keys() >= TRAINER_FIELDS for row in rows.rows):
        trainer_output = "lines of Hugging Face's Trainer: its dicts have neither step nor time"
    else:
        return ""
    return (
        f"{trainer_output}; pass the run's output with its progress bars (stderr), or its TensorBoard or "
        "Weights & Biases export as CSV"
    )


def usable(recording: Recording) -> Recording:
    """Return `recording` itself. Raises UsageError if none of its iterations has a time."""
    if not any(run.points or run.ranks for run in recording.runs):
        raise UsageError(f"no iteration has a usable time: {'; '.join(recording.remarks) or 'nothing was read'}")
    return recording


def _nearest(lines: Sequence[tuple[int, str]], header: Sequence[str]) -> str:
    """Return a hint for an error message: the line, or the columns, most similar to a readable format."""
    for pattern, lacks in (
        (ELAPSED_TIME, "no `iteration N/ M |` before it"),
        (ITERATION_HEAD, "no `elapsed time per iteration`"),
    ):
        near = next((numbered_line for numbered_line in lines if pattern.search(numbered_line[1])), None)
        if near is not None:
            return f"nearest: line {near[0]}, `{short(near[1])}`, with {lacks}"
    near = next(
        (numbered_line for numbered_line in lines if re.search(r"\b(iter|step)\w*\b", numbered_line[1], re.IGNORECASE)),
        None,
    )
    if len(header) > 1 and (near is None or near[1].strip().lower().startswith(header[0])):
        return describe_columns(header)
    number, line = (
        near if near is not None else next(numbered_line for numbered_line in lines if numbered_line[1].strip())
    )
    return f"nearest: line {number}, `{short(line)}`"
