"""A job's main figures, as `resihp status` shows them, from its rows. Pure; reads nothing.

Decides nothing: `cost_accounts` defines the figures. Called by `accounts`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import datetime

from resihp.db.reading.costs.cost_accounts import Row
from resihp.db.reading.costs.goodput import course, interruptions
from resihp.db.reading.costs.iteration_shares import work_by_iteration
from resihp.db.reading.costs.stored_accounts import (
    stored_account,
)
from resihp.db.reading.costs.timeline import (
    ITERATION_SHARES,
)

RECENT_ITERATIONS = 20
"""Number of recent iterations from which the usual time of an iteration is computed."""


def summarise(
    job: Row,
    iterations: Sequence[Row],
    failures: Sequence[Row],
    reconfigurations: Sequence[Row],
    plans: Sequence[Row],
    now: datetime,
) -> Row:
    """Return the main figures of a job from its rows. Times and shares are as in `cost_accounts.between`, with two
    exceptions: `useful_seconds` includes slow iterations (`slow_seconds` of it exceed the healthy time), and
    `lost_seconds` is by the kind of the failure that interrupted training, plus `idle` and `capacity`. For a job that
    is over, the stored account is used, because its rows may have been thinned."""
    clock = course(job, iterations, plans, now)
    if (stored := stored_account(job)) is not None:
        unused, wall_s, useful_s, goodput, ettr = (
            stored.lost_s,
            stored.wall_s,
            stored.committed_s,
            stored.goodput,
            stored.ettr,
        )
    else:
        work = work_by_iteration(job, clock, iterations, failures, plans).sum(axis=0).tolist()
        unused, wall_s = dict(zip(ITERATION_SHARES, work, strict=True)), clock.wall_s
        useful_s = max(clock.committed_s - unused["idle"] - unused["capacity"], 0.0)
        goodput, ettr = clock.shares_of(useful_s)
    lost_s = {cause: unused[cause] for cause in ("idle", "capacity") if unused[cause] > 0.0}
    for interruption in interruptions(job, clock, failures, reconfigurations):
        lost_s[interruption.kind] = lost_s.get(interruption.kind, 0.0) + interruption.lost_s
    lost_s["other"] = max(wall_s - useful_s - sum(lost_s.values()), 0.0)
    last = iterations[-1] if iterations else None
    recent = [row["seconds"] for row in iterations[-RECENT_ITERATIONS:] if row["seconds"] is not None]
    return {
        "job": job["name"],
        "host": job["host"],
        "owner": job["owner"],
        "state": job["state"],
        "exit_code": job["exit_code"],
        "reason": job["reason"],
        "started_at": job["started_at"],
        "ended_at": job["ended_at"],
        "epoch": plans[-1]["epoch"] if plans else None,
        "iteration": last["iteration"] if last else 0,
        "loss": last["loss"] if last else None,
        "committed_iterations": last["iteration"] - iterations[0]["iteration"] + 1 if last else 0,
        "iteration_seconds": statistics.median(recent) if recent else None,
        "failures": len(failures),
        "useful_seconds": useful_s,
        "slow_seconds": unused.get("slow", 0.0),
        "wall_seconds": wall_s,
        "goodput": goodput,
        "ettr": ettr,
        "lost_seconds": lost_s,
    }
