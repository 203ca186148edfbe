"""What later attempts of the same run committed again, and was of no use in the earlier one. Pure; reads nothing.

Attempts belong to the same run that go on from each other's checkpoints, or that Slurm requeued (`jobs.run`). They may
be in several ledgers, and in the same one twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Again = Sequence[tuple[int, int]]
"""First and last iterations of what was committed again; in order, and apart from each other."""


def committed_again(attempts: Iterable[Row]) -> dict[str, Again]:
    """By `uuid`, what later attempts of the same run committed again. Attempts: `uuid`, `run`, `started_at`, and their
    `first` and `last` iterations; each once, however often it is told."""
    runs: dict[str, dict[str, Row]] = {}
    for row in attempts:
        if row["run"] and row["first"] is not None:
            runs.setdefault(row["run"], {})[row["uuid"]] = row
    found: dict[str, Again] = {}
    for of_run in runs.values():
        later: list[tuple[int, int]] = []
        for row in sorted(of_run.values(), key=lambda row: (row["started_at"], row["uuid"]), reverse=True):
            mine = row["first"], row["last"]
            if both := [(max(a, mine[0]), min(b, mine[1])) for a, b in later if a <= mine[1] and b >= mine[0]]:
                found[row["uuid"]] = both
            later = _joined([*later, mine])
    return found


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same iterations, in order, in ranges that do not touch."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
