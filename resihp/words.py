"""Words of messages whose form depends on a number, and the order of names. Pure."""

from __future__ import annotations

import re


def count_of(number: int, noun: str) -> str:
    """Return `1 rank` or `3 ranks`; the noun must form its plural with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts n2 before n10."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
