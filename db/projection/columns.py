"""Values that every database accepts, from those of a journal: times, text, figures.

Decides how a value is changed so that it fits. Reads no file and no clock. Called by the modules beside it.
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
    """Return text that every database accepts: PostgreSQL rejects NUL, UTF-8 lone surrogates."""
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def finite(value: float | None) -> float | None:
    """Return the number, None if it is not finite: SQLite would store NULL, PostgreSQL NaN."""
    return None if value is None or not math.isfinite(value) else value
