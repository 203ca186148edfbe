"""Parses the values of fields: numbers, and moments in all forms in which programs write them. Pure.

Decides on the unit of a moment. Never decides which field is a clock (`fields`). Called by the readers of rows.
"""

from __future__ import annotations

import math
import re
from datetime import datetime

ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x07\x08]")
IN_MILLISECONDS, IN_MICROSECONDS, IN_NANOSECONDS = 1e11, 1e14, 1e17
"""Smallest number that is taken for a moment in milliseconds, microseconds or nanoseconds since 1970."""


WITH_THOUSANDS_COMMAS = re.compile(r"\s*[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?\s*")
"""`1,250.5`, as spreadsheets write it in quotes."""


def number_in(text: str) -> float:
    """Return the number that `text` contains, as Python or a spreadsheet writes it; NaN for any other text."""
    if "," in text and WITH_THOUSANDS_COMMAS.fullmatch(text):
        text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        return math.nan


def number_of(value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, str):
        of_total = _OF_TOTAL.fullmatch(value)
        return number_in(value if of_total is None else of_total[1])
    if isinstance(value, bool) or not isinstance(value, int):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


_OF_TOTAL = re.compile(r"\s*(\d{1,15})\s*/\s*\d{1,15}\s*")
"""`5/100`, as some programs write an iteration."""


def least_0(value: object) -> float | None:
    number = number_of(value)
    return number if math.isfinite(number) and number >= 0 else None


def moment_in(value: object, unit_s: float = 1.0) -> float:
    """Return a moment in seconds since some origin; NaN if `value` is none. `unit_s`: unit of a number, in seconds."""
    if isinstance(value, datetime):
        return value.timestamp()
    number = number_of(value)
    if math.isfinite(number):
        if unit_s != 1.0:
            return number * unit_s
        larger = ((IN_NANOSECONDS, 1e9), (IN_MICROSECONDS, 1e6), (IN_MILLISECONDS, 1e3))
        return number / next((in_a_second for bound, in_a_second in larger if number > bound), 1.0)
    text = str(value).strip()
    if (passed := _PASSED.fullmatch(text) or (_PASSED_IN_WORDS.fullmatch(text) if text else None)) is not None:
        days, hours, minutes, seconds = (float(part or 0) for part in passed.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    try:
        return datetime.fromisoformat(text.replace(",", ".").replace("/", "-")).timestamp()
    except (ValueError, OverflowError, OSError):
        return math.nan


_PASSED = re.compile(r"(?:(\d{1,5}) days?, )?(?:(\d{1,6}):)?(\d{1,2}):(\d{2}(?:\.\d+)?)")
"""`1 day, 2:03:04`, `2:03:04`, `03:04.5`: elapsed time, as Python and progress bars write it."""

_PASSED_IN_WORDS = re.compile(r"(?:(\d{1,5})d ?)?(?:(\d{1,6})h ?)?(?:(\d{1,3})m(?:in)? ?)?(?:(\d{1,6}(?:\.\d+)?)s)?")
"""`1h 2m 3s`."""


def in_whole_seconds(value: object) -> bool:
    if isinstance(value, str):
        text = value.strip()
        if text.isdecimal():
            return float(text) < IN_MILLISECONDS
        return not math.isfinite(number_of(text)) and not re.search(r"\d[.,]\d+s?(?:$|[+Z-])", text)
    return isinstance(value, int) and not isinstance(value, bool) and value < IN_MILLISECONDS
