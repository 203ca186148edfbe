"""The findings of `resihp analyze` about a file: facts, and their JSON exactly as in the interface. Pure; decides
nothing.

Made by `resihp.detector.offline.series` (logs and CSV) and `resihp.detector.offline.operations` (per-operation traces),
shown by `wrapper.commands.analyze`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 1

Kind = Literal["megatron-log", "resihp-log", "series", "operations"]
Verdict = Literal["fail-slow", "recovered", "workload"]


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The suspected place, as far as the data shows it."""

    dp: int | None = None
    stage: int | None = None
    rank: int | None = None


class SpeedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that began with `iteration` of a run and was known after `detected_at`."""

    run: int
    iteration: int
    detected_at: int
    end: int | None = None
    """First iteration after it; None if it lasts to the end of the run, and for a recovery."""
    change: float
    """Iteration time over the former one, minus 1: of a fail-slow against healthy, of a recovery against slow (< 0)."""
    verdict: Verdict
    where: Where | None = None
    cost_seconds: float | None = None
    """For a fail-slow: seconds lost by it, if all wait for the slow part; None if unknown."""
    sizes: tuple[tuple[int, float], ...] = ()
    """If its size changed while it lasted: first iteration and change of each part, including the first."""
    ranks: tuple[int, ...] = ()
    """If several ranks became slow together, by about the same factor: all of them; `where` is then None."""
    confidence: float = 1.0
    """Confidence of the finding; not in the JSON."""


class RankScore(msgspec.Struct, frozen=True, kw_only=True):
    """min(slow-down of its dp rank, slow-down of its stage), each with everything but that one idealised."""

    dp: int
    stage: int
    slowdown: float


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `resihp analyze FILE --json` prints, and remarks for the reader. Seconds."""

    kind: Kind
    runs: int
    iterations: int
    healthy_seconds: float
    """Median iteration time while nothing is wrong."""
    events: tuple[SpeedChange, ...] = ()
    ranks: tuple[RankScore, ...] = ()
    slowdown: float | None = None
    ideal_seconds: float | None = None
    mw: float | None = None
    ms: float | None = None
    known: str = "plain times"
    """Basis of healthy times: `plain times` (robust statistics of the times alone), `workload`, `peers`."""
    remarks: tuple[str, ...] = ()
    """Facts needed to read the figures: lines left out, times that are means over several iterations."""


def ranked(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Sort slow-downs by descending cost; then all other events, and those of unknown cost, in their order."""
    return sorted(events, key=lambda event: -(event.cost_seconds or 0.0) if event.verdict == "fail-slow" else math.inf)


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Return the object that `--json` prints. The printer turns numbers that are not finite into null."""
    return {
        "schema": SCHEMA_VERSION,
        "kind": analysis.kind,
        "runs": analysis.runs,
        "iterations": analysis.iterations,
        "healthy_seconds": analysis.healthy_seconds,
        "events": [
            {
                "run": event.run,
                "iteration": event.iteration,
                "detected_at": event.detected_at,
                "end": event.end,
                "change": event.change,
                "verdict": event.verdict,
                "where": None
                if event.where is None
                else {"dp": event.where.dp, "stage": event.where.stage, "rank": event.where.rank},
                "cost_seconds": event.cost_seconds,
                "ranks": list(event.ranks),
                "sizes": [{"iteration": iteration, "change": change} for iteration, change in event.sizes],
            }
            for event in ranked(analysis.events)
        ],
        "ranks": [{"dp": score.dp, "stage": score.stage, "slowdown": score.slowdown} for score in analysis.ranks],
        "slowdown": analysis.slowdown,
        "ideal_seconds": analysis.ideal_seconds,
        "mw": analysis.mw,
        "ms": analysis.ms,
    }
