"""Words of messages whose form depends on a number. Pure."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """Return `1 rank` or `3 ranks`; the noun must form its plural with an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
