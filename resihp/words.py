"""Formats counts with singular or plural nouns, and sorts names with numbers in them. Pure; used for messages and
tables."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"\d+")
MAX_DIGITS = 18
"""Most digits of a part of a name that is compared as a number."""


def count_of(number: int, noun: str) -> str:
    """Return `1 rank` or `3 ranks`; the noun must form its plural with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for names that compares their numbers by value, so that n2 precedes n10.

    Very long numbers are compared as text: Python refuses to convert them.
    """
    key: list[tuple[int, int, str]] = []
    for part in re.split(r"(\d+)", name):
        if part.isdecimal() and len(part) <= MAX_DIGITS:
            key.append((0, int(part), ""))
        elif part:
            key.append((1, 0, part))
    return tuple(key)


def alike(text: str) -> str:
    """Return the text with its numbers replaced, so that texts that differ only in a rank, a port or an address become
    equal."""
    return _NUMBERS.sub("#", text)
