"""Words of messages that depend on a number. Pure."""

from __future__ import annotations


def count_of(number: int, noun: str) -> str:
    """`1 rank`, `3 ranks`; the noun takes a plain s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
