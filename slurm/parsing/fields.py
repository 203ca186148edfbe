"""Fields of the records that Slurm's commands print: the format that requests them, and their parsing. Pure.

Each field is terminated by a control character that no sensible value contains, so that spaces, bars or line breaks in
a reason or in a job's name cannot shift the fields. Decides whether an answer has the requested form; raises
SlurmOutputError if not. Called by `resihp.slurm.parsing.parse`.
"""

from __future__ import annotations

import re

from resihp.slurm.errors import SlurmOutputError

FIELD, RECORD = "\x1f", "\x1e"
"""Terminators of a field, and of the last field of a record."""
COUNT_PATTERN = re.compile(r"[0-9]{1,15}", re.ASCII)
EXCERPT_LENGTH = 80
"""Number of characters of an answer that an error message quotes."""
MISSING_VALUES = ("", "N/A", "None", "(null)")
"""Values that Slurm prints in place of a missing value."""


def format_of(fields: tuple[str, ...]) -> str:
    """Return a format for the option `-O`. A field with a terminator and without a size is printed whole, neither
    padded nor cut."""
    return ",".join(f"{field}:{RECORD if field == fields[-1] else FIELD}" for field in fields)


def read_records(output: bytes, width: int, command: str) -> list[list[str]]:
    """Return the fields of each record. Raises SlurmOutputError if a record has another number of fields than
    `width`."""
    rows = read_rows(output, command)
    for fields in rows:
        if len(fields) != width:
            raise wrong_width(command, fields, width)
    return rows


def read_rows(output: bytes, command: str) -> list[list[str]]:
    """Return the fields of each record. Raises SlurmOutputError if text follows the last record, which means that the
    output was cut off."""
    text = decoded(output, command)
    *records, rest = text.split(RECORD)
    if rest.strip():
        whole = f"{len(records)} record{'s' * (len(records) != 1)}"
        raise SlurmOutputError(f"slurm: {command}'s output is cut off after {whole}")
    # Releases that pad fields do so with spaces.
    return [[field.strip(" ") for field in record.removeprefix("\n").split(FIELD)] for record in records]


def wrong_width(command: str, fields: list[str], width: int) -> SlurmOutputError:
    """Return the error for a record that does not have the requested number of fields."""
    return unreadable(command, f"a record of {len(fields)} fields instead of {width}", " ".join(fields))


def decoded(output: bytes, command: str) -> str:
    """Decode a command's output. Names and states are ASCII and are checked; other bytes occur only in users' texts,
    and are replaced. Raises SlurmOutputError for output with NUL bytes."""
    if b"\0" in output:
        raise SlurmOutputError(f"slurm: {command}'s output is not text")
    return output.decode("utf-8", "replace")


def time_of(text: str, subject: str) -> float | None:
    """Return a time in seconds since 1970; None if it is missing. All commands are run so that they print times in this
    form."""
    return None if text in ("", "N/A", "Unknown", "None", "(null)") else float(count_of(text, subject))


def count_of(text: str, subject: str) -> int:
    """Return a non-negative number. Raises SlurmOutputError about `subject` if it cannot be parsed."""
    if not COUNT_PATTERN.fullmatch(text):
        raise unreadable("slurm", subject, text)
    return int(text)


def unreadable(command: str, subject: str, text: str) -> SlurmOutputError:
    """Return the error for an answer in which `subject` cannot be parsed."""
    return SlurmOutputError(f"slurm: cannot read {subject} in {command}'s output: {text[:EXCERPT_LENGTH]!a}")
