"""What `resihp analyze` found in a file: facts, and their JSON exactly as the interface has it. Pure; decides nothing.

Made by `resihp.detector.offline.series` (logs and CSV) and `resihp.detector.offline.operations` (per-operation traces),
shown by `wrapper.commands.analyze`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

SCHEMA = 1

Kind = Literal["megatron-log", "resihp-log", "series", "operations"]
Verdict = Literal["fail-slow", "recovered", "workload"]


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Who is suspected, as far as the data tell."""

    dp: int | None = None
    stage: int | None = None
    rank: int | None = None


class SpeedChange(msgspec.Struct, frozen=True, kw_only=True):
    """Something that began with `iteration` of a run and was known after `detected_at`."""

    run: int
    iteration: int
    detected_at: int
    end: int | None = None
    """First iteration that is no longer so; None where it lasts to the end of the run, and of a recovery."""
    change: float
    """Iteration time over the one before, less 1: of a fail-slow against healthy, of a recovery against slow (< 0)."""
    verdict: Verdict
    where: Where | None = None
    cost_seconds: float | None = None
    """Of a fail-slow: seconds lost by it, if everybody waits for who is slow; None where it is not known."""
    sizes: tuple[tuple[int, float], ...] = ()
    """Where its size changed while it lasted: first iteration and change of each part, the first one included."""
    ranks: tuple[int, ...] = ()
    """Of several ranks that became slow together, by about the same factor: all of them; `where` is then None."""
    confidence: float = 1.0
    """Not in the JSON."""


class RankScore(msgspec.Struct, frozen=True, kw_only=True):
    """min(slow-down of its dp rank, of its stage), each from idealising all but that one."""

    dp: int
    stage: int
    slowdown: float


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """All that `resihp analyze FILE --json` prints, and what it tells a reader besides. Seconds."""

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
    """What healthy times were told from: `plain times` (robust statistics of the times alone), `workload`, `peers`."""
    remarks: tuple[str, ...] = ()
    """What a reader must know to read the figures: lines left out, times that are means over several iterations."""


def ranked(events: Sequence[SpeedChange]) -> list[SpeedChange]:
    """Slow-downs by what they cost, the dearest first; then the rest, and those of unknown cost, as they came."""
    return sorted(events, key=lambda event: -(event.cost_seconds or 0.0) if event.verdict == "fail-slow" else math.inf)


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The object that `--json` prints. Numbers that are not finite are the printer's to turn into null."""
    return {
        "schema": SCHEMA,
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
