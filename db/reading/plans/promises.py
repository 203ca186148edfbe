"""Promises of plans, and whether they were kept. Pure; reads nothing. Called by `history promises` and the report.

A plan *promises* a ratio: its predicted iteration time over that of the previous plan, both under the conditions of the
decision (`plans.predicted`, `plans.present`). If the previous plan could no longer run, the ratio is to the prediction
that was made when the previous plan was decided. The ratio that the plan *kept* is measured: the median of seconds per
token after the change, over the median before, from iterations during which nothing else changed. "Before" are the
iterations to which the prediction refers.

A promise is broken if iterations take more than `PROMISE_TOLERANCE` longer than promised, and exceed this by more than
twice the standard error of the medians; being faster breaks no promise. If the excess is smaller, or with fewer than
`MIN_ITERATIONS` iterations before or after, the verdict is open.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

PROMISE_TOLERANCE = 0.10
MIN_ITERATIONS = 4
"""Fewest iterations needed before and after the change. The first iteration under a plan is omitted, because it
includes one-time set-up."""
MAX_ITERATIONS = 200
"""Most iterations used before and after the change: those nearest to it."""


def promises(plans: Sequence[Row], iterations: Sequence[Row], failures: Sequence[Row]) -> list[Row]:
    """Return one row per plan that took effect, in order, from the rows of one job.

    `epoch`, `reason`, `promised` and `kept` (ratios of iteration times, below 1 is faster), `verdict` (`kept`,
    `broken`, `too short to tell`, `promised nothing`), `before` and `after` (numbers of measured iterations),
    `predicted`, `present`, `unit` as in `plans`.
    """
    by_epoch: dict[int, list[Row]] = {}
    for row in iterations:
        by_epoch.setdefault(row["epoch"], []).append(row)
    changes = sorted(
        {
            at
            for row in failures
            if row["kind"] == "fail-slow"
            for at in (row["iteration"], row["ended_iteration"])
            if at is not None
        }
    )
    rows = []
    former: Row | None = None
    for plan in sorted(plans, key=lambda row: row["epoch"]):
        if plan["in_effect_at"] is None:
            continue
        promised, against_present = _promised(plan, former)
        before: list[float] = []
        after = rates(iterations_before_change(by_epoch.get(plan["epoch"], []), changes))
        if former is not None and promised is not None:
            theirs = by_epoch.get(former["epoch"], [])
            before = rates(
                _latest_ones(theirs, changes) if against_present else iterations_before_change(theirs, changes)
            )
        kept, error = ratio(after, before)
        rows.append(
            {
                "epoch": plan["epoch"],
                "reason": plan["reason"],
                "promised": promised,
                "kept": kept,
                "verdict": _verdict(promised, kept, error),
                "before": len(before),
                "after": len(after),
                "predicted": plan["predicted"],
                "present": plan["present"],
                "unit": plan["unit"],
            }
        )
        former = plan
    return rows


def _promised(plan: Row, former: Row | None) -> tuple[float | None, bool]:
    """Return the promised ratio (None if nothing was promised), and whether it refers to the previous plan under the
    conditions of the decision."""
    if former is None or plan["predicted"] is None:
        return None, False
    if plan["present"] is not None:
        return plan["predicted"] / plan["present"], True
    if former["predicted"] is not None and former["unit"] == plan["unit"]:
        return plan["predicted"] / former["predicted"], False
    return None, False


def iterations_before_change(rows: Sequence[Row], changes: Sequence[int]) -> list[Row]:
    """Return the iterations of a plan, without its first one, up to the first change: something became slow, or healthy
    again."""
    if not rows:
        return []
    until = next((at for at in changes if at > rows[0]["iteration"]), None)
    kept = [row for row in rows[1 : MAX_ITERATIONS + 1] if until is None or row["iteration"] < until]
    return kept


def _latest_ones(rows: Sequence[Row], changes: Sequence[int]) -> list[Row]:
    """Return the iterations of a plan since the last change: something became slow, or healthy again."""
    if not rows:
        return []
    since = max((at for at in changes if at <= rows[-1]["iteration"]), default=0)
    return [row for row in rows[1:] if row["iteration"] >= since][-MAX_ITERATIONS:]


def rates(rows: Sequence[Row]) -> list[float]:
    """Return the seconds per token."""
    return [row["seconds"] / row["tokens"] for row in rows if row["seconds"] and row["tokens"]]


def ratio(after: Sequence[float], before: Sequence[float]) -> tuple[float | None, float]:
    """Return the ratio of the medians, and its relative standard error; (None, 0) if there are too few values."""
    if min(len(after), len(before)) < MIN_ITERATIONS:
        return None, 0.0
    return statistics.median(after) / statistics.median(before), math.hypot(_error(after), _error(before))


def _error(rates: Sequence[float]) -> float:
    """Return the relative standard error of the median, for normal noise with the observed quartiles."""
    low, middle, high = statistics.quantiles(rates, n=4, method="inclusive")
    return 1.2533 * (high - low) / 1.349 / middle / math.sqrt(len(rates))


def _verdict(promised: float | None, kept: float | None, error: float) -> str:
    if promised is None:
        return "promised nothing"
    if kept is None:
        return "too short to tell"
    excess = kept / promised - 1.0
    if excess <= PROMISE_TOLERANCE:
        return "kept"
    return "broken" if excess > PROMISE_TOLERANCE + 2.0 * error * kept / promised else "too short to tell"
