"""Converts values of a journal (times, texts, figures) into values that every database accepts.

Decides how a value is changed so that it fits. Reads no file and no clock. Called by the other modules of this package.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

MAX_TEXT = 8192


def moment(at: float) -> datetime:
    """Convert seconds since 1970 to a time. Raises ValueError for a value that is not a time."""
    try:
        return datetime.fromtimestamp(at, UTC)
    except (OverflowError, OSError) as error:
        raise ValueError(f"{at!r} is not a time: {error}") from error


def stored_text(text: str) -> str:
    """Return a text that every database accepts, cut to `MAX_TEXT` characters: PostgreSQL rejects NUL, and UTF-8 lone
    surrogates."""
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def finite(value: float | None) -> float | None:
    """Return `value`; None if it is not finite, since SQLite would store NULL and PostgreSQL NaN."""
    return None if value is None or not math.isfinite(value) else value
