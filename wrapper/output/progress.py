"""How far a job is, whether it gets on, and when it will be done: from its last iterations and what it trains. Pure.

`told` is what `status` and `jobs` show of a running job. Decides nothing about it: a job that looks stuck is asked
about in words, with a question mark; the supervisor alone knows, and acts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import msgspec

from wrapper.output.render import duration

Row = dict[str, Any]

RECENT = 20
"""Iterations that its pace is read from."""
TOGETHER = 6
"""Pauses of which the mean counts as one: several iterations may be committed at once, and then there is none."""
STUCK = 5
"""Times the longest pause between the last iterations, in which were evaluations, checkpoints and recoveries."""
STUCK_LEAST_S = 60.0


class Goal(msgspec.Struct, frozen=True):
    """Of what a job declared, the last iteration, None before it has said so, and the one that it goes on from."""

    iterations: int | None = None
    resume_from: int = 0


def goal(model: str | None) -> Goal:
    """Return what a job trains, by the ledger's `model`."""
    try:
        return msgspec.json.decode(model or "{}", type=Goal)
    except (msgspec.DecodeError, UnicodeError):
        return Goal()


def progress(of: Goal, iterations: Sequence[Row], now: datetime, *, running: bool) -> Row:
    """`iteration`, `loss`, `target`, `last_iteration_at` and `tokens_per_second` of a job that trains `of`, by its last
    committed iterations, in order; while it runs, `seconds_since_iteration`, `eta_seconds` and whether it may be
    `stuck`. Before the first one, `iteration` is the one that it goes on from.

    The pace is that of the last iterations, with all that comes in between, but for a pause that is out of the usual;
    tokens per second and the time that is left are both by it.
    """
    last = iterations[-1] if iterations else None
    recent = iterations[-RECENT:]
    pauses = _pauses(recent)
    pace_s = _pace_s(pauses) if pauses else last["seconds"] if last else None
    found: Row = {
        "iteration": last["iteration"] if last else of.resume_from,
        "loss": last["loss"] if last else None,
        "target": of.iterations,
        "last_iteration_at": last["finished_at"] if last else None,
        "seconds_since_iteration": None,
        "tokens_per_second": statistics.fmean(row["tokens"] for row in recent) / pace_s if pace_s else None,
        "eta_seconds": None,
        "stuck": False,
    }
    if not running or last is None:
        return found
    age_s = max((now - last["finished_at"]).total_seconds(), 0.0)
    found["seconds_since_iteration"] = age_s
    left = (found["target"] or 0) - found["iteration"]
    if left > 0:
        found["stuck"] = age_s > longest_s(recent)
        found["eta_seconds"] = None if pace_s is None or found["stuck"] else max(left * pace_s - age_s, 0.0)
    return found


def longest_s(recent: Sequence[Row]) -> float:
    """For how long nothing may be committed after these, its last iterations, before a job looks stuck."""
    usual_s = max(_pauses(recent), default=(recent[-1]["seconds"] if recent else None) or 0.0)
    return max(STUCK_LEAST_S, STUCK * usual_s)


def _pace_s(pauses: Sequence[float]) -> float:
    """The median of means of neighbours."""
    width = min(TOGETHER, (len(pauses) + 1) // 2)
    return statistics.median(statistics.fmean(pauses[n : n + width]) for n in range(len(pauses) - width + 1))


def _pauses(recent: Sequence[Row]) -> list[float]:
    return [(b["finished_at"] - a["finished_at"]).total_seconds() for a, b in pairwise(recent)]


def ago(seconds: float) -> str:
    """`3 s ago`, `4 min 05 s ago`."""
    return f"{seconds:.0f} s ago" if seconds < 59.5 else f"{duration(seconds)} ago"


def of_target(found: Mapping[str, Any]) -> str:
    """`36 of 60`, or `36`."""
    last = found.get("target")
    return f"{found['iteration']} of {last}" if last else str(found["iteration"])
