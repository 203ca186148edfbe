"""The exception of a broken invariant, and the check that raises it.

It holds no invariant itself: those are in the other modules of this folder, and in `rules`, `allocation` and
`stopping`. Called by all modules of the simulator.
"""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant does not hold; the message contains the seed and the end of the log."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


TOLERANCE_S = 1e-6
"""Difference between two times that rounding explains."""
