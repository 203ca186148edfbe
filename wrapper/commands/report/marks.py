"""Marks and labels of failures, for the pictures of the report. Pure."""

from __future__ import annotations

from datetime import datetime

from resihp.wrapper.commands.report.facts import Row

MAX_FAILURES_NUMBERED = 40
"""Most failures that are numbered in the pictures; if there are more, their counts are shown."""
MAX_MARKS = 600
"""Most marks of one kind in a picture; if there are more, every n-th one is drawn."""
FAILURE_SHAPES = {"fail-stop": "cross", "fail-slow": "diamond", "communication": "square", "program": "triangle"}
"""Shape of the mark of each kind of failure in all pictures, so that colour is not the only hint."""


def failure_line(row: Row) -> str:
    """Return a label such as `failure 2 (fail-slow): rank 2 slow since iteration 40`."""
    return f"failure {row['failure']} ({row['kind']}): {row['cause']}"


def clock(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def iterations_of(row: Row) -> str:
    """Return the iteration in which a failure was noticed, or the range of iterations in which something was slow, as
    text."""
    if row["kind"] != "fail-slow":
        return str(row["iteration"])
    return f"{row['iteration']} to {row['ended_iteration'] or 'the end'}"


def inside(share: float) -> float:
    """Return a horizontal place moved inwards, so that a mark at either end is fully visible."""
    return min(max(share, 0.008), 0.992)


def every_nth(count: int) -> int:
    """Return n such that at most `MAX_MARKS` marks are drawn if every n-th of `count` marks is drawn."""
    return -(-count // MAX_MARKS) or 1
