"""Compare the reasons for which rounds of a script ended."""

from __future__ import annotations

from resihp.words import alike


def is_same(reason: str, before: str) -> bool:
    """Return whether two rounds ended for the same reason. The loss of another node is another reason; the same error
    on another rank is not. What followed from the failure, after a semicolon, does not matter."""
    if reason.startswith("node "):
        return reason == before
    return alike(reason.partition("; ")[0]) == alike(before.partition("; ")[0])
