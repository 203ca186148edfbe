"""What both pictures over time share: how a failure is marked and called. Pure."""

from __future__ import annotations

from datetime import datetime

from wrapper.commands.report.facts import Row

NAMED = 40
"""Failures up to which each one has its number in the pictures; more than that are told by how many they were."""
SEEN = 600
"""Marks of one kind in a picture; of more, every n-th one is drawn, evenly."""
SIGNS = {"fail-stop": "cross", "fail-slow": "diamond", "communication": "square", "program": "triangle"}
"""How a failure of each kind is marked, in every picture: told by form as well as by colour."""


def failure_line(row: Row) -> str:
    """`failure 2 (fail-slow): rank 2 slow since iteration 40`."""
    return f"failure {row['failure']} ({row['kind']}): {row['cause']}"


def clock(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def iterations_of(row: Row) -> str:
    """The iterations of a failure: where it was noticed, or from where to where something was slow."""
    if row["kind"] != "fail-slow":
        return str(row["iteration"])
    return f"{row['iteration']} to {row['ended_iteration'] or 'the end'}"


def inside(share: float) -> float:
    """A place so that a mark at either end is seen whole."""
    return min(max(share, 0.008), 0.992)


def every_nth(count: int) -> int:
    """Of so many marks, each how manieth is drawn."""
    return -(-count // SEEN) or 1
