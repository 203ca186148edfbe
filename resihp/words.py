"""Formats counts with singular or plural nouns, and sorts names with numbers in them. Pure; used for messages and
tables."""

from __future__ import annotations

import re


def count_of(number: int, noun: str) -> str:
    """Return `1 rank` or `3 ranks`; the noun must form its plural with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for names that compares their numbers by value, so that n2 precedes n10."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
