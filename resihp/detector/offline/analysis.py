"""Defines the result of `resihp analyze` for a file, and its JSON. Pure; judges nothing.

Made by `resihp.detector.offline.series` (logs and CSV) and `resihp.detector.offline.operations` (per-operation traces);
printed by `resihp.wrapper.commands.analyze`.
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
    """The suspected place: data-parallel rank, stage and rank; None for a part that the data does not show."""

    dp: int | None = None
    stage: int | None = None
    rank: int | None = None


class SpeedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A slow-down, a recovery, or a change of workload."""

    run: int
    """Number of the run in the file, from 0."""
    iteration: int
    """First iteration of the change."""
    detected_at: int
    """Iteration after which an observer would have known of the change."""
    end: int | None = None
    """First iteration after the change; None if it lasts to the end of the run, and for a recovery."""
    change: float
    """Iteration time over the former iteration time, minus 1: of a slow-down relative to healthy, of a recovery
    relative to slow (below 0)."""
    verdict: Verdict
    where: Where | None = None
    cost_seconds: float | None = None
    """For a slow-down: seconds that the job lost if all ranks waited for the slow part; None if unknown."""
    sizes: tuple[tuple[int, float], ...] = ()
    """If the size changed during the slow-down: first iteration and `change` of each part, in order; else empty."""
    ranks: tuple[int, ...] = ()
    """Ranks that became slow together, by about the same factor; `where` is then None. Empty for a single rank."""
    confidence: float = 1.0
    """Probability that the finding is right; not in the JSON."""


class RankScore(msgspec.Struct, frozen=True, kw_only=True):
    """The slow-down of the rank at a data-parallel rank and a stage.

    It is the lower of two simulated slow-downs: that of the data-parallel rank, and that of the stage, each with ideal
    durations of all other operations.
    """

    dp: int
    stage: int
    slowdown: float


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `resihp analyze` for a file. All times in seconds."""

    kind: Kind
    runs: int
    iterations: int
    healthy_seconds: float
    """Median iteration time while nothing is slow."""
    events: tuple[SpeedChange, ...] = ()
    ranks: tuple[RankScore, ...] = ()
    slowdown: float | None = None
    ideal_seconds: float | None = None
    mw: float | None = None
    ms: float | None = None
    known: str = "plain times"
    """Basis of healthy times: `plain times` (iteration times alone), `workload`, or `peers` (other ranks)."""
    remarks: tuple[str, ...] = ()
    """Remarks for the reader, such as lines left out, or times that are means over several iterations."""


def ranked(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Return the events: slow-downs by descending cost, then slow-downs of unknown cost, then all others, in order."""
    return sorted(events, key=lambda event: -(event.cost_seconds or 0.0) if event.verdict == "fail-slow" else math.inf)


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Return the JSON object of `resihp analyze --json`. NaN and infinities become null when it is printed."""
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
