"""The exception for a broken invariant, and the function that raises it.

Contains no invariant: these are in the other modules of this folder, and in `rules`, `allocation` and `stopping`.
Called by all modules of the simulator.
"""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant is broken. The message contains the seed and the end of the log."""


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


TOLERANCE_S = 1e-6
"""Maximum difference in seconds between two times that rounding can explain."""
